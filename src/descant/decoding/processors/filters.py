"""The standard warpers: temperature, top-k, top-p, min-p, typical, epsilon and eta sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number, check_positive
from descant.errors import InputError

NEG_INF = -torch.inf
BUCKET_SIZE = 64  # tokens per bucket; only the maximum of a bucket is compared at first


def topk_values(scores: Tensor, count: int) -> Tensor:
    """The `count` highest scores of each row, in descending order [N, count]."""
    num_buckets = scores.shape[1] // BUCKET_SIZE
    if count * 4 > num_buckets:
        return scores.topk(count).values
    buckets = _to_buckets(scores)
    # The top tokens lie in the buckets with the highest maxima.
    best_buckets = buckets.amax(1).topk(count, sorted=False).indices  # [N, count]
    candidates = buckets.gather(2, best_buckets[:, None].expand(-1, BUCKET_SIZE, -1)).flatten(1)
    return torch.cat((candidates, scores[:, BUCKET_SIZE * num_buckets :]), 1).topk(count).values


def _to_buckets(scores: Tensor) -> Tensor:
    """The scores by bucket, without the remainder at the end: [N, BUCKET_SIZE, num_buckets]."""
    num_buckets = scores.shape[1] // BUCKET_SIZE
    return scores[:, : BUCKET_SIZE * num_buckets].view(len(scores), BUCKET_SIZE, num_buckets)


def above_threshold(scores: Tensor, threshold: Tensor | float) -> tuple[Tensor, Tensor] | None:
    """Return the unmasked scores of at least `threshold` [N, 1] and their tokens, both [N, W].

    They keep their order and are padded with -inf and -1. None if there are many, or if the check costs more
    than it saves: the host must know their number, which takes a device synchronisation except on the CPU.
    """
    size, lowest = scores.shape[1], torch.finfo(scores.dtype).min
    num_buckets = size // BUCKET_SIZE
    if scores.device.type != "cpu" or num_buckets < BUCKET_SIZE:
        return None
    threshold = lowest if isinstance(threshold, float) else threshold.clamp(min=lowest)
    used = ~(_to_buckets(scores).amax(1) < threshold)  # [N, num_buckets], also true for NaN
    max_used = max(1, int(used.sum(1).max()))
    if max_used * 4 > num_buckets:
        return None
    used_buckets = used.to(torch.uint8).topk(max_used).indices.sort(1).values  # [N, max_used]
    offsets = torch.arange(0, BUCKET_SIZE * num_buckets, num_buckets)[:, None]
    remainder = torch.arange(BUCKET_SIZE * num_buckets, size).expand(len(scores), -1)
    tokens = torch.cat(((offsets + used_buckets[:, None]).flatten(1), remainder), 1)  # [N, S] ascending
    values = scores.gather(1, tokens)
    selected = ~(values < threshold)
    rank = selected.cumsum(1)
    width = int(rank[:, -1].max())
    # A float sum depends on its grouping. With this padding every sorted score has the same position modulo
    # the widest SIMD register as in the full row, so that the sums are bitwise equal.
    width += (size - width) % BUCKET_SIZE + BUCKET_SIZE
    slot = torch.where(selected, rank - 1, width)
    packed = scores.new_full((len(scores), width + 1), NEG_INF).scatter_(1, slot, values)
    ids = tokens.new_full((len(scores), width + 1), -1).scatter_(1, slot, tokens)
    return packed[:, :width], ids[:, :width]


def scatter_candidates(scores: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Write the values [N, W] at the token ids [N, W] and -inf elsewhere; id -1 is padding."""
    filler = ids.argmax(1, keepdim=True)
    # Padding repeats the write of another slot; a row without ids stays -inf.
    values = torch.where(ids >= 0, values, values.gather(1, filler))
    ids = torch.where(ids >= 0, ids, ids.gather(1, filler)).clamp(min=0)
    return torch.full_like(scores, NEG_INF).scatter_(1, ids, values)


def min_keep_threshold(context: Context, scores: Tensor) -> Tensor:
    """The lowest score among a row's `min_tokens_to_keep` best [N, 1]."""
    keep = context.param("min_tokens_to_keep").clamp(1, scores.shape[1])
    max_keep = min(context.max_on_host("min_tokens_to_keep"), scores.shape[1])
    return topk_values(scores, max_keep).gather(1, keep - 1)


class TemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by `temperature`: below 1 sharper, above 1 flatter."""

    config_fields = ("temperature",)

    def __init__(self, temperature: float) -> None:
        self.temperature = check_positive("temperature", temperature, "for greedy search use do_sample=False")

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Scale the scores."""
        return scores / context.param("temperature")


class FilteringWarper(LogitsProcessor):
    """Base class of warpers that mask tokens by `filter_value`, but not the `min_tokens_to_keep` best."""

    filter_value = NEG_INF

    def __init__(self, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value


class TopKLogitsWarper(FilteringWarper):
    """Keeps the `top_k` highest scores of a row, and those that tie with the last of them."""

    config_fields = ("top_k",)

    def __init__(self, top_k: int, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        check_number("top_k", top_k, 1, integer=True)
        super().__init__(filter_value, min_tokens_to_keep)
        self.top_k = max(top_k, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the scores below the row's k-th highest."""
        size = scores.shape[-1]
        keep = torch.maximum(context.param("top_k"), context.param("min_tokens_to_keep")).clamp(max=size)
        max_keep = min(max(context.max_on_host("top_k"), context.max_on_host("min_tokens_to_keep")), size)
        threshold = topk_values(scores, max_keep).gather(1, keep - 1)
        candidates = above_threshold(scores, threshold) if self.filter_value == NEG_INF else None
        if candidates is None:
            return scores.masked_fill(scores < threshold, self.filter_value)
        return scatter_candidates(scores, *candidates)


class TopPLogitsWarper(FilteringWarper):
    """Keeps the smallest set of most likely tokens whose mass reaches `top_p` (Holtzman et al. 2020).

    Among equal scores, lower token ids are dropped first.
    """

    def __init__(self, top_p: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.top_p = float(check_number("top_p", top_p, 0.0, 1.0))
        # Computed in float64 on the host; float32 on the device would round it.
        self.tail_mass = 1.0 - self.top_p
        super().__init__(filter_value, min_tokens_to_keep)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the probability mass of the dropped tail."""
        return {"tail_mass": 1.0 - config.top_p}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tail with a mass of at most 1 - `top_p`."""
        candidates = above_threshold(scores, NEG_INF) if self.filter_value == NEG_INF else None
        if candidates is None and scores.device.type == "cpu" and scores.dtype == torch.float32:
            return scores.masked_fill(_tail_mask(context, scores), self.filter_value)
        ascending, order = (scores if candidates is None else candidates[0]).sort(
            descending=False, stable=True
        )
        drop = ascending.softmax(-1).cumsum(-1) <= context.param("tail_mass")
        max_keep = min(context.max_on_host("min_tokens_to_keep"), ascending.shape[-1])
        rank = torch.arange(max_keep - 1, -1, -1, device=scores.device)
        drop[:, -max_keep:] &= rank >= context.param("min_tokens_to_keep")
        if candidates is None:
            return scores.masked_fill(drop.scatter(1, order, drop), self.filter_value)
        return scatter_candidates(
            scores, ascending.masked_fill(drop, NEG_INF), candidates[1].gather(1, order)
        )


def _tail_mask(context: Context, scores: Tensor) -> Tensor:
    """Mask of the tail tokens [N, V]; on the CPU, a sort without indices takes a tenth of the time."""
    size = scores.shape[1]
    ascending = torch.from_numpy(np.sort(scores.detach().contiguous().numpy(), axis=1))
    mass = ascending.softmax(-1).cumsum(-1)
    num_dropped = torch.searchsorted(mass, context.param("tail_mass"), right=True)  # [N, 1]
    num_dropped = num_dropped.minimum(size - context.param("min_tokens_to_keep")).clamp(min=0)
    num_dropped = torch.where(mass[:, -1:].isnan(), 0, num_dropped)
    threshold = ascending.gather(1, num_dropped)
    drop = scores < threshold
    # If the cut is between equal scores, lower token ids are dropped first.
    tied_drops = num_dropped - torch.searchsorted(ascending, threshold)
    if bool((tied_drops > 0).any()):
        tied = scores == threshold
        drop |= tied & (tied.cumsum(1) <= tied_drops)
    return drop


class MinPLogitsWarper(FilteringWarper):
    """Keeps tokens at least `min_p` times as likely as the most likely one (Nguyen et al. 2024)."""

    config_fields = ("min_p",)

    def __init__(self, min_p: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.min_p = float(check_number("min_p", min_p, 0.0, 1.0))
        super().__init__(filter_value, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens below the scaled maximum."""
        probabilities = scores.softmax(-1)
        drop = probabilities < context.param("min_p") * probabilities.amax(-1, keepdim=True)
        if context.max_on_host("min_tokens_to_keep") > 1:  # the most likely token is never dropped
            drop &= ~_min_keep_mask(context, scores)
        return scores.masked_fill(drop, self.filter_value)


def _min_keep_mask(context: Context, scores: Tensor) -> Tensor:
    """Mask of a row's `min_tokens_to_keep` best tokens, lower ids first among ties [N, V]."""
    threshold = min_keep_threshold(context, scores)
    above, tied = scores > threshold, scores == threshold
    num_tied = context.param("min_tokens_to_keep") - above.sum(1, keepdim=True)
    return above | (tied & (tied.cumsum(1) <= num_tied))


class TypicalLogitsWarper(FilteringWarper):
    """Keeps the smallest set of locally typical tokens with a mass of `mass` (Meister et al. 2022).

    Tokens are ordered by the distance of their information -log p from the entropy; ties with the last stay.
    """

    config_fields = ("typical_p",)

    def __init__(self, mass: float = 0.9, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.typical_p = _check_fraction("mass", mass)
        super().__init__(filter_value, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens whose information is too far from the entropy."""
        log_probs = scores.log_softmax(-1)
        entropy = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)
        deviation, order = (-log_probs - entropy).abs().sort(stable=True)
        mass = scores.gather(1, order).softmax(-1).cumsum(-1)
        last = (mass < context.param("typical_p")).sum(1, keepdim=True).clamp(max=scores.shape[1] - 1)
        drop = deviation > deviation.gather(1, last)
        drop &= torch.arange(scores.shape[1], device=scores.device) >= context.param("min_tokens_to_keep")
        return scores.masked_fill(drop.scatter(1, order, drop), self.filter_value)


class EpsilonLogitsWarper(FilteringWarper):
    """Keeps tokens with a probability of at least `epsilon` (Hewitt et al. 2022)."""

    config_fields = ("epsilon_cutoff",)

    def __init__(self, epsilon: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.epsilon_cutoff = _check_fraction("epsilon", epsilon)
        super().__init__(filter_value, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the less likely tokens."""
        drop = scores.softmax(-1) < context.param("epsilon_cutoff")
        return scores.masked_fill(drop & (scores < min_keep_threshold(context, scores)), self.filter_value)


class EtaLogitsWarper(FilteringWarper):
    """Keeps tokens above a probability threshold that falls as the entropy grows (Hewitt et al. 2022).

    The threshold is `min(epsilon, sqrt(epsilon) * exp(-entropy))`.
    """

    config_fields = ("eta_cutoff",)

    def __init__(
        self,
        epsilon: float,
        filter_value: float = NEG_INF,
        min_tokens_to_keep: int = 1,
        device: str = "cpu",  # noqa: ARG002
    ) -> None:
        self.eta_cutoff = _check_fraction("epsilon", epsilon)
        super().__init__(filter_value, min_tokens_to_keep)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the less likely tokens."""
        probabilities, log_probs = scores.softmax(-1), scores.log_softmax(-1)
        # Masked tokens contribute 0 to the entropy, but 0 * -inf would be NaN.
        entropy = -(log_probs.clamp(min=torch.finfo(log_probs.dtype).min) * probabilities).sum(
            -1, keepdim=True
        )
        epsilon = context.param("eta_cutoff")
        drop = probabilities < torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-entropy))
        return scores.masked_fill(drop & (scores < min_keep_threshold(context, scores)), self.filter_value)


def _check_fraction(name: str, value: Any) -> float:
    if not 0 < check_number(name, value, 0.0, 1.0) < 1:
        raise InputError(name, "must be > 0 and < 1", value)
    return float(value)


class InfNanRemoveLogitsProcessor(LogitsProcessor):
    """Makes every score finite: NaN becomes 0, infinities become the dtype's limits."""

    def process(self, context: Context, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Replace NaN and infinities."""
        limits = torch.finfo(scores.dtype)
        return scores.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)


class LogitNormalization(LogitsProcessor):
    """Turns scores into log-probabilities."""

    def process(self, context: Context, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Return the log-softmax of the scores."""
        return scores.log_softmax(-1)
