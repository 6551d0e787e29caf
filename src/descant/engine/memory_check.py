"""Whether a run's cache fits: an error before anything is allocated, where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from descant.core.context import row_params
from descant.core.interfaces import RowCache
from descant.core.rows import Rows
from descant.engine.cache_factory import CACHES
from descant.engine.cache_sizing import Workload, cache_cost, cache_costs, cache_request
from descant.engine.planner import DecodingPlan
from descant.errors import NotEnoughMemory
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.paged import PagedStore
from descant.models.kv_shape import KVShape, kv_shape_of, max_token_bytes

__all__ = ["check_kv_fits", "format_bytes", "free_bytes", "workload_of"]

# Below this nobody looks: a run that may take no more is let go.
_MIN_CHECKED_BYTES: Final = 2**30

# Caches in which every row takes as much as the longest.
_PADDED_CACHES: Final = frozenset({"dynamic", "static", "offloaded", "offloaded_static", "hybrid"})
# Caches that have all they will ever take from the start.
_PREALLOCATED_CACHES: Final = frozenset({"static", "offloaded_static"})
# In this order others are proposed: first those that change nothing.
_SUGGESTED_CACHES: Final = ("paged", "sliding_window", "offloaded", "quantized", "h2o", "snapkv", "sink")

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FILE = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")

# A request: its plan, the tokens of its prompt, the most that a row may have, positions without a token.
NewRequest = tuple[DecodingPlan, int, int, int]

_token_bytes_bound: WeakKeyDictionary[Any, int | None] = (
    WeakKeyDictionary()
)  # a rough bound of a token's bytes


def workload_of(
    plans: Sequence[DecodingPlan], lengths: Sequence[int], limits: Sequence[int], level: bool = True
) -> Workload:
    """The rows of requests of one shape, of prompts and limits of these lengths.

    Where all rows take as much as the longest its lengths count, else their means.
    """
    known, count = plans[0], len(plans)
    rows = known.config.num_beams if known.config.num_beams > 1 else known.base_params["num_sequences"]
    tries = known.base_params["top_k"] if known.strategy_key[0] == "contrastive" else 1
    both = (max(lengths), max(limits)) if level else (sum(lengths) // count, sum(limits) // count)
    # The last token of a row is never fed.
    return Workload(count, rows, both[0], max(both[1] - 1, both[0]), tries, "guidance" in known.wrappers)


def check_kv_fits(
    model: Any, cache: RowCache, named: str | None, new: Sequence[NewRequest], running: Rows | None
) -> None:
    """Raise for new requests whose keys and values will not fit beside those of the rows that run.

    A rough bound is looked at first, so that nothing is measured for a run that cannot take much.
    """
    inner = getattr(model, "model", None)
    kind = named or _CACHE_NAMES.get(type(cache))
    if inner is None or kind is None or hasattr(model, "new_cache") or model.traits.cache_type != "kv":
        return
    token = _bytes_per_token(model, inner)
    # What a model was not made for is often asked for, and seldom meant: rows end before.
    most = model.traits.context_length
    if most is not None and kind not in _PREALLOCATED_CACHES:
        new = [
            (known, length, max(min(limit, most - offset), length + 1), offset)
            for known, length, limit, offset in new
        ]
    left = 0
    if (
        running is not None
        and len(running)
        and kind not in _PREALLOCATED_CACHES
        and not CACHES[kind].drops_tokens
    ):
        ends = row_params(running)["max_length"] + running.offset
        ends = ends if most is None else ends.clamp(max=most)
        left = int((ends - running.cached_length).clamp(min=0).double().sum())
    total = sum(_num_rows(known) * (limit + offset) for known, _, limit, offset in new)
    if token is None or (total + left) * token < _MIN_CHECKED_BYTES:
        return
    geometry = kv_shape_of(inner)
    runs = _workloads(new, kind in _PADDED_CACHES)
    found = [
        cache_cost(kind, cache_request(model, known.config, kind, run), run, geometry) for known, run in runs
    ]
    needs = [one for one in found if one is not None]
    need = sum(one.peak_bytes for one in needs) + left * geometry.bytes_per_token
    away = sum(one.offloaded_bytes for one in needs)
    short = _exceeds_free(need, model.device) or _exceeds_free(away, torch.device("cpu"))
    peers = getattr(model, "rank_group", None)
    if short if peers is None else peers.any(short):
        raise _out_of_memory_error(model, kind, (need, away), runs, geometry)


def _num_rows(known: DecodingPlan) -> int:
    run = workload_of([known], [1], [1])
    return run.rows_per_prompt * run.num_candidates * (1 + run.has_cfg_rows)


def _bytes_per_token(model: Any, inner: Any) -> int | None:
    """A rough bound of the bytes of a token."""
    if inner not in _token_bytes_bound:
        _token_bytes_bound[inner] = max_token_bytes(
            inner, model.traits.num_layers, model.traits.embedding_size
        )
    return _token_bytes_bound[inner]


def _workloads(new: Sequence[NewRequest], level: bool) -> list[tuple[DecodingPlan, Workload]]:
    """Requests of one shape as one run."""
    alike: dict[tuple[Any, ...], list[NewRequest]] = {}
    for one in new:
        shape = workload_of([one[0]], [1], [1])
        alike.setdefault((shape.rows_per_prompt, shape.num_candidates, shape.has_cfg_rows), []).append(one)
    found = []
    for some in alike.values():
        lengths = [length + offset for _, length, _, offset in some]
        limits = [limit + offset for _, _, limit, offset in some]
        run = workload_of([one[0] for one in some], lengths, limits, level)
        if level:  # every row of the table has as many slots as the longest of all
            run = run._replace(
                final_length=max(run.final_length, *(limit + offset - 1 for _, _, limit, offset in new))
            )
        found.append((some[0][0], run))
    return found


def _exceeds_free(need: int, device: torch.device) -> bool:
    there = free_bytes(device) if need else None
    return there is not None and need > there


def _out_of_memory_error(
    model: Any,
    kind: str,
    needed: tuple[int, int],
    runs: Sequence[tuple[DecodingPlan, Workload]],
    geometry: KVShape,
) -> NotEnoughMemory:
    """The error that says what is needed, what there is, and what would fit."""
    need, away = needed
    device = model.device
    if away and _exceeds_free(away, torch.device("cpu")):
        need, device = away, torch.device("cpu")
    there = free_bytes(device) or 0
    totals: dict[str, int] = {}
    for known, run in runs:
        for name, one in cache_costs(model, known.config, run, geometry).items():
            if one is not None:
                totals[name] = totals.get(name, 0) + one.peak_bytes
    fitting = [name for name in _SUGGESTED_CACHES if name != kind and totals.get(name, there + 1) <= there]
    rows = sum(run.num_rows * run.num_candidates for _, run in runs)
    stop = max(run.final_length for _, run in runs)
    message = (
        f"the {kind} cache of {rows} rows of up to {stop} positions needs {format_bytes(need)}, and "
        f"{device} has {format_bytes(there)} left: "
    )
    if fitting:
        shown = " or ".join(f'"{name}" ({format_bytes(totals[name])})' for name in fitting[:3])
        message += f"cache_implementation={shown} would fit, or "
    limit = "max_new_tokens" if runs[0][0].config.max_new_tokens is not None else "max_length"
    message += f"lower `{limit}`, the number of rows or the length of prompts"
    return NotEnoughMemory(message, need, there, tuple(fitting))


def format_bytes(size: float) -> str:
    """A number of bytes as people write it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# ------------------------------------------------------------------------ what there is
def free_bytes(device: torch.device) -> int | None:
    """How many bytes a device can still give; None: it does not say."""
    if device.type == "cuda":
        # What torch holds in reserve it gives again.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    if device.type != "cpu":
        return None
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kept = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*kept, *_cgroup_free_bytes()], default=None)


def _cgroup_free_bytes() -> list[int]:
    """What each of the process's control groups leaves it."""
    try:
        lines = _CGROUP_FILE.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            names, root = ("memory.max", "memory.current", "inactive_file"), _CGROUP_ROOT
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = _CGROUP_ROOT / "memory"
        else:
            continue
        place = root / path.lstrip("/")
        # A container may see itself as the root, whatever its path says.
        for group in {root, *(one for one in (place, *place.parents) if root in one.parents)}:
            limit, used = (_read_int(group / name) for name in names[:2])
            if limit is not None and used is not None:
                left.append(max(limit - used + _reclaimable_bytes(group, names[2]), 0))
    return left


def _read_int(path: Path) -> int | None:
    """The number in a file; None where there is none, or it says that there is no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimable_bytes(group: Path, name: str) -> int:
    """What a control group counts as used and gives back when it is asked: files that were read."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


_CACHE_NAMES: Final[dict[type[Any], str]] = {DenseStore: "dynamic", PagedStore: "paged"}
