"""Adaptive samplers: warpers whose threshold follows the tokens chosen so far (mirostat, adaptive-p)."""

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
    """Keeps the surprisal of the text near `mirostat_tau` bits per token (Basu et al. 2021, mirostat v2).

    Tokens with a surprisal above mu bits are dropped, except the most likely one. Mu starts at twice tau.
    After each token it changes by `mirostat_eta` times the difference between tau and the token's surprisal.
    Surprisal is -log2 p under the incoming distribution. Mu is row state: a direct call always starts fresh.
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
        """Mask tokens with a surprisal above mu."""
        drop = surprisal(scores) > self._mu(context)
        return mask_dropped(
            context, scores, drop & (scores < scores.amax(-1, keepdim=True)), self.filter_value
        )

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the new mu [N]; a token with probability 0 before this warper leaves it unchanged."""
        mu, surprise = self._mu(context), surprisal(before).gather(1, tokens[:, None])
        updated = mu - context.param("mirostat_eta") * (surprise - context.param("mirostat_tau"))
        return {"mirostat_mu": torch.where(surprise.isfinite(), updated, mu)[:, 0]}

    def _mu(self, context: Context) -> Tensor:
        mu = context.state("mirostat_mu")
        return torch.where(mu.isnan(), 2 * context.param("mirostat_tau"), mu)


class AdaptivePLogitsWarper(LogitsProcessor):
    """Favours tokens near a target probability, to reach `adaptive_p_target` on average (adaptive-p).

    The target of a step is twice the configured one minus a moving average of the chosen tokens'
    probabilities, which decays by `adaptive_p_decay`. The new score of a token falls with the distance of its
    probability from that target: quadratically near it, linearly further away. It replaces the scores, so it
    must come last. The average is row state: a direct call always starts fresh.
    Origin: llama.cpp, pull request 17927, by ddh0 after MrJackSpade.
    """

    config_fields = ("adaptive_p_target", "adaptive_p_decay")
    state = {"adaptive_p_sum": math.nan, "adaptive_p_weight": math.nan}  # noqa: RUF012 - never written to
    WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0

    def __init__(self, adaptive_p_target: float, adaptive_p_decay: float = 0.9) -> None:
        self.adaptive_p_target = float(check_number("adaptive_p_target", adaptive_p_target, 0.0, 1.0))
        self.adaptive_p_decay = float(check_number("adaptive_p_decay", adaptive_p_decay, 0.0, 0.99))

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Replace the scores by their closeness to the step's target; masked tokens stay masked."""
        total, weight = self._running_average(context)
        target = (2 * context.param("adaptive_p_target") - total / weight).clamp(0.0, 1.0)
        distance = (scores.softmax(-1) - target).abs() / self.WIDTH
        closeness = self.PEAK - self.SHARPNESS * distance * distance / (1 + distance)
        return torch.where(scores == NEG_INF, scores, closeness)

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the new average [N]; a token with probability 0 before this warper leaves it unchanged."""
        total, weight = self._running_average(context)
        chosen = before.softmax(-1).gather(1, tokens[:, None])
        decay, was_possible = context.param("adaptive_p_decay"), chosen > 0
        return {
            "adaptive_p_sum": torch.where(was_possible, chosen + decay * total, total)[:, 0],
            "adaptive_p_weight": torch.where(was_possible, 1 + decay * weight, weight)[:, 0],
        }

    def _running_average(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return the decayed sum and weight, initialised as if all earlier tokens had met the target."""
        total, weight = context.state("adaptive_p_sum"), context.state("adaptive_p_weight")
        start = 1 / (1 - context.param("adaptive_p_decay"))
        return (
            torch.where(total.isnan(), context.param("adaptive_p_target") * start, total),
            torch.where(weight.isnan(), start, weight),
        )


def surprisal(scores: Tensor) -> Tensor:
    """-log2 p of each token [N, V]."""
    return scores.log_softmax(-1) / -math.log(2)
