"""Source archives are fetched over HTTPS and never run; recordings are checked like models."""

import hashlib
import io
import urllib.error
import urllib.request
import wave
from pathlib import Path

import pytest

from tools.model_recipes import download, speech
from tools.model_recipes.catalogue import RECIPES
from tools.model_recipes.errors import ModelError
from tools.model_recipes.progress import Progress
from tools.model_recipes.recipe import Package

CONTENT = b"a source archive"
PACKAGE = Package("sdist", "some-speech", "1.0", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
PAGE = """<a href="https://files.example/old/some-speech-0.9.tar.gz#sha256=00">some-speech-0.9.tar.gz</a>
<a href="../../files/some-speech-1.0.tar.gz#sha256=11">some-speech-1.0.tar.gz</a>"""


def served(monkeypatch: pytest.MonkeyPatch, pages: dict[str, bytes]) -> list[str]:
    asked: list[str] = []

    def urlopen(address: str, timeout: float) -> io.BytesIO:
        assert timeout > 0
        asked.append(address)
        if address not in pages:
            raise urllib.error.URLError("no such page")
        return io.BytesIO(pages[address])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def fetched(folder: Path) -> Path:
    return download.cached(PACKAGE, folder, Progress("toy", io.StringIO()))


def test_the_index_says_where_the_archive_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple/")
    page, file = (
        "https://mirror.example/simple/some-speech/",
        "https://mirror.example/files/some-speech-1.0.tar.gz",
    )
    asked = served(monkeypatch, {page: PAGE.encode(), file: CONTENT})
    assert fetched(tmp_path).read_bytes() == CONTENT
    assert asked == [page, file]
    assert fetched(tmp_path).name == PACKAGE.file
    assert len(asked) == 2


def test_another_archive_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    page = "https://pypi.org/simple/some-speech/"
    served(monkeypatch, {page: PAGE.encode(), "https://pypi.org/files/some-speech-1.0.tar.gz": b"other"})
    with pytest.raises(ModelError, match="is not the pinned archive"):
        fetched(tmp_path)


def test_a_recording_must_be_whole(tmp_path: Path) -> None:
    def write(name: str, rate: int, samples: int) -> None:
        with wave.open(str(tmp_path / name), "wb") as sound:
            sound.setparams((1, 2, rate, samples, "NONE", "not compressed"))
            sound.writeframes(bytes(2 * samples))

    for name, _, samples in speech.RECORDINGS:
        write(name, 16_000, samples)
    speech.check(RECIPES["speech"], tmp_path)
    for rate, samples in ((8_000, 176_000), (16_000, 1_000)):
        write("jfk.wav", rate, samples)
        with pytest.raises(ModelError, match=r"jfk\.wav must have the form"):
            speech.check(RECIPES["speech"], tmp_path)
