"""The settings of a cache: defaults, and what is refused."""

from __future__ import annotations

import pytest

from descant import GenerationConfig
from descant.engine.planning.cache_factory import CacheRequest
from descant.errors import ConfigError


def settings(given, **known):
    config = GenerationConfig(cache_implementation="static", cache_config=given)
    return CacheRequest(None, config, 8).settings(**known)


def test_given_settings_replace_defaults():
    assert settings(None, budget=4) == {"budget": 4}
    assert settings({"max_cache_len": 9}, max_cache_len=None, batch_size=2) == {
        "max_cache_len": 9,
        "batch_size": 2,
    }
    assert settings({"max_cache_len": None}, max_cache_len=None) == {"max_cache_len": None}


@pytest.mark.parametrize("default", [None, 5])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1", 2**31])
def test_a_number_outside_its_range_is_refused(default, value):
    with pytest.raises(ConfigError, match=r"must have an integer >= 1 as `max_cache_len`"):
        settings({"max_cache_len": value}, max_cache_len=default)
    assert settings({"max_cache_len": 1}, max_cache_len=default) == {"max_cache_len": 1}


def test_none_is_refused_where_a_number_is_needed():
    with pytest.raises(ConfigError, match=r"must have an integer >= 1 as `batch_size`"):
        settings({"batch_size": None}, batch_size=2)


def test_an_unknown_setting_and_another_caches_are_refused():
    with pytest.raises(ConfigError, match=r"has no `budget` for the static cache.*known are batch_size"):
        settings({"budget": 3}, batch_size=1)
    with pytest.raises(
        ConfigError, match=r"must be for the cache that `cache_implementation` names, 'static'"
    ):
        settings({"cache_implementation": "paged"})
