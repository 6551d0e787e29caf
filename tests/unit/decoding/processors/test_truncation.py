"""Top-n-sigma, top-H, p-less and XTC against their definitions in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers.generation import logits_process

from descant.decoding.processors.truncation import (
    PLessLogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    XTCLogitsWarper,
)
from descant.errors import InputError
from tests.unit.decoding.processors import reference
from tests.unit.decoding.processors.reference import chance_scores, context, drafted, spoil

IDS = torch.zeros(1, 1, dtype=torch.long)


def sigma_params(rng):
    return {"top_n_sigma": rng.choice([1.0, rng.uniform(0.05, 3)])}


def h_params(rng):
    return {"top_h": rng.choice([1.0, 0.4, rng.uniform(0.01, 1)])}


def xtc_params(rng):
    # With probabilities for which the result is deterministic.
    return {"xtc_probability": rng.choice([0.0, 1.0]), "xtc_threshold": rng.choice([0.0, 0.1, rng.random()])}


def maybe_xtc(line, xtc_probability, xtc_threshold, least):
    if xtc_probability == 0.0:
        return [True] * len(line), math.inf
    return reference.xtc(line, xtc_threshold, least)


KINDS = {
    "top_n_sigma": (TopNSigmaLogitsWarper, sigma_params, reference.top_n_sigma),
    "top_h": (TopHLogitsWarper, h_params, reference.top_h),
    "p_less": (PLessLogitsWarper, lambda rng: {}, reference.p_less),
    "xtc": (XTCLogitsWarper, xtc_params, maybe_xtc),
}


def check(name, found, lines, params):
    """What stays is exactly as it was, what goes is -inf; gives how many lines were too close to call."""
    close = 0
    for answer, line, own in zip(found, lines, params, strict=True):
        own = dict(own)
        least = own.pop("min_tokens_to_keep")
        kept, margin = KINDS[name][2](line, *own.values(), least)
        if margin < 1e-5:
            close += 1
            continue
        wanted = [score if stays else -math.inf for score, stays in zip(line, kept, strict=True)]
        assert answer.tolist() == wanted, (line, own, least)
    return close


@pytest.mark.parametrize("name", KINDS)
def test_every_line_is_cut_by_its_own_parameters(name):
    rng, tried, close = random.Random(name), 0, 0
    kind, chance_params, _ = KINDS[name]
    for _ in range(200):
        vocabulary, count = rng.choice([1, 2, 3, 7, 20, 64]), rng.randint(2, 12)
        lines = [chance_scores(rng, vocabulary) for _ in range(count)]
        least = [rng.choice([1, 1, 1, 2, 5, 100]) for _ in lines]
        params = [{**chance_params(rng), "min_tokens_to_keep": one} for one in least]
        rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 4))] for _ in lines]
        given, nan = spoil(rng, torch.tensor(lines))
        found = kind.make_unbound().process(context(rng, rows, [0] * count, params), given)
        rest = [at for at in range(count) if at != nan]
        close += check(name, found[rest], [lines[at] for at in rest], [params[at] for at in rest])
        tried += len(rest)
    assert tried > 1000
    assert close < 0.05 * tried


@pytest.mark.parametrize("name", KINDS)
def test_lines_of_drafts_are_cut_alike(name):
    rng = random.Random(f"{name} drafts")
    kind, chance_params, _ = KINDS[name]
    for _ in range(20):
        vocabulary, count, width = rng.choice([2, 7, 20]), rng.randint(1, 5), rng.randint(1, 3)
        params = [{**chance_params(rng), "min_tokens_to_keep": rng.choice([1, 3])} for _ in range(count)]
        rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 4))] for _ in params]
        drafts = [[rng.randrange(vocabulary) for _ in range(width)] for _ in params]
        lines = [chance_scores(rng, vocabulary) for _ in range(count * (width + 1))]
        found = kind.make_unbound().process(
            drafted(rng, rows, [1] * count, params, drafts), torch.tensor(lines)
        )
        check(name, found, lines, [params[at // (width + 1)] for at in range(len(lines))])


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
    ("make", "name"),
    [
        (lambda: TopNSigmaLogitsWarper(0.0), "top_n_sigma"),
        (lambda: TopNSigmaLogitsWarper(math.nan), "top_n_sigma"),
        (lambda: TopHLogitsWarper(0), "top_h"),
        (lambda: TopHLogitsWarper(1.1), "top_h"),
        (lambda: PLessLogitsWarper(min_tokens_to_keep=0), "min_tokens_to_keep"),
        (lambda: XTCLogitsWarper(1.1), "xtc_probability"),
        (lambda: XTCLogitsWarper(0.5, -0.1), "xtc_threshold"),
    ],
)
def test_odd_arguments_are_refused_by_name(make, name):
    with pytest.raises(InputError, match=name):
        make()
