"""What a run's cache will take: the cache itself, fed one byte for a key and one for a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import KVSpan
from descant.engine.cache_factory import (
    CACHES,
    CacheRequest,
    cache_name,
    missing_requirement,
    quantized_cache_config,
)
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.quantizers import BACKENDS, GroupCodec, Quantizer
from descant.kv_cache.sink import SinkStore
from descant.kv_cache.slot_blocks import SlotBlocks
from descant.models.kv_shape import KVShape, LayerKVShape

__all__ = ["CacheCost", "Workload", "cache_cost", "cache_costs", "cache_request"]

# Tokens are written in strides, so many or a little more: every cache is as large after a stride as after its
# tokens one by one, but for where it last grew. Up to some length no stride may pass for a prompt of its own.
_NUM_STRIDES: Final = 256
_MAX_STRIDE: Final = 48
_LONG_RUN: Final = 2**16
# With more positions than this nobody rehearses: the bytes are counted.
_MAX_SIMULATED_POSITIONS: Final = 2**26


class Workload(NamedTuple):
    """The rows of a run: prompts that fork once they are read, and grow to the end."""

    num_prompts: int
    rows_per_prompt: int  # of each prompt
    prompt_length: int  # positions
    final_length: int  # positions of a row at the end
    num_candidates: int = 1  # candidates of each row, tried in rows of their own and dropped again
    has_cfg_rows: bool = False  # every row has one after another prompt
    encoder_length: int = 0  # positions that an encoder gives for each prompt

    @property
    def num_rows(self) -> int:
        """How many rows there are in all."""
        return self.num_prompts * self.rows_per_prompt * (1 + self.has_cfg_rows)

    @property
    def total_positions(self) -> int:
        """How many positions its rows have in all, at the end."""
        return self.num_rows * self.final_length


class CacheCost(NamedTuple):
    """What a cache takes."""

    final_bytes: int  # at the end of the run
    peak_bytes: int  # at the most, between two forwards
    offloaded_bytes: int = 0  # of the first, where the model is not


def cache_costs(
    model: Any, config: GenerationConfig, run: Workload, geometry: KVShape
) -> dict[str, CacheCost | None]:
    """What every cache that a model can use would take; None where that cannot be known."""
    found: dict[str, CacheCost | None] = {}
    for name in CACHES:
        want = cache_request(model, config, name, run)
        if missing_requirement(name, want) is None:
            found[name] = cache_cost(name, want, run, geometry)
    return found


def cache_request(model: Any, config: GenerationConfig, name: str, run: Workload) -> CacheRequest:
    """What a cache of that name is made for, by the config's settings where they are for that one."""
    if cache_name(config) != name:
        config = config.replace(cache_implementation=name, cache_config=None, compile_config=None)
    return CacheRequest(model, config, run.final_length + 1)


def cache_cost(name: str, want: CacheRequest, run: Workload, geometry: KVShape) -> CacheCost | None:
    """What a cache of that name takes for a run; None where that cannot be known."""
    facts = want.traits
    cross = run.num_prompts * run.encoder_length * geometry.cross_bytes
    if facts.cache_type == "recurrent":
        windows = [window for window in facts.sliding_windows.values() if window is not None]
        if geometry.state_bytes is None or (
            geometry.state_bytes_per_token and windows and run.final_length > min(windows)
        ):
            return None
        total = cross + run.num_rows * run.num_candidates * (
            geometry.state_bytes + run.final_length * geometry.state_bytes_per_token
        )
        return CacheCost(total, total)
    if run.total_positions * run.num_candidates > _MAX_SIMULATED_POSITIONS:
        return _count_bytes(name, run, geometry)
    end = most = largest = 0
    for (layer, shape), count in _layer_groups(geometry, facts.layer_types).items():
        small, high = _SIMULATORS.get(name, _simulate_cache)(
            CACHES[name].build, want, _LayerShape(layer, shape), run
        )
        end, most = end + count * shape.num_heads * small, most + count * shape.num_heads * high
        largest = max(largest, shape.num_heads * small)
    if name in _OFFLOADED_CACHES and torch.device(_offload_device(want)) != want.model.device:
        # The model's device has the layer at hand and the next.
        return CacheCost(end + cross, min(2 * largest, end) + cross, end)
    return CacheCost(end + cross, most + cross)


def _count_bytes(name: str, run: Workload, geometry: KVShape) -> CacheCost | None:
    """What keys and values take without any slack, where a cache keeps all of them as they are."""
    if CACHES[name].drops_tokens or name == "quantized":
        return None
    positions = run.total_positions * run.num_candidates
    if name == "paged":
        positions -= (run.num_rows - run.num_prompts * (1 + run.has_cfg_rows)) * run.prompt_length
    total = positions * geometry.bytes_per_token + run.num_prompts * run.encoder_length * geometry.cross_bytes
    return CacheCost(total, total)


def _layer_groups(geometry: KVShape, kinds: tuple[str, ...]) -> Mapping[tuple[int, LayerKVShape], int]:
    """How many layers are like each other: the first of them, and what it keeps of a token."""
    first: dict[tuple[LayerKVShape, str], int] = {}
    count: dict[tuple[int, LayerKVShape], int] = {}
    for layer, shape in geometry.layers.items():
        like = first.setdefault((shape, kinds[layer] if layer < len(kinds) else ""), layer)
        count[like, shape] = count.get((like, shape), 0) + 1
    return count


# ------------------------------------------------------------------------ one head of one layer
class _LayerShape(NamedTuple):
    """A layer, and what it keeps of a token."""

    layer: int
    shape: LayerKVShape

    @property
    def slot_bytes(self) -> int:
        """Bytes of a key and a value of one head."""
        return self.shape.nbytes // self.shape.num_heads


CacheBuilder = Callable[[CacheRequest], Any]


def _growth_strides(run: Workload) -> Iterator[tuple[int, int]]:
    """From where to where rows grow after the prompt, stride by stride."""
    left = run.final_length - run.prompt_length
    stride = max(1, -(-left // _NUM_STRIDES))
    stride = stride if left > _LONG_RUN else min(stride, _MAX_STRIDE)
    for start in range(run.prompt_length, run.final_length, stride):
        yield start, min(start + stride, run.final_length)


def _simulate_cache(
    build: CacheBuilder, want: CacheRequest, layer: _LayerShape, run: Workload
) -> tuple[int, int]:
    """The bytes of one head at the end of a run, and at the most: the cache goes through all of it."""
    return _simulate(build(want), layer, run)


def _simulate(store: Any, layer: _LayerShape, run: Workload) -> tuple[int, int]:
    most = 0

    def write(start: int, stop: int) -> None:
        nonlocal most
        part = torch.zeros(len(store), 1, stop - start, 1, dtype=torch.uint8)
        span = KVSpan(None, start, stop - start, stop)
        store.visible_slots(layer.layer, span)
        store.update(layer.layer, part, part, span)
        most = max(most, store.nbytes)

    def commit(parents: Tensor | None, length: int) -> None:
        store.commit(parents, torch.full((len(store) if parents is None else len(parents),), length))

    prompts = run.num_prompts * (1 + run.has_cfg_rows)
    store.extend(prompts)
    write(0, run.prompt_length)
    commit(torch.arange(prompts).repeat_interleave(run.rows_per_prompt), run.prompt_length)
    for start, stop in _growth_strides(run):
        if run.num_candidates > 1:
            commit(torch.arange(run.num_rows).repeat_interleave(run.num_candidates), start)
        write(start, stop)
        commit(torch.arange(0, len(store), run.num_candidates) if run.num_candidates > 1 else None, stop)
    return store.nbytes // 2 * layer.slot_bytes, most // 2 * layer.slot_bytes


def _simulate_sink(
    build: CacheBuilder, want: CacheRequest, layer: _LayerShape, run: Workload
) -> tuple[int, int]:
    """Sinks, which take as much whether they are turned or not."""
    length, sinks, _, *rest = build(want)._init_args
    return _simulate(SinkStore(length, sinks, None, *rest), layer, run)


def _simulate_evicting(
    build: CacheBuilder, want: CacheRequest, layer: _LayerShape, run: Workload
) -> tuple[int, int]:
    """What is kept by votes: how much that is does not depend on them."""
    store = build(want)
    slots = SlotBlocks(store._accumulates_scores)
    byte = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    prompts = run.num_prompts * (1 + run.has_cfg_rows)

    def kept(held: int, grown: int, reading: bool) -> int:
        found: Tensor = store._num_to_keep(
            torch.tensor([held]), torch.tensor([grown]), torch.tensor([reading])
        )
        return int(found)

    held = kept(run.prompt_length, run.prompt_length, True)
    slots.ensure_capacity(0, (byte, byte), run.num_rows, held)
    for start, stop in _growth_strides(run):
        slots.ensure_capacity(0, (byte, byte), run.num_rows * run.num_candidates, held + 1)
        held = kept(held + stop - start, 1, False)
        slots.ensure_capacity(0, (byte, byte), run.num_rows * run.num_candidates, held)
        slots.shrink_to_fit(run.num_rows, held)
    votes = torch.float32.itemsize if store._accumulates_scores else 0
    end = slots.nbytes // (2 + votes) * (layer.slot_bytes + votes)
    # A prompt lies beside the slots until it is known what stays of it, and so do its queries.
    return end, max(end, prompts * run.prompt_length * (layer.slot_bytes + layer.slot_bytes // 2))


def _simulate_quantized(
    _: CacheBuilder, want: CacheRequest, layer: _LayerShape, run: Workload
) -> tuple[int, int]:
    """Chunks of codes, those of prompts shared, and the latest positions of every row as they came."""
    config = quantized_cache_config(want)
    # No package is needed to know how large codes are.
    blank = type(
        "Blank",
        (BACKENDS[config.backend.lower()],),
        {"_package": lambda _: None, "quantize_groups": _empty_groups},
    )
    made = blank(config.nbits, config.axis_key, config.axis_value, config.q_group_size, config.compute_dtype)
    prompts, every = run.num_prompts * (1 + run.has_cfg_rows), max(config.residual_length, 1)
    full, rest = divmod(run.final_length - run.prompt_length, every)
    chunks = prompts * _chunk_bytes(made, layer.shape, run.prompt_length)
    if full:
        chunks += run.num_rows * full * _chunk_bytes(made, layer.shape, every)
    latest = DenseStore()
    latest.extend(run.num_rows * run.num_candidates)
    for stop in range(1, (every if full else rest) + 1):
        part = torch.zeros(len(latest), 1, 1, 1, dtype=torch.uint8)
        latest.update(0, part, part, KVSpan(None, stop - 1, 1, stop))
    end = chunks + latest.nbytes // 2 * layer.slot_bytes
    return end, max(end, prompts * run.prompt_length * layer.slot_bytes)


def _chunk_bytes(made: Quantizer, shape: LayerKVShape, length: int) -> int:
    """The bytes of so many positions as codes."""
    total = 0
    for size, across in (
        (shape.key_dim, made.key_codec.over_positions),
        (shape.value_dim, made.value_codec.over_positions),
    ):
        content = torch.empty(1, length, size, dtype=shape.dtype, device="meta")
        total += GroupCodec(made, across).encode(content).nbytes
    return total


def _empty_groups(_: Any, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of numbers [G, g], all of them nothing."""
    scale = content[:, :1]
    return content.to(torch.uint8), scale, scale


def _offload_device(want: CacheRequest) -> Any:
    """Where blocks rest that are not kept with the model."""
    return dict(want.config.cache_config or {}).get("offload_device", "cpu")


_SIMULATORS: Final[Mapping[str, Callable[[CacheBuilder, CacheRequest, _LayerShape, Workload], tuple[int, int]]]] = {
    "sink": _simulate_sink, "snapkv": _simulate_evicting, "h2o": _simulate_evicting, "quantized": _simulate_quantized,
}  # fmt: skip
_OFFLOADED_CACHES: Final = frozenset({"offloaded", "offloaded_static"})
