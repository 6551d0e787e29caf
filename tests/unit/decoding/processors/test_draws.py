"""What is drawn through a truncation sampler follows its law, and a bias of 2 % would be seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from descant.core.context import Context, RowParams
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.processors.filters import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from descant.decoding.processors.truncation import (
    MirostatLogitsWarper,
    PLessLogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    XTCLogitsWarper,
)
from descant.decoding.strategies.sampling import Sampling
from tests.unit.decoding.processors import reference

DRAWS = 200_000
# Probabilities with a tie, a tail and a token ruled out.
LINE = torch.tensor([0.04, 0.24, 0.0, 0.12, 0.30, 0.12, 0.02, 0.10, 0.05, 0.01]).log().tolist()


def certain(support):
    """The law of one that always cuts: what it keeps, in proportion."""
    kept, margin = support
    assert margin > 1e-4
    return reference.law(LINE, kept)


def sometimes(probability, support):
    """The law of one that cuts with a probability."""
    cut, whole = certain(support), reference.softmax(LINE)
    return [probability * one + (1 - probability) * two for one, two in zip(cut, whole, strict=True)]


SAMPLERS = {
    "top_k": (TopKLogitsWarper(4), lambda: certain(reference.top_k(LINE, 4))),
    "top_p": (TopPLogitsWarper(0.83), lambda: certain(reference.top_p(LINE, 0.83))),
    "min_p": (MinPLogitsWarper(0.15), lambda: certain(reference.min_p(LINE, 0.15))),
    "typical_p": (TypicalLogitsWarper(0.6), lambda: certain(reference.typical(LINE, 0.6))),
    "epsilon": (EpsilonLogitsWarper(0.03), lambda: certain(reference.epsilon(LINE, 0.03))),
    "eta": (EtaLogitsWarper(0.3), lambda: certain(reference.eta(LINE, 0.3))),
    "top_n_sigma": (TopNSigmaLogitsWarper(1.1), lambda: certain(reference.top_n_sigma(LINE, 1.1))),
    "top_h": (TopHLogitsWarper(0.7), lambda: certain(reference.top_h(LINE, 0.7))),
    "p_less": (PLessLogitsWarper(), lambda: certain(reference.p_less(LINE))),
    "xtc": (XTCLogitsWarper(1.0, 0.11), lambda: certain(reference.xtc(LINE, 0.11))),
    "xtc sometimes": (XTCLogitsWarper(0.4, 0.11), lambda: sometimes(0.4, reference.xtc(LINE, 0.11))),
    "mirostat": (MirostatLogitsWarper(1.7), lambda: certain(reference.mirostat(LINE, 3.4))),
}


class Endless:
    """A stop that ends no row."""

    def finish_reasons(self, rows, parents, tokens):
        return []


def rows_of(seeded):
    """As many rows as draws, each a request of its own."""
    count, zeros = torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.long)
    ones = zeros + 1
    params = {
        "do_sample": ones,
        "num_sequences": ones,
        "seed": count if seeded else zeros - 1,
        "noise_row": count,
    }
    return Rows(
        zeros[:, None],
        ones,
        zeros,
        zeros,
        ones,
        count,
        zeros,
        {"params": RowParams({**params, "processor_seed": count})},
    )


def token_counts(warper, seeded=True, bias=0.0):
    """How often each token is chosen after one step of the sampling loop."""
    rows = rows_of(seeded)
    scores = torch.tensor(LINE).expand(DRAWS, -1)
    scores = warper.process(Context.from_rows(rows, None, {}).with_params(vars(warper)), scores)
    noise = SamplingNoise()
    noise.num_rows = DRAWS
    torch.manual_seed(11)
    selection = Sampling(noise, Endless()).select(
        rows, Proposal(), ForwardOutput(biased(scores, bias)[:, None])
    )
    assert len(selection.tokens) == DRAWS
    return np.bincount(selection.tokens.numpy(), minlength=len(LINE))


def biased(scores, bias):
    """The scores, that share of the likeliest token's chances given to the second likeliest."""
    chances = scores.softmax(-1)
    best = chances.topk(2)
    moved = best.values[:, :1] * bias * torch.tensor([-1.0, 1.0])
    return chances.scatter_add(1, best.indices, moved).log() if bias else scores


def p_value(counts, law):
    """How likely such counts or odder ones are under the law; 0 where one is impossible."""
    law = np.array(law)
    if counts[law == 0].any():
        return 0.0
    possible = law > 0
    assert possible.sum() > 1
    return stats.chisquare(counts[possible], law[possible] / law.sum() * counts.sum()).pvalue


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_fit_the_law(name):
    warper, law = SAMPLERS[name]
    assert p_value(token_counts(warper), law()) > 0.001


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_bias_of_two_percent_is_seen(name):
    warper, law = SAMPLERS[name]
    assert p_value(token_counts(warper, bias=0.02), law()) < 0.001


@pytest.mark.parametrize("bias", [0.0, 0.02])
@pytest.mark.parametrize("name", ["top_p", "xtc sometimes"])
def test_draws_from_the_stream_of_torch_fit_the_law(name, bias):
    warper, law = SAMPLERS[name]
    fits = p_value(token_counts(warper, seeded=False, bias=bias), law()) > 0.001
    assert fits == (bias == 0.0)


def test_chance_has_its_way_as_often_as_it_should():
    """How many lines XTC cuts, where each row throws its own dice; 2 % more or less would be seen."""
    rows, warper = rows_of(seeded=True), XTCLogitsWarper(0.4, 0.11)
    scores = torch.tensor(LINE).expand(DRAWS, -1)
    found = warper.process(Context.from_rows(rows, None, {}).with_params(vars(warper)), scores)
    cut = int((found != scores).any(-1).sum())
    assert stats.binomtest(cut, DRAWS, 0.4).pvalue > 0.001
    for biased_by in (0.98, 1.02):
        assert stats.binomtest(cut, DRAWS, 0.4 * biased_by).pvalue < 0.001


def test_a_token_that_should_be_gone_is_seen():
    """A sampler that keeps one token too many does not pass for the other."""
    assert p_value(token_counts(TopKLogitsWarper(5)), certain(reference.top_k(LINE, 4))) == 0.0


def test_every_law_cuts_something_and_leaves_a_choice():
    for name, (_, law) in SAMPLERS.items():
        possible = sum(chance > 0 for chance in law())
        assert 2 <= possible < 9 or name == "xtc sometimes"
