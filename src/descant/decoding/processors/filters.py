"""Filters: they scale the distribution or cut its tail."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError

__all__ = [
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
]

NEG_INF = -torch.inf
BUCKET_SIZE = 64  # of so many tokens only the best is looked at first


def topk_values(scores: Tensor, count: int) -> Tensor:
    """The `count` best scores of each line, the best first [N, count]."""
    wide = scores.shape[1] // BUCKET_SIZE
    if count * 4 > wide:
        return scores.topk(count).values
    shares = _to_buckets(scores)
    # The best of all tokens are in the shares whose own bests are the best.
    where = shares.amax(1).topk(count, sorted=False).indices  # [N, count]
    few = shares.gather(2, where[:, None].expand(-1, BUCKET_SIZE, -1)).flatten(1)
    return torch.cat((few, scores[:, BUCKET_SIZE * wide :]), 1).topk(count).values


def _to_buckets(scores: Tensor) -> Tensor:
    """The scores by share, without those of the last tokens, too few for all shares: [N, SHARE, wide]."""
    wide = scores.shape[1] // BUCKET_SIZE
    return scores[:, : BUCKET_SIZE * wide].view(len(scores), BUCKET_SIZE, wide)


def above_threshold(scores: Tensor, least: Tensor | float) -> tuple[Tensor, Tensor] | None:
    """The possible scores of at least `least` [N, 1] and their tokens, both [N, W].

    They are in their order, before -inf and -1. None if there are many, or if it takes more than it
    saves to find out: the host must know how many, which is free only on the host.
    """
    size, lowest = scores.shape[1], torch.finfo(scores.dtype).min
    wide = size // BUCKET_SIZE
    if scores.device.type != "cpu" or wide < BUCKET_SIZE:
        return None
    least = lowest if isinstance(least, float) else least.clamp(min=lowest)
    used = ~(_to_buckets(scores).amax(1) < least)  # [N, wide], also where there is NaN
    most = max(1, int(used.sum(1).max()))
    if most * 4 > wide:
        return None
    where = used.to(torch.uint8).topk(most).indices.sort(1).values  # [N, most]
    first = torch.arange(0, BUCKET_SIZE * wide, wide)[:, None]
    rest = torch.arange(BUCKET_SIZE * wide, size).expand(len(scores), -1)
    tokens = torch.cat(((first + where[:, None]).flatten(1), rest), 1)  # [N, S] ascending
    values = scores.gather(1, tokens)
    good = ~(values < least)
    rank = good.cumsum(1)
    room = int(rank[:, -1].max())
    # A sum of floats depends on its grouping. Sorted, every score stands where it stands in the whole line,
    # modulo the widest registers and never in less than one, so that the sums have the same bits.
    room += (size - room) % BUCKET_SIZE + BUCKET_SIZE
    place = torch.where(good, rank - 1, room)
    packed = scores.new_full((len(scores), room + 1), NEG_INF).scatter_(1, place, values)
    ids = tokens.new_full((len(scores), room + 1), -1).scatter_(1, place, tokens)
    return packed[:, :room], ids[:, :room]


def scatter_candidates(scores: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Those values [N, W] at those tokens, and -inf at all others; -1 is no token."""
    some = ids.argmax(1, keepdim=True)
    # A place without a token writes what another's writes; a line without any is -inf as it was.
    values = torch.where(ids >= 0, values, values.gather(1, some))
    ids = torch.where(ids >= 0, ids, ids.gather(1, some)).clamp(min=0)
    return torch.full_like(scores, NEG_INF).scatter_(1, ids, values)


def min_keep_threshold(context: Context, scores: Tensor) -> Tensor:
    """The score of the last of a line's `min_tokens_to_keep` best [N, 1]."""
    keep = context.param("min_tokens_to_keep").clamp(1, scores.shape[1])
    most = min(context.max_on_host("min_tokens_to_keep"), scores.shape[1])
    return topk_values(scores, most).gather(1, keep - 1)


class TemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by `temperature`: below 1 sharper, above 1 flatter."""

    config_fields = ("temperature",)

    def __init__(self, temperature: float) -> None:
        if check_number("temperature", temperature, 0.0) <= 0:
            raise InputError(
                "temperature", "must be > 0", temperature, "for greedy search use do_sample=False"
            )
        self.temperature = float(temperature)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores scaled."""
        return scores / context.param("temperature")


class TopKLogitsWarper(LogitsProcessor):
    """Keeps the `top_k` best scores of a line, and whatever ties with the last of them."""

    config_fields = ("top_k",)
    filter_value = NEG_INF

    def __init__(self, top_k: int, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        check_number("top_k", top_k, 1, integer=True)
        check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.top_k = max(top_k, min_tokens_to_keep)
        self.min_tokens_to_keep = min_tokens_to_keep
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores below the line's k-th best are gone."""
        size = scores.shape[-1]
        keep = torch.maximum(context.param("top_k"), context.param("min_tokens_to_keep")).clamp(max=size)
        most = min(max(context.max_on_host("top_k"), context.max_on_host("min_tokens_to_keep")), size)
        least = topk_values(scores, most).gather(1, keep - 1)
        few = above_threshold(scores, least) if self.filter_value == NEG_INF else None
        if few is None:
            return scores.masked_fill(scores < least, self.filter_value)
        return scatter_candidates(scores, *few)


class TopPLogitsWarper(LogitsProcessor):
    """Keeps the fewest best tokens whose probabilities reach `top_p` (Holtzman et al. 2020).

    Of equal scores the first tokens go first.
    """

    filter_value = NEG_INF

    def __init__(self, top_p: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.top_p = float(check_number("top_p", top_p, 0.0, 1.0))
        self.tail_mass = (
            1.0 - self.top_p
        )  # here and not on the device, where float32 would round the difference
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """The mass of the tail that goes."""
        return {"tail_mass": 1.0 - config.top_p}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The tail whose mass is at most 1 - `top_p` is gone."""
        few = above_threshold(scores, NEG_INF) if self.filter_value == NEG_INF else None
        if few is None and scores.device.type == "cpu" and scores.dtype == torch.float32:
            return scores.masked_fill(_tail_mask(context, scores), self.filter_value)
        ascending, order = (scores if few is None else few[0]).sort(descending=False, stable=True)
        drop = ascending.softmax(-1).cumsum(-1) <= context.param("tail_mass")
        most = min(context.max_on_host("min_tokens_to_keep"), ascending.shape[-1])
        last = torch.arange(most - 1, -1, -1, device=scores.device)
        drop[:, -most:] &= last >= context.param("min_tokens_to_keep")
        if few is None:
            return scores.masked_fill(drop.scatter(1, order, drop), self.filter_value)
        return scatter_candidates(scores, ascending.masked_fill(drop, NEG_INF), few[1].gather(1, order))


def _tail_mask(context: Context, scores: Tensor) -> Tensor:
    """Which tokens are in the tail [N, V]; on the host values alone are sorted in a tenth of the time."""
    size = scores.shape[1]
    ascending = torch.from_numpy(np.sort(scores.detach().contiguous().numpy(), axis=1))
    mass = ascending.softmax(-1).cumsum(-1)
    gone = torch.searchsorted(mass, context.param("tail_mass"), right=True)  # [N, 1] how many go
    gone = gone.minimum(size - context.param("min_tokens_to_keep")).clamp(min=0)
    gone = torch.where(mass[:, -1:].isnan(), 0, gone)
    least = ascending.gather(1, gone)
    drop = scores < least
    # Where the cut is between equal scores, the first tokens go.
    equal = gone - torch.searchsorted(ascending, least)
    if bool((equal > 0).any()):
        level = scores == least
        drop |= level & (level.cumsum(1) <= equal)
    return drop


class MinPLogitsWarper(LogitsProcessor):
    """Keeps tokens at least `min_p` times as likely as the likeliest (Nguyen et al. 2024)."""

    config_fields = ("min_p",)
    filter_value = NEG_INF

    def __init__(self, min_p: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.min_p = float(check_number("min_p", min_p, 0.0, 1.0))
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What falls below the scaled peak is gone."""
        probabilities = scores.softmax(-1)
        drop = probabilities < context.param("min_p") * probabilities.amax(-1, keepdim=True)
        if context.max_on_host("min_tokens_to_keep") > 1:  # the likeliest is safe
            drop &= ~_min_keep_mask(context, scores)
        return scores.masked_fill(drop, self.filter_value)


def _min_keep_mask(context: Context, scores: Tensor) -> Tensor:
    """A line's `min_tokens_to_keep` best tokens, of equal ones the first [N, V]."""
    least = min_keep_threshold(context, scores)
    above, level = scores > least, scores == least
    missing = context.param("min_tokens_to_keep") - above.sum(1, keepdim=True)
    return above | (level & (level.cumsum(1) <= missing))


class TypicalLogitsWarper(LogitsProcessor):
    """Keeps the fewest tokens of mass `mass` that say about as much as is expected (Meister et al. 2022).

    Tokens are taken by how far their information, -log p, is from the entropy; ties with the last stay.
    """

    config_fields = ("typical_p",)
    filter_value = NEG_INF

    def __init__(self, mass: float = 0.9, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.typical_p = _check_fraction("mass", mass)
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What is too certain or too surprising is gone."""
        law = scores.log_softmax(-1)
        entropy = -(law * law.exp()).nansum(-1, keepdim=True)
        oddity, order = (-law - entropy).abs().sort(stable=True)
        mass = scores.gather(1, order).softmax(-1).cumsum(-1)
        last = (mass < context.param("typical_p")).sum(1, keepdim=True).clamp(max=scores.shape[1] - 1)
        drop = oddity > oddity.gather(1, last)
        drop &= torch.arange(scores.shape[1], device=scores.device) >= context.param("min_tokens_to_keep")
        return scores.masked_fill(drop.scatter(1, order, drop), self.filter_value)


class EpsilonLogitsWarper(LogitsProcessor):
    """Keeps tokens of at least the probability `epsilon` (Hewitt et al. 2022)."""

    config_fields = ("epsilon_cutoff",)
    filter_value = NEG_INF

    def __init__(self, epsilon: float, filter_value: float = NEG_INF, min_tokens_to_keep: int = 1) -> None:
        self.epsilon_cutoff = _check_fraction("epsilon", epsilon)
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What is less likely is gone."""
        drop = scores.softmax(-1) < context.param("epsilon_cutoff")
        return scores.masked_fill(drop & (scores < min_keep_threshold(context, scores)), self.filter_value)


class EtaLogitsWarper(LogitsProcessor):
    """Keeps tokens of at least a probability that falls as the entropy grows (Hewitt et al. 2022).

    The bound is `min(epsilon, sqrt(epsilon) * exp(-entropy))`.
    """

    config_fields = ("eta_cutoff",)
    filter_value = NEG_INF

    def __init__(
        self,
        epsilon: float,
        filter_value: float = NEG_INF,
        min_tokens_to_keep: int = 1,
        device: str = "cpu",  # noqa: ARG002
    ) -> None:
        self.eta_cutoff = _check_fraction("epsilon", epsilon)
        self.min_tokens_to_keep = check_number("min_tokens_to_keep", min_tokens_to_keep, 1, integer=True)
        self.filter_value = filter_value

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """What is less likely is gone."""
        probabilities, law = scores.softmax(-1), scores.log_softmax(-1)
        # What is impossible adds nothing to the entropy, though 0 * -inf is no number.
        entropy = -(law.clamp(min=torch.finfo(law.dtype).min) * probabilities).sum(-1, keepdim=True)
        epsilon = context.param("eta_cutoff")
        drop = probabilities < torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-entropy))
        return scores.masked_fill(drop & (scores < min_keep_threshold(context, scores)), self.filter_value)


def _check_fraction(name: str, value: Any) -> float:
    if not 0 < check_number(name, value, 0.0, 1.0) < 1:
        raise InputError(name, "must be > 0 and < 1", value)
    return float(value)


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
