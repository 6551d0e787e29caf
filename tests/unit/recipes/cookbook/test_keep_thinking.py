"""Keep thinking: postponed ends, against a reference loop, and the reported tokens."""

from __future__ import annotations

import math

import pytest
import torch

from descant import GenerationConfig, InputError, Request, RowError, generate
from descant.recipes.cookbook.keep_thinking import KeepThinking
from descant.recipes.recipe import Recipe
from descant.testing import outcomes
from tests.support.markov_model import Chain

EOS = 2


def thinking(**arguments) -> Recipe:
    return Recipe.from_object(KeepThinking)(**arguments)


def chain(seed: int, spread: float = 1.5) -> Chain:
    """A model with a likely end token."""
    model = Chain.chance(12, seed, spread, positions=40)
    model.logits[..., EOS] += 2.0
    return model


def reference(model: Chain, new: int, *, wait=None, most=4, above=1.0, window=32, end=(EOS,)) -> list[int]:
    """Greedy search that looks at each distribution by itself."""
    text, mean, waits = [5], 0.0, 0
    while len(text) <= new:
        scores = model.after(torch.tensor([[len(text)]]), torch.tensor([[text[-1]]]))[0, 0].tolist()
        law = torch.tensor(scores, dtype=torch.float64).softmax(-1).tolist()
        token = max(range(len(scores)), key=scores.__getitem__)
        if mean > above and waits < most and token in end:
            waits += 1
            rest = [at for at in range(len(scores)) if at not in end]
            token = max(rest, key=scores.__getitem__) if wait is None else wait
        entropy = -sum(one * math.log(one) for one in law)
        mean += (entropy - mean) / min(len(text), window)
        text.append(token)
        if token == EOS:
            break
    return text[1:]


SETTINGS = [
    {},
    {"above": 0.0},
    {"above": 1.5, "most": 2},
    {"wait": 7, "above": 0.5},
    {"wait": 7, "above": 1.0, "most": 1, "window": 2},
    {"end": (EOS, 3), "above": 0.8, "window": 1},
]


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_it_is_what_decoding_by_hand_gives(given):
    config = GenerationConfig(max_new_tokens=24, eos_token_id=EOS)
    longer = 0
    for seed in range(12):
        model = chain(seed)
        [found] = outcomes(model, [Request([5], config, recipe=thinking(**given))])
        [plain] = outcomes(model, [Request([5], config)])
        assert found.tokens[0] == reference(model, 24, **given), seed
        longer += len(found.tokens[0]) > len(plain.tokens[0])
    assert longer >= 2  # where it never did anything nothing would be shown


def test_certain_models_may_end():
    config = GenerationConfig(max_new_tokens=24, eos_token_id=EOS)
    model = chain(1, spread=50.0)
    [found] = outcomes(model, [Request([5], config, recipe=thinking(above=0.5))])
    [plain] = outcomes(model, [Request([5], config)])
    assert found.tokens == plain.tokens


def test_an_end_is_not_drawn_by_luck_either():
    """Where it must go on, sampling cannot end, likely or not; after `most` times it can."""
    config = GenerationConfig(
        max_new_tokens=12, eos_token_id=EOS, do_sample=True, num_return_sequences=20, seed=1
    )
    for most, ends in ((0, True), (10**6, False)):
        [found] = outcomes(chain(3), [Request([5], config, recipe=thinking(above=0.0, most=most))])
        late = [EOS in tokens[1:] for tokens in found.tokens]
        assert any(late) is ends


def test_a_forced_end_stands():
    """Where only an end is possible it is not postponed: the row would have no token."""
    given = {"max_new_tokens": 6, "min_new_tokens": 1, "eos_token_id": EOS, "forced_eos_token_id": EOS}
    found = generate(chain(3), torch.tensor([[5]]), **given, recipe=thinking(above=0.0, most=100))
    assert found[0, -1] == EOS
    assert len(found[0]) == 7


@pytest.mark.parametrize(
    "given",
    [{"end": -1}, {"end": [1, 2.5]}, {"wait": -3}, {"most": -1}, {"above": "high"}, {"window": 0}],
    ids=str,
)
def test_what_cannot_be_is_refused(given):
    with pytest.raises(InputError, match=f"`{next(iter(given))}` must be"):
        KeepThinking(**given)


def test_a_token_to_wait_with_that_there_is_not_fails_its_row_alone():
    config = GenerationConfig(max_new_tokens=24, eos_token_id=EOS)
    requests = [Request([5], config, recipe=thinking(above=0.0, wait=10**6)), Request([5], config)]
    model = next(one for one in map(chain, range(12)) if reference(one, 24) != reference(one, 24, most=0))
    failed, other = outcomes(model, requests)
    assert isinstance(failed.error, RowError)
    assert other.tokens[0] == reference(model, 24, most=0)
