"""The cache of recurrent models: opaque state objects, one for all rows fed together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from descant.kv_cache.stores.block_store import Store

# The row dimension of tensors where it is not the first, by attribute or key name.
_ROW_AXES = {"indexer_position_ids": 1, "mems": 1}

# Positions between older states that a row keeps: the length of a phrase that may be taken back.
_MIN_DISTANCE = 16

_LEAF_TYPES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


@dataclass
class _StateGroup:
    """A state object, the cache row of each of its rows, and how many positions each of them has read."""

    rows: list[int]
    state: Any
    lengths: Sequence[int | None]  # None: not known before the next commit


class _StatePlace(NamedTuple):
    """Where a state of a row is, and how many positions it has read; None: not known before a commit."""

    at: tuple[int, int]  # the number of its group, and the index of the row in it
    length: int | None


class RecurrentStateCache(Store):
    """State objects of a recurrent model, one for the rows that were fed together.

    Every tensor in a state object has one dimension for rows, nearly always the first. Rows are selected in
    all tensors alike, and objects that differ only in their rows are concatenated. A state object is replaced
    and never written to. A state cannot be cut: a row that is cut has the longest of its states that has read
    no more, and the positions after it are fed again. Until a commit, all states that forwards have written
    are kept. From the first cut below all states of a row on, each row also keeps two older ones.
    """

    grows = False

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._state_name = name  # the name of the state, looked up in `_ROW_AXES`
        self._groups: list[_StateGroup] = []  # of each row in order of length
        self._keeps_older = False

    def state_lengths(self, lengths: Tensor) -> Tensor:
        """The positions that the state of each row has read [R] (host), at most `lengths` [R] (host)."""
        limits, states = lengths.tolist(), self._find_states()
        read = [0] * len(limits)
        for row, places in states.items():
            place = _longest(places, limits[row])
            if place is not None:
                read[row] = limits[row] if place.length is None else place.length
        return torch.tensor(read, dtype=torch.long)

    def row_batches(self, lengths: Tensor | None = None) -> list[Tensor]:
        """Merge states into as few objects as possible; returns the rows of each (host).

        `lengths` [R] (host) is how many positions each row has read at the beginning of a forward, -1 for
        rows that are not fed. Longer states of fed rows are dropped. None: every row has its latest state.
        """
        limits = [-1] * len(self) if lengths is None else lengths.tolist()
        latest: set[tuple[int, int]] = set()
        dropped: set[tuple[int, int]] = set()
        for row, places in self._find_states().items():
            limit = limits[row]
            place = places[-1] if limit == -1 else _longest(places, limit) if limit else None
            latest.update(() if place is None else [place.at])
            first = 0 if place is None else places.index(place) + 1
            dropped.update(other.at for other in places[first:])
        rest: list[_StateGroup] = []
        parts: list[_StateGroup] = []
        for number, group in enumerate(self._groups):
            indices = [(number, index) for index in range(len(group.rows))]
            parts += self._part(group, [index for _, index in indices if (number, index) in latest])
            older = [one for one in indices if one not in latest and one not in dropped]
            rest += self._part(group, [index for _, index in older])
        if len(parts) > 1:  # those that differ only in their rows become one
            by_signature: dict[Any, list[_StateGroup]] = {}
            for part in parts:
                signature = state_signature(part.state, len(part.rows), self._state_name)
                by_signature.setdefault(signature, []).append(part)
            parts = [self._concat_groups(same) for same in by_signature.values()]
        self._groups = [*rest, *parts]
        return [torch.tensor(sorted(part.rows)) for part in parts]

    def read_state(self, rows: Tensor) -> Any:
        """The latest state of those rows (host), in that order; it must not be written to."""
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
        """A commit that cuts row `i` to `lengths[i]` positions; nothing changes until it is called."""
        old_rows = range(len(lengths)) if parents is None else parents.tolist()
        limits, states = lengths.tolist(), self._find_states()
        keeps_older = self._keeps_older or any(
            limit and row in states and _longest(states[row], limit) is None
            for row, limit in zip(old_rows, limits, strict=True)
        )
        groups = self._select_groups(old_rows, limits, keeps_older=keeps_older)

        def commit() -> None:
            self._groups, self._lengths, self._keeps_older = groups, lengths, keeps_older

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
        self, rows: Sequence[int], lengths: Sequence[int], copies: bool = False, keeps_older: bool = False
    ) -> list[_StateGroup]:
        """New groups: row `i` has the longest state of row `rows[i]` of at most `lengths[i]` positions."""
        states = self._find_states()
        members: dict[int, list[tuple[int, int]]] = {}  # by group the new rows, and their index in it
        for new_row, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            places = states.get(row, [])
            place = _longest(places, length)
            if place is None:
                continue
            kept = [place]
            if keeps_older:
                kept += _older(places[: places.index(place)])
            for number, index in (one.at for one in kept):
                members.setdefault(number, []).append((new_row, index))
        groups = []
        for number, pairs in sorted(members.items()):
            group, indices = self._groups[number], [index for _, index in pairs]
            unchanged = not copies and indices == list(range(len(group.rows)))
            state = group.state if unchanged else self._take_rows(group, indices)
            known = [
                lengths[new_row] if group.lengths[index] is None else group.lengths[index]
                for new_row, index in pairs
            ]
            groups.append(_StateGroup([new_row for new_row, _ in pairs], state, known))
        return groups

    def _find_states(self) -> dict[int, list[_StatePlace]]:
        """The states of each row, in order of length."""
        states: dict[int, list[_StatePlace]] = {}
        for number, group in enumerate(self._groups):
            for index, (row, length) in enumerate(zip(group.rows, group.lengths, strict=True)):
                states.setdefault(row, []).append(_StatePlace((number, index), length))
        return states

    def _part(self, group: _StateGroup, indices: Sequence[int]) -> list[_StateGroup]:
        """The group of those rows of a group; empty: of none."""
        if len(indices) == len(group.rows):
            return [group]
        rows, known = [group.rows[at] for at in indices], [group.lengths[at] for at in indices]
        return [_StateGroup(rows, self._take_rows(group, indices), known)] if indices else []

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


def _longest(places: Sequence[_StatePlace], limit: int) -> _StatePlace | None:
    """The longest state of a row with at most that many positions; None: it has none."""
    fitting = (place for place in reversed(places) if place.length is None or 0 < place.length <= limit)
    return next(fitting, None)


def _older(places: Sequence[_StatePlace]) -> list[_StatePlace]:
    """The last two of a row's older states that are `_MIN_DISTANCE` positions apart.

    After a cut by that many positions, at most three times as many are fed again.
    """
    kept: list[_StatePlace] = []
    for place in places:
        if not kept or (place.length or 0) - (kept[-1].length or 0) >= _MIN_DISTANCE:
            kept.append(place)
    return kept[-2:]


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
