"""Tests of this recipe, behind those of every one."""

import torch

import descant
from descant import testing


def test_budget_interpolates_between_greedy_and_sampling(recipe):
    model, prompt = testing.toy(), torch.tensor([[5, 9, 14]])
    config = {"min_new_tokens": 16, "max_new_tokens": 16}
    greedy = descant.generate(model, prompt, **config)
    config |= {"do_sample": True, "seed": 1}
    sampled = descant.generate(model, prompt, **config)
    zero, small, large = (
        descant.generate(model, prompt, **config, recipe=recipe, budget=budget)
        for budget in (0.0, 5.0, 1000.0)
    )
    assert torch.equal(zero, greedy)
    assert torch.equal(large, sampled)
    assert not torch.equal(small, greedy)
    assert not torch.equal(small, sampled)
