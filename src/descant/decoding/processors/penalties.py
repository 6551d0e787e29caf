"""Penalties: what has been said counts against saying it again, or for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError

__all__ = [
    "EncoderInputProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "map_token_scores",
]


def map_token_scores(scores: Tensor, ids: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The scores with those of the ids [N, W] put through `change`, ids that name no token left out."""
    if not ids.shape[1]:
        return scores
    real = (ids >= 0) & (ids < scores.shape[1])
    # Writing is cheapest without a mask: an id that names nobody writes what its neighbour writes.
    stand_in = torch.where(real, ids, -1).amax(1, keepdim=True)  # [N, 1], -1 where a line has no ids
    at = torch.where(real, ids, stand_in).clamp(min=0)
    old = scores.gather(1, at)
    return scores.scatter(1, at, torch.where(stand_in >= 0, change(old), old))


def repetition_penalty_fn(penalty: Tensor) -> Callable[[Tensor], Tensor]:
    """Scores / penalty, or * penalty below 0, so that a penalty above 1 always makes less likely."""
    return lambda scores: torch.where(scores < 0, scores * penalty, scores / penalty)


class RepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Makes tokens already seen less likely (Keskar et al. 2019): scores / penalty, or * penalty below 0.

    By hand, `prompt_ignore_length` leaves the first so many tokens of a row out.
    """

    config_fields = ("repetition_penalty",)
    prompt_ignore_length = 0

    def __init__(self, penalty: float, prompt_ignore_length: int | None = None) -> None:
        self.repetition_penalty = _check_penalty(penalty)
        self.prompt_ignore_length = check_number(
            "prompt_ignore_length", prompt_ignore_length or 0, 0, integer=True
        )

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with every token of the row, prompt included and padding not, made less likely."""
        seen = torch.where(context.valid, context.tokens, -1)[:, self.prompt_ignore_length :]
        return map_token_scores(
            scores, seen, repetition_penalty_fn(context.param("repetition_penalty").to(scores.dtype))
        )


class EncoderInputProcessor(LogitsProcessor):
    """A processor that looks at the encoder's input, or at the prompt where there is no encoder.

    Its parameter `source` is those ids without padding. By hand it is given the ids of a whole batch
    [B, S], in which every id counts, and `input_ids` has a fixed number of lines for each of them.
    """

    source_ids: list[int] | list[list[int]]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], all of which count as real."""
        context = Context.standalone(input_ids, vars(self))
        sources = context.param("source_ids")
        if sources.ndim > 2:
            lines, prompts = len(sources), sources.shape[1]
            if lines % prompts:
                must = f"must have a multiple of {prompts} lines, as the encoder's input has so many"
                raise InputError("input_ids", must, input_ids)
            batch = torch.arange(lines, device=scores.device) // (lines // prompts)
            sources = _select_source(sources, batch[:, None])
        return self.process_with_source(context, scores, sources)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The new scores of lines whose sources the context knows."""
        sources = context.param("source_ids")
        if sources.ndim > 2:  # made by hand and used by the loop, whose lines come and go
            sources = _select_source(sources, context.param("prompt_index"))
        return self.process_with_source(context, scores, sources)

    def process_with_source(self, context: Context, scores: Tensor, sources: Tensor) -> Tensor:
        """The new scores of lines with those sources [N, S], padded with -1."""
        raise NotImplementedError(f"{type(self).__name__} must define `sourced`")


def as_source_ids(encoder_input_ids: Tensor) -> list[Any]:
    """The ids of one encoder input [S], or of a batch of them [B, S], as a parameter."""
    ids = torch.as_tensor(encoder_input_ids)
    if ids.ndim not in (1, 2) or ids.is_floating_point() or not ids.numel():
        raise InputError("encoder_input_ids", "must be token ids [batch, length]", encoder_input_ids)
    listed: list[Any] = (ids[0] if ids.ndim == 2 and len(ids) == 1 else ids).tolist()
    return listed


def _select_source(sources: Tensor, batch: Tensor) -> Tensor:
    """Of the sources of a whole batch [N, B, S] each line's own, `batch` [N, 1] being its number [N, S]."""
    return sources.gather(1, batch[:, :, None].expand(-1, -1, sources.shape[2])).squeeze(1)


class EncoderRepetitionPenaltyLogitsProcessor(EncoderInputProcessor):
    """Makes the tokens of the encoder's input likelier (`penalty` > 1) or less likely (< 1).

    It is the inverse of the repetition penalty (Keskar et al. 2019), against made-up facts in summaries.
    """

    def __init__(self, penalty: float, encoder_input_ids: Tensor) -> None:
        self.encoder_penalty = 1.0 / _check_penalty(penalty)
        self.source_ids = as_source_ids(encoder_input_ids)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """The inverse of the penalty, and whose tokens it concerns."""
        # Here and not on the device, where float32 would round the quotient.
        return {"encoder_penalty": 1.0 / config.encoder_repetition_penalty, "source_ids": prompt.source_ids()}

    def process_with_source(self, context: Context, scores: Tensor, sources: Tensor) -> Tensor:
        """The scores with every token of the source made likelier."""
        return map_token_scores(
            scores, sources, repetition_penalty_fn(context.param("encoder_penalty").to(scores.dtype))
        )


def _check_penalty(penalty: Any) -> float:
    if check_number("penalty", penalty, 0.0) <= 0:
        raise InputError("penalty", "must be > 0", penalty, "1.0 means no penalty")
    return float(penalty)
