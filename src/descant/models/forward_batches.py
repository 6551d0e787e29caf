"""Which rows share a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from descant.core.context import RowParams
from descant.core.interfaces import ModelTraits
from descant.core.records import Proposal
from descant.core.rows import Rows, uniform_value

__all__ = ["ForwardBatch", "ForwardBatcher"]

# At most so many logits are computed in one forward of ragged prompts: 128 MiB in float32.
_MAX_LOGITS = 2**25

# Padding to so many positions is no waste worth a second forward.
_PADDING_TOLERANCE = 64


class ForwardBatch(NamedTuple):
    """Rows that share a forward."""

    rows: Tensor | None  # [N] (host); None: the whole table
    num_rows: int  # how many rows
    cached_length: Tensor  # [N] (host) positions before the fed ones
    fed_length: Tensor  # [N] (host) how many are fed; not looked at where it is one each
    start: int | None  # the position that all start at; None: they differ
    width: int  # how many positions are fed, the longest row's

    @classmethod
    def from_lengths(cls, cached: Tensor, fed: Tensor, rows: Tensor | None = None) -> ForwardBatch:
        """A batch of the rows `rows`."""
        if rows is not None:
            cached, fed = cached[rows], fed[rows]
        return cls(rows, len(fed), cached, fed, uniform_value(cached), int(fed.max()))

    @property
    def read_length(self) -> int:
        """How many slots are read: the longest past and everything fed after it."""
        return (int(self.cached_length.max()) if self.start is None else self.start) + self.width


class ForwardBatcher:
    """The rows of a step in as few forwards as the model and the rows allow, fresh rows first."""

    def __init__(self, facts: ModelTraits) -> None:
        self.traits = facts

    def split(
        self, rows: Rows, proposal: Proposal, apart: Mapping[int, object], held: list[Tensor] | None = None
    ) -> list[ForwardBatch]:
        """The batches of a step.

        `apart` names the requests whose rows share a forward only with rows that give the same; `held` are
        the rows that have a state of their own, in parts that can share it.
        """
        cached, even, facts = rows.cached_length, rows.uniform_length, self.traits
        turns = _low_memory_turns(rows)
        plain = not apart and turns is None and held is None and not facts.needs_batch_size_one
        stepping = plain and facts.cache_type == "kv" and proposal.drafts is None
        if stepping and even is not None and even.length == even.cached_length + 1:
            return [ForwardBatch(None, len(rows), cached, cached, even.cached_length, 1)]
        fed = rows.pending + proposal.draft_counts()
        if facts.cache_type == "none":  # everything is fed again, every time
            cached, fed = torch.zeros_like(cached), cached + fed
        whole = ForwardBatch.from_lengths(cached, fed)
        if facts.needs_batch_size_one:
            parts = [torch.tensor([row]) for row in range(len(rows))]
            return (
                [whole]
                if len(rows) == 1
                else [ForwardBatch.from_lengths(cached, fed, part) for part in parts]
            )
        if plain and self._fits_one_forward(whole, fed):
            return [whole]
        fresh = cached == 0
        parts = []
        if bool(fresh.any()):
            for part in _group_by(_batch_keys(rows, apart, turns), fresh.nonzero().squeeze(1)):
                parts += self._split_by_length(part, fed)
        if not bool(fresh.all()):
            for part in (
                held if held is not None else self._split_running((~fresh).nonzero().squeeze(1), cached, fed)
            ):
                parts += _group_by(_batch_keys(rows, apart, turns), part)
        return (
            [whole] if len(parts) == 1 else [ForwardBatch.from_lengths(cached, fed, part) for part in parts]
        )

    def _fits_one_forward(self, whole: ForwardBatch, fed: Tensor) -> bool:
        """Whether all rows fit one forward as they are."""
        if self.traits.needs_equal_lengths:
            return whole.start is not None and uniform_value(fed) is not None
        if whole.width == 1 and (
            whole.start is not None
            or (self.traits.supports_custom_mask and whole.cached_length.numpy().all())
        ):
            return True
        return whole.start is not None and not _is_padding_wasteful(fed) and self._logits_fit(fed)

    def _split_running(self, index: Tensor, cached: Tensor, fed: Tensor) -> list[Tensor]:
        """Rows that have a past, in parts that can share a forward."""
        parts = [index] if self.traits.supports_custom_mask else _group_by(cached, index)
        if not self.traits.needs_equal_lengths and int(fed[index].max()) <= _PADDING_TOLERANCE:
            return parts
        # What some have yet to read after a past must not pad all others.
        return [part for some in parts for part in self._split_by_length(some, fed)]

    def _split_by_length(self, index: Tensor, fed: Tensor) -> list[Tensor]:
        """Fresh rows in batches of equal length, or of similar: none padded to over half as much again."""
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
        """Whether the logits of all rows' last positions fit, each position being computed for every row."""
        return len(set(fed.tolist())) * len(fed) * self.traits.vocab_size <= _MAX_LOGITS


def _is_padding_wasteful(fed: Tensor) -> bool:
    """Whether padding all rows to the longest would cost more than a second forward."""
    longest = int(fed.max())
    return longest > _PADDING_TOLERANCE and longest * len(fed) > 1.5 * int(fed.sum())


def _group_by(column: Tensor, index: Tensor) -> list[Tensor]:
    """Rows in parts that have the same in a column."""
    mine = column[index]
    return [index[mine == value] for value in sorted(set(mine.tolist()))]


def _low_memory_turns(rows: Rows) -> Tensor | None:
    """For rows that take turns to spare memory which turn is theirs, else -1 [R]; None where none does."""
    params = rows.columns.get("params")
    spare = params.values.get("low_memory") if isinstance(params, RowParams) else None
    if not isinstance(spare, Tensor) or not bool((spare == 1).any()):
        return None
    return torch.where(spare == 1, rows.slot, -1)


def _batch_keys(rows: Rows, apart: Mapping[int, object], turns: Tensor | None) -> Tensor:
    """A number for each row that is the same where rows can share a forward."""
    if not apart and turns is None:
        return torch.zeros_like(rows.request)
    kinds: dict[object, int] = {}
    turn = [-1] * len(rows) if turns is None else turns.tolist()
    whose = zip(rows.request.tolist(), turn, strict=True)
    return torch.tensor([kinds.setdefault((apart.get(one), at), len(kinds)) for one, at in whose])
