"""The requests of a session with a scheduler: they wait, are read in pieces, run, and may be preempted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from descant.core.context import row_params
from descant.core.interfaces import Array, RowCache
from descant.core.prompt_chunk import PackingModel, PromptChunk
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.engine.admission import ResolvedRequest, with_drawn_seed
from descant.engine.block_usage import block_usage
from descant.engine.prefix_reuse import CachedPrefix, Forward
from descant.engine.prompt_reader import PromptReader, ReadRows
from descant.engine.request_demand import parked_demand, reads_in_chunks, request_demand
from descant.engine.scheduling.ageing_scheduler import AgeingScheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ParkedRequest, RequestUsage, StepPlan, StepReport
from descant.engine.scheduling.scheduled_request import PrefixHit, ScheduledRequest
from descant.engine.step_faults import StepFault, forward_or_fault
from descant.engine.table import Table
from descant.engine.table_set import Placement, TableSet
from descant.errors import DeadlineExceeded, InputError, NotEnoughMemory
from descant.kv_cache.cached_row import unwrap_cache
from descant.kv_cache.paged import PagedStore
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.peft_adapters import ADAPTER_NAME_KEY

__all__ = ["ScheduledRequests"]

Join = Callable[[int, ResolvedRequest, CachedPrefix], None]
_NO_ROWS = torch.zeros(0, dtype=torch.long)


class ScheduledRequests:
    """Carries out the plans of a scheduler on the tables of a session.

    `join` admits a request to its table, with what is cached of its prompt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model: Any,
        tables: TableSet,
        join: Join,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.config, self._model, self._tables, self._join = config, model, tables, join
        self._packing_model = model if isinstance(model, PackingModel) else None
        self._prefix_cache = prefix_cache
        self.scheduler = AgeingScheduler(config, self._find_prefix)
        self.clock: Callable[[], float] = time.monotonic
        self.num_preemptions = 0
        self.failed: dict[int, Exception] = {}  # requests that end without a step, each with its error
        self._waiting: dict[int, ResolvedRequest] = {}  # in no table yet
        self._found: dict[int, CachedPrefix] = {}  # what is cached of those that are about to be
        self._looked_up: list[int] = []  # requests whose prefixes this plan has asked for
        self._reader = PromptReader()
        self._parked: dict[int, tuple[Table, Rows]] = {}
        self._suspended: list[tuple[Table, ReadRows]] = []  # rows that pause in this step
        self._chunks: dict[int, PromptChunk] = {}  # that are fed beside the rows of the tables in this step
        self._plan: StepPlan | None = None
        self._finished_reads: set[int] = set()  # requests that have read what the plan says

    @property
    def num_waiting(self) -> int:
        """The number of requests that are in no table yet."""
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting or number in self._parked

    # -------------------------------------------------------------------- requests come and go
    def add(self, numbers: Sequence[int], placements: Sequence[Placement]) -> None:
        """Queue requests, all or none."""
        now = self.clock()
        demands = self.demands(numbers, placements, now)
        entries = {
            numbers[index]: one
            for placement in placements
            for index, one in zip(placement.indices, placement.resolved, strict=True)
        }
        for demand in demands.values():
            self._check_size(demand)
        self.scheduler.add(*(demands[number] for number in numbers), now=now)
        # Seeds are drawn after all checks, in the order of arrival.
        self._waiting |= {
            number: with_drawn_seed(entries[number])._replace(cached_tokens=0) for number in numbers
        }

    def demands(
        self, numbers: Sequence[int], placements: Sequence[Placement], now: float
    ) -> dict[int, ScheduledRequest]:
        """What the scheduler counts for requests, by number."""
        traits, demands = self._model.traits, {}
        for placement in placements:
            store = unwrap_cache(placement.cache, _NO_ROWS)[0]
            for index, one in zip(placement.indices, placement.resolved, strict=True):
                number = numbers[index]
                demands[number] = request_demand(number, one, traits, self.config, store=store, now=now)
        return demands

    def _check_size(self, demand: ScheduledRequest) -> None:
        """Raise for a request that may outgrow the whole pool, so that none fails on the way."""
        limit, size = self.config.num_blocks, self.config.block_size
        need = demand.max_blocks(self.config)
        if limit is not None and need > limit:
            must = f"must fit a KV pool of {limit} blocks of {size} tokens at its largest"
            raise InputError("request", must, f"{need} blocks", "lower max_new_tokens, or enlarge the pool")

    def cancel(self, number: int) -> None:
        """Remove a waiting, reading, running or parked request."""
        self.scheduler.cancel(number)
        self.forget(number)

    def remove_ended(self, numbers: Collection[int]) -> None:
        """Remove requests that have ended between two steps."""
        for number in numbers:
            if number in self.scheduler:
                self.cancel(number)

    def forget(self, number: int) -> None:
        """Drop what is kept of a request outside the tables."""
        self._stop_reading(number)
        for kept in (self._waiting, self._found, self._parked, self.failed):
            kept.pop(number, None)

    # -------------------------------------------------------------------- before a step
    def start_step(self) -> None:
        """Plan a step and bring the tables into the state it needs."""
        plan = self._plan = self.scheduler.schedule(self.clock())
        self._finished_reads.clear()
        # First: the scheduler has dropped these, whatever is raised below.
        for number in plan.expired:
            self.failed[number] = DeadlineExceeded(number)
        for number in plan.exceeded:
            self.failed[number] = self._size_error(number)
        self._settle_prefixes(plan)
        for number in plan.preempted:
            self._preempt(number)
        for number, tokens in plan.read.items():
            with self._failing(number):
                self._read(number, tokens)
            if number not in self._chunks:
                self._finished_reads.add(number)
        self._suspend(plan)
        self._piggyback(list(self._chunks.values()))

    @contextmanager
    def _failing(self, number: int) -> Iterator[None]:
        """Let a request fail if what is done for it raises."""
        try:
            yield
        except StepFault as fault:
            self.failed[number] = fault.errors.get(number, fault)
        except Exception as error:
            self.failed[number] = error

    def _preempt(self, number: int) -> None:
        """Free what a request holds; its tokens are read again later."""
        self.num_preemptions += 1
        self._stop_reading(number)
        self._found.pop(number, None)
        if number in self:
            return  # it was being read
        table = self._table_of(number)
        self._parked[number] = table, table.park(number)

    def _read(self, number: int, tokens: int) -> None:
        """Read tokens of a request, which joins its table with the last of them."""
        if number not in self._reader:
            if self._joins_at_once(number, tokens):
                return
            self._start_reading(number)
        chunk = self._reader.next_chunk(number, tokens)
        if chunk is not None and self._can_pack(chunk.cache):
            self._chunks[number] = chunk
            return
        if self._reader.read(number, tokens, self._forward):
            return
        can_pack = self._can_pack(self._reader.cache_of(number))
        rows, prefixes = self._reader.take(number, self._forward, can_pack)
        try:
            if number in self._parked:
                self._parked[number][0].resume(rows, prefixes)
                del self._parked[number]
            else:
                self._join(number, self._waiting[number], prefixes[0])
                del self._waiting[number]
        except Exception:
            _free(prefixes)  # the traceback refers to them
            raise
        self._reader.drop(number)

    def _can_pack(self, cache: RowCache) -> bool:
        """Whether tokens of prompts share the forward of the rows that decode."""
        return self._packing_model is not None and self._packing_model.can_pack(cache)

    def _piggyback(self, chunks: Sequence[PromptChunk]) -> None:
        """Let the next packed forward feed these chunks of prompts."""
        if self._packing_model is not None:
            self._packing_model.piggyback(chunks)

    def finish_reads(self) -> None:
        """Commit the chunks that the tables have fed, and feed the others in a forward of their own."""
        assert self._plan is not None
        while self._chunks:
            number, chunk = self._chunks.popitem()
            with self._failing(number):
                if not chunk.is_fed:
                    self._piggyback([other for other in self._chunks.values() if not other.is_fed])
                    self._forward(chunk.rows, Proposal(), chunk.cache)
                self._reader.commit_chunk(number, self._plan.read[number])
            self._finished_reads.add(number)
        self._piggyback(())

    def _joins_at_once(self, number: int, tokens: int) -> bool:
        """Let a request join its table if it is read in one step; False: it is not."""
        if number in self._waiting:
            one, prefix = self._waiting[number], self._found.get(number, CachedPrefix())
            if len(one.prompt) + one.offset - prefix.length > tokens:
                return False
            self._join(number, one, prefix)
            del self._waiting[number]
            self._found.pop(number, None)
            return True
        table, rows = self._parked[number]
        if (len(rows) == 1 and tokens >= int(rows.pending.sum())) or not self._is_chunkable(table):
            table.resume(*ReadRows.unread(rows))
            del self._parked[number]
            return True
        return False

    def _start_reading(self, number: int) -> None:
        if number in self._parked:
            table, rows = self._parked[number]
            prefix, cache = CachedPrefix(), table.cache
        else:
            one = self._waiting[number]
            prefix = self._found.get(number, CachedPrefix())
            rows = _prompt_rows(number, one, self._model.device)
            cache = self._tables.place([one])[0].cache
            # The only input with which a prompt is read in chunks: its table adds it too late for them.
            name = one.request.adapter_name
            if name is not None:
                self._model.add_requests([number], {ADAPTER_NAME_KEY: [name]})
        self._reader.start(number, rows, prefix, unwrap_cache(cache, _NO_ROWS)[0].select(_NO_ROWS))
        self._found.pop(number, None)

    def _stop_reading(self, number: int) -> None:
        """Drop what is read of a request that has not joined its table."""
        if number in self._reader and number in self._waiting:
            self._model.remove_requests([number])
        self._reader.drop(number)

    def _is_chunkable(self, table: Table) -> bool:
        """Whether parked rows of a table can be read again piece by piece."""
        return reads_in_chunks(self._model.traits, unwrap_cache(table.cache, _NO_ROWS)[0])

    @property
    def _forward(self) -> Forward:
        """The forward that reads requests: of the model without wrappers, which change no key or value."""
        return partial(forward_or_fault, self._model, self._model.forward)

    def _find_prefix(self, number: int) -> PrefixHit:
        """What is cached of a request that is about to be admitted."""
        if number not in self._waiting:
            return PrefixHit()
        [placement] = self._tables.place([self._waiting[number]])
        if self._prefix_cache is not None and not self._looked_up:  # once for all requests of a plan
            self._prefix_cache.drop_stale()
        self._looked_up.append(number)
        [prefix] = placement.cached_prefixes(is_counted=False)
        self._found[number] = prefix
        return PrefixHit(prefix.length)

    def _settle_prefixes(self, plan: StepPlan) -> None:
        """Count the prefixes of admitted requests, and free the blocks that no request uses."""
        looked_up, self._looked_up = self._looked_up, []  # an admitted request must not be met again
        for number in looked_up:
            if number not in plan.admitted:
                self._found.pop(number, None)  # it waits, and must not hold blocks
            elif self._prefix_cache is not None:
                one, found = self._waiting[number], self._found[number]
                self._waiting[number] = one._replace(cached_tokens=found.length)
                self._tables.place([one])[0].cached_prefixes()
        if self.config.num_blocks is None:
            return
        # What no request uses has what the requests of this step leave of the pool.
        room = self.config.num_blocks - self.scheduler.reserved_blocks
        for table in self._tables:
            table.prefix_reuse.limit_idle(room)
        if self._prefix_cache is not None:
            self._prefix_cache.limit_unused(room)

    def _suspend(self, plan: StepPlan) -> None:
        """Take rows out of the tables that do not run in this step."""
        running = {*plan.decode, *plan.read}
        for table in self._tables:
            present = () if table.rows is None else dict.fromkeys(table.rows.request.tolist())
            for number in [one for one in present if one not in running]:
                self._suspended.append((table, table.suspend(number)))

    def _table_of(self, number: int) -> Table:
        return next(table for table in self._tables if number in table.running.requests)

    def _size_error(self, number: int) -> Exception:
        blocks, size = self.config.num_blocks, self.config.block_size
        must = f"request {number} must fit a KV pool of {blocks} blocks of {size} tokens by itself"
        return NotEnoughMemory(f"{must}: enlarge the pool, or shorten the request")

    # -------------------------------------------------------------------- after a step
    def resume_suspended(self) -> None:
        """Put rows back that paused in this step."""
        while self._suspended:
            table, (rows, prefixes) = self._suspended[-1]
            table.resume(rows, prefixes)
            self._suspended.pop()

    def abort_step(self, ended: Collection[int]) -> None:
        """Report that a planned step has not been made; it can be planned again.

        `ended` are the requests that finished or failed in it nevertheless.
        """
        plan = self._plan
        self._chunks.clear()
        self._piggyback(())
        if plan is None:
            return
        for number in plan.preempted:
            if number not in self and any(number in table.running.requests for table in self._tables):
                self._preempt(number)
        done = {*self._finished_reads, *ended}
        skipped = [number for number in (*plan.decode, *plan.read) if number not in done]
        self._report(plan, ended, skipped)

    def end_step(self, ended: Collection[int]) -> None:
        """Report a step to the scheduler; `ended` are the requests that finished or failed in it."""
        if self._plan is not None:
            self._report(self._plan, ended, ())

    def _report(self, plan: StepPlan, ended: Collection[int], skipped: Collection[int]) -> None:
        # What the scheduler has dropped in this plan, or in one whose step was not made.
        gone = {*plan.expired, *plan.exceeded}
        ended = [number for number in ended if number not in gone and number in self.scheduler]
        parked = {number: self._parked_size(number) for number in plan.preempted if number in self._parked}
        usage, shared = ({}, 0) if self.config.num_blocks is None else self._usage(plan)
        # Requests that the scheduler has dropped stay in their tables until the end of a step that is made.
        dropped = {*ended, *gone, *self.failed}
        usage = {number: one for number, one in usage.items() if number not in dropped}
        self.scheduler.finish_step(StepReport(usage, parked, ended, skipped, shared))
        self._plan = None

    def _parked_size(self, number: int) -> ParkedRequest:
        """What it takes to read a preempted request again."""
        table, rows = self._parked[number]
        one, store = table.running.requests[number].resolved, unwrap_cache(table.cache, _NO_ROWS)[0]
        return parked_demand(one, rows, self._model.traits, self.config, store=store)

    def _usage(self, plan: StepPlan) -> tuple[dict[int, RequestUsage], int]:
        """The blocks of all running requests, and of those that are shared."""
        shared = 0
        usage: dict[int, RequestUsage] = {}
        for table in self._tables:
            if table.rows is not None and len(table) and _is_paged(table):
                found = block_usage(table.cache, table.rows, _num_drafts(table.rows))
                usage |= found.by_request
                shared += found.shared_blocks
        for number in plan.read:
            store = self._reader.cache_of(number) if number in self._reader else None
            if isinstance(store, PagedStore):  # its rows share what they have in common
                usage[number] = RequestUsage(len(np.unique(store.referenced_blocks())), 0)
        return usage, shared


def _free(prefixes: Sequence[CachedPrefix]) -> None:
    """Free the blocks of rows that have not joined a table."""
    for prefix in prefixes:
        if prefix.cached_row is not None:
            prefix.cached_row.store.commit(_NO_ROWS, _NO_ROWS)


def _is_paged(table: Table) -> bool:
    return isinstance(unwrap_cache(table.cache, _NO_ROWS)[0], PagedStore)


def _num_drafts(rows: Rows) -> Array:
    """The most drafts of each row [R]."""
    params = row_params(rows)
    drafts = params.values.get("draft_tokens")
    if drafts is None:
        return np.zeros(len(rows), dtype=np.int64)
    room = (params["last_length"] - rows.length).clamp(min=0)
    return torch.as_tensor(drafts).clamp(min=0).minimum(room).numpy()


def _prompt_rows(number: int, one: ResolvedRequest, device: torch.device) -> Rows:
    """The prompt of a request as a row without parameters."""
    length = torch.tensor([len(one.prompt)])
    zero = torch.zeros(1, dtype=torch.long)
    tokens = one.prompt[None].to(device)
    return Rows(tokens, length, zero, zero.clone(), length.clone(), torch.tensor([number]), zero.clone())
