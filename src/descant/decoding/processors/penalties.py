"""Repetition penalties on the row's own tokens and on the encoder's input."""

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
    """Apply `change` to the scores of the ids [N, W]; ids out of range are ignored."""
    if not ids.shape[1]:
        return scores
    known = (ids >= 0) & (ids < scores.shape[1])
    # A scatter without a mask is cheapest: an unknown id repeats the write of a known one.
    stand_in = torch.where(known, ids, -1).amax(1, keepdim=True)  # [N, 1], -1 if a row has no ids
    index = torch.where(known, ids, stand_in).clamp(min=0)
    selected = scores.gather(1, index)
    return scores.scatter(1, index, torch.where(stand_in >= 0, change(selected), selected))


def repetition_penalty_fn(penalty: Tensor) -> Callable[[Tensor], Tensor]:
    """Return scores -> scores / penalty, or * penalty below 0, so that a penalty > 1 always lowers them."""
    return lambda scores: torch.where(scores < 0, scores * penalty, scores / penalty)


class RepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Lowers the scores of tokens in the row (Keskar et al. 2019): / penalty, or * penalty below 0.

    In a direct call, `prompt_ignore_length` excludes that many tokens at the start.
    """

    config_fields = ("repetition_penalty",)
    prompt_ignore_length = 0

    def __init__(self, penalty: float, prompt_ignore_length: int | None = None) -> None:
        self.repetition_penalty = _check_penalty(penalty)
        self.prompt_ignore_length = check_number(
            "prompt_ignore_length", prompt_ignore_length or 0, 0, integer=True
        )

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Apply the penalty to every token of the row, prompt included and padding excluded."""
        row_ids = torch.where(context.valid, context.tokens, -1)[:, self.prompt_ignore_length :]
        return map_token_scores(
            scores, row_ids, repetition_penalty_fn(context.param("repetition_penalty").to(scores.dtype))
        )


class EncoderInputProcessor(LogitsProcessor):
    """Base class of processors that read the encoder's input, or the prompt of a decoder-only model.

    The parameter `source_ids` holds those ids without padding. In a direct call it holds a whole batch [B, S]
    in which every id counts, and `input_ids` has a fixed number of rows per batch entry.
    """

    source_ids: list[int] | list[list[int]]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new scores [N, V] for the ids [N, L], none of which is treated as padding."""
        context = Context.standalone(input_ids, vars(self))
        sources = context.param("source_ids")
        if sources.ndim > 2:
            rows, prompts = len(sources), sources.shape[1]
            if rows % prompts:
                must = f"must have a multiple of {prompts} rows, the batch size of the encoder's input"
                raise InputError("input_ids", must, input_ids)
            prompt_index = torch.arange(rows, device=scores.device) // (rows // prompts)
            sources = _select_source(sources, prompt_index[:, None])
        return self.process_with_source(context, scores, sources)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Select the source of each row and process it."""
        sources = context.param("source_ids")
        if sources.ndim > 2:  # constructed by the user for a batch, but used by the engine
            sources = _select_source(sources, context.param("prompt_index"))
        return self.process_with_source(context, scores, sources)

    def process_with_source(self, context: Context, scores: Tensor, sources: Tensor) -> Tensor:
        """Return new scores of rows with the sources [N, S], padded with -1."""
        raise NotImplementedError(f"{type(self).__name__} must define `process_with_source`")


def as_source_ids(encoder_input_ids: Tensor) -> list[Any]:
    """Convert the ids of one encoder input [S] or of a batch [B, S] to a parameter."""
    ids = torch.as_tensor(encoder_input_ids)
    if ids.ndim not in (1, 2) or ids.is_floating_point() or not ids.numel():
        raise InputError("encoder_input_ids", "must be token ids [batch, length]", encoder_input_ids)
    source_ids: list[Any] = (ids[0] if ids.ndim == 2 and len(ids) == 1 else ids).tolist()
    return source_ids


def _select_source(sources: Tensor, prompt_index: Tensor) -> Tensor:
    """Select each row's source [N, S] from the batch [N, B, S] by its index [N, 1]."""
    return sources.gather(1, prompt_index[:, :, None].expand(-1, -1, sources.shape[2])).squeeze(1)


class EncoderRepetitionPenaltyLogitsProcessor(EncoderInputProcessor):
    """Raises (`penalty` > 1) or lowers (< 1) the scores of the tokens in the encoder's input.

    It is the inverse of the repetition penalty (Keskar et al. 2019) and reduces hallucination in summaries.
    """

    def __init__(self, penalty: float, encoder_input_ids: Tensor) -> None:
        self.encoder_penalty = 1.0 / _check_penalty(penalty)
        self.source_ids = as_source_ids(encoder_input_ids)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Return the inverse of the penalty, and the encoder's input ids."""
        # Computed in float64 on the host; float32 on the device would round it.
        return {"encoder_penalty": 1.0 / config.encoder_repetition_penalty, "source_ids": prompt.source_ids()}

    def process_with_source(self, context: Context, scores: Tensor, sources: Tensor) -> Tensor:
        """Apply the inverse penalty to every token of the source."""
        return map_token_scores(
            scores, sources, repetition_penalty_fn(context.param("encoder_penalty").to(scores.dtype))
        )


def _check_penalty(penalty: Any) -> float:
    if check_number("penalty", penalty, 0.0) <= 0:
        raise InputError("penalty", "must be > 0", penalty, "1.0 means no penalty")
    return float(penalty)
