"""Repetition: what a row has written, token by token or as a sequence, counts against writing it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number, vocab_mask
from descant.decoding.processors.lengths import TokenIds, as_id_list

__all__ = ["DRYLogitsProcessor", "FrequencyPenaltyLogitsProcessor", "PresencePenaltyLogitsProcessor"]

MAX_PENALTY = 1e30  # a penalty that bans and yet leaves the score finite, should nothing else be allowed


class PresencePenaltyLogitsProcessor(LogitsProcessor):
    """Takes `presence_penalty` off every token that was generated, not those of the prompt (OpenAI's API).

    By hand, the first `prompt_length` ids are the prompt.
    """

    config_fields = ("presence_penalty",)

    def __init__(self, presence_penalty: float, prompt_length: int = 0) -> None:
        self.presence_penalty = float(check_number("presence_penalty", presence_penalty, -2.0, 2.0))
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores, lower where a token has come up."""
        seen = generated_counts(context, scores.shape) > 0
        return torch.where(seen, scores - context.param("presence_penalty"), scores)


class FrequencyPenaltyLogitsProcessor(LogitsProcessor):
    """Takes `frequency_penalty` off a token for each time it was generated, not in the prompt (OpenAI's API).

    By hand, the first `prompt_length` ids are the prompt.
    """

    config_fields = ("frequency_penalty",)

    def __init__(self, frequency_penalty: float, prompt_length: int = 0) -> None:
        self.frequency_penalty = float(check_number("frequency_penalty", frequency_penalty, -2.0, 2.0))
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores, lower the more often a token has come up."""
        return scores - context.param("frequency_penalty") * generated_counts(context, scores.shape)


class DRYLogitsProcessor(LogitsProcessor):
    """Makes a token that would prolong a repeat less likely, the more the longer the repeat (DRY, by p-e-w).

    Where the end of the row has occurred before, prompt included, the token that followed it there loses
    `dry_multiplier * dry_base ** (match - dry_allowed_length)`, `match` being the length of the longest
    such end, if that is at least `dry_allowed_length`. A sequence breaker is neither matched nor penalised.
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
        """Its numbers, and the breakers as a list."""
        breakers = list(config.dry_sequence_breakers or ())
        return {**super().params_from_config(config, prompt), "dry_sequence_breakers": breakers}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores, lower where a token would prolong a repeat."""
        tokens, length, width = context.tokens, context.length, scores.shape[1]
        if tokens.shape[1] < 2:
            return scores.clone()
        reach, allowed = context.param("dry_range"), context.param("dry_allowed_length")
        start = torch.where(reach > 0, (length - reach).clamp(min=0), 0)
        broken = pad(vocab_mask(scores.shape, context.param("dry_sequence_breakers")), (0, 1))  # [N, V + 1]
        known = torch.where((tokens >= 0) & (tokens < width), tokens, width)
        breaks = broken.gather(1, known)

        match = suffix_match_lengths(tokens, breaks, start, length)[:, :-1]
        follower = torch.where((match >= allowed) & ~breaks[:, 1:], known[:, 1:], width)
        longest = torch.zeros_like(broken, dtype=torch.long)
        longest = longest.scatter_reduce(1, follower, match, "amax")[:, :width]
        power = (context.param("dry_base") ** (longest - allowed)).clamp(max=MAX_PENALTY)
        penalty = (context.param("dry_multiplier") * power).clamp(max=MAX_PENALTY)
        return torch.where(longest > 0, scores - penalty, scores)


def generated_counts(context: Context, shape: torch.Size) -> Tensor:
    """How often each token was generated [N, V]."""
    tokens, width = context.tokens, shape[1]
    at = torch.arange(tokens.shape[1], device=tokens.device)
    new = context.valid & (at >= context.length - context.generated) & (tokens >= 0) & (tokens < width)
    counts = torch.zeros(shape[0], width + 1, device=tokens.device)
    ones = torch.ones(1, 1, device=tokens.device).expand(tokens.shape)
    return counts.scatter_add(1, torch.where(new, tokens, width), ones)[:, :width]


def suffix_match_lengths(tokens: Tensor, breaks: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """How many tokens that end at each place are those that end the row, without a breaker [N, L].

    Runs of 1, 2, 4, ... tokens get a number each, the same for the same run, so that a match is found
    in as many steps as its length has bits, exactly and without asking the device.
    """
    wide = tokens.shape[1]
    at = torch.arange(wide, device=tokens.device)
    here = (at >= start) & (at < length)
    last = torch.where(breaks & here, at, start - 1).amax(1, keepdim=True)  # where a breaker ends the match
    most = torch.minimum(at - start + 1, length - 1 - last)
    most = torch.where(here & (at < length - 1), most, 0)

    numbers = [tokens]
    while 2 ** len(numbers) < wide:
        numbers.append(_rank_run_pairs(numbers[-1], 2 ** (len(numbers) - 1)))
    found = torch.zeros_like(tokens)
    for power in range(len(numbers) - 1, -1, -1):
        there = numbers[power].gather(1, (at - found).clamp(min=0))
        ending = numbers[power].gather(1, (length - 1 - found).clamp(min=0))
        longer = (there == ending) & (found + 2**power <= most)
        found = found + longer * 2**power
    return found


def _rank_run_pairs(numbers: Tensor, step: int) -> Tensor:
    """Runs twice as long, numbered by the pair of halves that each is made of [N, L]."""
    earlier = pad(numbers[:, :-step], (step, 0))
    ordered, order = ((numbers << 32) + earlier).sort(1)
    rank = pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)
    return torch.empty_like(rank).scatter_(1, order, rank)
