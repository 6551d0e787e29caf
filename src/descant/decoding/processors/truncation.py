"""Adaptive truncation: top-n-sigma, top-H, p-less and XTC."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.decoding.processors.filters import NEG_INF, min_keep_threshold
from descant.errors import InputError

__all__ = ["PLessLogitsWarper", "TopHLogitsWarper", "TopNSigmaLogitsWarper", "XTCLogitsWarper"]


class TopNSigmaLogitsWarper(LogitsProcessor):
    """Keeps the scores within `top_n_sigma` standard deviations of the best (Tang et al. 2024, "Top-nσ").

    The deviation is that of the row's finite scores.
    """

    config_fields = ("top_n_sigma",)
    filter_value = NEG_INF

    def __init__(
        self, top_n_sigma: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        if check_number("top_n_sigma", top_n_sigma, 0.0) <= 0:
            raise InputError(
                "top_n_sigma", "must be > 0", top_n_sigma, "remove the processor to keep all tokens"
            )
        self.top_n_sigma = float(top_n_sigma)
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the scores too far below the best."""
        finite = scores.isfinite()
        count = finite.sum(-1, keepdim=True)
        mean = torch.where(finite, scores, 0.0).sum(-1, keepdim=True) / count
        variance = torch.where(finite, (scores - mean) ** 2, 0.0).sum(-1, keepdim=True) / count
        threshold = scores.amax(-1, keepdim=True) - context.param("top_n_sigma") * variance.sqrt()
        return mask_dropped(context, scores, scores < threshold, self.filter_value)


class TopHLogitsWarper(LogitsProcessor):
    """Keeps the most likely tokens with at most `top_h` of the entropy (Potraghloo et al. 2025, "Top-H").

    The most likely token is always kept; among ties, lower ids come first. The entropy of the kept tokens is
    the sum of their terms -p log p, as in the authors' code, which transformers uses. That code considers the
    100 most likely tokens, this one all tokens.
    """

    config_fields = ("top_h",)
    filter_value = NEG_INF

    def __init__(self, top_h: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        if check_number("top_h", top_h, 0.0, 1.0) <= 0:
            raise InputError("top_h", "must be > 0", top_h)
        self.top_h = float(top_h)
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that would exceed the entropy share."""
        descending, order = scores.sort(descending=True, stable=True)
        entropy = torch.special.entr(descending.softmax(-1)).cumsum(-1)
        drop = entropy > context.param("top_h") * entropy[:, -1:]
        drop &= torch.arange(scores.shape[1], device=scores.device) >= context.param("min_tokens_to_keep")
        return scores.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), self.filter_value)


class PLessLogitsWarper(LogitsProcessor):
    """Keeps tokens with a probability of at least the sum of all squared ones (Tan et al. 2025, "p-less").

    That sum is the probability that two draws are equal. It has no parameter.
    """

    filter_value = NEG_INF

    def __init__(self, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens below the collision probability."""
        best = scores.amax(-1, keepdim=True)
        # Relative to the best, with both sides multiplied by the sum, so that ties compare exactly equal.
        odds = (scores - best).exp()
        drop = odds * odds.sum(-1, keepdim=True) < (odds * odds).sum(-1, keepdim=True)
        return mask_dropped(context, scores, drop & (scores < best), self.filter_value)


class XTCLogitsWarper(LogitsProcessor):
    """Sometimes drops all top choices but the least likely of them (XTC, "exclude top choices", by p-e-w).

    With probability `xtc_probability`, only the least likely of the tokens with a probability of at least
    `xtc_threshold` is kept, with its ties. A row with fewer than two such tokens is unchanged, as is one that
    would have fewer than `min_tokens_to_keep` left.
    Origin: text-generation-webui, pull request 6335.
    """

    config_fields = ("xtc_probability", "xtc_threshold")
    is_random = True
    filter_value = NEG_INF
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
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

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
