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

from descant.core.context import Params, Values, params_of, table
from descant.core.interfaces import Cache, Peers, Wrapper
from descant.core.records import Hypothesis, Observation, Tokens
from descant.core.rows import Rows, pick, settle
from descant.engine.admission import Admission, Asked
from descant.engine.cache_factory import kind_of
from descant.engine.explain import admitted, impossible
from descant.engine.memory_check import refuse_unfitting
from descant.engine.planner import WRAPS, Plan, adapt, cache_of, refuse_cache, table_cache
from descant.engine.prefix_reuse import Begun, Recall, like_past
from descant.engine.request import Request
from descant.engine.running_requests import Roster
from descant.engine.step import step
from descant.errors import DescantError, InputError
from descant.kv_cache.cached_row import Past, inside, seat
from descant.kv_cache.prefix_cache import PrefixCache, PrefixReport
from descant.models.no_cache import Rereading, Unkept
from descant.trace.logit_summary import name_of
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["Event", "Failed", "Finished", "Report", "Request", "Session", "Tokens"]


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
        self._bare = self.model
        self._wraps: dict[str, Callable[[Any], Any]] = {name: wrap.build for name, wrap in WRAPS.items()}
        self._wrapped_by: dict[str, Wrapper] = {}
        self._states = tuple(states)
        self._shown = set(states)
        self._cache: Cache = cache_of(self.model) if cache is None else cache
        self._settled = cache is not None  # whether that is the cache for good
        self._named: str | None = None  # the name by which it was asked for
        self._recall = Recall(self.model, prefix_cache)
        self._peers: Peers | None = getattr(self.model, "peers", None)
        self._admission = Admission(model, self._bare)
        self._roster = Roster(self.model.device, self._peers, self._tracer)
        self._live = self._roster.live
        self._rows: Rows | None = None
        self._numbers = count()
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
        asked = self._admission.asked(requests, self.model.facts)
        self._settle(asked)
        begun = [self._recall.begin(one.request, one.plan, one.prompt, self._cache) for one in asked]
        made = [one.row for one in asked]
        if self._peers is not None:
            prompts, keys = [one.prompt for one in asked], [one.plan.shape for one in asked]
            self._peers.same("prompt", prompts[0], _digest(prompts, keys, made))
            timed = any(isfinite(row["deadline"]) for row in made)
            self._roster.stops.heeded |= self._peers.any(
                timed or any(one.stopping_criteria for one in requests)
            )
        numbers = [next(self._numbers) for _ in requests]
        self._wrap([one.plan for one in asked])
        self.model.open(numbers, _listed([one.inputs for one in asked]))
        try:
            for number, one in zip(numbers, asked, strict=True):
                self._enrol(number, one)
        except Exception:  # a recipe may raise what it likes
            for number in numbers:
                self._close(number)
            raise
        if self._peers is not None:
            # What processors draw by is the first one's, so that all have the same scores.
            drawn = torch.tensor([row.get("dice", -1) for row in made])
            for row, dice in zip(made, self._peers.word(drawn).tolist(), strict=True):
                row |= {"dice": dice} if "dice" in row else {}
        self._roster.noise.lines = lines or self._roster.noise.lines
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
        self._rows, selections = step(
            self.model, self._cache, rows, self._roster.lanes, self._observe, retire
        )
        self._recall.read_through(self._cache, self._rows)
        self.steps += 1
        if self._tracer is not None:
            self._tracer.stepped(self.report().cache_bytes)
        events: list[Event] = [one.emitted for one in selections if one.emitted is not None]
        for selection in selections:
            for request in selection.failed:
                known, hopeless = self._live[request], request in selection.hopeless
                events.append(
                    Failed(request, impossible(request, known.plan, known.brought, hopeless=hopeless))
                )
                known.strategy.drop(request)
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
    def _settle(self, asked: Sequence[Asked]) -> None:
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

    def _enrol(self, number: int, one: Asked) -> None:
        """Enter a request in the roster, and what its row says of it."""
        one.row["line"] = max(one.request.line, 0)
        # What comes with more than tokens is read by itself, before anything is guessed.
        one.row["beside"] = int(bool(one.request.inputs) and not self.model.facts.encoder_decoder)
        live = self._roster.enrol(number, one.request, one.plan, one.row)
        if live.drafter is not None:
            live.drafter.open([number], {name: [value] for name, value in one.request.inputs.items()})

    def _traced(self, number: int, one: Asked) -> int:
        """Tell who traces of a request; the node that stands for its prompt."""
        assert self._tracer is not None
        around = [type(self._wrapped_by[name]).__name__ for name in one.plan.wraps]
        stages = (*around, *map(name_of, self._roster.processors(number)))
        asked = admitted(number, one.prompt.tolist(), one.plan, stages, self._live[number].drafter)
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
        return rows.changed(columns={**rows.columns, **self._roster.columns(len(rows), column, prompts)})

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
            columns = {**self._roster.columns(len(old), params_of(old)), **columns}
        # Columns that nobody running needs any more are left behind.
        self._rows = old.changed(columns={name: columns[name] for name in new.columns}).cat(new)

    # -------------------------------------------------------------------- ends
    def _ended(self, request: int) -> Finished | Failed:
        """A request's sequences, as many as it asked for."""
        known = self._live[request]
        found = known.strategy.finish(request)
        wanted = known.plan.config.num_return_sequences
        if len(found) < wanted:
            # Beams can be fewer than asked for when all other continuations were ruled out.
            got = f"{len(found)} sequences of {wanted}"
            return Failed(request, impossible(request, known.plan, known.brought, got))
        return Finished(request, found[:wanted], self._recall.ended(request, found[:wanted]))

    def _close(self, request: int) -> None:
        """Forget a request and the processors and criteria that only it used."""
        self.model.close([request])
        self._recall.close(request)
        if request in self._live:  # else admission failed before it came to this one
            self._roster.strike(request)


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
