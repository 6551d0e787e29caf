"""The engine of this package: a table of running requests and the loop over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from math import isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from descant.core.context import RowParams, columns_from_rows, row_params
from descant.core.interfaces import ModelTraits, RankGroup, RowCache, SizedCache, Wrapper
from descant.core.records import Observation, Selection
from descant.core.rows import Rows, index_rows, stable_row_order
from descant.engine.admission import Admission, ResolvedRequest
from descant.engine.cache_factory import cache_name
from descant.engine.events import Event, Failed, Finished, Report, Tokens
from descant.engine.explain import no_candidates_error, request_record
from descant.engine.memory_check import check_kv_fits
from descant.engine.planner import WRAPPERS, DecodingPlan, as_model, choose_cache, validate_cache
from descant.engine.prefix_reuse import CachedPrefix, PrefixReuse, empty_cache_like
from descant.engine.protocol import Engine
from descant.engine.request import Request
from descant.engine.running_requests import RunningRequests
from descant.engine.step import run_step
from descant.errors import DescantError, InputError
from descant.kv_cache.cached_row import append_rows, unwrap_cache
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.no_cache import NoCache, RecomputeModel
from descant.trace.logit_summary import processor_name
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["Event", "Failed", "Finished", "Report", "Request", "Session", "Tokens"]

_NO_ROWS = torch.zeros(0, dtype=torch.long)
_MAX_NEW_TOKENS_ALLOCATED = 256  # columns of the token table beyond the prompts; it grows later


class Session:
    """A table of running requests and the loop over it: `admit`, `step`, `cancel`.

    Requests of any length, config and strategy share the forward of a step; each has the same result as
    alone. A row and its memory are freed in the step that ends it. `cache` is the empty cache to use, if it
    is not to be chosen by the first requests; a `prefix_cache` keeps the keys and values of common prefixes.
    With `trace=Tracer(...)` every step is recorded in `trace`. It implements the `Engine` interface.
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
        self._base_model = self.model
        self._wrapper_factories: dict[str, Callable[[Any], Any]] = {
            name: spec.make for name, spec in WRAPPERS.items()
        }
        self._wrappers: dict[str, Wrapper] = {}
        self._requested_states = tuple(states)
        self._output_states = set(states)
        self._cache: RowCache = self.model.new_cache() if cache is None else cache
        self._has_final_cache = cache is not None  # whether the cache is chosen for good
        self._cache_name: str | None = None  # the name by which it was requested
        self._prefix_reuse = PrefixReuse(self.model, prefix_cache)
        self._rank_group: RankGroup | None = self.model.rank_group
        self._admission = Admission(model, self._base_model)
        self._running = RunningRequests(self.model.device, self._rank_group, self._tracer)
        self._requests = self._running.requests
        self._rows: Rows | None = None
        self._request_ids = count()
        self._observe = observe
        if self._tracer is not None:
            network = self.model.network
            shown = network if network is not None else model
            self._tracer.start_run(type(shown).__name__, self.model.traits.vocab_size)

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
    def trace(self) -> Trace | None:
        """The recorded steps; None: it was made without `trace`."""
        return None if self._tracer is None else self._tracer.trace

    def __len__(self) -> int:
        """The number of running requests."""
        return len(self._requests)

    @property
    def rows(self) -> int:
        """The number of running rows."""
        return 0 if self._rows is None else len(self._rows)

    def supports(self, request: Request) -> DescantError | None:
        """The error that `admit` would raise because of the request itself; None: it can be admitted."""
        try:
            for one in self._admission.resolve([request], self.model.traits):
                self._prefix_reuse.lookup(one.request, one.plan, one.prompt, self._cache)
                if self._has_final_cache:
                    validate_cache(one.plan, self._cache, self._cache_name, one.max_slots)
        except DescantError as error:
            return error
        return None

    def admit(self, *requests: Request, noise_rows: int = 0) -> list[int]:
        """Add requests to the table, all or none; return their ids.

        `noise_rows` is for calls that share torch's generator: the number of rows that noise is drawn for.
        """
        if not requests:
            return []
        resolved = self._admission.resolve(requests, self.model.traits)
        self._choose_cache(resolved)
        prefixes = [
            self._prefix_reuse.lookup(one.request, one.plan, one.prompt, self._cache) for one in resolved
        ]
        self._check_ranks(resolved)
        numbers = [next(self._request_ids) for _ in requests]
        self._add_wrappers([one.plan for one in resolved])
        self.model.add_requests(numbers, _inputs_by_name([one.inputs for one in resolved]))
        try:
            for number, one in zip(numbers, resolved, strict=True):
                self._register(number, one)
        except Exception:  # a recipe may raise anything
            for number in numbers:
                self._release_request(number)
            raise
        self._running.sync_processor_seeds(numbers)
        self._running.noise.num_rows = noise_rows or self._running.noise.num_rows
        self._update_output_states()
        for number, one in zip(numbers, resolved, strict=True):
            self._prefix_reuse.add(number, one.request, one.plan, one.prompt, self._cache)
        rows = self._new_rows(numbers, resolved)
        if self._tracer is not None:
            roots = [self._trace_request(number, one) for number, one in zip(numbers, resolved, strict=True)]
            rows = rows.replace(columns={**rows.columns, self._tracer.column_name: torch.tensor(roots)})
        cached_length = torch.tensor([one.length for one in prefixes])
        self._append_rows(rows.replace(cached_length=cached_length), prefixes)
        return numbers

    def step(self) -> list[Event]:
        """Advance every row by one step; return what happened."""
        if self._rows is None or not len(self._rows):
            return []
        if self._rank_group is not None:
            self._rank_group.raise_if_failed()
        if self._tracer is not None:
            self._tracer.start_step()
        rows = self._prefix_reuse.run_prefill_chunks(self._base_model, self._cache, self._rows)
        finished_kv = self._prefix_reuse.finished_kv
        capture = None if finished_kv is None else partial(finished_kv.capture, self._cache)
        self._rows, selections = run_step(
            self.model, self._cache, rows, self._running.strategy_groups, self._observe, capture
        )
        self._prefix_reuse.publish_prompts(self._cache, self._rows)
        self.steps += 1
        if self._tracer is not None:
            self._tracer.end_step(self.report().cache_bytes)
        events: list[Event] = [one.emitted for one in selections if one.emitted is not None]
        for selection in selections:
            events += self._end_requests(selection)
        for event in events if self._tracer is not None else ():
            self._trace_event(event)
        return events

    def cancel(self, request: int) -> None:
        """Remove a request and free its rows at once."""
        if request not in self._requests:
            raise InputError("request", "must be a running request", request)
        assert self._rows is not None
        keep = (self._rows.request != request).nonzero().squeeze(1)
        order = stable_row_order(keep, len(self._rows))
        keep = keep if order is None else keep[order]
        self._rows = self._rows.take(keep)
        self._cache.commit(keep, self._rows.cached_length)
        self._requests[request].strategy.drop(request)
        self._release_request(request)
        if self._tracer is not None:
            self._tracer.record_error(request, "cancelled")

    def drain(self) -> Iterator[Event]:
        """Step until no request is running."""
        while len(self):
            yield from self.step()

    def report(self) -> Report:
        """What it has done so far, and what it holds."""
        store: RowCache = unwrap_cache(self._cache, _NO_ROWS)[0]
        cache_bytes = store.nbytes if isinstance(store, SizedCache) else None
        return Report(self.steps, len(self), self.rows, cache_bytes, self._prefix_reuse.report())

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        running, rows = self._requests[request], self._rows
        assert rows is not None
        index = (rows.request == request).nonzero().squeeze(1)
        tokens = index_rows(rows.tokens, index).cpu()
        sequences = [
            tokens[line, int(rows.prompt_length[row]) : int(rows.length[row])]
            for line, row in enumerate(index.tolist())
        ]
        sequences += [one.tokens for one in running.strategy.finished_so_far(request)]
        size = min(len(one) for one in sequences)
        equal = (torch.stack([one[:size] for one in sequences]) == sequences[0][:size]).all(0)
        return sequences[0][: int(equal.long().cumprod(0).sum())]

    # -------------------------------------------------------------------- admission
    def _choose_cache(self, resolved: Sequence[ResolvedRequest]) -> None:
        """Choose the cache by the first requests or their past; raise for those that it cannot serve."""
        was_final, num_slots = self._has_final_cache, max(one.max_slots for one in resolved)
        if not was_final:
            shared = [len(one.prompt) for one in resolved if one.plan.forks]
            configs = [one.plan.config for one in resolved]
            chosen = choose_cache(self._base_model, configs, num_slots, max(shared, default=0))
            self._cache_name = cache_name(configs[0])
            pasts = [empty_cache_like(one.request) for one in resolved if self._cache_name is None]
            self._cache = next((past for past in pasts if past is not None), chosen)
            self._has_final_cache = True
        new = [(one.plan, len(one.prompt), one.prompt_params.max_length, one.offset) for one in resolved]
        try:
            for one in resolved:
                validate_cache(one.plan, self._cache, self._cache_name, num_slots)
            check_kv_fits(self._base_model, self._cache, self._cache_name, new, self._rows)
        except DescantError:
            self._has_final_cache = was_final  # the next request may select another cache
            raise

    def _check_ranks(self, resolved: Sequence[ResolvedRequest]) -> None:
        """Raise unless all ranks admit the same requests; decide whether stops must be synchronised."""
        if self._rank_group is None:
            return
        self._rank_group.check_equal("prompt", resolved[0].prompt, _admission_digest(resolved))
        timed = any(isfinite(one.prompt_params.deadline) for one in resolved)
        local_stops = timed or any(one.request.stopping_criteria for one in resolved)
        self._running.stop_checker.syncs_across_ranks |= self._rank_group.any_rank(local_stops)

    def _add_wrappers(self, plans: Sequence[DecodingPlan]) -> None:
        """Wrap the model as these plans need it, each wrapper once and in order, recipes' outermost."""
        names = {name for one in plans for name in one.wrappers}
        if names <= self._wrappers.keys():
            return
        for one in plans:
            if one.recipe is not None and one.recipe.kind == "wrapper":
                self._wrapper_factories.setdefault(one.recipe.row_flag, one.recipe.build)
        inner = self._base_model
        for name, build in self._wrapper_factories.items():
            if name in names and name not in self._wrappers:
                self._wrappers[name] = build(inner)
                self._wrappers[name].row_flag = name
                self._cache = self._wrappers[name].wrap_cache(self._cache)
            if name in self._wrappers:
                self._wrappers[name].inner = inner
                inner = self._wrappers[name]
        self.model = inner

    def _update_output_states(self) -> None:
        """Have the model return the states that any running request needs."""
        needed = set(self._requested_states)
        for running in self._requests.values():
            needed.update(running.strategy.required_states)
            for name in running.plan.wrappers:
                needed.update(self._wrappers[name].required_states)
        if needed != self._output_states:
            self._output_states = needed
            self.model.set_output_states(sorted(needed))

    def _register(self, number: int, resolved: ResolvedRequest) -> None:
        """Add a request to the running ones, and to its drafter."""
        running = self._running.add(number, resolved, self.model.traits.is_encoder_decoder)
        if running.drafter is not None:
            inputs = {name: [value] for name, value in resolved.request.inputs.items()}
            running.drafter.add_requests([number], inputs)

    def _new_rows(self, numbers: Sequence[int], resolved: Sequence[ResolvedRequest]) -> Rows:
        """One row per request, nothing of it cached."""
        prompts = [one.prompt for one in resolved]
        length = torch.tensor([len(prompt) for prompt in prompts])
        params = RowParams(columns_from_rows([self._requests[number].row_values() for number in numbers]))
        max_new = int((params["max_length"] - length).max())
        width = int(length.max()) + min(max_new, _MAX_NEW_TOKENS_ALLOCATED)
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for line, prompt in enumerate(prompts):
            tokens[line, : len(prompt)] = prompt
        zeros = torch.zeros_like(length)
        return Rows(
            tokens.to(self.model.device),
            length=length,
            cached_length=zeros,
            offset=torch.tensor([one.offset for one in resolved]),
            prompt_length=length.clone(),
            request=torch.tensor(numbers),
            slot=zeros.clone(),
            columns={"params": params, **self._running.new_columns(len(prompts), params, prompts)},
        )

    def _append_rows(self, new: Rows, prefixes: Sequence[CachedPrefix]) -> None:
        """Append new rows to the table, whose rows get the columns that only the new ones bring."""
        cached_rows = [one.cached_row for one in prefixes]
        if any(cached_rows):
            append_rows(self._cache, cached_rows)
            lengths = [] if self._rows is None else [self._rows.cached_length]
            self._cache.commit(None, torch.cat((*lengths, new.cached_length)))
        else:
            self._cache.extend(len(new))
        if self._rows is None or not len(self._rows):
            self._rows = new
            return
        old = self._rows
        columns = dict(old.columns)
        if not new.columns.keys() <= columns.keys():
            columns = {**self._running.new_columns(len(old), row_params(old)), **columns}
        # Columns that no running request needs any more are dropped.
        self._rows = old.replace(columns={name: columns[name] for name in new.columns}).cat(new)

    # -------------------------------------------------------------------- ends
    def _end_requests(self, selection: Selection) -> list[Event]:
        """Release the requests that failed or finished in a step; their events."""
        events: list[Event] = []
        for request in selection.failed:
            running, nonfinite = self._requests[request], request in selection.nonfinite
            error = no_candidates_error(
                request, running.plan, running.has_own_processors, nonfinite=nonfinite
            )
            events.append(Failed(request, error))
            running.strategy.drop(request)
            self._release_request(request)
        for request in selection.finished:
            events.append(self._finish_request(request))
            self._release_request(request)
        return events

    def _finish_request(self, request: int) -> Finished | Failed:
        """A request's sequences, as many as it asked for."""
        running = self._requests[request]
        sequences = running.strategy.finish(request)
        wanted = running.plan.config.num_return_sequences
        if len(sequences) < wanted:
            # Beam search may find fewer when all other continuations were ruled out.
            got = f"{len(sequences)} sequences of {wanted}"
            error = no_candidates_error(request, running.plan, running.has_own_processors, got)
            return Failed(request, error)
        cached = self._prefix_reuse.collect_finished(request, sequences[:wanted])
        return Finished(request, sequences[:wanted], cached)

    def _release_request(self, request: int) -> None:
        """Drop a request and the objects that only it used."""
        self.model.remove_requests([request])
        self._prefix_reuse.remove(request)
        if request in self._requests:  # else admission failed before this one was added
            self._running.remove(request)

    # -------------------------------------------------------------------- trace
    def _trace_request(self, number: int, resolved: ResolvedRequest) -> int:
        """Record a request; the id of the node of its prompt."""
        assert self._tracer is not None
        wrappers = [type(self._wrappers[name]).__name__ for name in resolved.plan.wrappers]
        names = (*wrappers, *map(processor_name, self._running.processors(number)))
        drafter = self._requests[number].drafter
        record = request_record(number, resolved.prompt.tolist(), resolved.plan, names, drafter)
        return self._tracer.add_request(record, " and ".join(wrappers) or type(self.model).__name__)

    def _trace_event(self, event: Event) -> None:
        """Record how a request has ended."""
        assert self._tracer is not None
        if isinstance(event, Finished):
            self._tracer.record_result(event.request, event.hypotheses)
        elif isinstance(event, Failed):
            self._tracer.record_error(event.request, str(event.error))


def _admission_digest(resolved: Sequence[ResolvedRequest]) -> int:
    """A digest of the prompts, the number of their rows, and how long these may get."""
    params = [(one.prompt_params.max_length, one.plan.params) for one in resolved]
    keys = [one.plan.strategy.rank_key for one in resolved]
    lengths = [(length, plan.num_sequences, plan.eos_token_ids) for length, plan in params]
    digest = crc32(repr([keys, *lengths]).encode())
    for one in resolved:
        digest = crc32(one.prompt.cpu().numpy().tobytes(), digest)
    return digest


def _inputs_by_name(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The requests' inputs by name, None where a request has none of that name."""
    names = dict.fromkeys(name for one in inputs for name in one)
    return {name: [one.get(name) for one in inputs] for name in names}


_ENGINE: type[Engine] = Session  # for the type checker
