"""The data of a trace: its records, and what is derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Self

from descant.core.atomic_file import write_text
from descant.errors import TraceError
from descant.tokenization.display import TextPiece, escape_invisible, join_pieces
from descant.trace.records import (
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenTexts,
    TraceHeader,
    TraceRecord,
    TruncationRecord,
    read_records,
    to_json_line,
)
from descant.trace.tree import Tree

__all__ = [
    "MAX_TRACE_BYTES",
    "RowState",
    "StepState",
    "TraceData",
    "replay_steps",
    "text_pieces",
    "token_pieces",
]


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


MAX_TRACE_BYTES: Final = 256_000_000  # largest file that `load` reads


class TraceData:
    """The records of a run in order, the header first."""

    def __init__(self, records: Iterable[TraceRecord]) -> None:
        self.records = tuple(records)
        if not self.records or not isinstance(self.records[0], TraceHeader):
            raise TraceError("a trace must begin with its header")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace from a file; raises TraceError if the file is not a valid trace."""
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_TRACE_BYTES + 1)
        except OSError as error:
            raise TraceError(f"{path} must be a file that can be read, got {error.strerror}") from None
        if len(data) > MAX_TRACE_BYTES:
            raise TraceError(f"{path} must have at most {MAX_TRACE_BYTES} bytes, got more")
        try:
            text = data.decode("ascii")
        except UnicodeDecodeError:
            raise TraceError(f"{path} must be a trace: JSON lines in ASCII") from None
        return cls(read_records(text.splitlines()))

    def save(self, path: str | Path) -> Path:
        """Write the trace to a file, one record per line, whole or not at all."""
        write_text(path, "".join(to_json_line(one) + "\n" for one in self.records))
        return Path(path)

    # -------------------------------------------------------------------- contents
    @property
    def header(self) -> TraceHeader:
        """The header: model, version, limits."""
        first = self.records[0]
        assert isinstance(first, TraceHeader)
        return first

    @cached_property
    def requests(self) -> Mapping[int, RequestRecord]:
        """Requests by id, in order of admission."""
        return {one.request: one for one in self.records if isinstance(one, RequestRecord)}

    @cached_property
    def steps(self) -> Sequence[StepRecord]:
        """The steps in order."""
        return tuple(one for one in self.records if isinstance(one, StepRecord))

    def steps_of(self, request: int) -> list[StepRecord]:
        """The steps in which a request had rows."""
        return [one for one in self.steps if any(row.request == request for row in one.rows)]

    @cached_property
    def results(self) -> Mapping[int, ResultRecord]:
        """Results by request; a request that has not ended is absent."""
        return {one.request: one for one in self.records if isinstance(one, ResultRecord)}

    @cached_property
    def truncations(self) -> Sequence[TruncationRecord]:
        """What was left out because of the byte limit."""
        return tuple(one for one in self.records if isinstance(one, TruncationRecord))

    @cached_property
    def texts(self) -> Mapping[int, str]:
        """Text of each token, invalid UTF-8 bytes as lone surrogates; {} without a tokenizer."""
        return {
            token: text
            for one in self.records
            if isinstance(one, TokenTexts)
            for token, text in one.texts.items()
        }

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Special tokens: their text is a name."""
        return frozenset(
            token for one in self.records if isinstance(one, TokenTexts) for token in one.special
        )

    @cached_property
    def tree(self) -> Tree:
        """Every token of every hypothesis, as a tree."""
        return Tree(self.records)

    def replay(self) -> Iterator[StepState]:
        """Replay the run without the model: after every step its running rows, finished rows and results."""
        return replay_steps(self.records)


def token_pieces(trace: TraceData, token: int, mark_spaces: bool = False) -> list[TextPiece]:
    """A token as its text, as the name of a special token, or as its id if the trace has neither."""
    text = trace.texts.get(token, "")
    if not text:
        return [(f"‹{token}›", True)]
    pieces = escape_invisible(text, mark_spaces)
    return [(join_pieces(pieces), True)] if token in trace.special_tokens else pieces


def text_pieces(trace: TraceData, tokens: Iterable[int], mark_spaces: bool = False) -> list[TextPiece]:
    """The text of several tokens; a character split over tokens is joined."""
    pieces: list[TextPiece] = []
    gathered: list[str] = []
    for token in tokens:
        text = trace.texts.get(token, "")
        if text and token not in trace.special_tokens:
            gathered.append(text)
            continue
        pieces += escape_invisible(_join_texts(gathered), mark_spaces and not pieces) + token_pieces(
            trace, token
        )
        gathered = []
    return pieces + escape_invisible(_join_texts(gathered), mark_spaces and not pieces)


def _join_texts(texts: Sequence[str]) -> str:
    """Texts joined, with bytes that form a character decoded together."""
    joined = "".join(texts)
    try:
        return joined.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that encodes no byte: only in a file written by hand
        return joined
