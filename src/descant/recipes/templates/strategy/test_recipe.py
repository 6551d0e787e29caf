"""Contract tests of every recipe, and tests of this one."""

from pathlib import Path

import pytest
import torch

import descant
from descant.recipes.lock import Lock
from descant.testing import check_recipe, toy

FOLDER = Path(__file__).parents[1]


@pytest.fixture
def recipe(tmp_path):
    # A separate lock file: tests the current files, not the trusted version.
    lock = Lock(tmp_path / "recipes.lock")
    return descant.load_recipe(FOLDER, trust_remote_code=True, lock=lock)


def test_it_fulfils_the_contracts(recipe):
    check_recipe(recipe)


def test_budget_interpolates_between_greedy_and_sampling(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14]])
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
