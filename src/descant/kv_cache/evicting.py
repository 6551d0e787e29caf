"""SnapKV and H2O: caches that evict the slots with the least attention."""

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
    """SnapKV: evict from the prompt what its last queries do not attend (Li et al. 2024, arXiv 2404.14469).

    At the commit that ends a prompt, the attention of its last `window` queries is summed and average-pooled
    over `kernel` neighbouring slots. Each head keeps the window and the `budget - window` slots with the
    highest sums. Later tokens are never evicted.

    A prompt may be chunked: until a row is fed single tokens, every forward with more than one token for it
    is a prompt chunk. After each chunk the row is cut to the budget, by the last queries of the chunk.
    Drafts accepted together with a prompt count as its end.
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

    def _needs_queries(self, region: WriteRegion) -> bool:
        """During a prompt."""
        return region.span.is_first_write or bool(self._row_state["reading"][region.rows].any())

    def _on_attention(
        self,
        layer: int,  # noqa: ARG002 - the interface
        write: PendingWrite,
        pair: tuple[Tensor, Tensor],
        call: AttentionCall,
    ) -> Tensor:
        """The attention output; records the queries that may be among the last `window`."""
        committed = write.region.num_committed
        write.record_queries(call, 0 if committed is None else max(0, int(committed.min()) - self.window))
        return sdpa(*pair, call)

    def _num_to_keep(self, num_slots: Tensor, num_fed: Tensor, reading: Tensor) -> Tensor:
        """The budget during a prompt, everything later."""
        return torch.where(reading & (num_fed > 1), num_slots.clamp(max=self.budget), num_slots)

    def _eviction_scores(self, score: Tensor, num_slots: Tensor) -> Tensor:
        """Scores averaged over neighbouring slots, so that runs of tokens are kept."""
        in_window = torch.arange(score.shape[2]) >= num_slots[:, None, None] - self.window
        score = score.masked_fill(in_window.to(score.device), 0.0)
        return torch.nn.functional.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)

    def _make_empty(self) -> Self:
        return type(self)(self.budget, self.window, self.kernel)


class H2OStore(EvictingStore):
    """H2O: keep recent slots and those with the most attention (Zhang et al. 2023, arXiv 2306.14048).

    At every commit the attention of the new queries is added to each slot's score. A row with more than
    `budget` slots then keeps, per head, the last `recent` slots and those with the highest scores. Scores
    from queries that are rewound later remain. Drafts give the same result as single tokens: each draft
    sees the slots that would remain if the drafts before it were accepted.
    """

    _accumulates_scores = True

    def __init__(self, budget: int, recent: int | None = None) -> None:
        _check_int("budget", budget, 1)
        recent = max(1, budget // 2) if recent is None else recent
        _check_int("recent", recent, 1, budget, "`budget`")
        super().__init__(budget, recent)
        self.recent = recent

    def _on_attention(
        self, layer: int, write: PendingWrite, pair: tuple[Tensor, Tensor], call: AttentionCall
    ) -> Tensor:
        """The attention output; scores the committed queries at once and records the drafts."""
        region, out, repeated = write.region, sdpa(*pair, call), write.is_attended
        if region.num_committed is None:
            write.record_queries(call, 0)
            return out
        all_rows = torch.arange(len(region.rows))
        start = torch.zeros_like(all_rows)
        committed = ScoringQueries(0, all_rows, region.rows, None, start, region.num_committed)
        scores = score_slots(
            PendingWrite(region, attention_calls=[call], is_attended=True), committed, pair[0]
        )
        if write.committed_scores is not None:
            scores = write.committed_scores + scores
        write.committed_scores = scores
        write.record_queries(call, int(region.num_committed.min()))
        if repeated:  # layers that share keys: the first layer's drafts cannot see the second's scores
            write.draft_states = []
        elif self._needs_draft_eviction(region):
            block, size = self._slots.blocks[layer], pair[0].shape[2]
            old = block.score[region.rows.to(block.score.device), :, :size]
            is_old = torch.arange(size) < region.past_lengths[:, None, None]
            score = torch.where(is_old.to(old.device), old, 0.0) + write.committed_scores
            limit = EvictionBudget(self.budget, self.recent)
            out, write.draft_states = simulate_draft_eviction(pair, call, out, score, region, limit)
        return out

    def _needs_draft_eviction(self, region: WriteRegion) -> bool:
        """Whether the forward has drafts that would cause evictions."""
        assert region.num_committed is not None
        up_to_date = torch.equal(region.start, self.lengths[region.rows])
        up_to_date = up_to_date and torch.equal(region.past_lengths, self.slot_counts[region.rows])
        over_budget = bool((region.past_lengths + region.span.width > self.budget).any())
        has_drafts = region.span.width > int(region.num_committed.min())
        return not region.span.is_first_write and up_to_date and over_budget and has_drafts

    def _num_to_keep(self, num_slots: Tensor, num_fed: Tensor, reading: Tensor) -> Tensor:  # noqa: ARG002 - the interface
        """At most the budget."""
        return num_slots.clamp(max=self.budget)

    def _make_empty(self) -> Self:
        return type(self)(self.budget, self.recent)


def _check_int(
    name: str, value: object, minimum: int, maximum: int | None = None, maximum_name: str = ""
) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(name, f"must be an integer >= {minimum}", value)
    if maximum is not None and value > maximum:
        raise ConfigError(name, f"must be at most {maximum_name}, {maximum}", value)
