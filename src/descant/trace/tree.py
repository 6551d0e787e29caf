"""The tree of a trace: every token that any row ever took, and what became of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from descant.errors import TraceError
from descant.trace.records import Asked, Look, Record, Result, Row, Run, Step

__all__ = ["Node", "Tree", "guessed"]


@dataclass
class Node:
    """One token after its parent; the root of a request stands for its prompt."""

    number: int
    request: int
    parent: int | None  # None: a root
    token: int | None = None  # None: a root
    depth: int = 0  # new tokens up to here
    born: int = -1  # the step that took it; -1: a root
    left: int | None = (
        None  # the step in which the last row that stood on it, or below it, was gone; None: none is
    )
    slot: int = 0
    group: int = 0
    raw: float | None = None  # its log-probability before the processors; None: not kept
    processed: float | None = None  # and after them
    score: float | None = None
    met: int | None = None
    guessed: bool = False
    reason: str | None = None  # why the row that took it ended
    rank: int | None = None  # the place among the returned sequences whose last token it is
    look: Look | None = field(default=None, repr=False)  # the choice that it came from; None: not kept
    children: list[int] = field(default_factory=list)
    best: bool = False  # on the path of the best sequence
    returned: bool = False  # on the path of any returned sequence

    @property
    def state(self) -> str:
        """What became of it: "best", "returned", "ended" (not returned), "dropped" or "alive"."""
        if self.best or self.returned:
            return "best" if self.best else "returned"
        if self.reason is not None:
            return "ended"
        return "alive" if self.left is None else "dropped"


class Tree:
    """All nodes of a trace by number, and the roots of its requests."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.nodes: dict[int, Node] = {}
        self.roots: dict[int, int] = {}  # request -> node
        self._asked: dict[int, Asked] = {}
        self._standing: dict[int, list[int]] = {}  # request -> the nodes that its rows stand on now
        self._held: dict[int, int] = {}  # node -> rows that stand on it and children that are held themselves
        for record in records:
            if isinstance(record, Asked):
                self._enter(record)
            elif isinstance(record, Step):
                self._grow(record)
            elif isinstance(record, Result):
                self._end(record)

    def path(self, number: int) -> list[Node]:
        """The nodes from the first new token to that one; the root is no token."""
        found: list[Node] = []
        node = self.node(number)
        while node.parent is not None:
            found.append(node)
            node = self.node(node.parent)
        return found[::-1]

    def of(self, request: int) -> list[Node]:
        """The nodes of a request in the order of their numbers, its root first."""
        return [node for node in self.nodes.values() if node.request == request]

    def node(self, number: int) -> Node:
        """A node by number; an error for one that no record made."""
        if number not in self.nodes:
            raise TraceError(f"a trace must make node {number} before it is used, got no such node")
        return self.nodes[number]

    # -------------------------------------------------------------------- growth
    def _enter(self, asked: Asked) -> None:
        self._add(Node(asked.root, asked.request, None))
        self.roots[asked.request] = asked.root
        self._asked[asked.request] = asked
        self._standing[asked.request] = [asked.root]
        self._held[asked.root] += 1

    def _grow(self, step: Step) -> None:
        stands: dict[int, list[int]] = {}
        for row in step.rows:
            if row.request not in self._standing:
                raise TraceError(f"a trace must have request {row.request} run when a row is of it")
            here = stands.setdefault(row.request, [])
            for run in row.runs:
                last = self._run(step.step, row, run)
                if run.reason is None:
                    here.append(last)
        for request, now in stands.items():
            for number in now:
                self._held[number] += 1
            for number in self._standing[request]:
                self._release(number, step.step)
            self._standing[request] = now

    def _run(self, step: int, row: Row, run: Run) -> int:
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
        asked = self._asked[row.request]
        stood = guessed(row, run, asked)
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
                guessed=place < stood,
                look=look,
            )
            self._add(node)
            at.children.append(number)
            self._held[at.number] += 1
            at = node
        at.score, at.met = run.score, run.met
        if run.reason is not None:
            at.reason = run.reason
            if not self._held[at.number]:
                self._held[at.number] = 1
                self._release(at.number, step)
        return at.number

    def _release(self, number: int, step: int) -> None:
        """A row stands on it no longer: mark what no row stands on or below any more."""
        at: int | None = number
        while at is not None:
            self._held[at] -= 1
            if self._held[at]:
                return
            self.nodes[at].left = step
            at = self.nodes[at].parent

    def _end(self, result: Result) -> None:
        for rank, said in enumerate(result.sequences):
            last = self.node(said.leaf)
            last.rank = rank if last.rank is None else last.rank
            for node in self.path(said.leaf):
                node.best, node.returned = node.best or rank == 0, True
        self._standing.pop(result.request, None)

    def _add(self, node: Node) -> None:
        if node.number in self.nodes:
            raise TraceError(f"a trace must make each node once, got {node.number} again")
        self.nodes[node.number] = node
        self._held[node.number] = 0


def guessed(row: Row, run: Run, asked: Asked) -> int:
    """How many tokens of a run were guessed: the last one too, where a guess that stood ended the row."""
    if asked.drafter is None:
        return max(len(run.tokens) - 1, 0)
    pairs = zip(run.tokens, row.drafts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
