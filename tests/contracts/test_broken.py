"""Each contract check finds a model or cache that violates it."""

from __future__ import annotations

import sys

import pytest
import torch

from descant import GenerationConfig, MissingExtra, Request
from descant.core.records import ForwardOutput
from descant.testing import (
    ReferenceCache,
    check_admission,
    check_batch,
    check_cache,
    check_drafts,
    check_generation,
    check_seed,
)
from tests.contracts.subjects import mixed
from tests.support.markov_model import Chain


def requests_for(**given):
    """Requests for a chain that differ in prompt and length."""
    own = [{**given, "max_new_tokens": 6 + at} for at in range(4)]
    return [Request([at + 1], GenerationConfig(**one)) for at, one in enumerate(own)]


SEEDED = {"do_sample": True, "seed": 3}


class Crowded(Chain):
    """Says something else when it has company."""

    def forward(self, rows, proposal, cache):
        out = super().forward(rows, proposal, cache)
        return out if len(rows) == 1 else ForwardOutput(out.logits.roll(1, -1))


class Ordered(Chain):
    """Says something else to its second row."""

    def forward(self, rows, proposal, cache):
        out = super().forward(rows, proposal, cache)
        out.logits[1:2] = out.logits[1:2].roll(1, -1)
        return out


class Ageing(Chain):
    """Says something else after a while."""

    def forward(self, rows, proposal, cache):
        out = super().forward(rows, proposal, cache)
        return out if len(self.fed) < 8 else ForwardOutput(out.logits.roll(1, -1))

    def add_requests(self, requests, inputs):
        if 0 in requests:
            self.fed = []


class Vague(Chain):
    """Is a little off when it has company: less than would change a token."""

    def forward(self, rows, proposal, cache):
        out = super().forward(rows, proposal, cache)
        return ForwardOutput(out.logits + 1e-3 * (len(rows) > 1) * torch.arange(out.logits.shape[-1]))


class Moody(Chain):
    """Draws from torch's generator."""

    def forward(self, rows, proposal, cache):
        out = super().forward(rows, proposal, cache)
        return ForwardOutput(out.logits + torch.randn(()) * torch.arange(out.logits.shape[-1]))


class Hasty(Chain):
    """Judges every draft as if it stood where the first does."""

    def forward(self, rows, proposal, cache):
        out = super().forward(rows, proposal, cache)
        return ForwardOutput(out.logits[:, :1].expand_as(out.logits))


@pytest.mark.parametrize("kind", [Crowded, Ordered, Vague])
@pytest.mark.parametrize("method", [{}, {"num_beams": 2}, SEEDED], ids=["greedy", "beam", "sampling"])
def test_a_model_that_depends_on_the_batch_is_found(kind, method):
    check_batch(Chain.chance(11, 0), requests_for(**method))
    with pytest.raises(AssertionError, match="in a batch of 4"):
        check_batch(kind.chance(11, 0), requests_for(**method))


@pytest.mark.parametrize("kind", [Crowded, Ordered, Ageing])
def test_a_model_that_minds_the_time_is_found(kind):
    check_admission(Chain.chance(11, 0), requests_for())
    with pytest.raises(AssertionError, match="schedule"):
        check_admission(kind.chance(11, 0), requests_for())


def test_chance_that_is_not_the_requests_own_is_found():
    check_seed(Chain.chance(11, 0), requests_for(**SEEDED))
    with pytest.raises(AssertionError, match="under another seed of torch"):
        check_seed(Moody.chance(11, 0), requests_for(**SEEDED))


def test_a_seed_that_is_not_read_is_found():
    sure = Chain(torch.eye(11) * 1e4)
    with pytest.raises(AssertionError, match="is the seed read"):
        check_seed(sure, requests_for(**SEEDED))


def test_a_model_that_scores_drafts_wrongly_is_found():
    given = requests_for()
    check_drafts(Chain.chance(11, 0), given)
    with pytest.raises(AssertionError, match="from those of one by one"):
        check_drafts(Hasty.chance(11, 0), given)


class Tired(ReferenceCache):
    """Forgets the value of the first position."""

    def update(self, layer, key, value, span):
        keys, values = super().update(layer, key, value, span)
        values[:, :, 0] = 0
        return keys, values


def test_a_cache_that_spoils_a_generation_is_found(tiny):
    with pytest.raises(AssertionError, match="against ReferenceCache"):
        check_generation(Tired, tiny("llama").model, mixed(tiny("llama")))


def test_without_hypothesis_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(MissingExtra, match=r"descant\[testing\]") as error:
        check_cache(ReferenceCache)
    assert error.value.extra == "testing"
