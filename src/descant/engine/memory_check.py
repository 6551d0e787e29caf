"""Whether a run's cache fits: an error before anything is allocated, where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from descant.core.context import params_of
from descant.core.interfaces import Cache
from descant.core.rows import Rows
from descant.engine.cache_factory import KINDS
from descant.engine.cache_sizing import Run, cost, costs, wanted
from descant.engine.planner import Plan
from descant.errors import NotEnoughMemory
from descant.kv_cache.dense import DenseCache
from descant.kv_cache.paged import PagedStore
from descant.models.kv_shape import Geometry, declared, geometry_of

__all__ = ["free", "refuse_unfitting", "run_of", "written"]

# Below this nobody looks: a run that may take no more is let go.
_LITTLE: Final = 2**30

# Caches in which every row takes as much as the longest.
_LEVEL: Final = frozenset({"dynamic", "static", "offloaded", "offloaded_static", "hybrid"})
# Caches that have all they will ever take from the start.
_WHOLE: Final = frozenset({"static", "offloaded_static"})
# In this order others are proposed: first those that change nothing.
_PROPOSED: Final = ("paged", "sliding_window", "offloaded", "quantized", "h2o", "snapkv", "sink")

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")

# A request: its plan, the tokens of its prompt, the most that a row may have, positions without a token.
New = tuple[Plan, int, int, int]

_bound: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()  # a rough bound of a token's bytes


def run_of(plans: Sequence[Plan], lengths: Sequence[int], limits: Sequence[int], level: bool = True) -> Run:
    """The rows of requests of one shape, of prompts and limits of these lengths.

    Where all rows take as much as the longest its lengths count, else their means.
    """
    known, count = plans[0], len(plans)
    rows = known.config.num_beams if known.config.num_beams > 1 else known.values["copies"]
    tries = known.values["top_k"] if known.key[0] == "contrastive" else 1
    both = (max(lengths), max(limits)) if level else (sum(lengths) // count, sum(limits) // count)
    # The last token of a row is never fed.
    return Run(count, rows, both[0], max(both[1] - 1, both[0]), tries, "guidance" in known.wraps)


def refuse_unfitting(
    model: Any, cache: Cache, named: str | None, new: Sequence[New], running: Rows | None
) -> None:
    """Raise for new requests whose keys and values will not fit beside those of the rows that run.

    A rough bound is looked at first, so that nothing is measured for a run that cannot take much.
    """
    inner = getattr(model, "model", None)
    kind = named or _NAMES.get(type(cache))
    if inner is None or kind is None or hasattr(model, "new_cache") or model.facts.memory != "keys":
        return
    token = _token(model, inner)
    # What a model was not made for is often asked for, and seldom meant: rows end before.
    most = model.facts.context
    if most is not None and kind not in _WHOLE:
        new = [
            (known, length, max(min(limit, most - offset), length + 1), offset)
            for known, length, limit, offset in new
        ]
    left = 0
    if running is not None and len(running) and kind not in _WHOLE and not KINDS[kind].forgets:
        ends = params_of(running)["limit"] + running.offset
        ends = ends if most is None else ends.clamp(max=most)
        left = int((ends - running.cached).clamp(min=0).double().sum())
    total = sum(_rows(known) * (limit + offset) for known, _, limit, offset in new)
    if token is None or (total + left) * token < _LITTLE:
        return
    geometry = geometry_of(inner)
    runs = _runs(new, kind in _LEVEL)
    found = [cost(kind, wanted(model, known.config, kind, run), run, geometry) for known, run in runs]
    needs = [one for one in found if one is not None]
    need = sum(one.peak for one in needs) + left * geometry.token
    away = sum(one.away for one in needs)
    short = _lacks(need, model.device) or _lacks(away, torch.device("cpu"))
    peers = getattr(model, "peers", None)
    if short if peers is None else peers.any(short):
        raise _shortage(model, kind, (need, away), runs, geometry)


def _rows(known: Plan) -> int:
    run = run_of([known], [1], [1])
    return run.rows * run.tries * (1 + run.twins)


def _token(model: Any, inner: Any) -> int | None:
    """A rough bound of the bytes of a token."""
    if inner not in _bound:
        _bound[inner] = declared(inner, model.facts.layers, model.facts.size)
    return _bound[inner]


def _runs(new: Sequence[New], level: bool) -> list[tuple[Plan, Run]]:
    """Requests of one shape as one run."""
    alike: dict[tuple[Any, ...], list[New]] = {}
    for one in new:
        shape = run_of([one[0]], [1], [1])
        alike.setdefault((shape.rows, shape.tries, shape.twins), []).append(one)
    found = []
    for some in alike.values():
        lengths = [length + offset for _, length, _, offset in some]
        limits = [limit + offset for _, _, limit, offset in some]
        run = run_of([one[0] for one in some], lengths, limits, level)
        if level:  # every row of the table has as many slots as the longest of all
            run = run._replace(stop=max(run.stop, *(limit + offset - 1 for _, _, limit, offset in new)))
        found.append((some[0][0], run))
    return found


def _lacks(need: int, device: torch.device) -> bool:
    there = free(device) if need else None
    return there is not None and need > there


def _shortage(
    model: Any,
    kind: str,
    needed: tuple[int, int],
    runs: Sequence[tuple[Plan, Run]],
    geometry: Geometry,
) -> NotEnoughMemory:
    """The error that says what is needed, what there is, and what would fit."""
    need, away = needed
    device = model.device
    if away and _lacks(away, torch.device("cpu")):
        need, device = away, torch.device("cpu")
    there = free(device) or 0
    totals: dict[str, int] = {}
    for known, run in runs:
        for name, one in costs(model, known.config, run, geometry).items():
            if one is not None:
                totals[name] = totals.get(name, 0) + one.peak
    fitting = [name for name in _PROPOSED if name != kind and totals.get(name, there + 1) <= there]
    rows = sum(run.lines * run.tries for _, run in runs)
    stop = max(run.stop for _, run in runs)
    message = (
        f"the {kind} cache of {rows} rows of up to {stop} positions needs {written(need)}, and "
        f"{device} has {written(there)} left: "
    )
    if fitting:
        shown = " or ".join(f'"{name}" ({written(totals[name])})' for name in fitting[:3])
        message += f"cache_implementation={shown} would fit, or "
    limit = "max_new_tokens" if runs[0][0].config.max_new_tokens is not None else "max_length"
    message += f"lower `{limit}`, the number of rows or the length of prompts"
    return NotEnoughMemory(message, need, there, tuple(fitting))


def written(size: float) -> str:
    """A number of bytes as people write it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# ------------------------------------------------------------------------ what there is
def free(device: torch.device) -> int | None:
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
    return min([*kept, *_limits()], default=None)


def _limits() -> list[int]:
    """What each of the process's control groups leaves it."""
    try:
        lines = _GROUP.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            names, root = ("memory.max", "memory.current", "inactive_file"), _GROUPS
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = _GROUPS / "memory"
        else:
            continue
        place = root / path.lstrip("/")
        # A container may see itself as the root, whatever its path says.
        for group in {root, *(one for one in (place, *place.parents) if root in one.parents)}:
            limit, used = (_number(group / name) for name in names[:2])
            if limit is not None and used is not None:
                left.append(max(limit - used + _reclaimed(group, names[2]), 0))
    return left


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, or it says that there is no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimed(group: Path, name: str) -> int:
    """What a control group counts as used and gives back when it is asked: files that were read."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


_NAMES: Final[dict[type[Any], str]] = {DenseCache: "dynamic", PagedStore: "paged"}
