"""The engine of this package: tables of running requests and the loop over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from math import isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, PromptChunk, RankGroup, RowCache
from descant.core.records import Hypothesis, Observation, Selection
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.processors.grammar import GRAMMAR_PARAM
from descant.engine.explain import no_candidates_error
from descant.engine.planning.cache_factory import CacheKey
from descant.engine.protocol import (
    Engine,
    Event,
    Failed,
    Finished,
    Report,
    Tokens,
    request_error,
    single_entry,
)
from descant.engine.request import Admission, Request, ResolvedRequest
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ScheduledRequest
from descant.engine.scheduling.scheduled_requests import ScheduledRequests, limit_forced_drafts
from descant.engine.step.next_forward import NextForward
from descant.engine.step.strategy_group import drop_tokens
from descant.engine.tables.prefix_reuse import CachedPrefix, PrefixReuse
from descant.engine.tables.running_requests import RunningRequests
from descant.engine.tables.table import Table
from descant.engine.tables.table_set import Placement, TableSet
from descant.errors import ConfigError, DescantError, InputError, RowError
from descant.kv_cache.prefix_cache import PrefixCache
from descant.kv_cache.row_views import CachedRow
from descant.kv_cache.stores.paged import PagedStore
from descant.models.distributed import current_barrier
from descant.models.forward.no_cache import NoCache, RecomputeModel
from descant.models.model_adapter import as_model
from descant.models.wrapping.wrapped_model import unwrap_model
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

# On these the host computes itself, and nothing waits for it.
DIRECT_DEVICES = ("cpu",)

__all__ = ["Event", "Failed", "Finished", "Report", "Request", "Session", "Tokens"]


class Session:
    """Running requests and the loop over them: `admit`, `step`, `cancel`.

    Requests of any length, config and strategy share the forward of a step; each has the same result as
    alone. A request that names a cache of its own shares its forward with those that name the same. A row
    and its memory are freed in the step that ends it. `cache` is the empty cache of all requests that name
    none, if it is not to be chosen by the first of them; a `prefix_cache` keeps the keys and values of
    common prefixes. With `trace=Tracer(...)` every step is recorded in `trace`. With `overlap` the forward of
    a step is launched before the tokens of the one before it are read, where the method allows it; by
    default on every device but a CPU. It implements the `Engine`
    interface and is used by one thread at a time: `admit`, `step` and `cancel` raise `SessionBusy` inside a
    step and beside another thread.
    """

    def __init__(  # noqa: PLR0913 - one argument for each part that can be chosen
        self,
        model: Any,
        *,
        states: Sequence[str] = (),
        observe: Callable[[Observation], None] | None = None,
        cache: RowCache | None = None,
        prefix_cache: PrefixCache | None = None,
        trace: Tracer | bool | None = None,
        scheduler: SchedulerConfig | None = None,
        overlap: bool | None = None,
    ) -> None:
        self._tracer = None if trace is None else Tracer.from_argument(trace)
        model = unwrap_model(model)
        self.model: Any = as_model(model, states)
        if isinstance(cache, NoCache):
            self.model = RecomputeModel(self.model)
        self.steps = 0
        self._busy_thread: int | None = None
        self._requested_states = tuple(states)
        self._output_states = set(states)
        self._prefix_cache = prefix_cache
        self._rank_group: RankGroup | None = self.model.rank_group
        self._admission = Admission(model, self.model, prefix_cache is not None)
        self._noise = SamplingNoise()
        if scheduler is not None:
            _check_scheduler(scheduler, self._rank_group, self.model.traits)
        self._is_pool_limited = scheduler is not None and scheduler.num_blocks is not None
        if cache is None and scheduler is not None and self._is_pool_limited:
            cache = _pooled_cache(self.model.traits, scheduler)
        if prefix_cache is not None:
            prefix_cache.bind_model(self.model if self.model.network is None else self.model.network)
        self._make_reuse = partial(
            PrefixReuse, self.model, prefix_cache, is_pool_limited=self._is_pool_limited
        )
        self._overlaps = (self.model.device.type not in DIRECT_DEVICES) if overlap is None else overlap
        if self._overlaps:
            self._overlaps = _can_overlap(self.model, is_required=overlap is True)
        self._tables = TableSet(self.model, cache, self._make_table)
        self._scheduled = (
            None
            if scheduler is None
            else ScheduledRequests(scheduler, self.model, self._tables, self._join_scheduled, prefix_cache)
        )
        self._table_of: dict[int, Table] = {}  # by running request
        self.beam_requests: set[int] = set()  # running ones whose tokens come only at their end
        self._endings: dict[int, _EndingRequest] = {}  # requests that have ended and are not released yet
        self._ended_now: list[int] = []  # requests that ended in this step
        self._undelivered: list[Event] = []  # events that `step` has not returned yet
        self._request_ids = count()
        self._observe = observe
        if self._tracer is not None:
            network = self.model.network
            shown = network if network is not None else model
            self._tracer.start_run(type(shown).__name__, self.model.traits.vocab_size)

    def _make_table(self, cache: RowCache, key: CacheKey | None) -> Table:
        """An empty table with that cache."""
        running = RunningRequests(self.model.device, self._rank_group, self._tracer, self._noise)
        following = NextForward() if self._overlaps else None
        return Table(
            self.model,
            cache,
            running,
            self._make_reuse,
            key=key,
            tracer=self._tracer,
            next_forward=following,
        )

    @property
    def traits(self) -> ModelTraits:
        """The traits of its model."""
        traits: ModelTraits = self.model.traits
        return traits

    @property
    def device(self) -> torch.device:
        """The device of its prompts."""
        device: torch.device = self.model.device
        return device

    @property
    def rank_group(self) -> RankGroup | None:
        """The processes that run the same requests; None: there is one."""
        return self._rank_group

    @property
    def tables(self) -> Iterator[Table]:
        """Its tables: that of the default cache first."""
        return iter(self._tables)

    @property
    def trace(self) -> Trace | None:
        """The recorded steps; None: it was made without `trace`."""
        return None if self._tracer is None else self._tracer.trace

    def __len__(self) -> int:
        """The number of requests that have not ended, waiting ones included."""
        waiting = 0 if self._scheduled is None else self._scheduled.num_waiting
        return len(self._table_of) + waiting

    @property
    def running(self) -> Iterable[int]:
        """The requests that have joined a table and not ended."""
        return self._table_of.keys()

    @property
    def num_waiting(self) -> int:
        """The requests that wait, in a session with a scheduler."""
        return 0 if self._scheduled is None else self._scheduled.scheduler.num_waiting

    @property
    def rows(self) -> int:
        """The number of running rows."""
        return self._tables.num_rows

    def supports(self, request: Request) -> DescantError | None:
        """The error that `admit` would raise because of the request itself; None: it can be admitted."""
        try:
            for placement in self._tables.place(self._admission.resolve([request], self.model.traits)):
                placement.check()
        except DescantError as error:
            return error
        return None

    def has_grammar(self, request: Request) -> bool:
        """Whether a request has a grammar that is not compiled yet."""
        return request._call.compiled_grammar is None and self._admission.grammar(request) is not None

    def compile_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled; any thread may call it beside a step."""
        return self._admission.compile_grammar(request)

    def demand(self, request: Request) -> ScheduledRequest:
        """The tokens, rows and blocks that the scheduler counts for a request."""
        if self._scheduled is None:
            raise InputError("request", "has a demand only in a session with a scheduler", request)
        resolved = self._admission.resolve([request], self.model.traits)
        placements = self._tables.place(limit_forced_drafts(resolved, self._scheduled.config))
        return self._scheduled.demands([0], placements, 0.0)[0]

    @single_entry
    def admit(
        self, *requests: Request, noise_rows: int = 0, numbers: Sequence[int] | None = None
    ) -> list[int]:
        """Add requests, all or none; return their ids.

        `noise_rows` is for calls that share torch's generator: the number of rows that noise is drawn for.
        `numbers` are ids that the caller chooses, for all requests of the session or for none.
        """
        if not requests:
            return []
        resolved = self._admission.resolve(requests, self.model.traits)
        if self._scheduled is not None:
            return self._queue(self._scheduled, resolved, numbers)
        for request in requests:
            if request.priority or request.deadline is not None:
                name = "priority" if request.priority else "deadline"
                do = "make the session with `scheduler=SchedulerConfig()`"
                raise InputError(name, "needs a session with a scheduler", getattr(request, name), do)
        placements = self._tables.place(resolved)
        self._tables.check(placements)
        if self._prefix_cache is not None:
            self._prefix_cache.drop_stale()
        prefixes = list(map(Placement.cached_prefixes, placements))
        if self._rank_group is not None:
            self._check_ranks(self._rank_group, resolved, placements)
        request_ids = numbers or list(islice(self._request_ids, len(requests)))
        self._join(request_ids, placements, prefixes)
        noise = self._tables.default.running.noise
        noise.num_rows = noise_rows or noise.num_rows
        return list(request_ids)

    def _join(
        self,
        request_ids: Sequence[int],
        placements: Sequence[Placement],
        prefixes: Sequence[Sequence[CachedPrefix]],
    ) -> None:
        """Add requests to their tables, all or none."""
        with ExitStack() as undo:  # whatever is raised, nothing of these requests stays
            undo.callback(self._update_output_states)
            for placement, found in zip(placements, prefixes, strict=True):
                own: list[int] = []
                table = placement.table
                self._tables.add(placement, undo)
                undo.callback(self._forget, own)
                for index, one in zip(placement.indices, placement.resolved, strict=True):
                    own.append(request_ids[index])
                    self._table_of[request_ids[index]] = table
                    if one.plan.is_final_at_end:
                        self.beam_requests.add(request_ids[index])
                table.admit(own, placement.resolved, found, undo)
            self._update_output_states()
            undo.pop_all()

    def _queue(
        self,
        scheduled: ScheduledRequests,
        resolved: Sequence[ResolvedRequest],
        request_ids: Sequence[int] | None = None,
    ) -> list[int]:
        """Let requests wait for the scheduler; return their ids."""
        placements = self._tables.place(limit_forced_drafts(resolved, scheduled.config))
        for placement in placements:
            placement.check()
        request_ids = request_ids or list(islice(self._request_ids, len(resolved)))
        scheduled.add(request_ids, placements)
        return list(request_ids)

    def _join_scheduled(self, request_id: int, placement: Placement, prefix: CachedPrefix) -> None:
        """Add a request whose turn it is to its table."""
        self._tables.check([placement])
        self._join([request_id], [placement], [[prefix]])

    @single_entry
    def step(self) -> list[Event]:
        """Advance every row by one step; return what happened."""
        if self._rank_group is not None and self.rows:
            self._rank_group.raise_if_failed()
        if self._endings:  # an interrupt came before they were released
            self._end_requests()
        with nullcontext(()) if self._scheduled is None else self._turn(self._scheduled) as chunks:
            if self._tracer is not None:
                self._tracer.start_step()
            stepped: list[tuple[Table, list[Selection]]] = []
            try:
                for table in self._tables:
                    if len(table) or table.running.errors:
                        selections = table.step(self._observe, chunks)
                        stepped.append((table, selections))
            except BaseException:
                if stepped:  # their rows have advanced: the next step returns their events
                    self._end_step(stepped, failed=True)
                raise
            if stepped:
                self._end_step(stepped)
        events, self._undelivered = self._undelivered, []
        return events

    @contextmanager
    def _turn(self, scheduled: ScheduledRequests) -> Iterator[Sequence[PromptChunk]]:
        """A step as the scheduler plans it, with the chunks of prompts that its forward may feed."""
        scheduled.remove_ended(self._ended_now)  # after an interrupt, before this step
        self._ended_now.clear()
        try:
            scheduled.start_step()
            try:
                yield scheduled.chunks
            finally:
                scheduled.resume_suspended()
            scheduled.finish_reads()
            self._fail_scheduled(scheduled)
        except BaseException:
            scheduled.abort_step(self._ended_now)
            self._ended_now.clear()
            raise
        scheduled.end_step(self._ended_now)
        self._ended_now.clear()

    def _fail_scheduled(self, scheduled: ScheduledRequests) -> None:
        """End the requests that cannot run: their deadline has passed, or their table refused them."""
        for request_id, cause in list(scheduled.failed.items()):
            table = self._table_of.get(request_id)
            if (
                table is not None
                and table.rows is not None
                and bool((table.rows.request == request_id).any())
            ):
                table.park(request_id)
            event = Failed(request_id, request_error(request_id, cause))  # its rows have left its table
            self._endings[request_id] = _EndingRequest(table, event=event)
            scheduled.forget(request_id)
        self._end_requests()

    @single_entry
    def cancel(self, request: int) -> None:
        """Remove a request and free its rows at once."""
        scheduled, table = self._scheduled, self._table_of.get(request)
        if table is None and (scheduled is None or request not in scheduled):
            raise InputError("request", "must be a running request", request)
        with ExitStack() as last:  # also if code of the request raises when it is released
            if self._tracer is not None:
                last.callback(self._tracer.record_error, request, "cancelled")
            last.callback(self._tables.drop_empty)
            last.callback(self._forget, [request])
            if scheduled is not None:
                last.callback(scheduled.cancel, request)
            if table is not None:
                table.cancel(request)

    def drain(self) -> Iterator[Event]:
        """Step until no request is running."""
        while len(self) or self._undelivered:
            yield from self.step()

    def report(self) -> Report:
        """Its work so far, and its content."""
        prefixes = None if self._prefix_cache is None else self._prefix_cache.report()
        report = Report(self.steps, len(self), self.rows, self._tables.cache_bytes, prefixes)
        if self._scheduled is None:
            return report
        scheduler = self._scheduled.scheduler
        return replace(
            report,
            waiting=scheduler.num_waiting,
            preemptions=self._scheduled.num_preemptions,
            blocks=scheduler.reserved_blocks,
        )

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        if self._scheduled is not None and request in self._scheduled:
            return torch.zeros(0, dtype=torch.long)
        return self._table_of[request].common_prefix(request)

    # -------------------------------------------------------------------- admission
    def _check_ranks(
        self, group: RankGroup, resolved: Sequence[ResolvedRequest], placements: Sequence[Placement]
    ) -> None:
        """Raise unless all ranks admit the same requests; decide whether stops must be synchronised."""
        group.check_equal("prompt", resolved[0].prompt, _admission_digest(resolved, placements))
        timed = any(isfinite(one.prompt_params.deadline) for one in resolved)
        local_stops = timed or any(one.request.stopping_criteria for one in resolved)
        syncs = group.any_rank(local_stops)
        for placement in placements:
            placement.table.running.stop_checker.syncs_across_ranks |= syncs

    def _update_output_states(self) -> None:
        """Have the model return the states that any running request needs."""
        needed = set(self._requested_states)
        for table in self._tables:
            needed |= table.required_states
        if needed != self._output_states:
            self._output_states = needed
            self.apply_output_states()

    def apply_output_states(self) -> None:
        """Have the model return the states of this session, after a step of another one that shares it."""
        for table in self._tables:
            table.model.set_output_states(sorted(self._output_states))

    # -------------------------------------------------------------------- ends
    def _end_step(
        self, stepped: Sequence[tuple[Table, Sequence[Selection]]], *, failed: bool = False
    ) -> None:
        """Record a step of these tables, release the requests that ended in it, and keep the events.

        `failed` says that another table raised in it.
        """
        self.steps += 1
        if self._tracer is not None:
            own = {request_id for table, _ in stepped for request_id in table.running.requests}
            self._tracer.end_step(self._tables.cache_bytes, own if failed else None)
        has_ended = False
        for table, selections in stepped:
            has_ended |= bool(table.running.errors)
            for selection in selections:
                emitted = selection.emitted
                if self.beam_requests:  # these have their tokens at their end
                    emitted = drop_tokens(emitted, self.beam_requests)
                if emitted is not None:
                    self._undelivered.append(emitted)
                for request in selection.failed:
                    has_ended = True
                    self._endings[request] = _EndingRequest(table, True, request in selection.nonfinite)
                for request in selection.finished:
                    has_ended = True
                    self._endings[request] = _EndingRequest(table)
        if has_ended:
            self._end_requests()

    def _end_requests(self) -> None:
        """Release the requests that have ended, those with an error of their own included; keep their events.

        An interrupt while one is released does no harm: the next call goes on with it.
        """
        for table in self._tables:
            for request in table.running.errors or ():
                self._endings.setdefault(request, _EndingRequest(table))
        if not self._endings:
            return
        for request, ending in list(self._endings.items()):
            own_table = ending.table
            if ending.event is None:
                assert own_table is not None
                ending.event = _last_event(own_table, request, ending)
            if own_table is not None and request in own_table.running.requests:
                try:
                    own_table.release(request, drop=isinstance(ending.event, Failed))
                except Exception as raised:  # its own code
                    if isinstance(ending.event, Finished):
                        ending.event = Failed(request, request_error(request, raised))
            event = ending.event
            self._forget([request])
            self._undelivered.append(event)
            self._ended_now.append(request)
            del self._endings[request]
            if self._tracer is not None and own_table is not None:
                if isinstance(event, Finished):
                    self._tracer.record_result(request, event.hypotheses)
                else:
                    self._tracer.record_error(request, str(event.error))
        self._tables.drop_empty()

    def _forget(self, requests: Sequence[int]) -> None:
        """Drop the tables of requests that are not running any more."""
        for request in requests:
            self._table_of.pop(request, None)
            self.beam_requests.discard(request)


@dataclass
class _EndingRequest:
    """A request that has ended and is to be released."""

    table: Table | None  # None: it has not joined one
    no_candidates: bool = False  # it failed because a row had no candidate
    nonfinite: bool = False  # ... as the model's own logits were not finite
    event: Finished | Failed | None = None


def _last_event(table: Table, request: int, ending: _EndingRequest) -> Finished | Failed:
    """The last event of a request."""
    running = table.running.requests[request]
    cause = (table.running.errors or {}).get(request)
    if cause is not None:
        return Failed(request, request_error(request, cause))
    pool = running.method_params.get(GRAMMAR_PARAM)
    if ending.no_candidates and pool is not None and pool.failure is not None:
        must = f"`grammar` must stay within the bounds of {pool.grammar.backend.name}"
        return Failed(request, RowError(f"{must}, got {pool.failure} (request {request})", request))
    if ending.no_candidates:
        error = no_candidates_error(
            request, running.plan, running.has_own_processors, nonfinite=ending.nonfinite
        )
        return Failed(request, error)
    try:
        return _finish(table, request)
    except Exception as raised:  # a strategy from outside
        return Failed(request, request_error(request, raised))


def _finish(table: Table, request: int) -> Finished | Failed:
    """A request's sequences: as many as it asked for, or all where its recipe says how many there are."""
    running = table.running.requests[request]
    sequences = running.strategy.finish(request)
    for sequence in sequences:
        if not isinstance(sequence, Hypothesis):
            raise InputError("finish", "of a strategy must return a list of `Hypothesis`", sequences)
    config, wanted = running.plan.config, running.plan.config.num_return_sequences
    if running.plan.has_open_count:
        if sequences and config.source("num_return_sequences") == "default":
            wanted = len(sequences)
        elif len(sequences) < wanted:
            must = f"must be at most the {len(sequences)} sequences that the recipe has found"
            raise ConfigError("num_return_sequences", must, wanted, "leave it out for all of them")
    elif len(sequences) < wanted:
        # Beam search may find fewer when all other continuations were ruled out.
        got = f"{len(sequences)} sequences of {wanted}"
        return Failed(request, no_candidates_error(request, running.plan, running.has_own_processors, got))
    table.record_finished(request, sequences)
    cached: tuple[CachedRow, ...] = ()
    if running.resolved.uses_prefix_reuse:
        cached = table.prefix_reuse.collect_finished(request, sequences[:wanted])
    return Finished(request, sequences[:wanted], cached, cached_tokens=running.resolved.cached_tokens)


def _can_overlap(model: Any, *, is_required: bool) -> bool:
    """Whether the forwards of a model can be launched early, and made again if they were launched in vain."""
    traits, reason = model.traits, None
    if traits.cache_type != "kv" or traits.ties_requests or traits.prepares_own_inputs:
        reason = f"a forward of {type(model.network).__name__} cannot be made again"
    elif model.rank_group is not None or current_barrier() is not None:
        reason = "processes that share a model must make the same forwards"
    if reason is not None and is_required:
        raise InputError("overlap", f"must be False or None: {reason}", True)
    return reason is None


def _check_scheduler(scheduler: Any, rank_group: RankGroup | None, traits: ModelTraits) -> None:
    """Raise for a scheduler that a session cannot have."""
    if not isinstance(scheduler, SchedulerConfig):
        raise InputError("scheduler", "must be a descant.SchedulerConfig", scheduler)
    if rank_group is not None:
        must = "must be None for a model on several processes, which must all make the same steps"
        raise InputError("scheduler", must, scheduler)
    if traits.ties_requests:
        must = "must be None for a model with several codebooks, whose requests run together"
        raise InputError("scheduler", must, scheduler)


def _pooled_cache(traits: ModelTraits, config: SchedulerConfig) -> RowCache | None:
    """The paged cache of a model whose keys and values can be paged; None: its own cache."""
    is_plain = traits.cache_type == "kv" and not (traits.is_encoder_decoder or traits.needs_own_cache)
    is_plain = is_plain and not any(traits.sliding_windows.values()) and traits.supports_custom_mask
    return PagedStore(config.block_size) if is_plain else None


def _admission_digest(resolved: Sequence[ResolvedRequest], placements: Sequence[Placement]) -> int:
    """A digest of the prompts, the number of their rows, how long these may get, and their caches."""
    params = [(one.prompt_params.max_length, one.plan.params) for one in resolved]
    keys = [one.plan.strategy.rank_key for one in resolved]
    lengths = [(length, plan.num_sequences, plan.eos_token_ids) for length, plan in params]
    caches = [(placement.cache_name, placement.indices) for placement in placements]
    digest = crc32(repr([keys, *lengths, caches]).encode())
    for one in resolved:
        digest = crc32(one.prompt.cpu().numpy().tobytes(), digest)
    return digest


_ENGINE: type[Engine] = Session  # for the type checker
