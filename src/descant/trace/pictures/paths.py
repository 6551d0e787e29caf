"""One sequence of a trace: its nodes from the first new token to the last."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from descant.trace.pictures.selection import TraceSelection
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["sequence_leaf", "sequence_path"]


def sequence_leaf(trace: Trace, where: TraceSelection) -> Node | None:
    """The last node of the sequence: of one that was returned, or else the best that still stands."""
    assert where.request is not None
    result = trace.results.get(where.request)
    if result is not None and result.sequences:
        return trace.tree.node(result.sequences[where.sequence].leaf)
    nodes = trace.tree.request_nodes(where.request)
    last = max((node.step for node in nodes), default=-1)
    ends = [node for node in nodes if not node.children and node.step == last] or nodes
    return max(
        ends, key=lambda node: (-math.inf if node.score is None else node.score, -node.slot), default=None
    )


def sequence_path(trace: Trace, where: TraceSelection) -> list[Node]:
    """The nodes of the sequence as far as it had come after the step."""
    leaf = sequence_leaf(trace, where)
    if leaf is None:
        return []
    return [node for node in trace.tree.path_to(leaf.number) if where.step is None or node.step <= where.step]
