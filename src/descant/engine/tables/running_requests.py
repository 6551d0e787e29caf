"""The running requests of a table, with the strategies, processors and stop conditions they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from descant.core.context import RowParams, row_params
from descant.core.interfaces import Processor, RankGroup, StepObserver, Strategy
from descant.core.records import ProcessorTrace
from descant.core.rows import Column, Rows, new_rows_column
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.pipeline import CUSTOM, LOGITS_WARPERS
from descant.decoding.processors.base import as_processor
from descant.decoding.processors.grammar import GrammarLogitsProcessor
from descant.decoding.stopping import StopChecker
from descant.engine.planning.planner import DecodingPlan, RowIds
from descant.engine.request import (
    TEXT_FIELDS,
    Request,
    ResolvedRequest,
    TextMatchers,
    build_text_matchers,
    draw_seed,
)
from descant.engine.step.logprobs import SUPPORT_COLUMN, LogprobsRecorder, SupportColumn
from descant.engine.step.strategy_group import StrategyGroup, as_stateful
from descant.errors import InputError
from descant.trace.tracer import Tracer

Item = TypeVar("Item")


class RefCountedRegistry(Generic[Item]):
    """Objects by id, with reference counts; objects with equal keys share an id."""

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}
        self._ids: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._refcounts: dict[int, int] = {}
        self._next_id = count()

    def acquire(self, key: Hashable, item: Item) -> int:
        """Add a reference to an item; return its id."""
        number = self._ids.get(key)
        if number is None:
            number = next(self._next_id)
            self.items[number], self._ids[key], self._keys[number] = item, number, key
        self._refcounts[number] = self._refcounts.get(number, 0) + 1
        return number

    def release(self, number: int) -> None:
        """Drop a reference; the last one removes the item."""
        self._refcounts[number] -= 1
        if not self._refcounts[number]:
            del self.items[number], self._refcounts[number], self._ids[self._keys.pop(number)]


_NO_TEXTS: Final = TextMatchers(None, None, None)

# Processors, each with its position: (position in the order, position among the user's own).
ProcessorChain = tuple[tuple[tuple[int, int], Processor], ...]


@dataclass
class RunningRequest:
    """A request that owns rows of a table, with its strategy and the ids of what it shares with others."""

    resolved: ResolvedRequest
    plan: DecodingPlan
    strategy: Strategy
    ids: RowIds
    method_params: Mapping[str, Any]

    @property
    def has_own_processors(self) -> bool:
        """Whether the user gave it processors."""
        return bool(self.resolved.request.logits_processor)

    def row_values(self) -> dict[str, Any]:
        """All parameters of its row."""
        values = {**vars(self.plan.params), **vars(self.resolved.prompt_params)}
        values |= {**self.method_params, **vars(self.ids)}
        if self.ids.processor_seed is None:
            del values["processor_seed"]
        return values


class PreparedRequest(NamedTuple):
    """A request that passed all checks, with what it needs to be registered."""

    resolved: ResolvedRequest
    strategy: Strategy
    chain: ProcessorChain
    texts: TextMatchers


class RunningRequests:
    """The running requests by id, and the objects that their rows refer to by id.

    Requests share equal objects; an object is dropped with its last request.
    """

    def __init__(
        self,
        device: torch.device,
        rank_group: RankGroup | None = None,
        tracer: Tracer | None = None,
        noise: SamplingNoise | None = None,
        make_stop_checker: Callable[..., StopChecker] = StopChecker,
    ) -> None:
        self.requests: dict[int, RunningRequest] = {}
        # Of requests whose own code has raised, written by their table, its groups and its stop checker,
        # until they are removed. Several ranks must fail together, so there each error is raised.
        self.errors: dict[int, Exception] | None = {} if rank_group is None else None
        self.noise = SamplingNoise() if noise is None else noise
        self.logprobs_recorder = LogprobsRecorder()
        self.strategies: dict[tuple[Any, ...], Strategy] = {}
        self.strategy_order: list[Strategy] = []  # by strategy id
        self.processor_chains: RefCountedRegistry[ProcessorChain] = RefCountedRegistry()
        self.registries: dict[str, RefCountedRegistry[Any]] = {
            "processor_chain_id": self.processor_chains,
            "criteria_id": RefCountedRegistry(),
            "stop_strings_id": RefCountedRegistry(),
            "stop_regex_id": RefCountedRegistry(),
        }
        # User processors behind the interface, by the id of the user's object.
        self.adapted_processors: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.stop_checker = make_stop_checker(
            self.registries["criteria_id"].items,
            self.registries["stop_strings_id"].items,
            self.registries["stop_regex_id"].items,
            rank_group,
            self.errors,
        )
        self.rank_group = rank_group
        self._device, self._tracer = device, tracer
        self._groups: tuple[object, list[StrategyGroup]] | None = None  # of the table with that version

    # -------------------------------------------------------------------- requests come and go
    def check(self, resolved: Sequence[ResolvedRequest]) -> None:
        """Raise for a request that `prepare` refuses; nothing is kept of any."""
        num_strategies = len(self.strategy_order)
        try:
            for one in resolved:
                self.prepare(one)
        finally:
            self.keep_strategies(num_strategies)

    def prepare(self, resolved: ResolvedRequest, num_cached: int = 0) -> PreparedRequest:
        """Check a request and build its strategy, processors and stop conditions, without registering it.

        `num_cached` tokens of its prompt are in a cache.
        """
        request, plan = resolved.request, resolved.plan
        key = plan.strategy.key
        if key not in self.strategies:  # built for the first request
            self.strategies[key] = plan.strategy.make(self.noise, self.stop_checker, self.rank_group)
            self.strategy_order.append(self.strategies[key])
        strategy = self.strategies[key]
        given, recipe = list(request.logits_processor), plan.recipe
        if recipe is not None and recipe.kind == "processor":
            given.append(recipe.processor)
        chain = self._build_chain(plan, given)
        texts = _NO_TEXTS
        if not plan.config.given.isdisjoint(TEXT_FIELDS):
            texts = build_text_matchers(request, plan.config)
        if plan.strategy.traits.max_rewind is None:
            _check_stateless(chain, plan)
        if resolved.cached_tokens is None:
            resolved = resolved._replace(cached_tokens=num_cached)
        return PreparedRequest(resolved, strategy, chain, texts)

    def add(self, request_id: int, prepared: PreparedRequest, is_encoder_decoder: bool) -> RunningRequest:
        """Register a request."""
        resolved, strategy, chain, texts = prepared
        request = resolved.request
        # Seeds are drawn after all checks: a refused request must not advance torch's generator.
        seed, processor_seed = _draw_seeds(resolved, chain)
        criteria = tuple(request.stopping_criteria) or None
        method_params = resolved.method_params
        if texts is not _NO_TEXTS:
            method_params = {**method_params, **texts.row_params()}
        ids = RowIds(
            strategy_id=self.strategy_order.index(strategy),
            seed=seed,
            noise_row=max(request._call.noise_row, 0),
            **_batch_place(request_id, request, resolved.plan),
            has_side_inputs=int(bool(request.inputs) and not is_encoder_decoder),
            processor_seed=processor_seed,
            **self._acquire(
                {
                    "processor_chain_id": (
                        chain,
                        tuple((position, id(processor)) for position, processor in chain),
                    ),
                    "criteria_id": (criteria, tuple(map(id, criteria or ()))),
                    "stop_strings_id": (texts.stop_strings, id(texts.stop_strings)),
                    "stop_regex_id": (texts.stop_regex, texts.stop_regex),
                }
            ),
        )
        # Nothing that can fail follows the references: it would leave them behind.
        self.requests[request_id] = RunningRequest(resolved, resolved.plan, strategy, ids, method_params)
        return self.requests[request_id]

    def _acquire(self, shared: Mapping[str, tuple[Any, Any]]) -> dict[str, int]:
        """A reference to each item by its key, all or none; -1: there is no item."""
        acquired: dict[str, int] = {}
        try:
            for name, (item, key) in shared.items():
                acquired[name] = -1 if item is None else self.registries[name].acquire(key, item)
        except BaseException:
            for name, item_id in acquired.items():
                if item_id >= 0:
                    self.registries[name].release(item_id)
            raise
        return acquired

    def keep_strategies(self, count: int) -> None:
        """Drop all strategies but the first `count`; no request may use the others."""
        kept = self.strategy_order[:count]
        ids = set(map(id, kept))
        self.strategies = {key: strategy for key, strategy in self.strategies.items() if id(strategy) in ids}
        self.strategy_order = kept

    def _build_chain(self, plan: DecodingPlan, given: Sequence[Any]) -> ProcessorChain:
        """A request's processors in order: those of its plan and, at their positions, the user's.

        Its grammar has the last word: it runs again after a processor of the user's that follows it.
        """
        if not given:
            return tuple([((position, 0), spec.processor) for position, spec in plan.processors])
        kinds = {type(processor) for processor in given}
        # A user processor replaces the one of its type that the config enables, unless that is a warper.
        chain: list[tuple[tuple[int, int], Processor]] = [
            ((position, 0), spec.processor)
            for position, spec in plan.processors
            if spec in LOGITS_WARPERS or type(spec.processor) not in kinds
        ]
        own: list[tuple[tuple[int, int], Processor]] = []
        for index, processor in enumerate(given):
            adapted = self.adapted_processors.get(id(processor))
            if adapted is None:
                adapted = self.adapted_processors[id(processor)] = as_processor(processor)
            own.append(((_own_position(processor, plan.order), index + 1), adapted))
        _check_distinct_states([*chain, *own])
        last, rank = max((position for position, _ in own), default=(-1, 0))
        repeated: list[tuple[tuple[int, int], Processor]] = [
            ((last, rank + 1), processor)
            for (position, _), processor in chain
            if isinstance(processor, GrammarLogitsProcessor) and position < last
        ]
        chain += own + repeated
        return tuple(sorted(chain, key=lambda entry: entry[0]))

    def sync_processor_seeds(self, request_ids: Sequence[int]) -> None:
        """Use the first rank's processor seeds on all ranks, so that all have the same scores."""
        assert self.rank_group is not None
        running = [self.requests[request_id] for request_id in request_ids]
        seeds = [-1 if one.ids.processor_seed is None else one.ids.processor_seed for one in running]
        for one, seed in zip(running, self.rank_group.broadcast(torch.tensor(seeds)).tolist(), strict=True):
            if one.ids.processor_seed is not None:
                one.ids = replace(one.ids, processor_seed=seed)

    def remove(self, request_id: int) -> None:
        """Drop a request, and the objects that only it used."""
        running = self.requests.pop(request_id)
        if self.errors is not None:
            self.errors.pop(request_id, None)
        for name, registry in self.registries.items():
            number = getattr(running.ids, name)
            if number >= 0:
                registry.release(number)
        if not self.requests:
            self._groups = None  # it refers to the objects of the last requests
        if running.strategy.drafter is not None:
            running.strategy.drafter.remove_requests([request_id])

    def processors(self, request_id: int) -> list[Processor]:
        """The processors of a running request in order."""
        chain_id = self.requests[request_id].ids.processor_chain_id
        return [processor for _, processor in self.processor_chains.items[chain_id]]

    # -------------------------------------------------------------------- the layout of the table
    def new_columns(
        self, count: int, params: RowParams, prompts: Sequence[Tensor] = ()
    ) -> dict[str, Tensor | Column]:
        """The columns that any running request needs, with the values of `count` new rows."""
        columns: dict[str, Tensor | Column] = {}
        for strategy in self.strategy_order:
            for name, start in strategy.columns.items():
                columns[name] = new_rows_column(start, count)
        for chain in self.processor_chains.items.values():
            for _, processor in chain:
                stateful = as_stateful(processor)
                for name, value in stateful.state.items() if stateful is not None else ():
                    columns[name] = new_rows_column(value, count, self._device)
        if self.stop_checker.string_matchers:
            columns[self.stop_checker.state_column] = self._stop_string_states(count, params, prompts)
        num_logprobs = -1
        for running in self.requests.values():
            num_logprobs = max(num_logprobs, running.plan.params.logprobs)
        if num_logprobs >= 0:
            recorder = self.logprobs_recorder
            columns[recorder.column_name] = recorder.new_column(count, num_logprobs, self._device)
            if any(running.plan.params.logprobs_support for running in self.requests.values()):
                columns[SUPPORT_COLUMN] = SupportColumn(((),) * count)
        return columns

    def _stop_string_states(self, count: int, params: RowParams, prompts: Sequence[Tensor]) -> Tensor:
        """The states of the stop-string matchers after the prompts [R]; 0 for rows without prompts."""
        if not prompts:
            return torch.zeros(count, dtype=torch.long)
        matchers = self.stop_checker.string_matchers
        states = [
            matchers[index].state_after(prompt.tolist()) if index >= 0 else 0
            for index, prompt in zip(params["stop_strings_id"].tolist(), prompts, strict=True)
        ]
        return torch.tensor(states)

    def strategy_groups(self, rows: Rows) -> Sequence[StrategyGroup]:
        """The rows by strategy, with the processors they use; cached while the table's version lasts."""
        if self._groups is None or self._groups[0] != rows.version:
            params = row_params(rows)
            strategy_ids, chain_ids = params["strategy_id"], params["processor_chain_id"]
            groups = []
            for strategy_id in sorted(set(strategy_ids.tolist())):
                index: Tensor | None = (strategy_ids == strategy_id).nonzero().squeeze(1)
                if index is not None and len(index) == len(rows):
                    index = None  # the whole table
                processors = self._processor_rows(chain_ids if index is None else chain_ids[index])
                traces: list[ProcessorTrace] | None = None if self._tracer is None else []
                strategy, observers = self.strategy_order[strategy_id], self._observers(rows)
                groups.append(
                    StrategyGroup(strategy, index, processors, observers, traces=traces, errors=self.errors)
                )
            self._groups = (rows.version, groups)
        return self._groups[1]

    def _processor_rows(self, chain_ids: Tensor) -> list[tuple[Processor, Tensor | None]]:
        """The processors of these rows' chains in order, each with the rows that use it."""
        ids = chain_ids.numpy()
        users: dict[tuple[tuple[int, int], int], tuple[Processor, list[int]]] = {}
        for chain_id in sorted(set(ids.tolist())):
            for position, processor in self.processor_chains.items[chain_id]:
                users.setdefault((position, id(processor)), (processor, []))[1].append(chain_id)
        result: list[tuple[Processor, Tensor | None]] = []
        for key in sorted(users, key=itemgetter(0)):
            processor, chains = users[key]
            uses = np.isin(ids, chains)
            result.append((processor, None if uses.all() else torch.from_numpy(np.flatnonzero(uses))))
        return result

    def _observers(self, rows: Rows) -> list[StepObserver]:
        """The observers of the steps of these rows."""
        observers: list[StepObserver] = []
        if self.stop_checker.state_column in rows.columns or self.stop_checker.criteria:
            observers.append(self.stop_checker)
        if self.logprobs_recorder.column_name in rows.columns:
            observers.append(self.logprobs_recorder)
        if self._tracer is not None:
            observers.append(self._tracer)
        return observers


def _draw_seeds(resolved: ResolvedRequest, chain: ProcessorChain) -> tuple[int, int | None]:
    """The seed of a request's sampling (-1: none) and of its random processors (None: it has none)."""
    plan = resolved.plan
    seed = plan.params.seed if plan.params.seed >= 0 else resolved.drawn_seed
    if seed < 0 and resolved.request._call.noise_row < 0 and plan.config.do_sample:
        # An unseeded request outside a batch gets a random seed, so that it does not depend on the others.
        seed = draw_seed()
    for _, processor in chain:
        if getattr(processor, "is_random", False):
            return seed, seed if seed >= 0 else draw_seed()
    return seed, None


def _batch_place(request_id: int, request: Request, plan: DecodingPlan) -> dict[str, int]:
    """Where user code finds a request's rows: in the batch of its call, or among its own sequences."""
    if plan.strategy.name != "sampling":  # other strategies move, fork or draft rows
        return {"batch_id": request_id}
    if request._call.batch_size:
        first = request_id - request._call.prompt_index  # the requests of a call have consecutive numbers
        return {
            "batch_id": first,
            "batch_row": request._call.batch_row,
            "batch_size": request._call.batch_size,
        }
    return {"batch_id": request_id, "batch_size": plan.params.num_sequences}


def _own_position(processor: Any, order: Sequence[str]) -> int:
    """The position of a user's processor in the order of a plan."""
    name = getattr(processor, "order_name", CUSTOM)
    if name not in order:
        must = "of a processor must be a name of `processor_order`"
        raise InputError("order_name", must, name, f"choose from {', '.join(order)}")
    return order.index(name)


def _check_distinct_states(chain: Sequence[tuple[Any, Processor]]) -> None:
    """Raise for two processors of one request with a state column of the same name."""
    names: set[str] = set()
    for _, processor in chain:
        stateful = as_stateful(processor)
        for name in stateful.state if stateful is not None else ():
            if name in names:
                must = f"must not hold a second processor that keeps `{name}`"
                raise InputError("logits_processor", must, _user_object(processor))
            names.add(name)


def _check_stateless(chain: Sequence[tuple[Any, Processor]], plan: DecodingPlan) -> None:
    """Raise for a stateful processor in a plan that takes tokens back, which a state cannot follow."""
    for _, processor in chain:
        if as_stateful(processor) is not None:
            method = "`banned_phrases`" if plan.recipe is None else plan.recipe.name
            must = f"must not hold a processor with a state beside {method}: its rows take tokens back"
            raise InputError("logits_processor", must, _user_object(processor))


def _user_object(processor: Processor) -> Any:
    """The object that the user passed, where the engine runs an adapter around it."""
    return getattr(processor, "function", processor)
