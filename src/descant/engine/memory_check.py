"""The pre-flight check that the keys and values of requests fit into free memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from descant.core.context import row_params
from descant.core.interfaces import Model, RowCache
from descant.core.rows import Rows
from descant.engine.cache_factory import CACHE_NAMES, CACHES
from descant.engine.cache_sizing import (
    PREALLOCATED_CACHES,
    Workload,
    cache_cost,
    cache_costs,
    cache_request,
)
from descant.engine.planner import DecodingPlan
from descant.errors import NotEnoughMemory, format_bytes
from descant.kv_cache.cached_row import unwrap_cache
from descant.kv_cache.offloaded import OffloadedStore
from descant.kv_cache.static import StaticStore
from descant.models.kv_shape import KVShape, kv_shape_of, max_token_bytes

__all__ = ["check_kv_fits", "free_bytes", "num_growing_positions", "workload_of"]

# The check is skipped for runs below this bound.
_MIN_CHECKED_BYTES: Final = 2**30

# Caches in which every row takes as much memory as the longest.
_PADDED_CACHES: Final = frozenset({"dynamic", "offloaded", "hybrid"})
# Alternatives in the order in which they are suggested: lossless ones first.
_SUGGESTED_CACHES: Final = ("paged", "sliding_window", "offloaded", "quantized", "h2o", "snapkv", "sink")

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


def _is_growing(kind: str) -> bool:
    """Whether a cache takes memory for every position of a row, as the row grows."""
    return kind not in PREALLOCATED_CACHES and not CACHES[kind].drops_tokens


def num_growing_positions(model: Model, cache: RowCache, name: str | None, running: Rows | None) -> int:
    """The positions that the running rows of a table may still add to its cache."""
    kind = name or CACHE_NAMES.get(type(cache))
    if running is None or not len(running) or kind is None or kind not in CACHES or not _is_growing(kind):
        return 0
    ends = row_params(running)["max_length"] + running.offset
    context_length = model.traits.context_length
    ends = ends if context_length is None else ends.clamp(max=context_length)
    return int((ends - running.cached_length).clamp(min=0).double().sum())


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
    store = unwrap_cache(cache, torch.zeros(0, dtype=torch.long))[0]
    if isinstance(store, StaticStore):
        _check_preallocated(model, store, kind, new, token_bytes)
        return 0
    # Rows are expected to end within the context length, also where the limit is higher.
    context_length = traits.context_length
    if context_length is not None:
        new = [
            (plan, length, max(min(limit, context_length - offset), length + 1), offset)
            for plan, length, limit, offset in new
        ]
    growth = num_others + num_growing_positions(model, cache, name, running)
    total = sum(_num_rows(plan) * (limit + offset) for plan, _, limit, offset in new)
    num_new = total if _is_growing(kind) else 0
    if token_bytes is None or (total + growth) * token_bytes < _MIN_CHECKED_BYTES:
        return num_new
    shape = kv_shape_of(network)
    workloads = _workloads(new, kind in _PADDED_CACHES)
    costs = [
        cache_cost(kind, cache_request(model, plan.config, kind, workload), workload, shape)
        for plan, workload in workloads
    ]
    known_costs = [cost for cost in costs if cost is not None]
    need = sum(cost.peak_bytes for cost in known_costs) + growth * shape.bytes_per_token
    offloaded = sum(cost.offloaded_bytes for cost in known_costs)
    too_large = _exceeds_free(need, model.device) or _exceeds_free(offloaded, torch.device("cpu"))
    if too_large if model.rank_group is None else model.rank_group.any_rank(too_large):
        raise _out_of_memory_error(model, kind, (need, offloaded), workloads, shape)
    return num_new


def _check_preallocated(
    model: Model, store: StaticStore, kind: str, new: Sequence[NewRequest], token_bytes: int | None
) -> None:
    """Raise for a cache of fixed size whose blocks do not fit: their size does not depend on the requests."""
    rows = len(store) + sum(_num_rows(plan) for plan, *_ in new)
    slots = store.block_slots(rows)
    if token_bytes is None or slots * token_bytes < _MIN_CHECKED_BYTES:
        return
    shape = kv_shape_of(model.network)
    need, device = max(slots * shape.bytes_per_token - store.nbytes, 0), model.device
    if isinstance(store, OffloadedStore):
        device = store.offload_device
    too_large = _exceeds_free(need, device)
    if too_large if model.rank_group is None else model.rank_group.any_rank(too_large):
        free = free_bytes(device) or 0
        hint, fitting = _fitting_caches(model, kind, _workloads(new, padded=True), shape, free)
        message = (
            f"the {kind} cache of {slots // store.capacity} rows of {store.capacity} positions needs "
            f"{format_bytes(need)}, and {device} has {format_bytes(free)} left: {hint}lower `max_cache_len` "
            "and `batch_size` of `cache_config`, or the length and number of rows"
        )
        raise NotEnoughMemory(message, need, free, fitting)


def _num_rows(plan: DecodingPlan) -> int:
    workload = workload_of([plan], [1], [1])
    return workload.rows_per_prompt * workload.num_candidates * (1 + workload.has_cfg_rows)


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


def _exceeds_free(need: int, device: torch.device) -> bool:
    free = free_bytes(device) if need else None
    return free is not None and need > free


def _out_of_memory_error(
    model: Model,
    kind: str,
    needed: tuple[int, int],
    workloads: Sequence[tuple[DecodingPlan, Workload]],
    shape: KVShape,
) -> NotEnoughMemory:
    """The error that says how much is needed, how much is free, and which caches would fit."""
    need, offloaded = needed
    device = model.device
    if offloaded and _exceeds_free(offloaded, torch.device("cpu")):
        need, device = offloaded, torch.device("cpu")
    free = free_bytes(device) or 0
    rows = sum(workload.num_rows * workload.num_candidates for _, workload in workloads)
    length = max(workload.final_length for _, workload in workloads)
    hint, fitting = _fitting_caches(model, kind, workloads, shape, free)
    limit = "max_new_tokens" if workloads[0][0].config.max_new_tokens is not None else "max_length"
    message = (
        f"the {kind} cache of {rows} rows of up to {length} positions needs {format_bytes(need)}, and "
        f"{device} has {format_bytes(free)} left: {hint}lower `{limit}`, the number of rows or the length of "
        "prompts"
    )
    return NotEnoughMemory(message, need, free, fitting)


def _fitting_caches(
    model: Model,
    kind: str,
    workloads: Sequence[tuple[DecodingPlan, Workload]],
    shape: KVShape,
    free: int,
) -> tuple[str, tuple[str, ...]]:
    """The hint to use another cache, and the names of those that would fit."""
    totals: dict[str, int] = {}
    for plan, workload in workloads:
        for name, cost in cache_costs(model, plan.config, workload, shape).items():
            if cost is not None:
                totals[name] = totals.get(name, 0) + cost.peak_bytes
    fitting = [name for name in _SUGGESTED_CACHES if name != kind and totals.get(name, free + 1) <= free]
    names = " or ".join(f'"{name}" ({format_bytes(totals[name])})' for name in fitting[:3])
    return f"cache_implementation={names} would fit, or " if fitting else "", tuple(fitting)


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
