"""The autoregressive draft loop: a network drafts token by token until each row stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, DraftLimitingCache, NoiseSource
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows, index_rows

__all__ = ["DraftLoop", "limit_to_cache", "limit_to_positions"]

# (rows with the drafts appended, index [N] (host)) -> logits [N, V'] that follow those rows.
LogitsFn = Callable[[Rows, Tensor], Tensor]


def limit_to_positions(max_drafts: Tensor, position: Tensor, max_positions: int | None) -> Tensor:
    """Limit the drafts of each row [R] (host) to a network's maximum number of positions; None: no limit.

    The network is fed the row and all drafts but the last.
    """
    return (
        max_drafts
        if max_positions is None
        else torch.minimum(max_drafts, max_positions - position + 1).clamp(min=0)
    )


def limit_to_cache(max_drafts: Array, rows: Rows, context: DraftContext) -> Array:
    """Limit the drafts of each row [R] to those that read a lossy cache as they would one by one."""
    cache = context.cache
    if cache.max_rewind is not None:
        # An evicting cache lets a prefill see the whole prompt; drafts in the same forward must not.
        max_drafts = np.where(rows.cached_length.numpy() == 0, 0, max_drafts)
    if isinstance(cache, DraftLimitingCache):
        index = torch.arange(len(rows)) if context.row_index is None else context.row_index
        max_drafts = np.minimum(max_drafts, cache.max_drafts(index, rows.pending).numpy())
    return max_drafts


@dataclass(frozen=True)
class DraftLoop:
    """The loop over one network's drafts: their distribution, how they are chosen, and when a row stops.

    The draft distribution is the softmax of the network's logits after the target's processors, to match the
    target closely. A greedy row takes the most likely token; a sampling row samples with the noise that the
    target has at that position. Every chosen token is proposed; a low probability or an end token only stops
    the row from drafting further.
    """

    noise: NoiseSource
    vocab_size: int  # the target's

    @torch.no_grad()
    def run(self, rows: Rows, max_drafts: Tensor, context: DraftContext, next_logits: LogitsFn) -> Proposal:
        """Up to `max_drafts[i]` tokens (host) after row `i`, with probabilities where needed."""
        params = _DraftParams.from_rows(rows)
        active, num_drafts, grown = max_drafts > 0, torch.zeros_like(max_drafts), rows
        drafts: list[Tensor] = []
        draft_probs: list[Tensor] = []
        while bool(active.any()):
            logits = self._next_logits(next_logits, grown, active)
            scores = context.process(grown, logits)
            probs = scores.softmax(-1)
            tokens = self._choose_tokens(params, probs, scores, len(drafts))
            token_probs = probs.gather(1, tokens[:, None])
            host_tokens, host_probs = torch.cat((tokens[:, None], token_probs.double()), 1).cpu().unbind(1)
            # A row without possible tokens has NaN probabilities, which are not above 0.
            proposed = active & (host_probs > 0)
            num_drafts += proposed
            drafts.append(tokens)
            if params.needs_probs is not None:
                certain = torch.nn.functional.one_hot(tokens, self.vocab_size).to(probs.dtype)
                draft_probs.append(
                    torch.where((params.needs_probs & proposed).to(probs.device)[:, None], probs, certain)
                )
            grown = grown.append(tokens[:, None], grown.length + proposed)
            active = (
                proposed & (num_drafts < max_drafts) & ~params.should_stop(host_tokens.long(), host_probs)
            )
        width = int(num_drafts.max()) if len(num_drafts) else 0
        if not width:
            return Proposal()
        stacked = torch.stack(draft_probs[:width], 1) if draft_probs else None
        return Proposal(None, torch.stack(drafts[:width], 1), num_drafts, stacked)

    def _next_logits(self, next_logits: LogitsFn, rows: Rows, active: Tensor) -> Tensor:
        """The network's logits for the active rows, resized to the target's vocabulary [R, V]."""
        index = active.nonzero().squeeze(1)
        logits = next_logits(rows, index).to(rows.tokens.device)
        missing = self.vocab_size - logits.shape[1]
        if missing:  # a negative value truncates
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        if len(index) == len(rows):
            return logits
        # Processors run on every row of the group; the results of inactive rows are ignored.
        return logits.new_zeros(len(rows), self.vocab_size).index_copy(0, index.to(logits.device), logits)

    def _choose_tokens(self, params: _DraftParams, probs: Tensor, scores: Tensor, ahead: int) -> Tensor:
        """The token of each row [R], `ahead` positions after its last committed token."""
        sampled_rows, index = params.sampled_rows, params.sampled_index
        if sampled_rows is None:
            return scores.argmax(-1)
        noise = self.noise.draw(sampled_rows.replace(length=sampled_rows.length + ahead), self.vocab_size)
        if index is None:
            return (probs / noise).argmax(-1)
        sampled_tokens = (index_rows(probs, index) / noise).argmax(-1)
        return scores.argmax(-1).index_copy(0, index.to(sampled_tokens.device), sampled_tokens)


@dataclass(frozen=True)
class _DraftParams:
    """The drafting parameters of the rows."""

    sampled_rows: Rows | None  # the rows that sample
    sampled_index: Tensor | None  # [N] (host) their indices; None: all rows
    needs_probs: (
        Tensor | None
    )  # [R] (host) rows that sample without a seed, for rejection sampling; None: none
    stop_token_ids: Tensor  # [R, E] (host) tokens that finish a row
    min_confidence: Tensor  # [R] (host) minimum token probability to continue drafting

    @classmethod
    def from_rows(cls, rows: Rows) -> _DraftParams:
        """The drafting parameters of these rows."""
        params = row_params(rows)
        sampled = params["do_sample"] == 1
        index = sampled.nonzero().squeeze(1)
        sampled_rows: Rows | None = None
        if len(index):
            sampled_rows = rows if len(index) == len(rows) else rows.take(index)
        unseeded = sampled & (params["seed"] < 0)
        name = "assistant_confidence_threshold"
        return cls(
            sampled_rows,
            None if sampled_rows is rows else index,
            unseeded if bool(unseeded.any()) else None,
            params["end_token_ids" if "end_token_ids" in params.values else "eos_token_ids"],
            params[name] if name in params.values else torch.full((len(rows),), -1.0),
        )

    def should_stop(self, tokens: Tensor, probs: Tensor) -> Tensor:
        """Whether a row stops after its token with this probability [R] (host)."""
        return (self.stop_token_ids == tokens[:, None]).any(1) | (probs < self.min_confidence)
