"""All drafts at once equals one by one, on models of every kind."""

import pytest

from descant.testing import ReferenceCache, check_drafts
from tests.contracts.subjects import MODELS, of_method


@pytest.mark.parametrize("name", [*MODELS, "gpt-neox", "qwen2", "gemma"])
def test_drafts_at_once_equal_one_by_one(tiny, name):
    check_drafts(tiny(name).model, of_method(tiny(name), "greedy", 4))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_drafts_on_the_list_cache(tiny, name):
    check_drafts(tiny(name).model, of_method(tiny(name), "greedy", 3), make_cache=ReferenceCache)
