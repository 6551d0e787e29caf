"""The interface of an engine: all that `generate`, `stream` and a server need of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, RankGroup
from descant.engine.events import Event, Report
from descant.engine.request import Request
from descant.errors import DescantError
from descant.trace.trace import Trace

__all__ = ["Engine", "is_engine"]


class Engine(Protocol):
    """Runs requests step by step; requests may be admitted and cancelled between any two steps.

    An engine is used by one thread at a time, and not from inside a step: it raises `SessionBusy` otherwise.
    Every admitted request ends in exactly one `Finished` or `Failed` event, unless it is cancelled.
    """

    @property
    def traits(self) -> ModelTraits:
        """The traits of its model, with which prompts are prepared."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its prompts and results."""
        ...

    @property
    def rank_group(self) -> RankGroup | None:
        """The processes that run the same requests; None: there is one."""
        ...

    @property
    def trace(self) -> Trace | None:
        """The recorded steps; None: it does not record."""
        ...

    @property
    def rows(self) -> int:
        """The number of running rows."""
        ...

    @property
    def running(self) -> Iterable[int]:
        """The requests that run and have not ended."""
        ...

    @property
    def num_waiting(self) -> int:
        """The requests that wait for room."""
        ...

    @property
    def beam_requests(self) -> Collection[int]:
        """The running requests whose tokens come only at their end."""
        ...

    def __len__(self) -> int:
        """The number of running requests."""
        ...

    def supports(self, request: Request) -> DescantError | None:
        """The error that `admit` would raise because of the request itself; None: it can be admitted."""
        ...

    def has_grammar(self, request: Request) -> bool:
        """Whether a request has a grammar that is not compiled yet."""
        ...

    def compile_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled; any thread may call it beside a step."""
        ...

    def admit(
        self, *requests: Request, noise_rows: int = 0, numbers: Sequence[int] | None = None
    ) -> list[int]:
        """Add requests, all or none; return their ids.

        `noise_rows` is for calls that share torch's generator: the number of rows that noise is drawn for.
        `numbers` are ids that the caller chooses, for all requests of the engine or for none.
        """
        ...

    def step(self) -> list[Event]:
        """Advance every row by one step; return what happened."""
        ...

    def cancel(self, request: int) -> None:
        """Remove a request and free its rows at once."""
        ...

    def drain(self) -> Iterator[Event]:
        """Step until no request is running."""
        ...

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        ...

    def report(self) -> Report:
        """What it has done so far, and what it holds."""
        ...


def is_engine(candidate: object) -> TypeGuard[Engine]:
    """Whether an object runs requests itself, as a model does not."""
    # `isinstance` of a protocol is slow, and this runs in every call.
    return hasattr(candidate, "admit") and hasattr(candidate, "step")
