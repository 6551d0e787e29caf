"""H2O eviction simulated draft by draft, so that each draft sees the slots its predecessor would leave."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from descant.kv_cache.attention_proxy import AttentionCall
from descant.kv_cache.attention_scores import WriteRegion, attention_weights, select_queries

__all__ = ["EvictionBudget", "EvictionState", "simulate_draft_eviction"]


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
