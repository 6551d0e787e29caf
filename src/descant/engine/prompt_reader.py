"""Requests that are read in pieces, between the steps of those that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, SelectableCache
from descant.core.rows import Rows
from descant.engine.prefix_reuse import CachedPrefix, Forward, prefill_chunk
from descant.kv_cache.cached_row import CachedRow, append_rows
from descant.kv_cache.paged import PagedStore

__all__ = ["PromptReader", "ReadRows", "common_length"]

_ALL = 2**40  # more tokens than any request has


class ReadRows(NamedTuple):
    """Rows, with what is cached of each."""

    rows: Rows
    prefixes: Sequence[CachedPrefix]

    @classmethod
    def unread(cls, rows: Rows) -> ReadRows:
        """Rows of which nothing is cached."""
        return cls(rows, [CachedPrefix()] * len(rows))

    @classmethod
    def cached(cls, rows: Rows, cache: KVCache) -> ReadRows:
        """Rows of which each is the row of the same index in a cache, as far as it is cached."""
        prefixes = [
            CachedPrefix(CachedRow(cache, row), length) if length else CachedPrefix()
            for row, length in enumerate(rows.cached_length.tolist())
        ]
        return cls(rows, prefixes)


@dataclass
class _ReadingRequest:
    """The rows of a request while they are read, in a cache of their own."""

    fed: Rows  # the tokens that all rows have in common as one row, then the rows
    rows: Rows
    cache: Any
    common: int
    unread: int = 0  # tokens that it has still to feed, its last tokens included

    def fork(self) -> None:
        """Go on with all rows, which share what is read by now."""
        lengths = torch.full((len(self.rows),), self.common)
        self.cache.commit(torch.zeros_like(lengths), lengths)
        self.fed = self.rows = self.rows.replace(cached_length=lengths)


class PromptReader:
    """Requests whose tokens are not all read yet: new ones, and preempted ones that are read again.

    Each has a small cache of its own, on the block pool of the table's cache where that is paged, so that
    joining the table copies nothing there. What the rows of a request have in common is read once.
    """

    def __init__(self) -> None:
        self._requests: dict[int, _ReadingRequest] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def start(self, number: int, rows: Rows, prefix: CachedPrefix, cache: SelectableCache) -> None:
        """Begin to read a request into an empty cache; `prefix` is what is cached of its first row."""
        common = max(common_length(rows), prefix.length)
        first = rows.replace(columns={}).take(torch.zeros(1, dtype=torch.long))
        length = torch.tensor([prefix.length])
        append_rows(cache, [prefix.cached_row])
        cache.commit(None, length)
        fed = first.replace(length=torch.tensor([common]), cached_length=length)
        unread = common - prefix.length + int((rows.position - common).sum())
        reading = _ReadingRequest(fed, rows, cache, common, unread)
        if common == prefix.length:
            reading.fork()
        self._requests[number] = reading  # last: an interrupted step starts again

    def read(self, number: int, tokens: int, forward: Forward) -> bool:
        """Feed the next tokens of a request, one row after the other; False: no more are to be fed here.

        The last token of each row is fed in the table, with the rest of the last tokens.
        """
        reading = self._requests[number]
        if reading.unread <= tokens:
            return False
        self._feed(reading, tokens, forward)
        reading.unread -= tokens  # after the forward: an interrupted one is planned again
        return True

    def _feed(self, reading: _ReadingRequest, tokens: int, forward: Forward) -> None:
        """Feed so many tokens, without the last of each row."""
        while tokens > 0:
            is_common = reading.fed is not reading.rows
            free = reading.fed.pending if is_common else (reading.fed.pending - 1).clamp(min=0)
            sizes = _split_tokens(free, tokens)
            index = sizes.nonzero().squeeze(1)
            if not len(index):
                return
            fed = prefill_chunk(forward, reading.cache, reading.fed, index, sizes[index])
            tokens -= int(sizes.sum())
            reading.fed = fed
            if not is_common:
                reading.rows = fed
            elif not int(fed.pending.sum()):
                reading.fork()

    def take(self, number: int, forward: Forward) -> ReadRows:
        """Read the rest of a request but the last token of each row; its rows, with what is cached of each.

        Drop the request when it has joined its table. The rest is not left to the table: there it would pad
        the single tokens of the rows that decode, where these are not packed.
        """
        reading = self._requests[number]
        self._feed(reading, _ALL, forward)
        return ReadRows.cached(reading.rows, reading.cache)

    def num_cached(self, number: int) -> Tensor:
        """The positions of each row in a request's own cache [R] (host)."""
        return self._requests[number].fed.cached_length

    def is_paged(self, number: int) -> bool:
        """Whether a request is read into blocks."""
        return isinstance(self._requests[number].cache, PagedStore)

    def drop(self, number: int) -> None:
        """Forget a request, and free its cache."""
        self._requests.pop(number, None)


def common_length(rows: Rows) -> int:
    """The number of tokens with which all rows begin, without the last token of any."""
    size = int(rows.length.min()) - 1
    if len(rows) == 1 or size <= 0:
        return max(size, 0)
    equal = (rows.tokens[:, :size] == rows.tokens[:1, :size]).all(0)
    return int(equal.long().cumprod(0).sum())


def _split_tokens(free: Tensor, tokens: int) -> Tensor:
    """How many of the next tokens each row [R] feeds, of those that it may; the first rows come first."""
    before = torch.cumsum(free, 0) - free
    return (tokens - before).clamp(min=0).minimum(free)
