"""SnapKV and H2O: caches that evict the slots with the least attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from descant.errors import ConfigError
from descant.kv_cache.attention.attention_proxy import AttentionCall, sdpa
from descant.kv_cache.attention.attention_scores import (
    PendingWrite,
    ScoringQueries,
    WriteRegion,
    attention_weights,
    score_slots,
    select_queries,
)
from descant.kv_cache.stores.evicting_base import EvictingStore

__all__ = ["EvictionBudget", "EvictionState", "H2OStore", "SnapKVStore", "simulate_draft_eviction"]


class EvictionBudget(NamedTuple):
    """The limits of a row."""

    budget: int  # the most slots
    num_protected: int  # the number of newest slots that are never evicted

    def surviving_slots(self, score: Tensor, alive: Tensor, end: Tensor, num_keep: Tensor) -> Tensor:
        """The alive slots [N, H, S] that stay, `num_keep` of them; the newest slot is `end - 1`."""
        slots = torch.arange(score.shape[2], device=score.device)
        priority = score.masked_fill(slots >= end - self.num_protected, torch.inf)
        order = priority.masked_fill(~alive, -torch.inf).sort(stable=True, dim=-1, descending=True).indices
        return torch.zeros_like(alive).scatter(2, order, (slots < num_keep).expand_as(alive))


class EvictionState(NamedTuple):
    """The slots of rows after a number of accepted drafts."""

    score: Tensor  # [N, H, S] accumulated attention
    alive: Tensor  # [N, H, S] whether the slot is still there


def simulate_draft_eviction(
    pair: tuple[Tensor, Tensor],
    call: AttentionCall,
    out: Tensor,
    score: Tensor,
    region: WriteRegion,
    limit: EvictionBudget,
) -> tuple[Tensor, list[EvictionState]]:
    """The attention output [N, Hq, T, E] with an eviction before every draft, and the states in between.

    `out` is the output without eviction, `score` [N, H, S] the scores after all queries that are not drafts.
    State `i` is that after `i` accepted drafts.
    """
    keys, values = pair
    device, width = keys.device, region.span.width
    assert region.num_committed is not None
    slots = torch.arange(keys.shape[2], device=device)
    end = (region.past_lengths + region.num_committed).to(device)[:, None, None]
    num_keep = end.clamp(max=limit.budget)
    alive = limit.surviving_slots(score, (slots < end).expand(keys.shape[:3]), end, num_keep)
    states = [EvictionState(score, alive)]
    for draft in range(width - int(region.num_committed.min())):
        query_index = region.num_committed + draft
        at = query_index.clamp(max=width - 1)[:, None].to(device)
        alive = alive | (slots == end)
        weights = attention_weights(select_queries(call, None, at), keys, at, alive)  # [N, H, G, 1, S]
        draft_out = (weights.to(values.dtype) @ values[:, :, None]).view(len(out), -1, 1, values.shape[3])
        index = at[:, None, :, None].expand_as(draft_out)
        exists = (query_index < width).to(device)[:, None, None, None]
        out = out.scatter(2, index, torch.where(exists, draft_out, out.gather(2, index)))
        score = score + weights.sum((2, 3)).to(score.dtype)
        end, num_keep = end + 1, (num_keep + 1).clamp(max=limit.budget)
        alive = limit.surviving_slots(score, alive, end, num_keep)
        states.append(EvictionState(score, alive))
    return out, states


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
        self._settings = budget, window, kernel
        self.window, self.kernel = window, kernel
        self._num_scoring_queries = window

    def _needs_queries(self, region: WriteRegion) -> bool:
        """During a prompt."""
        return region.span.is_first_write or bool(self._columns["reading"][region.rows].any())

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


class H2OStore(EvictingStore):
    """H2O: keep recent slots and those with the most attention (Zhang et al. 2023, arXiv 2306.14048).

    At every commit the attention of the new queries is added to each slot's score. A row with more than
    `budget` slots then keeps, per head, the last `recent` slots and those with the highest scores. Scores
    from queries that are rewound later remain. Drafts give the same result as single tokens: each draft
    sees the slots that would remain if the drafts before it were accepted.
    """

    block_names = ("keys", "values", "score")

    def __init__(self, budget: int, recent: int | None = None) -> None:
        _check_int("budget", budget, 1)
        recent = max(1, budget // 2) if recent is None else recent
        _check_int("recent", recent, 1, budget, "`budget`")
        super().__init__(budget, recent)
        self._settings = budget, recent
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
            stored, size = self._blocks["score"][layer], pair[0].shape[2]
            old = stored[region.rows.to(stored.device), :, :size]
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


def _check_int(
    name: str, value: object, minimum: int, maximum: int | None = None, maximum_name: str = ""
) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(name, f"must be an integer >= {minimum}", value)
    if maximum is not None and value > maximum:
        raise ConfigError(name, f"must be at most {maximum_name}, {maximum}", value)
