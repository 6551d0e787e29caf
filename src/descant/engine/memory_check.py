"""The pre-flight check that the keys and values of requests fit into free memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from descant.config.generation_config import GenerationConfig
from descant.core.context import row_params
from descant.core.interfaces import Model, RowCache
from descant.core.rows import Rows
from descant.engine.planning.cache_factory import (
    CACHE_NAMES,
    CACHES,
    CacheRequest,
    cache_name,
    missing_requirement,
    quantized_cache_config,
)
from descant.engine.planning.planner import DecodingPlan
from descant.errors import NotEnoughMemory, format_bytes
from descant.kv_cache.row_views import RowView, unwrap_cache
from descant.kv_cache.stores.block_store import HeadSize, Workload
from descant.kv_cache.stores.dense import OffloadedStore, StaticStore
from descant.kv_cache.stores.quantized import QuantizedStore
from descant.kv_cache.stores.quantizers import build_quantizer
from descant.models.kv_shape import KVShape, LayerKVShape, kv_shape_of, max_token_bytes

# Workloads with more positions are not simulated: the bytes are counted.
_MAX_SIMULATED_POSITIONS: Final = 2**26


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
    """The request of a cache of that name, with the config's settings if it selects that cache."""
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
        total = cross + workload.num_fed * (
            kv_shape.state_bytes + workload.final_length * kv_shape.state_bytes_per_token
        )
        return CacheCost(total, total)
    store = _build_store(name, request)
    slots = store.count_slots(workload)
    if max(slots or 0, workload.num_fed * workload.final_length) > _MAX_SIMULATED_POSITIONS:
        total = cross + (slots or 0) * kv_shape.bytes_per_token
        return None if slots is None else CacheCost(total, total)
    final = peak = largest = 0
    for (layer, shape), count in _layer_groups(kv_shape, traits.layer_types).items():
        head = HeadSize(shape.key_dim, shape.value_dim, shape.dtype)
        head_final, head_peak = _build_store(name, request).head_bytes(layer, head, workload)
        final += count * shape.num_heads * head_final
        peak += count * shape.num_heads * head_peak
        largest = max(largest, shape.num_heads * head_final)
    if isinstance(store, OffloadedStore) and store.offload_device != request.model.device:
        # The model's device holds the current layer and the next.
        return CacheCost(final + cross, min(2 * largest, final) + cross, final)
    return CacheCost(final + cross, peak + cross)


def _build_store(name: str, request: CacheRequest) -> Any:
    """An empty cache of that name; a quantized one without its backend's package."""
    if name == "quantized":
        config = quantized_cache_config(request)
        return QuantizedStore(build_quantizer(config, for_sizes=True), config.residual_length)
    return CACHES[name].build(request)


def _layer_groups(kv_shape: KVShape, layer_types: tuple[str, ...]) -> Mapping[tuple[int, LayerKVShape], int]:
    """The layers of each kind, as the first of them and its shape, with their number."""
    first: dict[tuple[LayerKVShape, str], int] = {}
    counts: dict[tuple[int, LayerKVShape], int] = {}
    for layer, shape in kv_shape.layers.items():
        same = first.setdefault((shape, layer_types[layer] if layer < len(layer_types) else ""), layer)
        counts[same, shape] = counts.get((same, shape), 0) + 1
    return counts


# The check is skipped for runs below this bound.
_MIN_CHECKED_BYTES: Final = 2**30

# Alternatives in the order in which they are suggested: `CACHES` has exact ones first.
_SUGGESTED_CACHES: Final = tuple([name for name, spec in CACHES.items() if spec.saves_memory])

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FILE = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")

# A request: its plan, tokens of its prompt, the most tokens of a row, positions without a token.
NewRequest = tuple[DecodingPlan, int, int, int]

_token_bytes_bound: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()  # per network


def workload_of(
    plans: Sequence[DecodingPlan], lengths: Sequence[int], limits: Sequence[int], padded: bool = True
) -> Workload:
    """The rows of requests of one shape, with these prompt lengths and limits.

    With `padded` every row takes as much as the longest, so the maxima count, else the means.
    """
    plan, count = plans[0], len(plans)
    prompt, limit = (max(lengths), max(limits)) if padded else (sum(lengths) // count, sum(limits) // count)
    # The last token of a row is never fed.
    final = max(limit - 1, prompt)
    return Workload(
        count, plan.num_rows, prompt, final, plan.strategy.num_candidates, "guidance" in plan.wrappers
    )


def num_growing_positions(model: Model, cache: RowCache, name: str | None, running: Rows) -> int:
    """The positions that the running rows of a table may still add to its cache."""
    kind = name or CACHE_NAMES.get(type(cache))
    if not len(running) or kind not in CACHES:
        return 0
    if not getattr(_innermost(cache), "grows", False):
        return 0
    ends = row_params(running)["max_length"] + running.offset
    context_length = model.traits.context_length
    ends = ends if context_length is None else ends.clamp(max=context_length)
    return int((ends - running.cached_length).clamp(min=0).double().sum())


def _innermost(cache: RowCache) -> Any:
    """The store that a cache keeps its rows in."""
    return unwrap_cache(cache, torch.zeros(0, dtype=torch.long))[0]


def check_kv_fits(
    model: Model,
    cache: RowCache,
    name: str | None,
    new: Sequence[NewRequest],
    running: Rows | None,
    *,
    num_others: int = 0,
) -> int:
    """Raise for new requests whose keys and values do not fit beside those of the running rows.

    `num_others` is the number of positions that other tables may still add. Returns how many the new requests
    may add, 0 where it is unknown. A rough bound is checked first, so that small runs cost nothing.
    """
    kind = name or CACHE_NAMES.get(type(cache))
    traits, network = model.traits, model.network
    if network is None or kind is None or kind not in CACHES:
        return 0
    if traits.needs_own_cache or traits.cache_type != "kv":
        return 0
    token_bytes = _bytes_per_token(model, network)
    store: Any = _innermost(cache) if isinstance(cache, RowView) else cache
    if isinstance(store, StaticStore):
        _check_preallocated(model, store, kind, new, token_bytes)
        return 0
    # Rows are expected to end within the context length, also where the limit is higher.
    context_length = traits.context_length
    growth = num_others
    if running is not None:
        growth += num_growing_positions(model, cache, name, running)
    total, expected = 0, []
    for plan, length, limit, offset in new:
        if context_length is not None:
            limit = max(min(limit, context_length - offset), length + 1)
        expected.append((plan, length, limit, offset))
        total += plan.num_fed_rows * (limit + offset)
    num_new = total if store.grows else 0
    if token_bytes is None or (total + growth) * token_bytes < _MIN_CHECKED_BYTES:
        return num_new
    shape = kv_shape_of(network)
    workloads = _workloads(expected, store.is_padded)
    costs = [
        cache_cost(kind, cache_request(model, plan.config, kind, workload), workload, shape)
        for plan, workload in workloads
    ]
    known_costs = [cost for cost in costs if cost is not None]
    need = sum(cost.peak_bytes for cost in known_costs) + growth * shape.bytes_per_token
    offloaded = sum(cost.offloaded_bytes for cost in known_costs)
    rows = sum(workload.num_fed for _, workload in workloads)
    longest = max(workload.final_length for _, workload in workloads)
    field = "max_new_tokens" if workloads[0][0].config.max_new_tokens is not None else "max_length"
    _check_fits(
        (model, kind, workloads, shape),
        [(need, model.device), (offloaded, torch.device("cpu"))],
        f"{rows} rows of up to {longest} positions",
        f"lower `{field}`, the number of rows or the length of prompts",
    )
    return num_new


def _check_preallocated(
    model: Model, store: StaticStore, kind: str, new: Sequence[NewRequest], token_bytes: int | None
) -> None:
    """Raise for a cache of fixed size whose blocks do not fit: their size does not depend on the requests."""
    slots = store.block_slots(len(store) + sum(plan.num_fed_rows for plan, *_ in new))
    if token_bytes is None or slots * token_bytes < _MIN_CHECKED_BYTES:
        return
    shape = kv_shape_of(model.network)
    need = max(slots * shape.bytes_per_token - store.nbytes, 0)
    _check_fits(
        (model, kind, _workloads(new, padded=True), shape),
        [(need, store.offload_device if isinstance(store, OffloadedStore) else model.device)],
        f"{slots // store.capacity} rows of {store.capacity} positions",
        "lower `max_cache_len` and `batch_size` of `cache_config`, or the length and number of rows",
    )


def _check_fits(
    demand: tuple[Model, str, Sequence[tuple[DecodingPlan, Workload]], KVShape],
    needs: Sequence[tuple[int, torch.device]],
    size: str,
    advice: str,
) -> None:
    """Raise if a device has less memory than a cache needs there: the cache, its size, and what to do."""
    model, kind, workloads, shape = demand
    exceeded = [
        (need, device)
        for need, device in needs
        if need and (free := free_bytes(device)) is not None and need > free
    ]
    is_refused = bool(exceeded)
    if not (is_refused if model.rank_group is None else model.rank_group.any_rank(is_refused)):
        return
    need, device = exceeded[-1] if exceeded else needs[0]
    free = free_bytes(device) or 0
    totals: dict[str, int] = {}
    for plan, workload in workloads:
        for name, cost in cache_costs(model, plan.config, workload, shape).items():
            if cost is not None:
                totals[name] = totals.get(name, 0) + cost.peak_bytes
    fitting = [name for name in _SUGGESTED_CACHES if name != kind and totals.get(name, free + 1) <= free]
    names = " or ".join(f'"{name}" ({format_bytes(totals[name])})' for name in fitting[:3])
    hint = f"cache_implementation={names} would fit, or " if fitting else ""
    message = (
        f"the {kind} cache of {size} needs {format_bytes(need)}, and {device} has {format_bytes(free)} left: "
        f"{hint}{advice}"
    )
    raise NotEnoughMemory(message, need, free, tuple(fitting))


def _bytes_per_token(model: Model, network: Any) -> int | None:
    """An upper bound of the bytes of a token's keys and values; None: unknown."""
    if network not in _token_bytes_bound:
        _token_bytes_bound[network] = max_token_bytes(
            network, model.traits.num_layers, model.traits.embedding_size
        )
    return _token_bytes_bound[network]


def _workloads(new: Sequence[NewRequest], padded: bool) -> list[tuple[DecodingPlan, Workload]]:
    """The requests as workloads, one per shape."""
    by_shape: dict[tuple[Any, ...], list[NewRequest]] = {}
    for request in new:
        shape = workload_of([request[0]], [1], [1])
        key = (shape.rows_per_prompt, shape.num_candidates, shape.has_cfg_rows)
        by_shape.setdefault(key, []).append(request)
    workloads = []
    for requests in by_shape.values():
        lengths = [length + offset for _, length, _, offset in requests]
        limits = [limit + offset for _, _, limit, offset in requests]
        workload = workload_of([plan for plan, *_ in requests], lengths, limits, padded)
        if padded:  # every row of the table has as many slots as the longest of all
            longest = max(limit + offset - 1 for _, _, limit, offset in new)
            workload = workload._replace(final_length=max(workload.final_length, longest))
        workloads.append((requests[0][0], workload))
    return workloads


# ------------------------------------------------------------------------ free memory
def free_bytes(device: torch.device) -> int | None:
    """The free bytes of a device; None: unknown."""
    if device.type == "cuda":
        # Memory that torch has reserved but not allocated is free as well.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    if device.type != "cpu":
        return None
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*available, *_cgroup_free_bytes()], default=None)


def _cgroup_free_bytes() -> list[int]:
    """The free bytes of each of the process's control groups."""
    try:
        lines = _CGROUP_FILE.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    free = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            names, root = ("memory.max", "memory.current", "inactive_file"), _CGROUP_ROOT
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = _CGROUP_ROOT / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        # A container may see its own group as the root, whatever its path says.
        for group in {root, *(one for one in (folder, *folder.parents) if root in one.parents)}:
            limit, used = (_read_int(group / name) for name in names[:2])
            if limit is not None and used is not None:
                free.append(max(limit - used + _reclaimable_bytes(group, names[2]), 0))
    return free


def _read_int(path: Path) -> int | None:
    """The number in a file; None: there is no such file, or it says "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimable_bytes(group: Path, name: str) -> int:
    """The bytes that a control group counts as used but can reclaim: cached files."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
