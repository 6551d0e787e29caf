"""A trace gone through again without the model: the table as it stood after every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from descant.errors import TraceError
from descant.trace.records import Asked, Record, Result, Row, Run, Said, Step

__all__ = ["Moment", "Standing", "replayed"]


@dataclass(frozen=True)
class Standing:
    """A row after a step: one that goes on, or one that the step has ended."""

    request: int
    slot: int
    tokens: tuple[int, ...]  # new ones, so far
    node: int  # the last of them in the tree; its request's root where there is none
    score: float | None = None  # as beams rank it
    met: int | None = None  # tokens of its constraints that it has met
    reason: str | None = None  # why it ended; None: it goes on


@dataclass
class Moment:
    """What stood after a step, what it ended, and what was returned before the next one."""

    step: Step
    rows: tuple[Standing, ...]  # that go on
    ended: tuple[Standing, ...]
    returned: dict[int, tuple[Said, ...]] = field(default_factory=dict)  # by request; () for one that failed


def replayed(records: Iterable[Record]) -> Iterator[Moment]:
    """The moments of a trace, one a step."""
    table = _Table()
    moment: Moment | None = None
    for record in records:
        if isinstance(record, Asked):
            table.admit(record)
        elif isinstance(record, Result):
            table.rows.pop(record.request, None)
            if moment is not None:
                moment.returned[record.request] = record.sequences
        elif isinstance(record, Step):
            if moment is not None:
                yield moment
            moment = table.stepped(record)
    if moment is not None:
        yield moment


class _Table:
    """The rows that run: on which nodes they stand, and what they have written there."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[int, ...]]] = {}  # request -> node -> new tokens
        self._above: dict[int, int] = {}  # node -> its parent

    def admit(self, asked: Asked) -> None:
        """A row on the root of a new request."""
        self.rows[asked.request] = {asked.root: ()}

    def stepped(self, step: Step) -> Moment:
        """What a step makes of the rows."""
        now: list[Standing] = []
        for row in step.rows:
            before = self.rows.get(row.request, {}).get(row.at)
            if before is None:
                must = "a trace must have rows stand where the step before left them"
                raise TraceError(f"{must}, got node {row.at} of request {row.request} in step {step.step}")
            now += [self._stood(row, run, before) for run in row.runs]
        for row in step.rows:
            self.rows[row.request] = {}
        for one in now:
            if one.reason is None:
                self.rows[one.request][one.node] = one.tokens
        going = tuple(one for one in now if one.reason is None)
        return Moment(step, going, tuple(one for one in now if one.reason is not None))

    def _stood(self, row: Row, run: Run, before: tuple[int, ...]) -> Standing:
        """A row after its run."""
        if run.back > len(before) or len(run.nodes) != len(run.tokens):
            raise TraceError(
                f"a run must fit what was written, got one of request {row.request} that does not"
            )
        node = row.at
        for _ in range(run.back):
            node = self._above[node]
        for new in run.nodes:
            self._above[new] = node
            node = new
        tokens = before[: len(before) - run.back] + run.tokens
        return Standing(row.request, run.slot, tokens, node, run.score, run.met, run.reason)
