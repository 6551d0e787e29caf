"""The table of a batch: a row is one hypothesis, and all state of a row is in columns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

_versions = count(1)
_FEW_ROWS = 16
_NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})


@runtime_checkable
class Column(Protocol):
    """Python state with one entry per row, which follows its row as a tensor does by indexing."""

    @property
    def is_per_request(self) -> bool:
        """Whether all rows of a request have the same entry, so that moves inside it change nothing."""
        ...

    def take(self, parents: Tensor) -> Self:
        """The column of new rows: row `i` continues old row `parents[i]`."""
        ...

    def cat(self, other: Self) -> Self:
        """This column followed by another table's."""
        ...


def uniform_value(column: Tensor) -> int | None:
    """The value of every row of a column on the host; None: they differ."""
    values = column.numpy()
    return int(values[0]) if (values == values[0]).all() else None


def index_rows(column: Tensor, index: Tensor) -> Tensor:
    """The rows `index` (on the host) of a column on any device."""
    return column.index_select(0, index if column.is_cpu else on_device(index, column.device))


_MAX_SENT, _MAX_SENT_BYTES = 256, 4096
_sent: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()  # the last ones used, by their content


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device, which must not be written to; equal values are sent once.

    Most steps use the indices of the step before, and a copy takes the host as long as several kernels.
    """
    if device.type == "cpu" or not values.is_cpu or values.nbytes > _MAX_SENT_BYTES:
        return values.to(device, non_blocking=True)
    key = device, values.dtype, values.shape, values.numpy().tobytes()
    sent = _sent.pop(key, None)
    if sent is None:
        with torch.inference_mode(False):  # it outlives the caller's mode
            sent = values.to(device, non_blocking=True)
        while len(_sent) >= _MAX_SENT:
            _sent.popitem(last=False)
    _sent[key] = sent
    return sent


def concat_padded(first: Tensor, second: Tensor, fill: int = -1) -> Tensor:
    """Two columns as one, the narrower one padded on the right with `fill`."""
    if first.shape[1:] == second.shape[1:]:
        return torch.cat((first, second))
    sizes = [max(pair) for pair in zip(first.shape[1:], second.shape[1:], strict=True)]
    return torch.cat((pad_right(first, sizes, fill), pad_right(second, sizes, fill)))


def pad_right(column: Tensor, sizes: Sequence[int], fill: int = -1) -> Tensor:
    """A column whose entries are padded on the right to these sizes."""
    padding = [(0, size - old) for size, old in zip(sizes, column.shape[1:], strict=True)]
    return torch.nn.functional.pad(column, [edge for pair in reversed(padding) for edge in pair], value=fill)


def take_rows(column: Tensor | Column, parents: Tensor) -> Tensor | Column:
    """A column of either type for rows that continue these."""
    return index_rows(column, parents) if isinstance(column, Tensor) else column.take(parents)


def concat_columns(first: Tensor | Column, second: Tensor | Column) -> Tensor | Column:
    """Two columns of the same type as one."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return concat_padded(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        raise TypeError("both columns must be tensors or both must be Columns, got one of each")
    return first.cat(second)


def new_rows_column(
    start: float | Tensor | Column, count: int, device: torch.device | None = None
) -> Tensor | Column:
    """A column of `count` new rows, each with the value `start`: a number, a tensor [1, ...] or a Column."""
    if isinstance(start, Tensor):
        return start.repeat(count, *[1] * (start.ndim - 1))
    if isinstance(start, int | float):
        return torch.full((count,), start, device=device)
    return start.take(torch.zeros(count, dtype=torch.long))


def stable_row_order(parents: Tensor, rows: int) -> Tensor | None:
    """An order of the new rows in which the first child of each surviving row keeps its index.

    The order of a table has no meaning, so only forked rows, and rows that fill a hole, need to move.
    None: the given order does so already.
    """
    given = parents.numpy()
    count = len(given)
    if max(count, rows) <= _FEW_ROWS:
        return _few_rows_order(given.tolist(), rows)
    if count == rows and (given == np.arange(rows)).all():
        return None
    order = np.full(max(count, rows), -1)
    order[given[::-1]] = np.arange(count)[::-1]  # of a row's children the first is written last
    order = order[:count]
    moves = np.ones(count, dtype=bool)
    moves[order[order >= 0]] = False
    order[order < 0] = np.flatnonzero(moves)
    return torch.from_numpy(order)


def _few_rows_order(parents: Sequence[int], rows: int) -> Tensor | None:
    """The same for a few rows, for which plain lists take less time than arrays."""
    count = len(parents)
    if count == rows and parents == list(range(rows)):
        return None
    first_child: dict[int, int] = {}
    for child, parent in enumerate(parents):
        first_child.setdefault(parent, child)
    kept = {child for parent, child in first_child.items() if parent < count}
    moved = iter([child for child in range(count) if child not in kept])
    order = [first_child[row] if row in first_child else next(moved) for row in range(count)]
    return torch.tensor(order, dtype=torch.long)


class UniformLength(NamedTuple):
    """The length and cached length of all rows, where these are equal and every position has a token."""

    length: int
    cached_length: int


@dataclass
class Rows:
    """The batch as a table, one hypothesis a row.

    Tokens are on the model's device; what steers the loop is on the host.
    The next position of a row is `offset + length`: `offset` positions were fed as embeddings and have no
    token, `length` have one. The cache holds the first `cached_length` positions; the rest are pending.
    `version` changes when rows of other requests are added, removed or moved, so that whatever depends on
    the layout of the table (index tensors, parameters on the device) can be reused until then.
    """

    tokens: Tensor  # [R, C] chosen tokens, right padded
    length: Tensor  # [R] number of chosen tokens (host)
    cached_length: Tensor  # [R] number of positions in the cache (host)
    offset: Tensor  # [R] number of positions without a token (host)
    prompt_length: Tensor  # [R] number of tokens that are prompt (host)
    request: Tensor  # [R] the request of the row (host)
    slot: Tensor  # [R] the index of the row in its request (host)
    columns: Mapping[str, Tensor | Column] = field(default_factory=dict)
    version: object = field(default_factory=lambda: next(_versions))

    HOST_FIELDS = ("length", "cached_length", "offset", "prompt_length", "request", "slot")

    def __len__(self) -> int:
        return self.length.shape[0]  # `len` of a tensor is several times slower

    @property
    def position(self) -> Tensor:
        """The position of each row's next token [R]."""
        return self.offset + self.length

    @property
    def pending(self) -> Tensor:
        """The number of positions of each row that the cache does not hold yet [R]."""
        return self.position - self.cached_length

    @cached_property
    def uniform_length(self) -> UniformLength | None:
        """The lengths, if equal in all rows; computed once, since most steps move all rows by one."""
        length = uniform_value(self.length)
        if length is None or self.offset.numpy().any():
            return None
        cached = uniform_value(self.cached_length)
        return None if cached is None else UniformLength(length, cached)

    def column(self, name: str) -> Tensor:
        """The tensor column of that name [R, ...]."""
        value = self.columns[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"column `{name}` must be a tensor, got {type(value).__name__}")
        return value

    def take(self, parents: Tensor, new_columns: Mapping[str, Tensor | Column] = _NO_COLUMNS) -> Rows:
        """A new table whose row `i` continues row `parents[i]` (host): reorder, fork and drop in one.

        `new_columns` replace those of the same name, which are not moved then.
        """
        index = parents.numpy()
        # Numpy: torch takes twice as long to index a short column.
        host = {}
        for name in self.HOST_FIELDS:
            host[name] = torch.from_numpy(getattr(self, name).numpy()[index])
        same_requests = torch.equal(host["request"], self.request)
        columns: dict[str, Tensor | Column] = {}
        for name, value in self.columns.items():
            if name in new_columns:
                columns[name] = new_columns[name]
            elif isinstance(value, Tensor):
                columns[name] = index_rows(value, parents)
            else:
                columns[name] = value if same_requests and value.is_per_request else value.take(parents)
        version = self.version if same_requests else next(_versions)
        taken = Rows(index_rows(self.tokens, parents), **host, columns=columns, version=version)
        if vars(self).get("uniform_length") is not None:  # then it holds for any of the rows
            vars(taken)["uniform_length"] = self.uniform_length
        return taken

    def cat(self, other: Rows) -> Rows:
        """A new table with this one's rows and then another's; both must have the same columns."""
        if self.columns.keys() != other.columns.keys():
            differing = sorted(self.columns.keys() ^ other.columns.keys())
            raise KeyError(f"tables to join must have the same columns, got these in one only: {differing}")
        host = {name: torch.cat((getattr(self, name), getattr(other, name))) for name in self.HOST_FIELDS}
        columns: dict[str, Tensor | Column] = {}
        for name, value in self.columns.items():
            try:
                columns[name] = concat_columns(value, other.columns[name])
            except TypeError as error:
                raise TypeError(f"column `{name}`: {error}") from None
        return Rows(concat_padded(self.tokens, other.tokens, 0), **host, columns=columns)

    def append(self, tokens: Tensor, length: Tensor, **fields: Any) -> Rows:
        """Write `tokens` [R, K] behind each row's own, in place; of them, those below `length` (host) count.

        The returned rows share the token store with these, unless it had to grow.
        """
        if not len(self):
            return self.replace(**fields)
        width = tokens.shape[1]
        store = self._with_capacity(int(self.length.numpy().max()) + width)
        index = (self.length if store.is_cpu else device_length(self))[:, None]
        if width != 1:
            index = index + torch.arange(width, device=store.device)
        return self.replace(tokens=store.scatter_(1, index, tokens), length=length, **fields)

    def advance(self, tokens: Tensor, **fields: Any) -> Rows:
        """Write one token per row [R] behind its own, in place; everything before it counts as cached.

        The returned rows share the token store with these, unless it had to grow.
        """
        uniform = self.uniform_length if self.length.shape[0] else None
        if uniform is None:
            if not self.tokens.is_cpu:
                last_index = device_length(self)
                fields |= {"device_length": last_index + 1, "last_index": last_index, "last_tokens": tokens}
            return self.append(tokens[:, None], self.length + 1, cached_length=self.position, **fields)
        length, store = uniform.length, self.tokens
        if length >= store.shape[1]:
            store = self._with_capacity(length + 1)
        if store.is_cpu and tokens.is_cpu:
            store.numpy()[:, length] = tokens.numpy()
        else:
            store.select(1, length).copy_(tokens)
        if "device_length" in vars(self):
            fields["device_length"] = device_length(self) + 1
        now = UniformLength(length + 1, length)
        return self.replace(
            tokens=store, length=self.length + 1, cached_length=self.length, uniform_length=now, **fields
        )

    def replace(self, **fields: Any) -> Rows:
        """The same rows with some fields replaced; ten times faster than `dataclasses.replace`."""
        new = object.__new__(Rows)
        values = vars(new)
        values.update(vars(self))
        if "length" in fields or "cached_length" in fields or "offset" in fields:
            values.pop("uniform_length", None)
        if "device_length" in values and ("length" in fields or "tokens" in fields):
            for name in _DEVICE_MEMOS:
                values.pop(name, None)
        values.update(fields)
        return new

    def _with_capacity(self, need: int) -> Tensor:
        """The token store with at least `need` columns: the same tensor, or a larger copy."""
        have = self.tokens.shape[1]
        if need <= have:
            return self.tokens
        grown = self.tokens.new_zeros(len(self), max(need, have + have // 2))
        grown[:, :have] = self.tokens
        return grown


# What a step of one token leaves on the device, so that the next one neither copies nor computes it.
_DEVICE_MEMOS: Final = ("device_length", "last_index", "last_tokens")


def last_index(rows: Rows) -> Tensor:
    """The index of each row's last token on the device of its tokens [R]."""
    index: Tensor | None = vars(rows).get("last_index")
    return device_length(rows) - 1 if index is None else index


def last_tokens(rows: Rows) -> Tensor:
    """The last token of each row [R]."""
    tokens: Tensor | None = vars(rows).get("last_tokens")
    return rows.tokens.gather(1, last_index(rows)[:, None])[:, 0] if tokens is None else tokens


def device_length(rows: Rows) -> Tensor:
    """The length of each row on the device of its tokens [R]; steps of one token do not copy it again."""
    memo = vars(rows)
    if "device_length" not in memo:
        memo["device_length"] = rows.length.to(rows.tokens.device, non_blocking=True)
    length: Tensor = memo["device_length"]
    return length
