"""The names of `cache_implementation`: the config and the engine list the same ones."""

from __future__ import annotations

from descant.config.parameters import CACHE_IMPLEMENTATIONS
from descant.engine.planning.cache_factory import ALIASES, CACHES


def test_every_cache_name_of_the_config_can_be_built():
    assert sorted(CACHE_IMPLEMENTATIONS) == sorted((*CACHES, *ALIASES))
