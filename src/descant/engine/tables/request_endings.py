"""The end of requests: their last event, and the release of all they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from descant.core.records import Hypothesis, Selection
from descant.decoding.processors.grammar import GRAMMAR_PARAM
from descant.engine.explain import no_candidates_error
from descant.engine.protocol import Failed, Finished
from descant.engine.step.faults import request_error
from descant.engine.tables.table import Table
from descant.engine.tables.table_set import TableSet
from descant.errors import ConfigError, InputError, RowError
from descant.trace.tracer import Tracer


@dataclass
class _EndingRequest:
    """A request that has ended and is to be released."""

    table: Table | None  # None: it has not joined one
    no_candidates: bool = False  # it failed because a row had no candidate
    nonfinite: bool = False  # ... as the model's own logits were not finite
    event: Finished | Failed | None = None


class RequestEndings:
    """The requests that have ended and are not released yet.

    An interrupt while one is released does no harm: the next call goes on with it.
    """

    def __init__(self, tables: TableSet, tracer: Tracer | None) -> None:
        self._tables, self._tracer = tables, tracer
        self.requests: dict[int, _EndingRequest] = {}

    def add(self, table: Table, selection: Selection) -> None:
        """Add the requests that a selection has ended."""
        for request in selection.failed:
            self.requests[request] = _EndingRequest(table, True, request in selection.nonfinite)
        for request in selection.finished:
            self.requests[request] = _EndingRequest(table)

    def fail(self, table: Table | None, request: int, cause: Exception) -> None:
        """Add a request that cannot go on; its rows have left its table."""
        event = Failed(request, request_error(request, cause))
        self.requests[request] = _EndingRequest(table, event=event)

    def release(self) -> Iterator[Finished | Failed]:
        """Release all of them, those with an error of their own included; their last events."""
        for table in self._tables:
            for request in table.running.errors or ():
                self.requests.setdefault(request, _EndingRequest(table))
        if not self.requests:
            return
        for request, ending in list(self.requests.items()):
            if ending.event is None:
                assert ending.table is not None
                ending.event = _last_event(ending.table, request, ending)
            if ending.table is not None and request in ending.table.running.requests:
                _release(ending.table, request, ending)
            yield ending.event
            del self.requests[request]
            if self._tracer is not None and ending.table is not None:
                _trace(self._tracer, ending.event)
        self._tables.drop_empty()


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
    if not all(isinstance(sequence, Hypothesis) for sequence in sequences):
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
    cached = table.prefix_reuse.collect_finished(request, sequences[:wanted])
    return Finished(request, sequences[:wanted], cached, cached_tokens=running.resolved.cached_tokens)


def _release(table: Table, request: int, ending: _EndingRequest) -> None:
    """Release an ended request, which fails if its own code raises even then."""
    try:
        table.release(request, drop=isinstance(ending.event, Failed))
    except Exception as raised:
        if isinstance(ending.event, Finished):
            ending.event = Failed(request, request_error(request, raised))


def _trace(tracer: Tracer, event: Finished | Failed) -> None:
    """Record how a request has ended."""
    if isinstance(event, Finished):
        tracer.record_result(event.request, event.hypotheses)
    else:
        tracer.record_error(event.request, str(event.error))
