"""Rows of Arrow as Python values that JSON has."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from descant.errors import InputError
from descant.jobs.arrow_library import load_pyarrow
from descant.jobs.row_file import RowData

__all__ = ["batch_rows"]


class _NotJson(TypeError):
    """A value that JSON does not have."""


def batch_rows(batch: Any, columns: Collection[str] | None = None) -> Iterator[RowData]:
    """The rows of a record batch; `columns`: only these of it, None: all.

    Dates, times, decimal numbers and UUIDs become text. A row with bytes or another value that JSON does not
    have is refused.
    """
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise InputError("source", "must have columns of different names", names)
    names = [name for name in names if columns is None or name in columns]
    if not names:
        yield from ({} for _ in range(batch.num_rows))
        return
    for values in zip(*(_column_values(name, batch.column(name)) for name in names), strict=True):
        error = next((value for value in values if isinstance(value, InputError)), None)
        yield dict(zip(names, values, strict=True)) if error is None else error


def _column_values(name: str, column: Any) -> list[Any]:
    """The values of a column; an InputError in place of one that JSON does not have."""
    try:
        values = column.to_pylist(maps_as_pydicts="strict")
        return values if _is_plain(column.type) else [_json_value(value) for value in values]
    except (ValueError, TypeError, KeyError, OverflowError):
        return [_scalar_value(name, scalar) for scalar in column]  # some of them have no such value


def _scalar_value(name: str, scalar: Any) -> Any:
    try:
        return _json_value(scalar.as_py(maps_as_pydicts="strict"))
    except _NotJson as error:
        found = str(error)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        found = f"{scalar.type} ({error})"
    return InputError(name, "must hold values that JSON has", found, "leave the column out")


def _is_plain(kind: Any) -> bool:
    """Whether all values of a type are those of JSON already."""
    types = load_pyarrow().types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    is_float = types.is_float32(kind) or types.is_float64(kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(
        is_text or is_float or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind)
    )


def _json_value(value: Any) -> Any:
    """A value, its parts included, as JSON would give it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_json_value(one) for one in value]
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise _NotJson("a map whose keys are no texts")
            return {key: _json_value(one) for key, one in value.items()}
        case datetime.datetime() | datetime.time() if getattr(value, "nanosecond", 0):
            raise _NotJson("a time in nanoseconds")  # which Python has only beside another library
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case decimal.Decimal() | uuid.UUID():
            return str(value)
        case np.generic():
            return _json_value(value.item())
    raise _NotJson(type(value).__name__)
