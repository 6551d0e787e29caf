"""Fault injection: code from outside the engine raises at a chosen call, and only its requests may fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch

from descant.engine.planning.planner import as_model
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Failed, Finished, Request, Session
from descant.engine.tables.table import Table
from descant.kv_cache.row_views import unwrap_cache
from descant.kv_cache.stores.paged import PagedStore
from descant.testing.outcome import Outcome

Fault = Callable[[], Any]  # raises, or returns what the call returns instead

# The methods of the parts of an engine that may come from outside.
MODEL_SEAMS: Final = ("forward", "add_requests", "remove_requests")
_PART_SEAMS: Final = {
    "strategy": ("propose", "select", "finish", "drop"),
    "drafter": ("draft", "commit", "add_requests", "remove_requests"),
    "wrapper": MODEL_SEAMS,
}
_MAX_STEPS: Final = 400


@dataclass
class FaultInjector:
    """Calls `fault` in place of call number `call` of a seam, or of every call from that one on.

    A seam is a name, such as "model.forward". `wrap` makes a function a seam, `patch` does so with the
    methods of one object.
    """

    seam: str
    call: int
    fault: Fault
    repeats: bool = False  # also at every later call
    calls: Counter[str] = field(default_factory=Counter)
    num_faults: int = 0

    def wrap(self, seam: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are counted and may be replaced by the fault."""

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls[seam] += 1
            count = self.calls[seam]
            if seam == self.seam and (count >= self.call if self.repeats else count == self.call):
                self.num_faults += 1
                return self.fault()
            return function(*args, **kwargs)

        return wrapped

    def patch(self, part: Any, name: str, methods: Sequence[str]) -> None:
        """Make methods of an object seams, called `name.method`; once for each object."""
        for method in methods:
            if method not in vars(part):
                setattr(part, method, self.wrap(f"{name}.{method}", getattr(part, method)))

    def patch_table(self, table: Table) -> None:
        """Make seams of the strategies, drafters and wrappers of a table."""
        for strategy in table.running.strategy_order:
            name = type(strategy).__name__
            self.patch(strategy, f"strategy {name}", _PART_SEAMS["strategy"])
            if strategy.drafter is not None:
                drafter = f"drafter {type(strategy.drafter).__name__}"
                self.patch(strategy.drafter, drafter, _PART_SEAMS["drafter"])
        for name, wrapper in table.wrappers.items():
            self.patch(wrapper, f"wrapper {name}", _PART_SEAMS["wrapper"])


def check_isolation(
    model: Any,
    make_requests: Callable[[FaultInjector], Sequence[Request]],
    injector: FaultInjector,
    expected: Sequence[Outcome],
    owners: Collection[int] = (),
    *,
    scheduler: SchedulerConfig | None = None,
) -> None:
    """A fault ends at most the requests it belongs to; all others have the same result as alone.

    `make_requests` gives the requests, whose own functions may be seams of the injector it is passed;
    `owners` are the indices of those with such functions, `expected` what each request gives alone. A part
    of the engine belongs to the requests that use it, a forward to none unless it fails again and again. An
    interrupted step is made again. Afterwards the session is empty, and runs the requests once more. With a
    `scheduler` the requests wait, are read in chunks and preempted as it plans.
    """
    target = as_model(model)
    injector.patch(target, "model", MODEL_SEAMS[:2])
    try:
        session = Session(target, scheduler=scheduler)
        for _ in range(2):  # the second round shows that nothing of the first is left
            run = _FaultyRun(session, injector, set(owners))
            run.run(make_requests(injector))
            run.compare(expected)
        _check_no_blocks(session)
    finally:
        for name in MODEL_SEAMS[:2]:
            delattr(target, name)


def _check_no_blocks(session: Session) -> None:
    """Raise for blocks that are still held, or counted, though no request is left."""
    blocks, waiting = session.report().blocks, session.report().waiting
    for table in session.tables:
        store = unwrap_cache(table.cache, torch.zeros(0, dtype=torch.long))[0]
        if isinstance(store, PagedStore):
            blocks += int((store.pool.ref_counts > 0).sum())
    if blocks or waiting:
        raise AssertionError(f"(blocks, waiting requests) left: {(blocks, waiting)}")


class _FaultyRun:
    """The requests of one round in a session with an injector."""

    def __init__(self, session: Session, injector: FaultInjector, owners: set[int]) -> None:
        self._session, self._injector, self._owners = session, injector, owners
        self._owner_numbers: set[int] = set()
        self._ended: dict[int, Any] = {}  # by index: the last event, or the error of a refused request
        self._index_of: dict[int, int] = {}
        for table in session.tables:
            self._watch(table)

    def _watch(self, table: Table) -> None:
        """Make seams of the parts of a table as soon as a request that uses them joins it."""
        admit = type(table).admit

        def admit_and_patch(numbers: Sequence[int], *args: Any) -> None:
            try:
                admit(table, numbers, *args)
            except Exception:
                if self._injector.seam.endswith("add_requests"):
                    self._owners.update(
                        self._index_of[number] for number in numbers if number in self._index_of
                    )
                raise
            self._injector.patch_table(table)
            for number in numbers:
                if _uses(table, number, self._injector.seam):
                    self._owner_numbers.add(number)

        vars(table)["admit"] = admit_and_patch

    def run(self, requests: Sequence[Request]) -> None:
        """Admit the requests one by one, and step until all have ended."""
        for index, request in enumerate(requests):
            self._admit(index, request)
        for _ in range(_MAX_STEPS):
            if len(self._ended) == len(requests):
                break
            try:
                events = self._session.step()
            except KeyboardInterrupt:
                continue
            for event in events:
                if isinstance(event, Finished | Failed):
                    self._ended[self._index_of[event.request]] = event
        left = (len(requests) - len(self._ended), len(self._session), self._session.rows)
        if any(left):
            raise AssertionError(f"(requests without end, running requests, rows) left: {left}")

    def _admit(self, index: int, request: Request) -> None:
        seam = self._injector.seam
        for last in (False, True):
            try:
                number = self._session.admit(request)[0]
                break
            except KeyboardInterrupt:
                if last:
                    raise
            except Exception as error:
                self._ended[index] = error
                if seam.endswith("add_requests"):
                    self._owners.add(index)
                return
        self._index_of[number] = index

    def compare(self, expected: Sequence[Outcome]) -> None:
        """Raise unless each request has ended as alone, or may fail."""
        injector = self._injector
        where = f"{injector.seam} call {injector.call}"
        self._owners.update(self._index_of[number] for number in self._owner_numbers & self._index_of.keys())
        for index, alone in enumerate(expected):
            event = self._ended[index]
            if isinstance(event, Finished):
                tokens = [hypothesis.tokens.tolist() for hypothesis in event.hypotheses]
                if tokens != alone.tokens:
                    raise AssertionError(f"request {index} differs by {where}: {tokens}, not {alone.tokens}")
            elif index not in self._owners and not (injector.repeats and injector.seam == "model.forward"):
                raise AssertionError(f"request {index} fails by {where}, which is not its own: {event}")


def _uses(table: Table, number: int, seam: str) -> bool:
    """Whether a request uses the part of the engine that a seam is a method of."""
    running = table.running.requests[number]
    parts = [
        f"strategy {type(running.strategy).__name__}",
        f"drafter {type(running.strategy.drafter).__name__}",
    ]
    parts += [f"wrapper {name}" for name in running.plan.wrappers]
    return seam.rpartition(".")[0] in parts
