"""The scheduler whose order is arrival and priority: key = arrival + ageing * priority."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import RequestUsage, StepPlan, StepReport
from descant.engine.scheduling.request_entry import RequestEntry, RunningEntries
from descant.engine.scheduling.request_queue import RequestQueue
from descant.engine.scheduling.scheduled_request import PrefixHit, ScheduledRequest
from descant.engine.scheduling.scheduler import PrefixLookup, Scheduler
from descant.errors import EngineFull, InputError

__all__ = ["AgeingScheduler"]

_NO_LIMIT = sys.maxsize


@dataclass
class _StepState:
    """The plan of a step while it is made."""

    room: int  # tokens that the step can still feed
    decode: dict[int, RequestEntry]
    expired: list[int] = field(default_factory=list)
    exceeded: list[int] = field(default_factory=list)
    preempted: dict[int, RequestEntry] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    read: dict[int, int] = field(default_factory=dict)
    shares: bool = False  # whether an admitted request is not charged for blocks that others hold
    paused: bool = False  # whether the rows that decode wait for a prompt that is read in one step

    @property
    def frees(self) -> bool:
        """Whether it takes blocks from a request, which a lookup of prefixes does not know yet."""
        return bool(self.expired or self.exceeded or self.preempted)

    def drop_decode(self, number: int) -> None:
        """Let a request not decode."""
        entry = self.decode.pop(number, None)
        if entry is not None:
            self.room += entry.step_tokens

    def pause(self) -> None:
        """Let no request decode."""
        self.room += sum(entry.step_tokens for entry in self.decode.values())
        self.decode.clear()
        self.paused = True


class AgeingScheduler:
    """A scheduler that keeps one order: `arrival + ageing * priority`, then the number of the request.

    Ageing is linear, so the order of two requests never changes, and waiting, running and preempted requests
    have one order. Requests are admitted in it, none before an earlier one. The last in it are preempted
    first, never the first, so the first always advances and every request becomes the first at some time. A
    request waits only for requests that arrived before it, or at most `ageing` seconds after it for each
    level by which their priority is better.

    A running request is charged for the blocks it alone holds or may come to hold in the next step. The sum
    of the charges and of the shared blocks stays within the pool, so a step never runs out of blocks.
    """

    def __init__(self, config: SchedulerConfig, prefix_lookup: PrefixLookup | None = None) -> None:
        self._config = config
        self._prefix_lookup = prefix_lookup
        self._entries: dict[int, RequestEntry] = {}  # waiting and running
        self._waiting = RequestQueue()
        self._deadlines = RequestQueue()
        self._running = RunningEntries()
        self._exceeded: dict[int, None] = {}  # they end at the next plan
        self._shared_blocks = 0
        self._plan: StepPlan | None = None  # that is being carried out
        self._paused = False  # whether the last step paused the rows that decode
        self._max_step_tokens = _limit(config.max_step_tokens)
        self._num_blocks = _limit(config.num_blocks)

    @property
    def config(self) -> SchedulerConfig:
        """Its limits."""
        return self._config

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of admitted requests."""
        return len(self._running)

    @property
    def running_rows(self) -> int:
        """The rows that the admitted requests may have."""
        return self._running.rows

    @property
    def reserved_blocks(self) -> int:
        """The blocks that the admitted requests hold or may come to hold in the next step."""
        return self._running.charged + self._shared_blocks

    def __contains__(self, number: object) -> bool:
        return number in self._entries

    # -------------------------------------------------------------------- requests come and go
    def add(self, *requests: ScheduledRequest, now: float) -> None:
        """Queue requests that arrive now, all or none; raise `EngineFull` or for one that can never run."""
        if not math.isfinite(now):
            raise InputError("now", "must be a finite time", now)
        limit = self._config.max_waiting
        if limit is not None and self.num_waiting + len(requests) > limit:
            raise EngineFull(self.num_waiting, limit)
        entries: dict[int, RequestEntry] = {}
        for request in requests:
            if request.number in self._entries or request.number in entries:
                raise InputError("number", "must not be that of another request", request.number)
            key = now + self._config.ageing * request.priority
            entry = entries[request.number] = RequestEntry.of(request, key, self._config)
            self._check_fits(entry)
        for number, entry in entries.items():
            self._entries[number] = entry
            self._waiting.add(number, entry.key)
            if entry.request.deadline is not None:
                self._deadlines.add(number, entry.request.deadline)

    def cancel(self, number: int) -> None:
        """Remove a waiting or running request between two steps."""
        if self._plan is not None:
            raise RuntimeError("`cancel` must not be called between `schedule` and `finish_step`")
        if number not in self._entries:
            raise InputError("number", "must be a waiting or running request", number)
        self._remove(number)

    def _check_fits(self, entry: RequestEntry) -> None:
        """Raise for a request that could not run even alone."""
        request, config = entry.request, self._config
        if request.rows > config.max_running_rows:
            do = "raise it, or lower num_beams or num_return_sequences"
            must = f"must be at most max_running_rows={config.max_running_rows}"
            raise InputError("rows", must, request.rows, do)
        least = entry.step_tokens if request.chunkable else max(entry.step_tokens, request.prompt_tokens)
        if least > self._max_step_tokens:
            name = "prompt_tokens" if least > entry.step_tokens else "step_tokens"
            why = ", since this prompt is read in one step" if name == "prompt_tokens" else ""
            must = f"must be at most max_step_tokens={self._max_step_tokens}{why}"
            raise InputError(name, must, least, "raise max_step_tokens")
        if entry.sure_blocks > self._num_blocks:
            what = "prompt and one step" if entry.preemptible else "largest size, which it reserves"
            must = f"must fit the {self._num_blocks} blocks of the pool with its {what}"
            got = f"{entry.sure_blocks} blocks of {config.block_size} tokens"
            raise InputError("request", must, got, "enlarge the pool, or shorten the request")

    def _remove(self, number: int) -> None:
        """Drop a request wherever it is."""
        del self._entries[number]
        self._waiting.discard(number)
        self._deadlines.discard(number)
        self._exceeded.pop(number, None)
        if number in self._running.entries:
            self._running.remove(number)

    # -------------------------------------------------------------------- before a step
    def schedule(self, now: float) -> StepPlan:
        """What to do in the next step."""
        if self._plan is not None:
            raise RuntimeError("`schedule` must not be called again before `finish_step`")
        expired, exceeded = self._take_expired(now), self._take_exceeded()
        running = self._running
        state = _StepState(
            self._max_step_tokens - running.decode_tokens, dict(running.decoding), expired, exceeded
        )
        self._preempt_outgrown(state)
        self._read_and_admit(state)
        self._paused = state.paused
        self._plan = StepPlan(
            tuple(expired),
            tuple(exceeded),
            tuple(state.preempted),
            tuple(state.admitted),
            state.read,
            tuple(state.decode),
        )
        return self._plan

    def _take_expired(self, now: float) -> list[int]:
        """Remove the requests whose deadline has passed."""
        expired = []
        while (first := self._deadlines.first()) is not None and first[0] <= now:
            expired.append(first[1])
            self._remove(first[1])
        return expired

    def _take_exceeded(self) -> list[int]:
        """Remove the requests that need more than the whole pool."""
        exceeded = list(self._exceeded)
        for number in exceeded:
            self._remove(number)
        return exceeded

    def _preempt_outgrown(self, state: _StepState) -> None:
        """Preempt the last in order until what the others come to fits the pool."""
        if self.reserved_blocks <= self._num_blocks:
            return
        first = self._running.first()
        for victim in self._running.victims(spared=first):
            self._preempt(victim, state)
            if self.reserved_blocks <= self._num_blocks:
                return
        # Requests that cannot be preempted have all they need. The first waits for one of them to end, or for
        # the next report, which does not count blocks as shared that only it holds by now.
        if first is not None and first.preemptible:
            state.drop_decode(first.request.number)

    def _preempt(self, entry: RequestEntry, state: _StepState) -> None:
        """Let a running request wait again, with its old key."""
        number = entry.request.number
        state.drop_decode(number)
        state.preempted[number] = self._running.remove(number)
        self._waiting.add(number, entry.key)

    def _read_and_admit(self, state: _StepState) -> None:
        """Give the tokens that are left to prompts, in order; admit those whose turn it is."""
        readers = sorted(self._running.reading.values(), key=lambda entry: entry.order, reverse=True)
        admits = True
        while True:
            while readers and readers[-1].request.number in state.preempted:
                readers.pop()
            head = self._waiting.first() if admits else None
            if head is not None and (not readers or head < readers[-1].order):
                admits = self._admit(self._entries[head[1]], state)
            elif readers:
                self._read(readers.pop(), state)
            else:
                return

    def _read(self, entry: RequestEntry, state: _StepState) -> None:
        """Plan the next tokens that a running request reads."""
        tokens = self._chunk(entry, entry.unread, state.room)
        if not tokens and self._can_pause(entry, entry.unread, state):
            state.pause()
            tokens = entry.unread
        if tokens:
            state.read[entry.request.number] = tokens
            state.room -= tokens

    def _chunk(self, entry: RequestEntry, unread: int, room: int) -> int:
        """How many of its unread tokens a request reads where there is that much room."""
        if not entry.request.chunkable:
            return unread if unread <= room else 0
        rows = entry.request.prompt_rows
        size = _limit(self._config.chunk_after(entry.read_tokens - unread))
        most = min(room, max(size, rows))
        return unread if unread <= most else most - most % rows

    def _can_pause(self, entry: RequestEntry, unread: int, state: _StepState) -> bool:
        """Whether a prompt that must be read at once has room in a step without decoding.

        Such steps never follow each other, so the rows that decode advance in every second step.
        """
        if entry.request.chunkable or self._paused:
            return False
        return unread <= self._max_step_tokens - sum(state.read.values())

    # -------------------------------------------------------------------- admission
    def _admit(self, entry: RequestEntry, state: _StepState) -> bool:
        """Admit the first waiting request if it can read in this step; False: it must wait."""
        number = entry.request.number
        if number in state.preempted:
            return False
        tokens, shared_blocks = self._find_prefix(entry, state)
        victims = self._victims(entry, entry.sure_blocks - shared_blocks)
        if victims and shared_blocks:  # a victim may be the one that holds them
            shared_blocks = 0
            victims = self._victims(entry, entry.sure_blocks)
        if victims is None or (victims and state.shares):
            return False
        unread = entry.read_tokens - tokens
        room = state.room + sum(one.step_tokens for one in victims if one.request.number in state.decode)
        if not self._chunk(entry, unread, room) and not self._can_pause(entry, unread, state):
            return False
        for victim in victims:
            self._preempt(victim, state)
        entry.start(unread, shared_blocks)
        state.shares |= shared_blocks > 0
        state.admitted.append(number)
        self._waiting.discard(number)
        self._running.add(entry)
        self._read(entry, state)
        return True

    def _find_prefix(self, entry: RequestEntry, state: _StepState) -> PrefixHit:
        """What of a request is cached; nothing counts as shared with requests that this plan removes."""
        if self._prefix_lookup is None:
            return PrefixHit()
        prefix = self._prefix_lookup(entry.request.number)
        if not 0 <= prefix.tokens < entry.read_tokens:
            must = f"must be from 0 to {entry.read_tokens - 1} of the {entry.read_tokens} tokens to read"
            raise InputError("prefix.tokens", must, prefix.tokens)
        if not 0 <= prefix.shared_blocks <= entry.sure_blocks:
            must = f"must be from 0 to the {entry.sure_blocks} blocks that the request needs"
            raise InputError("prefix.shared_blocks", must, prefix.shared_blocks)
        return prefix._replace(shared_blocks=0) if state.frees else prefix

    def _victims(self, entry: RequestEntry, blocks: int) -> Sequence[RequestEntry] | None:
        """Whom to preempt so that a waiting request fits; None: it does not fit."""
        running, config = self._running, self._config
        rows = running.rows + entry.rows - config.max_running_rows  # too many, as are the next two
        tokens = running.step_tokens + entry.step_tokens - self._max_step_tokens
        over = self.reserved_blocks + blocks - self._num_blocks
        headroom = config.headroom_blocks if len(running) else 0
        if max(rows, tokens, over + headroom) <= 0:
            return ()
        if config.preemption != "priority":
            return None
        victims: list[RequestEntry] = []
        for victim in running.victims_after(entry.key):
            victims.append(victim)
            rows -= victim.rows
            tokens -= victim.step_tokens
            over -= victim.charge
            headroom = 0 if len(victims) == len(running) else headroom
            if max(rows, tokens, over + headroom) <= 0:
                return victims
        return None

    # -------------------------------------------------------------------- after a step
    def finish_step(self, report: StepReport) -> None:
        """Take note of what came of the plan."""
        plan = self._plan
        if plan is None:
            raise RuntimeError("`finish_step` must be called once after `schedule`")
        self._check_numbers(plan, report)
        skipped = set(report.skipped)
        for number, tokens in plan.read.items():
            if number not in skipped:
                self._running.note_read(number, tokens, self._config)
        for number in plan.preempted:
            self._note_parked(number, report)
        for number in report.ended:
            self._remove(number)
        for number, usage in report.usage.items():
            self._note_usage(number, usage)
        self._shared_blocks = report.shared_blocks
        self._plan = None

    def _check_numbers(self, plan: StepPlan, report: StepReport) -> None:
        """Raise for a report that names requests that are not running."""
        for name, numbers in (("ended", report.ended), ("usage", report.usage), ("skipped", report.skipped)):
            unknown = [number for number in numbers if number not in self._running.entries]
            if unknown:
                raise InputError(name, "must name running requests only", unknown)
        if both := [number for number in report.ended if number in report.usage]:
            raise InputError("usage", "must not name requests that have ended", both)
        if unknown := [number for number in report.parked if number not in plan.preempted]:
            raise InputError("parked", "must name requests that the plan preempts only", unknown)

    def _note_parked(self, number: int, report: StepReport) -> None:
        """Take note of what a preempted request has to read again."""
        entry = self._entries[number]
        entry.park(report.parked.get(number), self._config)
        if entry.sure_blocks > self._num_blocks:
            self._exceeded[number] = None

    def _note_usage(self, number: int, usage: RequestUsage) -> None:
        """Take note of what a running request holds; one that outgrows the whole pool cannot go on."""
        entry = self._running.note_usage(number, usage)
        if entry.held + usage.next_blocks > self._num_blocks:
            self._exceeded[number] = None


def _limit(value: int | None) -> int:
    """A limit, or a number larger than any."""
    return _NO_LIMIT if value is None else value


_SCHEDULER: type[Scheduler] = AgeingScheduler  # for the type checker
