"""Rows end at the same token as in the reference: stop strings, criteria, time, several end tokens.

Under greedy search and sampling the whole padded batch is the reference's; beams are compared row by row,
without the padding at the right (see `test_known_bugs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import descant
from descant.decoding import stopping as criteria
from tests.reference.parity.compare import TOLERANCE, Batch
from tests.reference.parity.own import verdict
from tests.reference.parity.subjects import STORIES, TINY, level, ragged
from tests.support import pretrained

NEW = 16
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
}
PLAIN = [mode for mode in MODES if mode != "beam sampling"]


@dataclass(frozen=True)
class Stopped:
    """A call with what ends its rows, which each side makes for itself."""

    subject: Any
    arguments: dict[str, Any]
    tokenizer: bool = False
    verdicts: tuple[tuple[Any, ...], ...] = ()
    objects: dict[str, Any] = field(default_factory=dict)  # (class, arguments) by argument: ours and theirs
    seed: int = 31

    @property
    def beams(self) -> bool:
        return self.arguments.get("num_beams", 1) > 1

    def ours(self, prompts: Batch) -> Any:
        given = dict(self.arguments)
        if self.tokenizer:
            given["tokenizer"] = self.subject.tokenizer
        own: list[Any] = [verdict(*one) for one in self.verdicts]
        own += [
            getattr(criteria, name)(**values) for name, values in self.objects.get("stopping_criteria", ())
        ]
        if own:
            given["stopping_criteria"] = criteria.StoppingCriteriaList(own)
        torch.manual_seed(self.seed)
        return descant.generate(
            self.subject.model, **prompts.inputs, **given, return_dict_in_generate=True, output_scores=True
        )

    def theirs(self, reference: Any, prompts: Batch) -> dict[str, Any]:
        want = ["sequences", *(["sequences_scores"] if self.beams else [])]
        more: dict[str, Any] = {"verdicts": self.verdicts} if self.verdicts else {}
        if self.tokenizer:
            more["tokenizer"] = str(self.subject.folder)
        return reference.ask(
            "generate_own", model=str(self.subject.folder), inputs=prompts.inputs, want=want,
            arguments=self.arguments, seed=self.seed, objects=self.objects, **more,
        )  # fmt: skip

    def check(self, reference: Any, prompts: Batch) -> list[list[int]]:
        """Assert that both sides give the same; our new tokens, row by row."""
        if not self.beams:
            ours, theirs = self.ours(prompts).sequences, self.theirs(reference, prompts)["sequences"]
            assert ours.tolist() == theirs.tolist()
            return self.new(ours, prompts)
        # Beams of a batch are each row's own here, and not there; with chance, only alone on both sides.
        whole = None if self.arguments.get("do_sample") else self.ours(prompts)
        each, found = self.arguments.get("num_return_sequences", 1), []
        for i in range(len(prompts.rows)):
            one = prompts.only(i)
            theirs = self.theirs(reference, one)
            ours = self.ours(one) if whole is None else whole
            mine = slice(0, each) if whole is None else slice(i * each, (i + 1) * each)
            found.append(self.new(ours.sequences, one if whole is None else prompts)[mine])
            assert found[-1] == self.new(theirs["sequences"], one), f"request {i}"
            gap = (ours.sequences_scores[mine] - theirs["sequences_scores"]).abs().max()
            assert gap < TOLERANCE, f"request {i}: the scores differ by {gap:.1e}"
        return [row for rows in found for row in rows]

    def new(self, sequences: Tensor, prompts: Batch) -> list[list[int]]:
        """The new tokens of each line without what fills it up, and without an end token that looks so."""
        width = 1 if self.subject.encoder_decoder else prompts.inputs["input_ids"].shape[1]
        ends = self.subject.eos if isinstance(self.subject.eos, list) else [self.subject.eos]
        fill, rows = {self.subject.pad, *ends}, sequences[:, width:].tolist()
        return [
            row[: max((i + 1 for i, token in enumerate(row) if token not in fill), default=0)] for row in rows
        ]


def without(call: Stopped, prompts: Batch) -> list[list[int]]:
    """The output of the call when only the end token and the length stop it."""
    bare = {k: v for k, v in call.arguments.items() if k not in ("stop_strings", "eos_token_id", "max_time")}
    return call.new(Stopped(call.subject, bare, seed=call.seed).ours(prompts).sequences, prompts)


# In the stories these fall on one token, across several, inside one, and at the edge of a word.
STOPS: dict[str, Any] = {
    "across tokens": ["ot was ver", "d balloo", "ed to r"],
    "inside a token": ["lidi", "happ", "ver", "lik", "he"],
    "a letter": "m",
    "one token": [" was"],
    "with space": [". ", " a "],
    "several": ["mom", "dad", "park", "named", "They"],
    "a newline": ["\n"],
    "never": ["xylophone"],
    "ends and begins": ["was a", "park. T", "e."],
}  # fmt: skip


@pytest.fixture(scope="module")
def stories() -> Any:
    return pretrained.load(STORIES)


def stops() -> Iterator[Any]:
    """Every string in every mode with several prompts; in CI few: the reference takes seconds for each."""
    for (at, stop), mode, seed in product(enumerate(STOPS), MODES, range(4)):
        few = at < 3 and mode != "beam sampling" and seed == 0
        yield pytest.param(stop, mode, seed, marks=() if few else pytest.mark.slow)


@pytest.mark.parametrize(("stop", "mode", "seed"), list(stops()))
def test_stop_strings(stop, mode, seed, stories, reference):
    arguments = {"max_new_tokens": NEW, **MODES[mode], "stop_strings": STOPS[stop]}
    prompts = ragged(stories, seed)
    call = Stopped(stories, arguments, tokenizer=True, seed=31 + seed)
    found = call.check(reference, prompts)
    # Not decoded, which would take the first space away.
    texts = ["".join(stories.tokenizer.convert_ids_to_tokens(row)).replace("▁", " ") for row in found]
    given = [STOPS[stop]] if isinstance(STOPS[stop], str) else STOPS[stop]
    if mode in ("greedy", "sampling") and not any(one in text for one in given for text in texts):
        assert found == without(call, prompts)


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("prompt", ["Once upon a time", "They like to play with the b", "One day"])
def test_a_stop_string_that_the_prompt_has_begun(prompt, mode, stories, reference):
    """The overlap counts from wherever the string began, as documented: the prompt's text, too."""
    tokens = stories.tokens(prompt)
    arguments = {
        "max_new_tokens": NEW,
        **MODES[mode],
        "stop_strings": ["e there", "ball", "day, L", "day, a"],
    }
    Stopped(stories, arguments, tokenizer=True).check(reference, Batch([tokens], stories.pad))


SHOWN = ("llama", "t5")
MODELS = [*SHOWN, *(pytest.param(n, marks=pytest.mark.slow) for n in TINY if n not in SHOWN)]


def few(model: Any) -> Batch:
    return replace(level(model), rows=level(model).rows[:2])


def criteria_of(model: Any, width: int) -> dict[str, Any]:
    """Criteria of which one ends a row: with the model's own end, whose criterion the reference replaces."""
    ends = [model.eos, 40, 41, 42, 43, 44]
    return {
        "stopping_criteria": [
            ("MaxLengthCriteria", {"max_length": width + 9}),
            ("EosTokenCriteria", {"eos_token_id": ends}),
            ("MaxTimeCriteria", {"max_time": 1e6}),
        ]
    }


# What ends rows: further arguments and parts of a call, its prompts, and the longest of the answers.
ENDS: dict[str, Any] = {
    "a bool for all": lambda model, width: ({}, {"verdicts": (("bool", width + 5),)}, few, 5),
    "a scalar for all": lambda model, width: ({}, {"verdicts": (("scalar", width + 5),)}, few, 5),
    "a verdict for each row": lambda *_: ({}, {"verdicts": (("rows", 7, 5),)}, level, NEW),
    "criteria": lambda model, width: ({}, {"objects": criteria_of(model, width)}, few, 9),
    "time": lambda *_: ({"max_time": 1e-9}, {}, ragged, 1),
    "end tokens": lambda model, _: ({"eos_token_id": [model.eos, 20, 33, 44, 58]}, {}, ragged, NEW),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_what_ends_rows(name, mode, end, tiny, reference):
    model = tiny(name)
    more, parts, rows, longest = ENDS[end](model, 1 if model.encoder_decoder else 6)
    call = Stopped(
        model, {"max_new_tokens": NEW, **MODES[mode], **more}, **parts, seed=41 if end == "end tokens" else 31
    )
    prompts = rows(model)
    found = call.check(reference, prompts)
    assert max(map(len, found)) <= longest
    if end.endswith("for all"):
        assert max(map(len, found)) == longest
    if end == "a verdict for each row" and mode == "greedy":
        plain = without(call, prompts)
        assert found != plain
        assert all(row == other[: len(row)] for row, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("name", MODELS)
def test_stop_token_ids_are_end_tokens(name, mode, tiny, reference):
    """A field of our own: the reference gets them as end tokens, and as its own criterion."""
    model = tiny(name)
    ids = [20, 33, 44, 58]
    given = {"max_new_tokens": NEW, **MODES[mode]}
    prompts = ragged(model)
    as_ends = Stopped(model, {**given, "eos_token_id": [model.eos, *ids]}).check(reference, prompts)
    torch.manual_seed(31)
    ours = descant.generate(model.model, **prompts.inputs, **given, stop_token_ids=ids)
    assert Stopped(model, given).new(ours, prompts) == as_ends
