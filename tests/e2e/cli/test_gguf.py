"""GGUF files by the command: the tokens of the same model in safetensors, and one error for a broken file."""

from __future__ import annotations

import shutil
import struct
import sys

import pytest
import torch
import transformers

from descant.errors import InputError, MissingExtra
from descant.models.loading import loading
from descant.models.loading.weight_files import GgufFile, GgufHeader, MalformedGguf
from tests.support import pretrained
from tests.support.gguf_writer import write_llama

PROMPT = "Once upon a time"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random llama as safetensors, in float32 and in 8 bits as GGUF."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.folder("stories15m"))
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1,
        eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "safetensors")
    tokenizer.save_pretrained(folder / "safetensors")
    (folder / "f32").mkdir()
    write_llama(folder / "f32" / "tiny.gguf", model, tokenizer)
    write_llama(folder / "tiny-q8.gguf", model, tokenizer, quantized=True)
    return folder


def test_a_file_and_its_folder_are_the_model_in_safetensors(descant, tiny):
    given = (PROMPT, "--max-new-tokens", 12)
    expected = descant("generate", tiny / "safetensors", *given)
    for name in (tiny / "f32" / "tiny.gguf", tiny / "f32"):
        result = descant("generate", name, *given)
        assert (result.exit_code, result.stdout, result.stderr) == (0, expected.stdout, "")


def test_a_quantized_file_has_the_tokens_of_transformers(tiny):
    ours, tokenizer = loading.load(str(tiny / "tiny-q8.gguf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny, gguf_file="tiny-q8.gguf")
    plain = transformers.AutoTokenizer.from_pretrained(tiny / "safetensors")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert ids.tolist() == [plain(PROMPT)["input_ids"]]  # with the BOS token that the file asks for
    import descant as package

    length = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(package.generate(ours, ids, **length), theirs.generate(ids, **length))
    assert ours.dtype == torch.float32


def test_other_commands_read_it_too(descant, tiny):
    assert "end token 2" in descant("explain", tiny / "f32").stdout
    tokenizer, size = loading.load_tokenizer(str(tiny / "tiny-q8.gguf"))
    assert (size, tokenizer(PROMPT)["input_ids"][0]) == (32000, 1)
    half = loading.load(str(tiny / "f32"), "bfloat16")[0]
    assert half.dtype == torch.bfloat16


def test_a_folder_with_several_files_names_them(descant, tiny, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny / "tiny-q8.gguf", tmp_path / name)
    result = descant("generate", tmp_path, PROMPT)
    assert result.exit_code == 2
    assert "MODEL must have one GGUF file, or a config.json, got ['a.gguf', 'b.gguf']" in result.stderr
    assert str(tmp_path / "a.gguf") in result.stderr
    (tmp_path / "config.json").write_text("{}")
    assert GgufFile.find(str(tmp_path)) is None


@pytest.mark.parametrize(
    "name", ["nowhere.gguf", "./a/b/nowhere.gguf", "/nowhere.gguf", "owner/nowhere.gguf"]
)
def test_a_file_that_is_not_there(descant, name):
    result = descant("generate", name, PROMPT)
    assert (result.exit_code, result.stdout) == (2, "")
    must = "error: MODEL must be a GGUF file that exists, or OWNER/NAME/FILE.gguf on the Hub, got "
    assert result.stderr.startswith(must)


def test_a_file_on_the_hub_is_named_by_its_repository(monkeypatch, tiny):
    asked = []
    cached = lambda repository, file: asked.append((repository, file)) or str(tiny / "tiny-q8.gguf")  # noqa: E731
    monkeypatch.setattr("descant.models.loading.weight_files.cached_file", cached)
    found = GgufFile.find("ann/model-GGUF/q8/model.gguf")
    assert asked == [("ann/model-GGUF", "q8/model.gguf")]
    assert found == GgufFile(str(tiny), "tiny-q8.gguf")


def test_without_the_package_the_error_names_the_extra(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"loading tiny-q8\.gguf needs the extra `gguf`: pip install"):
        loading.load(str(tiny / "tiny-q8.gguf"))


def test_an_adapter_beside_it_is_refused(tiny, tmp_path):
    shutil.copy(tiny / "tiny-q8.gguf", tmp_path / "a.gguf")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="must have no adapter in its folder"):
        loading.load(str(tmp_path))


# ------------------------------------------------------------------------ broken files
def header(*, tensors: int = 0, entries: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


BROKEN = {
    "nothing": (b"", "ends inside its header|longer than the file"),
    "another format": (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
    "another version": (header(version=1), "its version is 1"),
    "the other byte order": (header(version=3 << 24), "its version is"),
    "many tensors": (header(tensors=2**60), f"announces {2**60} tensors"),
    "many entries": (header(entries=2**60), f"and {2**60} entries"),
    "a long key": (header(entries=1, rest=struct.pack("<Q", 2**60)), "longer than the file"),
    "a long array": (
        header(entries=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, 2**60)), f"an array of {2**60}"
    ),
    "many arrays": (
        header(entries=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, 2**22)), "longer than the file"
    ),
    "arrays of arrays": (
        header(entries=1, rest=text(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)), "array of the type 9"
    ),
    "an unknown type": (header(entries=1, rest=text(b"a") + struct.pack("<I", 77)), "unknown type 77"),
    "many dimensions": (
        header(tensors=1, rest=text(b"a") + struct.pack("<I", 99)), "a tensor of 99 dimensions"
    ),
    "a tensor beyond the end": (
        header(tensors=1, rest=text(b"a") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)), "its tensors end"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_one_error_before_any_library_reads_it(descant, tmp_path, monkeypatch, case):
    data, reason = BROKEN[case]
    (tmp_path / "bad.gguf").write_bytes(data)
    monkeypatch.setattr("gguf.GGUFReader", None)  # not called
    with pytest.raises(MalformedGguf, match=reason):
        GgufHeader.read(tmp_path / "bad.gguf")
    result = descant("generate", tmp_path / "bad.gguf", PROMPT)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: MODEL must be a GGUF file (")
    assert result.stderr.count("\n") == 1


def test_any_byte_that_changes_gives_a_model_or_one_named_error(descant, tiny, tmp_path):
    data = (tiny / "tiny-q8.gguf").read_bytes()
    for position in (*range(0, 220, 20), *range(300_000, len(data), len(data) // 3)):
        changed = bytearray(data)
        changed[position] ^= 0xFF
        broken = tmp_path / f"bad{position}.gguf"  # a name of its own: models are loaded once by name
        broken.write_bytes(changed)
        result = descant("generate", broken, PROMPT, "--max-new-tokens", 1)
        assert result.exit_code in (0, 1, 2), position
        assert result.exit_code == 0 or result.stderr.startswith("error: "), position
        assert result.stderr.count("\n") <= 1, position


def test_a_file_that_is_cut_is_refused(descant, tiny, tmp_path):
    data = (tiny / "tiny-q8.gguf").read_bytes()
    for length in (0, 3, 20, 1000, len(data) // 2, len(data) - 40_000):
        (tmp_path / f"bad{length}.gguf").write_bytes(data[:length])
        result = descant("generate", tmp_path / f"bad{length}.gguf", PROMPT, "--max-new-tokens", 1)
        assert (result.exit_code, result.stdout) == (2, ""), length
        assert result.stderr.startswith("error: "), length
