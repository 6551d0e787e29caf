"""Hamming diversity between the groups of diverse beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError

__all__ = ["HammingDiversityLogitsProcessor", "apply_hamming_penalty"]


class HammingDiversityLogitsProcessor(LogitsProcessor):
    """Subtracts `diversity_penalty` from a token per beam of an earlier group that chose it in this step.

    Diverse beam search (Vijayakumar et al. 2016). In the engine, the tokens of earlier groups are the column
    `earlier_group_tokens`, which the strategy maintains.
    """

    config_fields = ("diversity_penalty",)

    def __init__(self, diversity_penalty: float, num_beams: int, num_beam_groups: int) -> None:
        if check_number("diversity_penalty", diversity_penalty, 0.0) <= 0:
            raise InputError("diversity_penalty", "must be > 0", diversity_penalty)
        self.diversity_penalty = float(diversity_penalty)
        self.num_beams = check_number("num_beams", num_beams, 2, integer=True)
        self.num_beam_groups = check_number("num_beam_groups", num_beam_groups, 2, num_beams, integer=True)

    def __call__(  # type: ignore[override]
        self,
        input_ids: Tensor,  # noqa: ARG002
        scores: Tensor,
        current_tokens: Tensor,
        beam_group_idx: int,
    ) -> Tensor:
        """Return scores of one group [B * G, V], given this step's tokens of all beams [B * num_beams]."""
        group_size = self.num_beams // self.num_beam_groups
        check_number("beam_group_idx", beam_group_idx, 0, self.num_beam_groups - 1, integer=True)
        batch, remainder = divmod(len(current_tokens), self.num_beams)
        if remainder or current_tokens.ndim != 1:
            must = f"must have {self.num_beams} tokens per prompt"
            raise InputError("current_tokens", must, current_tokens)
        if len(scores) != batch * group_size:
            must = f"must have {batch * group_size} rows, {group_size} per prompt"
            raise InputError("scores", must, scores)
        earlier = current_tokens.view(batch, self.num_beams)[:, : beam_group_idx * group_size]
        penalty = scores.new_full((1, 1), self.diversity_penalty)
        return apply_hamming_penalty(
            scores, earlier.repeat_interleave(group_size, 0).to(scores.device), penalty
        )

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Apply the penalty to the rows of `context`."""
        earlier = context.state("earlier_group_tokens")
        if earlier.is_floating_point():
            must = "must not contain a HammingDiversityLogitsProcessor without beam groups"
            raise InputError("logits_processor", must, self, "set num_beam_groups and diversity_penalty")
        return apply_hamming_penalty(scores, earlier.flatten(1), context.param("diversity_penalty"))


def apply_hamming_penalty(scores: Tensor, earlier: Tensor, penalty: Tensor) -> Tensor:
    """Subtract the penalty [N, 1] from scores [N, V] per occurrence in `earlier` [N, W], padded with -1."""
    vocab_size = scores.shape[1]
    ids = torch.where((earlier >= 0) & (earlier < vocab_size), earlier, vocab_size)
    counts = scores.new_zeros(len(scores), vocab_size + 1)
    counts = counts.scatter_add(1, ids, counts.new_ones(1, 1).expand(ids.shape))
    return scores - penalty * counts[:, :vocab_size]
