"""Which nodes of a request's tree a picture shows, and which of them share a box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from descant.trace.pictures.cells import format_percent, format_score, pluralize
from descant.trace.trace_data import Node, TraceData, TraceSelection

MAX_UNFOLDED_DEPTH: Final = 12  # trees up to this depth are drawn token by token
STEP_WINDOW: Final = 8  # in deeper trees, tokens before the selected step drawn one by one
MAX_FORK_LEVELS: Final = 8  # successive forks of a deep tree without a selected step
MAX_LEAVES: Final = 64
MAX_OVERVIEW_LEAVES: Final = 16  # leaves of a deep tree without a selected step
_STATE_ORDER: Final = {"best": 0, "returned": 1, "alive": 2, "ended": 3, "dropped": 4}


@dataclass
class Branch:
    """Successive nodes drawn as one box, and the branches after it, the main one first."""

    nodes: list[Node]
    state: str
    leads_to_end: bool = False  # dropped itself, but an ended sequence is below it
    children: list[Branch] = field(default_factory=list)

    @property
    def last_node(self) -> Node:
        """The node whose score and ending are shown."""
        return self.nodes[-1]

    @property
    def label(self) -> str:
        """The score of the last node; without scores the probability of a single token."""
        if self.last_node.score is not None:
            return format_score(self.last_node.score)
        has_probability = len(self.nodes) == 1 and self.last_node.processed is not None
        return format_percent(self.last_node.processed) if has_probability else ""

    def walk(self) -> Iterator[Branch]:
        """This branch and all below it."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting += branch.children[::-1]

    def num_levels(self) -> int:
        """The depth in branches."""
        return 1 + max((child.num_levels() for child in self.children), default=0)


@dataclass(frozen=True)
class TreeLayout:
    """The shown part of a tree."""

    root: Branch
    folded_depth: int  # deeper tokens have a box each
    num_hidden: int  # branches not shown
    step: int | None


def state_at(node: Node, step: int | None) -> str:
    """The state of a node after a step; nodes on a returned path have their final state."""
    if step is None or node.on_best_path or node.on_returned_path or node.state == "alive":
        return node.state
    return "alive" if node.dropped_step is None or node.dropped_step > step else node.state


def layout_tree(selection: TraceSelection, fold: bool = False) -> TreeLayout:
    """The part of the tree to draw; with `fold`, successive tokens without a fork always share a box."""
    trace = selection.trace
    nodes = [
        node
        for node in trace.tree.request_nodes(selection.request.request)
        if selection.step is None or node.step <= selection.step
    ]
    numbers = {node.number for node in nodes}
    leaves = [node for node in nodes if not any(child in numbers for child in node.children)]
    deepest = max(node.depth for node in nodes)
    folded_depth, max_leaves = 0, MAX_LEAVES
    if deepest > MAX_UNFOLDED_DEPTH:
        folded_depth = deepest if selection.step is None else deepest - STEP_WINDOW
        max_leaves = MAX_OVERVIEW_LEAVES if selection.step is None else MAX_LEAVES
    windowed = [
        leaf for leaf in leaves if selection.step is None or leaf.depth > folded_depth or not folded_depth
    ]
    shown_leaves = sorted(windowed, key=lambda leaf: _importance(trace, leaf, selection.step))[:max_leaves]
    num_required = sum(state_at(leaf, selection.step) in ("best", "returned") for leaf in shown_leaves)
    top = trace.tree.node(selection.request.root)
    while True:
        shown = _nodes_above(trace, top, shown_leaves)
        root = _build_branches(trace, top, shown, selection.step, fold or folded_depth)
        # Drop the least important leaves while there are too many successive forks.
        if (
            folded_depth != deepest
            or len(shown_leaves) <= max(num_required, 2)
            or root.num_levels() <= MAX_FORK_LEVELS
        ):
            return TreeLayout(root, folded_depth, len(leaves) - len(shown_leaves), selection.step)
        shown_leaves.pop()


def layout_summary(layout: TreeLayout) -> str:
    """The extent of the shown tree, as text."""
    nodes = [node for branch in layout.root.walk() for node in branch.nodes]
    steps = len({node.step for node in nodes} - {-1})
    parts = [f"{pluralize(len(nodes) - 1, 'token')} in {pluralize(steps, 'step')}"]
    if layout.step is not None:
        parts.append(f"after step {layout.step}")
    if layout.num_hidden:
        parts.append(f"{pluralize(layout.num_hidden, 'further branch', 'further branches')} not drawn")
    return ", ".join(parts)


def _importance(trace: TraceData, leaf: Node, step: int | None) -> tuple[float, ...]:
    """Sort key of a leaf: returned ones first, then those with the longest unforked end."""
    unforked, node = 0, leaf
    while node.parent is not None and len(trace.tree.node(node.parent).children) == 1:
        node = trace.tree.node(node.parent)
        unforked += 1
    return (
        _STATE_ORDER[state_at(leaf, step)],
        math.inf if leaf.rank is None else leaf.rank,
        -unforked,
        -(leaf.score if leaf.score is not None else -math.inf),
        leaf.number,
    )


def _nodes_above(trace: TraceData, top: Node, leaves: Sequence[Node]) -> set[int]:
    """The nodes from some leaves up to the root, each visited once."""
    found = {top.number}
    for node in leaves:
        while node.number not in found:
            found.add(node.number)
            assert node.parent is not None
            node = trace.tree.node(node.parent)
    return found


def _build_branches(
    trace: TraceData, root: Node, shown: set[int], step: int | None, fold: bool | int
) -> Branch:
    """The shown nodes below a root as branches; nodes without a fork are joined up to depth `fold`."""
    top = Branch([root], state_at(root, step))
    waiting = [top]
    while waiting:
        above = waiting.pop()
        for number in trace.tree.node(above.last_node.number).children:
            if number not in shown:
                continue
            node = trace.tree.node(number)
            branch = Branch([node], state_at(node, step))
            while (child := _only_child(trace, branch.last_node, shown)) is not None:
                if not (fold is True or child.depth <= fold) or _path_state(child, step) != _path_state(
                    node, step
                ):
                    break
                branch.nodes.append(child)
            branch.state = state_at(branch.last_node, step)
            above.children.append(branch)
            waiting.append(branch)
    _sort_children(top)
    return top


def _only_child(trace: TraceData, node: Node, shown: set[int]) -> Node | None:
    """The shown child of a node, if there is exactly one."""
    children = [number for number in node.children if number in shown]
    return trace.tree.node(children[0]) if len(children) == 1 else None


def _path_state(node: Node, step: int | None) -> str:
    state = state_at(node, step)
    return state if state in ("best", "returned") else ""


def _sort_children(root: Branch) -> None:
    """Sort every fork (best, returned, largest first), and set `leads_to_end`."""
    sizes: dict[int, int] = {}
    for branch in reversed(list(root.walk())):
        branch.leads_to_end = any(child.state == "ended" or child.leads_to_end for child in branch.children)
        sizes[id(branch)] = 1 + sum(sizes[id(child)] for child in branch.children)
    for branch in root.walk():
        branch.children.sort(
            key=lambda child: (
                min(_STATE_ORDER[child.state], _STATE_ORDER["alive"]),
                -sizes[id(child)],
                -(child.nodes[0].score if child.nodes[0].score is not None else -math.inf),
                child.nodes[0].number,
            )
        )
