"""Every cache equals a list of lists, under any sequence of operations and in whole generations.

`pytest tests/contracts/test_caches.py -m ""` goes through more than a hundred times as many.
"""

from __future__ import annotations

import pytest

from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from descant.testing import check_cache, check_generation
from tests.contracts.stores import ROUNDED_BY_HQQ, STORES, VARIANTS, small, store
from tests.contracts.subjects import MODELS, mixed
from tests.support.extras import need_hqq

WIDE = [
    pytest.param(name, 5_000, id=f"{name}, long", marks=pytest.mark.slow)
    for name in (*STORES, *VARIANTS)
    if name != ROUNDED_BY_HQQ
]
EXAMPLES = [
    *(pytest.param(name, 40, id=name) for name in STORES),
    *(
        pytest.param(name, 30, id=name, marks=pytest.mark.hqq if name == ROUNDED_BY_HQQ else ())
        for name in VARIANTS
    ),
    *WIDE,
]


@pytest.mark.ci_cases(
    "list",
    "dense",
    "paged",
    "window",
    "sink",
    "static",
    "offloaded",
    "offloaded_static",
    "quantized",
    "snapkv",
    "h2o",
    "paged, a slot a block",
    "window of one",
    "quantized by hqq",
)
@pytest.mark.parametrize(("name", "examples"), EXAMPLES)
def test_a_cache_equals_lists(name, examples):
    if name == ROUNDED_BY_HQQ:
        need_hqq()
    with small():
        check_cache(store(name).make, examples, traits=store(name).traits)


@pytest.mark.ci_cases("PagedStore-t5", "DenseStore-llama")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [DenseStore, PagedStore])
def test_a_cache_carries_whole_generations(tiny, cache, name):
    check_generation(cache, tiny(name).model, mixed(tiny(name)))
