"""A request in the books of a scheduler, and the sums over the running ones."""

from __future__ import annotations

from dataclasses import dataclass

from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ParkedRequest, RequestUsage, ScheduledRequest


@dataclass(slots=True, eq=False)
class RequestEntry:
    """A request, its key, and what it has and needs."""

    request: ScheduledRequest
    key: float
    preemptible: bool
    read_tokens: int  # that its next admission has to read
    sure_blocks: int  # that it surely needs at its next admission
    unread: int = 0  # tokens that it has still to read while it runs
    held: int = 0  # blocks that it holds as far as is known, shared ones included
    charge: int = 0  # blocks that it alone holds, or may come to hold in the next step

    @classmethod
    def of(cls, request: ScheduledRequest, key: float, config: SchedulerConfig) -> RequestEntry:
        """The entry of a new request."""
        limit = config.max_step_tokens
        # What cannot be read in chunks must be read again in one step, however long it has become.
        fits_again = limit is None or request.rows * request.max_row_tokens <= limit
        preemptible = request.preemptible and config.preemption != "never"
        preemptible = preemptible and (request.chunkable or fits_again)
        # One that waits for blocks and cannot be preempted could be in the way of an earlier one for ever.
        needed = request.sure_blocks(config) if preemptible else request.max_blocks(config)
        return cls(
            request,
            key,
            preemptible,
            read_tokens=request.prompt_tokens,
            sure_blocks=needed,
        )

    @property
    def step_tokens(self) -> int:
        """The tokens that a step after its prompt feeds."""
        return self.request.tokens_per_step

    @property
    def order(self) -> tuple[float, int]:
        """Its place in the order; a smaller one comes first."""
        return self.key, self.request.number

    @property
    def victim_order(self) -> tuple[float, int, int]:
        """Its place among those to preempt: the last key first, then the fewest blocks to compute again."""
        return -self.key, self.held, -self.request.number

    def start(self, unread: int, shared_blocks: int) -> None:
        """It is admitted, with so many tokens to read and so many blocks that others are charged for."""
        self.unread = unread
        self.held = shared_blocks
        self.charge = self.sure_blocks - shared_blocks

    def note_usage(self, usage: RequestUsage) -> None:
        """It holds something else than before."""
        self.held = usage.blocks + usage.shared_blocks
        self.charge = usage.blocks + usage.next_blocks
        if self.unread or not self.preemptible:  # it keeps what it was admitted with
            self.charge = max(self.charge, self.sure_blocks - usage.shared_blocks)

    def park(self, parked: ParkedRequest | None) -> None:
        """It has been preempted, and reads that again at its next admission."""
        if parked is not None:
            # A cache that is not paged takes the blocks of its largest size at once, again too.
            self.read_tokens = parked.tokens
            self.sure_blocks = parked.blocks if self.request.paged else self.request.fixed_blocks


class RunningEntries:
    """The running requests, those that read and those that decode, and what they use together."""

    def __init__(self) -> None:
        self.entries: dict[int, RequestEntry] = {}
        self.reading: dict[int, RequestEntry] = {}
        self.decoding: dict[int, RequestEntry] = {}
        self.rows = 0
        self.step_tokens = 0  # of one step of all of them after their prompts
        self.decode_tokens = 0  # of one step of those that decode
        self.charged = 0  # blocks
        self._last_key: float | None = None  # None: unknown

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: RequestEntry) -> None:
        """Count a request that has been admitted."""
        request_id = entry.request.number
        self.entries[request_id] = self.reading[request_id] = entry
        self._count(entry, 1)
        if self._last_key is not None:
            self._last_key = max(self._last_key, entry.key)

    def remove(self, request_id: int) -> RequestEntry:
        """Do not count a request any more."""
        entry = self.entries.pop(request_id)
        self._count(entry, -1)
        self.reading.pop(request_id, None)
        self.decoding.pop(request_id, None)
        if entry.key == self._last_key:
            self._last_key = None
        return entry

    def note_read(self, request_id: int, tokens: int, config: SchedulerConfig) -> None:
        """A request has read tokens; after the last it decodes."""
        entry = self.entries[request_id]
        entry.unread -= tokens
        if entry.request.paged:
            entry.held = max(entry.held, config.blocks_of(entry.read_tokens - entry.unread))
        if not entry.unread:
            self.decoding[request_id] = self.reading.pop(request_id)
            self.decode_tokens += entry.step_tokens

    def note_usage(self, request_id: int, usage: RequestUsage) -> RequestEntry:
        """A request holds something else than before."""
        entry = self.entries[request_id]
        self._count(entry, -1)
        entry.note_usage(usage)
        self._count(entry, 1)
        return entry

    def _count(self, entry: RequestEntry, sign: int) -> None:
        self.rows += sign * entry.request.rows
        self.step_tokens += sign * entry.step_tokens
        self.charged += sign * entry.charge
        if entry.request.number in self.decoding:
            self.decode_tokens += sign * entry.step_tokens

    def first(self) -> RequestEntry | None:
        """The first in order; None: nothing runs."""
        return min(self.entries.values(), key=lambda entry: entry.order, default=None)

    def victims(self, *, spared: RequestEntry | None) -> list[RequestEntry]:
        """Those that may be preempted, the first victim first; `spared` is not among them."""
        found = [entry for entry in self.entries.values() if entry.preemptible and entry is not spared]
        return sorted(found, key=lambda entry: entry.victim_order)

    def victims_after(self, key: float) -> list[RequestEntry]:
        """Those with a later key that may be preempted, the first victim first."""
        if self._last_key is None:
            self._last_key = max((entry.key for entry in self.entries.values()), default=-float("inf"))
        if self._last_key <= key:
            return []
        return [entry for entry in self.victims(spared=None) if entry.key > key]
