"""Greedy search and sampling on a chain with known distribution."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from scipy import stats

from descant import GenerationConfig, Request
from descant.testing import outcomes
from tests.support.markov_model import Chain


def config(**given):
    return GenerationConfig(**{"max_new_tokens": 3, **given})


@pytest.mark.parametrize("seed", range(5))
def test_greedy_follows_the_likeliest(seed):
    model = Chain.chance(13, seed)
    asked = [Request([token], config(max_new_tokens=8)) for token in range(6)]
    for token, found in enumerate(outcomes(model, asked)):
        expected, last = [], token
        for _ in range(8):
            last = int(model.after(len(expected) + 1, last).argmax())
            expected.append(last)
        assert found.tokens == [expected]


def test_a_row_ends_with_its_end_token():
    model = Chain(torch.eye(4).roll(1, 1) * 9)  # 0 -> 1 -> 2 -> 3 -> 0
    found = outcomes(model, [Request([0], config(max_new_tokens=9, eos_token_id=[3, 1]))] * 2)
    assert [one.tokens for one in found] == [[[1]], [[1]]]
    later = outcomes(model, [Request([1], config(max_new_tokens=9, eos_token_id=[3, 1]))])
    assert (later[0].tokens, later[0].reasons) == ([[2, 3]], ["eos"])


@pytest.mark.parametrize("seeded", [True, False], ids=["seeds", "torch"])
@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 0},
        {"top_k": 0, "temperature": 0.5},
        {"top_k": 2},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 0, "min_p": 0.3},
    ],
    ids=str,
)
def test_sampling_draws_by_the_law(given, seeded):
    """Sequences of three tokens, 6,000 times, against their exact probabilities."""
    model = Chain.chance(4, 2, spread=0.8)
    count = 6_000
    torch.manual_seed(5)
    own = [{"seed": at, "num_return_sequences": 50} for at in range(count // 50)]
    own = own if seeded else [{"num_return_sequences": count}]
    asked = [Request([0], config(do_sample=True, **given, **one)) for one in own]
    found = Counter(tuple(path) for one in outcomes(model, asked) for path in one.tokens)

    law = Chain(_law(model.logits, given).log())
    chances = {path: math.exp(total) for path, total in law.paths(0, 3)}
    assert set(found) <= {path for path, chance in chances.items() if chance > 0}
    likely = [path for path, chance in chances.items() if chance * count >= 5]
    assert len(likely) >= 8
    seen = [*(found[path] for path in likely)]
    expected = [*(chances[path] * count for path in likely)]
    seen.append(count - sum(seen))
    expected.append(max(count - sum(expected), 1e-3))
    statistic = sum((one - two) ** 2 / two for one, two in zip(seen, expected, strict=True) if two > 1)
    assert stats.chi2.sf(statistic, len(likely)) > 1e-4


def _law(logits, given):
    """The filters by their definitions [S, V, V]."""
    law = (logits / given.get("temperature", 1.0)).softmax(-1)
    order = law.sort(descending=True)
    if given["top_k"]:
        law = law.masked_fill(law < order.values[..., given["top_k"] - 1, None], 0.0)
    if "top_p" in given:
        before = order.values.cumsum(-1) - order.values
        kept = (before < given["top_p"]).long()
        law = law * torch.zeros_like(kept).scatter(-1, order.indices, kept)
    if "min_p" in given:
        law = law.masked_fill(law < given["min_p"] * law.amax(-1, keepdim=True), 0.0)
    return law / law.sum(-1, keepdim=True)


def test_the_copies_of_a_request_draw_each_for_itself():
    model = Chain(torch.zeros(50, 50))
    found = outcomes(model, [Request([0], config(do_sample=True, seed=1, top_k=0, num_return_sequences=8))])[
        0
    ]
    assert len({tuple(path) for path in found.tokens}) == 8
    assert found.streamed_tokens == dict(enumerate(found.tokens))


def test_copies_that_end_at_different_steps_come_back_in_order():
    model = Chain(torch.zeros(5, 5))
    asked = config(do_sample=True, seed=3, num_return_sequences=12, max_new_tokens=9, eos_token_id=4)
    found = outcomes(model, [Request([0], asked)])[0]
    lengths = [len(path) for path in found.tokens]
    assert len(set(lengths)) > 2
    assert all(4 not in path[:-1] for path in found.tokens)
    assert [found.streamed_tokens[slot] for slot in range(12)] == found.tokens


def test_one_impossible_copy_fails_its_request():
    """A token that allows nothing after it: the request fails as soon as one of its copies chose it."""
    logits = torch.zeros(3, 3)
    logits[2] = -torch.inf
    found = outcomes(Chain(logits), [Request([0], config(do_sample=True, seed=1, num_return_sequences=20))])[
        0
    ]
    assert found.error is not None
    assert not found.hypotheses
