"""A row with a seed has the same tokens for any drafter, draft length and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant import Finished, Request, Session
from descant.core.interfaces import DraftContext
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.engine.request import CallPlace
from tests.contracts.settings import DRAFTERS, EOS, VOCAB, Script, Setting, network, pair, scripts

NEW = 14
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"top_k": 4, "temperature": 1.3},
    {"top_p": 0.8, "num_return_sequences": 3},
    {"mirostat_tau": 2.0, "mirostat_eta": 0.9},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3},
    {"eos_token_id": EOS, "min_new_tokens": 5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1, "min_p": 0.02},
    {"mirostat_tau": 1.5, "sequence_bias": {(3, 4): 2.0}, "no_repeat_ngram_size": 4},
)
# Batches of one, three and eight.
BATCHES = (tuple(range(8)), (0, 1, 2), (5, 4, 3), (6,), (7,))
GUESSERS = {
    "pair": (
        "lookup", "suffix", "draft model", "unsure", "intersection", "certain, ragged", "weighted", "knowing",
        "likely",
    ),
    "network": ("lookup", "suffix", "draft model", "early exit", "likely"),
}  # fmt: skip
SIZES = (1, 5)  # at a time, in CI
Tokens = list[list[int]]  # of each sequence of a request


class Likely(Script):
    """Drafts the right token seven times out of ten."""

    def __init__(self, truth: Mapping[tuple[Any, ...], Sequence[int]]) -> None:
        self.truth, self.rng = truth, np.random.default_rng(0)

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        width = int(most.max())
        if not width:
            return Proposal()
        drafts = self.rng.integers(0, VOCAB, (len(rows), width))
        for row in range(len(rows)):
            begin, now = int(rows.prompt_length[row]), int(rows.length[row])
            prompt = tuple(rows.tokens[row, :begin].tolist())
            rest = self.truth[prompt, int(rows.slot[row])][now - begin :][:width]
            right = self.rng.random(len(rest)) < 0.7
            drafts[row, : len(rest)] = np.where(right, rest, drafts[row, : len(rest)])
        return Proposal(None, torch.from_numpy(drafts), most)


def settings(kind: str, drafter: str, tokens: int) -> list[Setting]:
    """Eight rows of other lengths and with other configs, and the drafter for them."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for at, fields in enumerate(FIELDS):
        half = torch.randint(VOCAB, (2 + at % 4,), generator=generator).tolist()
        given = {**fields, "seed": 40 + at, "max_new_tokens": NEW}
        made.append(Setting(given, drafter, tokens, prompt=[at, *half, *half], network=kind == "network"))
    return made


def run_session(model: Any, requests: Sequence[Request]) -> tuple[list[Tokens], list[Any]]:
    """The tokens of every sequence of each request, all in one session, and what became of drafts."""
    session, found = Session(model), {}
    numbers = session.admit(*(replace(one, _call=CallPlace()) for one in requests))
    before = torch.random.get_rng_state()
    for event in session.drain():
        if isinstance(event, Finished):
            found[event.request] = event.hypotheses
    assert torch.equal(torch.random.get_rng_state(), before)
    tokens = [[one.tokens.tolist() for one in found[number]] for number in numbers]
    return tokens, [one.speculation for number in numbers for one in found[number]]


@cache
def plainly(kind: str) -> list[Tokens]:
    """The output of each row alone and without drafts."""
    model = network() if kind == "network" else pair()
    return [run_session(model, [one.request(drafts=False)])[0][0] for one in settings(kind, "none", 1)]


@pytest.mark.parametrize(
    "tokens",
    [size if size in SIZES else pytest.param(size, marks=pytest.mark.slow) for size in range(1, 9)],
)
@pytest.mark.parametrize(
    ("kind", "drafter"), [(kind, one) for kind, some in GUESSERS.items() for one in some]
)
def test_a_seed_gives_the_same_for_any_drafter(kind, drafter, tokens, monkeypatch):
    model, expected = (network() if kind == "network" else pair()), plainly(kind)
    rows = settings(kind, drafter, tokens)
    if drafter == "likely":
        truth = {
            (tuple(one.prompt), slot): line
            for one, lines in zip(rows, expected, strict=True)
            for slot, line in enumerate(lines)
        }
        given = {"assistant_model": Likely(truth), "num_assistant_tokens": tokens}
        monkeypatch.setitem(DRAFTERS, "likely", lambda one: dict(given))
    reports = []
    with scripts():
        for batch in BATCHES:
            found, more = run_session(model, [rows[at].request() for at in batch])
            assert found == [expected[at] for at in batch]
            reports += more
    right, tried = sum(one.saved_forwards for one in reports), sum(sum(one.drafted) for one in reports)
    assert 0 < right <= tried
    assert right < tried or drafter == "knowing"
