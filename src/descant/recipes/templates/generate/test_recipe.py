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


def test_more_tries_are_never_less_likely(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14]])

    config = {"recipe": recipe, "min_new_tokens": 8, "max_new_tokens": 8}

    def mean_logprob(tries):
        ids = descant.generate(model, prompt, **config, tries=tries)
        with torch.no_grad():
            logprobs = model(ids).logits[:, 2:-1].log_softmax(-1)
        return float(logprobs.gather(2, ids[:, 3:, None]).mean())

    one, four, sixteen = (mean_logprob(tries) for tries in (1, 4, 16))
    assert one <= four + 1e-5
    assert four <= sixteen + 1e-5
