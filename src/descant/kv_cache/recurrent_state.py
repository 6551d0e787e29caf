"""The cache of recurrent models: opaque state objects, one for all rows fed together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["RecurrentStateCache", "concat_states", "state_signature", "take_state_rows"]

# The row dimension of tensors where it is not the first, by attribute or key name.
_ROW_AXES = {"indexer_position_ids": 1, "mems": 1}

_LEAF_TYPES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


@dataclass
class _StateGroup:
    """A state object, and the cache row of each of its rows."""

    rows: list[int]
    state: Any


class RecurrentStateCache:
    """State objects of a recurrent model, one for the rows that were fed together.

    Every tensor in a state object has one dimension for rows, nearly always the first. Rows are selected in
    all tensors alike, and objects that differ only in their rows are concatenated. Recurrent state cannot be
    rewound.
    """

    max_rewind: int | None = 0
    capacity: int | None = None

    def __init__(self, name: str = "") -> None:
        self._state_name = name  # the name of the state, looked up in `_ROW_AXES`
        self._groups: list[_StateGroup] = []
        self._lengths = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host)."""
        return self._lengths

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))

    def row_batches(self) -> list[Tensor]:
        """Merge states into as few objects as possible; returns the rows of each (host)."""
        self._merge_groups()
        return [torch.tensor(sorted(group.rows)) for group in self._groups]

    def read_state(self, rows: Tensor) -> Any:
        """The state of those rows (host), in that order; it may be written to."""
        wanted = rows.tolist()
        for group in self._groups:
            if group.rows == wanted:
                return group.state
            if set(wanted) <= set(group.rows):
                return self._take_rows(group, [group.rows.index(row) for row in wanted])
        raise KeyError(f"rows {wanted} do not share a state object")

    def write_state(self, rows: Tensor, state: Any) -> None:
        """Store the state of those rows (host) after a forward."""
        written = set(rows.tolist())
        others = []
        for group in self._groups:
            remaining = [row for row in group.rows if row not in written]
            if remaining == group.rows:
                others.append(group)
            elif remaining:
                indices = [group.rows.index(row) for row in remaining]
                others.append(_StateGroup(remaining, self._take_rows(group, indices)))
        self._groups = [*others, _StateGroup(rows.tolist(), state)]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]`, with `lengths[i]` positions; rows are never cut."""
        self._lengths = lengths
        if parents is None:
            return
        old = parents.tolist()
        groups = []
        for group in self._groups:
            index = {row: position for position, row in enumerate(group.rows)}
            rows = [row for row, parent in enumerate(old) if parent in index]
            indices = [index[old[row]] for row in rows]
            if not rows:
                continue
            unchanged = indices == list(range(len(group.rows)))
            groups.append(_StateGroup(rows, group.state if unchanged else self._take_rows(group, indices)))
        self._groups = groups

    def select(self, rows: Tensor) -> Self:
        """A new cache with copies of the states of these rows [N] (host)."""
        other = type(self)(self._state_name)
        other._lengths = self._lengths[rows].clone()
        wanted = rows.tolist()
        for group in self._groups:
            index = {row: position for position, row in enumerate(group.rows)}
            new_rows = [row for row, old_row in enumerate(wanted) if old_row in index]
            if new_rows:
                indices = [index[wanted[row]] for row in new_rows]
                other._groups.append(_StateGroup(new_rows, self._take_rows(group, indices)))
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another cache, which is emptied."""
        first = len(self)
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._groups += [
            _StateGroup([first + row for row in group.rows], group.state) for group in other._groups
        ]
        other._groups, other._lengths = [], other._lengths[:0]

    def _take_rows(self, group: _StateGroup, indices: Sequence[int]) -> Any:
        return take_state_rows(group.state, indices, len(group.rows), self._state_name)

    def _merge_groups(self) -> None:
        """Concatenate state objects that differ only in their rows."""
        if len(self._groups) < 2:
            return
        by_signature: dict[Any, list[_StateGroup]] = {}
        for group in self._groups:
            signature = state_signature(group.state, len(group.rows), self._state_name)
            by_signature.setdefault(signature, []).append(group)
        self._groups = [self._concat_groups(groups) for groups in by_signature.values()]

    def _concat_groups(self, groups: Sequence[_StateGroup]) -> _StateGroup:
        if len(groups) == 1:
            return groups[0]
        rows = [row for group in groups for row in group.rows]
        sizes = [len(group.rows) for group in groups]
        return _StateGroup(rows, concat_states([group.state for group in groups], sizes, self._state_name))


def take_state_rows(state: Any, indices: Sequence[int], size: int, name: str = "") -> Any:
    """A copy of those rows of a state object with `size` rows."""

    def take(leaves: Sequence[Tensor], axis: int) -> Tensor:
        leaf = leaves[0]
        if not _has_row_axis(leaf, axis, size):
            return leaf.clone()
        return leaf.index_select(axis, torch.tensor(list(indices), device=leaf.device))

    return _map_tensors([state], take, name)


def concat_states(states: Sequence[Any], sizes: Sequence[int], name: str = "") -> Any:
    """Concatenate state objects of equal signature along their rows."""

    def cat(leaves: Sequence[Tensor], axis: int) -> Tensor:
        per_row = all(_has_row_axis(leaf, axis, size) for leaf, size in zip(leaves, sizes, strict=True))
        return torch.cat(list(leaves), axis) if per_row else leaves[0]

    return _map_tensors(list(states), cat, name)


def state_signature(state: Any, size: int, name: str = "") -> Any:
    """Everything in a state object of `size` rows except the rows; equal signatures can be concatenated."""
    parts: list[Any] = []

    def record(leaves: Sequence[Tensor], axis: int) -> Tensor:
        leaf = leaves[0]
        shape = list(leaf.shape)
        if _has_row_axis(leaf, axis, size):
            shape[axis] = -1
        parts.append((tuple(shape), leaf.dtype, leaf.device))
        return leaf

    _map_tensors([state], record, name, parts.append)
    return tuple(parts)


def _has_row_axis(leaf: Tensor, axis: int, size: int) -> bool:
    """Whether a tensor has one entry per row along an axis."""
    return leaf.ndim > axis and leaf.shape[axis] == size


def _map_tensors(
    states: list[Any],
    leaf: Callable[[Sequence[Tensor], int], Tensor],
    name: str,
    on_scalar: Callable[[Any], None] | None = None,
) -> Any:
    """A copy of the first object, with each tensor replaced by `leaf(same tensor of all objects, axis)`."""
    first = states[0]
    if isinstance(first, Tensor):
        return leaf(states, _ROW_AXES.get(name, 0))
    if isinstance(first, _LEAF_TYPES) or callable(first) or hasattr(first, "to_dict"):  # the last: configs
        if on_scalar is not None and isinstance(first, bool | int | float | str | type(None)):
            on_scalar(first)
        return first
    if isinstance(first, list | tuple):
        parts = [_map_tensors(list(items), leaf, name, on_scalar) for items in zip(*states, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    mapped = copy.copy(first)
    if isinstance(first, dict):
        for key in first:
            key_name = str(key) if isinstance(key, str) else name
            mapped[key] = _map_tensors([state[key] for state in states], leaf, key_name, on_scalar)
        return mapped
    for attribute in vars(first) if hasattr(first, "__dict__") else ():
        values = [vars(state)[attribute] for state in states]
        mapped.__dict__[attribute] = _map_tensors(values, leaf, attribute, on_scalar)
    return mapped
