"""Hostile grammars: each is refused or compiled within 5 s and 512 MB, and none ends the process.

They run in a process of their own, so that a crash of a library is seen. CI runs every seventh of the small
ones; `pytest tests/security/test_grammar_bombs.py -m slow` runs all, and 20,000 different schemas.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.grammar_bombs import BOMBS, KNOWN_FAULTS

ROOT = Path(__file__).parents[2]


def run(*arguments: str, seconds: float) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "tests.security.grammar_bombs", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(results: list[dict[str, object]]) -> None:
    worst = [one for one in results if one["seconds"] > 5 or one["megabytes"] > 512]  # type: ignore[operator]
    assert not worst
    assert {one["outcome"] for one in results} <= {"compiled", "refused"}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_hostile_grammars(backend):
    results = run(backend, "7", seconds=280)
    check(results)
    assert len(results) == len(BOMBS[::7])
    assert {one["outcome"] for one in results} == {"compiled", "refused"}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_known_faults_of_grammar_libraries(backend):
    results = run(backend, "known", seconds=280)
    check(results)
    assert {one["name"] for one in results} == set(KNOWN_FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_all_hostile_grammars(backend):
    assert len(BOMBS) >= 300
    check(run(backend, "1", seconds=1500))


@pytest.mark.slow
def test_20000_different_schemas():
    (result,) = run("unique", "20000", seconds=1500)
    assert result["megabytes"] < 512  # type: ignore[operator]
    assert result["cached"] < 20000  # type: ignore[operator]
