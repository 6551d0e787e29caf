"""Diversity: what the groups before have chosen in this step counts against choosing it again."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError

__all__ = ["HammingDiversityLogitsProcessor", "apply_hamming_penalty"]


class HammingDiversityLogitsProcessor(LogitsProcessor):
    """Takes `diversity_penalty` off a token for each beam of an earlier group that chose it in this step.

    Diverse beam search (Vijayakumar et al. 2016). In the loop the tokens that a line must differ from are
    the column `rivals`, which the strategy keeps.
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
        """New scores of one group's beams [B * G, V] after the step's tokens of all beams [B * num_beams]."""
        size = self.num_beams // self.num_beam_groups
        check_number("beam_group_idx", beam_group_idx, 0, self.num_beam_groups - 1, integer=True)
        batch, rest = divmod(len(current_tokens), self.num_beams)
        if rest or current_tokens.ndim != 1:
            must = f"must hold {self.num_beams} tokens for each prompt"
            raise InputError("current_tokens", must, current_tokens)
        if len(scores) != batch * size:
            must = f"must have {batch * size} lines, {size} for each prompt"
            raise InputError("scores", must, scores)
        rivals = current_tokens.view(batch, self.num_beams)[:, : beam_group_idx * size]
        penalty = scores.new_full((1, 1), self.diversity_penalty)
        return apply_hamming_penalty(scores, rivals.repeat_interleave(size, 0).to(scores.device), penalty)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores for the lines of `context`."""
        rivals = context.state("earlier_group_tokens")
        if rivals.is_floating_point():
            must = "must not hold a HammingDiversityLogitsProcessor without beam groups"
            raise InputError("logits_processor", must, self, "set num_beam_groups and diversity_penalty")
        return apply_hamming_penalty(scores, rivals.flatten(1), context.param("diversity_penalty"))


def apply_hamming_penalty(scores: Tensor, rivals: Tensor, penalty: Tensor) -> Tensor:
    """The scores [N, V] less the penalty [N, 1] for each time a token is a rival [N, W], -1 being none."""
    width = scores.shape[1]
    known = torch.where((rivals >= 0) & (rivals < width), rivals, width)
    counts = scores.new_zeros(len(scores), width + 1)
    counts = counts.scatter_add(1, known, counts.new_ones(1, 1).expand(known.shape))
    return scores - penalty * counts[:, :width]
