"""The log of a group's attempts: which rows a new worker runs alone, and which it gives up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from descant.jobs.shards import ATTEMPTS_FOLDER
from descant.jobs.workers.job_worker import AttemptLog


def attempt(folder: Path, lines: str, run: str = "a") -> None:
    """Begin and end rows as `+1 !2 -1`, and end as a killed process does."""
    log = AttemptLog(folder, 3, run)
    log.open()
    for line in lines.split():
        row = int(line[1:])
        if line[0] == "-":
            log.end(row)
        else:
            log.begin(row, alone=line[0] == "!")
    assert log._file is not None
    os.close(log._file)
    log._file = None


@pytest.mark.parametrize(
    ("attempts", "suspects", "tries", "unexplained"),
    [
        ([], set(), {}, 0),
        (["+30 +31 +32 -31"], {30, 32}, {}, 0),
        (["!6 -6 !7"], {7}, {7: 1}, 0),
        (["!6 -6 !7", "!6 -6 !7"], {7}, {7: 2}, 0),
        (["+1 -1"], set(), {}, 1),
        (["+1 -1", ""], set(), {}, 2),
    ],
)
def test_rows_that_were_running_are_suspect(
    tmp_path: Path, attempts: list[str], suspects: set[int], tries: dict[int, int], unexplained: int
) -> None:
    for lines in attempts:
        attempt(tmp_path, lines)
    found = AttemptLog(tmp_path, 3, "a").open()
    assert (found.suspects, found.tries, found.unexplained) == (suspects, tries, unexplained)
    assert found.has_failed(7) == (tries.get(7) == 2)
    assert not found.has_failed(6)
    assert [found.is_suspect(row) for row in (*suspects, 99)] == [True] * len(suspects) + [unexplained == 2]


def test_another_run_and_a_torn_line_count_for_nothing(tmp_path: Path) -> None:
    attempt(tmp_path, "+5")
    path = tmp_path / ATTEMPTS_FOLDER / "group-00003.log"
    path.write_bytes(path.read_bytes() + b"+1")  # killed in the middle of "+12"
    assert AttemptLog(tmp_path, 3, "a").open().suspects <= {5, 1}
    other = AttemptLog(tmp_path, 3, "b")
    assert not other.open().suspects
    other.close(is_complete=True)
    assert not list((tmp_path / ATTEMPTS_FOLDER).iterdir())
    path.write_bytes(b"\xff\xfe")
    assert not AttemptLog(tmp_path, 3, "a").open().suspects


def test_without_a_run_nothing_is_written(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, 0, None)
    assert not log.open().suspects
    log.begin(1)
    log.end(1)
    log.close(is_complete=True)
    assert not list(tmp_path.iterdir())
