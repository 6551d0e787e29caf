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


def test_drafts_save_forwards_and_keep_the_output(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14] * 4])
    # A bias towards the prompt's tokens makes the text repeat itself.
    config = {"max_new_tokens": 24, "logit_bias": {5: 20.0, 9: 20.0, 14: 20.0}}
    expected = descant.generate(model, prompt, **config)
    output = descant.generate(
        model, prompt, **config, recipe=recipe, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert output.speculation[0].saved_forwards > 0
