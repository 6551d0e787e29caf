"""Splits the rows of a step into forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits
from descant.core.records import Proposal
from descant.core.rows import Rows, uniform_value

# Maximum number of logits of one forward of ragged prompts: 128 MiB in float32.
_MAX_LOGITS = 2**25

# A decode step of ragged rows is packed from this many numbers on: rows x slots x width of the embeddings.
_MIN_PACKED_READ = 2**18

# The most tokens that a row feeds in a decode step: its last token and drafts.
_MAX_DECODE_WIDTH = 16

# The most tokens of a packed forward of several rows on a CPU. Activations of more do not stay in its caches,
# and rows of similar length attend with less padding.
_MAX_PACKED_TOKENS = 1024

# Padding up to this many positions is cheaper than a second forward.
_PADDING_TOLERANCE = 64


class ForwardBatch(NamedTuple):
    """The rows of one forward."""

    rows: Tensor | None  # [N] (host); None: the whole table
    num_rows: int
    cached_length: Tensor  # [N] (host) cached positions
    fed_length: Tensor  # [N] (host) fed positions; unused if `width` is 1
    start: int | None  # first fed position of all rows; None: they differ
    width: int  # fed positions of the longest row
    read_length: int  # slots read: the longest past and the fed positions
    is_packed: bool = False  # whether rows are fed one after the other instead of padded

    @classmethod
    def from_lengths(cls, cached: Tensor, fed: Tensor, rows: Tensor | None = None) -> ForwardBatch:
        """The batch of these rows; None: of all rows."""
        if rows is not None:
            cached, fed = cached[rows], fed[rows]
        start, width = uniform_value(cached), int(fed.numpy().max())
        longest = int(cached.numpy().max()) if start is None else start
        return cls(rows, fed.shape[0], cached, fed, start, width, longest + width)


class ForwardBatcher:
    """Splits the rows of a step into as few forwards as possible, new rows first."""

    def __init__(self, traits: ModelTraits) -> None:
        self.traits = traits

    def split(
        self,
        rows: Rows,
        proposal: Proposal,
        request_keys: Mapping[int, object],
        state_batches: list[Tensor] | None = None,
        can_pack: Callable[[], bool] = bool,
        must_pack: bool = False,
    ) -> list[ForwardBatch]:
        """The batches of a step; where rows `can_pack`, those of different length share a packed one.

        With `must_pack` all rows do: chunks of prompts are fed beside them, or layers are compiled.

        Requests in `request_keys` share a forward only with requests of the same key. `state_batches` are the
        running rows of a recurrent model, grouped by the state they share.
        """
        cached, uniform, traits = rows.cached_length, rows.uniform_length, self.traits
        params: Any = rows.columns.get("params")
        turns = None  # of `low_memory` rows, whose sequences are fed one by one, else -1 [R]
        if params is not None and "low_memory" in params.values and (params["low_memory"] == 1).any():
            turns = torch.where(params["low_memory"] == 1, rows.slot, -1)
        unrestricted = (
            not request_keys and turns is None and state_batches is None and not traits.needs_batch_size_one
        )
        must_pack = must_pack and unrestricted and can_pack()
        is_decode = unrestricted and traits.cache_type == "kv" and proposal.drafts is None and not must_pack
        if is_decode and uniform is not None and uniform.length == uniform.cached_length + 1:
            start, length = uniform.cached_length, uniform.length
            return [ForwardBatch(None, cached.shape[0], cached, cached, start, 1, length)]
        fed = rows.pending + proposal.draft_counts()
        if traits.cache_type == "none":  # whole rows are fed in every step
            cached, fed = torch.zeros_like(cached), cached + fed
        all_rows = ForwardBatch.from_lengths(cached, fed)
        if must_pack or (unrestricted and self._is_worth_packing(all_rows, fed) and can_pack()):
            parts = _split_packed(fed) if rows.tokens.device.type == "cpu" else []
            if len(parts) < 2:
                return [all_rows._replace(is_packed=True)]
            return [ForwardBatch.from_lengths(cached, fed, part)._replace(is_packed=True) for part in parts]
        if unrestricted and self._fits_one_forward(all_rows, fed):
            return [all_rows]
        if traits.needs_batch_size_one:
            parts = [torch.tensor([row]) for row in range(len(rows))]
        else:
            keys, is_new = _batch_keys(rows, request_keys, turns), cached == 0
            parts = []
            if bool(is_new.any()):
                for part in _group_by(keys, is_new.nonzero().squeeze(1)):
                    parts += self._split_by_length(part, fed)
            if not bool(is_new.all()):
                if state_batches is None:
                    state_batches = self._split_running((~is_new).nonzero().squeeze(1), cached, fed)
                for part in state_batches:
                    for piece in _group_by(keys, part):
                        # A state counts all that was fed, so that its rows are not padded.
                        parts += [piece] if traits.cache_type == "kv" else _group_by(fed, piece)
        if len(parts) == 1:
            return [all_rows]
        return [ForwardBatch.from_lengths(cached, fed, part) for part in parts]

    def _is_worth_packing(self, batch: ForwardBatch, fed: Tensor) -> bool:
        """Whether a packed forward of all rows costs less than a padded one."""
        is_ragged = batch.start is None or (batch.width > 1 and uniform_value(fed) is None)
        if is_ragged and batch.width <= _MAX_DECODE_WIDTH and batch.cached_length.numpy().all():
            # Little is padded. To read few keys under a mask is cheaper than to attend by group.
            size = batch.num_rows * batch.read_length * (self.traits.embedding_size or 0)
            return size >= _MIN_PACKED_READ
        return is_ragged

    def _fits_one_forward(self, batch: ForwardBatch, fed: Tensor) -> bool:
        """Whether all rows fit one forward."""
        if self.traits.needs_equal_lengths:
            return batch.start is not None and uniform_value(fed) is not None
        if batch.width == 1 and (
            batch.start is not None
            or (self.traits.supports_custom_mask and batch.cached_length.numpy().all())
        ):
            return True
        return batch.start is not None and not _is_padding_wasteful(fed) and self._logits_fit(fed)

    def _split_running(self, index: Tensor, cached: Tensor, fed: Tensor) -> list[Tensor]:
        """Split rows that have a past into groups that can share a forward."""
        parts = [index] if self.traits.supports_custom_mask else _group_by(cached, index)
        if not self.traits.needs_equal_lengths and int(fed[index].max()) <= _PADDING_TOLERANCE:
            return parts
        # Chunks of a chunked prefill must not pad decoding rows.
        return [piece for part in parts for piece in self._split_by_length(part, fed)]

    def _split_by_length(self, index: Tensor, fed: Tensor) -> list[Tensor]:
        """Split rows into groups of equal or similar length, padded by at most one half."""
        if self.traits.needs_equal_lengths:
            return _group_by(fed, index)
        parts, rest = [], index[fed[index].argsort()]
        while len(rest):
            limit = max(_PADDING_TOLERANCE, int(fed[rest[0]] * 3) // 2)
            count = int((fed[rest] <= limit).sum())
            while count > 1 and not self._logits_fit(fed[rest[:count]]):
                count = (count + 1) // 2
            parts.append(rest[:count].sort().values)
            rest = rest[count:]
        return parts

    def _logits_fit(self, fed: Tensor) -> bool:
        """Whether the logits fit: each distinct last position is computed for every row."""
        return len(set(fed.tolist())) * len(fed) * self.traits.vocab_size <= _MAX_LOGITS


def _split_packed(fed: Tensor) -> list[Tensor]:
    """The rows of packed forwards of at most `_MAX_PACKED_TOKENS` where rows are not longer, by length."""
    if int(fed.sum()) <= _MAX_PACKED_TOKENS:
        return []
    parts: list[list[int]] = []
    room = 0
    for row in fed.argsort(stable=True).tolist():
        size = int(fed[row])
        if size > room:
            parts.append([])
            room = _MAX_PACKED_TOKENS
        parts[-1].append(row)
        room -= size
    return [torch.tensor(sorted(part)) for part in parts]


def _is_padding_wasteful(fed: Tensor) -> bool:
    """Whether padding all rows to the longest would cost more than a second forward."""
    longest = int(fed.max())
    return longest > _PADDING_TOLERANCE and longest * len(fed) > 1.5 * int(fed.sum())


def _group_by(column: Tensor, index: Tensor) -> list[Tensor]:
    """Split rows by their value in a column."""
    values = column[index]
    return [index[values == value] for value in sorted(set(values.tolist()))]


def _batch_keys(rows: Rows, request_keys: Mapping[int, object], turns: Tensor | None) -> Tensor:
    """A number per row [R], equal for rows that can share a forward."""
    if not request_keys and turns is None:
        return torch.zeros_like(rows.request)
    numbers: dict[object, int] = {}
    row_turns = [-1] * len(rows) if turns is None else turns.tolist()
    requests = rows.request.tolist()
    keys = [(request_keys.get(request), turn) for request, turn in zip(requests, row_turns, strict=True)]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
