"""The loop as an object: requests are admitted, stepped and cancelled; offline and server alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.config import GenerationConfig
from descant.context import Params, params_of
from descant.errors import DescantError, InputError, RowError
from descant.noise import Chance
from descant.ports import Processor, Strategy
from descant.processors import UserProcessors
from descant.resolve import CUSTOM, STAGES, Plan, Prompt, adapt, new_cache, plan, table
from descant.rows import Column, Rows
from descant.step import Hypothesis, Lane, Observation, Tokens, settle, step
from descant.stopping import Criterion, Stops

__all__ = ["Event", "Failed", "Finished", "Request", "Session", "Tokens"]

_BITS = 62  # a request names its users' processors and criteria by bits of an int64


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to continue it.

    `prompt` holds the token ids (of the decoder, for encoder-decoder models; empty where the prompt is
    given as `inputs["inputs_embeds"]` alone). `inputs` holds what else the model wants, without a batch
    dimension: `inputs_embeds`, or an encoder's `input_ids` and `attention_mask`.
    """

    prompt: Tensor | Sequence[int]
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Criterion] = ()
    width: int = 0  # of the padded prompts it came with; a user's processor is shown ids of that width
    line: int = -1  # which line of torch's noise is its own; -1: it draws from a stream of its own
    merged: bool = False  # the config has taken in the model's own already


@dataclass(frozen=True)
class Finished:
    """A request has ended; its sequences, best first or in the order of their slots."""

    request: int
    hypotheses: list[Hypothesis]


@dataclass(frozen=True)
class Failed:
    """A request could not go on; the others are unharmed."""

    request: int
    error: DescantError


Event = Tokens | Finished | Failed


@dataclass
class _Live:
    """What is kept of a request while it runs."""

    plan: Plan
    strategy: Strategy
    bits: tuple[int, ...]  # of its users' processors
    marks: tuple[int, ...]  # of its criteria


class Session:
    """A table of running requests and the loop over it: `admit`, `step`, `cancel`.

    Requests of any length, config and strategy share the forward of a step; each has the same result as
    alone. A row leaves, and its memory with it, in the step that ends it.
    """

    def __init__(
        self,
        model: Any,
        *,
        states: Sequence[str] = (),
        observe: Callable[[Observation], None] | None = None,
    ) -> None:
        self.model = adapt(model, states)
        self.steps = 0
        self._given = model
        self._cache = new_cache()
        self._noise, self._stops = Chance(), Stops()
        self._strategies: dict[tuple[Any, ...], Strategy] = {}
        self._order: list[Strategy] = []
        self._rows: Rows | None = None
        self._live: dict[int, _Live] = {}
        self._numbers = count()
        self._custom: dict[int, UserProcessors] = {}  # what requests bring along, by bit
        self._lanes: tuple[object, list[Lane]] | None = None
        self._observe = observe

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
        plans: dict[int, Plan] = {}
        made, prompts, offsets = [], [], []
        for request in requests:
            known = plans.get(id(request.generation_config))
            if known is None:
                known = plans[id(request.generation_config)] = self._planned(request)
            ids = self._ids(request)
            embeds = request.inputs.get("inputs_embeds") if not self.model.facts.encoder_decoder else None
            offsets.append(0 if embeds is None else len(embeds) - len(ids))
            if not len(ids) + offsets[-1]:
                raise InputError("prompt", "must have at least one token", request.prompt)
            made.append(known.row(Prompt(len(ids), offsets[-1], request.width), self.model.facts))
            prompts.append(ids)
            _refuse_uncallable(request)
        numbers = [next(self._numbers) for _ in requests]
        self.model.open(numbers, _listed([request.inputs for request in requests]))
        try:
            for number, request, row in zip(numbers, requests, made, strict=True):
                self._live[number] = self._enrolled(request, plans[id(request.generation_config)], row)
        except InputError:
            for number in numbers:
                self._close(number)
            raise
        self._noise.lines = lines or self._noise.lines
        self._append(self._fresh(numbers, prompts, offsets, table(made)))
        return numbers

    def step(self) -> list[Event]:
        """Advance every row by one step; what became known."""
        if self._rows is None or not len(self._rows):
            return []
        self._rows, selections = step(self.model, self._cache, self._rows, self._lanes_of, self._observe)
        self.steps += 1
        events: list[Event] = [one.emitted for one in selections if one.emitted is not None]
        for selection in selections:
            for request in selection.failed:
                events.append(Failed(request, self._impossible(request)))
                self._live[request].strategy.drop(request)
                self._close(request)
            for request in selection.finished:
                events.append(self._ended(request))
                self._close(request)
        return events

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
        return plan(config, self.model.facts)

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
        """Give a request its strategy, processors and criteria, and its row the numbers of these."""
        if known.key not in self._strategies:
            self._strategies[known.key] = known.build(self._noise, self._stops)
            self._order.append(self._strategies[known.key])
        strategy = self._strategies[known.key]
        row["lane"] = self._order.index(strategy)
        row["line"] = max(request.line, 0)
        if row["seed"] < 0 and request.line < 0 and known.config.do_sample:
            # Without a seed a request outside a batch gets one by chance, so that its luck is its own.
            row["seed"] = int(torch.randint(2**62, ()))
        row["chain"], bits = self._chain(known, request.logits_processor)
        marks = tuple(
            _bit(self._stops.foreign, lambda: one, lambda kept: kept is one, "stopping_criteria")  # noqa: B023
            for one in request.stopping_criteria
        )
        row["criteria"] = sum(1 << mark for mark in set(marks))
        return _Live(known, strategy, bits, marks)

    def _chain(self, known: Plan, given: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
        """The bits of a request's processors: the built-in ones, and one for all that it brings along."""
        kinds = {type(one) for one in given}
        # A processor given by hand takes the place of the one that the config would make.
        built = [at for at in known.stages if at >= CUSTOM or type(STAGES[at].processor) not in kinds]
        chain = sum(1 << at for at in built)
        if not given:
            return chain, ()
        bit = _bit(
            self._custom, lambda: UserProcessors(given), lambda kept: kept.same(given), "logits_processor"
        )
        return chain | 1 << (len(STAGES) + bit), (bit,)

    def _fresh(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Tensor],
        offsets: Sequence[int],
        params: dict[str, Tensor],
    ) -> Rows:
        """One row a request, nothing of it cached."""
        length = torch.tensor([len(prompt) for prompt in prompts])
        room = int((params["limit"] - length).max())
        tokens = torch.zeros(len(prompts), int(length.max()) + min(room, 256), dtype=torch.long)
        for line, prompt in enumerate(prompts):
            tokens[line, : len(prompt)] = prompt
        zeros = torch.zeros_like(length)
        columns: dict[str, Tensor | Column] = {"params": Params(params)}
        for strategy in self._order:
            for name, start in strategy.columns.items():
                columns[name] = start.repeat(len(prompts), *[1] * (start.ndim - 1))
        return Rows(
            tokens.to(self.model.device),
            length=length,
            cached=zeros,
            offset=torch.tensor(offsets),
            prompt=length.clone(),
            request=torch.tensor(numbers),
            slot=zeros.clone(),
            columns=columns,
        )

    def _append(self, new: Rows) -> None:
        """Put fresh rows below the table, whose rows get the columns of strategies they met only now."""
        self._cache.extend(len(new))
        if self._rows is None or not len(self._rows):
            self._rows = new
            return
        columns = dict(self._rows.columns)
        for name in new.columns.keys() - columns.keys():
            start = new.columns[name]
            assert isinstance(start, Tensor)
            columns[name] = start[:1].repeat(len(self._rows), *[1] * (start.ndim - 1))
        self._rows.columns = columns
        self._rows = self._rows.cat(new)

    # -------------------------------------------------------------------- the layout of the table
    def _lanes_of(self, rows: Rows) -> Sequence[Lane]:
        """The table by strategy, with the processors its rows use; kept while nobody comes or goes."""
        if self._lanes is None or self._lanes[0] != rows.version:
            params = params_of(rows)
            lane, chain = params["lane"], params["chain"]
            lanes = []
            for number in sorted(set(lane.tolist())):
                index = (lane == number).nonzero().squeeze(1)
                whole = len(index) == len(rows)
                stages = self._stages(chain if whole else chain[index])
                lanes.append(Lane(self._order[number], None if whole else index, stages))
            self._lanes = (rows.version, lanes)
        return self._lanes[1]

    def _stages(self, chain: Tensor) -> list[tuple[Processor, Tensor | None]]:
        """The processors that any row's bits name, in order, each with the rows that do."""
        built = [(at, stage.processor) for at, stage in enumerate(STAGES)]
        custom = [(len(STAGES) + bit, one) for bit, one in sorted(self._custom.items())]
        anybody, everybody = (int(fold.reduce(chain.numpy())) for fold in (np.bitwise_or, np.bitwise_and))
        stages: list[tuple[Processor, Tensor | None]] = []
        for bit, processor in built[:CUSTOM] + custom + built[CUSTOM:]:
            if everybody >> bit & 1:
                stages.append((processor, None))
            elif anybody >> bit & 1:
                stages.append((processor, ((chain >> bit) & 1).nonzero().squeeze(1)))
        return stages

    # -------------------------------------------------------------------- ends
    def _ended(self, request: int) -> Finished | Failed:
        """A request's sequences, as many as it asked for."""
        known = self._live[request]
        found = known.strategy.finish(request)
        wanted = known.plan.config.num_return_sequences
        if len(found) < wanted:
            # Beams can be fewer than asked for when all other continuations were ruled out.
            return Failed(request, self._impossible(request, f"{len(found)} sequences of {wanted}"))
        return Finished(request, found[:wanted])

    def _impossible(self, request: int, got: str = "only scores of -inf or NaN") -> RowError:
        """The error of a request that cannot go on, naming what may have ruled everything out."""
        known = self._live[request].plan
        names = [f"`{name}`" for at in known.stages for name in STAGES[at].fields]
        names += ["`num_return_sequences`"] if known.config.num_return_sequences > 1 else []
        whose = " and ".join(names) or "the model"
        return RowError(
            f"{whose} must leave enough to choose from, got {got}: loosen it (request {request})", request
        )

    def _close(self, request: int) -> None:
        """Forget a request and the processors and criteria that only it used."""
        self.model.close([request])
        gone = self._live.pop(request, None)
        if gone is None:  # admission failed before it came to this one
            return
        for bits, mine, store in (
            ("bits", gone.bits, self._custom),
            ("marks", gone.marks, self._stops.foreign),
        ):
            used = {bit for one in self._live.values() for bit in getattr(one, bits)} if mine else set()
            for bit in set(mine) - used:
                store.pop(bit)


def _own_config(model: Any) -> GenerationConfig | None:
    """The model's own generation config."""
    theirs = getattr(getattr(model, "model", model), "generation_config", None)
    theirs = getattr(model, "generation_config", theirs)
    if theirs is None or isinstance(theirs, GenerationConfig):
        return theirs
    return GenerationConfig.from_transformers(theirs)


def _refuse_uncallable(request: Request) -> None:
    """Raise for processors and criteria that cannot be called."""
    for name in ("logits_processor", "stopping_criteria"):
        for one in getattr(request, name):
            if not callable(one):
                raise InputError(name, "must hold callables", one)


def _bit(store: dict[int, Any], make: Callable[[], Any], same: Callable[[Any], bool], name: str) -> int:
    """The bit under which `store` keeps something, put there when new."""
    for bit, kept in store.items():
        if same(kept):
            return bit
    free = next((bit for bit in range(_BITS - len(STAGES)) if bit not in store), None)
    if free is None:
        do = "share them between requests"
        raise InputError(name, "must not hold so many different ones at once", len(store) + 1, do)
    store[free] = make()
    return free


def _listed(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What requests give, by name, None where one gives nothing."""
    names = dict.fromkeys(name for one in inputs for name in one)
    return {name: [one.get(name) for one in inputs] for name in names}
