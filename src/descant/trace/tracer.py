"""The tracer: follows the rows of a run and writes down what every step saw and chose."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.records import Hypothesis, Observation, Proposal, Selection
from descant.core.rows import Rows
from descant.errors import InputError
from descant.tokenization.token_bytes import TokenBytes
from descant.trace.logit_summary import LogitPosition, LogitSummary, fetch_choices
from descant.trace.record_buffer import RecordBuffer
from descant.trace.records import (
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenTexts,
    TraceHeader,
    round_finite,
)
from descant.trace.trace import MAX_TRACE_BYTES, Trace

__all__ = ["Tracer"]

_MIN_LIMIT = 4096  # bytes without which there is no trace to speak of


@dataclass
class _RowEntry:
    """A line of the record: a fed row, or where groups choose from it one after the other, one of them."""

    row: int  # of the lane
    slot: int
    has_choices: bool
    recorded_line: int | None = None
    call_index: int = 0
    drafts: tuple[int, ...] = ()
    runs: list[RunRecord] = field(default_factory=list)

    def positions(self, places: int) -> list[LogitPosition]:
        """The places at which it chose, of so many that the model spoke of."""
        if not self.has_choices:
            return []
        count = min(max([1, *(len(run.tokens) for run in self.runs)]), places)
        found = []
        for at in range(count):
            taken = [run.tokens[at] for run in self.runs if len(run.tokens) > at]
            taken += self.drafts[at : at + 1]
            found.append(
                LogitPosition(self.row, at, tuple(dict.fromkeys(taken)), self.recorded_line, self.call_index)
            )
        return found


class _GroupStep(NamedTuple):
    """What is known of a lane's rows in a step, until the step is over."""

    requests: list[int]  # [R]
    nodes: list[int]  # [R] what they stood on
    entries: list[_RowEntry]
    choice_counts: list[int]  # how many looks each has
    summary: LogitSummary


class Tracer:
    """Records a run: `generate(..., trace=Tracer(top=4))`, `Session(model, trace=Tracer(tokenizer=...))`.

    At every choice it keeps the `top` likeliest tokens and those taken, and of all together at most `limit`
    bytes as they would be written to a file: when most of that is used, only the tokens taken are kept, and
    in the end only what requests returned. Texts are those of `tokenizer`, if there is one. A tracer is for
    one run, and `trace` is what it has recorded so far, also of a run that failed.
    """

    column_name = "node"  # of its column: the node that each row stands on

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
        self._written_texts: set[int] = set()  # tokens whose texts are written
        self._requests: dict[int, RequestRecord] = {}  # that run
        self._wrappers: dict[int, str] = {}  # by request, what stands between the network and its rows
        self._node_parents: list[int] = []  # of the nodes, a root's -1
        self._node_tokens: list[int] = []
        self._num_recorded_nodes = 0  # nodes made until the last step that is in the record
        self._leaves: dict[int, tuple[int, Hypothesis, int]] = {}  # what ended: request, sequence, last node
        self._group_steps: list[_GroupStep] = []
        self._step = 0
        self._step_start = 0.0  # when the step did
        self._overhead_seconds = 0.0  # seconds that it took itself in this step

    @classmethod
    def from_argument(cls, given: Any, tokenizer: Any = None) -> Tracer | None:
        """The tracer that a caller asks for with True or brings along; None: nobody traces."""
        if given is None or given is False:
            return None
        if given is True:
            return cls(tokenizer=tokenizer)
        if not isinstance(given, Tracer):
            raise InputError("trace", "must be True, False or a descant.Tracer", given)
        if given.has_run:
            raise InputError("trace", "must be a new Tracer, this one has a run", given, "make another one")
        given.tokenizer = tokenizer if given.tokenizer is None else given.tokenizer
        return given

    @property
    def has_run(self) -> bool:
        """Whether there is anything of a run."""
        return bool(self._buffer.records)

    @property
    def trace(self) -> Trace:
        """What is recorded so far."""
        if not self.has_run:
            raise InputError("trace", "must have a run, this Tracer has none yet", self)
        return Trace(self._buffer.records)

    # -------------------------------------------------------------------- what a session tells
    def start_run(self, model: str, vocabulary: int) -> None:
        """A session begins, with a model of that class."""
        if self.has_run:
            raise InputError("trace", "must be a new Tracer, this one has a run", self, "make another one")
        if self.tokenizer is not None:
            self._vocabulary = TokenBytes.from_tokenizer(self.tokenizer)
        header = TraceHeader(_package_version(), model, vocabulary, self.top, self.limit)
        self._buffer.add(header, what="header", step=0)

    def add_request(self, asked: RequestRecord, wrapper: str) -> int:
        """A request is admitted, for which that wrapper stands around the model; its prompt's node."""
        root = self._new_node(-1, -1)
        asked = replace(asked, root=root)
        self._wrappers[asked.request] = wrapper
        texts = self._new_texts(asked.prompt)
        if self._buffer.add(*texts, asked, what="requests", step=self._step):
            self._requests[asked.request] = asked
            self._mark_texts_written(texts)
        return root

    def observe(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the nodes that its rows stand on."""
        began = time.perf_counter()
        rows = seen.rows
        nodes = rows.column(self.column_name).tolist()
        entries = self._row_entries(seen, proposal)
        stands = self._add_runs(rows, nodes, entries, selection)
        self._add_finished_runs(rows, nodes, entries, selection)
        if not self._buffer.is_truncated("steps"):
            flat = [one for some in entries.values() for one in some]
            lines = [one.positions(seen.logits.shape[1]) for one in flat]
            top = 0 if self._buffer.is_truncated("details") else self.top
            requests = rows.request.tolist()
            wrappers = [self._wrappers[one] for one in requests]
            sight = LogitSummary.from_observation(
                seen, [line for some in lines for line in some], top, wrappers
            )
            self._group_steps.append(_GroupStep(requests, nodes, flat, [len(some) for some in lines], sight))
        columns = {**selection.columns, self.column_name: torch.tensor(stands, dtype=torch.long)}
        self._overhead_seconds += time.perf_counter() - began
        return selection._replace(columns=columns)

    def start_step(self) -> None:
        """A step begins; one that raised before it was over is forgotten."""
        self._group_steps, self._overhead_seconds, self._step_start = [], 0.0, time.perf_counter()

    def end_step(self, cache: int | None) -> None:
        """A step is over, after which the cache has so many bytes; what was seen of it is written down."""
        lanes, self._group_steps = self._group_steps, []
        seconds = max(round(time.perf_counter() - self._step_start - self._overhead_seconds, 4), 0.0)
        number, self._step = self._step, self._step + 1
        if self._buffer.is_truncated("steps"):
            return
        looks = fetch_choices([lane.summary for lane in lanes])
        rows: list[RowRecord] = []
        for lane, found in zip(lanes, looks, strict=True):
            at = 0
            for entry, count in zip(lane.entries, lane.choice_counts, strict=True):
                request = lane.requests[entry.row]
                if request in self._requests:
                    here = tuple(found[at : at + count])
                    rows.append(
                        RowRecord(
                            request, lane.nodes[entry.row], entry.slot, here, entry.drafts, tuple(entry.runs)
                        )
                    )
                at += count
        texts = self._new_texts(_mentioned_tokens(rows))
        if self._buffer.add(
            *texts, StepRecord(number, seconds, tuple(rows), cache), what="steps", step=number
        ):
            self._num_recorded_nodes = len(self._node_parents)
            self._mark_texts_written(texts)

    def record_result(self, request: int, found: Sequence[Hypothesis]) -> None:
        """A request has ended with these sequences."""
        said: list[ReturnedSequence] = []
        for one in found if request in self._requests else ():
            tokens = tuple(one.tokens.tolist())
            said.append(
                ReturnedSequence(
                    tokens,
                    one.reason,
                    self._last_recorded_node(request, one),
                    round_finite(one.score),
                    one.unmet_constraints,
                )
            )
        self._write_result(ResultRecord(request, tuple(said)))

    def record_error(self, request: int, error: str) -> None:
        """A request has ended without any."""
        self._write_result(ResultRecord(request, error=error))

    # -------------------------------------------------------------------- what became of the rows
    def _row_entries(self, seen: Observation, proposal: Proposal) -> dict[int, list[_RowEntry]]:
        """The lines of the record, by fed row."""
        rows, told = seen.rows, seen.recorded_lines
        slots = rows.slot.tolist()
        looked = set(range(len(rows))) if told is None else set(told.rows.tolist())
        entries: dict[int, list[_RowEntry]] = {}
        if told is not None and told.scores is not None:
            groups: dict[int, set[int]] = {}
            for line, (row, slot) in enumerate(zip(told.rows.tolist(), told.slot.tolist(), strict=True)):
                group = self._beam_group(int(rows.request[row]), slot)
                mine = groups.setdefault(row, set())
                if group not in mine:
                    entries.setdefault(row, []).append(_RowEntry(row, slot, True, line, len(mine)))
                    mine.add(group)
        for row, slot in enumerate(slots):
            entries.setdefault(row, [_RowEntry(row, slot, row in looked)])
        if proposal.drafts is not None:
            counts = torch.as_tensor(proposal.draft_counts()).expand(len(rows)).tolist()
            for row, (tokens, count) in enumerate(zip(proposal.drafts.tolist(), counts, strict=True)):
                for one in entries[row]:
                    one.drafts = tuple(tokens[:count])
        return dict(sorted(entries.items()))

    def _add_runs(
        self, rows: Rows, nodes: list[int], entries: Mapping[int, list[_RowEntry]], selection: Selection
    ) -> list[int]:
        """Give the entries the runs of the rows that go on; the node that each new row stands on."""
        count = len(selection.tokens)
        host = selection.tokens if selection.host_tokens is None else selection.host_tokens
        tokens = host.tolist()
        parents = range(count) if selection.parents is None else selection.parents.tolist()
        accepted = [0] * count if selection.accepted is None else selection.accepted.tolist()
        emits = torch.as_tensor(selection.emit_mode).long().expand(count).tolist()
        slots = None if selection.slot is None else selection.slot.tolist()
        before = rows.slot.tolist()
        scores, met = (
            _scalar_column(selection.columns.get(name), count) for name in ("score", "constraint_steps")
        )
        stands = []
        for new, row in enumerate(parents):
            mine = entries[row]
            run = mine[0].drafts[: max(accepted[new], 0)] + ((tokens[new],) if emits[new] == 1 else ())
            slot = before[row] if slots is None else slots[new]
            made, last = self._append_nodes(nodes[row], run, max(-accepted[new], 0))
            stands.append(last)
            self._entry_of_group(mine, int(rows.request[row]), slot).runs.append(
                RunRecord(
                    run,
                    made,
                    slot,
                    max(-accepted[new], 0),
                    None if scores is None else round_finite(scores[new]),
                    None if met is None else int(met[new]),
                )
            )
        return stands

    def _add_finished_runs(
        self, rows: Rows, nodes: list[int], entries: Mapping[int, list[_RowEntry]], selection: Selection
    ) -> None:
        """Give the entries the runs that ended."""
        if not selection.finished_sequences:
            return
        whose: dict[int, int] = {}
        if selection.emitted is not None:
            slots = selection.emitted.slot.tolist()
            whose = {id(one): slots[place] for place, one in selection.emitted.finished.items()}
        for row, one in selection.finished_sequences:
            request = int(rows.request[row])
            slot = one.beam_indices[-1] if one.beam_indices else whose.get(id(one), int(rows.slot[row]))
            # Its last tokens are not in the row yet, unless they were tentative there.
            more = len(one.tokens) - int(rows.length[row] - rows.prompt_length[row])
            run = tuple(one.tokens[len(one.tokens) - more :].tolist()) if more > 0 else ()
            made, last = self._append_nodes(nodes[row], run, max(-more, 0))
            self._entry_of_group(entries[row], request, slot).runs.append(
                RunRecord(
                    run, made, slot, max(-more, 0), round_finite(one.score), one.constraint_steps, one.reason
                )
            )
            self._leaves[id(one)] = (request, one, last)

    def _beam_group(self, request: int, slot: int) -> int:
        asked = self._requests.get(request)
        return 0 if asked is None else slot * asked.groups // max(asked.beams, 1)

    def _entry_of_group(self, entries: Sequence[_RowEntry], request: int, slot: int) -> _RowEntry:
        """The entry of a row that a run of that slot belongs to."""
        if len(entries) > 1:
            group = self._beam_group(request, slot)
            return next((one for one in entries if self._beam_group(request, one.slot) == group), entries[0])
        return entries[0]

    # -------------------------------------------------------------------- nodes
    def _new_node(self, parent: int, token: int) -> int:
        self._node_parents.append(parent)
        self._node_tokens.append(token)
        return len(self._node_parents) - 1

    def _append_nodes(self, at: int, run: Sequence[int], back: int) -> tuple[tuple[int, ...], int]:
        """New nodes for tokens after a node, of which some were taken back first; and where that ends."""
        for _ in range(back):
            at = self._node_parents[at]
        made = []
        for token in run:
            at = self._new_node(at, token)
            made.append(at)
        return tuple(made), at

    def _last_recorded_node(self, request: int, one: Hypothesis) -> int:
        """The last node of a sequence that is in the record."""
        known = self._leaves.get(id(one))
        at = known[2] if known is not None else self._match_node(request, one)
        root = self._requests[request].root
        while at >= self._num_recorded_nodes and at != root:
            at = self._node_parents[at]
        return at

    def _match_node(self, request: int, one: Hypothesis) -> int:
        """The node that a sequence leads to which its method made up in the end, as far as it was written."""
        at = self._requests[request].root
        children: dict[tuple[int, int], int] = {}
        for node in range(at + 1, self._num_recorded_nodes):
            children.setdefault((self._node_parents[node], self._node_tokens[node]), node)
        for token in one.tokens.tolist():
            if (at, token) not in children:
                break
            at = children[at, token]
        return at

    def _write_result(self, result: ResultRecord) -> None:
        request = result.request
        self._wrappers.pop(request, None)
        if request in self._requests:
            texts = self._new_texts([token for one in result.sequences for token in one.tokens])
            if self._buffer.add(*texts, result, what="results", step=self._step):
                self._mark_texts_written(texts)
            del self._requests[request]
        self._leaves = {key: one for key, one in self._leaves.items() if one[0] != request}

    # -------------------------------------------------------------------- texts
    def _new_texts(self, tokens: Iterable[int]) -> list[TokenTexts]:
        """A record of what these tokens stand for, as far as it is not written yet."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return []
        new = sorted(set(tokens) - self._written_texts)
        if not new:
            return []
        texts = {
            one: vocabulary.bytes[one].decode("utf-8", "surrogateescape") if one < vocabulary.size else ""
            for one in new
        }
        return [TokenTexts(texts, tuple(one for one in new if one in vocabulary.special_ids))]

    def _mark_texts_written(self, texts: Sequence[TokenTexts]) -> None:
        for one in texts:
            self._written_texts |= one.texts.keys()


def _package_version() -> str:
    """That of this package, where it is installed as one."""
    try:
        return metadata.version("descant")
    except metadata.PackageNotFoundError:
        return "unknown"


def _mentioned_tokens(rows: Sequence[RowRecord]) -> set[int]:
    """The tokens that rows tell of."""
    found: set[int] = set()
    for row in rows:
        found |= {*row.drafts, *(token for run in row.runs for token in run.tokens)}
        for look in row.looks:
            found |= {one.token for one in look.top}
            found |= {one.token for stage in look.stages for one in stage.moved}
    return found


def _scalar_column(column: Any, count: int) -> list[Any] | None:
    """What a column holds for each row, if it is one number."""
    return column.tolist() if isinstance(column, Tensor) and column.shape == (count,) else None
