"""The engine of a server."""

from __future__ import annotations

from descant.serve.assembly import EngineOptions, start_engine
from tests.support import tiny_models


def test_the_kv_pool_has_the_bytes_that_are_given(tmp_path):
    model = tiny_models.load("llama", tiny_models.build("llama", tmp_path)).model
    token_bytes = 2 * 2 * 8 * 2 * 4  # layers, heads, numbers, keys and values, bytes
    with start_engine(model, EngineOptions(kv_bytes=10 * 16 * token_bytes)) as engine:
        assert engine.scheduler_config.num_blocks == 10
