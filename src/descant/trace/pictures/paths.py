"""The nodes of one sequence of a trace."""

from __future__ import annotations

import math

from descant.trace.pictures.selection import TraceSelection
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = ["sequence_leaf", "sequence_path"]


def sequence_leaf(trace: TraceData, selection: TraceSelection) -> Node | None:
    """The last node of the selected sequence; before a result, of the best running one."""
    assert selection.request is not None
    result = trace.results.get(selection.request)
    if result is not None and result.sequences:
        return trace.tree.node(result.sequences[selection.sequence].leaf)
    nodes = trace.tree.request_nodes(selection.request)
    last = max((node.step for node in nodes), default=-1)
    ends = [node for node in nodes if not node.children and node.step == last] or nodes
    return max(
        ends, key=lambda node: (-math.inf if node.score is None else node.score, -node.slot), default=None
    )


def sequence_path(trace: TraceData, selection: TraceSelection) -> list[Node]:
    """The nodes of the selected sequence, up to the selected step."""
    leaf = sequence_leaf(trace, selection)
    if leaf is None:
        return []
    return [
        node
        for node in trace.tree.path_to(leaf.number)
        if selection.step is None or node.step <= selection.step
    ]
