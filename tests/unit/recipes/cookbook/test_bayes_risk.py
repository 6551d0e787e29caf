"""Minimum Bayes risk: the samples that sampling draws, ranked by what they share, emitted at the end."""

from __future__ import annotations

import pytest
import torch

from descant import ConfigError, GenerationConfig, InputError, RecipeError, Request, generate, stream
from descant.recipes.cookbook.bayes_risk import BayesRisk, ngrams, utility
from descant.recipes.recipe import Recipe
from descant.testing import outcomes, toy

DRAWN = {"do_sample": True, "max_new_tokens": 10}


def risk(**arguments) -> Recipe:
    return Recipe.from_object(BayesRisk)(**arguments)


def shared(one: list[int], other: list[int], most: int) -> float:
    """The F-measure of two texts' n-grams, counted by striking out."""
    runs = [
        [text[at : at + size] for size in range(1, most + 1) for at in range(len(text) - size + 1)]
        for text in (one, other)
    ]
    left, both = list(runs[1]), 0
    for run in runs[0]:
        if run in left:
            left.remove(run)
            both += 1
    precision, recall = both / len(runs[0]), both / len(runs[1])
    return 2 * precision * recall / (precision + recall) if both else 0.0


def expected(texts: list[list[int]], most: int) -> list[float]:
    """What each text shares with the others on average."""
    return [
        sum(shared(one, other, most) for at, other in enumerate(texts) if at != place) / (len(texts) - 1)
        for place, one in enumerate(texts)
    ]


# ------------------------------------------------------------------------ what is chosen
@pytest.mark.parametrize(
    ("one", "other", "most", "value"),
    [
        ([1, 2, 3], [1, 2, 3], 2, 1.0),
        ([1, 2, 3], [4, 5], 2, 0.0),
        ([1, 2], [2, 1], 2, 2 / 3),  # both tokens, and no pair
        ([1, 1, 1], [1], 1, 0.5),  # repeated tokens count once
        ([1], [1], 4, 1.0),  # too short for longer runs
    ],
)
def test_utility(one, other, most, value):
    assert utility(ngrams(one, most), ngrams(other, most)) == pytest.approx(value)
    assert shared(one, other, most) == pytest.approx(value)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_it_ranks_what_sampling_draws(most):
    model = toy()
    for seed in range(4):
        config = GenerationConfig(**DRAWN, seed=seed, num_return_sequences=6)
        [plain] = outcomes(model, [Request([5, 6], config)])
        [found] = outcomes(model, [Request([5, 6], config, recipe=risk(samples=6, ngram=most))])
        values = expected(plain.tokens, most)
        order = [plain.tokens.index(tokens) for tokens in found.tokens]
        assert sorted(found.tokens) == sorted(plain.tokens)
        assert [one.score for one in found.hypotheses] == pytest.approx([values[at] for at in order])
        assert [values[at] for at in order] == pytest.approx(sorted(values, reverse=True))
        assert found.reasons == [plain.reasons[at] for at in order]


# ------------------------------------------------------------------------ events
def test_nothing_comes_before_the_end():
    model = toy()
    [found] = outcomes(model, [Request([5, 6], GenerationConfig(**DRAWN, seed=1), recipe=risk(samples=4))])
    assert found.streamed_tokens == {}
    [event] = stream(model, torch.tensor([[5, 6]]), **DRAWN, seed=1, recipe=risk(samples=4))
    assert list(event.token_ids) == found.tokens[0]
    assert event.hypothesis.score == found.hypotheses[0].score
    assert len(event.logprob) == len(event.token_ids)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"do_sample": False}, ConfigError, "`do_sample` must be True"),
        ({"samples": 1}, InputError, "`samples` must be an integer between 2"),
        ({"ngram": 0}, InputError, "`ngram`"),
        ({"num_return_sequences": 9, "samples": 4}, RecipeError, "num_return_sequences"),
        ({"num_beams": 2}, ConfigError, "num_beams"),
        ({"candidates": 4}, Exception, "candidates"),
    ],
)
def test_what_cannot_be_is_refused(given, error, match):
    with pytest.raises(error, match=match):
        generate(toy(), torch.tensor([[5, 6]]), **{**DRAWN, "recipe": BayesRisk, **given})


# ------------------------------------------------------------------------ a real model
def test_it_chooses_better_than_chance(real):
    """Against samples that it has never seen, the choice shares more than a sample does by chance."""
    one = real("stories15m")
    ids = torch.tensor([one.tokens("Once upon a time")])
    start, drawn = ids.shape[1], {"do_sample": True, "max_new_tokens": 24, "top_k": 0}
    fresh = generate(one.model, ids, **drawn, seed=99, num_return_sequences=24)[:, start:].tolist()
    chosen, chance = [], []
    for seed in range(4):
        given = {**drawn, "seed": seed, "num_return_sequences": 8}
        ranked = generate(one.model, ids, **given, recipe="bayes-risk", samples=8)[:, start:].tolist()
        values = [sum(shared(text, other, 2) for other in fresh) / len(fresh) for text in ranked]
        chosen.append(values[0])
        chance.append(sum(values) / len(values))
    assert sum(chosen) / 4 > 1.1 * sum(chance) / 4
