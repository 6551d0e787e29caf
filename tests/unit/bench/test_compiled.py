"""The benchmark of the compiled step runs, and its columns are correct."""

from __future__ import annotations

from typing import Any

import pytest

from bench import compiled
from bench.compiled import Figures
from bench.models import SUBJECTS

SMALL = ["--model", "tiny", "--new", "4", "--prompt", "5", "--prompts", "3", "--backend", "eager"]


def figures(**changes: Any) -> Figures:
    steps = {"dense": [4.0, 6.0, 9.0], "static": [5.0, 5.0, 5.0], "compiled": [2.0, 3.0, 3.0]}
    tokens = {variant: [[1, 2]] for variant in steps}
    return Figures(
        **{"steps": steps, "tokens": tokens, "products": 1.0, "compiling": 9.0, "graphs": 1, **changes}
    )


def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled, "_load_model", lambda name: SUBJECTS[name].model())
    assert compiled.main([*SMALL, "--rows", "1", "--rows", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["model", "rows"]
    assert [line.split()[:2] for line in lines[3:5]] == [["tiny", "1"], ["tiny", "2"]]
    assert all(line.endswith("same") for line in lines[3:5])
    assert lines[5].endswith("3 prompts of different length: 0 recompiled")


def test_the_speedup_is_the_median_over_steps() -> None:
    assert figures().speedup("compiled", "dense") == 2.0
    assert figures().speed("compiled", 6) == 2.0


def test_different_tokens_are_reported() -> None:
    assert figures().same
    assert not figures(tokens={"dense": [[1]], "static": [[1]], "compiled": [[2]]}).same


def test_recompilations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different capacities compile different steps."""
    sizes = iter((200, 300, 600))
    plain = compiled.StepBenchmark._caches

    def caches(benchmark: Any) -> Any:
        benchmark.options.capacity = next(sizes)
        return plain(benchmark)

    monkeypatch.setattr(compiled.StepBenchmark, "_caches", caches)
    options = compiled._options([*SMALL, "--capacity", "200"])
    assert compiled.StepBenchmark(SUBJECTS["tiny"].model(), options).count_recompiles(3) == 3


def test_a_missing_model_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="build it with"):
        compiled.main(["--model", "no-such"])
