"""A file is written whole or not at all, whatever is in its place and whoever writes it at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest

from descant.core import atomic_file
from descant.core.atomic_file import (
    require_writable,
    write_bytes,
    write_files,
    write_text,
)

PART = f".file.{'0' * 32}.descant-part"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_written_and_written_again(file: Path) -> None:
    for text in ("one", "two", "é"):
        write_text(file, text)
        assert file.read_text(encoding="utf-8") == text
        assert os.listdir(file.parent) == ["file"]


def test_a_failing_rename_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(file, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(file.parent) == ["file"]


def test_permissions(file: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(file, "new")
        assert mode(file) == 0o640
        file.chmod(0o604)
        write_text(file, "kept")
        assert mode(file) == 0o604
        write_text(file, "secret", private=True)
        assert mode(file) == 0o600
        write_text(file.with_name("other"), "secret", private=True)
        assert mode(file.with_name("other")) == 0o600
    finally:
        os.umask(before)


def test_a_read_only_file_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(file, "old")
    monkeypatch.setattr(os, "access", lambda path, how: how != os.W_OK)  # the superuser may do anything
    with pytest.raises(PermissionError):
        write_text(file, "new")
    assert file.read_text() == "old"


def test_a_new_name_is_not_taken_twice(file: Path) -> None:
    write_bytes(file, b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        write_bytes(file, b"second", exclusive=True)
    assert file.read_bytes() == b"first"
    link = file.with_name("link")
    link.symlink_to("nothing")
    with pytest.raises(FileExistsError):
        write_bytes(link, b"second", exclusive=True)
    assert sorted(os.listdir(file.parent)) == ["file", "link"]


def test_a_link_stays_and_its_file_is_replaced(file: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file.symlink_to("there/real")
    for text in ("one", "two"):
        write_text(file, text)
        assert file.is_symlink()
        assert (tmp_path / "there" / "real").read_text() == text
    assert os.listdir(tmp_path / "there") == ["real"]


def test_a_link_at_a_temporary_name_is_not_followed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("safe")
    (tmp_path / PART).symlink_to("victim")
    numbers = iter(["0" * 32, "1" * 32, "2" * 32])
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda _: next(numbers))
    write_text(file.with_name("other"), "x")
    with contextlib.suppress(FileExistsError):
        write_text(file, "x")
    assert victim.read_text() == "safe"


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "said")
    reader.join()
    assert found == ["said"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_text("/dev/null", "gone")


def test_what_dead_writers_left_is_removed(file: Path, tmp_path: Path) -> None:
    (tmp_path / PART).write_text("torn")
    other = tmp_path / f".another.{'0' * 32}.descant-part"
    other.write_text("of another file")
    write_text(file, "new")
    assert sorted(os.listdir(tmp_path)) == [other.name, "file"]


def test_what_another_writer_is_writing_stays(file: Path, tmp_path: Path) -> None:
    (tmp_path / PART).write_text("half")
    with (tmp_path / PART).open("rb") as pending:
        atomic_file.lock_file(pending.fileno())
        write_text(file, "mine")
        assert (tmp_path / PART).exists()
    write_text(file, "mine")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("removed", [False, True])
def test_a_new_file_that_another_writer_takes_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    lock, held = atomic_file.lock_file, []

    def late_lock(descriptor: int) -> bool | None:
        if not held:
            (part,) = tmp_path.iterdir()
            held.append(os.open(part, os.O_RDONLY))
            assert lock(held[0])
            if removed:
                part.unlink()
                os.close(held[0])
        return lock(descriptor)

    monkeypatch.setattr(atomic_file, "lock_file", late_lock)
    write_text(tmp_path / "file", "new")
    if not removed:
        os.close(held[0])
    assert (tmp_path / "file").read_text() == "new"
    atomic_file.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def _write_often(path: str, text: str, times: int) -> None:
    for _ in range(times):
        write_text(path, text * 1000)


def test_two_writers_of_one_file(file: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(str(file), text, 40)) for text in "ab"]
    for writer in writers:
        writer.start()
    _write_often(str(file), "c", 40)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert file.read_text() in {text * 1000 for text in "abc"}
    assert os.listdir(file.parent) == ["file"]


def test_a_check_creates_nothing(file: Path, tmp_path: Path) -> None:
    require_writable(file)
    assert os.listdir(tmp_path) == []
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "missing" / "file")
    for path in (tmp_path, tmp_path / "missing" / "file", link):
        with pytest.raises(OSError, match=r"directory"):
            require_writable(path)


def test_files_that_belong_together(tmp_path: Path) -> None:
    write_files(tmp_path, {"one": b"1", "two": b"2"})
    write_files(tmp_path, {"one": b"3", "two": b"4"}, private=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"one": b"3", "two": b"4"}
    assert {mode(path) for path in tmp_path.iterdir()} == {0o600}


def test_write_new_leaves_leftovers_to_one_sweep(tmp_path, monkeypatch):
    left = tmp_path / f".one.{'a' * 32}.descant-part"
    left.write_bytes(b"torn")
    for data in (b"first", b"second"):  # a new name, and one that is taken
        atomic_file.write_new(tmp_path / "one", data)
        assert (tmp_path / "one").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "one"]
    atomic_file.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]

    def fail(_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(atomic_file, "_flush", fail)
    with pytest.raises(OSError, match="the disk is full"):
        atomic_file.write_new(tmp_path / "one", b"third")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"one": b"second"}
