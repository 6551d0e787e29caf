"""A table: the rows that share a cache and a forward, and the requests that own them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import RowCache, SizedCache, Wrapper
from descant.core.records import Hypothesis, Proposal, Selection
from descant.core.rows import Rows, index_rows, stable_row_order
from descant.decoding.strategies.backtracking import pending_tokens_of
from descant.engine.admission import ResolvedRequest
from descant.engine.cache_factory import CacheKey
from descant.engine.explain import request_record
from descant.engine.prefix_reuse import CachedPrefix, PrefixReuse
from descant.engine.prompt_reader import ReadRows
from descant.engine.request_rows import join_rows, new_rows, restored_rows
from descant.engine.running_requests import PreparedRequest, RunningRequests
from descant.engine.step import Observe, StepHooks, run_step
from descant.engine.step_faults import StepFault, checked_forward, forward_or_fault
from descant.engine.wrapper_chain import WrapperChain
from descant.kv_cache.cached_row import append_rows, unwrap_cache
from descant.trace.logit_summary import processor_name
from descant.trace.tracer import Tracer

__all__ = ["Table"]

_NO_ROWS = torch.zeros(0, dtype=torch.long)


class Table:
    """The rows that share a cache and a forward, with their requests and the wrappers these need.

    Nothing of a request is seen by another table: a cache that evicts or quantizes affects its own rows only.
    """

    def __init__(
        self,
        model: Any,
        cache: RowCache,
        running: RunningRequests,
        prefix_reuse: PrefixReuse,
        *,
        key: CacheKey | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.cache, self.key = cache, key
        self.cache_name = None if key is None else key.name  # the name by which it was requested
        self.rows: Rows | None = None
        self.running, self.prefix_reuse = running, prefix_reuse
        self._chain = WrapperChain(model)
        self._tracer = tracer
        self._model_of_version: tuple[object, Any] | None = None  # with the wrappers in use

    def __len__(self) -> int:
        """The number of rows."""
        return 0 if self.rows is None else len(self.rows)

    @property
    def model(self) -> Any:
        """The model with the wrappers of its requests."""
        return self._chain.model

    @property
    def wrappers(self) -> Mapping[str, Wrapper]:
        """The wrappers of its requests by name, innermost first."""
        return self._chain.wrappers

    @property
    def cache_bytes(self) -> int | None:
        """The memory of its cache in bytes; None: unknown."""
        store: RowCache = unwrap_cache(self.cache, _NO_ROWS)[0]
        return store.nbytes if isinstance(store, SizedCache) else None

    @property
    def required_states(self) -> set[str]:
        """The states that its requests need of each forward."""
        states: set[str] = set()
        for running in self.running.requests.values():
            states.update(running.strategy.required_states)
            for name in running.plan.wrappers:
                states.update(self._chain.wrappers[name].required_states)
        return states

    # -------------------------------------------------------------------- requests come and go
    def admit(
        self,
        numbers: Sequence[int],
        resolved: Sequence[ResolvedRequest],
        prefixes: Sequence[CachedPrefix],
        undo: ExitStack,
    ) -> None:
        """Add requests, each with one row; `undo` restores the table as it was, whatever has been done."""
        undo.callback(self._restore, self.cache, self.rows)
        resolved = [
            one._replace(cached_tokens=prefix.length) if one.cached_tokens is None else one
            for one, prefix in zip(resolved, prefixes, strict=True)
        ]
        self.cache = self._chain.add([one.plan for one in resolved], self.cache, undo)
        undo.callback(self.running.keep_strategies, len(self.running.strategy_order))
        prepared = [self.running.prepare(one) for one in resolved]
        for number in numbers:
            undo.callback(self.release, number)
        self.model.add_requests(numbers, _inputs_by_name([one.inputs for one in resolved]))
        for number, checked in zip(numbers, prepared, strict=True):
            self._register(number, checked)
        self.running.sync_processor_seeds(numbers)
        for number, one in zip(numbers, resolved, strict=True):
            self.prefix_reuse.add(number, one.request, one.plan, one.prompt, self.cache)
        rows = new_rows(self.running, numbers, self.model.device)
        if self._tracer is not None:
            roots = []
            for number, one in zip(numbers, resolved, strict=True):
                undo.callback(self._tracer.record_error, number, "refused")
                roots.append(self._trace_request(self._tracer, number, one))
            rows = rows.replace(columns={**rows.columns, self._tracer.column_name: torch.tensor(roots)})
        cached_length = torch.tensor([one.length for one in prefixes])
        self._append_rows(rows.replace(cached_length=cached_length), prefixes, undo)

    def cancel(self, number: int) -> None:
        """Remove a running request and free its rows."""
        self._remove_rows([number])
        self.release(number, drop=True)

    def release(self, number: int, *, drop: bool = False) -> None:
        """Forget a request and the objects that only it used; its rows have left already.

        `drop`: its strategy has not finished it. All is done even if a part raises, such as a user's drafter.
        """
        with ExitStack() as parts:
            running = self.running.requests.get(number)  # None: admission failed before it was registered
            names = () if running is None else running.plan.wrappers
            parts.callback(self._chain.remove_request, number, names)
            if running is not None:
                parts.callback(self.running.remove, number)
                if drop:
                    parts.callback(running.strategy.drop, number)
            parts.callback(self.prefix_reuse.remove, number)

    def record_finished(self, number: int, sequences: Sequence[Hypothesis]) -> None:
        """Tell a model whose rows depend on each other how a request has ended."""
        record = getattr(self._chain.base, "record_finished", None)
        if record is not None:
            record(number, sequences)

    def park(self, number: int) -> Rows:
        """Take the rows of a request out of the table, which may come back with `resume`."""
        assert self.rows is not None
        rows = self.rows.take((self.rows.request == number).nonzero().squeeze(1))
        self._remove_rows([number])
        return rows.replace(cached_length=torch.zeros_like(rows.length))

    def suspend(self, number: int) -> ReadRows:
        """Take the rows of a request out of the table, with their cached positions."""
        assert self.rows is not None
        index = (self.rows.request == number).nonzero().squeeze(1)
        # Unconditional rows go along.
        store, inner = (
            (self.cache, index) if hasattr(self.cache, "select") else unwrap_cache(self.cache, index)
        )
        suspended = ReadRows.cached(self.rows.take(index), store.select(inner))
        self._remove_rows([number])
        return suspended

    def resume(self, rows: Rows, prefixes: Sequence[CachedPrefix]) -> None:
        """Put rows of a parked request back, with what is cached of each."""
        with ExitStack() as undo:
            undo.callback(self._restore, self.cache, self.rows)
            traced = () if self._tracer is None else (self._tracer.column_name,)
            cached_length = torch.tensor([one.length for one in prefixes])
            rows = restored_rows(self.running, rows, traced).replace(cached_length=cached_length)
            self._append_rows(rows, prefixes, undo)
            undo.pop_all()

    def _remove_rows(self, requests: Collection[int]) -> None:
        """Take the rows of these requests out of the table."""
        assert self.rows is not None
        keep = torch.from_numpy(np.flatnonzero(~np.isin(self.rows.request.numpy(), list(requests))))
        order = stable_row_order(keep, len(self.rows))
        keep = keep if order is None else keep[order]
        rows = self.rows.take(keep)
        self.cache.commit(keep, rows.cached_length)
        self.rows = rows

    def _restore(self, cache: RowCache, rows: Rows | None) -> None:
        self.cache, self.rows = cache, rows

    # -------------------------------------------------------------------- steps
    def step(self, observe: Observe | None) -> list[Selection]:
        """Advance every row by one step; the selection of each strategy.

        A request whose own code raises leaves the table; its error is in `running.errors`.
        """
        selections: list[Selection] = []
        discard = None if self._tracer is None else self._tracer.checkpoint()
        while len(self):
            try:
                selections = self._run_step(observe)
                break
            except StepFault as fault:
                assert self.running.errors is not None
                self.running.errors |= fault.errors
                self._remove_rows(self.running.errors)
                if discard is not None:
                    discard()
        return selections

    def _run_step(self, observe: Observe | None) -> list[Selection]:
        """One attempt of a step; raises `StepFault` if it cannot be made with all rows."""
        assert self.rows is not None
        base = self._chain.base
        # A request that shares a row of the network with others cannot be fed alone: errors are raised.
        is_alone = self.running.errors is not None and not base.traits.ties_requests
        probe = self._probe if is_alone else None
        forward = base.forward if probe is None else partial(forward_or_fault, base, probe)
        for rows in self.prefix_reuse.prefill_chunks(forward, self.cache, self.rows):
            self.rows = rows
        finished_kv = self.prefix_reuse.finished_kv
        capture = None if finished_kv is None else partial(finished_kv.capture, self.cache)
        hooks = StepHooks(observe, capture, self.running.errors, probe)
        self.rows, selections = run_step(
            self._model_in_use(self.rows), self.cache, self.rows, self.running.strategy_groups, hooks
        )
        self.prefix_reuse.publish_prompts(self.cache, self.rows)
        return selections

    def _model_in_use(self, rows: Rows) -> Any:
        """The model with the wrappers that the rows use."""
        if self._model_of_version is None or self._model_of_version[0] != rows.version:
            # Failed requests have no rows any more; they themselves are removed at the end of the step.
            failed = self.running.errors or {}
            running = [one for number, one in self.running.requests.items() if number not in failed]
            names = {name for one in running for name in one.plan.wrappers}
            self._model_of_version = rows.version, self._chain.model_for(names)
        return self._model_of_version[1]

    def _probe(self, rows: Rows, proposal: Proposal, cache: RowCache) -> None:
        """Feed the rows of one request alone, as they are in `cache`, to see whether that raises."""
        names = self.running.requests[int(rows.request[0])].plan.wrappers
        if names:  # a view of some rows cannot be fed through wrappers: its positions are fed again
            cache, rows = self._chain.new_cache(), rows.replace(cached_length=torch.zeros_like(rows.length))
            cache.extend(len(rows))
        checked_forward(self._chain.model_for(names), rows, proposal, cache)

    def common_prefix(self, number: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        running, rows = self.running.requests[number], self.rows
        assert rows is not None
        index = (rows.request == number).nonzero().squeeze(1)
        tokens = index_rows(rows.tokens, index).cpu()
        # Pending tokens may still be removed.
        pending = pending_tokens_of(rows) if "pending_tokens" in rows.columns else None
        sequences = []
        for line, row in enumerate(index.tolist()):
            num_pending = 0 if pending is None else len(pending[row].tokens)
            sequences.append(tokens[line, int(rows.prompt_length[row]) : int(rows.length[row]) - num_pending])
        sequences += [one.tokens for one in running.strategy.finished_so_far(number)]
        size = min(len(one) for one in sequences)
        equal = (torch.stack([one[:size] for one in sequences]) == sequences[0][:size]).all(0)
        return sequences[0][: int(equal.long().cumprod(0).sum())]

    # -------------------------------------------------------------------- admission
    def _register(self, number: int, prepared: PreparedRequest) -> None:
        """Add a request to the running ones, and to its drafter."""
        running = self.running.add(number, prepared, self.model.traits.is_encoder_decoder)
        if running.drafter is not None:
            inputs = {name: [value] for name, value in prepared.resolved.request.inputs.items()}
            running.drafter.add_requests([number], inputs)

    def _append_rows(self, new: Rows, prefixes: Sequence[CachedPrefix], undo: ExitStack) -> None:
        """Append new rows to the table, whose rows get the columns that only the new ones bring."""
        old = self.rows if len(self) else None
        rows = new if old is None else join_rows(self.running, old, new)
        cached_rows = [one.cached_row for one in prefixes]
        undo.callback(self._truncate_cache, _NO_ROWS if old is None else old.cached_length)
        if any(cached_rows):
            append_rows(self.cache, cached_rows)
            self.cache.commit(None, rows.cached_length)
        else:
            self.cache.extend(len(new))
        self.rows = rows

    def _truncate_cache(self, lengths: Tensor) -> None:
        """Drop the rows of the cache beyond the first, which have these lengths [R] (host)."""
        self.cache.commit(torch.arange(len(lengths)), lengths)

    def _trace_request(self, tracer: Tracer, number: int, resolved: ResolvedRequest) -> int:
        """Record a request; the id of the node of its prompt."""
        wrappers = [type(self._chain.wrappers[name]).__name__ for name in resolved.plan.wrappers]
        names = (*wrappers, *map(processor_name, self.running.processors(number)))
        drafter = self.running.requests[number].drafter
        record = request_record(number, resolved.prompt.tolist(), resolved.plan, names, drafter)
        return tracer.add_request(record, " and ".join(wrappers) or type(self.model).__name__)


def _inputs_by_name(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The requests' inputs by name, None where a request has none of that name."""
    names = dict.fromkeys(name for one in inputs for name in one)
    return {name: [one.get(name) for one in inputs] for name in names}
