"""Two engines as one: what the first cannot run, the second does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, RankGroup
from descant.engine.protocol import Engine, Event, Failed, Finished, Report
from descant.engine.request import Request
from descant.engine.scheduling.config import SchedulerConfig
from descant.errors import DescantError, InputError
from descant.trace.trace import Trace


class FallbackEngine:
    """Runs each request on `first`, or on `second` where the first refuses it.

    Both must have the same model: `FallbackEngine(descant.VLLM("models/smollm2"), descant.Session(model))`
    runs beams in a session and everything that vLLM can do on vLLM. It implements the `Engine` interface.
    """

    def __init__(self, first: Engine, second: Engine) -> None:
        if first.traits.vocab_size != second.traits.vocab_size:
            must = f"must have the model of the first engine, with {first.traits.vocab_size} tokens"
            raise InputError("second", must, f"{second.traits.vocab_size} tokens")
        self._engines = (first, second)
        self._owners: dict[int, Engine] = {}
        self._undelivered: list[Event] = []  # of a step in which another engine raised
        self._request_ids = count()

    @property
    def traits(self) -> ModelTraits:
        """The traits of the model, with the positions that both engines have."""
        first, second = (engine.traits for engine in self._engines)
        limits = [traits.max_positions for traits in (first, second) if traits.max_positions is not None]
        return replace(second, max_positions=min(limits, default=None))

    @property
    def generation_config(self) -> Any:
        """The model's own config."""
        first, second = self._engines
        model = getattr(second, "model", None)
        config = getattr(getattr(model, "network", None), "generation_config", None)
        return getattr(first, "generation_config", config)

    @property
    def scheduler_config(self) -> SchedulerConfig | None:
        """The limits of the first engine."""
        config: SchedulerConfig | None = getattr(self._engines[0], "scheduler_config", None)
        return config

    @property
    def device(self) -> torch.device:
        """The device of the prompts and results."""
        return self._engines[1].device

    @property
    def rank_group(self) -> RankGroup | None:
        """The processes that run the same requests; None: there is one."""
        return self._engines[1].rank_group

    @property
    def trace(self) -> Trace | None:
        """It does not record."""
        return None

    @property
    def rows(self) -> int:
        """The number of running rows."""
        return sum(engine.rows for engine in self._engines)

    @property
    def running(self) -> Iterable[int]:
        """The requests that run and have not ended."""
        return [request_id for engine in self._engines for request_id in engine.running]

    @property
    def num_waiting(self) -> int:
        """The requests that wait for room."""
        return sum(engine.num_waiting for engine in self._engines)

    @property
    def beam_requests(self) -> set[int]:
        """The running requests whose tokens come only at their end."""
        return {request_id for engine in self._engines for request_id in engine.beam_requests}

    def __len__(self) -> int:
        """The number of requests that have not ended."""
        return sum(map(len, self._engines))

    def engine_of(self, request: Request) -> Engine:
        """The engine that would run a request."""
        first, second = self._engines
        return first if first.supports(request) is None else second

    def supports(self, request: Request) -> DescantError | None:
        """The error that `admit` would raise because of the request itself; None: it can be admitted."""
        return self.engine_of(request).supports(request)

    def has_grammar(self, request: Request) -> bool:
        """Whether a request has a grammar that is not compiled yet."""
        return self._engines[1].has_grammar(request)

    def compile_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled; any thread may call it beside a step."""
        return self._engines[1].compile_grammar(request)

    def admit(
        self, *requests: Request, noise_rows: int = 0, numbers: Sequence[int] | None = None
    ) -> list[int]:
        """Add requests, all or none; return their ids."""
        request_ids = list(numbers or (next(self._request_ids) for _ in requests))
        admitted: list[int] = []
        try:
            for request_id, request in zip(request_ids, requests, strict=True):
                engine = self.engine_of(request)
                engine.admit(request, noise_rows=noise_rows, numbers=[request_id])
                self._owners[request_id] = engine
                admitted.append(request_id)
        except BaseException:
            for request_id in admitted:
                self.cancel(request_id)
            raise
        return request_ids

    def step(self) -> list[Event]:
        """Advance every row of both engines by one step; return what happened."""
        events, self._undelivered = self._undelivered, []
        for engine in self._engines:
            try:
                events += engine.step() if len(engine) else ()
            except BaseException:
                self._undelivered = events  # for the next step
                raise
        for event in events:
            if isinstance(event, Finished | Failed):
                self._owners.pop(event.request, None)
        return events

    def cancel(self, request: int) -> None:
        """Remove a request and free its rows at once."""
        engine = self._owners.pop(request, None)
        if engine is None:
            raise InputError("request", "must be a running request", request)
        engine.cancel(request)

    def drain(self) -> Iterator[Event]:
        """Step until no request is running."""
        while len(self) or self._undelivered:
            yield from self.step()

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        return self._owners[request].common_prefix(request)

    def report(self) -> Report:
        """The work of both so far, and their content."""
        first, second = (engine.report() for engine in self._engines)
        names = ("steps", "requests", "rows", "waiting", "preemptions", "blocks")
        sums = {name: getattr(first, name) + getattr(second, name) for name in names}
        return replace(second, **sums)


_ENGINE: type[Engine] = FallbackEngine  # for the type checker
