"""Drafts from the token pairs of the text so far."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from descant.parts import DraftContext, Proposal, Rows, check_number


class Pairs:
    """A drafter that proposes after each token what followed it the last time.

    The model verifies all draft tokens in one forward and keeps those that it would
    have chosen: good drafts save time, bad ones cost little, and the text is the same.
    """

    is_model_free = True  # runs no model

    def __init__(self, *, ahead: int = 4):
        self.ahead = check_number("ahead", ahead, 1, integer=True)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """No state per request."""

    def remove_requests(self, requests: Sequence[int]) -> None:
        """No state per request."""

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """No state per row: the tokens are enough."""

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """Propose up to `ahead` tokens per row, and at most `max_drafts` [R]."""
        drafts = [
            self._draft_row(rows.tokens[row, : rows.length[row]].tolist(), limit)
            for row, limit in enumerate(max_drafts.clamp(max=self.ahead).tolist())
        ]
        width = max(map(len, drafts), default=0)
        if not width:
            return Proposal()
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        return Proposal(
            drafts=torch.tensor(padded, device=rows.tokens.device),  # [R, K]
            num_drafts=torch.tensor([len(draft) for draft in drafts]),  # [R]
        )

    def _draft_row(self, tokens: list[int], limit: int) -> list[int]:
        """Return the draft tokens of one row."""
        followers = dict(pairwise(tokens))  # the latest pair wins
        draft = tokens[-1:]
        while len(draft) <= limit and draft and draft[-1] in followers:
            draft.append(followers[draft[-1]])
        return draft[1:]


drafter = Pairs
