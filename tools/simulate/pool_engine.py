"""An engine without a model: it carries out the plans of a scheduler block by block and checks each of them.

It keeps its own books: who waits and who runs, who holds how many blocks, and which of them are shared.
Nothing is taken from the scheduler but its plans, so an error in the scheduler's books is found here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from descant.engine.scheduling.ageing_scheduler import AgeingScheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import (
    ParkedRequest,
    PrefixHit,
    RequestUsage,
    ScheduledRequest,
    StepPlan,
    StepReport,
)

__all__ = ["BrokenInvariant", "Job", "PoolEngine"]


class BrokenInvariant(AssertionError):
    """A plan that breaks a promise of the scheduler."""


@dataclass(eq=False)
class Job:
    """A request and what an engine would know of it: its rows, their length, and its blocks."""

    request: ScheduledRequest
    arrival: float
    key: float
    new_tokens: int  # of each row, after which it ends
    family: int = -1  # requests of a family begin with the same tokens
    family_blocks: int = 0  # whole blocks that it has in common with its family
    preemptible: bool = True
    state: str = "waiting"  # or "reading", "decoding", "ended"
    length: int = 0  # cached tokens of each row
    target: int = 0  # tokens of each row that it reads before it decodes
    unread: int = 0  # tokens over all rows
    rows: int = 1
    distinct: int = 1  # rows that share nothing behind the prompt; the others follow one of them
    made: int = 0  # new tokens of each row
    borrowed: int = 0  # blocks of its family that it holds
    usage: RequestUsage | None = None  # as reported last
    stalled: int = 0  # steps in a row in which it was the first and did not run

    @property
    def order(self) -> tuple[float, int]:
        """Its place, computed from its arrival and priority."""
        return self.key, self.request.number

    @property
    def drafts(self) -> int:
        """Tokens that a step feeds in each row."""
        return -(-self.request.tokens_per_step // self.request.rows)


@dataclass
class PoolEngine:
    """Runs jobs by the plans of a scheduler, with a pool of blocks and prefixes that are shared."""

    config: SchedulerConfig
    chance: random.Random
    shares: bool = True  # whether the blocks of common prefixes are kept and shared
    scheduler: AgeingScheduler = field(init=False)
    jobs: dict[int, Job] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)  # family -> leading blocks that the pool still has
    holders: dict[int, list[int]] = field(default_factory=dict)  # family -> holders of each such block
    counts: dict[str, int] = field(default_factory=dict)
    paused: bool = False

    # -------------------------------------------------------------------- what a scheduler asks
    def lookup(self, number: int) -> PrefixHit:
        """The leading blocks of a job's family that are in the pool."""
        job = self.jobs[number]
        if job.state != "waiting":
            raise BrokenInvariant(f"the prefix of request {number} is looked up while it is {job.state}")
        blocks = self._cached_blocks(job)
        held = sum(count > 0 for count in self.holders.get(job.family, ())[:blocks])
        return PrefixHit(blocks * self.config.block_size, held)

    def _cached_blocks(self, job: Job) -> int:
        if not self.shares or job.family < 0:
            return 0
        return min(self.cached.get(job.family, 0), job.family_blocks)

    # -------------------------------------------------------------------- jobs
    def add(self, jobs: Iterable[Job], now: float) -> None:
        """Queue jobs; whoever refuses them, refuses all."""
        jobs = list(jobs)
        self.scheduler.add(*(job.request for job in jobs), now=now)
        for job in jobs:
            self.jobs[job.request.number] = job

    def cancel(self, number: int) -> None:
        """Remove a job between two steps."""
        self.scheduler.cancel(number)
        self._end(self.jobs[number], "cancelled")

    @property
    def live(self) -> list[Job]:
        """The jobs that have not ended."""
        return [job for job in self.jobs.values() if job.state != "ended"]

    def _running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in ("reading", "decoding")]

    def _waiting(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "waiting"]

    def count(self, what: str) -> None:
        """Count an event."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # -------------------------------------------------------------------- blocks
    def blocks(self, job: Job, extra: int = 0) -> int:
        """The blocks of a job, borrowed ones included, with `extra` tokens more in each row."""
        request, size = job.request, self.config.block_size
        if not request.paged:
            return request.fixed_blocks
        if job.state == "reading" and job.target == self._row_prompt(job):
            read = request.prompt_tokens - job.unread
            row_tokens = -(-read // request.prompt_rows)
            return request.fixed_blocks + request.prompt_rows * -(-row_tokens // size)
        whole = request.prompt_tokens // request.prompt_rows // size
        rest = -(-(job.length + extra - whole * size) // size)
        wide = job.rows if extra else job.distinct
        return request.fixed_blocks + request.prompt_rows * whole + wide * max(rest, 0)

    @staticmethod
    def _row_prompt(job: Job) -> int:
        return -(-job.request.prompt_tokens // job.request.prompt_rows)

    def _own(self, job: Job, extra: int = 0) -> int:
        return self.blocks(job, extra) - job.borrowed

    def used(self, peak: Iterable[Job] = ()) -> int:
        """The blocks in use, each counted once; the jobs of `peak` with all tokens of a step."""
        stepping = {id(job) for job in peak}
        own = sum(self._own(job, job.drafts if id(job) in stepping else 0) for job in self._running())
        return own + sum(count > 0 for family in self.holders.values() for count in family)

    def _release(self, job: Job) -> None:
        for index in range(job.borrowed):
            self.holders[job.family][index] -= 1
        job.borrowed = 0

    def _borrow(self, job: Job) -> int:
        blocks = self._cached_blocks(job)
        holders = self.holders.setdefault(job.family, [])
        for index in range(blocks):
            holders[index] += 1
        job.borrowed = blocks
        return blocks

    def _publish(self, job: Job) -> None:
        """Let the pool keep the blocks of a prompt's common part."""
        if not self.shares or job.family < 0:
            return
        holders = self.holders.setdefault(job.family, [])
        if job.borrowed == len(holders) and job.family_blocks > job.borrowed:
            holders += [1] * (job.family_blocks - job.borrowed)
            self.cached[job.family] = job.borrowed = job.family_blocks

    def evict(self) -> None:
        """Drop cached blocks that no request holds, from the end of a random family."""
        families = [family for family, holders in self.holders.items() if holders and not holders[-1]]
        if families:
            family = self.chance.choice(families)
            holders = self.holders[family]
            while holders and not holders[-1] and self.chance.random() < 0.7:
                holders.pop()
            self.cached[family] = len(holders)

    # -------------------------------------------------------------------- steps
    def step(self, now: float) -> StepPlan:
        """Carry out one plan, with all checks."""
        before = {job.request.number: job.state for job in self.live}
        plan = self.scheduler.schedule(now)
        self._check_lists(plan, before, now)
        parked = self._carry_out_ends(plan)
        self._check_preemption(plan)
        self._admit(plan)
        self._check_order(plan)
        self._check_progress(plan)
        running = [self.jobs[number] for number in plan.decode]
        self._check_tokens(plan)
        skipped = set()
        if self.chance.random() < 0.03:  # a forward that raised: nothing has happened
            skipped = {*plan.read, *plan.decode}
        reading = self._read(plan, skipped)
        self._check_blocks([job for job in running if job.request.number not in skipped], reading)
        ended = self._advance(plan, skipped)
        self.scheduler.finish_step(self._report(parked, ended, skipped))
        return plan

    def _carry_out_ends(self, plan: StepPlan) -> dict[int, ParkedRequest]:
        for number in plan.expired:
            self._end(self.jobs[number], "expired")
        for number in plan.exceeded:
            self._end(self.jobs[number], "exceeded")
        parked = {}
        for number in plan.preempted:
            job = self.jobs[number]
            if job.state == "decoding" or job.target > self._row_prompt(job):
                parked[number] = self._park(job)
            self.count("preempted")
            self._release(job)
            job.state, job.unread, job.usage = "waiting", 0, None
        return parked

    def _park(self, job: Job) -> ParkedRequest:
        """Its rows with their last token, which is not cached yet, are read again."""
        if job.state == "decoding":
            job.target = job.length + 1
        prompt = self._row_prompt(job)
        tokens = job.request.prompt_tokens + job.rows * (job.target - prompt)
        job.length = job.target
        blocks = self.blocks(job)
        job.length = 0
        return ParkedRequest(tokens, blocks)

    def _admit(self, plan: StepPlan) -> None:
        size = self.config.block_size
        for number in plan.admitted:
            job = self.jobs[number]
            prompt = self._row_prompt(job)
            job.state, job.target = "reading", max(job.target, prompt)
            tokens = job.request.prompt_tokens + job.rows * (job.target - prompt)
            job.unread = tokens - self._borrow(job) * size
            job.length = job.target if job.target > prompt else 0
            job.usage = None
            self.count("admitted")

    def _read(self, plan: StepPlan, skipped: set[int]) -> list[Job]:
        """Advance the jobs that read; those that have read everything."""
        done = []
        for number, tokens in plan.read.items():
            job = self.jobs[number]
            if number in skipped:
                continue
            job.unread -= tokens
            if not job.unread:
                done.append(job)
        return done

    def _advance(self, plan: StepPlan, skipped: set[int]) -> list[int]:
        """Move what has run to its next state; the jobs that have ended."""
        ended = []
        for number in (*plan.read, *plan.decode):
            job = self.jobs[number]
            if number in skipped or job.unread:
                continue
            if job.state == "reading":
                job.state, job.length = "decoding", job.target
                self._publish(job)
                job.made += 1
            else:
                accepted = self.chance.randint(1, job.drafts)
                job.length += min(accepted, job.new_tokens - job.made)
                job.made += accepted
            if job.rows > 1 and self.chance.random() < 0.1:
                job.rows -= 1
            job.distinct = self.chance.randint(1, job.rows)
            if job.made >= job.new_tokens or self.chance.random() < 0.01:
                ended.append(number)
                self._end(job, "finished")
        return ended

    def _end(self, job: Job, how: str) -> None:
        if job.state == "ended":
            raise BrokenInvariant(f"request {job.request.number} ends twice")
        self._release(job)
        job.state = "ended"
        self.count(how)

    def _report(self, parked: dict[int, ParkedRequest], ended: list[int], skipped: set[int]) -> StepReport:
        usage = {}
        for job in self._running():
            holders = self.holders.get(job.family, [])
            shared = sum(holders[index] > 1 for index in range(job.borrowed))
            own = self.blocks(job) - shared
            following = 0
            if job.state == "decoding":
                following = max(self.blocks(job, job.drafts) - self.blocks(job), 0)
            new = RequestUsage(own, following, shared)
            if new != job.usage or self.chance.random() < 0.2:  # what has not changed need not be reported
                usage[job.request.number] = job.usage = new
        both = sum(count > 1 for family in self.holders.values() for count in family)
        return StepReport(usage, parked, ended, skipped, both)

    # -------------------------------------------------------------------- invariants
    def _check(self, holds: bool, what: str, plan: StepPlan) -> None:
        if not holds:
            raise BrokenInvariant(f"{what}: {plan}")

    def _check_lists(self, plan: StepPlan, before: dict[int, str], now: float) -> None:
        """Every request is where its state allows, and once; the expired are those whose time is over."""
        gone = [*plan.expired, *plan.exceeded, *plan.preempted]
        self._check(len(gone) == len(set(gone)), "a request leaves twice", plan)
        self._check(not set(gone) & {*plan.admitted, *plan.read, *plan.decode}, "what leaves runs", plan)
        self._check(not set(plan.read) & set(plan.decode), "a request reads and decodes", plan)
        late = {n for n in before if (end := self.jobs[n].request.deadline) is not None and end <= now}
        self._check(set(plan.expired) == late, "the expired are not those whose deadline has passed", plan)
        for names, states in (
            (plan.exceeded, ("waiting", "decoding")), (plan.preempted, ("reading", "decoding")),
            (plan.admitted, ("waiting",)), (plan.decode, ("decoding",)), (plan.read, ("waiting", "reading")),
        ):  # fmt: skip
            wrong = [number for number in names if before.get(number) not in states]
            self._check(not wrong, f"{wrong} must be {states}", plan)
        fresh = {number for number in plan.read if before[number] == "waiting"}
        self._check(fresh == set(plan.admitted), "an admitted request does not read at once", plan)
        for number in plan.exceeded:
            job = self.jobs[number]
            if before[number] == "decoding":
                needs = self.blocks(job, job.drafts)
                self._check(needs > (self.config.num_blocks or needs), "it has not outgrown the pool", plan)

    def _check_preemption(self, plan: StepPlan) -> None:
        """The last keys go first, only if they may, and never the first in order for one that comes later."""
        if not plan.preempted:
            return
        self._check(self.config.preemption != "never", "preempted by a policy without", plan)
        victims = [self.jobs[number] for number in plan.preempted]
        self._check(all(job.preemptible for job in victims), "preempted what may not be", plan)
        admitted = [self.jobs[number] for number in plan.admitted]
        earliest = min(job.key for job in victims)
        kept = [job for job in (*self._running(), *admitted) if job.preemptible]
        self._check(all(job.key <= earliest for job in kept), "one with a later key runs on", plan)
        if self.config.preemption == "growth":
            self._check(bool(self._running()), "all that ran were preempted", plan)
        everyone = [*self._running(), *admitted, *victims]
        first = min(everyone, key=lambda job: job.order)
        self._check(first not in victims, "the first in order was preempted", plan)
        earlier = min((job.key for job in admitted), default=None)
        if earlier is not None and not self._running():
            self._check(all(job.key > earlier for job in victims), "preempted for a later one", plan)

    def _check_order(self, plan: StepPlan) -> None:
        """Admission in order: no request before an admitted one is left waiting."""
        admitted = [self.jobs[number] for number in plan.admitted]
        self._check(admitted == sorted(admitted, key=lambda job: job.order), "admitted out of order", plan)
        waiting = self._waiting()
        if admitted and waiting:
            first = min(job.order for job in waiting)
            self._check(admitted[-1].order < first, "admitted before an earlier one", plan)
            for job in waiting:  # the same as a bound on the time by which one may be overtaken
                for other in admitted:
                    levels = job.request.priority - other.request.priority
                    late = other.arrival - job.arrival - self.config.ageing * levels
                    self._check(late <= 1e-9, "overtaken by more than ageing allows", plan)
        rows = sum(job.rows for job in self._running())
        self._check(rows <= self.config.max_running_rows, f"{rows} rows run", plan)

    def _check_progress(self, plan: StepPlan) -> None:
        """The first in order runs; nothing idles while a request waits."""
        running, waiting = self._running(), self._waiting()
        atomic = any(not self.jobs[number].request.chunkable for number in plan.read)
        pauses = atomic and not plan.decode
        self._check(not (pauses and self.paused and running_decoders(running)), "paused twice", plan)
        self.paused = pauses and bool(running_decoders(running))
        if not running:
            self._check(not waiting or bool(plan.preempted), "nothing runs while a request waits", plan)
            return
        first = min(running, key=lambda job: job.order)
        runs = first.request.number in plan.read or first.request.number in plan.decode
        first.stalled = 0 if runs else first.stalled + 1
        may_wait = self.paused or not all(job.preemptible for job in running) or first.stalled < 2
        self._check(runs or may_wait, "the first in order does not advance", plan)
        if self.config.preemption == "priority" and waiting and not plan.preempted:
            earliest = min(waiting, key=lambda job: job.key)
            blocked = not all(job.preemptible for job in running) or not earliest.request.chunkable
            shares = self.config.num_blocks is not None and any(job.borrowed for job in running)
            if not blocked and not shares:
                self._check(earliest.key >= first.key, "an earlier key waits for a later one", plan)

    def _check_tokens(self, plan: StepPlan) -> None:
        """The tokens of the step and of each chunk."""
        decode = [self.jobs[number] for number in plan.decode]
        tokens = sum(plan.read.values()) + sum(job.rows * job.drafts for job in decode)
        limit = self.config.max_step_tokens
        self._check(limit is None or tokens <= limit, f"{tokens} tokens in a step", plan)
        for number, count in plan.read.items():
            job = self.jobs[number]
            request = job.request
            self._check(0 < count <= job.unread, f"request {number} reads {count} of {job.unread}", plan)
            if count == job.unread:
                continue
            self._check(request.chunkable, f"request {number} is read in chunks", plan)
            self._check(count % request.prompt_rows == 0, f"chunk of {count}", plan)
        chunk = self.config.chunk_tokens
        for number, count in plan.read.items():
            request = self.jobs[number].request
            most = max(chunk or count, request.prompt_rows)
            self._check(count <= most or not request.chunkable, f"chunk of {count} tokens", plan)

    def _check_blocks(self, stepping: list[Job], done: list[Job]) -> None:
        """The blocks that the pool must have in the middle of the step."""
        for job in done:
            job.length = job.target
        limit = self.config.num_blocks
        used = self.used(stepping)
        if limit is not None and used > limit:
            raise BrokenInvariant(f"{used} blocks in use of {limit}")

    def check_end(self) -> None:
        """Everything has ended, and nothing is left in the scheduler's books."""
        scheduler = self.scheduler
        left = (scheduler.num_waiting, scheduler.num_running)
        if left != (0, 0) or self.live:
            raise BrokenInvariant(f"waiting and running are {left} at the end")
        plan = scheduler.schedule(float("inf"))
        scheduler.finish_step(StepReport())
        if plan != StepPlan() or scheduler.reserved_blocks:
            raise BrokenInvariant(f"{scheduler.reserved_blocks} blocks are left at the end: {plan}")


def running_decoders(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that have read their prompts."""
    return [job for job in jobs if job.state == "decoding"]
