"""Five thousand corrupt files: each is read, or refused by name, soon and in little memory."""

from __future__ import annotations

import mmap
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from descant.api.prefill import load_cache
from descant.errors import DescantError, MissingRequirements
from tests.security.clock import spent
from tests.security.subjects import SUBJECTS, Subject

SECONDS, BYTES = 2.0, 50 * 10**6
_LINUX = sys.platform == "linux"


def test_they_are_five_thousand() -> None:
    assert sum(one.count for one in SUBJECTS.values()) >= 5000


# ------------------------------------------------------------------------ what a process takes
def held() -> int:
    """How many bytes this process holds in memory."""
    if _LINUX:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize()
    return highest()


def highest() -> int:
    """The most that it has held since `begin`, or at all where nothing can be reset."""
    if _LINUX:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def begin() -> int:
    """Forget the highest; how much is held now."""
    if _LINUX:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return held()


# ------------------------------------------------------------------------ one kind of file after another
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "it"
    made.mkdir()
    return made


def refusal(subject: Subject, folder: Path, what: str) -> str | None:
    """The error text if the file was refused by name; None if it was read."""
    try:
        subject.read(folder)
    except MissingRequirements as error:  # which tells one requirement a line, as documented
        return str(error).replace("\n", " ")
    except DescantError as error:
        return str(error)
    except BaseException as error:
        error.add_note(what)
        raise
    return None


def timed(subject: Subject, folder: Path, what: str) -> tuple[str | None, float]:
    """A refusal and its CPU seconds, which a file costs each time; a module is imported only once."""
    with spent() as seconds:
        said = refusal(subject, folder, what)
    return said, seconds[0]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_corrupt_file_is_refused_by_name(name: str, folder: Path) -> None:
    subject = SUBJECTS[name]
    subject.make(folder)
    file, lock = folder / subject.file, folder.with_name("it.lock")
    good = file.read_bytes()
    subject.read(folder)  # and everything is imported
    refused, before = 0, held()
    for number in range(subject.count):
        chance = random.Random(f"{name} {number}")
        mutation = chance.choice(subject.mutations)
        file.write_bytes(mutation(chance, good))
        lock.unlink(missing_ok=True)
        what = f"{name} {number} ({mutation.__name__})"
        memory = begin()
        said, seconds = timed(subject, folder, what)
        assert highest() - memory < BYTES, what
        if seconds >= SECONDS:
            lock.unlink(missing_ok=True)
            _, seconds = timed(subject, folder, what)
        assert seconds < SECONDS, what
        assert said is None or ("\n" not in said and len(said) < 2000), what
        refused += said is not None
    assert held() - before < BYTES
    assert subject.count // 20 < refused  # the mutations reach what is checked
    file.write_bytes(good)
    lock.unlink(missing_ok=True)
    subject.read(folder)


# ------------------------------------------------------------------------ these measures measure
def test_the_measures_see_time_and_memory() -> None:
    memory = begin()
    # Mapped, not allocated: an allocator may reuse pages that the process holds already.
    with mmap.mmap(-1, 2 * BYTES) as many:
        for at in range(0, len(many), 4096):
            many[at] = 1
        assert held() - memory > BYTES
    assert highest() - memory > BYTES
    with spent() as seconds:
        sum(range(10**6))
    assert seconds[0] > 0


def test_a_corrupt_cache_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"\xff" * 64)
    with pytest.raises(DescantError, match=r"must be a cache that save\(\) wrote"):
        load_cache(tmp_path / "cache")


# ------------------------------------------------------------------------ what mutations seldom hit
def _assert_refused(read: Callable[[Path], Any], folder: Path, words: str) -> None:
    memory = begin()
    with pytest.raises(DescantError, match=words):
        read(folder)
    assert highest() - memory < BYTES


@pytest.mark.parametrize(
    "name", ["generation config", "old config", "watermark keys", "lock", "model's config"]
)
def test_what_is_read_is_bounded(name: str, folder: Path) -> None:
    """A large sparse file, which takes no disk space."""
    subject = SUBJECTS[name]
    subject.make(folder)
    with (folder / subject.file).open("r+b") as file:
        file.truncate(2**31)
    _assert_refused(subject.read, folder, "bytes|large")


def test_a_name_that_stands_twice_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": 3, "top_k": 4}', encoding="utf-8")
    _assert_refused(SUBJECTS["generation config"].read, folder, "twice")
    (folder / "generation_config.json").write_text('{"a": {"b": 1, "b": 2}}', encoding="utf-8")
    _assert_refused(SUBJECTS["generation config"].read, folder, "twice")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_does_not_know_is_refused(number: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(f'{{"house": [{number}]}}', encoding="utf-8")
    _assert_refused(SUBJECTS["generation config"].read, folder, "is not valid JSON")


def test_a_detector_with_none_numbers_is_refused(folder: Path) -> None:
    subject = SUBJECTS["detector"]
    subject.make(folder)
    tensors = safetensors.torch.load_file(folder / subject.file)
    tensors["prior"].fill_(float("nan"))
    safetensors.torch.save_file(tensors, folder / subject.file, {"format": "pt"})
    _assert_refused(subject.read, folder, "weights that are not finite")


def test_a_config_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").symlink_to(folder / "generation_config.json")
    _assert_refused(SUBJECTS["generation config"].read, folder, "generation_config.json")
