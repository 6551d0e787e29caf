"""A job that is killed at random moments and resumed has the bytes of a run that nobody disturbed."""

from __future__ import annotations

import json

import pytest

from tests.support.forkserver import ForkServer
from tools.docs import doc_blocks


@pytest.mark.parametrize(
    ("kills", "rows"), [(3, 60), pytest.param(100, 2000, marks=pytest.mark.slow)], ids=["small", "full"]
)
def test_every_row_is_there_once_with_the_same_bytes(fork_server: ForkServer, kills: int, rows: int) -> None:
    arguments = ["-m", "tools.job_battery", "--kills", str(kills), "--rows", str(rows)]
    done = fork_server.run(arguments, folder=doc_blocks.ROOT, timeout=7200)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (sum(figures["kills"].values()), figures["torn"], figures["rows_once"]) == (kills, 0, True)
    assert figures["completions"] >= 1


@pytest.mark.slow
def test_workers_and_their_driver_are_killed(fork_server: ForkServer) -> None:
    arguments = ["-m", "tools.job_battery", "--workers", "2", "--kills", "30", "--rows", "600"]
    done = fork_server.run(arguments, folder=doc_blocks.ROOT, timeout=7200)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (sum(figures["kills"].values()), figures["torn"], figures["rows_once"]) == (30, 0, True)
    assert min(figures["kills"].values()) >= 1
