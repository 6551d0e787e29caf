"""A cache of a request's own: whatever it forgets or rounds, no other request is changed by it.

Every cache that can be named runs before, beside and after requests that name none, and each of both is as it
is alone.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from descant import GenerationConfig, Request
from descant.engine.planning.cache_factory import CACHES
from descant.testing import Outcome, Schedule, compare, outcomes
from tests.contracts.subjects import requests
from tests.contracts.test_cache_matrix import TIGHT
from tools.sweep.kinds import representative
from tools.sweep.trial import subject_of

NEW = 9
LATER = NEW + 1  # a step at which the requests before have ended
SCHEDULES = {
    "before": Schedule({0: [0, 1], LATER: [2, 3, 4]}),
    "beside": Schedule({0: [0, 2, 1, 3, 4]}),
    "during": Schedule({0: [0, 1], 3: [2, 3, 4]}, admit_together=False),
    "after": Schedule({0: [2, 3, 4], LATER: [0, 1]}),
}
# Named requests first, then those that name no cache.
METHODS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 4, "num_return_sequences": 2},
    {},
    {"num_beams": 3},
    {"do_sample": True, "seed": 5, "repetition_penalty": 1.2},
]


@functools.cache
def subject(tiny: Any, cache: str) -> tuple[Any, list[Request], list[Outcome]]:
    """A model that can have the cache, the requests, and what each gives alone."""
    configs = [GenerationConfig(**method, max_new_tokens=NEW) for method in METHODS]
    if cache == "mamba":
        found = subject_of(representative("recurrent"))
        model, prompts = found.model, [one["input_ids"][0].tolist() for one in found.prompts]
        given = [
            Request(prompts[at % len(prompts)], config)
            for at, config in enumerate(configs)
            if config.num_beams == 1
        ]
        given.insert(3, given[2])
    else:
        one = tiny("mistral" if cache in ("sliding_window", "hybrid") else "llama")
        model, given = one.model, requests(one, configs, (17, 9, 12, 14), seed=5)
    settings = TIGHT.get(cache, ("", {}))[1]
    for at in (0, 1):
        named = given[at].generation_config.replace(cache_implementation=cache, cache_config=settings or None)
        given[at] = replace(given[at], generation_config=named)
    return model, given, [outcomes(model, [each])[0] for each in given]


@pytest.mark.parametrize("when", SCHEDULES)
@pytest.mark.parametrize("cache", CACHES)
def test_each_is_as_it_is_alone(tiny, cache, when):
    model, given, alone = subject(tiny, cache)
    found = outcomes(model, given, SCHEDULES[when])
    for place, (one, other) in enumerate(zip(alone, found, strict=True)):
        compare(one, other, f"request {place}, {cache} {when}")


def test_the_lossy_ones_are_lossy_here(tiny):
    """Otherwise the law above would hold for nothing."""
    for cache in ("sink", "snapkv", "h2o", "quantized"):
        model, given, alone = subject(tiny, cache)
        exact = given[0].generation_config.replace(cache_implementation=None, cache_config=None)
        plain = outcomes(model, [replace(given[0], generation_config=exact)])[0]
        assert plain.tokens != alone[0].tokens or any(
            not plain.logits[key].allclose(value, atol=1e-3) for key, value in alone[0].logits.items()
        )


@pytest.mark.parametrize("cache", ["sink", "quantized"])
def test_methods_that_wrap_the_model_run_on_several_caches_at_once(tiny, cache):
    one, settings = tiny("llama"), TIGHT[cache][1]
    named = {"cache_implementation": cache, "cache_config": settings}
    methods = [
        {"guidance_scale": 1.5, **named},
        {"dola_layers": "low"},
        {"guidance_scale": 1.4},
        {**named},
        {"suffix_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant", **named},
        {"suffix_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    ]
    configs = [GenerationConfig(**method, max_new_tokens=NEW) for method in methods]
    given = requests(one, configs, (11, 8, 13), seed=6)
    alone = [outcomes(one.model, [each])[0] for each in given]
    for schedule in (Schedule.at_once(range(6)), Schedule({0: [0, 5], 2: [1, 3], 4: [2, 4]})):
        found = outcomes(one.model, given, schedule)
        for place, (expected, other) in enumerate(zip(alone, found, strict=True)):
            compare(expected, other, f"request {place}, {cache}, {schedule}")
