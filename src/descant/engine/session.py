"""The loop as an object: requests are admitted, stepped and cancelled; offline and server alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from descant.core.context import ParamValues, RowParams, columns_from_rows, row_params
from descant.core.interfaces import RankGroup, RowCache, Wrapper
from descant.core.records import Hypothesis, Observation, Tokens
from descant.core.rows import Rows, index_rows, stable_row_order
from descant.engine.admission import Admission, ResolvedRequest
from descant.engine.cache_factory import cache_name
from descant.engine.explain import no_candidates_error, request_record
from descant.engine.memory_check import check_kv_fits
from descant.engine.planner import (
    WRAPPERS,
    DecodingPlan,
    as_model,
    choose_cache,
    new_cache_for,
    validate_cache,
)
from descant.engine.prefix_reuse import CachedPrefix, PrefixReuse, empty_cache_like
from descant.engine.request import Request
from descant.engine.running_requests import RunningRequests
from descant.engine.step import run_step
from descant.errors import DescantError, InputError
from descant.kv_cache.cached_row import CachedRow, append_rows, unwrap_cache
from descant.kv_cache.prefix_cache import PrefixCache, PrefixReport
from descant.models.no_cache import NoCache, RecomputeModel
from descant.trace.logit_summary import processor_name
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["Event", "Failed", "Finished", "Report", "Request", "Session", "Tokens"]


@dataclass(frozen=True)
class Finished:
    """A request has ended; its sequences, best first or in the order of their slots."""

    request: int
    hypotheses: list[Hypothesis]
    past_key_values: tuple[
        CachedRow, ...
    ] = ()  # what each holds, all tokens but the last, where its request says `keep`


@dataclass(frozen=True)
class Report:
    """What a session has done so far, and what it holds now."""

    steps: int
    requests: int  # that run
    rows: int
    cache_bytes: int | None  # None: its cache does not say
    prefixes: PrefixReport | None  # None: it has no prefix cache


@dataclass(frozen=True)
class Failed:
    """A request could not go on; the others are unharmed."""

    request: int
    error: DescantError


Event = Tokens | Finished | Failed


class Session:
    """A table of running requests and the loop over it: `admit`, `step`, `cancel`.

    Requests of any length, config and strategy share the forward of a step; each has the same result as
    alone. A row leaves, and its memory with it, in the step that ends it. `cache` is the empty cache that
    it works on, where that is not for the model to say; a `prefix_cache` keeps what prompts begin with.
    With `trace=Tracer(...)` every step is recorded, and `trace` is the record so far.
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
            name: wrap.make for name, wrap in WRAPPERS.items()
        }
        self._wrappers: dict[str, Wrapper] = {}
        self._requested_states = tuple(states)
        self._output_states = set(states)
        self._cache: RowCache = new_cache_for(self.model) if cache is None else cache
        self._has_final_cache = cache is not None  # whether that is the cache for good
        self._cache_name: str | None = None  # the name by which it was asked for
        self._prefix_reuse = PrefixReuse(self.model, prefix_cache)
        self._rank_group: RankGroup | None = getattr(self.model, "rank_group", None)
        self._admission = Admission(model, self._base_model)
        self._running = RunningRequests(self.model.device, self._rank_group, self._tracer)
        self._requests = self._running.requests
        self._rows: Rows | None = None
        self._request_ids = count()
        self._observe = observe
        if self._tracer is not None:
            whose = getattr(model, "model", model) if hasattr(model, "traits") else model
            self._tracer.start_run(type(whose).__name__, self.model.traits.vocab_size)

    @property
    def trace(self) -> Trace | None:
        """What was recorded so far; None where nobody traces."""
        return None if self._tracer is None else self._tracer.trace

    def __len__(self) -> int:
        """How many requests are running."""
        return len(self._requests)

    @property
    def rows(self) -> int:
        """How many rows are running."""
        return 0 if self._rows is None else len(self._rows)

    def admit(self, *requests: Request, noise_rows: int = 0) -> list[int]:
        """Take requests into the table, all or none; their numbers.

        `lines` is for calls that share torch's noise: how many lines it is drawn for.
        """
        if not requests:
            return []
        asked = self._admission.resolve(requests, self.model.traits)
        self._choose_cache(asked)
        begun = [self._prefix_reuse.lookup(one.request, one.plan, one.prompt, self._cache) for one in asked]
        made = [one.row_params for one in asked]
        if self._rank_group is not None:
            prompts, keys = [one.prompt for one in asked], [one.plan.rank_key for one in asked]
            self._rank_group.check_equal("prompt", prompts[0], _admission_digest(prompts, keys, made))
            timed = any(isfinite(row["deadline"]) for row in made)
            self._running.stop_checker.syncs_across_ranks |= self._rank_group.any_rank(
                timed or any(one.stopping_criteria for one in requests)
            )
        numbers = [next(self._request_ids) for _ in requests]
        self._add_wrappers([one.plan for one in asked])
        self.model.add_requests(numbers, _inputs_by_name([one.inputs for one in asked]))
        try:
            for number, one in zip(numbers, asked, strict=True):
                self._register(number, one)
        except Exception:  # a recipe may raise what it likes
            for number in numbers:
                self._release_request(number)
            raise
        if self._rank_group is not None:
            # What processors draw by is the first one's, so that all have the same scores.
            drawn = torch.tensor([row.get("processor_seed", -1) for row in made])
            for row, dice in zip(made, self._rank_group.broadcast(drawn).tolist(), strict=True):
                row |= {"processor_seed": dice} if "processor_seed" in row else {}
        self._running.noise.num_rows = noise_rows or self._running.noise.num_rows
        self._update_output_states()
        for number, one in zip(numbers, asked, strict=True):
            self._prefix_reuse.add(number, one.request, one.plan, one.prompt, self._cache)
        new = self._new_rows(
            numbers, [one.prompt for one in asked], [one.offset for one in asked], columns_from_rows(made)
        )
        if self._tracer is not None:
            roots = [self._trace_request(number, one) for number, one in zip(numbers, asked, strict=True)]
            new = new.replace(columns={**new.columns, self._tracer.column_name: torch.tensor(roots)})
        self._append_rows(new.replace(cached_length=torch.tensor([one.length for one in begun])), begun)
        return numbers

    def step(self) -> list[Event]:
        """Advance every row by one step; what became known."""
        if self._rows is None or not len(self._rows):
            return []
        if self._rank_group is not None:
            self._rank_group.raise_if_failed()
        if self._tracer is not None:
            self._tracer.start_step()
        rows = self._prefix_reuse.run_prefill_chunks(self._base_model, self._cache, self._rows)
        archive = self._prefix_reuse.finished_kv
        retire = None if archive is None else partial(archive.capture, self._cache)
        self._rows, selections = run_step(
            self.model, self._cache, rows, self._running.strategy_groups, self._observe, retire
        )
        self._prefix_reuse.publish_prompts(self._cache, self._rows)
        self.steps += 1
        if self._tracer is not None:
            self._tracer.end_step(self.report().cache_bytes)
        events: list[Event] = [one.emitted for one in selections if one.emitted is not None]
        for selection in selections:
            for request in selection.failed:
                known, hopeless = self._requests[request], request in selection.nonfinite
                events.append(
                    Failed(
                        request,
                        no_candidates_error(
                            request, known.plan, known.has_own_processors, nonfinite=hopeless
                        ),
                    )
                )
                known.strategy.drop(request)
                self._release_request(request)
            for request in selection.finished:
                events.append(self._finish_request(request))
                self._release_request(request)
        for event in events if self._tracer is not None else ():
            self._trace_event(event)
        return events

    def _trace_event(self, event: Event) -> None:
        """Tell who traces how a request has ended, if that is what an event says."""
        assert self._tracer is not None
        if isinstance(event, Finished):
            self._tracer.record_result(event.request, event.hypotheses)
        elif isinstance(event, Failed):
            self._tracer.record_error(event.request, str(event.error))

    def cancel(self, request: int) -> None:
        """Drop a request and free its rows at once."""
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

    def report(self) -> Report:
        """What it has done so far, and what it holds."""
        bytes_held = getattr(unwrap_cache(self._cache, torch.zeros(0, dtype=torch.long))[0], "nbytes", None)
        return Report(self.steps, len(self), self.rows, bytes_held, self._prefix_reuse.report())

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens that every sequence which a running request may still return begins with (host)."""
        known, rows = self._requests[request], self._rows
        assert rows is not None
        index = (rows.request == request).nonzero().squeeze(1)
        written = index_rows(rows.tokens, index).cpu()
        mine = [
            written[line, int(rows.prompt_length[row]) : int(rows.length[row])]
            for line, row in enumerate(index.tolist())
        ]
        mine += [one.tokens for one in known.strategy.finished_so_far(request)]
        size = min(len(one) for one in mine)
        alike = (torch.stack([one[:size] for one in mine]) == mine[0][:size]).all(0)
        return mine[0][: int(alike.long().cumprod(0).sum())]

    def drain(self) -> Iterator[Event]:
        """Step until nothing runs."""
        while len(self):
            yield from self.step()

    # -------------------------------------------------------------------- admission
    def _choose_cache(self, asked: Sequence[ResolvedRequest]) -> None:
        """Choose the cache by the first requests, or as their past is; raise for those it cannot serve."""
        settled, slots = self._has_final_cache, max(one.max_slots for one in asked)
        if not settled:
            shared = [len(one.prompt) for one in asked if one.plan.forks]
            configs = [one.plan.config for one in asked]
            suits = choose_cache(self._base_model, configs, slots, max(shared, default=0))
            self._cache_name = cache_name(configs[0])
            pasts = (empty_cache_like(one.request) for one in asked)
            past = (
                None
                if self._cache_name is not None
                else next((one for one in pasts if one is not None), None)
            )
            self._cache = suits if past is None else past
            self._has_final_cache = True
        new = [(one.plan, len(one.prompt), one.row_params["max_length"], one.offset) for one in asked]
        try:
            for one in asked:
                validate_cache(one.plan, self._cache, self._cache_name, slots)
            check_kv_fits(self._base_model, self._cache, self._cache_name, new, self._rows)
        except DescantError:
            self._has_final_cache = settled  # whoever comes next may have another cache
            raise

    def _add_wrappers(self, plans: Sequence[DecodingPlan]) -> None:
        """Put the wrappers that these need around the model, each once and in order, recipes' outside."""
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
        """Have the model bring along the states that anybody needs."""
        needs = [getattr(one.strategy, "required_states", ()) for one in self._requests.values()]
        needs += [
            getattr(self._wrappers[name], "required_states", ())
            for one in self._requests.values()
            for name in one.plan.wrappers
        ]
        wanted = {name for some in needs for name in some} | set(self._requested_states)
        if wanted != self._output_states:
            self._output_states = wanted
            self.model.set_output_states(sorted(wanted))

    def _register(self, number: int, one: ResolvedRequest) -> None:
        """Enter a request in the roster, and what its row says of it."""
        one.row_params["noise_row"] = max(one.request.noise_row, 0)
        # What comes with more than tokens is read by itself, before anything is guessed.
        one.row_params["has_side_inputs"] = int(
            bool(one.request.inputs) and not self.model.traits.is_encoder_decoder
        )
        live = self._running.add(number, one.request, one.plan, one.row_params)
        if live.drafter is not None:
            live.drafter.add_requests([number], {name: [value] for name, value in one.request.inputs.items()})

    def _trace_request(self, number: int, one: ResolvedRequest) -> int:
        """Tell who traces of a request; the node that stands for its prompt."""
        assert self._tracer is not None
        around = [type(self._wrappers[name]).__name__ for name in one.plan.wrappers]
        stages = (*around, *map(processor_name, self._running.processors(number)))
        asked = request_record(number, one.prompt.tolist(), one.plan, stages, self._requests[number].drafter)
        return self._tracer.add_request(asked, " and ".join(around) or type(self.model).__name__)

    def _new_rows(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Tensor],
        offsets: Sequence[int],
        params: ParamValues,
    ) -> Rows:
        """One row a request, nothing of it cached."""
        length = torch.tensor([len(prompt) for prompt in prompts])
        column = RowParams(params)
        room = int((column["max_length"] - length).max())
        tokens = torch.zeros(len(prompts), int(length.max()) + min(room, 256), dtype=torch.long)
        for line, prompt in enumerate(prompts):
            tokens[line, : len(prompt)] = prompt
        zeros = torch.zeros_like(length)
        rows = Rows(
            tokens.to(self.model.device),
            length=length,
            cached_length=zeros,
            offset=torch.tensor(offsets),
            prompt_length=length.clone(),
            request=torch.tensor(numbers),
            slot=zeros.clone(),
            columns={"params": column},
        )
        return rows.replace(columns={**rows.columns, **self._running.new_columns(len(rows), column, prompts)})

    def _append_rows(self, new: Rows, begun: Sequence[CachedPrefix]) -> None:
        """Put fresh rows below the table, whose rows get the columns of what they met only now."""
        pasts = [one.cached_row for one in begun]
        if any(pasts):
            append_rows(self._cache, pasts)
            held = (
                new.cached_length
                if self._rows is None
                else torch.cat((self._rows.cached_length, new.cached_length))
            )
            self._cache.commit(None, held)
        else:
            self._cache.extend(len(new))
        if self._rows is None or not len(self._rows):
            self._rows = new
            return
        old = self._rows
        columns = dict(old.columns)
        if not new.columns.keys() <= columns.keys():
            columns = {**self._running.new_columns(len(old), row_params(old)), **columns}
        # Columns that nobody running needs any more are left behind.
        self._rows = old.replace(columns={name: columns[name] for name in new.columns}).cat(new)

    # -------------------------------------------------------------------- ends
    def _finish_request(self, request: int) -> Finished | Failed:
        """A request's sequences, as many as it asked for."""
        known = self._requests[request]
        found = known.strategy.finish(request)
        wanted = known.plan.config.num_return_sequences
        if len(found) < wanted:
            # Beams can be fewer than asked for when all other continuations were ruled out.
            got = f"{len(found)} sequences of {wanted}"
            return Failed(request, no_candidates_error(request, known.plan, known.has_own_processors, got))
        return Finished(request, found[:wanted], self._prefix_reuse.collect_finished(request, found[:wanted]))

    def _release_request(self, request: int) -> None:
        """Forget a request and the processors and criteria that only it used."""
        self.model.remove_requests([request])
        self._prefix_reuse.remove(request)
        if request in self._requests:  # else admission failed before it came to this one
            self._running.remove(request)


def _admission_digest(
    prompts: Sequence[Tensor], keys: Sequence[Any], rows: Sequence[Mapping[str, Any]]
) -> int:
    """A number that differs where prompts do, or how many rows they become and for how long."""
    told = crc32(
        repr(
            [keys, *((row["max_length"], row["num_sequences"], row["eos_token_ids"]) for row in rows)]
        ).encode()
    )
    for prompt in prompts:
        told = crc32(prompt.cpu().numpy().tobytes(), told)
    return told


def _inputs_by_name(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What requests give, by name, None where one gives nothing."""
    names = dict.fromkeys(name for one in inputs for name in one)
    return {name: [one.get(name) for one in inputs] for name in names}
