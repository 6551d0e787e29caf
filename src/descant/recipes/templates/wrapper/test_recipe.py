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


def test_output_keeps_to_the_tokens_of_the_prompt(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14, 5]])
    config = {"min_new_tokens": 8, "max_new_tokens": 8}
    unmixed = descant.generate(model, prompt, **config)
    mixed = descant.generate(model, prompt, **config, recipe=recipe, share=0.999)
    assert set(mixed[0, 4:].tolist()) <= {5, 9, 14}
    assert not set(unmixed[0, 4:].tolist()) <= {5, 9, 14}
