"""Rows of `descant generate --output`, and the continuation of a file that an interrupted run left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TextIO

from descant.api.json_lines import format_line, parse_line
from descant.api.run_digest import GRAMMAR, WATERMARK, plain_grammar, plain_watermark, run_settings
from descant.cli import terminal
from descant.cli.jsonl_lines import RUN_KEY, InputLine, echo_line
from descant.core.atomic_file import lock_file
from descant.errors import DescantError, InputError

__all__ = ["JsonlFile", "JsonlStream", "RunDigest", "open_jsonl_file", "other_run_error"]

_DIGEST_BYTES: Final = 8


class RunDigest:
    """Digests of lines with everything that decides their results: the model, the options, the recipe.

    A watermark key is represented by its fingerprint, which does not identify it.
    """

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        self._prefix = run_settings(model, tokenizer, **settings)

    def of_line(self, line: InputLine) -> str:
        """The digest of one line."""
        try:
            data: Any = dict(parse_line(line.data))
        except DescantError:
            content = line.data
        else:
            public = {**echo_line(data), WATERMARK: plain_watermark(data.get(WATERMARK))}
            if GRAMMAR in public:
                public[GRAMMAR] = plain_grammar(public[GRAMMAR])
            content = json.dumps(public, sort_keys=True).encode()
        digest = hashlib.blake2b(self._prefix, digest_size=_DIGEST_BYTES, person=b"descant run")
        digest.update(content)
        return digest.hexdigest()


@dataclass(frozen=True)
class FinishedRow:
    """A row that an earlier run has written."""

    run: str
    failed: bool


class JsonlStream:
    """Rows written to a pipe or a terminal."""

    finished: tuple[FinishedRow, ...] = ()
    has_digests = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()

    def start(self) -> None:
        """Nothing: a stream cannot be continued."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a row; on a terminal hidden characters are escaped, which JSON allows."""
        line = format_line(record)
        self._stream.write(terminal.escape_json(line) if self.is_terminal else line)

    def flush(self) -> None:
        """Hand the rows to the system."""
        self._stream.flush()


class JsonlFile:
    """Rows of a file with digests of what they were made from; `finished` are those of an earlier run."""

    has_digests = True
    is_terminal = False

    def __init__(self, file: BinaryIO, path: str, overwrite: bool) -> None:
        self._file, self._end = file, 0
        rows = []
        if not overwrite:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # the writer was killed within this row
                rows.append(_parse_row(line, number, path))
                self._end += len(line)
        self.finished = tuple(rows)

    def start(self) -> None:
        """Go to the end of the finished rows; an incomplete last row is removed."""
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a row."""
        self._file.write(format_line(record).encode())

    def flush(self) -> None:
        """Hand the rows to the system: they outlive this process."""
        self._file.flush()


@contextlib.contextmanager
def open_jsonl_file(path: str, overwrite: bool) -> Iterator[JsonlFile | JsonlStream]:
    """The output file of a run; a device or a pipe is a stream."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            with open(path, "w", encoding="utf-8", newline="\n") as stream:
                yield JsonlStream(stream)
            return
    except OSError as error:
        raise InputError("output", f"must be a file that can be opened ({error.strerror})", path) from None
    with os.fdopen(descriptor, "r+b") as file:
        if lock_file(descriptor) is False:
            raise InputError("output", "must not be in use by another run", path, "wait for its end")
        output = JsonlFile(file, path, overwrite)
        yield output
        output.flush()
        os.fsync(descriptor)


def other_run_error(number: int, got: str) -> InputError:
    """The error for an output file that this run cannot continue."""
    must = f"must be new, or hold results of the same lines, model and options ({got} in line {number})"
    return InputError("output", must, "another file", "give --overwrite to start anew, or another file")


def _parse_row(line: bytes, number: int, path: str) -> FinishedRow:
    try:
        data = parse_line(line)
    except DescantError:
        data = {}
    if not isinstance(data.get(RUN_KEY), str):
        must = (
            f"must be new, or a file that `descant generate --output` wrote (line {number} is no row of it)"
        )
        raise InputError("output", must, path, "give --overwrite to start anew, or another file")
    return FinishedRow(data[RUN_KEY], "error" in data)
