"""Forced tokens: draft what a grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, Drafter
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows, index_rows
from descant.decoding.grammars.matcher_pool import MatcherPool
from descant.decoding.processors.grammar import GRAMMAR_PARAM

__all__ = ["GrammarDrafter"]


class GrammarDrafter:
    """A drafter of the tokens that a row's grammar forces; where it forces none, another drafter's tokens.

    A forced text can be spelled in several tokens, so that its drafts are verified as all others are.
    """

    def __init__(self, other: Drafter | None = None) -> None:
        self._other = other
        self.is_model_free = other is None or other.is_model_free

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Register requests with the other drafter."""
        if self._other is not None:
            self._other.add_requests(requests, inputs)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop requests from the other drafter."""
        if self._other is not None:
            self._other.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Have the other drafter follow the rows; forced tokens depend on the rows' tokens alone."""
        if self._other is not None:
            self._other.commit(parents, lengths)

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """The forced tokens of each row, or else the other drafter's."""
        forced = self._forced_tokens(rows, max_drafts)
        counts = torch.tensor([len(tokens) for tokens in forced])
        other = Proposal()
        if self._other is not None:
            # A row with forced tokens gets no others: the drafter would count on its own being tried.
            other = self._other.draft(rows, torch.where(counts > 0, 0, max_drafts), context)
        return _merge(rows, forced, counts, other)

    def _forced_tokens(self, rows: Rows, max_drafts: Tensor) -> list[list[int]]:
        """The forced tokens of each row, at most `max_drafts`."""
        pools = row_params(rows).values.get(GRAMMAR_PARAM)
        if pools is None:
            return [[] for _ in range(len(rows))]
        assert not isinstance(pools, Tensor)
        tokens = rows.tokens.cpu().numpy()
        starts, stops = rows.prompt_length.tolist(), rows.length.tolist()
        return [
            [] if pool is None or limit <= 0 else _continuation(pool, tokens[row, start:stop])[:limit]
            for row, (pool, start, stop, limit) in enumerate(
                zip(pools, starts, stops, max_drafts.tolist(), strict=True)
            )
        ]


def _continuation(pool: MatcherPool, text: Array) -> list[int]:
    """The tokens that must follow a text, the end token included if there is only one."""
    matcher, is_valid = pool.move(text)
    if matcher is None or not is_valid:
        return []
    forced = matcher.forced_tokens()
    if pool.note_failure(matcher):
        return []
    if len(pool.end_token_ids) != 1:
        return forced
    accepted = matcher.accept(forced) if forced else 0
    is_final = accepted == len(forced) and matcher.is_final()
    matcher.rollback(accepted)
    return [*forced[:accepted], int(pool.end_token_ids[0])] if is_final else forced


def _merge(rows: Rows, forced: Sequence[Sequence[int]], counts: Tensor, other: Proposal) -> Proposal:
    """Forced tokens, and the other drafter's for the rows that have none."""
    if not bool(counts.any()):
        return other
    width = max(int(counts.max()), other.width)
    drafts = np.zeros((len(rows), width), np.int64)
    for row, tokens in enumerate(forced):
        drafts[row, : len(tokens)] = tokens
    merged = torch.from_numpy(drafts).to(rows.tokens.device)
    if other.drafts is None:
        return Proposal(None, merged, counts)
    index = (counts == 0).nonzero().squeeze(1)
    others = torch.nn.functional.pad(index_rows(other.drafts, index), (0, width - other.width))
    device_index = index.to(merged.device)
    merged = merged.index_copy(0, device_index, others)
    counts = torch.where(counts > 0, counts, torch.as_tensor(other.draft_counts()))
    if other.draft_probs is None:
        return Proposal(None, merged, counts)
    size = other.draft_probs.shape[-1]
    certain = torch.nn.functional.one_hot(merged, size).to(other.draft_probs.dtype)
    probs = torch.nn.functional.pad(index_rows(other.draft_probs, index), (0, 0, 0, width - other.width))
    return Proposal(None, merged, counts, certain.index_copy(0, device_index, probs))
