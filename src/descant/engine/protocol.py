"""The interface of an engine: all that `generate`, `stream` and a server need of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from descant.core.interfaces import ModelTraits, RankGroup
from descant.engine.events import Event, Report
from descant.engine.request import Request
from descant.errors import DescantError
from descant.trace.trace import Trace

__all__ = ["Engine"]


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

    def __len__(self) -> int:
        """The number of running requests."""
        ...

    def supports(self, request: Request) -> DescantError | None:
        """The error that `admit` would raise because of the request itself; None: it can be admitted."""
        ...

    def admit(self, *requests: Request, noise_rows: int = 0) -> list[int]:
        """Add requests, all or none; return their ids.

        `noise_rows` is for calls that share torch's generator: the number of rows that noise is drawn for.
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
