"""The memory of a workload's cache: the cache itself is workload, with keys and values of one byte."""

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
from descant.kv_cache.static import StaticStore
from descant.models.kv_shape import KVShape, LayerKVShape

__all__ = ["PREALLOCATED_CACHES", "CacheCost", "Workload", "cache_cost", "cache_costs", "cache_request"]

# Tokens are written in strides, for speed: a cache is as large after a stride as after its tokens one by one,
# except for where it last grew. In short runs a stride must not be long enough to count as a prompt.
_NUM_STRIDES: Final = 256
_MAX_STRIDE: Final = 48
_LONG_RUN: Final = 2**16
# Caches that allocate everything at the start.
PREALLOCATED_CACHES: Final = frozenset({"static", "offloaded_static"})
# Workloads with more positions are not simulated: the bytes are counted.
_MAX_SIMULATED_POSITIONS: Final = 2**26


class Workload(NamedTuple):
    """Prompts that fork after their prefill, and grow to their final length."""

    num_prompts: int
    rows_per_prompt: int
    prompt_length: int  # positions
    final_length: int  # positions of a row at the end
    num_candidates: int = 1  # rows that each row becomes while its next token is chosen
    has_cfg_rows: bool = False  # every row has an unconditional row
    encoder_length: int = 0  # positions of the encoder per prompt

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.num_prompts * self.rows_per_prompt * (1 + self.has_cfg_rows)

    @property
    def total_positions(self) -> int:
        """The number of positions of all rows at the end."""
        return self.num_rows * self.final_length


class CacheCost(NamedTuple):
    """The memory of a cache."""

    final_bytes: int  # at the end
    peak_bytes: int  # the maximum between two forwards, on the model's device
    offloaded_bytes: int = 0  # those of `final_bytes` on the offload device


def cache_costs(
    model: Any, config: GenerationConfig, workload: Workload, kv_shape: KVShape
) -> dict[str, CacheCost | None]:
    """The memory of every cache that a model can use; None: unknown."""
    costs: dict[str, CacheCost | None] = {}
    for name in CACHES:
        request = cache_request(model, config, name, workload)
        if missing_requirement(name, request) is None:
            costs[name] = cache_cost(name, request, workload, kv_shape)
    return costs


def cache_request(model: Any, config: GenerationConfig, name: str, workload: Workload) -> CacheRequest:
    """What a cache of that name is built for, with the config's settings if it selects that cache."""
    if cache_name(config) != name:
        config = config.replace(cache_implementation=name, cache_config=None, compile_config=None)
    return CacheRequest(model, config, workload.final_length + 1)


def cache_cost(name: str, request: CacheRequest, workload: Workload, kv_shape: KVShape) -> CacheCost | None:
    """The memory of a cache of that name for a workload; None: unknown."""
    traits = request.traits
    cross = workload.num_prompts * workload.encoder_length * kv_shape.cross_bytes
    if traits.cache_type == "recurrent":
        windows = [window for window in traits.sliding_windows.values() if window is not None]
        if kv_shape.state_bytes is None or (
            kv_shape.state_bytes_per_token and windows and workload.final_length > min(windows)
        ):
            return None
        total = cross + workload.num_rows * workload.num_candidates * (
            kv_shape.state_bytes + workload.final_length * kv_shape.state_bytes_per_token
        )
        return CacheCost(total, total)
    positions = _num_positions(name, request, workload)
    if positions > _MAX_SIMULATED_POSITIONS:
        return _count_bytes(name, workload, kv_shape, positions)
    final = peak = largest = 0
    for (layer, shape), count in _layer_groups(kv_shape, traits.layer_types).items():
        head_final, head_peak = _SIMULATORS.get(name, _simulate_cache)(
            CACHES[name].build, request, _LayerShape(layer, shape), workload
        )
        final += count * shape.num_heads * head_final
        peak += count * shape.num_heads * head_peak
        largest = max(largest, shape.num_heads * head_final)
    if name in _OFFLOADED_CACHES and torch.device(_offload_device(request)) != request.model.device:
        # The model's device holds the current layer and the next.
        return CacheCost(final + cross, min(2 * largest, final) + cross, final)
    return CacheCost(final + cross, peak + cross)


def _num_positions(name: str, request: CacheRequest, workload: Workload) -> int:
    """The number of positions of all rows, or for how many the cache allocates at once."""
    rows = workload.num_rows * workload.num_candidates
    if name in PREALLOCATED_CACHES:
        store = CACHES[name].build(request)
        assert isinstance(store, StaticStore)
        return store.block_slots(rows)
    return rows * workload.final_length


def _count_bytes(name: str, workload: Workload, kv_shape: KVShape, positions: int) -> CacheCost | None:
    """The bytes of all keys and values; None: the cache evicts or compresses them."""
    if CACHES[name].drops_tokens or name == "quantized":
        return None
    if name == "paged":
        positions -= (
            workload.num_rows - workload.num_prompts * (1 + workload.has_cfg_rows)
        ) * workload.prompt_length
    total = (
        positions * kv_shape.bytes_per_token
        + workload.num_prompts * workload.encoder_length * kv_shape.cross_bytes
    )
    return CacheCost(total, total)


def _layer_groups(kv_shape: KVShape, layer_types: tuple[str, ...]) -> Mapping[tuple[int, LayerKVShape], int]:
    """The layers of each kind, as the first of them and its shape, with their number."""
    first: dict[tuple[LayerKVShape, str], int] = {}
    counts: dict[tuple[int, LayerKVShape], int] = {}
    for layer, shape in kv_shape.layers.items():
        same = first.setdefault((shape, layer_types[layer] if layer < len(layer_types) else ""), layer)
        counts[same, shape] = counts.get((same, shape), 0) + 1
    return counts


# ------------------------------------------------------------------------ one head of one layer
class _LayerShape(NamedTuple):
    """A layer and the shape of its keys and values."""

    layer: int
    shape: LayerKVShape

    @property
    def slot_bytes(self) -> int:
        """The bytes of a key and a value of one head."""
        return self.shape.nbytes // self.shape.num_heads


CacheBuilder = Callable[[CacheRequest], Any]


def _growth_strides(workload: Workload) -> Iterator[tuple[int, int]]:
    """The start and stop of each stride in which rows grow after the prompt."""
    growth = workload.final_length - workload.prompt_length
    stride = max(1, -(-growth // _NUM_STRIDES))
    stride = stride if growth > _LONG_RUN else min(stride, _MAX_STRIDE)
    for start in range(workload.prompt_length, workload.final_length, stride):
        yield start, min(start + stride, workload.final_length)


def _simulate_cache(
    build: CacheBuilder, request: CacheRequest, layer: _LayerShape, workload: Workload
) -> tuple[int, int]:
    """The final and peak bytes of one head, by running the cache."""
    return _simulate(build(request), layer, workload)


def _simulate(store: Any, layer: _LayerShape, workload: Workload) -> tuple[int, int]:
    peak = 0

    def write(start: int, stop: int) -> None:
        nonlocal peak
        part = torch.zeros(len(store), 1, stop - start, 1, dtype=torch.uint8)
        span = KVSpan(None, start, stop - start, stop)
        store.visible_slots(layer.layer, span)
        store.update(layer.layer, part, part, span)
        peak = max(peak, store.nbytes)

    def commit(parents: Tensor | None, length: int) -> None:
        store.commit(parents, torch.full((len(store) if parents is None else len(parents),), length))

    prompts = workload.num_prompts * (1 + workload.has_cfg_rows)
    store.extend(prompts)
    write(0, workload.prompt_length)
    commit(torch.arange(prompts).repeat_interleave(workload.rows_per_prompt), workload.prompt_length)
    for start, stop in _growth_strides(workload):
        if workload.num_candidates > 1:
            commit(torch.arange(workload.num_rows).repeat_interleave(workload.num_candidates), start)
        write(start, stop)
        commit(
            torch.arange(0, len(store), workload.num_candidates) if workload.num_candidates > 1 else None,
            stop,
        )
    return store.nbytes // 2 * layer.slot_bytes, peak // 2 * layer.slot_bytes


def _simulate_sink(
    build: CacheBuilder, request: CacheRequest, layer: _LayerShape, workload: Workload
) -> tuple[int, int]:
    """The sink cache, without the rotation of its sinks, which does not change its size."""
    length, sinks, _, *rest = build(request)._init_args
    return _simulate(SinkStore(length, sinks, None, *rest), layer, workload)


def _simulate_evicting(
    build: CacheBuilder, request: CacheRequest, layer: _LayerShape, workload: Workload
) -> tuple[int, int]:
    """An evicting cache: which slots it keeps depends on attention, but not how many."""
    store = build(request)
    slots = SlotBlocks(store._accumulates_scores)
    byte = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    prompts = workload.num_prompts * (1 + workload.has_cfg_rows)

    def num_to_keep(held: int, num_new: int, is_prefill: bool) -> int:
        count: Tensor = store._num_to_keep(
            torch.tensor([held]), torch.tensor([num_new]), torch.tensor([is_prefill])
        )
        return int(count)

    held = num_to_keep(workload.prompt_length, workload.prompt_length, True)
    slots.ensure_capacity(0, (byte, byte), workload.num_rows, held)
    for start, stop in _growth_strides(workload):
        slots.ensure_capacity(0, (byte, byte), workload.num_rows * workload.num_candidates, held + 1)
        held = num_to_keep(held + stop - start, 1, False)
        slots.ensure_capacity(0, (byte, byte), workload.num_rows * workload.num_candidates, held)
        slots.shrink_to_fit(workload.num_rows, held)
    score_bytes = torch.float32.itemsize if store._accumulates_scores else 0
    end = slots.nbytes // (2 + score_bytes) * (layer.slot_bytes + score_bytes)
    # Until the first eviction the prompt and its queries are held beside the slots.
    return end, max(end, prompts * workload.prompt_length * (layer.slot_bytes + layer.slot_bytes // 2))


def _simulate_quantized(
    _: CacheBuilder, request: CacheRequest, layer: _LayerShape, workload: Workload
) -> tuple[int, int]:
    """The quantized cache: chunks, shared for prompts, and the unquantized residual of every row."""
    config = quantized_cache_config(request)
    # Quantized sizes are known without the backend's package.
    blank = type(
        "Blank",
        (BACKENDS[config.backend.lower()],),
        {"_package": lambda _: None, "quantize_groups": _empty_groups},
    )
    quantizer = blank(
        config.nbits, config.axis_key, config.axis_value, config.q_group_size, config.compute_dtype
    )
    prompts, every = workload.num_prompts * (1 + workload.has_cfg_rows), max(config.residual_length, 1)
    full, rest = divmod(workload.final_length - workload.prompt_length, every)
    chunks = prompts * _chunk_bytes(quantizer, layer.shape, workload.prompt_length)
    if full:
        chunks += workload.num_rows * full * _chunk_bytes(quantizer, layer.shape, every)
    residual = DenseStore(config.residual_length)
    residual.extend(workload.num_rows * workload.num_candidates)
    for stop in range(1, (every if full else rest) + 1):
        part = torch.zeros(len(residual), 1, 1, 1, dtype=torch.uint8)
        residual.update(0, part, part, KVSpan(None, stop - 1, 1, stop))
    end = chunks + residual.nbytes // 2 * layer.slot_bytes
    return end, max(end, prompts * workload.prompt_length * layer.slot_bytes)


def _chunk_bytes(quantizer: Quantizer, shape: LayerKVShape, length: int) -> int:
    """The bytes of `length` quantized positions."""
    total = 0
    for size, across in (
        (shape.key_dim, quantizer.key_codec.over_positions),
        (shape.value_dim, quantizer.value_codec.over_positions),
    ):
        content = torch.empty(1, length, size, dtype=shape.dtype, device="meta")
        total += GroupCodec(quantizer, across).encode(content).nbytes
    return total


def _empty_groups(_: Any, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Placeholder codes [G, g], scales [G, 1] and offsets [G, 1] of groups [G, g], for their sizes."""
    scale = content[:, :1]
    return content.to(torch.uint8), scale, scale


def _offload_device(request: CacheRequest) -> Any:
    """The device of offloaded layers."""
    return dict(request.config.cache_config or {}).get("offload_device", "cpu")


Simulator = Callable[[CacheBuilder, CacheRequest, _LayerShape, Workload], tuple[int, int]]

_SIMULATORS: Final[Mapping[str, Simulator]] = {
    "sink": _simulate_sink,
    "snapkv": _simulate_evicting,
    "h2o": _simulate_evicting,
    "quantized": _simulate_quantized,
}
_OFFLOADED_CACHES: Final = frozenset({"offloaded", "offloaded_static"})
