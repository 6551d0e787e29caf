"""Caches that forget what nobody looks at: SnapKV and H2O."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from descant.errors import ConfigError
from descant.kv_cache.attention_proxy import AttentionCall, sdpa
from descant.kv_cache.attention_scores import PendingWrite, ScoringQueries, WriteRegion, score_slots
from descant.kv_cache.draft_eviction import EvictionBudget, simulate_draft_eviction
from descant.kv_cache.evicting_base import EvictingStore

__all__ = ["H2OStore", "SnapKVStore"]


class SnapKVStore(EvictingStore):
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
        _check_int("budget", budget, 1)
        _check_int("window", window, 1, budget, "`budget`")
        _check_int("kernel", kernel, 1)
        if kernel % 2 == 0:
            raise ConfigError("kernel", "must be odd", kernel)
        super().__init__(budget, window)
        self.window, self.kernel = window, kernel
        self._num_scoring_queries = window

    def _needs_queries(self, where: WriteRegion) -> bool:
        """While a prompt is read."""
        return where.span.is_first_write or bool(self._row_state["reading"][where.rows].any())

    def _on_attention(
        self, layer: int, write: PendingWrite, pair: tuple[Tensor, Tensor], asked: AttentionCall
    ) -> Tensor:  # noqa: ARG002
        """What queries find; those that may be among the last are held."""
        sure = write.region.num_committed
        write.record_queries(asked, 0 if sure is None else max(0, int(sure.min()) - self.window))
        return sdpa(*pair, asked)

    def _num_to_keep(self, held: Tensor, given: Tensor, reading: Tensor) -> Tensor:
        """All, but of a prompt the budget."""
        return torch.where(reading & (given > 1), held.clamp(max=self.budget), held)

    def _eviction_scores(self, score: Tensor, held: Tensor) -> Tensor:
        """The mean of neighbouring slots, so that what stays is no heap of single tokens."""
        late = torch.arange(score.shape[2]) >= held[:, None, None] - self.window
        score = score.masked_fill(late.to(score.device), 0.0)
        return torch.nn.functional.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)

    def _make_empty(self) -> Self:
        return type(self)(self.budget, self.window, self.kernel)


class H2OStore(EvictingStore):
    """H2O: what has been looked at most stays, and what is recent (Zhang et al. 2023, arXiv 2306.14048).

    At every commit the attention of its queries is added to what each slot had before. Where a row then holds
    more than `budget` slots, each head keeps the last `recent` and of the others those with the highest sum.
    Votes of queries that are taken back later remain. Guesses that are tried in one forward change nothing:
    each sees what the one before it, were it accepted, would have left.
    """

    _accumulates_scores = True

    def __init__(self, budget: int, recent: int | None = None) -> None:
        _check_int("budget", budget, 1)
        recent = max(1, budget // 2) if recent is None else recent
        _check_int("recent", recent, 1, budget, "`budget`")
        super().__init__(budget, recent)
        self.recent = recent

    def _on_attention(
        self, layer: int, write: PendingWrite, pair: tuple[Tensor, Tensor], asked: AttentionCall
    ) -> Tensor:
        """What queries find; those that are no guesses vote at once, the others are held."""
        where, out, again = write.region, sdpa(*pair, asked), write.is_attended
        if where.num_committed is None:
            write.record_queries(asked, 0)
            return out
        everyone = torch.arange(len(where.rows))
        firm = ScoringQueries(0, everyone, where.rows, None, torch.zeros_like(everyone), where.num_committed)
        found = score_slots(PendingWrite(where, attention_calls=[asked], is_attended=True), firm, pair[0])
        write.committed_scores = found if write.committed_scores is None else write.committed_scores + found
        write.record_queries(asked, int(where.num_committed.min()))
        if again:  # layers that share their keys: a second vote would come too late for the first
            write.draft_states = []
        elif self._needs_draft_eviction(where):
            block, size = self._slots.blocks[layer], pair[0].shape[2]
            old = block.score[where.rows.to(block.score.device), :, :size]
            stays = torch.arange(size) < where.past_lengths[:, None, None]
            score = torch.where(stays.to(old.device), old, 0.0) + write.committed_scores
            limit = EvictionBudget(self.budget, self.recent)
            out, write.draft_states = simulate_draft_eviction(pair, asked, out, score, where, limit)
        return out

    def _needs_draft_eviction(self, where: WriteRegion) -> bool:
        """Whether guesses are tried for which slots have to go."""
        assert where.num_committed is not None
        now = torch.equal(where.start, self.lengths[where.rows])
        now = now and torch.equal(where.past_lengths, self.slot_counts[where.rows])
        full = bool((where.past_lengths + where.span.width > self.budget).any())
        return (
            not where.span.is_first_write
            and now
            and full
            and where.span.width > int(where.num_committed.min())
        )

    def _num_to_keep(self, held: Tensor, given: Tensor, reading: Tensor) -> Tensor:  # noqa: ARG002 - the rule
        """The budget."""
        return held.clamp(max=self.budget)

    def _make_empty(self) -> Self:
        return type(self)(self.budget, self.recent)


def _check_int(name: str, value: object, least: int, most: int | None = None, whose: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(name, f"must be an integer >= {least}", value)
    if most is not None and value > most:
        raise ConfigError(name, f"must be at most {whose}, {most}", value)
