"""Replay of a trace without the model: the table of rows after every step."""

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
    """A row after a step: running, or finished by that step."""

    request: int
    slot: int
    tokens: tuple[int, ...]  # new tokens so far
    node: int  # node of the last new token; the request's root if there is none
    score: float | None = None  # beam score
    met: int | None = None  # fulfilled constraint tokens
    reason: str | None = None  # finish reason; None: running


@dataclass
class StepState:
    """Rows after a step, and the sequences returned before the next one."""

    step: StepRecord
    rows: tuple[RowState, ...]  # running
    finished_rows: tuple[RowState, ...]
    returned_sequences: dict[int, tuple[ReturnedSequence, ...]] = field(
        default_factory=dict
    )  # by request; () if it failed


def replay_steps(records: Iterable[TraceRecord]) -> Iterator[StepState]:
    """The states of a trace, one per step."""
    table = _ReplayTable()
    state: StepState | None = None
    for record in records:
        if isinstance(record, RequestRecord):
            table.admit(record)
        elif isinstance(record, ResultRecord):
            table.rows.pop(record.request, None)
            if state is not None:
                state.returned_sequences[record.request] = record.sequences
        elif isinstance(record, StepRecord):
            if state is not None:
                yield state
            state = table.apply_step(record)
    if state is not None:
        yield state


class _ReplayTable:
    """The running rows: their nodes and new tokens."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[int, ...]]] = {}  # request -> node -> new tokens
        self._parents: dict[int, int] = {}  # node -> its parent

    def admit(self, request: RequestRecord) -> None:
        """Add the first row of a new request, at its root."""
        self.rows[request.request] = {request.root: ()}

    def apply_step(self, step: StepRecord) -> StepState:
        """Advance the rows by one step."""
        states: list[RowState] = []
        for row in step.rows:
            before = self.rows.get(row.request, {}).get(row.at)
            if before is None:
                must = "a row must start at a node where the previous step ended"
                raise TraceError(f"{must}, got node {row.at} of request {row.request} in step {step.step}")
            states += [self._row_after_run(row, run, before) for run in row.runs]
        for row in step.rows:
            self.rows[row.request] = {}
        for one in states:
            if one.reason is None:
                self.rows[one.request][one.node] = one.tokens
        running = tuple(one for one in states if one.reason is None)
        return StepState(step, running, tuple(one for one in states if one.reason is not None))

    def _row_after_run(self, row: RowRecord, run: RunRecord, before: tuple[int, ...]) -> RowState:
        """The state of a row after its run."""
        if run.back > len(before) or len(run.nodes) != len(run.tokens):
            raise TraceError(
                "a run must have one node per token and take back at most the new tokens of its row, "
                f"got one of request {row.request} that does not"
            )
        node = row.at
        for _ in range(run.back):
            node = self._parents[node]
        for new in run.nodes:
            self._parents[new] = node
            node = new
        tokens = before[: len(before) - run.back] + run.tokens
        return RowState(row.request, run.slot, tokens, node, run.score, run.met, run.reason)
