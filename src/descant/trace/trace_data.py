"""The data of a trace: its records, the tree of its tokens, the replay of its steps, a part to be drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from descant.core.atomic_file import write_text
from descant.errors import InputError, TraceError
from descant.tokenization.display import TextPiece, escape_invisible, join_pieces
from descant.trace.records import (
    ChoiceRecord,
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


@dataclass
class Node:
    """One token below its parent; the root of a request stands for its prompt."""

    number: int
    request: int
    parent: int | None  # None: a root
    token: int | None = None  # None: a root
    depth: int = 0  # new tokens up to here
    step: int = -1  # the step that added it; -1: a root
    dropped_step: int | None = None  # the step that dropped the last row at or below it; None: not dropped
    slot: int = 0
    group: int = 0
    raw: float | None = None  # log-probability before the processors; None: not recorded
    processed: float | None = None  # log-probability after the processors
    score: float | None = None
    met: int | None = None
    is_draft: bool = False
    reason: str | None = None  # finish reason of the row that ended here
    rank: int | None = None  # rank of the returned sequence that ends here
    # The choice that produced it; None: not recorded.
    choice: ChoiceRecord | None = field(default=None, repr=False)
    children: list[int] = field(default_factory=list)
    on_best_path: bool = False  # on the path of the best sequence
    on_returned_path: bool = False  # on the path of any returned sequence

    @property
    def state(self) -> str:
        """Final state: "best", "returned", "ended" (not returned), "dropped" or "alive"."""
        if self.on_best_path or self.on_returned_path:
            return "best" if self.on_best_path else "returned"
        if self.reason is not None:
            return "ended"
        return "alive" if self.dropped_step is None else "dropped"


class Tree:
    """All nodes of a trace by number, and the roots of its requests."""

    def __init__(self, records: Iterable[TraceRecord]) -> None:
        self.nodes: dict[int, Node] = {}
        self.roots: dict[int, int] = {}  # request -> node
        self._requests: dict[int, RequestRecord] = {}
        self._active_nodes: dict[int, list[int]] = {}  # request -> nodes of its running rows
        self._ref_counts: dict[int, int] = {}  # node -> rows at it plus children with a reference
        self._jumps: dict[int, int] = {}  # node -> an ancestor farther up, so that climbing takes few steps
        for record in records:
            if isinstance(record, RequestRecord):
                self._add_request(record)
            elif isinstance(record, StepRecord):
                self._add_step(record)
            elif isinstance(record, ResultRecord):
                self._add_result(record)

    def path_to(self, number: int) -> list[Node]:
        """The nodes from the first new token to this one, without the root."""
        nodes: list[Node] = []
        node = self.node(number)
        while node.parent is not None:
            nodes.append(node)
            node = self.node(node.parent)
        return nodes[::-1]

    def request_nodes(self, request: int) -> list[Node]:
        """The nodes of a request by number, its root first."""
        return [node for node in self.nodes.values() if node.request == request]

    def node(self, number: int) -> Node:
        """A node by number; raises TraceError if no record created it."""
        if number not in self.nodes:
            raise TraceError(f"node {number} must be created before it is used")
        return self.nodes[number]

    # -------------------------------------------------------------------- construction
    def _add_request(self, request: RequestRecord) -> None:
        self._add_node(Node(request.root, request.request, None))
        self.roots[request.request] = request.root
        self._requests[request.request] = request
        self._active_nodes[request.request] = [request.root]
        self._ref_counts[request.root] += 1

    def _add_step(self, step: StepRecord) -> None:
        new_nodes: dict[int, list[int]] = {}
        for row in step.rows:
            if row.request not in self._active_nodes:
                raise TraceError(f"request {row.request} must be running when a step has rows of it")
            request_nodes = new_nodes.setdefault(row.request, [])
            for run in row.runs:
                last = self._add_run(step.step, row, run)
                if run.reason is None:
                    request_nodes.append(last)
        for request, numbers in new_nodes.items():
            for number in numbers:
                self._ref_counts[number] += 1
            for number in self._active_nodes[request]:
                self._release(number, step.step)
            self._active_nodes[request] = numbers

    def _add_run(self, step: int, row: RowRecord, run: RunRecord) -> int:
        """Add the nodes of a run; returns the number of the last."""
        if len(run.tokens) != len(run.nodes):
            raise TraceError(
                f"a run must have a node for each token, got {len(run.nodes)} of {len(run.tokens)}"
            )
        parent = self._ancestor(self.node(row.at), run.back)
        request = self._requests[row.request]
        num_drafts = num_accepted_drafts(row, run, request)
        for index, (token, number) in enumerate(zip(run.tokens, run.nodes, strict=True)):
            choice = row.looks[index] if index < len(row.looks) else None
            candidates = () if choice is None else choice.top
            candidate = next((entry for entry in candidates if entry.token == token), None)
            node = Node(
                number,
                row.request,
                parent.number,
                token,
                parent.depth + 1,
                step,
                slot=run.slot,
                group=run.slot * request.groups // max(request.beams, 1),
                raw=None if candidate is None else candidate.raw,
                processed=None if candidate is None else candidate.processed,
                is_draft=index < num_drafts,
                choice=choice,
            )
            self._add_node(node)
            parent.children.append(number)
            self._ref_counts[parent.number] += 1
            parent = node
        parent.score, parent.met = run.score, run.met
        if run.reason is not None:
            parent.reason = run.reason
            if not self._ref_counts[parent.number]:
                self._ref_counts[parent.number] = 1
                self._release(parent.number, step)
        return parent.number

    def _ancestor(self, node: Node, levels: int) -> Node:
        """The node so many levels above; a path of n nodes is climbed in about log n steps (Myers 1983)."""
        if levels > node.depth:
            raise TraceError(f"a run must take back at most the new tokens of its row, got {levels}")
        depth = node.depth - levels
        while node.depth > depth:
            jump = self.nodes[self._jumps[node.number]]
            assert node.parent is not None
            node = jump if jump.depth >= depth else self.nodes[node.parent]
        return node

    def _release(self, number: int, step: int) -> None:
        """Drop a row's reference; marks every node that has no reference left as dropped."""
        current: int | None = number
        while current is not None:
            self._ref_counts[current] -= 1
            if self._ref_counts[current]:
                return
            self.nodes[current].dropped_step = step
            current = self.nodes[current].parent

    def _add_result(self, result: ResultRecord) -> None:
        for rank, sequence in enumerate(result.sequences):
            last = self.node(sequence.leaf)
            last.rank = rank if last.rank is None else last.rank
            # What is above a marked node is marked already, so every node is visited twice at most.
            while last.parent is not None and not (last.on_best_path if rank == 0 else last.on_returned_path):
                last.on_best_path, last.on_returned_path = last.on_best_path or rank == 0, True
                last = self.node(last.parent)
        self._active_nodes.pop(result.request, None)

    def _add_node(self, node: Node) -> None:
        if node.number in self.nodes:
            raise TraceError(f"a node must be created once, got {node.number} again")
        self.nodes[node.number] = node
        self._ref_counts[node.number] = 0
        self._jumps[node.number] = node.number if node.parent is None else self._jump_from(node.parent)

    def _jump_from(self, parent: int) -> int:
        """Where a child of a node jumps to: beyond two jumps of equal length, else to its parent."""
        middle = self._jumps[parent]
        depths = [self.nodes[number].depth for number in (parent, middle, self._jumps[middle])]
        return self._jumps[middle] if depths[0] - depths[1] == depths[1] - depths[2] else parent


def num_accepted_drafts(row: RowRecord, run: RunRecord, request: RequestRecord) -> int:
    """The number of accepted draft tokens of a run; all of them if an accepted draft ended the row."""
    if request.drafter is None:
        return max(len(run.tokens) - 1, 0)
    pairs = zip(run.tokens, row.drafts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


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
    # By request; () if it failed.
    returned_sequences: dict[int, tuple[ReturnedSequence, ...]] = field(default_factory=dict)


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
        for state in states:
            if state.reason is None:
                self.rows[state.request][state.node] = state.tokens
        running = tuple(state for state in states if state.reason is None)
        return StepState(step, running, tuple(state for state in states if state.reason is not None))

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
        write_text(path, "".join(to_json_line(record) + "\n" for record in self.records))
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
        return {record.request: record for record in self.records if isinstance(record, RequestRecord)}

    @cached_property
    def steps(self) -> Sequence[StepRecord]:
        """The steps in order."""
        return tuple(record for record in self.records if isinstance(record, StepRecord))

    def steps_of(self, request: int) -> list[StepRecord]:
        """The steps in which a request had rows."""
        return [step for step in self.steps if any(row.request == request for row in step.rows)]

    @cached_property
    def results(self) -> Mapping[int, ResultRecord]:
        """Results by request; a request that has not ended is absent."""
        return {record.request: record for record in self.records if isinstance(record, ResultRecord)}

    @cached_property
    def truncations(self) -> Sequence[TruncationRecord]:
        """The categories of records that were left out because of the byte limit."""
        return tuple(record for record in self.records if isinstance(record, TruncationRecord))

    @cached_property
    def texts(self) -> Mapping[int, str]:
        """Text of each token, invalid UTF-8 bytes as lone surrogates; {} without a tokenizer."""
        return {
            token: text
            for record in self.records
            if isinstance(record, TokenTexts)
            for token, text in record.texts.items()
        }

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Special tokens: their text is a name."""
        return frozenset(
            token for record in self.records if isinstance(record, TokenTexts) for token in record.special
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


PICTURES = ("tree", "text", "processors", "speculation", "beside")


@dataclass(frozen=True)
class TraceSelection:
    """A request of a trace, one of its sequences and one of its steps; None: the last step."""

    trace: TraceData
    request: RequestRecord
    sequence: int = 0
    step: int | None = None

    @classmethod
    def of(cls, trace: TraceData, **arguments: Any) -> TraceSelection:
        """The part that keyword arguments name, by default the first request; InputError: it is missing."""
        for name, value in arguments.items():
            if name not in ("request", "sequence", "step"):
                raise InputError(
                    name, "must be one of `request`, `sequence` and `step`", value, "leave it out"
                )
            if type(value) is not int and not (value is None and name != "sequence"):
                raise InputError(name, "must be an int", value)
        requests = list(trace.requests)
        number, sequence, selected = (arguments.get(name) for name in ("request", "sequence", "step"))
        request = trace.requests.get(next(iter(requests), -1) if number is None else number)
        if request is None:
            raise InputError("request", f"must be one of {requests}", number)
        result = trace.results.get(request.request)
        count = max(len(result.sequences), 1) if result is not None else 1
        if not 0 <= (sequence or 0) < count:
            raise InputError("sequence", f"must be from 0 to {count - 1}", sequence)
        steps = [step.step for step in trace.steps_of(request.request)]
        if selected is not None and selected not in steps:
            available = f"from {steps[0]} to {steps[-1]}" if steps else "none"
            must = f"must be a step of request {request.request}, which has {available}"
            raise InputError("step", must, selected)
        return cls(trace, request, sequence or 0, selected)

    @property
    def leaf(self) -> Node | None:
        """The last node of the sequence; before a result, of the best running one."""
        result = self.trace.results.get(self.request.request)
        if result is not None and result.sequences:
            return self.trace.tree.node(result.sequences[self.sequence].leaf)
        nodes = self.trace.tree.request_nodes(self.request.request)
        last = max((node.step for node in nodes), default=-1)
        ends = [node for node in nodes if not node.children and node.step == last] or nodes
        return max(
            ends, key=lambda node: (-math.inf if node.score is None else node.score, -node.slot), default=None
        )

    @property
    def path(self) -> list[Node]:
        """The nodes of the sequence, up to the step."""
        leaf = self.leaf
        nodes = [] if leaf is None else self.trace.tree.path_to(leaf.number)
        return [node for node in nodes if self.step is None or node.step <= self.step]
