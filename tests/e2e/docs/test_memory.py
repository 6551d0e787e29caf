"""The table of caches equals the code."""

from typing import Any

import pytest
import torch
import transformers

import descant
from descant.config.generation_config import GenerationConfig
from descant.engine.memory_check import cache_request
from descant.engine.planning.cache_factory import CACHES
from tools.docs import cache_tables


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(cache_tables.MODEL)


def test_the_page_is_current(model: Any) -> None:
    page = cache_tables.PAGE.read_text(encoding="utf-8")
    assert page == cache_tables.render(page, model), "run tools/docs/cache_tables.py"


def test_every_cache_is_a_line_and_every_class_is_public() -> None:
    lines = cache_tables.PAGE.read_text(encoding="utf-8").splitlines()
    assert [name for name in CACHES if sum(line.startswith(f'| `"{name}"` | `') for line in lines) != 1] == []
    for classes in cache_tables.CLASSES.values():
        for one in classes:
            assert getattr(descant, one.__name__) is one
            assert issubclass(one, transformers.cache_utils.Cache)


def test_the_sizes_are_real(model: Any) -> None:
    ids = torch.randint(100, 1000, (1, 90), generator=torch.Generator().manual_seed(0))
    for kind in ("dynamic", "paged", "static", "h2o"):
        fields = {"max_new_tokens": 12, "cache_implementation": kind, "eos_token_id": None}
        session = descant.Session(model)
        config = GenerationConfig(**fields)
        session.admit(descant.Request(ids[0].tolist(), config))
        held = 0
        while len(session):
            held = session.report().cache_bytes or held
            session.step()
        told = descant.estimate(model, prompt_length=90, **fields)
        assert held == pytest.approx(told.bytes, rel=0.05), kind


def test_the_max_rewind_is_that_of_the_cache(model: Any) -> None:
    target = cache_tables.stand_in(model, "full_attention")
    for name in ("dynamic", "sink", "h2o"):
        want = cache_request(target, GenerationConfig(), name, cache_tables.LONG)
        back = CACHES[name].build(want).max_rewind
        told = cache_tables.line(name, model, cache_tables.kv_shape_of(model))[5]
        assert told == ("all" if back is None else f"{back} tokens")
