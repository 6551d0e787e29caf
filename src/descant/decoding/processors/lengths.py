"""Lengths: no end too early, an end that grows likelier, and fixed tokens at the first and last place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, Prompt
from descant.decoding.processors.base import LogitsProcessor, marked, number
from descant.decoding.processors.penalties import renewed
from descant.errors import InputError

__all__ = [
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
]

Ids = int | Sequence[int] | Tensor


def ids_of(value: Ids | None) -> list[int]:
    """No token id, one or several as a list."""
    return [] if value is None else torch.as_tensor(value).reshape(-1).tolist()


class MinLengthLogitsProcessor(LogitsProcessor):
    """Rules the end tokens out while a row, prompt included, is shorter than `min_length`."""

    reads = ("min_length",)

    def __init__(self, min_length: int, eos_token_id: Ids, device: str = "cpu") -> None:  # noqa: ARG002
        self.min_length = number("min_length", min_length, 0, whole=True)
        self.ends = ids_of(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with no way to end too early."""
        early = context.length < context.param("min_length")
        return scores.masked_fill(marked(scores.shape, context.param("ends")) & early, -torch.inf)


class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """Rules the end tokens out until a row has `min_new_tokens` tokens beyond its prompt."""

    reads = ("min_new_tokens",)

    def __init__(
        self,
        prompt_length_to_skip: int,
        min_new_tokens: int,
        eos_token_id: Ids,
        device: str = "cpu",  # noqa: ARG002
    ) -> None:
        self.prompt = number("prompt_length_to_skip", prompt_length_to_skip, 0, whole=True)
        self.min_new_tokens = number("min_new_tokens", min_new_tokens, 0, whole=True)
        self.ends = ids_of(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with no way to end too early."""
        early = context.generated < context.param("min_new_tokens")
        return scores.masked_fill(marked(scores.shape, context.param("ends")) & early, -torch.inf)


def forced(scores: Tensor, ids: Tensor, here: Tensor) -> Tensor:
    """Where `here` [N, 1], certainty for the ids [N, W] and nothing else."""
    mask = marked(scores.shape, ids)
    only = torch.where(mask, 0.0, -torch.inf).to(scores.dtype)
    return torch.where(here, only, scores)


class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Makes `bos_token_id` the token after the decoder's start token."""

    reads = ("forced_bos_token_id",)

    def __init__(self, bos_token_id: int) -> None:
        self.forced_bos_token_id = number("bos_token_id", bos_token_id, 0, whole=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Certainty at the second place."""
        return forced(scores, context.param("forced_bos_token_id"), context.length == 1)


class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Makes one of `eos_token_id` the last token when a row reaches `max_length`."""

    @classmethod
    def columns(cls, config: GenerationConfig, prompt: Prompt) -> dict[str, Any]:  # noqa: ARG003
        """The tokens that it forces."""
        return {"forced_eos_token_id": ids_of(config.forced_eos_token_id)}

    def __init__(self, max_length: int, eos_token_id: Ids, device: str = "cpu") -> None:  # noqa: ARG002
        self.limit = number("max_length", max_length, 1, whole=True)
        self.forced_eos_token_id = ids_of(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Certainty at the last place."""
        return forced(
            scores, context.param("forced_eos_token_id"), context.length == context.param("limit") - 1
        )


class ExponentialDecayLengthPenalty(LogitsProcessor):
    """Makes the end tokens exponentially likelier once a row has more than so many tokens beyond its prompt.

    Of `exponential_decay_length_penalty`, a pair, the first says how many and the second is the factor:
    `n` tokens later the score of an end token grows by its size times `factor ** n - 1`. An end that is
    ruled out stays so.
    """

    def __init__(
        self,
        exponential_decay_length_penalty: tuple[int, float],
        eos_token_id: Ids,
        input_ids_seq_length: int,
    ) -> None:
        length = number("input_ids_seq_length", input_ids_seq_length, 0, whole=True)
        vars(self).update(_decay(exponential_decay_length_penalty, length))
        self.eos = ids_of(eos_token_id)

    @classmethod
    def columns(cls, config: GenerationConfig, prompt: Prompt) -> dict[str, Any]:
        """Where it begins and how it grows."""
        return _decay(config.exponential_decay_length_penalty, prompt.length)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with the end likelier."""
        late = (context.length - context.param("decay_start")).clamp(min=0)
        # In float32 the power would be off by its exponent times 6e-8.
        exact = torch.float32 if scores.device.type == "mps" else torch.float64
        factor = context.param("decay_factor").to(exact) + context.param("decay_rest").to(exact)
        limits = torch.finfo(scores.dtype)
        growth = (factor**late - 1).clamp(limits.min, limits.max).to(scores.dtype)

        def grown(old: Tensor) -> Tensor:
            new = (old + old.abs() * growth).clamp(limits.min, limits.max)
            return torch.where((late > 0) & old.isfinite(), new, old)

        return renewed(scores, context.param("eos"), grown)


def _decay(pair: Any, prompt: int) -> dict[str, Any]:
    """The parameters of a decay: a row of which length it begins after, and the factor in two parts."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError("exponential_decay_length_penalty", "must be a pair (start, factor)", pair)
    start = number("exponential_decay_length_penalty", pair[0], 0, whole=True)
    factor = float(number("exponential_decay_length_penalty", pair[1], 0.0))
    rounded = float(torch.tensor(factor, dtype=torch.float32))
    begins = min(start + prompt, 2**62)  # no row is as long, and an int64 holds it
    return {"decay_start": begins, "decay_factor": factor, "decay_rest": factor - rounded}
