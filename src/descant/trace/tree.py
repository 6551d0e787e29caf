"""The tree of a trace: every token of every hypothesis, and its final state."""

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
    choice: ChoiceRecord | None = field(
        default=None, repr=False
    )  # the choice that produced it; None: not recorded
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
            candidate = (
                next((one for one in choice.top if one.token == token), None) if choice is not None else None
            )
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
