"""The table of a batch: a row is one hypothesis, everything that lives per row is a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Column",
    "Rows",
    "UniformLength",
    "concat_padded",
    "index_rows",
    "pad_right",
    "stable_row_order",
    "take_rows",
    "uniform_value",
]

_versions = count(1)


@runtime_checkable
class Column(Protocol):
    """Python state that lives per row and can follow its row: a tensor does the same by indexing.

    `constant` says that all rows of one request hold the same, so that moving rows inside their
    request moves nothing.
    """

    @property
    def is_per_request(self) -> bool:
        """Whether all rows of one request hold the same."""
        ...

    def take(self, parents: Tensor) -> Self:
        """The same column for new rows: row `i` continues old row `parents[i]`."""
        ...

    def cat(self, other: Self) -> Self:
        """This column with another table's rows after its own."""
        ...


def uniform_value(column: Tensor) -> int | None:
    """The value that a column on the host has in every row, if it has one."""
    values = column.numpy()
    return int(values[0]) if (values == values[0]).all() else None


def index_rows(column: Tensor, index: Tensor) -> Tensor:
    """The rows `index` (on the host) of a column on any device."""
    return column.index_select(0, index.to(column.device, non_blocking=True))


def concat_padded(first: Tensor, second: Tensor, fill: int = -1) -> Tensor:
    """Two columns one below the other, the narrower one padded on the right with `fill`."""
    if first.shape[1:] == second.shape[1:]:
        return torch.cat((first, second))
    wide = [max(pair) for pair in zip(first.shape[1:], second.shape[1:], strict=True)]
    return torch.cat((pad_right(first, wide, fill), pad_right(second, wide, fill)))


def pad_right(column: Tensor, wide: Sequence[int], fill: int = -1) -> Tensor:
    """A column whose entries are padded on the right to the size `wide`."""
    lacks = [(0, most - have) for most, have in zip(wide, column.shape[1:], strict=True)]
    return torch.nn.functional.pad(column, [edge for pair in reversed(lacks) for edge in pair], value=fill)


def take_rows(column: Tensor | Column, parents: Tensor) -> Tensor | Column:
    """A column of either kind for rows that continue these."""
    return index_rows(column, parents) if isinstance(column, Tensor) else column.take(parents)


def stable_row_order(parents: Tensor, rows: int) -> Tensor | None:
    """An order of the new rows that leaves each surviving row where its first child can keep it.

    A table has no order of its own, so only rows that were forked, or that fill a hole, need to move:
    None when the given order does so already.
    """
    given = parents.numpy()
    count = len(given)
    if count == rows and (given == np.arange(rows)).all():
        return None
    place = np.full(max(count, rows), -1)
    first = np.unique(given, return_index=True)[1]
    stays = first[given[first] < count]
    place[given[stays]] = stays
    rest = np.setdiff1d(np.arange(count), stays, assume_unique=True)
    place[np.flatnonzero(place[:count] < 0)] = rest
    return torch.from_numpy(place[:count])


class UniformLength(NamedTuple):
    """Where rows stand that all stand alike, without a position that has no token."""

    length: int
    cached_length: int


@dataclass
class Rows:
    """The batch. Tokens live on the model's device; what the loop must know to steer lives on the host.

    A row stands at position `offset + length`: `offset` positions were fed as embeddings and have no
    token, `length` have one. The cache holds the first `cached` positions; the rest are pending.
    `version` changes when rows of other requests come, go or move, so that what is compiled from the
    layout of the table (index tensors, parameters on the device) can be kept until then.
    """

    tokens: Tensor  # [R, C] decided tokens, right padded
    length: Tensor  # [R] how many are decided (host)
    cached_length: Tensor  # [R] how many positions the cache holds (host)
    offset: Tensor  # [R] how many positions have no token (host)
    prompt_length: Tensor  # [R] how many of the tokens are prompt (host)
    request: Tensor  # [R] which request the row belongs to (host)
    slot: Tensor  # [R] which of its request's rows it is (host)
    columns: Mapping[str, Tensor | Column] = field(default_factory=dict)
    version: object = field(default_factory=lambda: next(_versions))

    HOST_FIELDS = ("length", "cached_length", "offset", "prompt_length", "request", "slot")
    _UNKNOWN = UniformLength(-1, -1)
    _uniform_length: ClassVar[UniformLength | None] = _UNKNOWN

    def __len__(self) -> int:
        return len(self.length)

    @property
    def position(self) -> Tensor:
        """Where each row stands: the position of its next token [R]."""
        return self.offset + self.length

    @property
    def pending(self) -> Tensor:
        """How many positions of each row the cache does not hold yet [R]."""
        return self.position - self.cached_length

    @property
    def uniform_length(self) -> UniformLength | None:
        """Where the rows stand, if all stand alike; found out once, for most steps move all rows by one."""
        if self._uniform_length is Rows._UNKNOWN:
            length, cached = uniform_value(self.length), uniform_value(self.cached_length)
            alike = length is not None and cached is not None and not self.offset.numpy().any()
            vars(self)["_uniform_length"] = UniformLength(length, cached) if alike else None  # type: ignore[arg-type]
        return self._uniform_length

    def column(self, name: str) -> Tensor:
        """The tensor column of that name [R, ...]."""
        value = self.columns[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"column `{name}` holds {type(value).__name__}, not a tensor")
        return value

    def take(self, parents: Tensor) -> Rows:
        """New row `i` continues old row `parents[i]` (host): reorder, fork and drop in one verb."""
        host = {name: getattr(self, name)[parents] for name in self.HOST_FIELDS}
        same = torch.equal(host["request"], self.request)
        columns: dict[str, Tensor | Column] = {}
        for name, value in self.columns.items():
            if isinstance(value, Tensor):
                columns[name] = index_rows(value, parents)
            else:
                columns[name] = value if same and value.is_per_request else value.take(parents)
        version = self.version if same else next(_versions)
        return Rows(index_rows(self.tokens, parents), **host, columns=columns, version=version)

    def cat(self, other: Rows) -> Rows:
        """This table with another's rows below; both have the same columns."""
        if self.columns.keys() != other.columns.keys():
            odd = sorted(self.columns.keys() ^ other.columns.keys())
            raise KeyError(f"tables joined must have the same columns, these are in one only: {odd}")
        host = {name: torch.cat((getattr(self, name), getattr(other, name))) for name in self.HOST_FIELDS}
        columns: dict[str, Tensor | Column] = {}
        for name, mine in self.columns.items():
            theirs = other.columns[name]
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
                columns[name] = concat_padded(mine, theirs)
            elif isinstance(mine, Column) and isinstance(theirs, Column):
                columns[name] = mine.cat(theirs)
            else:
                raise TypeError(f"column `{name}` is a tensor in one table and Python state in the other")
        return Rows(concat_padded(self.tokens, other.tokens, 0), **host, columns=columns)

    def append(self, tokens: Tensor, length: Tensor, **fields: Any) -> Rows:
        """The rows with `tokens` [R, K] after what they have, of which `length` (host) in all are decided."""
        if not len(self):
            return self.replace(**fields)
        width = tokens.shape[1]
        store = self._with_capacity(int(self.length.max()) + width)
        at = self.length.to(store.device)[:, None] + torch.arange(width, device=store.device)
        return self.replace(tokens=store.scatter_(1, at, tokens), length=length, **fields)

    def advance(self, tokens: Tensor, **fields: Any) -> Rows:
        """The rows with one more token each [R], everything before it cached."""
        even = self.uniform_length if len(self) else None
        if even is None:
            return self.append(tokens[:, None], self.length + 1, cached_length=self.position, **fields)
        store = self._with_capacity(even.length + 1)
        store.select(1, even.length).copy_(tokens)
        now = UniformLength(even.length + 1, even.length)
        return self.replace(
            tokens=store, length=self.length + 1, cached_length=self.length, _uniform_length=now, **fields
        )

    def replace(self, **fields: Any) -> Rows:
        """The same rows with some fields new; what `dataclasses.replace` does, at a tenth of its price."""
        new = object.__new__(Rows)
        mine = vars(new)
        mine.update(vars(self))
        if "length" in fields or "cached_length" in fields or "offset" in fields:
            mine.pop("_uniform_length", None)
        mine.update(fields)
        return new

    def _with_capacity(self, need: int) -> Tensor:
        """The token store with room for so many tokens in every row."""
        have = self.tokens.shape[1]
        if need <= have:
            return self.tokens
        grown = self.tokens.new_zeros(len(self), max(need, have + have // 2))
        grown[:, :have] = self.tokens
        return grown
