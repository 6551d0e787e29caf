"""Filters: they scale the distribution or cut its tail."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.context import Context
from descant.errors import InputError
from descant.processors.base import LogitsProcessor, number

__all__ = [
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
]

NEVER = -torch.inf


class TemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by `temperature`: below 1 sharper, above 1 flatter."""

    def __init__(self, temperature: float) -> None:
        if number("temperature", temperature, 0.0) <= 0:
            raise InputError(
                "temperature", "must be > 0", temperature, "for greedy search use do_sample=False"
            )
        self.temperature = float(temperature)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores scaled."""
        return scores / context.param("temperature")


class TopKLogitsWarper(LogitsProcessor):
    """Keeps the `top_k` best scores of a line, and whatever ties with the last of them."""

    filter_value = NEVER

    def __init__(self, top_k: int, filter_value: float = NEVER, min_tokens_to_keep: int = 1) -> None:
        number("top_k", top_k, 1, whole=True)
        number("min_tokens_to_keep", min_tokens_to_keep, 1, whole=True)
        self.top_k = max(top_k, min_tokens_to_keep)
        self.min_tokens_to_keep = min_tokens_to_keep
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores below the line's k-th best are gone."""
        size = scores.shape[-1]
        keep = torch.maximum(context.param("top_k"), context.param("min_tokens_to_keep")).clamp(max=size)
        most = min(max(context.largest("top_k"), context.largest("min_tokens_to_keep")), size)
        best = scores.topk(most).values  # [N, k]
        return scores.masked_fill(scores < best.gather(1, keep - 1), self.filter_value)


class TopPLogitsWarper(LogitsProcessor):
    """Keeps the fewest best tokens whose probabilities reach `top_p` (Holtzman et al. 2020)."""

    filter_value = NEVER

    def __init__(self, top_p: float, filter_value: float = NEVER, min_tokens_to_keep: int = 1) -> None:
        self.top_p = float(number("top_p", top_p, 0.0, 1.0))
        self.tail = 1.0 - self.top_p  # here and not on the device, where float32 would round the difference
        self.min_tokens_to_keep = number("min_tokens_to_keep", min_tokens_to_keep, 1, whole=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The tail whose mass is at most 1 - `top_p` is gone."""
        ascending, order = scores.sort(descending=False)
        below = ascending.softmax(-1).cumsum(-1)
        drop = below <= context.param("tail")
        last = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
        drop &= last >= context.param("min_tokens_to_keep")
        return scores.masked_fill(drop.scatter(1, order, drop), self.filter_value)


class MinPLogitsWarper(LogitsProcessor):
    """Keeps tokens at least `min_p` times as likely as the likeliest (Nguyen et al. 2024)."""

    filter_value = NEVER

    def __init__(self, min_p: float, filter_value: float = NEVER, min_tokens_to_keep: int = 1) -> None:
        self.min_p = float(number("min_p", min_p, 0.0, 1.0))
        self.min_tokens_to_keep = number("min_tokens_to_keep", min_tokens_to_keep, 1, whole=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What falls below the scaled peak is gone."""
        probabilities = scores.softmax(-1)
        drop = probabilities < context.param("min_p") * probabilities.amax(-1, keepdim=True)
        least = min(context.largest("min_tokens_to_keep"), scores.shape[-1])
        order = probabilities.topk(least).indices
        safe = torch.arange(least, device=scores.device) < context.param("min_tokens_to_keep")
        drop = drop.scatter(1, order, drop.gather(1, order) & ~safe)
        return scores.masked_fill(drop, self.filter_value)


class InfNanRemoveLogitsProcessor(LogitsProcessor):
    """Makes every score finite: NaN becomes 0, infinities the largest and smallest numbers."""

    def process(self, context: Context, scores: Tensor) -> Tensor:  # noqa: ARG002
        """The scores without NaN and infinities."""
        limits = torch.finfo(scores.dtype)
        return scores.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)


class LogitNormalization(LogitsProcessor):
    """Turns scores into log-probabilities."""

    def process(self, context: Context, scores: Tensor) -> Tensor:  # noqa: ARG002
        """The scores less their log-sum-exp."""
        return scores.log_softmax(-1)
