"""Requests that are read in pieces, between the steps of those that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, PromptChunk
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.engine.tables.prefix_reuse import CachedPrefix, Forward, commit_chunk, prompt_chunk
from descant.kv_cache.row_views import CachedRow, append_rows

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
    cache: KVCache
    common: int
    unread: int = 0  # tokens that it has still to feed, its last tokens included

    @property
    def is_common(self) -> bool:
        """Whether the tokens are fed that all rows have in common."""
        return self.fed is not self.rows

    def next_sizes(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Which of the fed rows feed the next tokens, and how many each [N] (host); the first come first."""
        pending = self.fed.pending if self.is_common else (self.fed.pending - 1).clamp(min=0)
        before = torch.cumsum(pending, 0) - pending
        sizes = (tokens - before).clamp(min=0).minimum(pending)
        index = sizes.nonzero().squeeze(1)
        return index, sizes[index]

    def commit(self, index: Tensor, sizes: Tensor) -> None:
        """Commit tokens that have been fed."""
        is_common = self.is_common
        self.fed = commit_chunk(self.cache, self.fed, index, sizes)
        if not is_common:
            self.rows = self.fed
        elif not int(self.fed.pending.sum()):
            self.fork()

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

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def start(self, request_id: int, rows: Rows, prefix: CachedPrefix, cache: KVCache) -> None:
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
        self._requests[request_id] = reading  # last: an interrupted step starts again

    def next_chunk(self, request_id: int, tokens: int) -> PromptChunk | None:
        """The next tokens of a request in one forward; None: no more are to be fed here, or not in one.

        The last token of each row is fed in the table, with the rest of the last tokens.
        """
        reading = self._requests[request_id]
        if reading.unread <= tokens:
            return None
        index, sizes = reading.next_sizes(tokens)
        return prompt_chunk(reading.cache, reading.fed, index, sizes) if int(sizes.sum()) == tokens else None

    def commit_chunk(self, request_id: int, tokens: int) -> None:
        """Commit the chunk that `next_chunk` has returned, once it is fed."""
        reading = self._requests[request_id]
        reading.commit(*reading.next_sizes(tokens))
        reading.unread -= tokens

    def read(self, request_id: int, tokens: int, forward: Forward) -> bool:
        """Feed the next tokens of a request; False: what is left of them is to be fed in the table."""
        reading = self._requests[request_id]
        if reading.unread <= tokens:
            return False
        self._feed(reading, tokens, forward)
        reading.unread -= tokens  # after the forward: an interrupted one is planned again
        return True

    def _feed(self, reading: _ReadingRequest, tokens: int, forward: Forward) -> None:
        """Feed so many tokens, without the last of each row."""
        while tokens > 0:
            index, sizes = reading.next_sizes(tokens)
            if not len(index):
                return
            chunk = prompt_chunk(reading.cache, reading.fed, index, sizes)
            forward(chunk.rows, Proposal(), chunk.cache)
            reading.commit(index, sizes)
            tokens -= int(sizes.sum())

    def take(self, request_id: int, forward: Forward, can_pack: bool) -> ReadRows:
        """End the reading of a request; its rows, with what is cached of each.

        Drop the request when it has joined its table. With `can_pack` the rest of the tokens is left to the
        table. Else it would pad the single tokens of the rows that decode there. What all rows have in common
        is read here in any case.
        """
        reading = self._requests[request_id]
        if not can_pack or (reading.is_common and len(reading.rows) > 1):
            self._feed(reading, _ALL, forward)
        rows = reading.rows
        if reading.is_common:
            rows = rows.replace(cached_length=reading.fed.cached_length)
        return ReadRows.cached(rows, reading.cache)

    def cache_of(self, request_id: int) -> KVCache:
        """The cache into which a request is read."""
        return self._requests[request_id].cache

    def drop(self, request_id: int) -> None:
        """Forget a request, and free its cache."""
        self._requests.pop(request_id, None)


def common_length(rows: Rows) -> int:
    """The number of tokens with which all rows begin, without the last token of any."""
    size = int(rows.length.min()) - 1
    if len(rows) == 1 or size <= 0:
        return max(size, 0)
    equal = (rows.tokens[:, :size] == rows.tokens[:1, :size]).all(0)
    return int(equal.long().cumprod(0).sum())
