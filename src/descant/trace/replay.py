"""A trace gone through again without the model: the table as it stood after every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from descant.errors import TraceError
from descant.trace.records import (
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TraceRecord,
)

__all__ = ["RowState", "StepState", "replay_steps"]


@dataclass(frozen=True)
class RowState:
    """A row after a step: one that goes on, or one that the step has ended."""

    request: int
    slot: int
    tokens: tuple[int, ...]  # new ones, so far
    node: int  # the last of them in the tree; its request's root where there is none
    score: float | None = None  # as beams rank it
    met: int | None = None  # tokens of its constraints that it has met
    reason: str | None = None  # why it ended; None: it goes on


@dataclass
class StepState:
    """What stood after a step, what it ended, and what was returned before the next one."""

    step: StepRecord
    rows: tuple[RowState, ...]  # that go on
    finished_rows: tuple[RowState, ...]
    returned_sequences: dict[int, tuple[ReturnedSequence, ...]] = field(
        default_factory=dict
    )  # by request; () for one that failed


def replay_steps(records: Iterable[TraceRecord]) -> Iterator[StepState]:
    """The moments of a trace, one a step."""
    table = _ReplayTable()
    moment: StepState | None = None
    for record in records:
        if isinstance(record, RequestRecord):
            table.admit(record)
        elif isinstance(record, ResultRecord):
            table.rows.pop(record.request, None)
            if moment is not None:
                moment.returned_sequences[record.request] = record.sequences
        elif isinstance(record, StepRecord):
            if moment is not None:
                yield moment
            moment = table.apply_step(record)
    if moment is not None:
        yield moment


class _ReplayTable:
    """The rows that run: on which nodes they stand, and what they have written there."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[int, ...]]] = {}  # request -> node -> new tokens
        self._parents: dict[int, int] = {}  # node -> its parent

    def admit(self, asked: RequestRecord) -> None:
        """A row on the root of a new request."""
        self.rows[asked.request] = {asked.root: ()}

    def apply_step(self, step: StepRecord) -> StepState:
        """What a step makes of the rows."""
        now: list[RowState] = []
        for row in step.rows:
            before = self.rows.get(row.request, {}).get(row.at)
            if before is None:
                must = "a trace must have rows stand where the step before left them"
                raise TraceError(f"{must}, got node {row.at} of request {row.request} in step {step.step}")
            now += [self._row_after_run(row, run, before) for run in row.runs]
        for row in step.rows:
            self.rows[row.request] = {}
        for one in now:
            if one.reason is None:
                self.rows[one.request][one.node] = one.tokens
        going = tuple(one for one in now if one.reason is None)
        return StepState(step, going, tuple(one for one in now if one.reason is not None))

    def _row_after_run(self, row: RowRecord, run: RunRecord, before: tuple[int, ...]) -> RowState:
        """A row after its run."""
        if run.back > len(before) or len(run.nodes) != len(run.tokens):
            raise TraceError(
                f"a run must fit what was written, got one of request {row.request} that does not"
            )
        node = row.at
        for _ in range(run.back):
            node = self._parents[node]
        for new in run.nodes:
            self._parents[new] = node
            node = new
        tokens = before[: len(before) - run.back] + run.tokens
        return RowState(row.request, run.slot, tokens, node, run.score, run.met, run.reason)
