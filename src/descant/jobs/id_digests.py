"""Digests of the ids of rows, by which equal ids are found."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Final

import numpy as np

__all__ = ["IdDigests", "RowId", "id_digest"]

RowId = int | str
_GROUP: Final = 2**20  # digests that are looked for in one pass over the source


def id_digest(row_id: RowId) -> int:
    """A number of 64 bits, which tells the id 1 from the id "1"."""
    kind = b"i" if isinstance(row_id, int) else b"s"
    text = str(row_id).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(kind + text, digest_size=8).digest(), "big")


class IdDigests:
    """The digests of all ids of a source, 8 bytes for each."""

    def __init__(self) -> None:
        self._digests = array("Q")

    def add(self, row_id: RowId) -> None:
        """Add the digest of an id."""
        self._digests.append(id_digest(row_id))

    def repeated(self) -> Iterator[frozenset[int]]:
        """The digests that were added more than once, in groups that fit into memory."""
        digests = np.frombuffer(self._digests, np.uint64)
        digests.sort()  # in place
        again = np.unique(digests[1:][digests[1:] == digests[:-1]])
        for start in range(0, len(again), _GROUP):
            yield frozenset(again[start : start + _GROUP].tolist())
