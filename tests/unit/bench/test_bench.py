"""The benchmark runs, its implementations give the same tokens, and its columns are correct."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bench import compare, implementations, table
from bench.__main__ import main
from bench.baseline_loop import decode
from bench.case import CASES, Case, Prompts
from bench.models import SUBJECTS
from bench.peak import Peak

NEW = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return SUBJECTS["tiny"].model()


@pytest.fixture
def verbosity() -> Iterator[None]:
    """Restores the log level that main() changes."""
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


def results_by_name(model: Any, case: str) -> dict[str, compare.Result]:
    return {one.implementation: one for one in compare.run(model, "tiny", CASES[case], NEW, repeats=2)}


@pytest.mark.parametrize("case", ["greedy-1", "greedy-16"])
def test_all_three_implementations_give_the_same_greedy_tokens(model: Any, case: str) -> None:
    results = results_by_name(model, case)
    assert list(results) == ["baseline", "descant", "transformers"]
    assert [one.same for one in results.values()] == [True] * 3
    assert {one.forwards for one in results.values()} == {NEW}
    batch = len(CASES[case].lengths)
    assert {one.fed for one in results.values()} == {batch * (32 + NEW - 1)}


def test_the_baseline_loop_reads_its_cache(model: Any) -> None:
    ids = CASES["greedy-1"].prompts(1000).ids
    tokens = decode(model, ids, NEW)
    for new in range(NEW):
        with torch.no_grad():
            whole = model(input_ids=torch.cat((ids, tokens[:, :new]), 1)).logits
        assert whole[0, -1].argmax() == tokens[0, new]


def patch_last_token(monkeypatch: pytest.MonkeyPatch, implementation: str, token: int) -> None:
    """Make an implementation write `token` at the end of its first row."""
    original = implementations.IMPLEMENTATIONS[implementation]

    def wrong(model: Any, case: Case, prompts: Prompts, new: int) -> Tensor:
        tokens = original(model, case, prompts, new)
        tokens[0, -1] = token
        return tokens

    monkeypatch.setitem(implementations.IMPLEMENTATIONS, implementation, wrong)


def test_different_tokens_are_reported(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_last_token(monkeypatch, "descant", 0)
    results = results_by_name(model, "greedy-16")
    assert [one.same for one in results.values()] == [True, False, True]
    assert "OTHER" in list(table.lines(list(results.values())))[1]


def test_ratios_are_taken_repeat_by_repeat(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Times fall from repeat to repeat; only the ratio within a repeat is constant.
    remaining = {"baseline": [8.0, 4.0, 2.0], "descant": [12.0, 6.0, 3.0], "transformers": [16.0, 8.0, 4.0]}
    turns: list[str] = []

    def timed(implementation: str, *_: Any) -> float:
        turns.append(implementation)
        return remaining[implementation].pop(0)

    monkeypatch.setattr(compare, "_time_run", timed)
    results = {
        one.implementation: one for one in compare.run(model, "tiny", CASES["greedy-1"], NEW, repeats=3)
    }
    assert turns[:6] == ["baseline", "descant", "transformers", "descant", "transformers", "baseline"]
    ours = results["descant"]
    assert (ours.ratio, ours.low, ours.high, ours.best) == (1.5, 1.5, 1.5, 1.5)
    assert ours.step == pytest.approx(6.0 / NEW * 1e3)
    assert ours.overhead == pytest.approx(2.0 / NEW * 1e3)
    assert ours.speedup == pytest.approx(4 / 3)
    assert results["transformers"].ratio == 2.0


@pytest.mark.usefixtures("verbosity")
def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    options = ["--quick", "--model", "tiny", "--case", "greedy-1", "--repeats", "2", "--json", str(file)]
    assert main(options) == 0
    head, rule, *body = capsys.readouterr().out.splitlines()
    assert set(rule) == {"-"}
    for name in (
        "x baseline",
        "quartiles",
        "best",
        "ms/step",
        "overhead ms",
        "speedup",
        "peak MB",
        "forwards",
        "fed",
        "tokens",
    ):
        assert name in head
    assert [line.split()[:3] for line in body] == [
        ["tiny", "greedy-1", implementation] for implementation in ("baseline", "descant", "transformers")
    ]
    document = json.loads(file.read_text())
    assert document["about"]["threads"] == 1
    bare, ours, theirs = document["results"]
    assert set(bare) == set(compare.Result.__dataclass_fields__)
    assert (bare["ratio"], bare["overhead"], theirs["speedup"]) == (1.0, 0.0, 1.0)
    assert all(one["step"] > 0 and one["repeats"] == 2 for one in (bare, ours, theirs))
    assert ours["low"] <= ours["ratio"] <= ours["high"]


def test_the_peak_is_that_of_the_time_inside() -> None:
    size = 64 * 2**20
    with Peak() as outer:
        block = torch.ones(size // 4)
        del block
    if outer.bytes is None:
        pytest.skip("this system keeps no high-water mark")
    assert size * 0.9 < outer.bytes < size * 1.5
    with Peak() as quiet:
        pass
    assert quiet.bytes is not None
    assert quiet.bytes < size * 0.1
