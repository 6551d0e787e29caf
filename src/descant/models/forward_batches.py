"""Which rows share a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from descant.core.context import Params
from descant.core.interfaces import Facts
from descant.core.records import Proposal
from descant.core.rows import Rows, same

__all__ = ["Batch", "Batches"]

# At most so many logits are computed in one forward of ragged prompts: 128 MiB in float32.
_LOGITS = 2**25

# Padding to so many positions is no waste worth a second forward.
_SHORT = 64


class Batch(NamedTuple):
    """Rows that share a forward."""

    rows: Tensor | None  # [N] (host); None: the whole table
    size: int  # how many rows
    cached: Tensor  # [N] (host) positions before the fed ones
    fed: Tensor  # [N] (host) how many are fed; not looked at where it is one each
    start: int | None  # the position that all start at; None: they differ
    width: int  # how many positions are fed, the longest row's

    @classmethod
    def of(cls, cached: Tensor, fed: Tensor, rows: Tensor | None = None) -> Batch:
        """A batch of the rows `rows`."""
        if rows is not None:
            cached, fed = cached[rows], fed[rows]
        return cls(rows, len(fed), cached, fed, same(cached), int(fed.max()))

    @property
    def stop(self) -> int:
        """How many slots are read: the longest past and everything fed after it."""
        return (int(self.cached.max()) if self.start is None else self.start) + self.width


class Batches:
    """The rows of a step in as few forwards as the model and the rows allow, fresh rows first."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def of(
        self, rows: Rows, proposal: Proposal, apart: Mapping[int, object], held: list[Tensor] | None = None
    ) -> list[Batch]:
        """The batches of a step.

        `apart` names the requests whose rows share a forward only with rows that give the same; `held` are
        the rows that have a state of their own, in parts that can share it.
        """
        cached, even, facts = rows.cached, rows.even, self.facts
        turns = _turns(rows)
        plain = not apart and turns is None and held is None and not facts.alone
        stepping = plain and facts.memory == "keys" and proposal.drafts is None
        if stepping and even is not None and even.length == even.cached + 1:
            return [Batch(None, len(rows), cached, cached, even.cached, 1)]
        fed = rows.pending + proposal.tried()
        if facts.memory == "none":  # everything is fed again, every time
            cached, fed = torch.zeros_like(cached), cached + fed
        whole = Batch.of(cached, fed)
        if facts.alone:
            parts = [torch.tensor([row]) for row in range(len(rows))]
            return [whole] if len(rows) == 1 else [Batch.of(cached, fed, part) for part in parts]
        if plain and self._fits(whole, fed):
            return [whole]
        fresh = cached == 0
        parts = []
        if bool(fresh.any()):
            for part in _by(_apart(rows, apart, turns), fresh.nonzero().squeeze(1)):
                parts += self._by_length(part, fed)
        if not bool(fresh.all()):
            for part in (
                held if held is not None else self._running((~fresh).nonzero().squeeze(1), cached, fed)
            ):
                parts += _by(_apart(rows, apart, turns), part)
        return [whole] if len(parts) == 1 else [Batch.of(cached, fed, part) for part in parts]

    def _fits(self, whole: Batch, fed: Tensor) -> bool:
        """Whether all rows fit one forward as they are."""
        if self.facts.level:
            return whole.start is not None and same(fed) is not None
        if whole.width == 1 and (
            whole.start is not None or (self.facts.masks and whole.cached.numpy().all())
        ):
            return True
        return whole.start is not None and not _wasteful(fed) and self._readable(fed)

    def _running(self, index: Tensor, cached: Tensor, fed: Tensor) -> list[Tensor]:
        """Rows that have a past, in parts that can share a forward."""
        parts = [index] if self.facts.masks else _by(cached, index)
        if not self.facts.level and int(fed[index].max()) <= _SHORT:
            return parts
        # What some have yet to read after a past must not pad all others.
        return [part for some in parts for part in self._by_length(some, fed)]

    def _by_length(self, index: Tensor, fed: Tensor) -> list[Tensor]:
        """Fresh rows in batches of equal length, or of similar: none padded to over half as much again."""
        if self.facts.level:
            return _by(fed, index)
        parts, rest = [], index[fed[index].argsort()]
        while len(rest):
            limit = max(_SHORT, int(fed[rest[0]] * 3) // 2)
            count = int((fed[rest] <= limit).sum())
            while count > 1 and not self._readable(fed[rest[:count]]):
                count = (count + 1) // 2
            parts.append(rest[:count].sort().values)
            rest = rest[count:]
        return parts

    def _readable(self, fed: Tensor) -> bool:
        """Whether the logits of all rows' last positions fit, each position being computed for every row."""
        return len(set(fed.tolist())) * len(fed) * self.facts.vocabulary <= _LOGITS


def _wasteful(fed: Tensor) -> bool:
    """Whether padding all rows to the longest would cost more than a second forward."""
    longest = int(fed.max())
    return longest > _SHORT and longest * len(fed) > 1.5 * int(fed.sum())


def _by(column: Tensor, index: Tensor) -> list[Tensor]:
    """Rows in parts that have the same in a column."""
    mine = column[index]
    return [index[mine == value] for value in sorted(set(mine.tolist()))]


def _turns(rows: Rows) -> Tensor | None:
    """For rows that take turns to spare memory which turn is theirs, else -1 [R]; None where none does."""
    params = rows.columns.get("params")
    spare = params.values.get("low_memory") if isinstance(params, Params) else None
    if not isinstance(spare, Tensor) or not bool((spare == 1).any()):
        return None
    return torch.where(spare == 1, rows.slot, -1)


def _apart(rows: Rows, apart: Mapping[int, object], turns: Tensor | None) -> Tensor:
    """A number for each row that is the same where rows can share a forward."""
    if not apart and turns is None:
        return torch.zeros_like(rows.request)
    kinds: dict[object, int] = {}
    turn = [-1] * len(rows) if turns is None else turns.tolist()
    whose = zip(rows.request.tolist(), turn, strict=True)
    return torch.tensor([kinds.setdefault((apart.get(one), at), len(kinds)) for one, at in whose])
