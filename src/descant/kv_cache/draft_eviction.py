"""Rounds: guesses that are tried in one forward, each seeing what the one before it would have left."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from descant.kv_cache.attention_proxy import AttentionCall
from descant.kv_cache.attention_scores import WriteRegion, attention_weights, select_queries

__all__ = ["EvictionBudget", "EvictionState", "simulate_draft_eviction"]


class EvictionBudget(NamedTuple):
    """How much a row may hold."""

    budget: int  # slots
    num_protected: int  # how many of the newest are never dropped

    def surviving_slots(self, score: Tensor, seen: Tensor, top: Tensor, keep: Tensor) -> Tensor:
        """Which of the slots that are seen [N, H, S] stay, `keep` of them, the newest being below `top`."""
        slots = torch.arange(score.shape[2], device=score.device)
        weight = score.masked_fill(slots >= top - self.num_protected, torch.inf).masked_fill(
            ~seen, -torch.inf
        )
        order = weight.sort(stable=True, dim=-1, descending=True).indices
        return torch.zeros_like(seen).scatter(2, order, (slots < keep).expand_as(seen))


class EvictionState(NamedTuple):
    """Where rows stand when so many guesses are accepted."""

    score: Tensor  # [N, H, S] what each slot has been looked at
    alive: Tensor  # [N, H, S] whether it is still there


def simulate_draft_eviction(
    pair: tuple[Tensor, Tensor],
    asked: AttentionCall,
    out: Tensor,
    score: Tensor,
    where: WriteRegion,
    limit: EvictionBudget,
) -> tuple[Tensor, list[EvictionState]]:
    """What queries find where slots are dropped before every guess [N, Hq, T, E], and how rows stand then.

    `out` is what they find where none are, `score` [N, H, S] that of slots after all queries that are no
    guesses. The first round is that without guesses.
    """
    keys, values = pair
    device, width = keys.device, where.span.width
    assert where.num_committed is not None
    slots = torch.arange(keys.shape[2], device=device)
    top = (where.past_lengths + where.num_committed).to(device)[:, None, None]
    keep = top.clamp(max=limit.budget)
    seen = limit.surviving_slots(score, (slots < top).expand(keys.shape[:3]), top, keep)
    trail = [EvictionState(score, seen)]
    for guess in range(width - int(where.num_committed.min())):
        place = where.num_committed + guess
        at = place.clamp(max=width - 1)[:, None].to(device)
        seen = seen | (slots == top)
        weights = attention_weights(select_queries(asked, None, at), keys, at, seen)  # [N, H, G, 1, S]
        found = (weights.to(values.dtype) @ values[:, :, None]).view(len(out), -1, 1, values.shape[3])
        index = at[:, None, :, None].expand_as(found)
        there = (place < width).to(device)[:, None, None, None]
        out = out.scatter(2, index, torch.where(there, found, out.gather(2, index)))
        score, top, keep = score + weights.sum((2, 3)), top + 1, (keep + 1).clamp(max=limit.budget)
        seen = limit.surviving_slots(score, seen, top, keep)
        trail.append(EvictionState(score, seen))
    return out, trail
