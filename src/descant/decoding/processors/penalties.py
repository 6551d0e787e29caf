"""Repetition penalties on the row's own tokens and on the encoder's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import (
    LogitsProcessor,
    TokenIds,
    as_id_list,
    check_number,
    check_positive,
    vocab_mask,
)
from descant.errors import InputError


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
        self.repetition_penalty = check_positive("penalty", penalty, "1.0 means no penalty")
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
        self.encoder_penalty = 1.0 / check_positive("penalty", penalty, "1.0 means no penalty")
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


MAX_PENALTY = 1e30  # bans in practice, but keeps the score finite in case all tokens are banned


class PresencePenaltyLogitsProcessor(LogitsProcessor):
    """Subtracts `presence_penalty` from every generated token, prompt excluded (OpenAI API).

    In a direct call, the first `prompt_length` ids are the prompt.
    """

    config_fields = ("presence_penalty",)

    def __init__(self, presence_penalty: float, prompt_length: int = 0) -> None:
        self.presence_penalty = float(check_number("presence_penalty", presence_penalty, -2.0, 2.0))
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Subtract the penalty from generated tokens."""
        penalty = context.param("presence_penalty").to(scores.dtype)
        ids = generated_ids(context)
        return map_token_scores(scores, ids, lambda own: own - penalty) if ids.shape[1] else scores.clone()


class FrequencyPenaltyLogitsProcessor(LogitsProcessor):
    """Subtracts `frequency_penalty` from a token per generated occurrence, prompt excluded (OpenAI API).

    In a direct call, the first `prompt_length` ids are the prompt.
    """

    config_fields = ("frequency_penalty",)

    def __init__(self, frequency_penalty: float, prompt_length: int = 0) -> None:
        self.frequency_penalty = float(check_number("frequency_penalty", frequency_penalty, -2.0, 2.0))
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Subtract the penalty times the number of occurrences."""
        return scores - context.param("frequency_penalty") * generated_counts(context, scores.shape)


class DRYLogitsProcessor(LogitsProcessor):
    """Penalises tokens that would extend a repeated sequence, more for longer repeats (DRY, by p-e-w).

    Where a suffix of the row has occurred before, prompt included, the token that followed it loses
    `dry_multiplier * dry_base ** (match - dry_allowed_length)`, `match` being the length of the longest such
    suffix, if it is at least `dry_allowed_length`. A sequence breaker is neither matched nor penalised.
    Only the last `dry_range` tokens count; 0 means all.
    Origin: text-generation-webui, pull request 5677; llama.cpp, pull request 9702.
    """

    config_fields = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_range")

    def __init__(
        self,
        dry_multiplier: float,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_range: int = 0,
        dry_sequence_breakers: TokenIds = (),
    ) -> None:
        self.dry_multiplier = float(check_number("dry_multiplier", dry_multiplier, 0.0, MAX_PENALTY))
        self.dry_base = float(check_number("dry_base", dry_base, 1.0, MAX_PENALTY))
        self.dry_allowed_length = check_number("dry_allowed_length", dry_allowed_length, 1, integer=True)
        self.dry_range = check_number("dry_range", dry_range, 0, integer=True)
        self.dry_sequence_breakers = as_id_list(dry_sequence_breakers)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Return the numeric parameters, and the breakers as a list."""
        breakers = list(config.dry_sequence_breakers or ())
        return {**super().params_from_config(config, prompt), "dry_sequence_breakers": breakers}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Subtract the penalty from tokens that would extend a repeat."""
        tokens, length, vocab_size = context.tokens, context.length, scores.shape[1]
        if tokens.shape[1] < 2:
            return scores.clone()
        max_range, allowed = context.param("dry_range"), context.param("dry_allowed_length")
        start = torch.where(max_range > 0, (length - max_range).clamp(min=0), 0)
        breaker_mask = pad(
            vocab_mask(scores.shape, context.param("dry_sequence_breakers")), (0, 1)
        )  # [N, V + 1]
        ids = torch.where((tokens >= 0) & (tokens < vocab_size), tokens, vocab_size)
        is_breaker = breaker_mask.gather(1, ids)

        match = suffix_match_lengths(tokens, is_breaker, start, length)[:, :-1]
        follower = torch.where((match >= allowed) & ~is_breaker[:, 1:], ids[:, 1:], vocab_size)
        longest = torch.zeros_like(breaker_mask, dtype=torch.long)
        longest = longest.scatter_reduce(1, follower, match, "amax")[:, :vocab_size]
        power = (context.param("dry_base") ** (longest - allowed)).clamp(max=MAX_PENALTY)
        penalty = (context.param("dry_multiplier") * power).clamp(max=MAX_PENALTY)
        return torch.where(longest > 0, scores - penalty, scores)


def generated_ids(context: Context) -> Tensor:
    """The generated tokens of each line, -1 at the places of others [N, L]."""
    positions = torch.arange(context.tokens.shape[1], device=context.tokens.device)
    is_generated = context.valid & (positions >= context.length - context.generated)
    return torch.where(is_generated, context.tokens, -1)


def generated_counts(context: Context, shape: torch.Size) -> Tensor:
    """Number of generated occurrences of each token [N, V]."""
    tokens, vocab_size = generated_ids(context), shape[1]
    counts = torch.zeros(shape[0], vocab_size + 1, device=tokens.device)
    ones = torch.ones(1, 1, device=tokens.device).expand(tokens.shape)
    index = torch.where((tokens >= 0) & (tokens < vocab_size), tokens, vocab_size)
    return counts.scatter_add(1, index, ones)[:, :vocab_size]


def suffix_match_lengths(tokens: Tensor, is_breaker: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """Length of the longest common suffix of the row and its prefix ending at each position [N, L].

    A match does not extend over a breaker. Runs of 1, 2, 4, ... tokens get equal ids if they are equal, so
    that a match is found in as many steps as its length has bits, exactly and without synchronisation.
    """
    width = tokens.shape[1]
    positions = torch.arange(width, device=tokens.device)
    in_range = (positions >= start) & (positions < length)
    last_breaker = torch.where(is_breaker & in_range, positions, start - 1).amax(1, keepdim=True)  # [N, 1]
    max_match = torch.minimum(positions - start + 1, length - 1 - last_breaker)
    max_match = torch.where(in_range & (positions < length - 1), max_match, 0)

    run_ids = [tokens]
    while 2 ** len(run_ids) < width:
        run_ids.append(_rank_run_pairs(run_ids[-1], 2 ** (len(run_ids) - 1)))
    matched = torch.zeros_like(tokens)
    for power in range(len(run_ids) - 1, -1, -1):
        here_ids = run_ids[power].gather(1, (positions - matched).clamp(min=0))
        suffix_ids = run_ids[power].gather(1, (length - 1 - matched).clamp(min=0))
        extends = (here_ids == suffix_ids) & (matched + 2**power <= max_match)
        matched = matched + extends * 2**power
    return matched


def _rank_run_pairs(run_ids: Tensor, step: int) -> Tensor:
    """Ids of runs of twice the length, from the ids of their two halves [N, L]."""
    earlier = pad(run_ids[:, :-step], (step, 0))
    ordered, order = ((run_ids << 32) + earlier).sort(1)
    rank = pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)
    return torch.empty_like(rank).scatter_(1, order, rank)
