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
from descant.tokenization.token_bytes import Vocabulary
from descant.trace.logit_summary import Line, Sight, fetched
from descant.trace.record_buffer import Kept
from descant.trace.records import Asked, Header, Result, Row, Run, Said, Step, Texts, rounded
from descant.trace.trace import MOST, Trace

__all__ = ["Tracer"]

_LEAST = 4096  # bytes without which there is no trace to speak of


@dataclass
class _Entry:
    """A line of the record: a fed row, or where groups choose from it one after the other, one of them."""

    row: int  # of the lane
    slot: int
    looked: bool
    told: int | None = None
    turn: int = 0
    drafts: tuple[int, ...] = ()
    runs: list[Run] = field(default_factory=list)

    def lines(self, places: int) -> list[Line]:
        """The places at which it chose, of so many that the model spoke of."""
        if not self.looked:
            return []
        count = min(max([1, *(len(run.tokens) for run in self.runs)]), places)
        found = []
        for at in range(count):
            taken = [run.tokens[at] for run in self.runs if len(run.tokens) > at]
            taken += self.drafts[at : at + 1]
            found.append(Line(self.row, at, tuple(dict.fromkeys(taken)), self.told, self.turn))
        return found


class _Lane(NamedTuple):
    """What is known of a lane's rows in a step, until the step is over."""

    requests: list[int]  # [R]
    nodes: list[int]  # [R] what they stood on
    entries: list[_Entry]
    counts: list[int]  # how many looks each has
    sight: Sight


class Tracer:
    """Records a run: `generate(..., trace=Tracer(top=4))`, `Session(model, trace=Tracer(tokenizer=...))`.

    At every choice it keeps the `top` likeliest tokens and those taken, and of all together at most `limit`
    bytes as they would be written to a file: when most of that is used, only the tokens taken are kept, and
    in the end only what requests returned. Texts are those of `tokenizer`, if there is one. A tracer is for
    one run, and `trace` is what it has recorded so far, also of a run that failed.
    """

    name = "node"  # of its column: the node that each row stands on

    def __init__(self, top: int = 8, limit: int = 4_000_000, tokenizer: Any = None) -> None:
        if type(top) is not int or not 1 <= top <= 1000:
            raise InputError("top", "must be an int from 1 to 1000", top)
        if type(limit) is not int or not _LEAST <= limit <= MOST:
            raise InputError("limit", f"must be an int from {_LEAST} to {MOST}, in bytes", limit)
        self.top, self.limit, self.tokenizer = top, limit, tokenizer
        self._kept = Kept(limit)
        self._vocabulary: Vocabulary | None = None
        self._known: set[int] = set()  # tokens whose texts are written
        self._asked: dict[int, Asked] = {}  # that run
        self._wrappers: dict[int, str] = {}  # by request, what stands between the network and its rows
        self._parents: list[int] = []  # of the nodes, a root's -1
        self._tokens: list[int] = []
        self._recorded = 0  # nodes made until the last step that is in the record
        self._leaves: dict[int, tuple[int, Hypothesis, int]] = {}  # what ended: request, sequence, last node
        self._lanes: list[_Lane] = []
        self._step = 0
        self._began = 0.0  # when the step did
        self._own = 0.0  # seconds that it took itself in this step

    @classmethod
    def of(cls, given: Any, tokenizer: Any = None) -> Tracer | None:
        """The tracer that a caller asks for with True or brings along; None: nobody traces."""
        if given is None or given is False:
            return None
        if given is True:
            return cls(tokenizer=tokenizer)
        if not isinstance(given, Tracer):
            raise InputError("trace", "must be True, False or a descant.Tracer", given)
        if given.begun:
            raise InputError("trace", "must be a new Tracer, this one has a run", given, "make another one")
        given.tokenizer = tokenizer if given.tokenizer is None else given.tokenizer
        return given

    @property
    def begun(self) -> bool:
        """Whether there is anything of a run."""
        return bool(self._kept.records)

    @property
    def trace(self) -> Trace:
        """What is recorded so far."""
        if not self.begun:
            raise InputError("trace", "must have a run, this Tracer has none yet", self)
        return Trace(self._kept.records)

    # -------------------------------------------------------------------- what a session tells
    def begin(self, model: str, vocabulary: int) -> None:
        """A session begins, with a model of that class."""
        if self.begun:
            raise InputError("trace", "must be a new Tracer, this one has a run", self, "make another one")
        if self.tokenizer is not None:
            self._vocabulary = Vocabulary.of(self.tokenizer)
        header = Header(_version(), model, vocabulary, self.top, self.limit)
        self._kept.put(header, what="header", step=0)

    def admit(self, asked: Asked, wrapper: str) -> int:
        """A request is admitted, for which that wrapper stands around the model; its prompt's node."""
        root = self._node(-1, -1)
        asked = replace(asked, root=root)
        self._wrappers[asked.request] = wrapper
        texts = self._texts(asked.prompt)
        if self._kept.put(*texts, asked, what="requests", step=self._step):
            self._asked[asked.request] = asked
            self._learn(texts)
        return root

    def follow(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the nodes that its rows stand on."""
        began = time.perf_counter()
        rows = seen.rows
        nodes = rows.column(self.name).tolist()
        entries = self._entries(seen, proposal)
        stands = self._runs(rows, nodes, entries, selection)
        self._end_rows(rows, nodes, entries, selection)
        if not self._kept.lacks("steps"):
            flat = [one for some in entries.values() for one in some]
            lines = [one.lines(seen.logits.shape[1]) for one in flat]
            top = 0 if self._kept.lacks("details") else self.top
            requests = rows.request.tolist()
            wrappers = [self._wrappers[one] for one in requests]
            sight = Sight.of(seen, [line for some in lines for line in some], top, wrappers)
            self._lanes.append(_Lane(requests, nodes, flat, [len(some) for some in lines], sight))
        columns = {**selection.columns, self.name: torch.tensor(stands, dtype=torch.long)}
        self._own += time.perf_counter() - began
        return selection._replace(columns=columns)

    def stepping(self) -> None:
        """A step begins; one that raised before it was over is forgotten."""
        self._lanes, self._own, self._began = [], 0.0, time.perf_counter()

    def stepped(self, cache: int | None) -> None:
        """A step is over, after which the cache has so many bytes; what was seen of it is written down."""
        lanes, self._lanes = self._lanes, []
        seconds = max(round(time.perf_counter() - self._began - self._own, 4), 0.0)
        number, self._step = self._step, self._step + 1
        if self._kept.lacks("steps"):
            return
        looks = fetched([lane.sight for lane in lanes])
        rows: list[Row] = []
        for lane, found in zip(lanes, looks, strict=True):
            at = 0
            for entry, count in zip(lane.entries, lane.counts, strict=True):
                request = lane.requests[entry.row]
                if request in self._asked:
                    here = tuple(found[at : at + count])
                    rows.append(
                        Row(request, lane.nodes[entry.row], entry.slot, here, entry.drafts, tuple(entry.runs))
                    )
                at += count
        texts = self._texts(_mentioned(rows))
        if self._kept.put(*texts, Step(number, seconds, tuple(rows), cache), what="steps", step=number):
            self._recorded = len(self._parents)
            self._learn(texts)

    def ended(self, request: int, found: Sequence[Hypothesis]) -> None:
        """A request has ended with these sequences."""
        said: list[Said] = []
        for one in found if request in self._asked else ():
            tokens = tuple(one.tokens.tolist())
            said.append(Said(tokens, one.reason, self._leaf(request, one), rounded(one.score), one.unmet))
        self._result(Result(request, tuple(said)))

    def failed(self, request: int, error: str) -> None:
        """A request has ended without any."""
        self._result(Result(request, error=error))

    # -------------------------------------------------------------------- what became of the rows
    def _entries(self, seen: Observation, proposal: Proposal) -> dict[int, list[_Entry]]:
        """The lines of the record, by fed row."""
        rows, told = seen.rows, seen.told
        slots = rows.slot.tolist()
        looked = set(range(len(rows))) if told is None else set(told.rows.tolist())
        entries: dict[int, list[_Entry]] = {}
        if told is not None and told.scores is not None:
            groups: dict[int, set[int]] = {}
            for line, (row, slot) in enumerate(zip(told.rows.tolist(), told.slot.tolist(), strict=True)):
                group = self._group(int(rows.request[row]), slot)
                mine = groups.setdefault(row, set())
                if group not in mine:
                    entries.setdefault(row, []).append(_Entry(row, slot, True, line, len(mine)))
                    mine.add(group)
        for row, slot in enumerate(slots):
            entries.setdefault(row, [_Entry(row, slot, row in looked)])
        if proposal.drafts is not None:
            counts = torch.as_tensor(proposal.tried()).expand(len(rows)).tolist()
            for row, (tokens, count) in enumerate(zip(proposal.drafts.tolist(), counts, strict=True)):
                for one in entries[row]:
                    one.drafts = tuple(tokens[:count])
        return dict(sorted(entries.items()))

    def _runs(
        self, rows: Rows, nodes: list[int], entries: Mapping[int, list[_Entry]], selection: Selection
    ) -> list[int]:
        """Give the entries the runs of the rows that go on; the node that each new row stands on."""
        count = len(selection.tokens)
        host = selection.tokens if selection.host is None else selection.host
        tokens = host.tolist()
        parents = range(count) if selection.parents is None else selection.parents.tolist()
        accepted = [0] * count if selection.accepted is None else selection.accepted.tolist()
        emits = torch.as_tensor(selection.emits).long().expand(count).tolist()
        slots = None if selection.slot is None else selection.slot.tolist()
        before = rows.slot.tolist()
        scores, met = (_numbers(selection.columns.get(name), count) for name in ("score", "met"))
        stands = []
        for new, row in enumerate(parents):
            mine = entries[row]
            run = mine[0].drafts[: max(accepted[new], 0)] + ((tokens[new],) if emits[new] == 1 else ())
            slot = before[row] if slots is None else slots[new]
            made, last = self._grown(nodes[row], run, max(-accepted[new], 0))
            stands.append(last)
            self._of_group(mine, int(rows.request[row]), slot).runs.append(
                Run(
                    run,
                    made,
                    slot,
                    max(-accepted[new], 0),
                    None if scores is None else rounded(scores[new]),
                    None if met is None else int(met[new]),
                )
            )
        return stands

    def _end_rows(
        self, rows: Rows, nodes: list[int], entries: Mapping[int, list[_Entry]], selection: Selection
    ) -> None:
        """Give the entries the runs that ended."""
        if not selection.retired:
            return
        whose: dict[int, int] = {}
        if selection.emitted is not None:
            slots = selection.emitted.slot.tolist()
            whose = {id(one): slots[place] for place, one in selection.emitted.ended.items()}
        for row, one in selection.retired:
            request = int(rows.request[row])
            slot = one.beams[-1] if one.beams else whose.get(id(one), int(rows.slot[row]))
            # Its last tokens are not in the row yet, unless they were tentative there.
            more = len(one.tokens) - int(rows.length[row] - rows.prompt[row])
            run = tuple(one.tokens[len(one.tokens) - more :].tolist()) if more > 0 else ()
            made, last = self._grown(nodes[row], run, max(-more, 0))
            self._of_group(entries[row], request, slot).runs.append(
                Run(run, made, slot, max(-more, 0), rounded(one.score), one.met, one.reason)
            )
            self._leaves[id(one)] = (request, one, last)

    def _group(self, request: int, slot: int) -> int:
        asked = self._asked.get(request)
        return 0 if asked is None else slot * asked.groups // max(asked.beams, 1)

    def _of_group(self, entries: Sequence[_Entry], request: int, slot: int) -> _Entry:
        """The entry of a row that a run of that slot belongs to."""
        if len(entries) > 1:
            group = self._group(request, slot)
            return next((one for one in entries if self._group(request, one.slot) == group), entries[0])
        return entries[0]

    # -------------------------------------------------------------------- nodes
    def _node(self, parent: int, token: int) -> int:
        self._parents.append(parent)
        self._tokens.append(token)
        return len(self._parents) - 1

    def _grown(self, at: int, run: Sequence[int], back: int) -> tuple[tuple[int, ...], int]:
        """New nodes for tokens after a node, of which some were taken back first; and where that ends."""
        for _ in range(back):
            at = self._parents[at]
        made = []
        for token in run:
            at = self._node(at, token)
            made.append(at)
        return tuple(made), at

    def _leaf(self, request: int, one: Hypothesis) -> int:
        """The last node of a sequence that is in the record."""
        known = self._leaves.get(id(one))
        at = known[2] if known is not None else self._found(request, one)
        root = self._asked[request].root
        while at >= self._recorded and at != root:
            at = self._parents[at]
        return at

    def _found(self, request: int, one: Hypothesis) -> int:
        """The node that a sequence leads to which its method made up in the end, as far as it was written."""
        at = self._asked[request].root
        children: dict[tuple[int, int], int] = {}
        for node in range(at + 1, self._recorded):
            children.setdefault((self._parents[node], self._tokens[node]), node)
        for token in one.tokens.tolist():
            if (at, token) not in children:
                break
            at = children[at, token]
        return at

    def _result(self, result: Result) -> None:
        request = result.request
        self._wrappers.pop(request, None)
        if request in self._asked:
            texts = self._texts([token for one in result.sequences for token in one.tokens])
            if self._kept.put(*texts, result, what="results", step=self._step):
                self._learn(texts)
            del self._asked[request]
        self._leaves = {key: one for key, one in self._leaves.items() if one[0] != request}

    # -------------------------------------------------------------------- texts
    def _texts(self, tokens: Iterable[int]) -> list[Texts]:
        """A record of what these tokens stand for, as far as it is not written yet."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return []
        new = sorted(set(tokens) - self._known)
        if not new:
            return []
        texts = {
            one: vocabulary.bytes[one].decode("utf-8", "surrogateescape") if one < vocabulary.size else ""
            for one in new
        }
        return [Texts(texts, tuple(one for one in new if one in vocabulary.special))]

    def _learn(self, texts: Sequence[Texts]) -> None:
        for one in texts:
            self._known |= one.texts.keys()


def _version() -> str:
    """That of this package, where it is installed as one."""
    try:
        return metadata.version("descant")
    except metadata.PackageNotFoundError:
        return "unknown"


def _mentioned(rows: Sequence[Row]) -> set[int]:
    """The tokens that rows tell of."""
    found: set[int] = set()
    for row in rows:
        found |= {*row.drafts, *(token for run in row.runs for token in run.tokens)}
        for look in row.looks:
            found |= {one.token for one in look.top}
            found |= {one.token for stage in look.stages for one in stage.moved}
    return found


def _numbers(column: Any, count: int) -> list[Any] | None:
    """What a column holds for each row, if it is one number."""
    return column.tolist() if isinstance(column, Tensor) and column.shape == (count,) else None
