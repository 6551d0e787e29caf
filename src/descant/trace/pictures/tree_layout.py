"""The tree of one request as far as a picture has room for it: which nodes, and which of them in one box."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from descant.trace.pictures.figures import percent, points, several
from descant.trace.pictures.selection import Where
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["Branch", "Plan", "counted", "plan", "state_at"]

DEEP: Final = 12  # tokens up to which a tree is drawn token by token
WINDOW: Final = 8  # of the tokens before a step that are drawn one by one where a tree is deeper
LEVELS: Final = 8  # forks one after another, where a tree is deep and no step is named
LEAVES: Final = 64
OVERVIEW: Final = 16  # leaves, where a tree is deep and no step is named
_ORDER: Final = {"best": 0, "returned": 1, "alive": 2, "ended": 3, "dropped": 4}


@dataclass
class Branch:
    """Nodes one after another that are drawn as one, and what follows the last of them, main line first."""

    nodes: list[Node]
    state: str
    leads: bool = False  # to a sequence that ended, though it was dropped itself
    children: list[Branch] = field(default_factory=list)

    @property
    def last(self) -> Node:
        """The node whose score and end are told."""
        return self.nodes[-1]

    @property
    def label(self) -> str:
        """The score of the last node; without scores the probability of a token that stands alone."""
        if self.last.score is not None:
            return points(self.last.score)
        known = len(self.nodes) == 1 and self.last.processed is not None
        return percent(self.last.processed) if known else ""

    def all(self) -> Iterator[Branch]:
        """It and all below it."""
        waiting = [self]
        while waiting:
            one = waiting.pop()
            yield one
            waiting += one.children[::-1]

    def levels(self) -> int:
        """How many branches there are one after another."""
        return 1 + max((one.levels() for one in self.children), default=0)


@dataclass(frozen=True)
class Plan:
    """What is drawn of a tree, from its root, and what is not."""

    root: Branch
    single: int  # tokens deeper than this have a box each
    hidden: int  # branches that are not drawn
    step: int | None


def state_at(node: Node, step: int | None) -> str:
    """What had become of a node after a step; on the path of what was returned in the end, that."""
    if step is None or node.best or node.returned or node.state == "alive":
        return node.state
    return "alive" if node.left is None or node.left > step else node.state


def plan(trace: Trace, where: Where, fold: bool = False) -> Plan:
    """What to draw; with `fold` tokens that follow one another without a fork are always one."""
    assert where.request is not None
    nodes = [one for one in trace.tree.of(where.request) if where.step is None or one.born <= where.step]
    known = {one.number for one in nodes}
    ends = [one for one in nodes if not any(child in known for child in one.children)]
    deepest = max(one.depth for one in nodes)
    single, most = 0, LEAVES
    if deepest > DEEP:
        single = deepest if where.step is None else deepest - WINDOW
        most = OVERVIEW if where.step is None else LEAVES
    windowed = [one for one in ends if where.step is None or one.depth > single or not single]
    drawn = sorted(windowed, key=lambda one: _importance(trace, one, where.step))[:most]
    needed = sum(state_at(one, where.step) in ("best", "returned") for one in drawn)
    top = trace.tree.node(trace.tree.roots[where.request])
    while True:
        kept = {top.number} | {node.number for one in drawn for node in trace.tree.path(one.number)}
        root = _branches(trace, top, kept, where.step, fold or single)
        # Fewer of the lesser ones where every one of them forks off at another place.
        if single != deepest or len(drawn) <= max(needed, 2) or root.levels() <= LEVELS:
            return Plan(root, single, len(ends) - len(drawn), where.step)
        drawn.pop()


def counted(planned: Plan) -> str:
    """How much of the tree is drawn, in words."""
    nodes = [node for one in planned.root.all() for node in one.nodes]
    steps = len({node.born for node in nodes} - {-1})
    said = [f"{several(len(nodes) - 1, 'token')} in {several(steps, 'step')}"]
    if planned.step is not None:
        said.append(f"after step {planned.step}")
    if planned.hidden:
        said.append(f"{several(planned.hidden, 'further branch', 'further branches')} not drawn")
    return ", ".join(said)


def _importance(trace: Trace, end: Node, step: int | None) -> tuple[float, ...]:
    """What comes first where there is no room for all: what was returned, then what lasted long by itself."""
    alone, node = 0, end
    while node.parent is not None and len(trace.tree.node(node.parent).children) == 1:
        node = trace.tree.node(node.parent)
        alone += 1
    return (
        _ORDER[state_at(end, step)],
        math.inf if end.rank is None else end.rank,
        -alone,
        -(end.score if end.score is not None else -math.inf),
        end.number,
    )


def _branches(trace: Trace, root: Node, kept: set[int], step: int | None, fold: bool | int) -> Branch:
    """The kept nodes below a root; those up to the depth `fold`, or all of them, in one where none forks."""
    top = Branch([root], state_at(root, step))
    waiting = [top]
    while waiting:
        above = waiting.pop()
        for number in trace.tree.node(above.last.number).children:
            if number not in kept:
                continue
            node = trace.tree.node(number)
            branch = Branch([node], state_at(node, step))
            while (follows := _only(trace, branch.last, kept)) is not None:
                if not (fold is True or follows.depth <= fold) or _kind(follows, step) != _kind(node, step):
                    break
                branch.nodes.append(follows)
            branch.state = state_at(branch.last, step)
            above.children.append(branch)
            waiting.append(branch)
    _sort(top)
    return top


def _only(trace: Trace, node: Node, kept: set[int]) -> Node | None:
    """The one kept child of a node, if it has just one."""
    found = [number for number in node.children if number in kept]
    return trace.tree.node(found[0]) if len(found) == 1 else None


def _kind(node: Node, step: int | None) -> str:
    state = state_at(node, step)
    return state if state in ("best", "returned") else ""


def _sort(root: Branch) -> None:
    """Put the main line first at every fork (the best, what was returned, what grew), and find what ended."""
    sizes: dict[int, int] = {}
    for branch in reversed(list(root.all())):
        branch.leads = any(one.state == "ended" or one.leads for one in branch.children)
        sizes[id(branch)] = 1 + sum(sizes[id(one)] for one in branch.children)
    for branch in root.all():
        branch.children.sort(
            key=lambda one: (
                min(_ORDER[one.state], _ORDER["alive"]),
                -sizes[id(one)],
                -(one.nodes[0].score if one.nodes[0].score is not None else -math.inf),
                one.nodes[0].number,
            )
        )
