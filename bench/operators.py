"""Where the time of a run goes, by groups of operators, from a trace of torch's profiler."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["GROUPS", "KERNEL_PROFILE", "group_seconds", "operator_seconds", "table"]

# With this in its environment inductor writes kernels that a trace shows.
KERNEL_PROFILE = {"TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1"}
# The first group that matches a name takes the operator. A fused kernel is named after what follows it, too.
GROUPS = {
    "norms, activations, positions": r"cpp_fused|norm|silu|aten::(mul|add|pow|mean|neg|cos|sin|cat|copy_)$",
    "attention, cache": r"attention|attn|reshape_and_cache|kv_cache|index_put",
    "matrix products": r"aten::(mm|addmm|bmm|matmul)$|linear|onednn",
    "sampling": r"argmax|aten::(max|topk|softmax|sort|multinomial)$",
}
# What runs within these counts as theirs.
_WHOLE = re.compile(r"^(?!.*cpp_fused).*(attention|attn|kv_cache)")
_PATTERNS = {group: re.compile(pattern) for group, pattern in GROUPS.items()}


def operator_seconds(trace: Path, cpu_seconds: float) -> dict[str, float]:
    """The CPU seconds of each operator in a trace without those within it; attention has all within it.

    A trace has wall time, of which other processes take a part: all is scaled to the CPU time of the run.
    """
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one.get("cat") == "cpu_op"]
    seconds: Counter[str] = Counter()
    for thread in {one["tid"] for one in events}:
        seconds.update(_own_seconds(one for one in events if one["tid"] == thread))
    whole = max(one["ts"] + one["dur"] for one in events) - min(one["ts"] for one in events)
    return {name: own * cpu_seconds * 1e6 / whole for name, own in seconds.items()}


def _own_seconds(events: Iterable[dict[str, Any]]) -> Counter[str]:
    """The same for the events of one thread, which contain each other or do not overlap."""
    seconds: Counter[str] = Counter()
    open_events: list[tuple[float, str]] = []  # where each ends, and the name that its time counts for
    for one in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_events and open_events[-1][0] <= one["ts"]:
            open_events.pop()
        parent = open_events[-1][1] if open_events else None
        name = parent if parent is not None and _WHOLE.search(parent) else one["name"]
        seconds[name] += one["dur"] / 1e6
        if parent is not None:
            seconds[parent] -= one["dur"] / 1e6
        open_events.append((one["ts"] + one["dur"], name))
    return seconds


def group_seconds(operators: dict[str, float], whole: float) -> dict[str, float]:
    """The seconds of each group; "the rest" is what is left of the whole run, with the host's own work."""
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, seconds in operators.items():
        group = next((group for group, pattern in _PATTERNS.items() if pattern.search(name)), None)
        if group is not None:
            groups[group] += seconds
    return {**groups, "the rest": whole - sum(groups.values())}


def table(case: str, sides: dict[str, dict[str, float]]) -> list[str]:
    """The lines of a case: for each group its seconds on every side, then their sum."""
    lines = [f"| {case} | {' | '.join(sides)} |", "|---" * (len(sides) + 1) + "|"]
    whole = {name: {**side, "all": sum(side.values())} for name, side in sides.items()}
    for group in next(iter(whole.values())):
        cells = " | ".join(f"{side[group]:.2f}" for side in whole.values())
        lines += [f"| {group} | {cells} |"]
    return lines
