"""A roster: who runs in a table, with which strategy, processors and stops, and who keeps a record of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Params, params_of
from descant.core.interfaces import Drafter, Follower, Peers, Processor, Strategy
from descant.core.records import Watched
from descant.core.rows import Column, Rows
from descant.core.sampling_noise import Chance
from descant.decoding.processors import behind_the_port
from descant.decoding.processors.pipeline import SAMPLERS
from descant.decoding.stopping.checker import Stops
from descant.engine.logprobs import Ledger, Pages
from descant.engine.planner import Plan
from descant.engine.registry import Shelf
from descant.engine.request import Request, texts_of
from descant.engine.strategy_group import Lane, stateful
from descant.errors import InputError
from descant.trace.tracer import Tracer

__all__ = ["Live", "Roster"]

Chain = tuple[tuple[tuple[int, int], Processor], ...]  # processors, each with its place in the order


@dataclass
class Live:
    """What is kept of a request while it runs."""

    plan: Plan
    strategy: Strategy
    places: Mapping[str, int]  # where its processors, criteria and texts lie on their shelves
    brought: bool  # whether it has processors of its own

    @property
    def drafter(self) -> Drafter | None:
        """Who guesses ahead for it."""
        drafter: Drafter | None = getattr(self.strategy, "drafter", None)
        return drafter


class Roster:
    """The running requests by number, and what their rows name by number: strategies, processors, stops.

    What two requests have alike is there once, and goes with the last of them.
    """

    def __init__(
        self, device: torch.device, peers: Peers | None = None, tracer: Tracer | None = None
    ) -> None:
        self.live: dict[int, Live] = {}
        self.noise, self.stops, self.ledger = Chance(), Stops(), Ledger()
        self.strategies: dict[tuple[Any, ...], Strategy] = {}
        self.order: list[Strategy] = []  # the strategies by the number of their lane
        self.chains: Shelf[Chain] = Shelf()
        self.shelves: dict[str, Shelf[Any]] = {
            "chain": self.chains, "criteria": Shelf(), "stop_table": Shelf(), "stop_pattern": Shelf(),
        }  # fmt: skip
        self.wrapped: WeakValueDictionary[int, Any] = WeakValueDictionary()  # users' processors, by identity
        self.stops.peers = peers
        self.stops.criteria = self.shelves["criteria"].items
        self.stops.tables = self.shelves["stop_table"].items
        self.stops.patterns = self.shelves["stop_pattern"].items
        self._device, self._peers, self._tracer = device, peers, tracer
        self._lanes: tuple[object, list[Lane]] | None = None

    # -------------------------------------------------------------------- who comes and goes
    def enrol(self, number: int, request: Request, known: Plan, row: dict[str, Any]) -> Live:
        """Give a request its strategy, processors and stops, and its row the places of these."""
        if known.key not in self.strategies:
            self.strategies[known.key] = known.build(self.noise, self.stops, self._peers)
            self.order.append(self.strategies[known.key])
        strategy = self.strategies[known.key]
        row["lane"] = self.order.index(strategy)
        # Before anything is drawn, for whoever is refused must not have moved torch's generator.
        given = (*request.logits_processor, *_processors(known))
        chain, texts = self._chain(known, given), texts_of(request, known.config)
        if known.back is None:
            _refuse_state(chain, known)
        if row["seed"] < 0 and request.line < 0 and known.config.do_sample:
            # Without a seed a request outside a batch gets one by chance, so that its luck is its own.
            row["seed"] = int(torch.randint(2**62, ()))
        if any(getattr(processor, "random", False) for _, processor in chain):
            row["dice"] = row["seed"] if row["seed"] >= 0 else int(torch.randint(2**62, ()))
        own = tuple(request.stopping_criteria) or None
        keys = {
            "chain": (chain, tuple((place, id(one)) for place, one in chain)),
            "criteria": (own, tuple(map(id, own or ()))),
            "stop_table": (texts.table, id(texts.table)),
            "stop_pattern": (texts.pattern, texts.pattern),
        }
        places = {
            name: -1 if thing is None else self.shelves[name].put(key, thing)
            for name, (thing, key) in keys.items()
        }
        row |= places
        if texts.phrases is not None:
            row["phrases"] = texts.phrases
        if texts.breakers is not None:
            row["dry_sequence_breakers"] = texts.breakers
        self.live[number] = Live(known, strategy, places, bool(request.logits_processor))
        return self.live[number]

    def _chain(self, known: Plan, given: Sequence[Any]) -> Chain:
        """A request's processors in order: the built-in ones and, at their place, those it brings along."""
        kinds = {type(one) for one in given}
        # A processor given by hand takes the place of the one that the config would make, if that is a rule.
        chain: list[tuple[tuple[int, int], Processor]] = [
            ((place, 0), stage.processor)
            for place, stage in known.chain
            if stage in SAMPLERS or type(stage.processor) not in kinds
        ]
        for number, one in enumerate(given):
            wrapped = self.wrapped.get(id(one))
            if wrapped is None:
                wrapped = self.wrapped[id(one)] = behind_the_port(one)
            chain.append(((known.custom, number), wrapped))
        _refuse_shared_state(chain)
        return tuple(sorted(chain, key=lambda entry: entry[0]))

    def strike(self, number: int) -> None:
        """Forget a request, and the processors and criteria that only it used."""
        gone = self.live.pop(number)
        if gone.drafter is not None:
            gone.drafter.close([number])
        for name, place in gone.places.items():
            self.shelves[name].drop(place)
        if not self.live:
            self._lanes = None  # it holds on to what the last ones used

    def processors(self, number: int) -> list[Processor]:
        """The processors of a running request in order."""
        return [processor for _, processor in self.chains.items[self.live[number].places["chain"]]]

    # -------------------------------------------------------------------- the layout of the table
    def columns(
        self, count: int, params: Params, prompts: Sequence[Tensor] = ()
    ) -> dict[str, Tensor | Column]:
        """The columns that anybody in the table needs, as rows have them that begin."""
        columns: dict[str, Tensor | Column] = {}
        for strategy in self.order:
            for name, start in strategy.columns.items():
                columns[name] = (
                    start.repeat(count, *[1] * (start.ndim - 1))
                    if isinstance(start, Tensor)
                    else start.take(torch.zeros(count, dtype=torch.long))
                )
        for chain in self.chains.items.values():
            for _, processor in chain:
                keeps = stateful(processor)
                for name, value in keeps.state.items() if keeps is not None else ():
                    columns[name] = torch.full((count,), value, device=self._device)
        if self.stops.tables:
            own = params["stop_table"].tolist()
            state = (
                [
                    self.stops.tables[place].run(prompt.tolist()) if place >= 0 else 0
                    for place, prompt in zip(own, prompts, strict=True)
                ]
                if prompts
                else [0] * count
            )
            columns[self.stops.state] = torch.tensor(state)
        deepest = max((one.plan.values["logprobs"] for one in self.live.values()), default=-1)
        if deepest >= 0:
            columns[self.ledger.name] = Pages.empty(count, deepest, self._device)
        return columns

    def lanes(self, rows: Rows) -> Sequence[Lane]:
        """The table by strategy, with the processors its rows use; kept while nobody comes or goes."""
        if self._lanes is None or self._lanes[0] != rows.version:
            params = params_of(rows)
            lane, chain = params["lane"], params["chain"]
            lanes = []
            for number in sorted(set(lane.tolist())):
                index: Tensor | None = (lane == number).nonzero().squeeze(1)
                if index is not None and len(index) == len(rows):
                    index = None  # the whole table
                stages = self._stages(chain if index is None else chain[index])
                watch: list[Watched] | None = None if self._tracer is None else []
                lanes.append(Lane(self.order[number], index, stages, self._followers(rows), watch=watch))
            self._lanes = (rows.version, lanes)
        return self._lanes[1]

    def _stages(self, chain: Tensor) -> list[tuple[Processor, Tensor | None]]:
        """The processors of the rows' chains in order, each with the rows that use it."""
        places = chain.numpy()
        users: dict[tuple[tuple[int, int], int], tuple[Processor, list[int]]] = {}
        for number in sorted(set(places.tolist())):
            for place, processor in self.chains.items[number]:
                users.setdefault((place, id(processor)), (processor, []))[1].append(number)
        stages: list[tuple[Processor, Tensor | None]] = []
        for _, (processor, chains) in sorted(users.items(), key=lambda entry: entry[0][0]):
            mine = np.isin(places, chains)
            stages.append((processor, None if mine.all() else torch.from_numpy(np.flatnonzero(mine))))
        return stages

    def _followers(self, rows: Rows) -> list[Follower]:
        """Who keeps a record of these rows."""
        followers: list[Follower] = []
        if self.stops.state in rows.columns:
            followers.append(self.stops)
        if self.ledger.name in rows.columns:
            followers.append(self.ledger)
        if self._tracer is not None:
            followers.append(self._tracer)
        return followers


def _processors(known: Plan) -> tuple[Any, ...]:
    """What a plan's recipe adds to the user's own processors."""
    recipe = known.recipe
    return (recipe.processor,) if recipe is not None and recipe.kind == "processor" else ()


def _refuse_shared_state(chain: Sequence[tuple[Any, Processor]]) -> None:
    """Raise for two processors of one request that would write each other's column."""
    seen: dict[str, Processor] = {}
    for _, processor in chain:
        keeps = stateful(processor)
        for name in keeps.state if keeps is not None else ():
            if name in seen:
                must = f"must not hold a second processor that keeps `{name}`"
                raise InputError("logits_processor", must, getattr(processor, "function", processor))
            seen[name] = processor


def _refuse_state(chain: Sequence[tuple[Any, Processor]], known: Plan) -> None:
    """Raise for a processor whose state cannot follow a row that takes tokens back."""
    for _, processor in chain:
        if stateful(processor) is not None:
            who = (
                "`banned_phrases`, which take"
                if known.recipe is None
                else f"{known.recipe.name}, which takes"
            )
            must = f"must not hold a processor with a state beside {who} tokens back"
            raise InputError("logits_processor", must, getattr(processor, "function", processor))
