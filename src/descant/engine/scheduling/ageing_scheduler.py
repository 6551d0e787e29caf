"""The scheduler whose order is arrival and priority: key = arrival + ageing * priority."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import PrefixHit, PrefixLookup, ScheduledRequest, StepPlan, StepReport
from descant.engine.scheduling.request_entry import RequestEntry, RunningEntries
from descant.errors import EngineFull, InputError

_MIN_COMPACTED = 64  # a smaller heap is not worth rebuilding


class RequestQueue:
    """Request ids by key, the smallest first, equal keys by id; each operation is O(log n).

    A removed entry stays in the heap until it comes to the front or half of the heap is such entries.
    """

    def __init__(self) -> None:
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._keys

    def add(self, request_id: int, key: float) -> None:
        """Add a request that is not in the queue."""
        self._keys[request_id] = key
        heappush(self._heap, (key, request_id))

    def discard(self, request_id: int) -> None:
        """Remove a request, if it is in the queue."""
        self._keys.pop(request_id, None)
        if len(self._heap) > max(_MIN_COMPACTED, 2 * len(self._keys)):
            self._heap = [(key, request_id) for request_id, key in self._keys.items()]
            heapify(self._heap)

    def first(self) -> tuple[float, int] | None:
        """The key and id of the first request; None: the queue is empty."""
        while self._heap:
            key, request_id = self._heap[0]
            if self._keys.get(request_id) == key:
                return key, request_id
            heappop(self._heap)
        return None


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

    def drop_decode(self, request_id: int) -> None:
        """Let a request not decode."""
        entry = self.decode.pop(request_id, None)
        if entry is not None:
            self.room += entry.step_tokens

    def pause(self) -> None:
        """Let no request decode."""
        self.room += sum(entry.step_tokens for entry in self.decode.values())
        self.decode.clear()
        self.paused = True


class AgeingScheduler:
    """Decides which requests run in a step: `schedule` before it, `finish_step` after it.

    It never reads a clock: `now` is any time that does not go back. It is used by one thread at a time.

    It keeps one order: `arrival + ageing * priority`, then the id of the request.

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
    def num_waiting(self) -> int:
        """The number of waiting requests, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of admitted requests."""
        return len(self._running)

    @property
    def reserved_blocks(self) -> int:
        """The blocks that the admitted requests hold or may come to hold in the next step."""
        return self._running.charged + self._shared_blocks

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    # -------------------------------------------------------------------- requests come and go
    def add(self, *requests: ScheduledRequest, now: float) -> None:
        """Queue requests that arrive now, all or none; raise `EngineFull` or for one that can never run."""
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
        for request_id, entry in entries.items():
            self._entries[request_id] = entry
            self._waiting.add(request_id, entry.key)
            if entry.request.deadline is not None:
                self._deadlines.add(request_id, entry.request.deadline)

    def cancel(self, request_id: int) -> None:
        """Remove a waiting or running request between two steps."""
        if request_id not in self._entries:
            raise InputError("number", "must be a waiting or running request", request_id)
        self._remove(request_id)

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

    def _remove(self, request_id: int) -> None:
        """Drop a request wherever it is."""
        del self._entries[request_id]
        self._waiting.discard(request_id)
        self._deadlines.discard(request_id)
        self._exceeded.pop(request_id, None)
        if request_id in self._running.entries:
            self._running.remove(request_id)

    # -------------------------------------------------------------------- before a step
    def schedule(self, now: float) -> StepPlan:
        """The plan of the next step."""
        assert self._plan is None, "`finish_step` comes first"
        expired, exceeded = self._take_expired(now), list(self._exceeded)
        for request_id in exceeded:
            self._remove(request_id)
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
        request_id = entry.request.number
        state.drop_decode(request_id)
        state.preempted[request_id] = self._running.remove(request_id)
        self._waiting.add(request_id, entry.key)

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
        """The number of unread tokens that a request reads where there is that much room."""
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
        request_id = entry.request.number
        if request_id in state.preempted:
            return False
        tokens, shared_blocks = self._find_prefix(entry, state)
        victims = self._victims(entry, entry.sure_blocks - shared_blocks)
        if victims and shared_blocks:  # a victim may be the one that holds them
            shared_blocks = 0
            victims = self._victims(entry, entry.sure_blocks)
        if victims is None or (victims and state.shares):
            return False
        unread = entry.read_tokens - tokens
        room = state.room + sum(
            other.step_tokens for other in victims if other.request.number in state.decode
        )
        if not self._chunk(entry, unread, room) and not self._can_pause(entry, unread, state):
            return False
        for victim in victims:
            self._preempt(victim, state)
        entry.start(unread, shared_blocks)
        state.shares |= shared_blocks > 0
        state.admitted.append(request_id)
        self._waiting.discard(request_id)
        self._running.add(entry)
        self._read(entry, state)
        return True

    def _find_prefix(self, entry: RequestEntry, state: _StepState) -> PrefixHit:
        """The cached part of a request; nothing counts as shared with requests that this plan removes."""
        if self._prefix_lookup is None:
            return PrefixHit()
        prefix = self._prefix_lookup(entry.request.number)
        return prefix._replace(shared_blocks=0) if state.frees else prefix

    def _victims(self, entry: RequestEntry, blocks: int) -> Sequence[RequestEntry] | None:
        """Whom to preempt so that a waiting request fits; None: it does not fit."""
        running, config = self._running, self._config
        rows = running.rows + entry.request.rows - config.max_running_rows  # too many, as are the next two
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
            rows -= victim.request.rows
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
        assert plan is not None, "`schedule` comes first"
        skipped = set(report.skipped)
        for request_id, tokens in plan.read.items():
            if request_id not in skipped:
                self._running.note_read(request_id, tokens, self._config)
        for request_id in plan.preempted:
            entry = self._entries[request_id]
            entry.park(report.parked.get(request_id))
            if entry.sure_blocks > self._num_blocks:
                self._exceeded[request_id] = None
        for request_id in report.ended:
            self._remove(request_id)
        for request_id, usage in report.usage.items():
            entry = self._running.note_usage(request_id, usage)
            if entry.held + usage.next_blocks > self._num_blocks:
                self._exceeded[request_id] = None  # it has outgrown the whole pool
        self._shared_blocks = report.shared_blocks
        self._plan = None


def _limit(value: int | None) -> int:
    """A limit, or a number larger than any."""
    return _NO_LIMIT if value is None else value
