"""A writer killed at any moment leaves the old file whole or the new one; the next write removes the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer

FOLDER = Path(__file__).parent
KILLS = [2, pytest.param(60, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kills", KILLS)
def test_every_file_is_old_or_new(fork_server: ForkServer, tmp_path: Path, kills: int) -> None:
    done = fork_server.run([FOLDER / "writers.py", str(tmp_path), str(kills)], timeout=1800)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 14
    for result in results:
        assert (result["kills"], result["torn"], result["private"]) == (kills, 0, True), result
        assert result["left"] <= kills * (2 if result["kind"] in ("detector", "hub listing") else 1), result


@pytest.mark.parametrize("kills", KILLS)
def test_a_run_over_many_lines_goes_on(fork_server: ForkServer, tmp_path: Path, kills: int) -> None:
    done = fork_server.run([FOLDER / "jsonl_runs.py", str(tmp_path), str(kills)], timeout=1800)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["codes"] == [0, 0]
    assert result["same"]
    assert result["torn"] == 0
    assert result["rows"] == sorted(result["rows"])
    assert result["killed"] >= kills // 2
