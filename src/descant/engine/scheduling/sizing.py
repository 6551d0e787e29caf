"""The limits of a scheduler, with a KV pool that fits the memory of the machine."""

from __future__ import annotations

from typing import Any, Final

from descant.engine.memory_check import free_bytes
from descant.engine.scheduling.config import SchedulerConfig
from descant.models.kv_shape import kv_shape_of
from descant.models.model_adapter import as_model

_DEFAULT_KV_SHARE: Final = 0.5  # of the free memory
_MAX_DEFAULT_KV_BYTES: Final = 64 * 2**30
_BLOCK_SIZE: Final = 16


def sized_scheduler(
    model: Any,
    *,
    max_running_rows: int = 256,
    max_step_tokens: int = 2048,
    chunk_tokens: int = 512,
    max_waiting: int | None = None,
    kv_bytes: int | None = None,
) -> tuple[SchedulerConfig, int | None]:
    """The limits of a model's scheduler and the bytes of its KV pool, by default half of the free memory."""
    token_bytes = kv_shape_of(model).bytes_per_token
    budget = kv_bytes
    if budget is None:
        free = free_bytes(as_model(model).device)
        budget = None if free is None else min(int(free * _DEFAULT_KV_SHARE), _MAX_DEFAULT_KV_BYTES)
    num_blocks = None
    if token_bytes and budget is not None:
        num_blocks = max(1, budget // (token_bytes * _BLOCK_SIZE))
    config = SchedulerConfig(
        max_running_rows=max_running_rows,
        max_step_tokens=max(max_step_tokens, max_running_rows),
        chunk_tokens=chunk_tokens,
        max_waiting=max_waiting,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
    )
    return config, budget
