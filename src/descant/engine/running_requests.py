"""A roster: who runs in a table, with which strategy, processors and stops, and who keeps a record of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from descant.core.context import RowParams, row_params
from descant.core.interfaces import Drafter, Processor, RankGroup, StepObserver, Strategy
from descant.core.records import ProcessorTrace
from descant.core.rows import Column, Rows
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.processors import as_processor
from descant.decoding.processors.pipeline import LOGITS_WARPERS
from descant.decoding.stopping.checker import StopChecker
from descant.engine.logprobs import LogprobsColumn, LogprobsRecorder
from descant.engine.planner import DecodingPlan
from descant.engine.registry import RefCountedRegistry
from descant.engine.request import Request, build_text_matchers
from descant.engine.strategy_group import StrategyGroup, as_stateful
from descant.errors import InputError
from descant.trace.tracer import Tracer

__all__ = ["RunningRequest", "RunningRequests"]

ProcessorChain = tuple[tuple[tuple[int, int], Processor], ...]  # processors, each with its place in the order


@dataclass
class RunningRequest:
    """What is kept of a request while it runs."""

    plan: DecodingPlan
    strategy: Strategy
    registry_ids: Mapping[str, int]  # where its processors, criteria and texts lie on their shelves
    has_own_processors: bool  # whether it has processors of its own

    @property
    def drafter(self) -> Drafter | None:
        """Who guesses ahead for it."""
        drafter: Drafter | None = getattr(self.strategy, "drafter", None)
        return drafter


class RunningRequests:
    """The running requests by number, and what their rows name by number: strategies, processors, stops.

    What two requests have alike is there once, and goes with the last of them.
    """

    def __init__(
        self, device: torch.device, peers: RankGroup | None = None, tracer: Tracer | None = None
    ) -> None:
        self.requests: dict[int, RunningRequest] = {}
        self.noise, self.stop_checker, self.logprobs_recorder = (
            SamplingNoise(),
            StopChecker(),
            LogprobsRecorder(),
        )
        self.strategies: dict[tuple[Any, ...], Strategy] = {}
        self.strategy_order: list[Strategy] = []  # the strategies by the number of their lane
        self.processor_chains: RefCountedRegistry[ProcessorChain] = RefCountedRegistry()
        self.registries: dict[str, RefCountedRegistry[Any]] = {
            "processor_chain_id": self.processor_chains, "criteria_id": RefCountedRegistry(), "stop_strings_id": RefCountedRegistry(), "stop_regex_id": RefCountedRegistry(),
        }  # fmt: skip
        self.adapted_processors: WeakValueDictionary[int, Any] = (
            WeakValueDictionary()
        )  # users' processors, by identity
        self.stop_checker.rank_group = peers
        self.stop_checker.criteria = self.registries["criteria_id"].items
        self.stop_checker.string_matchers = self.registries["stop_strings_id"].items
        self.stop_checker.regex_stops = self.registries["stop_regex_id"].items
        self._device, self._rank_group, self._tracer = device, peers, tracer
        self._groups: tuple[object, list[StrategyGroup]] | None = None

    # -------------------------------------------------------------------- who comes and goes
    def add(self, number: int, request: Request, known: DecodingPlan, row: dict[str, Any]) -> RunningRequest:
        """Give a request its strategy, processors and stops, and its row the places of these."""
        if known.strategy_key not in self.strategies:
            self.strategies[known.strategy_key] = known.make_strategy(
                self.noise, self.stop_checker, self._rank_group
            )
            self.strategy_order.append(self.strategies[known.strategy_key])
        strategy = self.strategies[known.strategy_key]
        row["strategy_id"] = self.strategy_order.index(strategy)
        # Before anything is drawn, for whoever is refused must not have moved torch's generator.
        given = (*request.logits_processor, *_recipe_processors(known))
        chain, texts = self._build_chain(known, given), build_text_matchers(request, known.config)
        if known.max_rewind is None:
            _check_stateless(chain, known)
        if row["seed"] < 0 and request.noise_row < 0 and known.config.do_sample:
            # Without a seed a request outside a batch gets one by chance, so that its luck is its own.
            row["seed"] = int(torch.randint(2**62, ()))
        if any(getattr(processor, "is_random", False) for _, processor in chain):
            row["processor_seed"] = row["seed"] if row["seed"] >= 0 else int(torch.randint(2**62, ()))
        own = tuple(request.stopping_criteria) or None
        keys = {
            "processor_chain_id": (chain, tuple((place, id(one)) for place, one in chain)),
            "criteria_id": (own, tuple(map(id, own or ()))),
            "stop_strings_id": (texts.stop_strings, id(texts.stop_strings)),
            "stop_regex_id": (texts.stop_regex, texts.stop_regex),
        }
        places = {
            name: -1 if thing is None else self.registries[name].acquire(key, thing)
            for name, (thing, key) in keys.items()
        }
        row |= places
        if texts.banned_phrases is not None:
            row["phrase_matcher"] = texts.banned_phrases
        if texts.sequence_breakers is not None:
            row["dry_sequence_breakers"] = texts.sequence_breakers
        self.requests[number] = RunningRequest(known, strategy, places, bool(request.logits_processor))
        return self.requests[number]

    def _build_chain(self, known: DecodingPlan, given: Sequence[Any]) -> ProcessorChain:
        """A request's processors in order: the built-in ones and, at their place, those it brings along."""
        kinds = {type(one) for one in given}
        # A processor given by hand takes the place of the one that the config would make, if that is a rule.
        chain: list[tuple[tuple[int, int], Processor]] = [
            ((place, 0), stage.processor)
            for place, stage in known.processors
            if stage in LOGITS_WARPERS or type(stage.processor) not in kinds
        ]
        for number, one in enumerate(given):
            wrapped = self.adapted_processors.get(id(one))
            if wrapped is None:
                wrapped = self.adapted_processors[id(one)] = as_processor(one)
            chain.append(((known.custom_position, number), wrapped))
        _check_distinct_states(chain)
        return tuple(sorted(chain, key=lambda entry: entry[0]))

    def remove(self, number: int) -> None:
        """Forget a request, and the processors and criteria that only it used."""
        gone = self.requests.pop(number)
        if gone.drafter is not None:
            gone.drafter.remove_requests([number])
        for name, place in gone.registry_ids.items():
            self.registries[name].release(place)
        if not self.requests:
            self._groups = None  # it holds on to what the last ones used

    def processors(self, number: int) -> list[Processor]:
        """The processors of a running request in order."""
        return [
            processor
            for _, processor in self.processor_chains.items[
                self.requests[number].registry_ids["processor_chain_id"]
            ]
        ]

    # -------------------------------------------------------------------- the layout of the table
    def new_columns(
        self, count: int, params: RowParams, prompts: Sequence[Tensor] = ()
    ) -> dict[str, Tensor | Column]:
        """The columns that anybody in the table needs, as rows have them that begin."""
        columns: dict[str, Tensor | Column] = {}
        for strategy in self.strategy_order:
            for name, start in strategy.columns.items():
                columns[name] = (
                    start.repeat(count, *[1] * (start.ndim - 1))
                    if isinstance(start, Tensor)
                    else start.take(torch.zeros(count, dtype=torch.long))
                )
        for chain in self.processor_chains.items.values():
            for _, processor in chain:
                keeps = as_stateful(processor)
                for name, value in keeps.state.items() if keeps is not None else ():
                    columns[name] = torch.full((count,), value, device=self._device)
        if self.stop_checker.string_matchers:
            own = params["stop_strings_id"].tolist()
            state = (
                [
                    self.stop_checker.string_matchers[place].state_after(prompt.tolist()) if place >= 0 else 0
                    for place, prompt in zip(own, prompts, strict=True)
                ]
                if prompts
                else [0] * count
            )
            columns[self.stop_checker.state_column] = torch.tensor(state)
        deepest = max((one.plan.base_params["logprobs"] for one in self.requests.values()), default=-1)
        if deepest >= 0:
            columns[self.logprobs_recorder.column_name] = LogprobsColumn.empty(count, deepest, self._device)
        return columns

    def strategy_groups(self, rows: Rows) -> Sequence[StrategyGroup]:
        """The table by strategy, with the processors its rows use; kept while nobody comes or goes."""
        if self._groups is None or self._groups[0] != rows.version:
            params = row_params(rows)
            lane, chain = params["strategy_id"], params["processor_chain_id"]
            lanes = []
            for number in sorted(set(lane.tolist())):
                index: Tensor | None = (lane == number).nonzero().squeeze(1)
                if index is not None and len(index) == len(rows):
                    index = None  # the whole table
                stages = self._processor_rows(chain if index is None else chain[index])
                watch: list[ProcessorTrace] | None = None if self._tracer is None else []
                lanes.append(
                    StrategyGroup(
                        self.strategy_order[number], index, stages, self._observers(rows), traces=watch
                    )
                )
            self._groups = (rows.version, lanes)
        return self._groups[1]

    def _processor_rows(self, chain: Tensor) -> list[tuple[Processor, Tensor | None]]:
        """The processors of the rows' chains in order, each with the rows that use it."""
        places = chain.numpy()
        users: dict[tuple[tuple[int, int], int], tuple[Processor, list[int]]] = {}
        for number in sorted(set(places.tolist())):
            for place, processor in self.processor_chains.items[number]:
                users.setdefault((place, id(processor)), (processor, []))[1].append(number)
        stages: list[tuple[Processor, Tensor | None]] = []
        for _, (processor, chains) in sorted(users.items(), key=lambda entry: entry[0][0]):
            mine = np.isin(places, chains)
            stages.append((processor, None if mine.all() else torch.from_numpy(np.flatnonzero(mine))))
        return stages

    def _observers(self, rows: Rows) -> list[StepObserver]:
        """Who keeps a record of these rows."""
        followers: list[StepObserver] = []
        if self.stop_checker.state_column in rows.columns:
            followers.append(self.stop_checker)
        if self.logprobs_recorder.column_name in rows.columns:
            followers.append(self.logprobs_recorder)
        if self._tracer is not None:
            followers.append(self._tracer)
        return followers


def _recipe_processors(known: DecodingPlan) -> tuple[Any, ...]:
    """What a plan's recipe adds to the user's own processors."""
    recipe = known.recipe
    return (recipe.processor,) if recipe is not None and recipe.kind == "processor" else ()


def _check_distinct_states(chain: Sequence[tuple[Any, Processor]]) -> None:
    """Raise for two processors of one request that would write each other's column."""
    seen: dict[str, Processor] = {}
    for _, processor in chain:
        keeps = as_stateful(processor)
        for name in keeps.state if keeps is not None else ():
            if name in seen:
                must = f"must not hold a second processor that keeps `{name}`"
                raise InputError("logits_processor", must, getattr(processor, "function", processor))
            seen[name] = processor


def _check_stateless(chain: Sequence[tuple[Any, Processor]], known: DecodingPlan) -> None:
    """Raise for a processor whose state cannot follow a row that takes tokens back."""
    for _, processor in chain:
        if as_stateful(processor) is not None:
            who = (
                "`banned_phrases`, which take"
                if known.recipe is None
                else f"{known.recipe.name}, which takes"
            )
            must = f"must not hold a processor with a state beside {who} tokens back"
            raise InputError("logits_processor", must, getattr(processor, "function", processor))
