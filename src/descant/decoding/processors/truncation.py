"""Adaptive truncation: top-n-sigma, top-H, p-less and XTC."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number, check_positive
from descant.decoding.processors.filters import NEG_INF, FilteringWarper, min_keep_threshold


class TopNSigmaLogitsWarper(FilteringWarper):
    """Keeps the scores within `top_n_sigma` standard deviations of the best (Tang et al. 2024, "Top-nσ").

    The deviation is that of the row's finite scores.
    """

    config_fields = ("top_n_sigma",)

    def __init__(
        self, top_n_sigma: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        do = "remove the processor to keep all tokens"
        self.top_n_sigma = check_positive("top_n_sigma", top_n_sigma, do)
        super().__init__(filter_value, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the scores too far below the best."""
        finite = scores.isfinite()
        count = finite.sum(-1, keepdim=True)
        mean = torch.where(finite, scores, 0.0).sum(-1, keepdim=True) / count
        variance = torch.where(finite, (scores - mean) ** 2, 0.0).sum(-1, keepdim=True) / count
        threshold = scores.amax(-1, keepdim=True) - context.param("top_n_sigma") * variance.sqrt()
        return mask_dropped(context, scores, scores < threshold, self.filter_value)


class TopHLogitsWarper(FilteringWarper):
    """Keeps the most likely tokens with at most `top_h` of the entropy (Potraghloo et al. 2025, "Top-H").

    The most likely token is always kept; among ties, lower ids come first. The entropy of the kept tokens is
    the sum of their terms -p log p, as in the authors' code, which transformers uses. That code considers the
    100 most likely tokens, this one all tokens.
    """

    config_fields = ("top_h",)

    def __init__(self, top_h: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.top_h = check_positive("top_h", top_h, high=1.0)
        super().__init__(filter_value, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that would exceed the entropy share."""
        descending, order = scores.sort(descending=True, stable=True)
        entropy = torch.special.entr(descending.softmax(-1)).cumsum(-1)
        drop = entropy > context.param("top_h") * entropy[:, -1:]
        drop &= torch.arange(scores.shape[1], device=scores.device) >= context.param("min_tokens_to_keep")
        return scores.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), self.filter_value)


class PLessLogitsWarper(FilteringWarper):
    """Keeps tokens with a probability of at least the sum of all squared ones (Tan et al. 2025, "p-less").

    That sum is the probability that two draws are equal. It has no parameter.
    """

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens below the collision probability."""
        best = scores.amax(-1, keepdim=True)
        # Relative to the best, with both sides multiplied by the sum, so that ties compare exactly equal.
        odds = (scores - best).exp()
        drop = odds * odds.sum(-1, keepdim=True) < (odds * odds).sum(-1, keepdim=True)
        return mask_dropped(context, scores, drop & (scores < best), self.filter_value)


class XTCLogitsWarper(FilteringWarper):
    """Sometimes drops all top choices but the least likely of them (XTC, "exclude top choices", by p-e-w).

    With probability `xtc_probability`, only the least likely of the tokens with a probability of at least
    `xtc_threshold` is kept, with its ties. A row with fewer than two such tokens is unchanged, as is one that
    would have fewer than `min_tokens_to_keep` left.
    Origin: text-generation-webui, pull request 6335.
    """

    config_fields = ("xtc_probability", "xtc_threshold")
    is_random = True
    SALT = 1

    def __init__(
        self,
        xtc_probability: float,
        xtc_threshold: float = 0.1,
        filter_value: float = NEG_INF,
        min_tokens_to_keep: int = 1,
    ) -> None:
        self.xtc_probability = float(check_number("xtc_probability", xtc_probability, 0.0, 1.0))
        self.xtc_threshold = float(check_number("xtc_threshold", xtc_threshold, 0.0, 1.0))
        super().__init__(filter_value, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the top choices of the rows drawn in this step."""
        probability = context.param("xtc_probability")
        applies = (context.uniform_per_token(self.SALT) < probability) | (probability >= 1)
        top = (scores.softmax(-1) >= context.param("xtc_threshold")) & (scores > NEG_INF)
        drop = top & (scores > torch.where(top, scores, torch.inf).amin(-1, keepdim=True))
        num_left = ((scores > NEG_INF) & ~drop).sum(-1, keepdim=True)
        return scores.masked_fill(
            drop & applies & (num_left >= context.param("min_tokens_to_keep")), self.filter_value
        )


def mask_dropped(context: Context, scores: Tensor, drop: Tensor, filter_value: float = NEG_INF) -> Tensor:
    """Mask the dropped tokens, except a row's `min_tokens_to_keep` best and their ties."""
    if context.max_on_host("min_tokens_to_keep") > 1:  # the best token is never dropped
        drop = drop & (scores < min_keep_threshold(context, scores))
    return scores.masked_fill(drop, filter_value)


class MirostatLogitsWarper(FilteringWarper):
    """Keeps the surprisal of the text near `mirostat_tau` bits per token (Basu et al. 2021, mirostat v2).

    Tokens with a surprisal above mu bits are dropped, except the most likely one. Mu starts at twice tau.
    After each token it changes by `mirostat_eta` times the difference between tau and the token's surprisal.
    Surprisal is -log2 p under the incoming distribution. Mu is row state: a direct call always starts fresh.
    """

    config_fields = ("mirostat_tau", "mirostat_eta")
    state = {"mirostat_mu": math.nan}  # noqa: RUF012 - never written to

    def __init__(
        self,
        mirostat_tau: float,
        mirostat_eta: float = 0.1,
        filter_value: float = NEG_INF,
        min_tokens_to_keep: int = 1,
    ) -> None:
        self.mirostat_tau = check_positive("mirostat_tau", mirostat_tau)
        self.mirostat_eta = float(check_number("mirostat_eta", mirostat_eta, 0.0))
        super().__init__(filter_value, min_tokens_to_keep)

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


MIN_TEMPERATURE = 1e-6  # below it the division could overflow, so only the best token is kept


class DynamicTemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by a temperature that grows with their entropy (dynamic temperature, by kalomaze).

    The temperature is `temperature - dynamic_temperature_range`, at least 0, if one token is certain, and
    `temperature + dynamic_temperature_range` if all unmasked tokens are equally likely. In between it grows
    with the share of the maximum entropy, raised to `dynamic_temperature_exponent`. It replaces the fixed
    temperature. Origin: llama.cpp, pull request 4972.
    """

    config_fields = ("temperature", "dynamic_temperature_range", "dynamic_temperature_exponent")

    def __init__(
        self,
        temperature: float,
        dynamic_temperature_range: float,
        dynamic_temperature_exponent: float = 1.0,
    ) -> None:
        self.temperature = check_positive("temperature", temperature, "for greedy search use do_sample=False")
        self.dynamic_temperature_range = float(
            check_number("dynamic_temperature_range", dynamic_temperature_range, 0.0)
        )
        self.dynamic_temperature_exponent = float(
            check_number("dynamic_temperature_exponent", dynamic_temperature_exponent, 0.0)
        )

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Scale the scores; a row with a single candidate is unchanged."""
        center, half_range = context.param("temperature"), context.param("dynamic_temperature_range")
        low, high = (center - half_range).clamp(min=0.0), center + half_range
        count = (scores > -torch.inf).sum(-1, keepdim=True)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1, keepdim=True)
        share = (entropy / count.clamp(min=2).log()).clamp(0.0, 1.0)
        temperature = low + (high - low) * share ** context.param("dynamic_temperature_exponent")

        best = scores.amax(-1, keepdim=True)
        greedy = scores.masked_fill(scores < best, -torch.inf)
        scaled = torch.where(temperature < MIN_TEMPERATURE, greedy, scores / temperature)
        return torch.where(count > 1, scaled, scores)
