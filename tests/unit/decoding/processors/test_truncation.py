"""Top-n-sigma, top-H, p-less, XTC and the dynamic temperature by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers.generation import logits_process

from descant.decoding.processors.truncation import (
    DynamicTemperatureLogitsWarper,
    PLessLogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    XTCLogitsWarper,
)
from tests.unit.decoding.processors import reference
from tests.unit.decoding.processors.reference import context

IDS = torch.zeros(1, 1, dtype=torch.long)


@pytest.mark.parametrize(
    "warper",
    [TopNSigmaLogitsWarper(1.0), TopHLogitsWarper(0.5), PLessLogitsWarper(), XTCLogitsWarper(1.0)],
    ids=lambda one: type(one).__name__,
)
def test_by_hand(warper):
    chances = torch.tensor([[0.5, 0.05, 0.25, 0.2]])
    kept = {
        TopNSigmaLogitsWarper: [0, 2],  # logs -0.69 -3.00 -1.39 -1.61: their deviation is 0.84
        TopHLogitsWarper: [0],  # terms 0.347 0.150 0.347 0.322: half of 1.165 is 0.583
        PLessLogitsWarper: [0],  # 0.25 + 0.0025 + 0.0625 + 0.04 = 0.355
        XTCLogitsWarper: [1, 3],
    }[type(warper)]
    found = warper(IDS, chances.log())
    assert found.isfinite().nonzero()[:, 1].tolist() == kept
    warper.filter_value = -9.0
    assert (warper(IDS, chances.log()) == -9.0).nonzero()[:, 1].tolist() == [
        at for at in range(4) if at not in kept
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 32_003])
def test_tokens_that_all_tie_are_all_kept(size):
    """Where rounding could drop them all: p-less compares 1/V with V times 1/V squared."""
    level = torch.full((1, size), 0.3)
    assert PLessLogitsWarper()(IDS, level).isfinite().all()
    assert TopNSigmaLogitsWarper(0.1)(IDS, level).isfinite().all()
    assert XTCLogitsWarper(1.0, 0.0)(IDS, level).isfinite().all()
    assert TopHLogitsWarper(1.0)(IDS, level).isfinite().all()


def test_top_h_prefers_lower_ids_among_ties():
    found = TopHLogitsWarper(0.5)(IDS, torch.zeros(1, 8))
    assert found.isfinite().tolist() == [[True] * 4 + [False] * 4]


def test_top_h_is_that_of_transformers():
    """Theirs looks at 100 tokens, so the vocabulary is no larger; and it does not handle -inf."""
    generator = torch.Generator().manual_seed(3)
    for share in (0.1, 0.4, 0.7, 0.95):
        scores = torch.randn(500, 90, generator=generator) * 3
        ids = torch.zeros(500, 1, dtype=torch.long)
        theirs = logits_process.TopHLogitsWarper(share)(ids, scores)
        ours = TopHLogitsWarper(share)(ids, scores)
        odd = (ours != theirs).any(-1).nonzero().flatten().tolist()
        for at in odd:  # they sum in another order
            assert reference.top_h(scores[at].tolist(), share)[1] < 1e-5
        assert len(odd) < 5


def test_xtc_happens_as_often_as_it_should():
    torch.manual_seed(5)
    scores = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    found = XTCLogitsWarper(0.3)(torch.zeros(20_000, 1, dtype=torch.long), scores)
    cut = found[:, 0].isinf()
    assert torch.equal(cut, found[:, 1].isinf())
    assert abs(cut.float().mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20_000)


def test_xtc_asks_the_row_not_the_batch():
    """In the loop the same row at the same position has the same draws in any batch."""
    rng = random.Random(1)
    params = [
        {"xtc_probability": 0.5, "xtc_threshold": 0.1, "min_tokens_to_keep": 1, "processor_seed": seed}
        for seed in range(200)
    ]
    rows = [[0] * (1 + seed % 3) for seed in range(200)]
    scores = torch.tensor([0.5, 0.3, 0.2]).log().expand(200, 3)
    whole = XTCLogitsWarper.make_unbound().process(context(rng, rows, [0] * 200, params), scores)
    assert 60 < whole[:, 0].isinf().sum() < 140
    order = rng.sample(range(200), 50)
    part = context(rng, [rows[at] for at in order], [0] * 50, [params[at] for at in order])
    assert torch.equal(XTCLogitsWarper.make_unbound().process(part, scores[:50]), whole[order])


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.0] * 4),
        ([3.0, 3.0, -math.inf], [1.5, 1.5, -math.inf]),  # level: the highest temperature, 2
        ([3.0, -math.inf, -math.inf], [3.0, -math.inf, -math.inf]),  # one candidate: as it was
        ([300.0, 0.0, -5.0], [300.0, -math.inf, -math.inf]),  # certain: temperature 0
        ([300.0, 300.0, -500.0], [300.0 / (2 * math.log(2) / math.log(3))] * 2 + [-396.24063]),
        ([-math.inf] * 3, [-math.inf] * 3),
    ],
)
def test_the_ends_of_the_range(scores, wanted):
    found = DynamicTemperatureLogitsWarper(1.0, 1.0)(IDS, torch.tensor([scores]))
    torch.testing.assert_close(found, torch.tensor([wanted]))


def test_neither_certainty_nor_any_scale_makes_a_score_that_is_no_number():
    """The temperature goes to 0 with the entropy: through every size, for any scale of the scores."""
    for gap in [0.0, *(10.0**at for at in range(-6, 6))]:
        for scale in (1e-20, 1.0, 1e20):
            scores = torch.tensor([[gap, 0.0, -gap]]) * scale
            found = DynamicTemperatureLogitsWarper(0.5, 1.0)(IDS, scores)
            chances = found.softmax(-1)
            assert chances.isfinite().all(), (gap, scale)
            assert found[0, 0] >= found[0, 1] >= found[0, 2]
