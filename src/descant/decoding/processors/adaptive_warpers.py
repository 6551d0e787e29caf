"""Feedback: samplers that steer by what was chosen before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.decoding.processors.filters import NEG_INF
from descant.decoding.processors.truncation import mask_dropped
from descant.errors import InputError

__all__ = ["AdaptivePLogitsWarper", "MirostatLogitsWarper"]


class MirostatLogitsWarper(LogitsProcessor):
    """Holds the surprise of a text at `mirostat_tau` bits a token (Basu et al. 2021, mirostat v2).

    Tokens that would surprise by more than mu bits are dropped, never the likeliest. Mu starts at twice
    tau, and after each choice moves by `mirostat_eta` times what the surprise fell short of tau. Surprise
    is -log2 p in the distribution that comes in. A call by hand starts afresh: mu lives in the loop's rows.
    """

    config_fields = ("mirostat_tau", "mirostat_eta")
    state = {"mirostat_mu": math.nan}  # noqa: RUF012 - never written to
    filter_value = NEG_INF

    def __init__(
        self,
        mirostat_tau: float,
        mirostat_eta: float = 0.1,
        filter_value: float = NEG_INF,
        min_tokens_to_keep: int = 1,
    ) -> None:
        if check_number("mirostat_tau", mirostat_tau, 0.0) <= 0:
            raise InputError("mirostat_tau", "must be > 0", mirostat_tau)
        self.mirostat_tau = float(mirostat_tau)
        self.mirostat_eta = float(check_number("mirostat_eta", mirostat_eta, 0.0))
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What is too surprising is gone."""
        drop = surprisal(scores) > self._mu(context)
        return mask_dropped(
            context, scores, drop & (scores < scores.amax(-1, keepdim=True)), self.filter_value
        )

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """The new mu [N]; a token that mirostat was given no chance of leaves it as it was."""
        mu, seen = self._mu(context), surprisal(before).gather(1, tokens[:, None])
        moved = mu - context.param("mirostat_eta") * (seen - context.param("mirostat_tau"))
        return {"mirostat_mu": torch.where(seen.isfinite(), moved, mu)[:, 0]}

    def _mu(self, context: Context) -> Tensor:
        mu = context.state("mirostat_mu")
        return torch.where(mu.isnan(), 2 * context.param("mirostat_tau"), mu)


class AdaptivePLogitsWarper(LogitsProcessor):
    """Favours tokens near a target probability, so that on average `adaptive_p_target` is met (adaptive-p).

    The target of a step is twice the wanted one less a moving average of the probabilities of the tokens
    chosen so far, which decays by `adaptive_p_decay`. A token's new score falls with the distance of its
    probability from it, first by the square, then in proportion. It decides by itself, so it comes last.
    A call by hand starts afresh: the average lives in the loop's rows.
    Origin: llama.cpp, pull request 17927, by ddh0 after MrJackSpade.
    """

    config_fields = ("adaptive_p_target", "adaptive_p_decay")
    state = {"adaptive_p_sum": math.nan, "adaptive_p_weight": math.nan}  # noqa: RUF012 - never written to
    WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0

    def __init__(self, adaptive_p_target: float, adaptive_p_decay: float = 0.9) -> None:
        self.adaptive_p_target = float(check_number("adaptive_p_target", adaptive_p_target, 0.0, 1.0))
        self.adaptive_p_decay = float(check_number("adaptive_p_decay", adaptive_p_decay, 0.0, 0.99))

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores by the distance from the step's target; what was ruled out stays so."""
        total, weight = self._running_average(context)
        target = (2 * context.param("adaptive_p_target") - total / weight).clamp(0.0, 1.0)
        distance = (scores.softmax(-1) - target).abs() / self.WIDTH
        near = self.PEAK - self.SHARPNESS * distance * distance / (1 + distance)
        return torch.where(scores == NEG_INF, scores, near)

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """The new average [N]; a token that it was given no chance of leaves it as it was."""
        total, weight = self._running_average(context)
        chosen = before.softmax(-1).gather(1, tokens[:, None])
        decay, own = context.param("adaptive_p_decay"), chosen > 0
        return {
            "adaptive_p_sum": torch.where(own, chosen + decay * total, total)[:, 0],
            "adaptive_p_weight": torch.where(own, 1 + decay * weight, weight)[:, 0],
        }

    def _running_average(self, context: Context) -> tuple[Tensor, Tensor]:
        """The decayed sum of the chosen probabilities and its weight, at first as if all met the target."""
        total, weight = context.state("adaptive_p_sum"), context.state("adaptive_p_weight")
        start = 1 / (1 - context.param("adaptive_p_decay"))
        return (
            torch.where(total.isnan(), context.param("adaptive_p_target") * start, total),
            torch.where(weight.isnan(), start, weight),
        )


def surprisal(scores: Tensor) -> Tensor:
    """-log2 p of each token [N, V]."""
    return scores.log_softmax(-1) / -math.log(2)
