"""The bytes of a source by blocks: their digests, and files that compare each block that they read.

A row that is read later, by any worker, is a row of the bytes that were scanned. A source that is rewritten,
replaced or cut meanwhile is an error wherever a changed block is read, also if the old bytes come back.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Self

from descant.errors import InputError

__all__ = ["BLOCK_BYTES", "SourceContent", "SourceFile"]

BLOCK_BYTES: Final = 2**20
_DIGEST_BYTES: Final = 16
_BUFFER_BYTES: Final = 2**16


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: its size and the digests of its blocks."""

    path: str
    size: int
    digests: bytes

    @classmethod
    def read(cls, path: str) -> Self:
        """Take the digests of a file's blocks."""
        size, digests = 0, bytearray()
        with _open_raw(path) as file:
            while block := file.read(BLOCK_BYTES):
                size += len(block)
                digests += _digest(block)
        return cls(path, size, bytes(digests))

    def open(self) -> BinaryIO:
        """The file, open for reading; reading a block that has changed raises InputError."""
        return io.BufferedReader(_ComparedFile(self), _BUFFER_BYTES)

    def describe(self) -> dict[str, Any]:
        """The content as JSON values, without the name."""
        ending = os.path.splitext(self.path)[1]
        return {"format": ending, "bytes": self.size, "blocks": self.digests.hex()}


@dataclass(frozen=True)
class SourceContent:
    """The files of a source in their order."""

    files: tuple[SourceFile, ...]

    @classmethod
    def read(cls, paths: Sequence[str]) -> Self:
        """Read all bytes of some files."""
        return cls(tuple(map(SourceFile.read, paths)))

    @classmethod
    def decode(cls, data: bytes, paths: Sequence[str]) -> Self:
        """The content of `encode` in files of these paths."""
        known = [json.loads(line) for line in data.splitlines()]
        if len(known) != len(paths):
            raise _changed(f"{len(paths)} files")
        return cls(
            tuple(
                SourceFile(path, one["bytes"], bytes.fromhex(one["blocks"]))
                for path, one in zip(paths, known, strict=True)
            )
        )

    def encode(self) -> bytes:
        """A line of JSON for each file."""
        return b"".join(json.dumps(one.describe()).encode() + b"\n" for one in self.files)

    def check(self, paths: Sequence[str]) -> None:
        """Read all bytes again; raises InputError for a file that has changed."""
        if len(paths) != len(self.files):
            raise _changed(f"{len(paths)} files")
        for known, path in zip(self.files, paths, strict=True):
            if SourceFile.read(path).describe() != known.describe():
                raise _changed(path)


class _ComparedFile(io.RawIOBase):
    """A file that is read by blocks, each of which has its known digest."""

    def __init__(self, known: SourceFile) -> None:
        self._known, self._file = known, _open_raw(known.path)
        self._offset, self._number, self._block = 0, -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._known.size}[whence]
        self._offset = start + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any) -> int:
        number, start = divmod(self._offset, BLOCK_BYTES)
        if number != self._number:
            self._read_block(number)
        view = memoryview(buffer)
        data = self._block[start : start + len(view)]
        view[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_block(self, number: int) -> None:
        self._file.seek(number * BLOCK_BYTES)
        block = self._file.read(BLOCK_BYTES)
        start = number * _DIGEST_BYTES
        # After the last block there is nothing, and must be nothing.
        if (_digest(block) if block else b"") != self._known.digests[start : start + _DIGEST_BYTES]:
            raise _changed(self._known.path)
        self._number, self._block = number, block


def _open_raw(path: str) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        # The value of an error is cut where it is long; the advice names the file in full.
        must, do = f"must be files that can be opened ({error.strerror})", f"restore {path}"
        raise InputError("source", must, path, do) from None


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest()


def _changed(path: str) -> InputError:
    # The value of an error is cut where it is long; the advice names the file in full.
    do = f"restore {path}, or give another folder as `sink`"
    return InputError("source", "must not change during a run", path, do)
