"""The real scheduler under load: virtual time, requests of one row each, and a cost model for the steps.

Nothing is done for each row of a step: a request that decodes advances by one token with every step, so its
end and the steps in which it needs a block are known in advance.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from descant.engine.scheduling.ageing_scheduler import AgeingScheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ParkedRequest, RequestUsage, ScheduledRequest, StepPlan, StepReport
from descant.errors import EngineFull, InputError
from tools.simulate.cost_model import CostModel
from tools.simulate.lengths import Workload

__all__ = ["LoadResult", "LoadSimulation", "Target", "simulate"]

GAP_BINS = np.geomspace(1e-5, 1e4, 1801)  # of a factor of 1.0116 each


@dataclass(frozen=True)
class Target:
    """When an answer counts as good: the wait for its first token, and the mean time between the others."""

    first_token: float
    between_tokens: float


@dataclass(frozen=True)
class LoadResult:
    """What came of a workload; times in seconds."""

    requests: int
    refused: int
    seconds: float  # from the first arrival to the last end
    steps: int
    preemptions: int
    reread_tokens: int  # prompt tokens read again after a preemption
    output_tokens: int
    first_token: dict[str, float]  # percentiles
    between_tokens: dict[str, float]
    good: int  # requests within the target
    max_rows: int
    first_token_by_level: tuple[float, ...] = ()  # 99th percentile of each priority level

    @property
    def goodput(self) -> float:
        """Good answers a second."""
        return self.good / self.seconds

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds


@dataclass
class LoadSimulation:
    """A run: the state of every request, and the clock."""

    config: SchedulerConfig
    cost: CostModel
    work: Workload
    target: Target
    now: float = 0.0
    steps: int = 0
    decodes: int = 0  # steps in which something decoded
    next_arrival: int = 0
    refused: int = 0
    preemptions: int = 0
    reread_tokens: int = 0
    kv_tokens: int = 0  # of the rows that decode
    max_rows: int = 0
    ends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by the count of decodes
    boundaries: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    epoch: dict[int, int] = field(default_factory=dict)  # decoding request -> `decodes` when it began
    begun_at: dict[int, int] = field(default_factory=dict)  # its length then
    made: dict[int, int] = field(default_factory=dict)  # its new tokens then
    unread: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.work.arrivals)
        self.scheduler = AgeingScheduler(self.config)
        self.first = np.full(count, np.nan)  # time of the first token
        self.finish = np.full(count, np.nan)
        self.paused_at: dict[int, float] = {}  # preempted request -> time of its last token
        self.gaps = np.zeros(len(GAP_BINS) + 1)
        self.live = 0

    def run(self) -> LoadResult:
        """Run all requests to their ends."""
        count = len(self.work.arrivals)
        while self.next_arrival < count or self.live:
            self._arrive()
            plan = self.scheduler.schedule(self.now)
            if plan.is_idle and not plan.preempted:
                self.scheduler.finish_step(StepReport())
                if self.next_arrival < count:
                    self.now = max(self.now, float(self.work.arrivals[self.next_arrival]))
                elif self.live:
                    raise RuntimeError(f"{self.live} requests wait and nothing runs")
                continue
            self._step(plan)
        return self._result()

    def _arrive(self) -> None:
        """Queue what has arrived."""
        arrivals = self.work.arrivals
        while self.next_arrival < len(arrivals) and arrivals[self.next_arrival] <= self.now:
            number = self.next_arrival
            self.next_arrival += 1
            prompt, output = int(self.work.prompts[number]), int(self.work.outputs[number])
            request = ScheduledRequest(
                number=number,
                prompt_tokens=prompt,
                max_row_tokens=prompt + output,
                priority=int(self.work.priorities[number]),
            )
            try:
                self.scheduler.add(request, now=float(arrivals[number]))
            except (EngineFull, InputError):
                self.refused += 1
                continue
            self.live += 1

    def _step(self, plan: StepPlan) -> None:
        """Carry out a plan and move the clock."""
        self.steps += 1
        parked = {number: found for number in plan.preempted if (found := self._park(number)) is not None}
        for number in plan.admitted:
            if number not in self.unread:
                self.unread[number] = int(self.work.prompts[number])
        rows, prompt_tokens = len(plan.decode), sum(plan.read.values())
        if rows != len(self.epoch):
            raise RuntimeError("a request that decodes was left out of a step")
        seconds = self.cost.seconds(prompt_tokens, rows, self.kv_tokens)
        self.now += seconds
        self.max_rows = max(self.max_rows, rows)
        ended: list[int] = []
        usage: dict[int, RequestUsage] = {}
        if rows:
            self.decodes += 1
            self.kv_tokens += rows
            self.gaps[np.searchsorted(GAP_BINS, seconds)] += rows
            ended += self._take_ends()
            self._report_boundaries(usage)
        for number, tokens in plan.read.items():
            self.unread[number] -= tokens
            if not self.unread[number]:
                self._begin(number, ended, usage)
        self.scheduler.finish_step(StepReport(usage, parked, ended))

    def _begin(self, number: int, ended: list[int], usage: dict[int, RequestUsage]) -> None:
        """A request has read everything: it has a token, and decodes from now on."""
        del self.unread[number]
        if np.isnan(self.first[number]):
            self.first[number] = self.now
        else:
            gap = self.now - self.paused_at.pop(number)
            self.gaps[np.searchsorted(GAP_BINS, gap)] += 1
        made = self.made.get(number, 0) + 1
        length = int(self.work.prompts[number]) + made - 1  # cached: the last token is not
        left = int(self.work.outputs[number]) - made
        if not left:
            self._finish(number)
            ended.append(number)
            return
        self.epoch[number], self.begun_at[number], self.made[number] = self.decodes, length, made
        self.kv_tokens += length
        self.ends[self.decodes + left].append(number)
        size = self.config.block_size
        if length % size == 0:
            usage[number] = RequestUsage(length // size, 1)
        else:
            usage[number] = RequestUsage(length // size + 1, 0)
        self.boundaries[self.decodes + (-length % size or size)].append(number)

    def _take_ends(self) -> list[int]:
        """The requests whose last token came in this step."""
        ended = [
            number
            for number in self.ends.pop(self.decodes, ())
            if number in self.epoch and self._made(number) == self.work.outputs[number]
        ]
        for number in ended:
            self._leave(number)
            self._finish(number)
        return ended

    def _report_boundaries(self, usage: dict[int, RequestUsage]) -> None:
        """What is reported of the requests whose next token needs a block."""
        size = self.config.block_size
        for number in self.boundaries.pop(self.decodes, ()):
            if number not in self.epoch:
                continue
            length = self.begun_at[number] + self.decodes - self.epoch[number]
            if length % size == 0:  # else it is from before a preemption
                usage[number] = RequestUsage(length // size, 1)
                self.boundaries[self.decodes + size].append(number)

    def _made(self, number: int) -> int:
        return self.made[number] + self.decodes - self.epoch[number]

    def _leave(self, number: int) -> None:
        """A request does not decode any more."""
        self.kv_tokens -= self.begun_at.pop(number) + self.decodes - self.epoch.pop(number)

    def _finish(self, number: int) -> None:
        self.finish[number] = self.now
        self.made.pop(number, None)
        self.live -= 1

    def _park(self, number: int) -> ParkedRequest | None:
        """A request is preempted; None: it has not read its prompt yet."""
        self.preemptions += 1
        if number not in self.epoch:
            done = int(self.work.prompts[number]) + self.made.get(number, 0) - self.unread.pop(number)
            self.reread_tokens += done
            if self.made.get(number):
                self.unread[number] = int(self.work.prompts[number]) + self.made[number]
            return None
        self.made[number] = self._made(number)
        self._leave(number)
        self.paused_at[number] = self.now
        tokens = int(self.work.prompts[number]) + self.made[number]
        self.unread[number] = tokens
        self.reread_tokens += tokens
        return ParkedRequest(tokens, self.config.blocks_of(tokens))

    def _result(self) -> LoadResult:
        done = ~np.isnan(self.finish)
        arrivals, outputs = self.work.arrivals[done], self.work.outputs[done]
        first = self.first[done] - arrivals
        rest = (self.finish[done] - self.first[done]) / np.maximum(outputs - 1, 1)
        good = (first <= self.target.first_token) & (rest <= self.target.between_tokens)
        levels = self.work.priorities[done]
        return LoadResult(
            requests=len(arrivals),
            refused=self.refused,
            seconds=float(self.now - self.work.arrivals[0]),
            steps=self.steps,
            preemptions=self.preemptions,
            reread_tokens=self.reread_tokens,
            output_tokens=int(outputs.sum()),
            first_token={f"p{part}": float(np.percentile(first, part)) for part in (50, 90, 99)},
            between_tokens={f"p{part}": gap_percentile(self.gaps, part) for part in (50, 90, 99)},
            good=int(good.sum()),
            max_rows=self.max_rows,
            first_token_by_level=tuple(
                float(np.percentile(first[levels == level], 99)) for level in sorted(set(levels.tolist()))
            ),
        )


def gap_percentile(counts: np.ndarray, percent: float) -> float:
    """A percentile of the times between tokens, to the width of a bin."""
    total = counts.sum()
    if not total:
        return 0.0
    at = int(np.searchsorted(np.cumsum(counts), total * percent / 100))
    return float(GAP_BINS[min(at, len(GAP_BINS) - 1)])


def simulate(cost: CostModel, work: Workload, target: Target, **limits: Any) -> LoadResult:
    """Run a workload through a scheduler with these limits; the pool is that of the cost model by default."""
    block_size = limits.pop("block_size", 16)
    limits.setdefault("num_blocks", cost.kv_tokens // block_size)
    return LoadSimulation(SchedulerConfig(block_size=block_size, **limits), cost, work, target).run()
