"""The parameters of every row as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.rows import Rows, concat_padded, pad_right

__all__ = ["ObjectArray", "ParamValues", "RowParams", "columns_from_rows", "row_params"]

ObjectArray = np.ndarray[Any, np.dtype[Any]]  # [R] of Python objects, None where a row has none
ParamValues = Mapping[str, "Tensor | ObjectArray"]
_KNOWN_TYPES = {int: int, bool: int, float: float, list: list}


@dataclass(frozen=True)
class RowParams:
    """The column of parameters: `values[name]` is [R], [R, W] or [R, K, W] (host), equal within a request.

    It holds the parameters that any row uses; a row that does not use one has -1, or None for an object.
    """

    values: ParamValues
    is_per_request: bool = True

    def __getitem__(self, name: str) -> Tensor:
        value = self.values[name]
        assert isinstance(value, Tensor)
        return value

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def take(self, parents: Tensor) -> Self:
        """The parameters of the new rows."""
        return type(self)(_TakenValues(self.values, parents.numpy()))

    def extend(self, rows: int) -> Self:
        """These rows' parameters, followed by rows that use none."""
        return type(self)(_TakenValues(self.values, np.append(np.arange(len(self)), np.full(rows, -1))))

    def cat(self, other: Self) -> Self:
        """These rows' parameters, followed by another table's."""
        first, second = dict(self.values), dict(other.values)
        if first.keys() != second.keys():
            first = {**first, **_missing_values(second, first, len(self))}
            second = {**second, **_missing_values(first, second, len(other))}
        return type(self)({name: _concat_values(value, second[name]) for name, value in first.items()})


class _TakenValues(Mapping[str, "Tensor | ObjectArray"]):
    """Parameters of some rows of a table, each column taken on first use: a step reads few of them.

    The index -1 stands for a row that uses no parameter.
    """

    def __init__(self, source: ParamValues, index: ObjectArray) -> None:
        self.source: ParamValues = source
        self.index: ObjectArray = index
        if isinstance(source, _TakenValues):
            self.source, self.index = source.source, np.where(index < 0, -1, source.index[index])
        self._taken: dict[str, Tensor | ObjectArray] = {}

    def __getitem__(self, name: str) -> Tensor | ObjectArray:
        taken = self._taken.get(name)
        if taken is None:
            value = self.source[name]
            # Numpy: torch takes twice as long to index a short column.
            array = (value.numpy() if isinstance(value, Tensor) else value)[self.index]
            array[self.index < 0] = -1 if isinstance(value, Tensor) else None
            taken = self._taken[name] = torch.from_numpy(array) if isinstance(value, Tensor) else array
        return taken

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def row_params(rows: Rows) -> RowParams:
    """The parameters of a table."""
    params = rows.columns["params"]
    assert isinstance(params, RowParams)
    return params


def columns_from_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | ObjectArray]:
    """The parameters of rows as columns: numbers [R], lists [R, W] or [R, K, W] padded with -1."""
    names = rows[0] if len(rows) == 1 else dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, Tensor | ObjectArray | None] = dict.fromkeys(names)  # in the order of the names
    numbers: dict[type, dict[str, list[Any]]] = {int: {}, float: {}}
    for name in names:
        values = [row.get(name) for row in rows]
        of_kind = numbers.get(_value_type(values))
        if of_kind is None:
            columns[name] = _make_column(values)
        else:
            of_kind[name] = [-1 if value is None else value for value in values] if None in values else values
    # One tensor for all numbers of a type, of which each column is a line: calls into torch dominate here.
    for kind, dtype in ((int, torch.long), (float, torch.float64)):
        lines = torch.tensor(list(numbers[kind].values()), dtype=dtype)
        columns.update(zip(numbers[kind], lines.unbind(0), strict=True))
    return cast("dict[str, Tensor | ObjectArray]", columns)


def _concat_values(first: Tensor | ObjectArray, second: Tensor | ObjectArray) -> Tensor | ObjectArray:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return concat_padded(first, second)
    return np.concatenate((first, second))


def _missing_values(source: ParamValues, target: ParamValues, count: int) -> dict[str, Tensor | ObjectArray]:
    """The values of `count` rows for the parameters of `source` that `target` does not have."""
    return {
        name: value.new_full((count, *value.shape[1:]), -1)
        if isinstance(value, Tensor)
        else np.full(count, None)
        for name, value in source.items()
        if name not in target
    }


def _value_type(values: Sequence[Any]) -> type:
    """The type of a parameter: int (also for bools), float, list or object."""
    first = values[0]
    if type(first) in _KNOWN_TYPES:  # nearly always
        return _KNOWN_TYPES[type(first)]
    first = next(value for value in values if value is not None)
    return next((kind for kind in (float, int, list) if isinstance(first, kind)), object)


def _make_column(values: Sequence[Any]) -> Tensor | ObjectArray:
    """The column of a parameter that is no number; None where a row does not use it."""
    first = next(value for value in values if value is not None)
    if isinstance(first, list):
        if len(values) == 1 and all(type(part) is int for part in first):
            return torch.tensor([first or [-1]], dtype=torch.long)
        if all(value is first or value == first for value in values):  # most often one config for all
            block = _stack_blocks([_to_block(first)])
            return block.repeat(len(values), *[1] * (block.ndim - 1))
        return _stack_blocks([_to_block(value or []) for value in values])
    objects = np.full(len(values), None)
    for index, value in enumerate(values):  # one by one, since numpy would convert sequences
        objects[index] = value
    return objects


def _to_block(value: list[Any]) -> Tensor:
    """A list of numbers [1, W], or of lists of numbers [1, K, W] padded with -1."""
    if value and isinstance(value[0], list):
        width = max(1, *(len(part) for part in value))
        return torch.tensor([[*part, *[-1] * (width - len(part))] for part in value])[None]
    if any(isinstance(part, float) for part in value):
        return torch.tensor(value, dtype=torch.float64)[None]
    return torch.tensor(value, dtype=torch.long)[None]


def _stack_blocks(blocks: list[Tensor]) -> Tensor:
    """Blocks of different sizes as one column, padded to at least one entry."""
    deepest = max(blocks, key=lambda block: block.ndim)
    blocks = [block if block.ndim == deepest.ndim else deepest.new_full((1, 1, 1), -1) for block in blocks]
    if all(block.shape == deepest.shape for block in blocks) and deepest.numel():
        return torch.cat(blocks)
    sizes = [max(1, *(block.shape[axis] for block in blocks)) for axis in range(1, deepest.ndim)]
    dtype = next((block.dtype for block in blocks if block.is_floating_point()), torch.long)
    return torch.cat([pad_right(block.to(dtype), sizes) for block in blocks])
