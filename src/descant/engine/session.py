"""The engine of this package: tables of running requests and the loop over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from math import isfinite
from typing import Any
from zlib import crc32

from torch import Tensor

from descant.core.interfaces import ModelTraits, RankGroup, RowCache
from descant.core.records import Hypothesis, Observation, Selection
from descant.core.sampling_noise import SamplingNoise
from descant.engine.admission import Admission, ResolvedRequest
from descant.engine.cache_factory import CacheKey
from descant.engine.events import Event, Failed, Finished, Report, Tokens
from descant.engine.explain import no_candidates_error
from descant.engine.planner import as_model
from descant.engine.prefix_reuse import PrefixReuse
from descant.engine.protocol import Engine
from descant.engine.request import Request
from descant.engine.running_requests import RunningRequests
from descant.engine.single_entry import single_entry
from descant.engine.step_faults import request_error
from descant.engine.table import Table
from descant.engine.table_set import Placement, TableSet
from descant.errors import DescantError, InputError
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.no_cache import NoCache, RecomputeModel
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["Event", "Failed", "Finished", "Report", "Request", "Session", "Tokens"]


@dataclass
class _EndingRequest:
    """A request that has ended and is to be released."""

    table: Table
    no_candidates: bool = False  # it failed because a row had no candidate
    nonfinite: bool = False  # ... as the model's own logits were not finite
    event: Finished | Failed | None = None


class Session:
    """Running requests and the loop over them: `admit`, `step`, `cancel`.

    Requests of any length, config and strategy share the forward of a step; each has the same result as
    alone. A request that names a cache of its own shares its forward with those that name the same. A row
    and its memory are freed in the step that ends it. `cache` is the empty cache of all requests that name
    none, if it is not to be chosen by the first of them; a `prefix_cache` keeps the keys and values of
    common prefixes. With `trace=Tracer(...)` every step is recorded in `trace`. It implements the `Engine`
    interface and is used by one thread at a time: `admit`, `step` and `cancel` raise `SessionBusy` inside a
    step and beside another thread.
    """

    def __init__(
        self,
        model: Any,
        *,
        states: Sequence[str] = (),
        observe: Callable[[Observation], None] | None = None,
        cache: RowCache | None = None,
        prefix_cache: PrefixCache | None = None,
        trace: Tracer | bool | None = None,
    ) -> None:
        self._tracer = Tracer.from_argument(trace)
        self.model: Any = as_model(model, states)
        if isinstance(cache, NoCache):
            self.model = RecomputeModel(self.model)
        self.steps = 0
        self._busy_thread: int | None = None
        self._requested_states = tuple(states)
        self._output_states = set(states)
        self._prefix_cache = prefix_cache
        self._rank_group: RankGroup | None = self.model.rank_group
        self._admission = Admission(model, self.model)
        self._noise = SamplingNoise()
        self._tables = TableSet(self.model, cache, self._make_table)
        self._table_of: dict[int, Table] = {}  # by running request
        self._ending: dict[int, _EndingRequest] = {}  # ended requests that are not released yet
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
        prefix_reuse = PrefixReuse(self.model, self._prefix_cache)
        return Table(self.model, cache, running, prefix_reuse, key=key, tracer=self._tracer)

    @property
    def traits(self) -> ModelTraits:
        """The traits of its model."""
        traits: ModelTraits = self.model.traits
        return traits

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
        """The number of running requests."""
        return len(self._table_of)

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

    @single_entry
    def admit(self, *requests: Request, noise_rows: int = 0) -> list[int]:
        """Add requests, all or none; return their ids.

        `noise_rows` is for calls that share torch's generator: the number of rows that noise is drawn for.
        """
        if not requests:
            return []
        resolved = self._admission.resolve(requests, self.model.traits)
        placements = self._tables.place(resolved)
        self._tables.check(placements)
        prefixes = [placement.cached_prefixes() for placement in placements]
        self._check_ranks(resolved, placements)
        numbers = [next(self._request_ids) for _ in requests]
        with ExitStack() as undo:  # whatever is raised, nothing of these requests stays
            undo.callback(self._update_output_states)
            for placement, found in zip(placements, prefixes, strict=True):
                own = [numbers[index] for index in placement.indices]
                table = placement.table
                self._tables.add(placement, undo)
                undo.callback(self._forget, own)
                self._table_of.update(dict.fromkeys(own, table))
                table.admit(own, placement.resolved, found, undo)
            self._update_output_states()
            noise = self._tables.default.running.noise
            noise.num_rows = noise_rows or noise.num_rows
            undo.pop_all()
        return numbers

    @single_entry
    def step(self) -> list[Event]:
        """Advance every row by one step; return what happened."""
        if self._rank_group is not None and self.rows:
            self._rank_group.raise_if_failed()
        if self._ending:  # an interrupt came before they were released
            self._end_requests()
        if self._tracer is not None:
            self._tracer.start_step()
        stepped: list[tuple[Table, list[Selection]]] = []
        try:
            for table in self._tables:
                if len(table) or table.running.errors:
                    selections = table.step(self._observe)
                    stepped.append((table, selections))
        except BaseException:
            if stepped:  # their rows have advanced: the next step returns their events
                self._end_step(stepped, failed=True)
            raise
        if stepped:
            self._end_step(stepped)
        events, self._undelivered = self._undelivered, []
        return events

    @single_entry
    def cancel(self, request: int) -> None:
        """Remove a request and free its rows at once."""
        if request not in self._table_of:
            raise InputError("request", "must be a running request", request)
        with ExitStack() as last:  # also if code of the request raises when it is released
            if self._tracer is not None:
                last.callback(self._tracer.record_error, request, "cancelled")
            last.callback(self._tables.drop_empty)
            last.callback(self._forget, [request])
            self._table_of[request].cancel(request)

    def drain(self) -> Iterator[Event]:
        """Step until no request is running."""
        while len(self) or self._undelivered:
            yield from self.step()

    def report(self) -> Report:
        """What it has done so far, and what it holds."""
        prefixes = None if self._prefix_cache is None else self._prefix_cache.report()
        return Report(self.steps, len(self), self.rows, self._tables.cache_bytes, prefixes)

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        return self._table_of[request].common_prefix(request)

    # -------------------------------------------------------------------- admission
    def _check_ranks(self, resolved: Sequence[ResolvedRequest], placements: Sequence[Placement]) -> None:
        """Raise unless all ranks admit the same requests; decide whether stops must be synchronised."""
        if self._rank_group is None:
            return
        self._rank_group.check_equal("prompt", resolved[0].prompt, _admission_digest(resolved, placements))
        timed = any(isfinite(one.prompt_params.deadline) for one in resolved)
        local_stops = timed or any(one.request.stopping_criteria for one in resolved)
        syncs = self._rank_group.any_rank(local_stops)
        for placement in placements:
            placement.table.running.stop_checker.syncs_across_ranks |= syncs

    def _update_output_states(self) -> None:
        """Have the model return the states that any running request needs."""
        needed = set(self._requested_states).union(*(table.required_states for table in self._tables))
        if needed != self._output_states:
            self._output_states = needed
            for table in self._tables:
                table.model.set_output_states(sorted(needed))

    # -------------------------------------------------------------------- ends
    def _end_step(
        self, stepped: Sequence[tuple[Table, Sequence[Selection]]], *, failed: bool = False
    ) -> None:
        """Record a step of these tables, release the requests that ended in it, and keep the events.

        `failed` says that another table raised in it.
        """
        self.steps += 1
        if self._tracer is not None:
            own = {number for table, _ in stepped for number in table.running.requests}
            self._tracer.end_step(self._tables.cache_bytes, own if failed else None)
        self._undelivered += [
            one.emitted for _, selections in stepped for one in selections if one.emitted is not None
        ]
        for table, selections in stepped:
            for one in selections:
                for request in (*one.failed, *one.finished):
                    no_candidates = request in one.failed
                    self._ending[request] = _EndingRequest(table, no_candidates, request in one.nonfinite)
        self._end_requests()

    def _end_requests(self) -> None:
        """Release the requests that have ended, and keep their events.

        After an interrupt in it, the next step goes on with the request that was interrupted.
        """
        for table in self._tables:
            for request in table.running.errors or ():
                self._ending.setdefault(request, _EndingRequest(table))
        if not self._ending:
            return
        for request, ending in list(self._ending.items()):
            if ending.event is None:
                ending.event = self._last_event(request, ending)
            if request in ending.table.running.requests:  # else it is released
                self._release(request, ending)
            self._forget([request])
            self._undelivered.append(ending.event)
            del self._ending[request]
            if self._tracer is not None:
                self._trace_event(ending.event)
        self._tables.drop_empty()

    def _last_event(self, request: int, ending: _EndingRequest) -> Finished | Failed:
        """How a request has ended."""
        running = ending.table.running.requests[request]
        cause = (ending.table.running.errors or {}).get(request)
        if cause is not None:
            return Failed(request, request_error(request, cause))
        if ending.no_candidates:
            error = no_candidates_error(
                request, running.plan, running.has_own_processors, nonfinite=ending.nonfinite
            )
            return Failed(request, error)
        try:
            return self._finish_request(ending.table, request)
        except Exception as raised:  # a strategy from outside
            return Failed(request, request_error(request, raised))

    def _release(self, request: int, ending: _EndingRequest) -> None:
        """Release an ended request, which fails if its own code raises even then."""
        try:
            ending.table.release(request, drop=isinstance(ending.event, Failed))
        except Exception as raised:
            if isinstance(ending.event, Finished):
                ending.event = Failed(request, request_error(request, raised))

    def _finish_request(self, table: Table, request: int) -> Finished | Failed:
        """A request's sequences, as many as it asked for."""
        running = table.running.requests[request]
        sequences = running.strategy.finish(request)
        if not all(isinstance(one, Hypothesis) for one in sequences):
            raise InputError("finish", "of a strategy must return a list of `Hypothesis`", sequences)
        wanted = running.plan.config.num_return_sequences
        if len(sequences) < wanted:
            # Beam search may find fewer when all other continuations were ruled out.
            got = f"{len(sequences)} sequences of {wanted}"
            error = no_candidates_error(request, running.plan, running.has_own_processors, got)
            return Failed(request, error)
        cached = table.prefix_reuse.collect_finished(request, sequences[:wanted])
        return Finished(request, sequences[:wanted], cached)

    def _forget(self, requests: Sequence[int]) -> None:
        """Drop the tables of requests that are not running any more."""
        for request in requests:
            self._table_of.pop(request, None)

    def _trace_event(self, event: Event) -> None:
        """Record how a request has ended."""
        assert self._tracer is not None
        if isinstance(event, Finished):
            self._tracer.record_result(event.request, event.hypotheses)
        elif isinstance(event, Failed):
            self._tracer.record_error(event.request, str(event.error))


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
