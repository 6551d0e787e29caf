"""Truncation: filters that find by themselves how much of the distribution to keep."""

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

    The deviation is that of the line's finite scores.
    """

    config_fields = ("top_n_sigma",)
    filter_value = NEG_INF

    def __init__(
        self, top_n_sigma: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        if check_number("top_n_sigma", top_n_sigma, 0.0) <= 0:
            raise InputError("top_n_sigma", "must be > 0", top_n_sigma, "leave the processor out to keep all")
        self.top_n_sigma = float(top_n_sigma)
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores too far below the best are gone."""
        finite = scores.isfinite()
        count = finite.sum(-1, keepdim=True)
        mean = torch.where(finite, scores, 0.0).sum(-1, keepdim=True) / count
        spread = torch.where(finite, (scores - mean) ** 2, 0.0).sum(-1, keepdim=True) / count
        least = scores.amax(-1, keepdim=True) - context.param("top_n_sigma") * spread.sqrt()
        return mask_dropped(context, scores, scores < least, self.filter_value)


class TopHLogitsWarper(LogitsProcessor):
    """Keeps the likeliest tokens that have at most `top_h` of the entropy (Potraghloo et al. 2025, "Top-H").

    The likeliest is always kept; of tokens that tie, those with lower ids come first. The entropy of the
    kept tokens is the sum of their terms -p log p, as in the authors' code, which transformers has.
    Theirs looks at the 100 likeliest tokens only, this at all.
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
        """What would bring the entropy above its share is gone."""
        descending, order = scores.sort(descending=True, stable=True)
        entropy = torch.special.entr(descending.softmax(-1)).cumsum(-1)
        drop = entropy > context.param("top_h") * entropy[:, -1:]
        drop &= torch.arange(scores.shape[1], device=scores.device) >= context.param("min_tokens_to_keep")
        return scores.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), self.filter_value)


class PLessLogitsWarper(LogitsProcessor):
    """Keeps the tokens at least as likely as two draws are to be equal (Tan et al. 2025, "p-less sampling").

    That is, p >= the sum of all p squared; nothing is to be set.
    """

    filter_value = NEG_INF

    def __init__(self, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What is less likely than a coincidence is gone."""
        best = scores.amax(-1, keepdim=True)
        # Relative to the best, and both sides times the sum, so that tokens that all tie are exactly level.
        odds = (scores - best).exp()
        drop = odds * odds.sum(-1, keepdim=True) < (odds * odds).sum(-1, keepdim=True)
        return mask_dropped(context, scores, drop & (scores < best), self.filter_value)


class XTCLogitsWarper(LogitsProcessor):
    """Sometimes drops the top choices, all but the least of them (XTC, "exclude top choices", by p-e-w).

    With probability `xtc_probability`, of the tokens whose probability is at least `xtc_threshold` only
    the least likely stays, with what ties with it; a line with fewer than two such tokens stays as it is,
    and so does one that would be left with fewer than `min_tokens_to_keep`.
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
        """The scores with or without the top choices."""
        probability = context.param("xtc_probability")
        happens = (context.uniform_per_token(self.SALT) < probability) | (probability >= 1)
        top = (scores.softmax(-1) >= context.param("xtc_threshold")) & (scores > NEG_INF)
        drop = top & (scores > torch.where(top, scores, torch.inf).amin(-1, keepdim=True))
        left = ((scores > NEG_INF) & ~drop).sum(-1, keepdim=True)
        return scores.masked_fill(
            drop & happens & (left >= context.param("min_tokens_to_keep")), self.filter_value
        )


def mask_dropped(context: Context, scores: Tensor, drop: Tensor, filter_value: float = NEG_INF) -> Tensor:
    """The scores without what is dropped, save a line's `min_tokens_to_keep` best and what ties with them."""
    if context.max_on_host("min_tokens_to_keep") > 1:  # the best is kept anyway
        drop = drop & (scores < min_keep_threshold(context, scores))
    return scores.masked_fill(drop, filter_value)
