"""The cache of recurrent models: opaque state objects, one for all rows fed together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from descant.kv_cache.stores.block_store import Store

# The row dimension of tensors where it is not the first, by attribute or key name.
_ROW_AXES = {"indexer_position_ids": 1, "mems": 1}

_LEAF_TYPES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


@dataclass
class _StateGroup:
    """A state object, the cache row of each of its rows, and how many positions each of them has read."""

    rows: list[int]
    state: Any
    lengths: Sequence[int | None]  # None: not known before the next commit


class RecurrentStateCache(Store):
    """State objects of a recurrent model, one for the rows that were fed together.

    Every tensor in a state object has one dimension for rows, nearly always the first. Rows are selected in
    all tensors alike, and objects that differ only in their rows are concatenated. Recurrent state cannot be
    rewound, so a row has its last committed state until a commit accepts what was written since: a forward
    that was interrupted can be repeated. A state object is replaced and never written to.
    """

    grows = False
    max_rewind: int | None = 0

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._state_name = name  # the name of the state, looked up in `_ROW_AXES`
        self._groups: list[_StateGroup] = []  # committed, and in order what was written since

    def row_batches(self, lengths: Tensor | None = None) -> list[Tensor]:
        """Merge states into as few objects as possible; returns the rows of each (host).

        `lengths` [R] (host) is how many positions each row has read at the beginning of a forward, -1 for
        rows that are not fed. Other states of fed rows are dropped. None: every row has its latest state.
        """
        self._keep_states([None] * len(self) if lengths is None else lengths.tolist())
        if len(self._groups) > 1:  # those that differ only in their rows become one
            by_signature: dict[Any, list[_StateGroup]] = {}
            for group in self._groups:
                signature = state_signature(group.state, len(group.rows), self._state_name)
                by_signature.setdefault(signature, []).append(group)
            self._groups = [self._concat_groups(groups) for groups in by_signature.values()]
        return [torch.tensor(sorted(group.rows)) for group in self._groups]

    def read_state(self, rows: Tensor) -> Any:
        """The state of those rows (host), in that order; it must not be written to."""
        wanted = rows.tolist()
        for group in reversed(self._groups):
            if group.rows == wanted:
                return group.state
            if set(wanted) <= set(group.rows):
                return self._take_rows(group, [group.rows.index(row) for row in wanted])
        raise KeyError(f"rows {wanted} do not share a state object")

    def write_state(self, rows: Tensor, state: Any, lengths: Tensor | None = None) -> None:
        """Store the state of those rows (host) after `lengths` [N] positions, until a commit accepts it."""
        known = [None] * len(rows) if lengths is None else lengths.tolist()
        self._groups = [*self._groups, _StateGroup(rows.tolist(), state, known)]

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit of the states after `lengths[i]` positions; nothing changes until it is called."""
        old_rows = range(len(lengths)) if parents is None else parents.tolist()
        groups = self._select_groups(old_rows, lengths.tolist())

        def commit() -> None:
            self._groups, self._lengths = groups, lengths

        return commit

    def select(self, rows: Tensor) -> Self:
        """A new cache with copies of the committed states of these rows [N] (host)."""
        other = type(self)(self._state_name)
        other._lengths = self._lengths[rows].clone()
        other._groups = self._select_groups(rows.tolist(), other._lengths.tolist(), copies=True)
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another cache, which is emptied."""
        first = len(self)
        joined = other._select_groups(range(len(other)), other._lengths.tolist())
        for group in joined:
            group.rows = [first + row for row in group.rows]
        lengths = torch.cat((self._lengths, other._lengths))
        self._groups, self._lengths = [*self._groups, *joined], lengths
        other._groups, other._lengths = [], other._lengths[:0]

    # -------------------------------------------------------------------- groups
    def _select_groups(
        self, rows: Sequence[int], lengths: Sequence[int], copies: bool = False
    ) -> list[_StateGroup]:
        """New groups whose row `i` has the state of row `rows[i]` after `lengths[i]` positions.

        A row has the latest of its states where none has that length, and no state where the length is 0.
        """
        found = self._find_states()
        members: dict[int, list[tuple[int, int]]] = {}  # by group the new rows, and their index in it
        for new_row, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            latest = found.get((row, None))
            unknown = latest is not None and self._groups[latest[0]].lengths[latest[1]] is None
            place = found.get((row, length), latest if length or unknown else None)
            if place is not None:
                members.setdefault(place[0], []).append((new_row, place[1]))
        groups = []
        for number, pairs in sorted(members.items()):
            group, indices = self._groups[number], [index for _, index in pairs]
            unchanged = not copies and indices == list(range(len(group.rows)))
            state = group.state if unchanged else self._take_rows(group, indices)
            new_rows = [row for row, _ in pairs]
            groups.append(_StateGroup(new_rows, state, [lengths[row] for row in new_rows]))
        return groups

    def _find_states(self) -> dict[tuple[int, int | None], tuple[int, int]]:
        """Group and index of the latest state by row and length; by row and None of the latest of all."""
        found: dict[tuple[int, int | None], tuple[int, int]] = {}
        for number, group in enumerate(self._groups):
            for index, (row, length) in enumerate(zip(group.rows, group.lengths, strict=True)):
                found[row, length] = found[row, None] = number, index
        return found

    def _keep_states(self, lengths: Sequence[int | None]) -> None:
        """Keep one state of each row: after `lengths[row]` positions, else the latest; -1: keep all."""
        found = self._find_states()
        kept: set[tuple[int, int]] = set()
        for row, length in enumerate(lengths):
            latest = found.get((row, None))
            if latest is None:
                continue
            if length == -1:
                kept.update(place for (other, _), place in found.items() if other == row)
            elif length != 0:
                kept.add(found.get((row, length), latest))
        if len(kept) == sum(len(group.rows) for group in self._groups):
            return
        groups = []
        for number, group in enumerate(self._groups):
            indices = [index for index in range(len(group.rows)) if (number, index) in kept]
            if len(indices) == len(group.rows):
                groups.append(group)
            elif indices:
                rows, known = [group.rows[at] for at in indices], [group.lengths[at] for at in indices]
                groups.append(_StateGroup(rows, self._take_rows(group, indices), known))
        self._groups = groups

    def _take_rows(self, group: _StateGroup, indices: Sequence[int]) -> Any:
        return take_state_rows(group.state, indices, len(group.rows), self._state_name)

    def _concat_groups(self, groups: Sequence[_StateGroup]) -> _StateGroup:
        if len(groups) == 1:
            return groups[0]
        rows = [row for group in groups for row in group.rows]
        lengths = [length for group in groups for length in group.lengths]
        sizes = [len(group.rows) for group in groups]
        state = concat_states([group.state for group in groups], sizes, self._state_name)
        return _StateGroup(rows, state, lengths)


def take_state_rows(state: Any, indices: Sequence[int], size: int, name: str = "") -> Any:
    """A copy of those rows of a state object with `size` rows."""

    def take(leaves: Sequence[Tensor], axis: int) -> Tensor:
        leaf = leaves[0]
        if not _has_row_axis(leaf, axis, size):
            return leaf.clone()
        return leaf.index_select(axis, torch.tensor(list(indices), device=leaf.device))

    return _map_tensors([state], take, name)


def copy_state(state: Any, is_replaced: Callable[[Any, str], bool] = lambda _, __: False) -> Any:
    """A copy of a state object that can be written to.

    `is_replaced(owner, name)` says that an attribute is only ever replaced as a whole, so that it is shared.
    """
    return _map_tensors([state], lambda leaves, _: leaves[0].clone(), is_shared=is_replaced)


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


def _is_opaque(value: Any) -> bool:
    """Whether a part of a state is shared by all copies; the last condition is for configs."""
    return isinstance(value, _LEAF_TYPES) or callable(value) or hasattr(value, "to_dict")


def _has_row_axis(leaf: Tensor, axis: int, size: int) -> bool:
    """Whether a tensor has one entry per row along an axis."""
    return leaf.ndim > axis and leaf.shape[axis] == size


def _map_tensors(
    states: list[Any],
    leaf: Callable[[Sequence[Tensor], int], Tensor],
    name: str = "",
    on_scalar: Callable[[Any], None] = lambda _: None,
    is_shared: Callable[[Any, str], bool] = lambda _, __: False,
) -> Any:
    """A copy of the first object, with each tensor replaced by `leaf(same tensor of all objects, axis)`.

    Attributes for which `is_shared(owner, name)` holds stay as they are.
    """
    first = states[0]
    if isinstance(first, Tensor):
        return leaf(states, _ROW_AXES.get(name, 0))
    if _is_opaque(first):
        if isinstance(first, bool | int | float | str | type(None)):
            on_scalar(first)
        return first

    def map_part(parts: list[Any], part_name: str) -> Any:
        return _map_tensors(parts, leaf, part_name, on_scalar, is_shared)

    if isinstance(first, list | tuple):
        parts = [map_part(list(items), name) for items in zip(*states, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    mapped = copy.copy(first)
    if isinstance(first, dict):
        for key in first:
            mapped[key] = map_part([state[key] for state in states], key if isinstance(key, str) else name)
        return mapped
    for attribute in vars(first) if hasattr(first, "__dict__") else ():
        if not is_shared(first, attribute):
            values = [vars(state)[attribute] for state in states]
            mapped.__dict__[attribute] = map_part(values, attribute)
    return mapped
