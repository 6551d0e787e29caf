"""The optional library that reads and writes Parquet and Arrow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from descant.errors import InputError, MissingExtra

__all__ = ["arrow_errors", "load_pyarrow"]


def load_pyarrow() -> Any:
    """The module `pyarrow` with its parts `ipc` and `parquet`."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("parquet", "a source or sink in Parquet or Arrow") from None
    return pyarrow


@contextlib.contextmanager
def arrow_errors(path: str, kind: str) -> Iterator[None]:
    """Name the file that the library cannot read."""
    pyarrow = load_pyarrow()
    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        raise InputError("source", f"must be {kind} ({error})", path) from None
