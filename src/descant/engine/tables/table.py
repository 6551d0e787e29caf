"""A table: the rows that share a cache and a forward, and the requests that own them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.core.context import RowParams, columns_from_rows, row_params
from descant.core.interfaces import Model, PackingModel, PromptChunk, RowCache, Wrapper
from descant.core.records import ForwardOutput, Hypothesis, Proposal, RequestFault, Selection
from descant.core.rows import Rows, index_rows, stable_row_order
from descant.decoding.strategies.backtracking import pending_tokens_of
from descant.engine.explain import request_record
from descant.engine.planning.cache_factory import CacheKey
from descant.engine.planning.planner import WRAPPERS
from descant.engine.request import ResolvedRequest
from descant.engine.step.next_forward import NextForward
from descant.engine.step.step import Observe, StepHooks, check_logits, forward_or_fault, run_step
from descant.engine.tables.prefix_reuse import CachedPrefix, PrefixReuse
from descant.engine.tables.prompt_reader import ReadRows
from descant.engine.tables.running_requests import RunningRequests
from descant.kv_cache.row_views import append_rows, row_subset, unwrap_cache
from descant.trace.logit_summary import processor_name
from descant.trace.tracer import Tracer

_MAX_NEW_TOKENS_ALLOCATED: Final = 256  # columns of the token table beyond the prompts; it grows later


def new_rows(running: RunningRequests, request_ids: Sequence[int], device: torch.device) -> Rows:
    """One row for each of these running requests: its prompt, nothing of it cached."""
    prompts, lengths, offsets, values = [], [], [], []
    for request_id in request_ids:
        one = running.requests[request_id]
        prompts.append(one.resolved.prompt)
        lengths.append(one.resolved.prompt.shape[0])
        offsets.append(one.resolved.offset)
        values.append(one.row_values())
    length, params = torch.tensor(lengths), RowParams(columns_from_rows(values))
    max_new = int((params["max_length"] - length).max())
    width = int(length.max()) + min(max_new, _MAX_NEW_TOKENS_ALLOCATED)
    if len(set(map(attrgetter("device"), prompts))) > 1:
        prompts = [prompt.to(device) for prompt in prompts]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device, non_blocking=True)
    tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    tokens[:, : padded.shape[1]] = padded
    zeros = torch.zeros_like(length)
    return Rows(
        tokens,
        length=length,
        cached_length=zeros,
        offset=torch.tensor(offsets),
        prompt_length=length.clone(),
        request=torch.tensor(request_ids),
        slot=zeros.clone(),
        columns={"params": params, **running.new_columns(len(prompts), params, prompts)},
    )


def restored_rows(running: RunningRequests, rows: Rows, others: Sequence[str] = ()) -> Rows:
    """Rows that have left a table, with the columns that it needs now; `others` are kept too."""
    needed = running.new_columns(len(rows), row_params(rows))
    names = needed.keys() | {"params", *others}
    columns = {name: value for name, value in rows.columns.items() if name in names}
    return rows.replace(columns={**needed, **columns})


def join_rows(running: RunningRequests, rows: Rows, new: Rows) -> Rows:
    """The rows of a table and new ones; the former get the columns that only the new ones bring."""
    columns = dict(rows.columns)
    if not new.columns.keys() <= columns.keys():
        columns = {**running.new_columns(len(rows), row_params(rows)), **columns}
    # Columns that no running request needs any more are dropped.
    return rows.replace(columns={name: columns[name] for name in new.columns}).cat(new)


WrapperFactory = Callable[[Any], Any]

_WRAPPER_FACTORIES: Final[Mapping[str, WrapperFactory]] = {name: spec.make for name, spec in WRAPPERS.items()}


class WrapperChain:
    """A base model and the wrappers around it, each once and in order, recipes' outermost."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.model: Any = base  # the outermost wrapper, or the base
        self.wrappers: Mapping[str, Wrapper] = {}  # by name, innermost first
        self._factories = _WRAPPER_FACTORIES
        self._cache_wrappers: set[str] = set()  # names of the wrappers that wrap the cache

    def model_for(self, names: Collection[str]) -> Any:
        """The model of rows that use only these wrappers: others are not run, where the cache allows it."""
        if not names:
            return _UnwrappedModel(self.base) if self._cache_wrappers & self.wrappers.keys() else self.base
        model = self.model
        for name, wrapper in reversed(list(self.wrappers.items())):
            if name in names or name in self._cache_wrappers:
                break
            model = wrapper.inner
        return model

    def remove_request(self, request_id: int, names: Collection[str]) -> None:
        """Remove a request from all models; a wrapper that raises fails only requests that use it."""
        try:
            self.model.remove_requests([request_id])
        except Exception:
            used = [wrapper for name, wrapper in self.wrappers.items() if name in names]
            own = used[-1] if used else self.base
            if own is self.model:
                raise
            own.remove_requests([request_id])

    def new_cache(self) -> RowCache:
        """An empty cache as the wrappers need it."""
        cache: RowCache = self.base.new_cache()
        for wrapper in self.wrappers.values():
            cache = wrapper.wrap_cache(cache)
        return cache

    def add(self, resolved: Sequence[ResolvedRequest], cache: RowCache, undo: ExitStack) -> RowCache:
        """Add the wrappers that requests need; the cache as they need it. `undo` removes them again."""
        names: set[str] = set()
        for one in resolved:
            names.update(one.plan.wrappers)
        if names <= self.wrappers.keys():
            return cache
        factories = dict(self._factories)
        for one in resolved:
            recipe = one.plan.recipe
            if recipe is not None and recipe.kind == "wrapper":
                factories.setdefault(recipe.row_flag, recipe.build)
        # A constructor may raise anything, so the chain changes only once all wrappers are built.
        wrappers: dict[str, Wrapper] = {}
        inner = self.base
        for name, build in factories.items():
            if name in self.wrappers:
                wrappers[name] = inner = self.wrappers[name]
            elif name in names:
                wrapper = build(inner)
                wrapper.row_flag = name
                wrapped = wrapper.wrap_cache(cache)
                if wrapped is not cache:
                    self._cache_wrappers.add(name)
                cache = wrapped
                wrappers[name] = inner = wrapper
        undo.callback(self._link, self.wrappers, self._factories)
        self._link(wrappers, factories)
        return cache

    def _link(self, wrappers: Mapping[str, Wrapper], factories: Mapping[str, WrapperFactory]) -> None:
        """Put these wrappers around the base model, each around the one before it."""
        inner = self.base
        for wrapper in wrappers.values():
            wrapper.inner = inner
            inner = wrapper
        self.wrappers, self._factories, self.model = wrappers, factories, inner


class _UnwrappedModel:
    """A base model on the cache of wrappers that none of the rows uses."""

    def __init__(self, base: Model) -> None:
        self._base = base

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Feed the rows to the base model."""
        return self._base.forward(rows, proposal, row_subset(cache, torch.arange(len(rows))))


_NO_ROWS = torch.zeros(0, dtype=torch.long)


class Table:
    """The rows that share a cache and a forward, with their requests and the wrappers these need.

    Nothing of a request is seen by another table: a cache that evicts or quantizes affects its own rows only.
    """

    def __init__(  # noqa: PLR0913 - the parts that a session gives all of its tables
        self,
        model: Any,
        cache: RowCache,
        running: RunningRequests,
        make_reuse: Callable[[], PrefixReuse],
        *,
        key: CacheKey | None = None,
        tracer: Tracer | None = None,
        next_forward: NextForward | None = None,
    ) -> None:
        self.cache, self.key = cache, key
        self.cache_name = None if key is None else key.name  # the name by which it was requested
        self.rows: Rows | None = None
        self.running = running
        self._make_reuse = make_reuse
        self._reuse: PrefixReuse | None = None  # made for the first request that uses it
        self._chain = WrapperChain(model)
        self._tracer = tracer
        self._model_in_use: Any = model  # with the wrappers that the rows of a version use
        self._model_version: object = None
        self._next_forward = next_forward  # None: forwards are not launched early

    def __len__(self) -> int:
        """The number of rows."""
        return 0 if self.rows is None else self.rows.length.shape[0]

    @property
    def model(self) -> Any:
        """The model with the wrappers of its requests."""
        return self._chain.model

    @property
    def prefix_reuse(self) -> PrefixReuse:
        """What its requests reuse of each other's keys and values, and of those of others."""
        if self._reuse is None:
            self._reuse = self._make_reuse()
        return self._reuse

    @property
    def wrappers(self) -> Mapping[str, Wrapper]:
        """The wrappers of its requests by name, innermost first."""
        return self._chain.wrappers

    @property
    def cache_bytes(self) -> int | None:
        """The memory of its cache in bytes; None: unknown."""
        store: RowCache = unwrap_cache(self.cache, _NO_ROWS)[0]
        return getattr(store, "nbytes", None)

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
        request_ids: Sequence[int],
        resolved: Sequence[ResolvedRequest],
        prefixes: Sequence[CachedPrefix],
        undo: ExitStack,
    ) -> None:
        """Add requests, each with one row; `undo` restores the table as it was, whatever has been done."""
        if self._next_forward is not None:
            self._drop_next_forward()
        undo.callback(self._restore, self.cache, self.rows)
        self.cache = self._chain.add(resolved, self.cache, undo)
        undo.callback(self.running.keep_strategies, len(self.running.strategy_order))
        prepared, inputs, lengths = [], [], []
        for one, prefix in zip(resolved, prefixes, strict=True):
            prepared.append(self.running.prepare(one, prefix.length))
            inputs.append(one.inputs)
            lengths.append(prefix.length)
        for request_id in request_ids:
            undo.callback(self.release, request_id)
        names = dict.fromkeys(chain.from_iterable(inputs))
        model = self._chain.model
        model.add_requests(request_ids, {name: [given.get(name) for given in inputs] for name in names})
        for request_id, checked in zip(request_ids, prepared, strict=True):
            running = self.running.add(request_id, checked, model.traits.is_encoder_decoder)
            if running.strategy.drafter is not None:
                own = {name: [value] for name, value in running.resolved.request.inputs.items()}
                running.strategy.drafter.add_requests([request_id], own)
        if self.running.rank_group is not None:
            self.running.sync_processor_seeds(request_ids)
        for request_id, one in zip(request_ids, resolved, strict=True):
            if one.uses_prefix_reuse:
                self.prefix_reuse.add(request_id, one.request, one.plan, one.prompt, self.cache)
        rows = new_rows(self.running, request_ids, model.device)
        if self._tracer is not None:
            roots = []
            for request_id, one in zip(request_ids, resolved, strict=True):
                undo.callback(self._tracer.record_error, request_id, "refused")
                roots.append(self._trace_request(self._tracer, request_id, one))
            rows = rows.replace(columns={**rows.columns, self._tracer.column_name: torch.tensor(roots)})
        self._append_rows(rows.replace(cached_length=torch.tensor(lengths)), prefixes, undo)

    def cancel(self, request_id: int) -> None:
        """Remove a running request and free its rows."""
        self._remove_rows([request_id])
        self.release(request_id, drop=True)

    def release(self, request_id: int, *, drop: bool = False) -> None:
        """Forget a request and the objects that only it used; its rows have left already.

        `drop`: its strategy has not finished it. All is done even if a part raises, such as a user's drafter.
        """
        with ExitStack() as parts:
            running = self.running.requests.get(request_id)  # None: admission failed before it was registered
            names = () if running is None else running.plan.wrappers
            parts.callback(self._chain.remove_request, request_id, names)
            if running is not None:
                parts.callback(self.running.remove, request_id)
                if drop:
                    parts.callback(running.strategy.drop, request_id)
            if self._reuse is not None:
                parts.callback(self._reuse.remove, request_id)

    def record_finished(self, request_id: int, sequences: Sequence[Hypothesis]) -> None:
        """Tell a model whose rows depend on each other how a request has ended."""
        record = getattr(self._chain.base, "record_finished", None)
        if record is not None:
            record(request_id, sequences)

    def park(self, request_id: int) -> Rows:
        """Take the rows of a request out of the table, which may come back with `resume`."""
        assert self.rows is not None
        rows = self.rows.take((self.rows.request == request_id).nonzero().squeeze(1))
        self._remove_rows([request_id])
        return rows.replace(cached_length=torch.zeros_like(rows.length))

    def suspend(self, request_id: int) -> ReadRows:
        """Take the rows of a request out of the table, with their cached positions."""
        assert self.rows is not None
        self._drop_next_forward()
        index = (self.rows.request == request_id).nonzero().squeeze(1)
        # Unconditional rows go along.
        store, inner = (
            (self.cache, index) if hasattr(self.cache, "select") else unwrap_cache(self.cache, index)
        )
        suspended = ReadRows.cached(self.rows.take(index), store.select(inner))
        self._remove_rows([request_id])
        return suspended

    def resume(self, rows: Rows, prefixes: Sequence[CachedPrefix]) -> None:
        """Put rows of a parked request back, with what is cached of each."""
        self._drop_next_forward()
        with ExitStack() as undo:
            undo.callback(self._restore, self.cache, self.rows)
            traced = () if self._tracer is None else (self._tracer.column_name,)
            cached_length = torch.tensor([prefix.length for prefix in prefixes])
            rows = restored_rows(self.running, rows, traced).replace(cached_length=cached_length)
            self._append_rows(rows, prefixes, undo)
            undo.pop_all()

    def _remove_rows(self, requests: Collection[int]) -> None:
        """Take the rows of these requests out of the table."""
        assert self.rows is not None
        self._drop_next_forward()
        keep = torch.from_numpy(np.flatnonzero(~np.isin(self.rows.request.numpy(), list(requests))))
        order = stable_row_order(keep, len(self.rows))
        keep = keep if order is None else keep[order]
        rows = self.rows.take(keep)
        self.cache.commit(keep, rows.cached_length)
        self.rows = rows

    def _drop_next_forward(self) -> None:
        """Bring the cache to what the rows say of it, before other code than a step changes both."""
        if self._next_forward is not None and self._next_forward.rows is not None:
            self._next_forward.drop(self.cache, self._next_forward.rows)

    def _restore(self, cache: RowCache, rows: Rows | None) -> None:
        self.cache, self.rows = cache, rows

    # -------------------------------------------------------------------- steps
    def step(self, observe: Observe | None, chunks: Sequence[PromptChunk] = ()) -> list[Selection]:
        """Advance every row by one step; the selection of each strategy.

        A request whose own code raises leaves the table; its error is in `running.errors`. The forward feeds
        the chunks of prompts that no other has fed, if the model can.
        """
        running, base = self.running, self._chain.base
        reuse = None if self._reuse is None or not self._reuse.is_used else self._reuse
        # A request that shares a row of the network with others cannot be fed alone: errors are raised.
        is_alone = running.errors is not None and not base.traits.ties_requests
        probe = self._probe if is_alone else None
        discard = None if self._tracer is None else self._tracer.checkpoint()
        while self.rows is not None and self.rows.length.shape[0]:
            noted = dict(running.errors or ())
            try:
                if reuse is not None:
                    forward = base.forward if probe is None else partial(forward_or_fault, base, probe)
                    for rows in reuse.prefill_chunks(forward, self.cache, self.rows):
                        self.rows = rows
                finished_kv = None if reuse is None else reuse.finished_kv
                capture = None if finished_kv is None else partial(finished_kv.capture, self.cache)
                if self._model_version != self.rows.version:
                    self._choose_model()
                # Not of a wrapper: it has the attributes of its model, but its forward takes no chunks.
                packs = len(chunks) > 0 and self._model_in_use is base and isinstance(base, PackingModel)
                unfed = [chunk for chunk in chunks if not chunk.is_fed] if packs else ()
                following = self._next_forward
                if following is not None and (unfed or self.cache.max_rewind is not None):
                    self._drop_next_forward()  # a cache that cannot be cut could not drop it later
                    following = None
                self.rows, selections = run_step(
                    self._model_in_use,
                    self.cache,
                    self.rows,
                    running.strategy_groups,
                    StepHooks(observe, capture, probe, unfed, following),
                )
            except RequestFault as fault:
                if running.errors is None:
                    raise next(iter(fault.errors.values())) from None
                running.errors |= fault.errors
                self._remove_rows(running.errors)
                if discard is not None:
                    discard()
                continue
            except BaseException:
                # This step has not happened: its requests are still in the table and run again.
                if running.errors is not None:
                    running.errors.clear()
                    running.errors.update(noted)
                raise
            if reuse is not None:
                reuse.publish_prompts(self.cache, self.rows)
            return selections
        return []

    def _choose_model(self) -> None:
        """Use the model with the wrappers that the rows use."""
        assert self.rows is not None
        # Failed requests have no rows any more; they themselves are removed at the end of the step.
        failed = self.running.errors or {}
        names: set[str] = set()
        for request_id, running in self.running.requests.items():
            if request_id not in failed:
                names.update(running.plan.wrappers)
        self._model_in_use = self._chain.model_for(names)
        self._model_version = self.rows.version

    def _probe(self, rows: Rows, proposal: Proposal, cache: RowCache) -> None:
        """Feed the rows of one request alone, as they are in `cache`, to see whether that raises."""
        names = self.running.requests[int(rows.request[0])].plan.wrappers
        if names:  # a view of some rows cannot be fed through wrappers: its positions are fed again
            cache, rows = self._chain.new_cache(), rows.replace(cached_length=torch.zeros_like(rows.length))
            cache.extend(len(rows))
        check_logits(self._chain.model_for(names).forward(rows, proposal, cache), rows, proposal)

    def common_prefix(self, request_id: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        running, rows = self.running.requests[request_id], self.rows
        assert rows is not None
        index = (rows.request == request_id).nonzero().squeeze(1)
        tokens = index_rows(rows.tokens, index).cpu()
        # Pending tokens may still be removed.
        pending = pending_tokens_of(rows) if "pending_tokens" in rows.columns else None
        sequences = []
        for line, row in enumerate(index.tolist()):
            num_pending = 0 if pending is None else len(pending[row].tokens)
            sequences.append(tokens[line, int(rows.prompt_length[row]) : int(rows.length[row]) - num_pending])
        sequences += [hypothesis.tokens for hypothesis in running.strategy.finished_so_far(request_id)]
        size = min(len(sequence) for sequence in sequences)
        equal = (torch.stack([sequence[:size] for sequence in sequences]) == sequences[0][:size]).all(0)
        return sequences[0][: int(equal.long().cumprod(0).sum())]

    # -------------------------------------------------------------------- admission
    def _append_rows(self, new: Rows, prefixes: Sequence[CachedPrefix], undo: ExitStack) -> None:
        """Append new rows to the table, whose rows get the columns that only the new ones bring."""
        old = self.rows if len(self) else None
        rows = new if old is None else join_rows(self.running, old, new)
        cached_rows = list(map(attrgetter("cached_row"), prefixes))
        lengths = _NO_ROWS if old is None else old.cached_length
        undo.callback(lambda: self.cache.commit(torch.arange(len(lengths)), lengths))  # the first rows alone
        if any(cached_rows):
            append_rows(self.cache, cached_rows)
            self.cache.commit(None, rows.cached_length)
        else:
            self.cache.extend(len(new))
        self.rows = rows

    def _trace_request(self, tracer: Tracer, request_id: int, resolved: ResolvedRequest) -> int:
        """Record a request; the id of the node of its prompt."""
        wrappers = [type(self._chain.wrappers[name]).__name__ for name in resolved.plan.wrappers]
        names = (*wrappers, *map(processor_name, self.running.processors(request_id)))
        drafter = self.running.requests[request_id].strategy.drafter
        record = request_record(request_id, resolved.prompt.tolist(), resolved.plan, names, drafter)
        return tracer.add_request(record, " and ".join(wrappers) or type(self.model).__name__)
