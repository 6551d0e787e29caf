"""Contract tests of every recipe, and tests of this one."""

from pathlib import Path

import pytest
import torch  # noqa: F401

import descant
from descant import testing
from descant.recipes.lock import Lock

FOLDER = Path(__file__).parents[1]


@pytest.fixture
def recipe(tmp_path):
    # A separate lock file: tests the current files, not the trusted version.
    lock = Lock(tmp_path / "recipes.lock")
    return descant.load_recipe(FOLDER, trust_remote_code=True, lock=lock)


def test_it_fulfils_the_contracts(recipe):
    testing.check_recipe(recipe)
