"""Contract tests of every recipe, and tests of this one."""

from pathlib import Path

import pytest
import torch

import descant
from descant.recipes.lock import Lock
from descant.testing import check_recipe

FOLDER = Path(__file__).parents[1]


@pytest.fixture
def recipe(tmp_path):
    # A separate lock file: tests the current files, not the trusted version.
    lock = Lock(tmp_path / "recipes.lock")
    return descant.load_recipe(FOLDER, trust_remote_code=True, lock=lock)


def test_it_fulfils_the_contracts(recipe):
    check_recipe(recipe)


def test_temperature_decreases(recipe):
    processor = recipe(first=2.0, last=1.0, span=4).processor
    scores = torch.tensor([[0.0, 6.0]])
    for new, temperature in ((0, 2.0), (2, 1.5), (4, 1.0), (9, 1.0)):
        ids = torch.zeros(1, new, dtype=torch.long)  # all of them new
        assert torch.allclose(processor(ids, scores), scores / temperature)
