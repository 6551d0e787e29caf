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
from descant.core.interfaces import Array, ModelTraits, RowCache
from descant.core.records import PackingModel, PromptChunk, Proposal, RequestFault
from descant.core.rows import Rows
from descant.decoding.guidance.cfg import NEGATIVE_PROMPT_KEY
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
from descant.engine.step.faults import forward_or_fault
from descant.engine.tables.admission import ResolvedRequest, with_drawn_seed
from descant.engine.tables.prefix_reuse import CachedPrefix
from descant.engine.tables.prompt_reader import PromptReader, ReadRows, common_length
from descant.engine.tables.table import Table
from descant.engine.tables.table_set import Placement, TableSet
from descant.errors import ConfigError, DeadlineExceeded, InputError, NotEnoughMemory
from descant.kv_cache.cached_row import is_lossless, unwrap_cache
from descant.kv_cache.prefix_cache import PrefixCache
from descant.kv_cache.row_views import PairedRowCache
from descant.kv_cache.stores.paged import PagedStore
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY

__all__ = ["ScheduledRequests", "block_usage", "parked_demand", "reads_in_chunks", "request_demand"]


def block_usage(cache: RowCache, rows: Rows, widths: Array) -> tuple[dict[int, RequestUsage], int]:
    """The usage of every request of a table on a paged store, and how many blocks several requests hold.

    A block that rows of a request share counts once. `widths` [R] are the drafts that a row's next step may
    add.
    """
    store, innermost = unwrap_cache(cache, torch.arange(len(rows)))
    assert isinstance(store, PagedStore)
    # Of the stored rows [M], unconditional ones included: the request, the row in the store, the positions
    # that it holds, and those that its next step adds at most.
    requests, owner = np.unique(rows.request.numpy(), return_inverse=True)
    index, held = innermost.numpy(), rows.cached_length.numpy()
    fed = rows.pending.numpy() + widths
    if isinstance(cache, PairedRowCache):
        paired = np.flatnonzero(cache.uncond_row.numpy() >= 0)
        uncond = cache.uncond_row.numpy()[paired]
        held = np.concatenate((held, store.lengths.numpy()[uncond]))
        index, owner = np.concatenate((index, uncond)), np.concatenate((owner, owner[paired]))
        fed = np.concatenate((fed, fed[paired]))
    pool, size, count = store.pool, store.pool.block_size, len(requests)
    table = store.block_ids(index)  # [M, C]
    num_held = (table >= 0).sum(1)
    owners = np.repeat(owner, num_held)
    blocks, num_own, owners = _count_pairs(owners, table[table >= 0], len(pool.ref_counts))
    is_exclusive = num_own == pool.ref_counts[blocks]
    exclusive = np.bincount(owners[is_exclusive], minlength=count)
    shared = np.bincount(owners[~is_exclusive], minlength=count)
    added = np.maximum(-(-(held + fed) // size) - num_held, 0)
    new = np.bincount(owner, added, count).astype(np.int64)
    # A row that writes into a block with other references gets a copy of it; the last of them does not.
    writing = np.flatnonzero((held % size > 0) & (num_held > held // size))
    last = table[writing, held[writing] // size]
    blocks_written, num_writing, writers = _count_pairs(owner[writing], last, len(pool.ref_counts))
    copies = num_writing - (num_writing == pool.ref_counts[blocks_written])
    new += np.bincount(writers, copies, count).astype(np.int64)
    columns = (column.tolist() for column in (requests, exclusive, new, shared))
    usage = {request: RequestUsage(*counts) for request, *counts in zip(*columns, strict=True)}
    return usage, len(np.unique(blocks[~is_exclusive]))


def _count_pairs(owners: Array, blocks: Array, num_blocks: int) -> tuple[Array, Array, Array]:
    """The distinct pairs of an owner and a block [N]: the block, how often it occurs, the owner."""
    num_blocks = max(num_blocks, 1)  # nothing is written yet
    pairs, counts = np.unique(owners * num_blocks + blocks, return_counts=True)
    return pairs % num_blocks, counts, pairs // num_blocks


# Fields that say how many tokens are drafted.
DRAFT_FIELDS = ("prompt_lookup_num_tokens", "suffix_lookup_num_tokens", "num_assistant_tokens")


def reads_in_chunks(traits: ModelTraits, store: RowCache) -> bool:
    """Whether a model can read tokens piece by piece into a cache of the type of `store`."""
    if traits.cache_type != "kv" or traits.is_encoder_decoder:
        return False
    return is_lossless(store) and not (traits.has_own_position_ids or traits.needs_own_cache)


def _most_drafts(one: ResolvedRequest, config: SchedulerConfig, rows: int) -> int:
    """The most tokens that a row drafts in one step."""
    drafts = min(
        int(one.plan.method_params.get("draft_tokens", 0)),
        max(one.prompt_params.last_length - len(one.prompt), 0),  # the room after the first new token
    )
    limit = config.max_step_tokens
    if drafts and limit is not None and rows <= limit < rows * (1 + drafts):
        given = [name for name in DRAFT_FIELDS if getattr(one.plan.config, name) is not None]
        must = f"must be at most {limit // rows - 1}: a step has max_step_tokens={limit} tokens"
        raise ConfigError(given[0] if given else "assistant_model", must, drafts, "lower it")
    return drafts


def request_demand(
    number: int,
    one: ResolvedRequest,
    traits: ModelTraits,
    config: SchedulerConfig,
    *,
    store: RowCache,
    now: float,
) -> ScheduledRequest:
    """The demand of a request that arrives now, on a cache of the type of `store`.

    On a paged store it takes the blocks of its positions, on any other those of its largest size at once.
    A preempted request is read again from its tokens. That needs a cache in which reading them at once gives
    the same as reading them one by one, rows that then share what they share now, and inputs that the model
    still has.
    """
    request, plan = one.request, one.plan
    rows = plan.num_rows * plan.strategy.num_candidates
    is_guided = "guidance" in plan.wrappers
    # When they are read again, unconditional rows share nothing.
    fixed_blocks = rows * config.blocks_of(_num_negative_tokens(one)) if is_guided else 0
    if traits.is_encoder_decoder:
        encoder_ids = request.inputs.get(traits.main_input_name)
        fixed_blocks += 0 if encoder_ids is None else config.blocks_of(len(encoder_ids))
    side_inputs = set() if traits.is_encoder_decoder else request.inputs.keys() - {NEGATIVE_PROMPT_KEY}
    positions = len(one.prompt) + one.offset
    max_row_tokens, paged = max(one.max_slots, positions), isinstance(store, PagedStore)
    shares_again = rows == 1 or not paged or reads_in_chunks(traits, store)
    rows *= 2 if is_guided else 1
    if not paged:  # a recurrent state does not grow
        fixed_blocks += rows * (1 if traits.cache_type == "recurrent" else config.blocks_of(max_row_tokens))
    drafts = _most_drafts(one, config, rows)
    return ScheduledRequest(
        number=number,
        prompt_tokens=positions,
        max_row_tokens=max_row_tokens,
        rows=rows,
        step_tokens=rows * (1 + drafts) if drafts else None,
        fixed_blocks=fixed_blocks,
        paged=paged,
        priority=request.priority,
        deadline=None if request.deadline is None else now + request.deadline,
        chunkable=reads_in_chunks(traits, store) and not (side_inputs or plan.needs_full_prefill),
        preemptible=side_inputs <= traits.positioned_inputs
        and (is_lossless(store) or traits.cache_type == "recurrent")
        and shares_again,
    )


def parked_demand(
    one: ResolvedRequest, rows: Rows, traits: ModelTraits, config: SchedulerConfig, *, store: RowCache
) -> ParkedRequest:
    """What reading the rows of a preempted request again takes, and the step after it."""
    positions = rows.position
    common = common_length(rows) if reads_in_chunks(traits, store) else 0
    shared = common // config.block_size
    own = [positions + 1 - shared * config.block_size]
    if "guidance" in one.plan.wrappers:
        own.append(_num_negative_tokens(one) + rows.length - rows.prompt_length + 1)
    blocks = shared + sum(config.blocks_of(size) for size in torch.cat(own).tolist())
    return ParkedRequest(common + int((positions - common).sum()), blocks)


def _num_negative_tokens(one: ResolvedRequest) -> int:
    """The tokens of a guided request's negative prompt, by default the prompt's last token."""
    negative = one.request.inputs.get(NEGATIVE_PROMPT_KEY)
    return 1 if negative is None else len(negative)


Join = Callable[[int, Placement, CachedPrefix], None]
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
        self._waiting: dict[int, Placement] = {}  # in no table yet; each alone
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
            numbers[index]: (placement, one)
            for placement in placements
            for index, one in zip(placement.indices, placement.resolved, strict=True)
        }
        for demand in demands.values():
            self._check_size(demand)
        self.scheduler.add(*(demands[number] for number in numbers), now=now)
        # Seeds are drawn after all checks, in the order of arrival.
        for number in numbers:
            placement, one = entries[number]
            self._waiting[number] = placement.alone(with_drawn_seed(one)._replace(cached_tokens=0))

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

    @contextmanager
    def _failing(self, number: int) -> Iterator[None]:
        """Let a request fail if what is done for it raises."""
        try:
            yield
        except RequestFault as fault:
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
        table = next(one for one in self._tables if number in one.running.requests)
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
                self._join(number, self._placement(number), prefixes[0])
                del self._waiting[number]
        except Exception:
            _free(prefixes)  # the traceback refers to them
            raise
        self._reader.drop(number)

    def _can_pack(self, cache: RowCache) -> bool:
        """Whether tokens of prompts share the forward of the rows that decode."""
        return self._packing_model is not None and self._packing_model.can_pack(cache)

    @property
    def chunks(self) -> list[PromptChunk]:
        """The chunks of prompts that the forwards of the tables may feed in this step."""
        return list(self._chunks.values())

    def finish_reads(self) -> None:
        """Commit the chunks that the tables have fed, and feed the others in a forward of their own."""
        assert self._plan is not None
        while self._chunks:
            number, chunk = self._chunks.popitem()
            with self._failing(number):
                if not chunk.is_fed:
                    others = [other for other in self._chunks.values() if not other.is_fed]
                    self._forward(chunk.rows, Proposal(), chunk.cache, chunks=others)
                self._reader.commit_chunk(number, self._plan.read[number])
            self._finished_reads.add(number)

    def _joins_at_once(self, number: int, tokens: int) -> bool:
        """Let a request join its table if it is read in one step; False: it is not."""
        if number in self._waiting:
            one, prefix = self._waiting[number].resolved[0], self._found.get(number, CachedPrefix())
            if len(one.prompt) + one.offset - prefix.length > tokens:
                return False
            self._join(number, self._placement(number), prefix)
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
            placement = self._placement(number)
            [one], cache = placement.resolved, placement.cache
            prefix = self._found.get(number, CachedPrefix())
            rows = _prompt_rows(number, one, self._model.device)
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
    def _forward(self) -> Callable[..., Any]:
        """The forward that reads requests: of the model without wrappers, which change no key or value."""
        return partial(forward_or_fault, self._model, self._model.forward)

    def _placement(self, number: int) -> Placement:
        """The placement of a waiting request in the tables as they are now."""
        self._waiting[number] = placement = self._tables.renew(self._waiting[number])
        return placement

    def _find_prefix(self, number: int) -> PrefixHit:
        """What is cached of a request that is about to be admitted."""
        if number not in self._waiting:
            return PrefixHit()
        if self._prefix_cache is not None and not self._looked_up:  # once for all requests of a plan
            self._prefix_cache.drop_stale()
        self._looked_up.append(number)
        [prefix] = self._placement(number).cached_prefixes(is_counted=False)
        self._found[number] = prefix
        return PrefixHit(prefix.length)

    def _settle_prefixes(self, plan: StepPlan) -> None:
        """Count the prefixes of admitted requests, and free the blocks that no request uses."""
        looked_up, self._looked_up = self._looked_up, []  # an admitted request must not be met again
        for number in looked_up:
            if number not in plan.admitted:
                self._found.pop(number, None)  # it waits, and must not hold blocks
            elif self._prefix_cache is not None:
                placement, found = self._placement(number), self._found[number]
                placement.cached_prefixes()
                [one] = placement.resolved
                self._waiting[number] = placement.alone(one._replace(cached_tokens=found.length))
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
                found, num_shared = block_usage(table.cache, table.rows, _num_drafts(table.rows))
                usage |= found
                shared += num_shared
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
