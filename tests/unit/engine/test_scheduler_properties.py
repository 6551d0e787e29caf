"""The promises of the scheduler under random schedules, and that a broken scheduler breaks them."""

from __future__ import annotations

import itertools
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.engine.scheduling.ageing_scheduler import AgeingScheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ScheduledRequest, StepReport
from descant.engine.scheduling.request_entry import RequestEntry, RunningEntries
from tools.simulate.pool_engine import BrokenInvariant
from tools.simulate.schedules import run_schedule


def test_random_schedules_keep_every_promise():
    """The first of the 100,000 that `python -m tools.simulate schedules` runs."""
    counts = {}
    for seed in range(500):
        for what, count in run_schedule(seed).counts.items():
            counts[what] = counts.get(what, 0) + count
    happened = {"admitted", "finished", "preempted", "expired", "exceeded", "cancelled"}
    assert happened | {"refused: EngineFull", "refused: InputError"} == set(counts)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_any_schedule_keeps_every_promise(seed):
    run_schedule(seed)


def first_broken(scheduler: type[AgeingScheduler], most: int = 3000) -> int:
    """The first seed whose schedule finds a scheduler out."""
    for seed in range(most):
        try:
            run_schedule(seed, scheduler)
        except BrokenInvariant:
            return seed
    raise AssertionError("no schedule found it out")


class LastComesFirst(AgeingScheduler):
    """It admits the last in order."""

    def add(self, *requests, now):
        super().add(*requests, now=now)
        for number, entry in self._entries.items():
            if number in self._waiting:
                entry.key = -entry.key
                self._waiting.discard(number)
                self._waiting.add(number, entry.key)


class NoOneGivesWay(AgeingScheduler):
    """It never preempts for growth."""

    def _preempt_outgrown(self, state):
        pass


class FirstGivesWay(AgeingScheduler):
    """It preempts the first in order, too."""

    def _preempt_outgrown(self, state):
        for victim in self._running.victims(spared=None):
            if self.reserved_blocks > self._num_blocks:
                self._preempt(victim, state)


class ForgetsDeadlines(AgeingScheduler):
    """It does not look at deadlines."""

    def _take_expired(self, now):
        return []


class DecodesForFree(AgeingScheduler):
    """It does not count the tokens of decoding."""

    def _read_and_admit(self, state):
        state.room = self._max_step_tokens
        super()._read_and_admit(state)


@pytest.mark.parametrize(
    "broken", [LastComesFirst, NoOneGivesWay, FirstGivesWay, ForgetsDeadlines, DecodesForFree]
)
def test_a_broken_scheduler_is_found_out(broken):
    first_broken(broken)


def test_the_cost_of_a_step_does_not_grow_with_the_queue():
    """Adding and scheduling beside 50,000 requests takes less than 1.1 times the calls than beside 2,000.

    Calls are counted, since seconds depend on the other load of the machine. A search of the queue inside one
    call of C, as `list.remove`, shows in the seconds only: 25 times as many.
    """

    def cost(waiting: int) -> tuple[int, float]:
        scheduler = AgeingScheduler(SchedulerConfig(max_running_rows=8, num_blocks=64, max_step_tokens=64))
        requests = [ScheduledRequest(number=n, prompt_tokens=4, max_row_tokens=8) for n in range(waiting)]
        scheduler.add(*requests, now=0.0)
        ids = itertools.count(waiting)

        def step() -> None:
            scheduler.add(ScheduledRequest(number=next(ids), prompt_tokens=4, max_row_tokens=8), now=1.0)
            scheduler.finish_step(StepReport(ended=scheduler.schedule(1.0).decode))

        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        seconds = float("inf")
        for _ in range(20):
            began = time.process_time()
            for _ in range(5):
                step()
            seconds = min(seconds, time.process_time() - began)
        sys.setprofile(count)
        try:
            for _ in range(100):
                step()
        finally:
            sys.setprofile(None)
        assert scheduler.num_waiting > 100
        return calls, seconds

    few, many = cost(2_000), cost(50_000)
    assert many[0] < 1.1 * few[0]
    assert many[1] < 10 * few[1]


def test_the_books_agree_with_a_recount():
    """The running sums equal sums over the running requests after any schedule of a real run."""

    class Recounting(AgeingScheduler):
        def finish_step(self, report):
            super().finish_step(report)
            check_sums(self._running)

    for seed in range(150):
        run_schedule(seed, Recounting)


def check_sums(running: RunningEntries) -> None:
    entries: list[RequestEntry] = list(running.entries.values())
    assert running.rows == sum(entry.request.rows for entry in entries)
    assert running.step_tokens == sum(entry.step_tokens for entry in entries)
    assert running.decode_tokens == sum(entry.step_tokens for entry in running.decoding.values())
    assert running.charged == sum(entry.charge for entry in entries)
    assert {**running.reading, **running.decoding} == running.entries
    assert all(entry.unread > 0 for entry in running.reading.values())
    assert not any(entry.unread for entry in running.decoding.values())
