"""The benchmark of speculative decoding runs, checks the tokens, and its columns are correct."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from bench import scenarios, speculation
from bench.forward import Forwards
from bench.models import SUBJECTS
from bench.prompts import PROMPTS
from bench.scenarios import Method, Scenario, batches
from bench.speculation import Bench, DecodeStats

SMALL = ["--new", "8", "--repeats", "1", "--prompts", "1", "--guesses", "3", "--layers", "1"]
ALONE = ["none", "transformers none"]
LOOKUP_METHODS = [
    *ALONE,
    "lookup, constant 10",
    "lookup, adaptive",
    "suffix, constant 10",
    "suffix, adaptive",
]


class CharTokenizer:
    """A minimal tokenizer for the benchmark: one token per character."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(one) % 900 for one in text[:30]]}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model replaces every model; the draft model is a copy of the target."""
    model = SUBJECTS["tiny"].model()
    model.generation_config.assistant_confidence_threshold = 0.0  # none of its drafts has a high confidence
    for module in (speculation, scenarios):
        monkeypatch.setattr(module, "load_model", lambda folder: copy.deepcopy(model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: CharTokenizer())
    level = transformers.logging.get_verbosity()
    yield model
    transformers.logging.set_verbosity(level)


def printed_rows(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, str]]:
    """The table that main() prints, row by row."""
    assert speculation.main([*SMALL, *options]) == 0
    about, head, rule, *body = capsys.readouterr().out.splitlines()
    assert "1 thread(s), CPU time, 8 new tokens, median of 1" in about
    assert set(rule) == {"-"}
    ends, at = [], 0
    for _, width in speculation._COLUMNS:
        ends.append((at, at + width))
        at += width + 1
    names = [head[a:b].strip() for a, b in ends]
    assert names == [name for name, _ in speculation._COLUMNS]
    return [dict(zip(names, (line[a:b].strip() for a, b in ends), strict=True)) for line in body]


def test_grounded_text_alone_and_in_batches(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed_rows(
        capsys, "--only", "grounded", "--kind", "edit", "--kind", "code", "--batch", "1", "--batch", "3"
    )
    alone, batched = rows[:14], rows[14:]
    assert [row["case"] for row in alone[::7]] == ["edit", "code"]
    assert [row["method"] for row in alone[:7]] == [*LOOKUP_METHODS, "transformers lookup"]
    # transformers drafts for one row only.
    ours = [name for name in LOOKUP_METHODS if not name.startswith("transformers")]
    assert [(row["case"], row["batch"], row["method"]) for row in batched] == [
        ("mixed", "3", name) for name in ours
    ]
    assert {row["tokens"] for row in rows} == {"same"}
    for row in rows:
        assert float(row["tok/s"]) > 0
        low, high = map(float, row["range"].split("-"))
        assert low <= float(row["x none"]) <= high
        counterpart = row["batch"] == "1" and row["method"] in (
            "none",
            "lookup, constant 10",
            "lookup, adaptive",
        )
        assert (row["x theirs"] != "-") == counterpart
    assert {row["x none"] for row in rows if row["method"] == "none"} == {"1.00"}
    assert {row["tok/fwd"] for row in rows if row["method"].endswith("none")} == {"1.00"}


def test_a_copy_of_the_target_is_always_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed_rows(capsys, "--only", "pair", "--kind", "code", "--batch", "1", "--batch", "2")
    by = {(row["batch"], row["method"]): row for row in rows}
    assert {row["case"] for row in rows} == {"pair code", "pair mixed"}
    assert {row["tokens"] for row in rows} == {"same"}
    for batch in ("1", "2"):
        # 8 tokens: three drafts of two tokens and one more each, the last one truncated.
        assert by[batch, "draft, constant 2"]["accepted"] == "100.0%"
        assert by[batch, "draft, constant 2"]["tok/fwd"] == "2.67"
        assert by[batch, "draft, constant 3"]["tok/fwd"] == "4.00"
    assert by["1", "transformers draft, 3"]["tok/fwd"] == "4.00"
    assert by["1", "draft, constant 3"]["x theirs"] != "-"


def test_different_tokens_are_reported(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small, speculation._options(SMALL))
    original = bench._generate

    def wrong(self: Bench, scenario: Scenario, method: Method, *rest: Any) -> Any:
        out = original(scenario, method, *rest)
        if method.name == "b":
            out.sequences[0, -1] = 5
        return out

    monkeypatch.setattr(Bench, "_generate", wrong)
    prompts = batches(CharTokenizer(), PROMPTS[:1], 1)
    match = Scenario("case", 1, prompts, [Method("none"), Method("a"), Method("b")], {"max_new_tokens": 4})
    assert [one.same for one in bench.run(match)] == [True, True, False]


def test_ratios_are_taken_repeat_by_repeat(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the ratio within a repeat is constant; "b" generates half as much.
    firsts = [1.0, 1.0, 0.5]
    remaining = {"none": [8.0, 4.0, 2.0], "a": [4.0, 2.0, 1.0], "b": [8.0, 8.0, 1.0]}
    wide, narrow = (7, 1, 3), (7, 1, 1)
    stats = {
        "none": DecodeStats([[1] * 8], 8, shapes=[narrow] * 7),
        "a": DecodeStats([[1] * 8], 4, 8, 4, shapes=[narrow, wide, wide], overhead_seconds=1.0),
        "b": DecodeStats([[1] * 4], 4, shapes=[narrow] * 3),
    }
    turns: list[str] = []

    def run_once(
        self: Bench, scenario: Scenario, method: Method, fastest: Any, more: Any = None
    ) -> tuple[float, DecodeStats]:
        if more is not None:
            fastest.update({wide: 1.25, narrow: 1.0})
            return firsts.pop(0), stats["none"]
        turns.append(method.name)
        return remaining[method.name].pop(0), stats[method.name]

    monkeypatch.setattr(Bench, "_run_once", run_once)
    bench = Bench(small, speculation._options(["--repeats", "3"]))
    methods = [Method("none"), Method("a", counterpart="b"), Method("b", theirs=True)]
    match = Scenario("case", 1, batches(CharTokenizer(), PROMPTS[:1], 1), methods, {"max_new_tokens": 4})
    none, first, second = bench.run(match)
    assert turns[:6] == ["none", "a", "b", "a", "b", "none"]
    assert (none.speedup, first.speedup, first.low, first.high) == (1.0, 2.0, 2.0, 2.0)
    assert (second.speedup, second.low, second.high) == (0.5, 0.25, 1.0)
    assert first.decode_speedup == 3.0  # of 7/3, 3 and 3
    assert none.decode_speedup == 1.0
    assert first.quiet_speedup == pytest.approx(7 / 4.5)  # 1 + 2 * 1.25 + 1
    assert first.speedup_over_theirs == 4.0  # of 4, 8 and 2
    assert (first.acceptance_rate, first.tokens_per_forward, first.speed) == (0.5, 2.0, 4.0)
    assert (first.same, second.same) == (True, False)


def test_a_row_counts_up_to_its_end_token() -> None:
    rows = [[5, 6, 9, 0, 0], [5, 6, 7, 8, 8], []]
    assert speculation._until_end(rows, {9}) == [[5, 6, 9], [5, 6, 7, 8, 8], []]


def test_forwards_are_timed_by_their_shape(small: Any) -> None:
    clock, ids = iter([0.0, 5.0, 6.0, 8.0, 8.0, 9.0]), torch.ones(2, 3, dtype=torch.long)
    with Forwards(lambda: next(clock), small) as forwards:
        small(input_ids=ids)
        small(ids)
        small(input_ids=ids[:1, :1])
    small(ids)
    shapes = [(id(small), 2, 3), (id(small), 2, 3), (id(small), 1, 1)]
    assert forwards.shapes == shapes
    assert forwards.seconds == 8.0
    assert (forwards.count(small), forwards.count(ids)) == (3, 0)
    fastest = {shapes[2]: 0.5}
    forwards.update_minimum(fastest)
    assert fastest == {shapes[0]: 2.0, shapes[2]: 0.5}
