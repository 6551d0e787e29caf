"""The tree of a trace: every token that any row ever took, and what became of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from descant.errors import TraceError
from descant.trace.records import (
    ChoiceRecord,
    RequestRecord,
    ResultRecord,
    RowRecord,
    RunRecord,
    StepRecord,
    TraceRecord,
)

__all__ = ["Node", "Tree", "num_accepted_drafts"]


@dataclass
class Node:
    """One token after its parent; the root of a request stands for its prompt."""

    number: int
    request: int
    parent: int | None  # None: a root
    token: int | None = None  # None: a root
    depth: int = 0  # new tokens up to here
    step: int = -1  # the step that took it; -1: a root
    dropped_step: int | None = (
        None  # the step in which the last row that stood on it, or below it, was gone; None: none is
    )
    slot: int = 0
    group: int = 0
    raw: float | None = None  # its log-probability before the processors; None: not kept
    processed: float | None = None  # and after them
    score: float | None = None
    met: int | None = None
    is_draft: bool = False
    reason: str | None = None  # why the row that took it ended
    rank: int | None = None  # the place among the returned sequences whose last token it is
    choice: ChoiceRecord | None = field(
        default=None, repr=False
    )  # the choice that it came from; None: not kept
    children: list[int] = field(default_factory=list)
    on_best_path: bool = False  # on the path of the best sequence
    on_returned_path: bool = False  # on the path of any returned sequence

    @property
    def state(self) -> str:
        """What became of it: "best", "returned", "ended" (not returned), "dropped" or "alive"."""
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
        self._active_nodes: dict[int, list[int]] = {}  # request -> the nodes that its rows stand on now
        self._ref_counts: dict[
            int, int
        ] = {}  # node -> rows that stand on it and children that are held themselves
        for record in records:
            if isinstance(record, RequestRecord):
                self._add_request(record)
            elif isinstance(record, StepRecord):
                self._add_step(record)
            elif isinstance(record, ResultRecord):
                self._add_result(record)

    def path_to(self, number: int) -> list[Node]:
        """The nodes from the first new token to that one; the root is no token."""
        found: list[Node] = []
        node = self.node(number)
        while node.parent is not None:
            found.append(node)
            node = self.node(node.parent)
        return found[::-1]

    def request_nodes(self, request: int) -> list[Node]:
        """The nodes of a request in the order of their numbers, its root first."""
        return [node for node in self.nodes.values() if node.request == request]

    def node(self, number: int) -> Node:
        """A node by number; an error for one that no record made."""
        if number not in self.nodes:
            raise TraceError(f"a trace must make node {number} before it is used, got no such node")
        return self.nodes[number]

    # -------------------------------------------------------------------- growth
    def _add_request(self, asked: RequestRecord) -> None:
        self._add_node(Node(asked.root, asked.request, None))
        self.roots[asked.request] = asked.root
        self._requests[asked.request] = asked
        self._active_nodes[asked.request] = [asked.root]
        self._ref_counts[asked.root] += 1

    def _add_step(self, step: StepRecord) -> None:
        stands: dict[int, list[int]] = {}
        for row in step.rows:
            if row.request not in self._active_nodes:
                raise TraceError(f"a trace must have request {row.request} run when a row is of it")
            here = stands.setdefault(row.request, [])
            for run in row.runs:
                last = self._add_run(step.step, row, run)
                if run.reason is None:
                    here.append(last)
        for request, now in stands.items():
            for number in now:
                self._ref_counts[number] += 1
            for number in self._active_nodes[request]:
                self._release(number, step.step)
            self._active_nodes[request] = now

    def _add_run(self, step: int, row: RowRecord, run: RunRecord) -> int:
        """The nodes of a run; the last one's number."""
        if len(run.tokens) != len(run.nodes):
            raise TraceError(
                f"a run must have a node for each token, got {len(run.nodes)} of {len(run.tokens)}"
            )
        at = self.node(row.at)
        for _ in range(run.back):
            if at.parent is None:
                raise TraceError(f"a run must not take back more than was written, got {run.back}")
            at = self.node(at.parent)
        asked = self._requests[row.request]
        stood = num_accepted_drafts(row, run, asked)
        for place, (token, number) in enumerate(zip(run.tokens, run.nodes, strict=True)):
            look = row.looks[place] if place < len(row.looks) else None
            found = next((one for one in look.top if one.token == token), None) if look is not None else None
            node = Node(
                number,
                row.request,
                at.number,
                token,
                at.depth + 1,
                step,
                slot=run.slot,
                group=run.slot * asked.groups // max(asked.beams, 1),
                raw=None if found is None else found.raw,
                processed=None if found is None else found.processed,
                is_draft=place < stood,
                choice=look,
            )
            self._add_node(node)
            at.children.append(number)
            self._ref_counts[at.number] += 1
            at = node
        at.score, at.met = run.score, run.met
        if run.reason is not None:
            at.reason = run.reason
            if not self._ref_counts[at.number]:
                self._ref_counts[at.number] = 1
                self._release(at.number, step)
        return at.number

    def _release(self, number: int, step: int) -> None:
        """A row stands on it no longer: mark what no row stands on or below any more."""
        at: int | None = number
        while at is not None:
            self._ref_counts[at] -= 1
            if self._ref_counts[at]:
                return
            self.nodes[at].dropped_step = step
            at = self.nodes[at].parent

    def _add_result(self, result: ResultRecord) -> None:
        for rank, said in enumerate(result.sequences):
            last = self.node(said.leaf)
            last.rank = rank if last.rank is None else last.rank
            for node in self.path_to(said.leaf):
                node.on_best_path, node.on_returned_path = node.on_best_path or rank == 0, True
        self._active_nodes.pop(result.request, None)

    def _add_node(self, node: Node) -> None:
        if node.number in self.nodes:
            raise TraceError(f"a trace must make each node once, got {node.number} again")
        self.nodes[node.number] = node
        self._ref_counts[node.number] = 0


def num_accepted_drafts(row: RowRecord, run: RunRecord, asked: RequestRecord) -> int:
    """How many tokens of a run were guessed: the last one too, where a guess that stood ended the row."""
    if asked.drafter is None:
        return max(len(run.tokens) - 1, 0)
    pairs = zip(run.tokens, row.drafts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
