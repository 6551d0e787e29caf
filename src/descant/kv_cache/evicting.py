"""Caches that forget what nobody looks at: SnapKV and H2O."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from descant.errors import ConfigError
from descant.kv_cache.attention_proxy import Attention, attended
from descant.kv_cache.attention_scores import Ballot, Where, Write, votes
from descant.kv_cache.draft_eviction import Limit, rounds
from descant.kv_cache.evicting_base import Forgetting

__all__ = ["HeavyStore", "SnapStore"]


class SnapStore(Forgetting):
    """SnapKV: the end of a prompt says what of it is needed (Li et al. 2024, arXiv 2404.14469).

    At the commit that ends a prompt, the attention of its last `window` queries is summed, smoothed over
    `kernel` neighbouring slots, and each head keeps the `budget - window` slots that got the most, and the
    window. All that comes later stays.

    A prompt may come in pieces: while nothing was fed token by token, whatever a forward gives a row that is
    more than one token is a piece of it, after which what the row keeps and the piece are cut down to the
    budget together, by the last queries of the piece. Guesses that are accepted along with a prompt count as
    its end.
    """

    def __init__(self, budget: int, window: int = 32, kernel: int = 7) -> None:
        _check("budget", budget, 1)
        _check("window", window, 1, budget, "`budget`")
        _check("kernel", kernel, 1)
        if kernel % 2 == 0:
            raise ConfigError("kernel", "must be odd", kernel)
        super().__init__(budget, window)
        self.window, self.kernel = window, kernel
        self._voters = window

    def _listens(self, where: Where) -> bool:
        """While a prompt is read."""
        return where.span.fresh or bool(self._columns["reading"][where.rows].any())

    def _heard(self, layer: int, write: Write, pair: tuple[Tensor, Tensor], asked: Attention) -> Tensor:  # noqa: ARG002
        """What queries find; those that may be among the last are held."""
        sure = write.where.sure
        write.hold(asked, 0 if sure is None else max(0, int(sure.min()) - self.window))
        return attended(*pair, asked)

    def _kept(self, held: Tensor, given: Tensor, reading: Tensor) -> Tensor:
        """All, but of a prompt the budget."""
        return torch.where(reading & (given > 1), held.clamp(max=self.budget), held)

    def _weighed(self, score: Tensor, held: Tensor) -> Tensor:
        """The mean of neighbouring slots, so that what stays is no heap of single tokens."""
        late = torch.arange(score.shape[2]) >= held[:, None, None] - self.window
        score = score.masked_fill(late.to(score.device), 0.0)
        return torch.nn.functional.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)

    def _empty(self) -> Self:
        return type(self)(self.budget, self.window, self.kernel)


class HeavyStore(Forgetting):
    """H2O: what has been looked at most stays, and what is recent (Zhang et al. 2023, arXiv 2306.14048).

    At every commit the attention of its queries is added to what each slot had before. Where a row then holds
    more than `budget` slots, each head keeps the last `recent` and of the others those with the highest sum.
    Votes of queries that are taken back later remain. Guesses that are tried in one forward change nothing:
    each sees what the one before it, were it accepted, would have left.
    """

    _remembers = True

    def __init__(self, budget: int, recent: int | None = None) -> None:
        _check("budget", budget, 1)
        recent = max(1, budget // 2) if recent is None else recent
        _check("recent", recent, 1, budget, "`budget`")
        super().__init__(budget, recent)
        self.recent = recent

    def _heard(self, layer: int, write: Write, pair: tuple[Tensor, Tensor], asked: Attention) -> Tensor:
        """What queries find; those that are no guesses vote at once, the others are held."""
        where, out, again = write.where, attended(*pair, asked), write.heard
        if where.sure is None:
            write.hold(asked, 0)
            return out
        everyone = torch.arange(len(where.rows))
        firm = Ballot(0, everyone, where.rows, None, torch.zeros_like(everyone), where.sure)
        found = votes(Write(where, asked=[asked], heard=True), firm, pair[0])
        write.sums = found if write.sums is None else write.sums + found
        write.hold(asked, int(where.sure.min()))
        if again:  # layers that share their keys: a second vote would come too late for the first
            write.trail = []
        elif self._guessed(where):
            block, size = self._slots.blocks[layer], pair[0].shape[2]
            old = block.score[where.rows.to(block.score.device), :, :size]
            stays = torch.arange(size) < where.held[:, None, None]
            score = torch.where(stays.to(old.device), old, 0.0) + write.sums
            limit = Limit(self.budget, self.recent)
            out, write.trail = rounds(pair, asked, out, score, where, limit)
        return out

    def _guessed(self, where: Where) -> bool:
        """Whether guesses are tried for which slots have to go."""
        assert where.sure is not None
        now = torch.equal(where.start, self.lengths[where.rows])
        now = now and torch.equal(where.held, self.held[where.rows])
        full = bool((where.held + where.span.width > self.budget).any())
        return not where.span.fresh and now and full and where.span.width > int(where.sure.min())

    def _kept(self, held: Tensor, given: Tensor, reading: Tensor) -> Tensor:  # noqa: ARG002 - the rule
        """The budget."""
        return held.clamp(max=self.budget)

    def _empty(self) -> Self:
        return type(self)(self.budget, self.recent)


def _check(name: str, value: object, least: int, most: int | None = None, whose: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(name, f"must be an integer >= {least}", value)
    if most is not None and value > most:
        raise ConfigError(name, f"must be at most {whose}, {most}", value)
