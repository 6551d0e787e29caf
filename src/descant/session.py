"""The loop as an object: requests are admitted, stepped and cancelled; offline and server alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import isfinite
from typing import Any, NamedTuple
from weakref import WeakValueDictionary
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from descant.assistance import Assistance
from descant.cache.unkept import Rereading, Unkept
from descant.config import GenerationConfig
from descant.context import Params, Values, params_of, table
from descant.errors import DescantError, InputError, RowError
from descant.explanation import admitted
from descant.ledger import Ledger, Pages
from descant.memory import kind_of
from descant.noise import Chance
from descant.past import Past, inside, seat
from descant.ports import Cache, Drafter, Follower, Peers, Processor, Strategy, Wrapper
from descant.prefixes import PrefixCache, PrefixReport
from descant.processors import behind_the_port
from descant.recall import Begun, Recall, like_past
from descant.recipes.recipe import Recipe
from descant.request import (
    Request,
    beside,
    healed,
    prompt_of,
    refuse_uncallable,
    refuse_unguided,
    shortened,
    texts_of,
)
from descant.resolve import (
    WRAPS,
    Plan,
    adapt,
    cache_of,
    drafted,
    plan,
    refuse_cache,
    table_cache,
)
from descant.room import refuse_unfitting
from descant.rows import Column, Rows, pick
from descant.shelf import Shelf
from descant.stages import SAMPLERS
from descant.step import Hypothesis, Lane, Observation, Tokens, Watched, settle, stateful, step
from descant.stopping import Stops
from descant.trace.looks import name_of
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["Event", "Failed", "Finished", "Report", "Request", "Session", "Tokens"]

Chain = tuple[tuple[tuple[int, int], Processor], ...]  # processors, each with its place in the order


@dataclass(frozen=True)
class Finished:
    """A request has ended; its sequences, best first or in the order of their slots."""

    request: int
    hypotheses: list[Hypothesis]
    pasts: tuple[Past, ...] = ()  # what each holds, all tokens but the last, where its request says `keep`


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


class _Asked(NamedTuple):
    """What a request comes to before it is admitted."""

    request: Request
    plan: Plan
    row: dict[str, Any]  # its row's parameters
    prompt: Tensor  # [L] what is read of its tokens
    offset: int  # positions before these that have no token
    inputs: Mapping[str, Any]

    @property
    def slots(self) -> int:
        """How many positions a row of it may come to, or one that is read beside it."""
        return int(self.row["limit"]) + max(self.offset, beside(self.request))


@dataclass
class _Live:
    """What is kept of a request while it runs."""

    plan: Plan
    strategy: Strategy
    places: Mapping[str, int]  # where its processors, criteria and texts lie on their shelves
    brought: bool  # whether it has processors of its own


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
        cache: Cache | None = None,
        prefix_cache: PrefixCache | None = None,
        trace: Tracer | bool | None = None,
    ) -> None:
        self._tracer = Tracer.of(trace)
        self.model: Any = adapt(model, states)
        if isinstance(cache, Unkept):
            self.model = Rereading(self.model)
        self.steps = 0
        self._given = model
        self._bare = self.model
        self._wraps: dict[str, Callable[[Any], Any]] = {name: wrap.build for name, wrap in WRAPS.items()}
        self._wrapped_by: dict[str, Wrapper] = {}
        self._states = tuple(states)
        self._shown = set(states)
        self._cache: Cache = cache_of(self.model) if cache is None else cache
        self._settled = cache is not None  # whether that is the cache for good
        self._named: str | None = None  # the name by which it was asked for
        self._recall = Recall(self.model, prefix_cache)
        self._noise, self._stops = Chance(), Stops()
        self._peers: Peers | None = getattr(self.model, "peers", None)
        self._stops.peers = self._peers
        self._strategies: dict[tuple[Any, ...], Strategy] = {}
        self._order: list[Strategy] = []
        self._rows: Rows | None = None
        self._live: dict[int, _Live] = {}
        self._numbers = count()
        self._wrapped: WeakValueDictionary[int, Any] = WeakValueDictionary()  # users' processors, by identity
        self._chains: Shelf[Chain] = Shelf()
        self._shelves: dict[str, Shelf[Any]] = {
            "chain": self._chains, "criteria": Shelf(), "stop_table": Shelf(), "stop_pattern": Shelf(),
        }  # fmt: skip
        self._stops.criteria = self._shelves["criteria"].items
        self._stops.tables = self._shelves["stop_table"].items
        self._stops.patterns = self._shelves["stop_pattern"].items
        self._ledger = Ledger()
        self._lanes: tuple[object, list[Lane]] | None = None
        self._observe = observe
        if self._tracer is not None:
            whose = getattr(model, "model", model) if hasattr(model, "facts") else model
            self._tracer.begin(type(whose).__name__, self.model.facts.vocabulary)

    @property
    def trace(self) -> Trace | None:
        """What was recorded so far; None where nobody traces."""
        return None if self._tracer is None else self._tracer.trace

    def __len__(self) -> int:
        """How many requests are running."""
        return len(self._live)

    @property
    def rows(self) -> int:
        """How many rows are running."""
        return 0 if self._rows is None else len(self._rows)

    def admit(self, *requests: Request, lines: int = 0) -> list[int]:
        """Take requests into the table, all or none; their numbers.

        `lines` is for calls that share torch's noise: how many lines it is drawn for.
        """
        if not requests:
            return []
        asked = self._asked(requests)
        self._settle(asked)
        begun = [self._recall.begin(one.request, one.plan, one.prompt, self._cache) for one in asked]
        made = [one.row for one in asked]
        if self._peers is not None:
            prompts, keys = [one.prompt for one in asked], [one.plan.shape for one in asked]
            self._peers.same("prompt", prompts[0], _digest(prompts, keys, made))
            timed = any(isfinite(row["deadline"]) for row in made)
            self._stops.heeded |= self._peers.any(timed or any(one.stopping_criteria for one in requests))
        numbers = [next(self._numbers) for _ in requests]
        self._wrap([one.plan for one in asked])
        self.model.open(numbers, _listed([one.inputs for one in asked]))
        try:
            for number, one in zip(numbers, asked, strict=True):
                self._live[number] = self._enrolled(one.request, one.plan, one.row)
                if (drafter := self._drafter(number)) is not None:
                    drafter.open([number], {name: [value] for name, value in one.request.inputs.items()})
        except Exception:  # a recipe may raise what it likes
            for number in numbers:
                self._close(number)
            raise
        if self._peers is not None:
            # What processors draw by is the first one's, so that all have the same scores.
            drawn = torch.tensor([row.get("dice", -1) for row in made])
            for row, dice in zip(made, self._peers.word(drawn).tolist(), strict=True):
                row |= {"dice": dice} if "dice" in row else {}
        self._noise.lines = lines or self._noise.lines
        self._show()
        for number, one in zip(numbers, asked, strict=True):
            self._recall.open(number, one.request, one.plan, one.prompt, self._cache)
        new = self._fresh(numbers, [one.prompt for one in asked], [one.offset for one in asked], table(made))
        if self._tracer is not None:
            roots = [self._traced(number, one) for number, one in zip(numbers, asked, strict=True)]
            new = new.changed(columns={**new.columns, self._tracer.name: torch.tensor(roots)})
        self._append(new.changed(cached=torch.tensor([one.length for one in begun])), begun)
        return numbers

    def step(self) -> list[Event]:
        """Advance every row by one step; what became known."""
        if self._rows is None or not len(self._rows):
            return []
        if self._peers is not None:
            self._peers.check()
        if self._tracer is not None:
            self._tracer.stepping()
        rows = self._recall.read(self._bare, self._cache, self._rows)
        archive = self._recall.archive
        retire = None if archive is None else partial(archive.retire, self._cache)
        self._rows, selections = step(self.model, self._cache, rows, self._lanes_of, self._observe, retire)
        self._recall.read_through(self._cache, self._rows)
        self.steps += 1
        if self._tracer is not None:
            self._tracer.stepped(self.report().cache_bytes)
        events: list[Event] = [one.emitted for one in selections if one.emitted is not None]
        for selection in selections:
            for request in selection.failed:
                events.append(Failed(request, self._impossible(request, request in selection.hopeless)))
                self._live[request].strategy.drop(request)
                self._close(request)
            for request in selection.finished:
                events.append(self._ended(request))
                self._close(request)
        for event in events if self._tracer is not None else ():
            self._told(event)
        return events

    def _told(self, event: Event) -> None:
        """Tell who traces how a request has ended, if that is what an event says."""
        assert self._tracer is not None
        if isinstance(event, Finished):
            self._tracer.ended(event.request, event.hypotheses)
        elif isinstance(event, Failed):
            self._tracer.failed(event.request, str(event.error))

    def cancel(self, request: int) -> None:
        """Drop a request and free its rows at once."""
        if request not in self._live:
            raise InputError("request", "must be a running request", request)
        assert self._rows is not None
        keep = (self._rows.request != request).nonzero().squeeze(1)
        order = settle(keep, len(self._rows))
        keep = keep if order is None else keep[order]
        self._rows = self._rows.take(keep)
        self._cache.commit(keep, self._rows.cached)
        self._live[request].strategy.drop(request)
        self._close(request)
        if self._tracer is not None:
            self._tracer.failed(request, "cancelled")

    def report(self) -> Report:
        """What it has done so far, and what it holds."""
        bytes_held = getattr(inside(self._cache, torch.zeros(0, dtype=torch.long))[0], "nbytes", None)
        return Report(self.steps, len(self), self.rows, bytes_held, self._recall.report())

    def agreed(self, request: int) -> Tensor:
        """The new tokens that every sequence which a running request may still return begins with (host)."""
        known, rows = self._live[request], self._rows
        assert rows is not None
        index = (rows.request == request).nonzero().squeeze(1)
        written = pick(rows.tokens, index).cpu()
        mine = [
            written[line, int(rows.prompt[row]) : int(rows.length[row])]
            for line, row in enumerate(index.tolist())
        ]
        mine += [one.tokens for one in known.strategy.standing(request)]
        size = min(len(one) for one in mine)
        alike = (torch.stack([one[:size] for one in mine]) == mine[0][:size]).all(0)
        return mine[0][: int(alike.long().cumprod(0).sum())]

    def drain(self) -> Iterator[Event]:
        """Step until nothing runs."""
        while len(self):
            yield from self.step()

    # -------------------------------------------------------------------- admission
    def _planned(self, request: Request) -> Plan:
        """What a request's config comes to."""
        config = request.generation_config
        if not request.merged:
            config = GenerationConfig.merge({}, config, _own_config(self._given))
        recipe = _part(request)
        given = Assistance(
            request.assistant_model,
            request.tokenizer,
            request.assistant_tokenizer,
            recipe if recipe is not None and recipe.kind == "drafter" else None,
        )
        return plan(config, self.model.facts, drafted(config, self._bare, given), recipe)

    def _asked(self, requests: Sequence[Request]) -> list[_Asked]:
        """What requests come to, each checked by itself."""
        facts = self.model.facts
        plans: dict[tuple[int, ...], Plan] = {}
        asked = []
        for request in requests:
            known = plans.get(_sort(request))
            if known is None:
                known = plans[_sort(request)] = self._planned(request)
            ids = self._ids(request)
            tail = healed(request, known.config, ids)
            embeds = request.inputs.get("inputs_embeds") if not facts.encoder_decoder else None
            offset = 0 if embeds is None else len(embeds) - len(ids)
            if not len(ids) + offset:
                raise InputError("prompt", "must have at least one token", request.prompt)
            if known.again and not len(ids):
                must = "must come with `input_ids` of at least the last token, which is fed again"
                raise InputError("inputs_embeds", must, embeds)
            row = known.row(prompt_of(request, ids, offset, tail), facts)
            count = 0 if tail is None else len(tail)
            cut = bool(count) and not facts.encoder_decoder
            inputs = shortened(request.inputs, count) if cut else request.inputs
            refuse_uncallable(request)
            refuse_unguided(request, known.wraps, facts, row["limit"] - len(ids))
            asked.append(_Asked(request, known, row, ids[: len(ids) - count], offset, inputs))
        return asked

    def _settle(self, asked: Sequence[_Asked]) -> None:
        """Choose the cache by the first requests, or as their past is; raise for those it cannot serve."""
        settled, slots = self._settled, max(one.slots for one in asked)
        if not settled:
            shared = [len(one.prompt) for one in asked if one.plan.forks]
            configs = [one.plan.config for one in asked]
            suits = table_cache(self._bare, configs, slots, max(shared, default=0))
            self._named = kind_of(configs[0])
            pasts = (like_past(one.request) for one in asked)
            past = None if self._named is not None else next((one for one in pasts if one is not None), None)
            self._cache = suits if past is None else past
            self._settled = True
        new = [(one.plan, len(one.prompt), one.row["limit"], one.offset) for one in asked]
        try:
            for one in asked:
                refuse_cache(one.plan, self._cache, self._named, slots)
            refuse_unfitting(self._bare, self._cache, self._named, new, self._rows)
        except DescantError:
            self._settled = settled  # whoever comes next may have another cache
            raise

    def _drafter(self, request: int) -> Drafter | None:
        """Who guesses ahead for a running request."""
        drafter: Drafter | None = getattr(self._live[request].strategy, "drafter", None)
        return drafter

    def _wrap(self, plans: Sequence[Plan]) -> None:
        """Put the wrappers that these need around the model, each once and in order, recipes' outside."""
        names = {name for one in plans for name in one.wraps}
        if names <= self._wrapped_by.keys():
            return
        for one in plans:
            if one.recipe is not None and one.recipe.kind == "wrapper":
                self._wraps.setdefault(one.recipe.mark, one.recipe.build)
        inner = self._bare
        for name, build in self._wraps.items():
            if name in names and name not in self._wrapped_by:
                self._wrapped_by[name] = build(inner)
                self._wrapped_by[name].mark = name
                self._cache = self._wrapped_by[name].around(self._cache)
            if name in self._wrapped_by:
                self._wrapped_by[name].inner = inner
                inner = self._wrapped_by[name]
        self.model = inner

    def _show(self) -> None:
        """Have the model bring along the states that anybody needs."""
        needs = [getattr(one.strategy, "states", ()) for one in self._live.values()]
        needs += [
            getattr(self._wrapped_by[name], "states", ())
            for one in self._live.values()
            for name in one.plan.wraps
        ]
        wanted = {name for some in needs for name in some} | set(self._states)
        if wanted != self._shown:
            self._shown = wanted
            self.model.show(sorted(wanted))

    def _ids(self, request: Request) -> Tensor:
        """A request's prompt, checked [L]."""
        try:
            ids = torch.as_tensor(request.prompt)
        except (TypeError, ValueError, RuntimeError):
            raise InputError("prompt", "must be a sequence of token ids", request.prompt) from None
        if ids.numel() == 0:
            return ids.long().reshape(-1)
        if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InputError("prompt", "must be one sequence of token ids", request.prompt)
        size = self.model.facts.vocabulary
        if not request.merged and (int(ids.min()) < 0 or int(ids.max()) >= size):
            raise InputError("prompt", f"must hold ids from 0 to {size - 1}", request.prompt)
        return ids.long()

    def _enrolled(self, request: Request, known: Plan, row: dict[str, Any]) -> _Live:
        """Give a request its strategy, processors and stops, and its row the places of these."""
        if known.key not in self._strategies:
            self._strategies[known.key] = known.build(self._noise, self._stops, self._peers)
            self._order.append(self._strategies[known.key])
        strategy = self._strategies[known.key]
        row["lane"] = self._order.index(strategy)
        row["line"] = max(request.line, 0)
        # What comes with more than tokens is read by itself, before anything is guessed.
        row["beside"] = int(bool(request.inputs) and not self.model.facts.encoder_decoder)
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
            name: -1 if thing is None else self._shelves[name].put(key, thing)
            for name, (thing, key) in keys.items()
        }
        row |= places
        if texts.phrases is not None:
            row["phrases"] = texts.phrases
        if texts.breakers is not None:
            row["dry_sequence_breakers"] = texts.breakers
        return _Live(known, strategy, places, bool(request.logits_processor))

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
            wrapped = self._wrapped.get(id(one))
            if wrapped is None:
                wrapped = self._wrapped[id(one)] = behind_the_port(one)
            chain.append(((known.custom, number), wrapped))
        _refuse_shared_state(chain)
        return tuple(sorted(chain, key=lambda entry: entry[0]))

    def _traced(self, number: int, one: _Asked) -> int:
        """Tell who traces of a request; the node that stands for its prompt."""
        assert self._tracer is not None
        around = [type(self._wrapped_by[name]).__name__ for name in one.plan.wraps]
        chain = self._chains.items[self._live[number].places["chain"]]
        stages = (*around, *(name_of(processor) for _, processor in chain))
        asked = admitted(number, one.prompt.tolist(), one.plan, stages, self._drafter(number))
        return self._tracer.admit(asked, " and ".join(around) or type(self.model).__name__)

    def _fresh(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Tensor],
        offsets: Sequence[int],
        params: Values,
    ) -> Rows:
        """One row a request, nothing of it cached."""
        length = torch.tensor([len(prompt) for prompt in prompts])
        column = Params(params)
        room = int((column["limit"] - length).max())
        tokens = torch.zeros(len(prompts), int(length.max()) + min(room, 256), dtype=torch.long)
        for line, prompt in enumerate(prompts):
            tokens[line, : len(prompt)] = prompt
        zeros = torch.zeros_like(length)
        rows = Rows(
            tokens.to(self.model.device),
            length=length,
            cached=zeros,
            offset=torch.tensor(offsets),
            prompt=length.clone(),
            request=torch.tensor(numbers),
            slot=zeros.clone(),
            columns={"params": column},
        )
        return rows.changed(columns={**rows.columns, **self._started(len(rows), column, prompts)})

    def _started(
        self, count: int, params: Params, prompts: Sequence[Tensor] = ()
    ) -> dict[str, Tensor | Column]:
        """The columns that anybody in the table needs, as rows have them that begin."""
        columns: dict[str, Tensor | Column] = {}
        for strategy in self._order:
            for name, start in strategy.columns.items():
                columns[name] = (
                    start.repeat(count, *[1] * (start.ndim - 1))
                    if isinstance(start, Tensor)
                    else start.take(torch.zeros(count, dtype=torch.long))
                )
        for chain in self._chains.items.values():
            for _, processor in chain:
                keeps = stateful(processor)
                for name, value in keeps.state.items() if keeps is not None else ():
                    columns[name] = torch.full((count,), value, device=self.model.device)
        if self._stops.tables:
            own = params["stop_table"].tolist()
            state = (
                [
                    self._stops.tables[place].run(prompt.tolist()) if place >= 0 else 0
                    for place, prompt in zip(own, prompts, strict=True)
                ]
                if prompts
                else [0] * count
            )
            columns[self._stops.state] = torch.tensor(state)
        deepest = max((one.plan.values["logprobs"] for one in self._live.values()), default=-1)
        if deepest >= 0:
            columns[self._ledger.name] = Pages.empty(count, deepest, self.model.device)
        return columns

    def _append(self, new: Rows, begun: Sequence[Begun]) -> None:
        """Put fresh rows below the table, whose rows get the columns of what they met only now."""
        pasts = [one.past for one in begun]
        if any(pasts):
            seat(self._cache, pasts)
            held = new.cached if self._rows is None else torch.cat((self._rows.cached, new.cached))
            self._cache.commit(None, held)
        else:
            self._cache.extend(len(new))
        if self._rows is None or not len(self._rows):
            self._rows = new
            return
        old = self._rows
        columns = dict(old.columns)
        if not new.columns.keys() <= columns.keys():
            columns = {**self._started(len(old), params_of(old)), **columns}
        # Columns that nobody running needs any more are left behind.
        self._rows = old.changed(columns={name: columns[name] for name in new.columns}).cat(new)

    # -------------------------------------------------------------------- the layout of the table
    def _lanes_of(self, rows: Rows) -> Sequence[Lane]:
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
                lanes.append(Lane(self._order[number], index, stages, self._followers(rows), watch=watch))
            self._lanes = (rows.version, lanes)
        return self._lanes[1]

    def _stages(self, chain: Tensor) -> list[tuple[Processor, Tensor | None]]:
        """The processors of the rows' chains in order, each with the rows that use it."""
        places = chain.numpy()
        users: dict[tuple[tuple[int, int], int], tuple[Processor, list[int]]] = {}
        for number in sorted(set(places.tolist())):
            for place, processor in self._chains.items[number]:
                users.setdefault((place, id(processor)), (processor, []))[1].append(number)
        stages: list[tuple[Processor, Tensor | None]] = []
        for _, (processor, chains) in sorted(users.items(), key=lambda entry: entry[0][0]):
            mine = np.isin(places, chains)
            stages.append((processor, None if mine.all() else torch.from_numpy(np.flatnonzero(mine))))
        return stages

    def _followers(self, rows: Rows) -> list[Follower]:
        """Who keeps a record of these rows."""
        followers: list[Follower] = []
        if self._stops.state in rows.columns:
            followers.append(self._stops)
        if self._ledger.name in rows.columns:
            followers.append(self._ledger)
        if self._tracer is not None:
            followers.append(self._tracer)
        return followers

    # -------------------------------------------------------------------- ends
    def _ended(self, request: int) -> Finished | Failed:
        """A request's sequences, as many as it asked for."""
        known = self._live[request]
        found = known.strategy.finish(request)
        wanted = known.plan.config.num_return_sequences
        if len(found) < wanted:
            # Beams can be fewer than asked for when all other continuations were ruled out.
            return Failed(request, self._impossible(request, got=f"{len(found)} sequences of {wanted}"))
        return Finished(request, found[:wanted], self._recall.ended(request, found[:wanted]))

    def _impossible(
        self, request: int, hopeless: bool = False, got: str = "only scores of -inf or NaN"
    ) -> RowError:
        """The error of a request that cannot go on, naming what may have ruled everything out."""
        live = self._live[request]
        config = live.plan.config
        # A sampler leaves something of what there is, but a number that was asked for may overflow.
        names = [
            f"`{name}`"
            for _, stage in live.plan.chain
            if stage.wanted(config)
            for name in stage.fields
            if stage not in SAMPLERS or config.source(name) != "default"
        ]
        names += ["`recipe`"] if live.plan.recipe is not None else []
        names += ["`logits_processor`"] if live.brought else []
        names += ["`num_return_sequences`"] if config.num_return_sequences > 1 else []
        whose = "the model" if hopeless or not names else " and ".join(names)
        do = "look at its logits" if hopeless or not names else "loosen it"
        must = f"{whose} must leave enough to choose from"
        return RowError(f"{must}, got {got}: {do} (request {request})", request)

    def _close(self, request: int) -> None:
        """Forget a request and the processors and criteria that only it used."""
        self.model.close([request])
        self._recall.close(request)
        if request not in self._live:  # admission failed before it came to this one
            return
        if (drafter := self._drafter(request)) is not None:
            drafter.close([request])
        gone = self._live.pop(request)
        for name, place in gone.places.items():
            self._shelves[name].drop(place)
        if not self._live:
            self._lanes = None  # it holds on to what the last ones used


def _sort(request: Request) -> tuple[int, ...]:
    """What tells requests apart that come to the same plan."""
    told = (request.generation_config, request.assistant_model, request.assistant_tokenizer, request.recipe)
    return tuple(map(id, told))


def _part(request: Request) -> Recipe | None:
    """A request's recipe, which must be a part of the loop."""
    if request.recipe is None:
        return None
    recipe = Recipe.of(request.recipe)
    if recipe.kind == "generate":
        must = "must be a part of the loop here, a function has a loop of its own"
        raise InputError("recipe", must, recipe, "use descant.generate")
    return recipe


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


def _own_config(model: Any) -> GenerationConfig | None:
    """The model's own generation config."""
    theirs = getattr(getattr(model, "model", model), "generation_config", None)
    theirs = getattr(model, "generation_config", theirs)
    if theirs is None or isinstance(theirs, GenerationConfig):
        return theirs
    return GenerationConfig.from_transformers(theirs)


def _digest(prompts: Sequence[Tensor], keys: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> int:
    """A number that differs where prompts do, or how many rows they become and for how long."""
    told = crc32(repr([keys, *((row["limit"], row["copies"], row["eos"]) for row in rows)]).encode())
    for prompt in prompts:
        told = crc32(prompt.cpu().numpy().tobytes(), told)
    return told


def _listed(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What requests give, by name, None where one gives nothing."""
    names = dict.fromkeys(name for one in inputs for name in one)
    return {name: [one.get(name) for one in inputs] for name in names}
