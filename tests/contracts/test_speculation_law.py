"""Drafts leave the law of sampling as it is: every window of tokens is as likely as without them.

CI draws a tenth; `pytest tests/contracts/test_speculation_law.py -m slow -s` draws 200,000 windows of each
setting and prints how they fit. What a fit is worth is shown by laws that are wrong on purpose, which the
same test must find out.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import descant
from descant import GenerationConfig
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.core.sampling_noise import SamplingNoise
from descant.engine.step.strategy_group import StrategyGroup, _PendingState
from tests.contracts.draws import BOUND, WINDOW, Drawn, drawn, exact, fits
from tests.contracts.settings import EOS, PROMPT, VOCAB, Setting, network

WHOLE, SLICE = 200_000, 20_000
MIROSTAT = {"mirostat_tau": 2.0, "mirostat_eta": 0.9}
BIASES = {"sequence_bias": {(4,): 1.0, (4, 6): -2.0, (6, 5): 1.5, (3, 9, 5): 3.0}}


def swing(ids: Tensor, scores: Tensor) -> Tensor:
    """A user's own processor: likes another token after every token, the more the longer the text is."""
    liked = (3 * ids[:, -1] + ids[:, -2]) % VOCAB
    return scores.scatter_add(1, liked[:, None], torch.full((len(ids), 1), 0.12 * ids.shape[1]))


SETTINGS: dict[str, Setting] = {
    "none": Setting({"temperature": 0.8}, "none"),
    "temperature, lookup": Setting({"temperature": 0.7}, "lookup"),
    "high temperature, weighted": Setting({"temperature": 1.7}, "weighted", 4),
    "top-k, draft model": Setting({"top_k": 4}, "draft model"),
    "top-k, suffix": Setting({"top_k": 3, "temperature": 1.2}, "suffix", 4),
    "top-p, draft model": Setting({"top_p": 0.8}, "draft model", 2),
    "top-p, early exit": Setting({"top_p": 0.9}, "early exit", network=True),
    "min-p, weighted": Setting({"min_p": 0.15}, "weighted", 2),
    "typical, draft model": Setting({"typical_p": 0.7}, "draft model", 4),
    "typical, certain": Setting({"typical_p": 0.8}, "certain", 1),
    "repetition penalty, draft model": Setting({"repetition_penalty": 1.8}, "draft model"),
    "repetition penalty, early exit": Setting(
        {"repetition_penalty": 1.6, "temperature": 0.9}, "early exit", 4, network=True
    ),
    "no-repeat-ngram, lookup": Setting(
        {"no_repeat_ngram_size": 3}, "lookup", prompt=(8, 3, 4, 6, 5, 2, 7, 3)
    ),
    "no-repeat-ngram, certain": Setting({"no_repeat_ngram_size": 1, "temperature": 1.5}, "certain", 4),
    "sequence bias, draft model": Setting(BIASES, "draft model"),
    "sequence bias, certain": Setting(BIASES, "certain, ragged", 4),
    "mirostat, draft model": Setting(MIROSTAT, "draft model"),
    "mirostat, lookup": Setting({**MIROSTAT, "temperature": 1.4}, "lookup"),
    "adaptive-p, weighted": Setting({"adaptive_p_target": 0.3, "adaptive_p_decay": 0.5}, "weighted"),
    "own processor, draft model": Setting({}, "draft model", processors=(swing,)),
    "own processor, weighted": Setting({"temperature": 0.8}, "weighted", 1, processors=(swing,)),
    "presence penalty, suffix": Setting({"presence_penalty": 0.9}, "suffix", 2),
    "frequency penalty, knowing": Setting({"frequency_penalty": 0.8}, "knowing"),
    "mirostat, knowing": Setting(MIROSTAT, "knowing"),
    "end token, draft model": Setting({"eos_token_id": EOS, "min_new_tokens": 2}, "draft model"),
    "end token, certain": Setting({"eos_token_id": EOS, "temperature": 1.3}, "certain", 4),
    "stop token, unsure": Setting({"stop_token_ids": [5], "top_k": 5}, "unsure", 4),
    "temperature, intersection": Setting({"temperature": 0.9}, "intersection"),
    "top-k and penalty, intersection": Setting({"top_k": 6, "repetition_penalty": 1.3}, "intersection", 2),
    "several, network": Setting(
        {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2}, "draft model", network=True
    ),
    "adaptive, draft model": Setting({"temperature": 0.8}, "draft model", 4, schedule="adaptive"),
    "heuristic, lookup": Setting({"top_p": 0.9}, "lookup", 2, schedule="heuristic"),
}
SEEDED = (
    "none", "temperature, lookup", "top-k, suffix", "top-p, early exit", "mirostat, draft model",
    "own processor, weighted", "end token, draft model", "temperature, intersection",
)  # fmt: skip
# Tables whose rows have other configs, other drafters and other numbers of drafts, some none at all.
MIXED: dict[str, tuple[str, ...]] = {
    "who guesses": (
        "none", "temperature, lookup", "top-k, draft model", "min-p, weighted", "no-repeat-ngram, certain",
    ),
    "what state": ("mirostat, draft model", "adaptive-p, weighted", "mirostat, lookup", "top-k, draft model"),
    "one drafter": (
        "mirostat, draft model", "repetition penalty, draft model", "own processor, draft model",
        "end token, draft model", "sequence bias, draft model",
    ),
    "networks": ("top-p, early exit", "several, network", "repetition penalty, early exit"),
}  # fmt: skip


@cache
def law_of(name: str) -> Tensor:
    return exact(SETTINGS[name])


def sizes(names: Any) -> list[Any]:
    """Each name with few draws, and with many among the slow cases."""
    made = []
    for name in names:
        mixed = name in MIXED
        few = SLICE // 4 if mixed or SETTINGS[name].dear else SLICE
        many = WHOLE // 4 if mixed else WHOLE
        made.append(pytest.param(name, few, id=name))
        made.append(pytest.param(name, many, id=f"{name}-whole", marks=pytest.mark.slow))
    return made


def rejected(found: Drawn, name: str) -> bool:
    """Whether the draws are not by the law of a setting."""
    told = fits(found.counts, law_of(name))
    shown = ", ".join(f"{place} {p:.3g}" for place, p in told.items())
    print(f"{name}: {sum(map(len, found.windows))} draws, {found.right} of {found.tried} guesses, p {shown}")
    return min(told.values()) < BOUND


# ------------------------------------------------------------------------ the law
# In CI every sampler and every drafter once; rows with streams of their own and mixed tables have the others.
@pytest.mark.ci_cases(
    "none",
    "high temperature, weighted",
    "top-k, suffix",
    "top-p, early exit",
    "min-p, weighted",
    "typical, certain",
    "repetition penalty, draft model",
    "no-repeat-ngram, lookup",
    "sequence bias, certain",
    "mirostat, lookup",
    "adaptive-p, weighted",
    "own processor, draft model",
    "presence penalty, suffix",
    "frequency penalty, knowing",
    "end token, draft model",
    "stop token, unsure",
    "top-k and penalty, intersection",
    "adaptive, draft model",
)
@pytest.mark.parametrize(("name", "count"), sizes(SETTINGS))
def test_windows_come_as_often_as_without_drafts(name, count):
    torch.manual_seed(1)
    (found,) = drawn([SETTINGS[name]], count)
    assert not rejected(found, name)
    knows = SETTINGS[name].drafter == "knowing" and name != "mirostat, knowing"
    if name != "none":
        # Of a law that is the target's own but for rounding, one draft in ten millions may fall.
        assert found.tried - found.right < 5 if knows else 0 < found.right < found.tried


@pytest.mark.parametrize(("name", "count"), sizes(SEEDED))
def test_so_do_those_of_rows_with_streams_of_their_own(name, count):
    torch.manual_seed(2)
    (found,) = drawn([SETTINGS[name]], count, seeded=1.0)
    assert not rejected(found, name)


@pytest.mark.parametrize("seeded", [0.5, pytest.param(0.0, marks=pytest.mark.slow)], ids=["half", "none"])
@pytest.mark.parametrize(("name", "count"), sizes(MIXED))
def test_so_do_those_of_rows_that_share_a_table_and_draft_as_they_like(name, count, seeded):
    torch.manual_seed(3)
    found = drawn([SETTINGS[one] for one in MIXED[name]], count, seeded=seeded, ragged=True)
    assert not [one for one, mine in zip(MIXED[name], found, strict=True) if rejected(mine, one)]


@pytest.mark.ci_cases("500")
@pytest.mark.parametrize("copies", [1, 500])
def test_so_do_those_of_a_call(copies):
    """The public way, with a table in which rows end: a tenth of the draws, since each costs ten times."""
    torch.manual_seed(4)
    name = "several, network"
    fields = {**SETTINGS[name].fields, "do_sample": True, "top_k": 0, "max_new_tokens": WINDOW}
    drafts = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    config = GenerationConfig(**fields, **drafts, num_return_sequences=copies)
    prompts = torch.tensor([PROMPT] * (2000 // copies))
    found = Drawn()
    for _ in range(2):
        windows = descant.generate(network(), input_ids=prompts, generation_config=config)
        found.windows.append(windows[:, len(PROMPT) :])
    assert not rejected(found, name)


# ------------------------------------------------------------------------ laws that are wrong
def changed(change: Any) -> Any:
    """What the processors of a table with drafts make of logits, changed by (logits, scores)."""
    process = StrategyGroup.process

    def instead(lane: StrategyGroup, rows: Rows, proposal: Proposal, logits: Tensor) -> Tensor:
        scores = process(lane, rows, proposal, logits)
        return scores if proposal.drafts is None else change(logits, scores)

    return patch.object(StrategyGroup, "process", instead)


def test_two_per_cent_of_bias_are_found():
    name = "high temperature, weighted"

    def biased(logits, scores):
        law = 0.98 * scores.softmax(-1)
        law[..., 7] += 0.02
        return law.log()

    torch.manual_seed(5)
    with changed(biased):
        (found,) = drawn([SETTINGS[name]], 2 * SLICE)
    assert rejected(found, name)


def test_two_per_cent_too_many_accepted_drafts_are_found():
    draw = SamplingNoise.draw

    def eager(self, rows, size):
        noise = draw(self, rows, size)
        return noise if size == VOCAB else noise + 0.0198  # the log of 1.02

    torch.manual_seed(6)
    with patch.object(SamplingNoise, "draw", eager):
        (found,) = drawn([SETTINGS["temperature, lookup"]], WHOLE // 2)
    assert rejected(found, "temperature, lookup")


def test_a_drafter_that_rounds_its_law_is_found():
    torch.manual_seed(7)
    name = "high temperature, weighted"
    (found,) = drawn([Setting(SETTINGS[name].fields, "rounding", SETTINGS[name].tokens)], 2 * SLICE)
    assert rejected(found, name)


@pytest.mark.parametrize("name", ["top-k, draft model", "no-repeat-ngram, lookup", "mirostat, draft model"])
def test_processors_at_the_first_place_of_a_run_alone_are_found(name):
    torch.manual_seed(8)
    with changed(lambda logits, scores: torch.cat((scores[:, :1], logits[:, 1:]), 1)):
        (found,) = drawn([SETTINGS[name]], SLICE // 4)
    assert rejected(found, name)


def test_a_state_that_no_draft_brings_forward_is_found():
    def still(self, processor, index, context, before, proposal):
        after = processor.process(context, before)
        self._pending_states.append(_PendingState(processor, index, context, before, after))
        return after

    torch.manual_seed(9)
    with patch.object(StrategyGroup, "_process_stateful", still):
        (found,) = drawn([SETTINGS["mirostat, draft model"]], 2 * SLICE)
    assert rejected(found, "mirostat, draft model")
