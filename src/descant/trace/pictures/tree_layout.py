"""The tree of one request as far as a picture has room for it: which nodes, and which of them in one box."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from descant.trace.pictures.number_format import format_percent, format_score, pluralize
from descant.trace.pictures.selection import TraceSelection
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["Branch", "TreeLayout", "layout_summary", "layout_tree", "state_at"]

MAX_UNFOLDED_DEPTH: Final = 12  # tokens up to which a tree is drawn token by token
STEP_WINDOW: Final = 8  # of the tokens before a step that are drawn one by one where a tree is deeper
MAX_FORK_LEVELS: Final = 8  # forks one after another, where a tree is deep and no step is named
MAX_LEAVES: Final = 64
MAX_OVERVIEW_LEAVES: Final = 16  # leaves, where a tree is deep and no step is named
_STATE_ORDER: Final = {"best": 0, "returned": 1, "alive": 2, "ended": 3, "dropped": 4}


@dataclass
class Branch:
    """Nodes one after another that are drawn as one, and what follows the last of them, main line first."""

    nodes: list[Node]
    state: str
    leads_to_end: bool = False  # to a sequence that ended, though it was dropped itself
    children: list[Branch] = field(default_factory=list)

    @property
    def last_node(self) -> Node:
        """The node whose score and end are told."""
        return self.nodes[-1]

    @property
    def label(self) -> str:
        """The score of the last node; without scores the probability of a token that stands alone."""
        if self.last_node.score is not None:
            return format_score(self.last_node.score)
        known = len(self.nodes) == 1 and self.last_node.processed is not None
        return format_percent(self.last_node.processed) if known else ""

    def walk(self) -> Iterator[Branch]:
        """It and all below it."""
        waiting = [self]
        while waiting:
            one = waiting.pop()
            yield one
            waiting += one.children[::-1]

    def num_levels(self) -> int:
        """How many branches there are one after another."""
        return 1 + max((one.num_levels() for one in self.children), default=0)


@dataclass(frozen=True)
class TreeLayout:
    """What is drawn of a tree, from its root, and what is not."""

    root: Branch
    folded_depth: int  # tokens deeper than this have a box each
    num_hidden: int  # branches that are not drawn
    step: int | None


def state_at(node: Node, step: int | None) -> str:
    """What had become of a node after a step; on the path of what was returned in the end, that."""
    if step is None or node.on_best_path or node.on_returned_path or node.state == "alive":
        return node.state
    return "alive" if node.dropped_step is None or node.dropped_step > step else node.state


def layout_tree(trace: Trace, where: TraceSelection, fold: bool = False) -> TreeLayout:
    """What to draw; with `fold` tokens that follow one another without a fork are always one."""
    assert where.request is not None
    nodes = [
        one for one in trace.tree.request_nodes(where.request) if where.step is None or one.step <= where.step
    ]
    known = {one.number for one in nodes}
    ends = [one for one in nodes if not any(child in known for child in one.children)]
    deepest = max(one.depth for one in nodes)
    single, most = 0, MAX_LEAVES
    if deepest > MAX_UNFOLDED_DEPTH:
        single = deepest if where.step is None else deepest - STEP_WINDOW
        most = MAX_OVERVIEW_LEAVES if where.step is None else MAX_LEAVES
    windowed = [one for one in ends if where.step is None or one.depth > single or not single]
    drawn = sorted(windowed, key=lambda one: _importance(trace, one, where.step))[:most]
    needed = sum(state_at(one, where.step) in ("best", "returned") for one in drawn)
    top = trace.tree.node(trace.tree.roots[where.request])
    while True:
        kept = {top.number} | {node.number for one in drawn for node in trace.tree.path_to(one.number)}
        root = _build_branches(trace, top, kept, where.step, fold or single)
        # Fewer of the lesser ones where every one of them forks off at another place.
        if single != deepest or len(drawn) <= max(needed, 2) or root.num_levels() <= MAX_FORK_LEVELS:
            return TreeLayout(root, single, len(ends) - len(drawn), where.step)
        drawn.pop()


def layout_summary(planned: TreeLayout) -> str:
    """How much of the tree is drawn, in words."""
    nodes = [node for one in planned.root.walk() for node in one.nodes]
    steps = len({node.step for node in nodes} - {-1})
    said = [f"{pluralize(len(nodes) - 1, 'token')} in {pluralize(steps, 'step')}"]
    if planned.step is not None:
        said.append(f"after step {planned.step}")
    if planned.num_hidden:
        said.append(f"{pluralize(planned.num_hidden, 'further branch', 'further branches')} not drawn")
    return ", ".join(said)


def _importance(trace: Trace, end: Node, step: int | None) -> tuple[float, ...]:
    """What comes first where there is no room for all: what was returned, then what lasted long by itself."""
    alone, node = 0, end
    while node.parent is not None and len(trace.tree.node(node.parent).children) == 1:
        node = trace.tree.node(node.parent)
        alone += 1
    return (
        _STATE_ORDER[state_at(end, step)],
        math.inf if end.rank is None else end.rank,
        -alone,
        -(end.score if end.score is not None else -math.inf),
        end.number,
    )


def _build_branches(trace: Trace, root: Node, kept: set[int], step: int | None, fold: bool | int) -> Branch:
    """The kept nodes below a root; those up to the depth `fold`, or all of them, in one where none forks."""
    top = Branch([root], state_at(root, step))
    waiting = [top]
    while waiting:
        above = waiting.pop()
        for number in trace.tree.node(above.last_node.number).children:
            if number not in kept:
                continue
            node = trace.tree.node(number)
            branch = Branch([node], state_at(node, step))
            while (follows := _only_child(trace, branch.last_node, kept)) is not None:
                if not (fold is True or follows.depth <= fold) or _path_state(follows, step) != _path_state(
                    node, step
                ):
                    break
                branch.nodes.append(follows)
            branch.state = state_at(branch.last_node, step)
            above.children.append(branch)
            waiting.append(branch)
    _sort_children(top)
    return top


def _only_child(trace: Trace, node: Node, kept: set[int]) -> Node | None:
    """The one kept child of a node, if it has just one."""
    found = [number for number in node.children if number in kept]
    return trace.tree.node(found[0]) if len(found) == 1 else None


def _path_state(node: Node, step: int | None) -> str:
    state = state_at(node, step)
    return state if state in ("best", "returned") else ""


def _sort_children(root: Branch) -> None:
    """Put the main line first at every fork (the best, what was returned, what grew), and find what ended."""
    sizes: dict[int, int] = {}
    for branch in reversed(list(root.walk())):
        branch.leads_to_end = any(one.state == "ended" or one.leads_to_end for one in branch.children)
        sizes[id(branch)] = 1 + sum(sizes[id(one)] for one in branch.children)
    for branch in root.walk():
        branch.children.sort(
            key=lambda one: (
                min(_STATE_ORDER[one.state], _STATE_ORDER["alive"]),
                -sizes[id(one)],
                -(one.nodes[0].score if one.nodes[0].score is not None else -math.inf),
                one.nodes[0].number,
            )
        )
