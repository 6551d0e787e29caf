"""The log of a group's attempts: which rows a new worker runs alone, and which it gives up."""

from __future__ import annotations

import os
from pathlib import Path

from descant.jobs.shards import ATTEMPTS_FOLDER
from descant.jobs.workers.job_worker import AttemptLog


def end_worker(log: AttemptLog) -> None:
    """Leave a log as a killed process does."""
    assert log._file is not None
    os.close(log._file)
    log._file = None


def test_rows_that_were_running_are_suspect(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, 3, "a")
    assert not log.open().suspects
    for row in (30, 31, 32):
        log.begin(row)
    log.end(31)
    end_worker(log)
    found = AttemptLog(tmp_path, 3, "a").open()
    assert (found.suspects, found.tries, found.unexplained) == ({30, 32}, {}, 0)
    assert [found.is_suspect(row) for row in (30, 31)] == [True, False]


def test_a_row_that_ends_two_workers_alone_has_failed(tmp_path: Path) -> None:
    for tries in range(3):
        log = AttemptLog(tmp_path, 0, "a")
        found = log.open()
        assert found.tries.get(7, 0) == tries
        assert found.has_failed(7) == (tries == 2)
        log.begin(6, alone=True)
        log.end(6)
        log.begin(7, alone=True)
        end_worker(log)
    assert not found.has_failed(6)


def test_after_two_unexplained_ends_every_row_is_suspect(tmp_path: Path) -> None:
    for count in range(3):
        log = AttemptLog(tmp_path, 0, "a")
        found = log.open()
        assert found.unexplained == count
        assert found.is_suspect(99) == (count == 2)
        log.begin(1)
        log.end(1)
        end_worker(log)


def test_another_run_and_a_torn_line_count_for_nothing(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, 0, "a")
    log.open()
    log.begin(5)
    log._add("+1")  # killed in the middle of "+12"
    end_worker(log)
    again = AttemptLog(tmp_path, 0, "a")
    assert again.open().suspects <= {5, 1}
    end_worker(again)
    other = AttemptLog(tmp_path, 0, "b")
    assert not other.open().suspects
    other.close(is_complete=True)
    assert not list((tmp_path / ATTEMPTS_FOLDER).iterdir())
    (tmp_path / ATTEMPTS_FOLDER / "group-00000.log").write_bytes(b"\xff\xfe")
    assert not AttemptLog(tmp_path, 0, "a").open().suspects


def test_without_a_run_nothing_is_written(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, 0, None)
    assert not log.open().suspects
    log.begin(1)
    log.end(1)
    log.close(is_complete=True)
    assert not list(tmp_path.iterdir())
