"""The tracer: records the logits and choices of every row in every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.core.records import Hypothesis, Observation, Proposal, Selection
from descant.core.rows import Rows
from descant.errors import InputError
from descant.tokenization.token_bytes import TokenBytes
from descant.trace.logit_summary import LogitPosition, LogitSummary, fetch_choices
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
    round_finite,
    to_json_line,
)
from descant.trace.trace import Trace
from descant.trace.trace_data import MAX_TRACE_BYTES

_DETAIL_SHARE: Final = 0.7  # share of the limit beyond which only the chosen tokens are recorded
_STEP_SHARE: Final = 0.9  # share beyond which no steps are recorded, to leave room for results
_RESERVED_BYTES: Final = 256  # for truncation records


class RecordBuffer:
    """Records whose JSON lines never exceed the byte limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: list[TraceRecord] = []
        self.num_bytes = 0
        self._truncated: set[str] = set()

    def is_truncated(self, category: str) -> bool:
        """Whether records of this category are no longer accepted."""
        return category in self._truncated

    def add(self, *records: TraceRecord, what: str, step: int) -> bool:
        """Append records that belong together if they fit, else note the truncation; whether they fit."""
        lines = [to_json_line(record) for record in records]
        size = sum(map(len, lines)) + len(lines)
        limit = self.limit * _STEP_SHARE if what in ("steps", "requests") else self.limit
        if self.is_truncated(what) or self.num_bytes + size > limit - _RESERVED_BYTES:
            self.truncate(what, step)
            return False
        self._append(*records, size=size)
        if self.num_bytes > self.limit * _DETAIL_SHARE:
            self.truncate("details", step + 1)
        return True

    def truncate(self, category: str, step: int) -> None:
        """Accept no records of this category from this step on."""
        if not self.is_truncated(category):
            self._truncated.add(category)
            note = TruncationRecord(step, category)
            self._append(note, size=len(to_json_line(note)) + 1)

    def _append(self, *records: TraceRecord, size: int) -> None:
        self.records += records
        self.num_bytes += size


_MIN_LIMIT = 4096  # bytes


@dataclass
class _RowEntry:
    """One row of a step record: a row of the batch, or one beam group that chose from it."""

    row: int  # within the strategy group
    slot: int
    has_choices: bool
    recorded_line: int | None = None
    call_index: int = 0
    drafts: tuple[int, ...] = ()
    runs: list[RunRecord] = field(default_factory=list)

    def positions(self, num_positions: int) -> list[LogitPosition]:
        """The positions at which it chose a token, at most `num_positions`."""
        if not self.has_choices:
            return []
        count = min(max([1, *(len(run.tokens) for run in self.runs)]), num_positions)
        positions = []
        for index in range(count):
            taken = [run.tokens[index] for run in self.runs if len(run.tokens) > index]
            taken += self.drafts[index : index + 1]
            positions.append(
                LogitPosition(
                    self.row, index, tuple(dict.fromkeys(taken)), self.recorded_line, self.call_index
                )
            )
        return positions


class _GroupStep(NamedTuple):
    """The rows of one strategy group in the current step."""

    requests: list[int]  # [R]
    nodes: list[int]  # [R] node of each row before the step
    entries: list[_RowEntry]
    choice_counts: list[int]  # number of choices of each entry
    summary: LogitSummary


class Tracer:
    """Records a run: `generate(..., trace=Tracer(top=4))`, `Session(model, trace=Tracer(tokenizer=...))`.

    Every choice records the `top` likeliest tokens and the chosen ones. The trace has at most `limit` bytes
    as written to a file: when most of them are used, only chosen tokens are recorded, and in the end only
    results. Token texts come from `tokenizer`, if given. A tracer records one run; `trace` is what has been
    recorded so far, also of a run that failed.
    """

    column_name = "node"  # column of the node of each row

    def __init__(self, top: int = 8, limit: int = 4_000_000, tokenizer: Any = None) -> None:
        if type(top) is not int or not 1 <= top <= 1000:
            raise InputError("top", "must be an int from 1 to 1000", top)
        if type(limit) is not int or not _MIN_LIMIT <= limit <= MAX_TRACE_BYTES:
            raise InputError(
                "limit", f"must be an int from {_MIN_LIMIT} to {MAX_TRACE_BYTES}, in bytes", limit
            )
        self.top, self.limit, self.tokenizer = top, limit, tokenizer
        self._buffer = RecordBuffer(limit)
        self._vocabulary: TokenBytes | None = None
        self._written_texts: set[int] = set()  # tokens whose texts are recorded
        self._requests: dict[int, RequestRecord] = {}  # running
        self._wrappers: dict[int, str] = {}  # request -> name of its model wrapper
        self._node_parents: list[int] = []  # by node; -1: a root
        self._node_tokens: list[int] = []
        self._num_recorded_nodes = 0  # nodes created up to the last recorded step
        # Finished sequences by id(): request, sequence, last node.
        self._leaves: dict[int, tuple[int, Hypothesis, int]] = {}
        self._group_steps: list[_GroupStep] = []
        self._step = 0
        self._step_start = 0.0
        self._overhead_seconds = 0.0  # time that tracing itself took in this step

    @classmethod
    def from_argument(cls, argument: Any, tokenizer: Any = None) -> Tracer | None:
        """The tracer for a `trace` argument: True, False, None or a Tracer; None: no tracing."""
        if argument is None or argument is False:
            return None
        if argument is True:
            return cls(tokenizer=tokenizer)
        if not isinstance(argument, Tracer):
            raise InputError("trace", "must be True, False or a descant.Tracer", argument)
        if argument.has_run:
            raise InputError(
                "trace", "must be a new Tracer, this one has a run", argument, "make another one"
            )
        argument.tokenizer = tokenizer if argument.tokenizer is None else argument.tokenizer
        return argument

    @property
    def has_run(self) -> bool:
        """Whether a run has been started."""
        return bool(self._buffer.records)

    def records_from(self, start: int) -> tuple[TraceRecord, ...]:
        """The records from an index on."""
        return tuple(self._buffer.records[start:])

    @property
    def trace(self) -> Trace:
        """The trace recorded so far."""
        if not self.has_run:
            raise InputError("trace", "must have a run, this Tracer has none yet", self)
        return Trace(self._buffer.records)

    # -------------------------------------------------------------------- called by a session
    def start_run(self, model: str, vocabulary: int) -> None:
        """Write the header; `model` is the name of the model's class."""
        if self.has_run:
            raise InputError("trace", "must be a new Tracer, this one has a run", self, "make another one")
        if self.tokenizer is not None:
            self._vocabulary = TokenBytes.from_tokenizer(self.tokenizer)
        header = TraceHeader(_package_version(), model, vocabulary, self.top, self.limit)
        self._buffer.add(header, what="header", step=0)

    def add_request(self, request: RequestRecord, wrapper: str) -> int:
        """Record an admitted request and the name of its model wrapper; returns its root node."""
        root = self._new_node(-1, -1)
        request = replace(request, root=root)
        self._wrappers[request.request] = wrapper
        if self._write(request, request.prompt, "requests", self._step):
            self._requests[request.request] = request
        return root

    def observe(self, observation: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """Record one group's choices of a step; returns the selection with the nodes of its rows."""
        start = time.perf_counter()
        rows = observation.rows
        nodes = rows.column(self.column_name).tolist()
        entries = self._row_entries(observation, proposal)
        new_nodes = self._add_runs(rows, nodes, entries, selection)
        self._add_finished_runs(rows, nodes, entries, selection)
        if not self._buffer.is_truncated("steps"):
            flat = [entry for group in entries.values() for entry in group]
            lines = [entry.positions(observation.logits.shape[1]) for entry in flat]
            top = 0 if self._buffer.is_truncated("details") else self.top
            requests = rows.request.tolist()
            wrappers = [self._wrappers[request] for request in requests]
            summary = LogitSummary.from_observation(
                observation, [line for group in lines for line in group], top, wrappers
            )
            self._group_steps.append(
                _GroupStep(requests, nodes, flat, [len(group) for group in lines], summary)
            )
        columns = {**selection.columns, self.column_name: torch.tensor(new_nodes, dtype=torch.long)}
        self._overhead_seconds += time.perf_counter() - start
        return selection._replace(columns=columns)

    def start_step(self) -> None:
        """Start a step; an unfinished one, which raised an error, is discarded."""
        self._group_steps, self._overhead_seconds, self._step_start = [], 0.0, time.perf_counter()

    def checkpoint(self) -> Callable[[], None]:
        """A function that discards what is recorded of this step from now on."""
        count = len(self._group_steps)
        return lambda: self._group_steps.__delitem__(slice(count, None))

    def end_step(self, cache: int | None, requests: Collection[int] | None = None) -> None:
        """Write the record of the step; `cache` is the size of the KV cache in bytes.

        `requests` are those that took the step, where others raised an error in it; None: all did.
        """
        groups, self._group_steps = self._group_steps, []
        seconds = max(round(time.perf_counter() - self._step_start - self._overhead_seconds, 4), 0.0)
        number, self._step = self._step, self._step + 1
        if self._buffer.is_truncated("steps"):
            return
        choices = fetch_choices([group.summary for group in groups])
        rows: list[RowRecord] = []
        for group, group_choices in zip(groups, choices, strict=True):
            start = 0
            for entry, count in zip(group.entries, group.choice_counts, strict=True):
                request = group.requests[entry.row]
                if request in self._requests and (requests is None or request in requests):
                    row_choices = tuple(group_choices[start : start + count])
                    rows.append(
                        RowRecord(
                            request,
                            group.nodes[entry.row],
                            entry.slot,
                            row_choices,
                            entry.drafts,
                            tuple(entry.runs),
                        )
                    )
                start += count
        record = StepRecord(number, seconds, tuple(rows), cache)
        if self._write(record, _mentioned_tokens(rows), "steps", number):
            self._num_recorded_nodes = len(self._node_parents)

    def record_result(self, request: int, hypotheses: Sequence[Hypothesis]) -> None:
        """Record the sequences of a finished request."""
        sequences: list[ReturnedSequence] = []
        for hypothesis in hypotheses if request in self._requests else ():
            tokens = tuple(hypothesis.tokens.tolist())
            sequences.append(
                ReturnedSequence(
                    tokens,
                    hypothesis.reason,
                    self._last_recorded_node(request, hypothesis),
                    round_finite(hypothesis.score),
                    hypothesis.unmet_constraints,
                )
            )
        self._write_result(ResultRecord(request, tuple(sequences)))

    def record_error(self, request: int, error: str) -> None:
        """Record the error of a failed request."""
        self._write_result(ResultRecord(request, error=error))

    # -------------------------------------------------------------------- rows
    def _row_entries(self, observation: Observation, proposal: Proposal) -> dict[int, list[_RowEntry]]:
        """The entries of the step record, by row."""
        rows, recorded = observation.rows, observation.recorded_lines
        slots = rows.slot.tolist()
        with_choices = set(range(len(rows))) if recorded is None else set(recorded.rows.tolist())
        entries: dict[int, list[_RowEntry]] = {}
        if recorded is not None and recorded.scores is not None:
            groups: dict[int, set[int]] = {}
            for line, (row, slot) in enumerate(
                zip(recorded.rows.tolist(), recorded.slot.tolist(), strict=True)
            ):
                group = self._beam_group(int(rows.request[row]), slot)
                row_groups = groups.setdefault(row, set())
                if group not in row_groups:
                    entries.setdefault(row, []).append(_RowEntry(row, slot, True, line, len(row_groups)))
                    row_groups.add(group)
        for row, slot in enumerate(slots):
            entries.setdefault(row, [_RowEntry(row, slot, row in with_choices)])
        if proposal.drafts is not None:
            counts = torch.as_tensor(proposal.draft_counts()).expand(len(rows)).tolist()
            for row, (tokens, count) in enumerate(zip(proposal.drafts.tolist(), counts, strict=True)):
                for entry in entries[row]:
                    entry.drafts = tuple(tokens[:count])
        return dict(sorted(entries.items()))

    def _add_runs(
        self, rows: Rows, nodes: list[int], entries: Mapping[int, list[_RowEntry]], selection: Selection
    ) -> list[int]:
        """Add the runs of running rows to the entries; returns the node of each new row."""
        count = len(selection.tokens)
        host = selection.tokens if selection.host_tokens is None else selection.host_tokens
        tokens = host.tolist()
        parents = range(count) if selection.parents is None else selection.parents.tolist()
        accepted = [0] * count if selection.accepted is None else selection.accepted.tolist()
        emits = torch.as_tensor(selection.emit_mode).long().expand(count).tolist()
        slots = None if selection.slot is None else selection.slot.tolist()
        before = rows.slot.tolist()
        scores, constraint_steps = (
            _scalar_column(selection.columns.get(name), count) for name in ("score", "constraint_steps")
        )
        new_nodes = []
        for new, row in enumerate(parents):
            row_entries = entries[row]
            run = row_entries[0].drafts[: max(accepted[new], 0)] + ((tokens[new],) if emits[new] == 1 else ())
            slot = before[row] if slots is None else slots[new]
            record = RunRecord(
                run,
                (),
                slot,
                max(-accepted[new], 0),
                None if scores is None else round_finite(scores[new]),
                None if constraint_steps is None else int(constraint_steps[new]),
            )
            new_nodes.append(self._add_run(row_entries, int(rows.request[row]), nodes[row], record))
        return new_nodes

    def _add_finished_runs(
        self, rows: Rows, nodes: list[int], entries: Mapping[int, list[_RowEntry]], selection: Selection
    ) -> None:
        """Add the runs of finished sequences to the entries."""
        if not selection.finished_sequences:
            return
        emitted_slots: dict[int, int] = {}
        if selection.emitted is not None:
            slots = selection.emitted.slot.tolist()
            emitted_slots = {
                id(hypothesis): slots[index] for index, hypothesis in selection.emitted.finished.items()
            }
        for row, hypothesis in selection.finished_sequences:
            request = int(rows.request[row])
            slot = (
                hypothesis.beam_indices[-1]
                if hypothesis.beam_indices
                else emitted_slots.get(id(hypothesis), int(rows.slot[row]))
            )
            # Its last tokens are not in the row yet, unless they were pending there.
            num_new = len(hypothesis.tokens) - int(rows.length[row] - rows.prompt_length[row])
            run = tuple(hypothesis.tokens[len(hypothesis.tokens) - num_new :].tolist()) if num_new > 0 else ()
            score, steps = round_finite(hypothesis.score), hypothesis.constraint_steps
            record = RunRecord(run, (), slot, max(-num_new, 0), score, steps, hypothesis.reason)
            last = self._add_run(entries[row], request, nodes[row], record)
            self._leaves[id(hypothesis)] = (request, hypothesis, last)

    def _beam_group(self, request: int, slot: int) -> int:
        record = self._requests.get(request)
        return 0 if record is None else slot * record.groups // max(record.beams, 1)

    def _add_run(self, entries: Sequence[_RowEntry], request: int, node: int, run: RunRecord) -> int:
        """Add a run below a node to the entry of its beam group; returns the last node."""
        for _ in range(run.back):
            node = self._node_parents[node]
        nodes = []
        for token in run.tokens:
            node = self._new_node(node, token)
            nodes.append(node)
        group = self._beam_group(request, run.slot)
        in_group = (entry for entry in entries if self._beam_group(request, entry.slot) == group)
        next(in_group, entries[0]).runs.append(replace(run, nodes=tuple(nodes)))
        return node

    # -------------------------------------------------------------------- nodes
    def _new_node(self, parent: int, token: int) -> int:
        self._node_parents.append(parent)
        self._node_tokens.append(token)
        return len(self._node_parents) - 1

    def _last_recorded_node(self, request: int, hypothesis: Hypothesis) -> int:
        """The last recorded node of a sequence."""
        leaf = self._leaves.get(id(hypothesis))
        node = leaf[2] if leaf is not None else self._match_node(request, hypothesis)
        root = self._requests[request].root
        while node >= self._num_recorded_nodes and node != root:
            node = self._node_parents[node]
        return node

    def _match_node(self, request: int, hypothesis: Hypothesis) -> int:
        """The deepest recorded node on the path of a sequence that no row took, such as a recipe's result."""
        node = self._requests[request].root
        children: dict[tuple[int, int], int] = {}
        for child in range(node + 1, self._num_recorded_nodes):
            children.setdefault((self._node_parents[child], self._node_tokens[child]), child)
        for token in hypothesis.tokens.tolist():
            if (node, token) not in children:
                break
            node = children[node, token]
        return node

    def _write_result(self, result: ResultRecord) -> None:
        request = result.request
        self._wrappers.pop(request, None)
        if request in self._requests:
            tokens = (token for sequence in result.sequences for token in sequence.tokens)
            self._write(result, tokens, "results", self._step)
            del self._requests[request]
        self._leaves = {key: leaf for key, leaf in self._leaves.items() if leaf[0] != request}

    # -------------------------------------------------------------------- texts
    def _write(self, record: TraceRecord, tokens: Iterable[int], what: str, step: int) -> bool:
        """Add a record behind the texts of its tokens that are not recorded yet; whether they fit."""
        new, vocabulary = sorted(set(tokens) - self._written_texts), self._vocabulary
        if vocabulary is None or not new:
            return self._buffer.add(record, what=what, step=step)
        data = {token: vocabulary.bytes[token] if token < vocabulary.size else b"" for token in new}
        texts = {token: text.decode("utf-8", "surrogateescape") for token, text in data.items()}
        special = tuple(token for token in new if token in vocabulary.special_ids)
        fits = self._buffer.add(TokenTexts(texts, special), record, what=what, step=step)
        if fits:
            self._written_texts.update(new)
        return fits


def _package_version() -> str:
    """The installed version of this package."""
    try:
        return metadata.version("descant")
    except metadata.PackageNotFoundError:
        return "unknown"


def _mentioned_tokens(rows: Sequence[RowRecord]) -> set[int]:
    """The tokens that occur in row records."""
    tokens: set[int] = set()
    for row in rows:
        tokens |= {*row.drafts, *(token for run in row.runs for token in run.tokens)}
        for choice in row.looks:
            tokens |= {candidate.token for candidate in choice.top}
            tokens |= {shift.token for stage in choice.stages for shift in stage.moved}
    return tokens


def _scalar_column(column: Any, count: int) -> list[Any] | None:
    """The values of a column, if it has one number per row."""
    return column.tolist() if isinstance(column, Tensor) and column.shape == (count,) else None
