"""The requests of a session with a scheduler: they wait, are read in pieces, run, and may be preempted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from descant.config.registry import DRAFTER_FIELDS
from descant.core.context import row_params
from descant.core.interfaces import Array, ModelTraits, PackingModel, PromptChunk, RowCache
from descant.core.records import Proposal, RequestFault
from descant.core.rows import Rows
from descant.decoding.guidance import NEGATIVE_PROMPT_KEY
from descant.engine.planning.drafter_factory import LOOKUPS
from descant.engine.request import ResolvedRequest, with_drawn_seed
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
from descant.engine.step.step import forward_or_fault
from descant.engine.tables.prefix_reuse import CachedPrefix
from descant.engine.tables.prompt_reader import PromptReader, ReadRows, common_length
from descant.engine.tables.table import Table
from descant.engine.tables.table_set import Placement, TableSet
from descant.errors import ConfigError, DeadlineExceeded, InputError, NotEnoughMemory
from descant.kv_cache.prefix_cache import PrefixCache
from descant.kv_cache.row_views import PairedRowCache, is_lossless, unwrap_cache
from descant.kv_cache.stores.paged import PagedStore
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY


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
DRAFT_COUNT_FIELDS: Final = (*[lookup.field for lookup in LOOKUPS], "num_assistant_tokens")


def reads_in_chunks(traits: ModelTraits, store: RowCache) -> bool:
    """Whether a model can read tokens piece by piece into a cache of the type of `store`."""
    if traits.cache_type != "kv" or traits.is_encoder_decoder:
        return False
    return is_lossless(store) and not (traits.has_own_position_ids or traits.needs_own_cache)


def limit_forced_drafts(
    resolved: Sequence[ResolvedRequest], config: SchedulerConfig
) -> list[ResolvedRequest]:
    """Requests whose grammars draft no more forced tokens than a step has room for.

    No field asks for these drafts, and their number changes no result. Other drafts that are too many are an
    error.
    """
    return [_with_possible_drafts(one, config.max_step_tokens) for one in resolved]


def _with_possible_drafts(one: ResolvedRequest, limit: int | None) -> ResolvedRequest:
    """The request; with fewer drafts if only its grammar drafts and a step of `limit` tokens has no room."""
    plan, request = one.plan, one.request
    drafts, rows = int(plan.method_params.get("draft_tokens", 0)), plan.num_fed_rows
    given = [request.assistant_model, plan.recipe]
    given += [getattr(plan.config, name) for name in DRAFTER_FIELDS]
    if limit is None or not rows <= limit < rows * (1 + drafts) or any(value is not None for value in given):
        return one
    params = {**plan.method_params, "draft_tokens": limit // rows - 1}
    return one._replace(plan=replace(plan, method_params=params))


def _most_drafts(one: ResolvedRequest, config: SchedulerConfig, rows: int) -> int:
    """The most tokens that a row drafts in one step."""
    drafts = min(
        int(one.plan.method_params.get("draft_tokens", 0)),
        max(one.prompt_params.last_length - len(one.prompt), 0),  # the room after the first new token
    )
    limit = config.max_step_tokens
    if drafts and limit is not None and rows <= limit < rows * (1 + drafts):
        given = [name for name in DRAFT_COUNT_FIELDS if getattr(one.plan.config, name) is not None]
        must = f"must be at most {limit // rows - 1}: a step has max_step_tokens={limit} tokens"
        raise ConfigError(given[0] if given else "assistant_model", must, drafts, "lower it")
    return drafts


def request_demand(
    request_id: int,
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
    rows = plan.num_fed_rows
    if not paged:  # a recurrent state does not grow
        fixed_blocks += rows * (1 if traits.cache_type == "recurrent" else config.blocks_of(max_row_tokens))
    drafts = _most_drafts(one, config, rows)
    return ScheduledRequest(
        number=request_id,
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
    """The tokens and blocks of reading the rows of a preempted request again, and of the step after it."""
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

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting or request_id in self._parked

    # -------------------------------------------------------------------- requests come and go
    def add(self, request_ids: Sequence[int], placements: Sequence[Placement]) -> None:
        """Queue requests, all or none."""
        now = self.clock()
        demands = self.demands(request_ids, placements, now)
        entries = {
            request_ids[index]: (placement, one)
            for placement in placements
            for index, one in zip(placement.indices, placement.resolved, strict=True)
        }
        for demand in demands.values():
            self._check_size(demand)
        self.scheduler.add(*(demands[request_id] for request_id in request_ids), now=now)
        # Seeds are drawn after all checks, in the order of arrival.
        for request_id in request_ids:
            placement, one = entries[request_id]
            self._waiting[request_id] = placement.alone(with_drawn_seed(one)._replace(cached_tokens=0))

    def demands(
        self, request_ids: Sequence[int], placements: Sequence[Placement], now: float
    ) -> dict[int, ScheduledRequest]:
        """The demands of requests that the scheduler counts, by id."""
        traits, demands = self._model.traits, {}
        for placement in placements:
            store = unwrap_cache(placement.cache, _NO_ROWS)[0]
            for index, one in zip(placement.indices, placement.resolved, strict=True):
                request_id = request_ids[index]
                demands[request_id] = request_demand(
                    request_id, one, traits, self.config, store=store, now=now
                )
        return demands

    def _check_size(self, demand: ScheduledRequest) -> None:
        """Raise for a request that may outgrow the whole pool, so that none fails on the way."""
        limit, size = self.config.num_blocks, self.config.block_size
        need = demand.max_blocks(self.config)
        if limit is not None and need > limit:
            must = f"must fit a KV pool of {limit} blocks of {size} tokens at its largest"
            raise InputError("request", must, f"{need} blocks", "lower max_new_tokens, or enlarge the pool")

    def cancel(self, request_id: int) -> None:
        """Remove a waiting, reading, running or parked request."""
        self.scheduler.cancel(request_id)
        self.forget(request_id)

    def remove_ended(self, request_ids: Collection[int]) -> None:
        """Remove requests that have ended between two steps."""
        for request_id in request_ids:
            if request_id in self.scheduler:
                self.cancel(request_id)

    def forget(self, request_id: int) -> None:
        """Drop what is kept of a request outside the tables."""
        self._stop_reading(request_id)
        for kept in (self._waiting, self._found, self._parked, self.failed):
            kept.pop(request_id, None)

    # -------------------------------------------------------------------- before a step
    def start_step(self) -> None:
        """Plan a step and bring the tables into the state it needs."""
        plan = self._plan = self.scheduler.schedule(self.clock())
        self._finished_reads.clear()
        # First: the scheduler has dropped these, whatever is raised below.
        for request_id in plan.expired:
            self.failed[request_id] = DeadlineExceeded(request_id)
        for request_id in plan.exceeded:
            self.failed[request_id] = self._size_error(request_id)
        self._settle_prefixes(plan)
        for request_id in plan.preempted:
            self._preempt(request_id)
        for request_id, tokens in plan.read.items():
            with self._failing(request_id):
                self._read(request_id, tokens)
            if request_id not in self._chunks:
                self._finished_reads.add(request_id)
        self._suspend(plan)

    @contextmanager
    def _failing(self, request_id: int) -> Iterator[None]:
        """Let a request fail if what is done for it raises."""
        try:
            yield
        except RequestFault as fault:
            self.failed[request_id] = fault.errors.get(request_id, fault)
        except Exception as error:
            self.failed[request_id] = error

    def _preempt(self, request_id: int) -> None:
        """Free what a request holds; its tokens are read again later."""
        self.num_preemptions += 1
        self._stop_reading(request_id)
        self._found.pop(request_id, None)
        if request_id in self:
            return  # it was being read
        table = next(other for other in self._tables if request_id in other.running.requests)
        self._parked[request_id] = table, table.park(request_id)

    def _read(self, request_id: int, tokens: int) -> None:
        """Read tokens of a request, which joins its table with the last of them."""
        if request_id not in self._reader:
            if self._joins_at_once(request_id, tokens):
                return
            self._start_reading(request_id)
        chunk = self._reader.next_chunk(request_id, tokens)
        if chunk is not None and self._can_pack(chunk.cache):
            self._chunks[request_id] = chunk
            return
        if self._reader.read(request_id, tokens, self._forward):
            return
        can_pack = self._can_pack(self._reader.cache_of(request_id))
        rows, prefixes = self._reader.take(request_id, self._forward, can_pack)
        try:
            if request_id in self._parked:
                self._parked[request_id][0].resume(rows, prefixes)
                del self._parked[request_id]
            else:
                self._join(request_id, self._placement(request_id), prefixes[0])
                del self._waiting[request_id]
        except Exception:
            _free(prefixes)  # the traceback refers to them
            raise
        self._reader.drop(request_id)

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
            request_id, chunk = self._chunks.popitem()
            with self._failing(request_id):
                if not chunk.is_fed:
                    others = [other for other in self._chunks.values() if not other.is_fed]
                    self._forward(chunk.rows, Proposal(), chunk.cache, chunks=others)
                self._reader.commit_chunk(request_id, self._plan.read[request_id])
            self._finished_reads.add(request_id)

    def _joins_at_once(self, request_id: int, tokens: int) -> bool:
        """Let a request join its table if it is read in one step; False: it is not."""
        if request_id in self._waiting:
            one, prefix = self._waiting[request_id].resolved[0], self._found.get(request_id, CachedPrefix())
            if len(one.prompt) + one.offset - prefix.length > tokens:
                return False
            self._join(request_id, self._placement(request_id), prefix)
            del self._waiting[request_id]
            self._found.pop(request_id, None)
            return True
        table, rows = self._parked[request_id]
        if (len(rows) == 1 and tokens >= int(rows.pending.sum())) or not self._is_chunkable(table):
            table.resume(*ReadRows.unread(rows))
            del self._parked[request_id]
            return True
        return False

    def _start_reading(self, request_id: int) -> None:
        if request_id in self._parked:
            table, rows = self._parked[request_id]
            prefix, cache = CachedPrefix(), table.cache
        else:
            placement = self._placement(request_id)
            [one], cache = placement.resolved, placement.cache
            prefix = self._found.get(request_id, CachedPrefix())
            rows = _prompt_rows(request_id, one, self._model.device)
            # The only input with which a prompt is read in chunks: its table adds it too late for them.
            name = one.request.adapter_name
            if name is not None:
                self._model.add_requests([request_id], {ADAPTER_NAME_KEY: [name]})
        self._reader.start(request_id, rows, prefix, unwrap_cache(cache, _NO_ROWS)[0].select(_NO_ROWS))
        self._found.pop(request_id, None)

    def _stop_reading(self, request_id: int) -> None:
        """Drop what is read of a request that has not joined its table."""
        if request_id in self._reader and request_id in self._waiting:
            self._model.remove_requests([request_id])
        self._reader.drop(request_id)

    def _is_chunkable(self, table: Table) -> bool:
        """Whether parked rows of a table can be read again piece by piece."""
        return reads_in_chunks(self._model.traits, unwrap_cache(table.cache, _NO_ROWS)[0])

    @property
    def _forward(self) -> Callable[..., Any]:
        """The forward that reads requests: of the model without wrappers, which change no key or value."""
        return partial(forward_or_fault, self._model, self._model.forward)

    def _placement(self, request_id: int) -> Placement:
        """The placement of a waiting request in the tables as they are now."""
        self._waiting[request_id] = placement = self._tables.renew(self._waiting[request_id])
        return placement

    def _find_prefix(self, request_id: int) -> PrefixHit:
        """The cached part of a request that is about to be admitted."""
        if request_id not in self._waiting:
            return PrefixHit()
        if self._prefix_cache is not None and not self._looked_up:  # once for all requests of a plan
            self._prefix_cache.drop_stale()
        self._looked_up.append(request_id)
        [prefix] = self._placement(request_id).cached_prefixes(is_counted=False)
        self._found[request_id] = prefix
        return PrefixHit(prefix.length)

    def _settle_prefixes(self, plan: StepPlan) -> None:
        """Count the prefixes of admitted requests, and free the blocks that no request uses."""
        looked_up, self._looked_up = self._looked_up, []  # an admitted request must not be met again
        for request_id in looked_up:
            if request_id not in plan.admitted:
                self._found.pop(request_id, None)  # it waits, and must not hold blocks
            elif self._prefix_cache is not None:
                placement, found = self._placement(request_id), self._found[request_id]
                placement.cached_prefixes()
                [one] = placement.resolved
                self._waiting[request_id] = placement.alone(one._replace(cached_tokens=found.length))
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
            for request_id in [present_id for present_id in present if present_id not in running]:
                self._suspended.append((table, table.suspend(request_id)))

    def _size_error(self, request_id: int) -> Exception:
        blocks, size = self.config.num_blocks, self.config.block_size
        must = f"request {request_id} must fit a KV pool of {blocks} blocks of {size} tokens by itself"
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
        for request_id in plan.preempted:
            if request_id not in self and any(request_id in table.running.requests for table in self._tables):
                self._preempt(request_id)
        done = {*self._finished_reads, *ended}
        skipped = [request_id for request_id in (*plan.decode, *plan.read) if request_id not in done]
        self._report(plan, ended, skipped)

    def end_step(self, ended: Collection[int]) -> None:
        """Report a step to the scheduler; `ended` are the requests that finished or failed in it."""
        if self._plan is not None:
            self._report(self._plan, ended, ())

    def _report(self, plan: StepPlan, ended: Collection[int], skipped: Collection[int]) -> None:
        # What the scheduler has dropped in this plan, or in one whose step was not made.
        gone = {*plan.expired, *plan.exceeded}
        ended = [
            request_id for request_id in ended if request_id not in gone and request_id in self.scheduler
        ]
        parked = {
            request_id: self._parked_size(request_id)
            for request_id in plan.preempted
            if request_id in self._parked
        }
        usage, shared = ({}, 0) if self.config.num_blocks is None else self._usage(plan)
        # Requests that the scheduler has dropped stay in their tables until the end of a step that is made.
        dropped = {*ended, *gone, *self.failed}
        usage = {request_id: blocks for request_id, blocks in usage.items() if request_id not in dropped}
        self.scheduler.finish_step(StepReport(usage, parked, ended, skipped, shared))
        self._plan = None

    def _parked_size(self, request_id: int) -> ParkedRequest:
        """The demand of reading a preempted request again."""
        table, rows = self._parked[request_id]
        one, store = table.running.requests[request_id].resolved, unwrap_cache(table.cache, _NO_ROWS)[0]
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
        for request_id in plan.read:
            store = self._reader.cache_of(request_id) if request_id in self._reader else None
            if isinstance(store, PagedStore):  # its rows share what they have in common
                usage[request_id] = RequestUsage(len(np.unique(store.referenced_blocks())), 0)
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


def _prompt_rows(request_id: int, one: ResolvedRequest, device: torch.device) -> Rows:
    """The prompt of a request as a row without parameters."""
    length = torch.tensor([len(one.prompt)])
    zero = torch.zeros(1, dtype=torch.long)
    tokens = one.prompt[None].to(device)
    return Rows(tokens, length, zero, zero.clone(), length.clone(), torch.tensor([request_id]), zero.clone())
