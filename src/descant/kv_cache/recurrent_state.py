"""The cache of objects: whatever state a model keeps by itself, held for rows that share a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["RecurrentStateCache", "concat_states", "state_signature", "take_state_rows"]

# Where rows are not along the first dimension, by the name of what holds the tensor.
_ROW_AXES = {"indexer_position_ids": 1, "mems": 1}

_LEAF_TYPES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


@dataclass
class _StateGroup:
    """A state object and the rows whose state its lines are."""

    rows: list[int]
    state: Any


class RecurrentStateCache:
    """State objects of a model's own, one for the rows that were fed together.

    Every tensor in such an object has its rows along one dimension, nearly always the first; taking rows
    takes lines of all of them, and objects that differ in nothing but their rows can be joined. State is
    not cut: what a recurrent layer has read it cannot unread.
    """

    max_rewind: int | None = 0

    def __init__(self, name: str = "") -> None:
        self._state_name = name  # what the model calls its state
        self._groups: list[_StateGroup] = []
        self._lengths = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has read [R] (host)."""
        return self._lengths

    def extend(self, rows: int) -> None:
        """Append rows that have read nothing."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))

    def row_batches(self) -> list[Tensor]:
        """The rows that have a state, in as few parts as can share an object (host)."""
        self._merge_groups()
        return [torch.tensor(sorted(group.rows)) for group in self._groups]

    def read_state(self, rows: Tensor) -> Any:
        """The state of those rows (host), a line each, in that order; it may be written to."""
        wanted = rows.tolist()
        for group in self._groups:
            if group.rows == wanted:
                return group.state
            if set(wanted) <= set(group.rows):
                return self._take_rows(group, [group.rows.index(row) for row in wanted])
        raise KeyError(f"rows {wanted} do not share a state")

    def write_state(self, rows: Tensor, state: Any) -> None:
        """Hold the state of those rows (host) after a forward."""
        fed = set(rows.tolist())
        rest = []
        for group in self._groups:
            left = [row for row in group.rows if row not in fed]
            if left == group.rows:
                rest.append(group)
            elif left:
                places = [group.rows.index(row) for row in left]
                rest.append(_StateGroup(left, self._take_rows(group, places)))
        self._groups = [*rest, _StateGroup(rows.tolist(), state)]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]`; it has read `lengths[i]` positions, all of them still."""
        self._lengths = lengths
        if parents is None:
            return
        old = parents.tolist()
        groups = []
        for group in self._groups:
            place = {row: line for line, row in enumerate(group.rows)}
            rows = [row for row, parent in enumerate(old) if parent in place]
            lines = [place[old[row]] for row in rows]
            if not rows:
                continue
            same = lines == list(range(len(group.rows)))
            groups.append(_StateGroup(rows, group.state if same else self._take_rows(group, lines)))
        self._groups = groups

    def select(self, rows: Tensor) -> Self:
        """A cache of its own with the states of these rows [N] (host), copied."""
        other = type(self)(self._state_name)
        other._lengths = self._lengths[rows].clone()
        wanted = rows.tolist()
        for group in self._groups:
            lines = {row: line for line, row in enumerate(group.rows)}
            mine = [place for place, row in enumerate(wanted) if row in lines]
            if mine:
                other._groups.append(
                    _StateGroup(mine, self._take_rows(group, [lines[wanted[place]] for place in mine]))
                )
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        first = len(self)
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._groups += [
            _StateGroup([first + row for row in group.rows], group.state) for group in other._groups
        ]
        other._groups, other._lengths = [], other._lengths[:0]

    def _take_rows(self, group: _StateGroup, lines: Sequence[int]) -> Any:
        return take_state_rows(group.state, lines, len(group.rows), self._state_name)

    def _merge_groups(self) -> None:
        """Join the objects that differ in nothing but their rows."""
        if len(self._groups) < 2:
            return
        alike: dict[Any, list[_StateGroup]] = {}
        for group in self._groups:
            alike.setdefault(state_signature(group.state, len(group.rows), self._state_name), []).append(
                group
            )
        self._groups = [
            some[0]
            if len(some) == 1
            else _StateGroup(
                [row for one in some for row in one.rows],
                concat_states([one.state for one in some], [len(one.rows) for one in some], self._state_name),
            )
            for some in alike.values()
        ]


def take_state_rows(state: Any, lines: Sequence[int], size: int, name: str = "") -> Any:
    """An object of `size` lines with those lines of it, the given one left as it is."""

    def take(leaves: Sequence[Tensor], axis: int) -> Tensor:
        leaf = leaves[0]
        if not _has_row_axis(leaf, axis, size):
            return leaf.clone()
        return leaf.index_select(axis, torch.tensor(list(lines), device=leaf.device))

    return _map_tensors([state], take, name)


def concat_states(states: Sequence[Any], sizes: Sequence[int], name: str = "") -> Any:
    """Objects of one shape as one, the lines of the first coming first."""

    def cat(leaves: Sequence[Tensor], axis: int) -> Tensor:
        whole = all(_has_row_axis(leaf, axis, size) for leaf, size in zip(leaves, sizes, strict=True))
        return torch.cat(list(leaves), axis) if whole else leaves[0]

    return _map_tensors(list(states), cat, name)


def state_signature(state: Any, size: int, name: str = "") -> Any:
    """All that tells an object of `size` lines from one with other lines: equal shapes can be joined."""
    parts: list[Any] = []

    def note(leaves: Sequence[Tensor], axis: int) -> Tensor:
        leaf = leaves[0]
        shape = list(leaf.shape)
        if _has_row_axis(leaf, axis, size):
            shape[axis] = -1
        parts.append((tuple(shape), leaf.dtype, leaf.device))
        return leaf

    _map_tensors([state], note, name, parts.append)
    return tuple(parts)


def _has_row_axis(leaf: Tensor, axis: int, size: int) -> bool:
    """Whether a tensor has a line for each row."""
    return leaf.ndim > axis and leaf.shape[axis] == size


def _map_tensors(
    states: list[Any],
    leaf: Callable[[Sequence[Tensor], int], Tensor],
    name: str,
    note: Callable[[Any], None] | None = None,
) -> Any:
    """A copy of the first object whose tensors are what `leaf` makes of those at their place."""
    first = states[0]
    if isinstance(first, Tensor):
        return leaf(states, _ROW_AXES.get(name, 0))
    if isinstance(first, _LEAF_TYPES) or callable(first) or hasattr(first, "to_dict"):  # the last: configs
        if note is not None and isinstance(first, bool | int | float | str | type(None)):
            note(first)
        return first
    if isinstance(first, list | tuple):
        parts = [_map_tensors(list(some), leaf, name, note) for some in zip(*states, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    whole = copy.copy(first)
    if isinstance(first, dict):
        for key in first:
            part = str(key) if isinstance(key, str) else name
            whole[key] = _map_tensors([state[key] for state in states], leaf, part, note)
        return whole
    for part in vars(first) if hasattr(first, "__dict__") else ():
        whole.__dict__[part] = _map_tensors([vars(state)[part] for state in states], leaf, part, note)
    return whole
