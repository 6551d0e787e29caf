"""Lengths: no end too early, an end that grows likelier, and fixed tokens at the first and last place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number, vocab_mask
from descant.decoding.processors.penalties import map_token_scores
from descant.errors import InputError

__all__ = [
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
]

TokenIds = int | Sequence[int] | Tensor


def as_id_list(value: TokenIds | None) -> list[int]:
    """No token id, one or several as a list."""
    return [] if value is None else torch.as_tensor(value).reshape(-1).tolist()


class MinLengthLogitsProcessor(LogitsProcessor):
    """Rules the end tokens out while a row, prompt included, is shorter than `min_length`."""

    config_fields = ("min_length",)

    def __init__(self, min_length: int, eos_token_id: TokenIds, device: str = "cpu") -> None:  # noqa: ARG002
        self.min_length = check_number("min_length", min_length, 0, integer=True)
        self.end_token_ids = as_id_list(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with no way to end too early."""
        early = context.length < context.param("min_length")
        return scores.masked_fill(
            vocab_mask(scores.shape, context.param("end_token_ids")) & early, -torch.inf
        )


class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """Rules the end tokens out until a row has `min_new_tokens` tokens beyond its prompt."""

    config_fields = ("min_new_tokens",)

    def __init__(
        self,
        prompt_length_to_skip: int,
        min_new_tokens: int,
        eos_token_id: TokenIds,
        device: str = "cpu",  # noqa: ARG002
    ) -> None:
        self.prompt_length = check_number("prompt_length_to_skip", prompt_length_to_skip, 0, integer=True)
        self.min_new_tokens = check_number("min_new_tokens", min_new_tokens, 0, integer=True)
        self.end_token_ids = as_id_list(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with no way to end too early."""
        early = context.generated < context.param("min_new_tokens")
        return scores.masked_fill(
            vocab_mask(scores.shape, context.param("end_token_ids")) & early, -torch.inf
        )


def force_tokens(scores: Tensor, ids: Tensor, here: Tensor) -> Tensor:
    """Where `here` [N, 1], certainty for the ids [N, W] and nothing else."""
    mask = vocab_mask(scores.shape, ids)
    only = torch.where(mask, 0.0, -torch.inf).to(scores.dtype)
    return torch.where(here, only, scores)


class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Makes `bos_token_id` the token after the decoder's start token."""

    config_fields = ("forced_bos_token_id",)

    def __init__(self, bos_token_id: int) -> None:
        self.forced_bos_token_id = check_number("bos_token_id", bos_token_id, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Certainty at the second place."""
        return force_tokens(scores, context.param("forced_bos_token_id"), context.length == 1)


class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Makes one of `eos_token_id` the last token when a row reaches `max_length`."""

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """The tokens that it forces."""
        return {"forced_eos_token_id": as_id_list(config.forced_eos_token_id)}

    def __init__(self, max_length: int, eos_token_id: TokenIds, device: str = "cpu") -> None:  # noqa: ARG002
        self.max_length = check_number("max_length", max_length, 1, integer=True)
        self.forced_eos_token_id = as_id_list(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Certainty at the last place."""
        return force_tokens(
            scores, context.param("forced_eos_token_id"), context.length == context.param("max_length") - 1
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
        eos_token_id: TokenIds,
        input_ids_seq_length: int,
    ) -> None:
        length = check_number("input_ids_seq_length", input_ids_seq_length, 0, integer=True)
        vars(self).update(_decay_params(exponential_decay_length_penalty, length))
        self.eos_token_ids = as_id_list(eos_token_id)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Where it begins and how it grows."""
        return _decay_params(config.exponential_decay_length_penalty, prompt.length)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with the end likelier."""
        late = (context.length - context.param("decay_start")).clamp(min=0)
        # In float32 the power would be off by its exponent times 6e-8.
        exact = torch.float32 if scores.device.type == "mps" else torch.float64
        factor = context.param("decay_factor").to(exact) + context.param("decay_residual").to(exact)
        limits = torch.finfo(scores.dtype)
        growth = (factor**late - 1).clamp(limits.min, limits.max).to(scores.dtype)

        def grown(old: Tensor) -> Tensor:
            new = (old + old.abs() * growth).clamp(limits.min, limits.max)
            return torch.where((late > 0) & old.isfinite(), new, old)

        return map_token_scores(scores, context.param("eos_token_ids"), grown)


def _decay_params(pair: Any, prompt: int) -> dict[str, Any]:
    """The parameters of a decay: a row of which length it begins after, and the factor in two parts."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError("exponential_decay_length_penalty", "must be a pair (start, factor)", pair)
    start = check_number("exponential_decay_length_penalty", pair[0], 0, integer=True)
    factor = float(check_number("exponential_decay_length_penalty", pair[1], 0.0))
    rounded = float(torch.tensor(factor, dtype=torch.float32))
    begins = min(start + prompt, 2**62)  # no row is as long, and an int64 holds it
    return {"decay_start": begins, "decay_factor": factor, "decay_residual": factor - rounded}
