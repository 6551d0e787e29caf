"""The header of a GGUF file, read with limits before another library reads the file.

Readers of GGUF trust the counts in a file: one that announces 2^60 values keeps them busy for ever. Here
every count and length is compared with the bytes that are left.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

__all__ = ["GgufHeader", "MalformedGguf"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ADD_BOS, _TOKENIZER, _SENTENCEPIECE = b"tokenizer.ggml.add_bos_token", b"tokenizer.ggml.model", b"llama"
_MAX_KEY_BYTES: Final = 64
# The bytes of a value by its type: uint8, int8, uint16, int16, uint32, int32, float32, bool, ..., 64 bits.
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_HEADER_BYTES: Final = 256 * 2**20  # the largest in use have some 30 MB
_MAX_ENTRIES: Final = 2**16
_MAX_VALUES: Final = 2**23  # of all arrays: a vocabulary has three values for each token
_MAX_TENSORS: Final = 2**17
_MAX_DIMENSIONS: Final = 4


class MalformedGguf(ValueError):
    """A file that is not GGUF, or whose header contradicts its size."""


@dataclass(frozen=True)
class GgufHeader:
    """The number of tensors of a GGUF file, its size in bytes, and whether prompts begin with a BOS token."""

    num_tensors: int
    num_bytes: int
    adds_bos: bool = False

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read and check the header of a file."""
        with open(path, "rb") as file:
            return _HeaderReader(file, path.stat().st_size).read()


class _HeaderReader:
    """Walks over the entries of a header without keeping their values."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self.file, self.num_bytes = file, num_bytes
        self.left = min(num_bytes, _MAX_HEADER_BYTES)
        self.values_left = _MAX_VALUES

    def read(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise MalformedGguf("it does not begin with GGUF")
        version = self._uint32()
        if version not in _VERSIONS:
            raise MalformedGguf(f"its version is {version}, and {_VERSIONS} can be read")
        num_tensors, num_entries = self._uint64(), self._uint64()
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise MalformedGguf(f"it announces {num_tensors} tensors and {num_entries} entries")
        adds_bos: bool | None = None
        is_sentencepiece = False
        for _ in range(num_entries):
            key, kind = self._string(keep=True), self._uint32()
            if key == _ADD_BOS and kind == _BOOL:
                adds_bos = self._take(1) != b"\0"
            elif key == _TOKENIZER and kind == _STRING:
                is_sentencepiece = self._string(keep=True) == _SENTENCEPIECE
            else:
                self._value(kind)
        end = max((self._tensor_end() for _ in range(num_tensors)), default=0)
        if end > self.num_bytes:
            raise MalformedGguf(f"its tensors end at byte {end} or later, and it has {self.num_bytes}")
        # Files of sentencepiece models may leave it out.
        return GgufHeader(num_tensors, self.num_bytes, is_sentencepiece if adds_bos is None else adds_bos)

    def _take(self, count: int) -> bytes:
        """The next bytes."""
        self._count(count)
        data = self.file.read(count)
        if len(data) < count:
            raise MalformedGguf("it ends inside its header")
        return data

    def _skip(self, count: int) -> None:
        self._count(count)
        self.file.seek(count, 1)

    def _count(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise MalformedGguf("its header is longer than the file, or than a header can be")

    def _uint32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def _uint64(self) -> int:
        return int(struct.unpack("<Q", self._take(8))[0])

    def _string(self, *, keep: bool = False) -> bytes:
        """The next string; skipped unless it is to be kept and short."""
        length = self._uint64()
        if keep and length <= _MAX_KEY_BYTES:
            return self._take(length)
        self._skip(length)
        return b""

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            self._array()
        elif kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        else:
            raise MalformedGguf(f"it has a value of the unknown type {kind}")

    def _array(self) -> None:
        kind, length = self._uint32(), self._uint64()
        self.values_left -= length
        if self.values_left < 0:
            raise MalformedGguf(f"it has an array of {length} values")
        if kind in _SCALAR_BYTES:
            self._skip(length * _SCALAR_BYTES[kind])
        elif kind == _STRING:
            for _ in range(length):
                self._string()
        else:
            raise MalformedGguf(f"it has an array of the type {kind}")

    def _tensor_end(self) -> int:
        """A byte that the file must have for a tensor to be in it."""
        self._string()
        num_dimensions = self._uint32()
        if num_dimensions > _MAX_DIMENSIONS:
            raise MalformedGguf(f"it has a tensor of {num_dimensions} dimensions")
        size = 1
        for _ in range(num_dimensions):
            size *= self._uint64()
        self._uint32()
        # The least that any type takes is an eighth of a byte for each number.
        return self._uint64() + size // 8
