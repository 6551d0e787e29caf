"""`descant generate --out`: a WAV file holds the sound that the call in Python gives."""

from __future__ import annotations

import json
import wave
from array import array
from pathlib import Path

import pytest
import torch

import descant as package
from descant.cli.output import wav_bytes
from descant.models.loading import loading
from tests.support.sound_folders import FOLDERS, higgs_sound_model

PROMPT = "the last station"
OPTIONS = ("--do-sample", "--seed", 3, "--max-new-tokens", 24)
PARAMETERS = {"do_sample": True, "seed": 3, "max_new_tokens": 24}
PROCESSORS = ("dia", "pocket")  # with a codec of their own
CODEC_RATES = {"dia": 800, "pocket": 800, "gradium": 800}  # of the others: 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each kind, made when it is used."""
    made = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("sound")
            FOLDERS[kind](made[kind])
        return made[kind]

    return folder


def read(path: Path) -> tuple[int, torch.Tensor]:
    """The sampling rate and the levels [channels, T] of a file of 16-bit samples."""
    with wave.open(str(path), "rb") as file:
        assert (file.getsampwidth(), file.getcomptype()) == (2, "NONE")
        levels = torch.tensor(array("h", file.readframes(file.getnframes())).tolist())
        return file.getframerate(), levels.view(-1, file.getnchannels()).T


def expected_sound(kind: str, folder: Path) -> torch.Tensor:
    """The samples [channels, T] of the same call in Python, by transformers' own classes."""
    model = loading.load_sound(str(folder))
    if kind in ("pocket", "gradium"):
        message = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = model.processor.apply_chat_template(message, **options)
        return model.processor.decode(package.generate(model.network, **inputs, **PARAMETERS)[0])[None]
    inputs = model.processor(text=[PROMPT], return_tensors="pt")
    if kind == "dia":
        return model.processor.decode(package.generate(model.network, **inputs, **PARAMETERS))[None]
    if kind == "csm":
        return package.generate(model.network, **inputs, **PARAMETERS, output_audio=True)[0].view(1, -1)
    return package.generate(model.network, **inputs, **PARAMETERS)[0]


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.filterwarnings("ignore:`max_length` is ignored")
def test_the_file_has_the_sound_of_the_call(descant, folders, tmp_path, kind):
    path = tmp_path / "tune.wav"
    result = descant("generate", folders(kind), PROMPT, "--out", path, *OPTIONS)
    assert (result.exit_code, result.stderr) == (0, "")
    expected = expected_sound(kind, folders(kind)).detach()
    rate, levels = read(path)
    channels = "stereo" if kind == "musicgen stereo" else "mono"
    assert rate == CODEC_RATES.get(kind, 400)
    assert len(expected) == (2 if channels == "stereo" else 1)
    assert levels.shape == expected.shape
    assert levels.shape[1] > 10
    assert (levels / 32767 - expected.clamp(-1, 1)).abs().max() <= 0.5001 / 32767
    assert levels.float().std() > 0  # no silence
    seconds = f"{levels.shape[1] / rate:.2f}"
    assert result.stdout == f"{path}: {seconds} s of sound, {rate} Hz, {channels}\n"


def test_samples_are_clipped_and_rounded(tmp_path):
    samples = torch.tensor([[0.0, 1.0, -1.0, 1.5, -7.0, 0.5], [0.25, 1e-9, -0.25, 0.0, 1.00001, -0.5]])
    (tmp_path / "clipped.wav").write_bytes(wav_bytes(samples, 8000))
    rate, levels = read(tmp_path / "clipped.wav")
    assert rate == 8000
    assert levels.tolist() == [
        [0, 32767, -32767, 32767, -32767, 16384],
        [8192, 0, -8192, 0, 32767, -16384],
    ]


def test_a_prompt_of_standard_input_and_the_default_length(descant, folders, tmp_path):
    path = tmp_path / "tune.wav"
    result = descant("generate", folders("musicgen"), "-", "--out", path, input=PROMPT + "\n")
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert result.stderr == "generated with the default of 20 new tokens: set --max-new-tokens\n"
    by_length = ("--max-new-tokens", 20, "--out", tmp_path / "other.wav")
    descant("generate", folders("musicgen"), PROMPT, *by_length)
    assert path.read_bytes() == (tmp_path / "other.wav").read_bytes()


def test_a_file_is_replaced_only_with_overwrite(descant, folders, tmp_path):
    path = tmp_path / "tune.wav"
    path.write_bytes(b"precious")
    result = descant("generate", folders("musicgen"), PROMPT, "--out", path, *OPTIONS)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--out must be a new file" in result.stderr
    assert "give --overwrite to replace it" in result.stderr
    assert path.read_bytes() == b"precious"
    assert (
        descant("generate", folders("musicgen"), PROMPT, "--out", path, "--overwrite", *OPTIONS).exit_code
        == 0
    )
    assert read(path)[0] == 400
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chat",), "--chat has no use with --out, which writes sound, got True: leave it out"),
        (("--output", "-"), "--output has no use with --out"),
        (("--trace", "run.jsonl"), "--trace has no use with --out"),
        (("--regex", "a+"), "--regex has no use with --out"),
        (("--choice", "a"), "--choice has no use with --out"),
        (("--assistant-model", "other"), "--assistant-model has no use with --out"),
        (("--recipe", "bayes-risk"), "--recipe has no use with --out"),
        (("--watermark", "key.json"), "--watermark has no use with --out"),
        (("--num-return-sequences", 2, "--do-sample"), "--num-return-sequences must be 1 for one WAV file"),
        (("--num-beams", 2), "--num-beams needs rows that move alone"),
        (("--stop-strings", "x"), "--stop-strings needs the text of tokens"),
        (("--logprobs", 2), "--logprobs is not supported for codebooks"),
        (("--top-k", 5), "--top-k has no use while --do-sample is False"),
        (("--out", "tune.mp3"), "--out must be a file whose name ends with .wav, got 'tune.mp3'"),
        (("--out", "nowhere/tune.wav"), "--out must be a file that can be opened (No such file"),
    ],
)
def test_what_is_for_text_is_refused_by_name(descant, folders, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = descant("generate", folders("musicgen"), PROMPT, "--out", "tune.wav", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_text_and_sound_are_told_apart(descant, folders, stories, tmp_path):
    result = descant("generate", stories, PROMPT, "--out", tmp_path / "tune.wav")
    assert result.exit_code == 2
    assert "MODEL must be a model of sound for --out (csm, dia, " in result.stderr
    assert "and not llama" in result.stderr
    for command in (("generate", folders("musicgen"), PROMPT), ("chat", folders("musicgen"))):
        result = descant(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "is a model of sound (MusicgenForConditionalGeneration), and gives no text" in result.stderr
        assert "use `descant generate` with --out FILE.wav" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_processor_without_its_codec_is_refused(descant, folders, tmp_path, kind):
    copied = tmp_path / "model"
    copied.mkdir()
    for file in folders(kind).iterdir():
        (copied / file.name).symlink_to(file)
    config = json.loads((copied / "processor_config.json").read_text())
    codec = config.pop("audio_tokenizer")
    (copied / "processor_config.json").unlink()
    for changed, message in (
        (config, f"names no {codec['audio_tokenizer_class']} in the config of its processor"),
        ({**config, "audio_tokenizer": {**codec, "audio_tokenizer_class": "BertModel"}}, "names no "),
        (
            {**config, "audio_tokenizer": {**codec, "audio_tokenizer_name_or_path": str(tmp_path / "empty")}},
            "must be a folder that exists",
        ),
    ):
        (copied / "processor_config.json").write_text(json.dumps(changed))
        result = descant("generate", copied, PROMPT, "--out", tmp_path / "tune.wav", *OPTIONS)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not (tmp_path / "tune.wav").exists()


def test_a_codec_in_pickled_weights_is_not_opened(descant, folders, tmp_path):
    copied, codec = tmp_path / "model", tmp_path / "codec"
    copied.mkdir()
    codec.mkdir()
    for file in folders("dia").iterdir():
        (copied / file.name).symlink_to(file)
    (codec / "config.json").write_text((folders("dia") / "codec" / "config.json").read_text())
    (codec / "pytorch_model.bin").write_bytes(b"pickle")
    config = json.loads((copied / "processor_config.json").read_text())
    config["audio_tokenizer"]["audio_tokenizer_name_or_path"] = str(codec)
    (copied / "processor_config.json").unlink()
    (copied / "processor_config.json").write_text(json.dumps(config))
    result = descant("generate", copied, PROMPT, "--out", tmp_path / "tune.wav", *OPTIONS)
    assert result.exit_code == 2
    assert "in safetensors and not in 'pytorch_model.bin'" in result.stderr


def test_code_of_a_folder_never_runs(descant, folders, tmp_path):
    copied, canary = tmp_path / "model", tmp_path / "canary"
    copied.mkdir()
    for file in folders("dia").iterdir():
        (copied / file.name).symlink_to(file)
    (copied / "own_code.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    code = {"AutoConfig": "own_code.A", "AutoProcessor": "own_code.B", "AutoTokenizer": ["own_code.C", None]}
    for name in ("config.json", "processor_config.json", "tokenizer_config.json"):
        config = json.loads((copied / name).read_text())
        (copied / name).unlink()
        (copied / name).write_text(json.dumps({**config, "auto_map": code}))
    result = descant("generate", copied, PROMPT, "--out", tmp_path / "tune.wav", *OPTIONS)
    assert result.exit_code == 0
    assert not canary.exists()


def test_weights_that_are_missing_are_an_error(descant, folders, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in folders("musicgen").iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    kept = {name: weight for name, weight in weights.items() if not name.startswith("decoder.lm_heads.0")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    result = descant("generate", tmp_path, PROMPT, "--out", tmp_path / "tune.wav", *OPTIONS)
    assert result.exit_code == 2
    assert "lacks 1 of its weights: decoder.lm_heads.0.weight" in result.stderr


def test_too_few_frames_for_the_codec_are_an_error(descant, folders, tmp_path):
    options = ("--out", tmp_path / "tune.wav", "--max-new-tokens", 1)
    result = descant("generate", folders("dia"), PROMPT, *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot decode what was generated" in result.stderr
    assert "set a larger --max-new-tokens" in result.stderr
    assert not list(tmp_path.iterdir())


def test_samples_that_are_not_finite_are_not_written(descant, folders, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in folders("musicgen").iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(weights) if "audio_encoder.decoder.layers" in name and "bias" in name)
    weights[name] = torch.full_like(weights[name], float("nan"))
    (tmp_path / "model.safetensors").unlink()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    result = descant("generate", tmp_path, PROMPT, "--out", tmp_path / "tune.wav", *OPTIONS)
    assert result.exit_code == 2
    assert "gives samples that are not finite" in result.stderr
    assert not (tmp_path / "tune.wav").exists()


def test_higgs_audio_reads_a_message_and_its_processor_decodes():
    model = higgs_sound_model()
    inputs = model.prompt_inputs(PROMPT)
    tokenizer = model.processor.tokenizer
    text = f"Generate audio following instruction. {PROMPT} <|audio_out_bos|>"
    assert inputs["input_ids"].tolist() == tokenizer([text])["input_ids"]
    codes = package.generate(model.network, **inputs, **PARAMETERS)
    samples = model.samples(codes)
    assert model.sampling_rate == 800
    assert samples.shape[0] == 1
    assert samples.shape[1] > 10
    assert torch.equal(samples[0], model.processor.decode(codes))
