"""Every cache equals a list of lists."""

import pytest

from descant.cache.dense import DenseCache
from descant.testing import check_cache, check_generation
from tests.laws.subjects import MODELS, mixed

CACHES = {"dense": DenseCache}


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_equals_lists(cache):
    check_cache(CACHES[cache], examples=400)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_carries_whole_generations(tiny, cache, name):
    check_generation(CACHES[cache], tiny(name).model, mixed(tiny(name)))
