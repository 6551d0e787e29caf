"""Counters, gauges and histograms of an engine, in plain numbers that any metrics library can export."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from descant.engine.protocol import Report

# Seconds; the last bucket has no upper bound.
_LATENCY_BOUNDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


@dataclass
class Histogram:
    """The number of values in each bucket: bucket `i` has those up to `bounds[i]`, the last the rest."""

    bounds: Sequence[float] = _LATENCY_BOUNDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """The values so far."""
        return Histogram(self.bounds, list(self.counts), self.total)


@dataclass(frozen=True)
class EngineMetrics:
    """The work of an engine since it was made, and its content now."""

    session: Report  # gauges: steps, requests, rows, waiting, blocks, cache bytes, prefixes
    counters: Mapping[str, int]
    histograms: Mapping[str, Histogram]
    queued_commands: int  # calls that the engine's thread has not seen yet
