"""Length processors: minimum length, length penalty, and forced first and last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, TokenIds, as_id_list, check_number, vocab_mask
from descant.decoding.processors.penalties import map_token_scores
from descant.errors import InputError
from descant.tokenization.regions import ThoughtState, ThoughtTracker


class MinLengthLogitsProcessor(LogitsProcessor):
    """Masks the end tokens while a row, prompt included, is shorter than `min_length`."""

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Return the minimum length in tokens of the row, without padding that counts."""
        return {"min_length": max(0, config.min_length - prompt.padding)}

    def __init__(self, min_length: int, eos_token_id: TokenIds, device: str = "cpu") -> None:  # noqa: ARG002
        self.min_length = check_number("min_length", min_length, 0, integer=True)
        self.end_token_ids = as_id_list(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the end tokens of rows that are too short."""
        return _mask_end_tokens(context, scores, context.length < context.param("min_length"))


class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """Masks the end tokens until a row has `min_new_tokens` generated tokens."""

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
        """Mask the end tokens of rows that are too short."""
        return _mask_end_tokens(context, scores, context.generated < context.param("min_new_tokens"))


def _mask_end_tokens(context: Context, scores: Tensor, early: Tensor) -> Tensor:
    """Mask the end tokens of rows that are too short [N, 1]."""
    return scores.masked_fill(vocab_mask(scores.shape, context.param("end_token_ids")) & early, -torch.inf)


def force_tokens(scores: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """Score 0 for the ids [N, W] and -inf for all others in the rows of the mask `where` [N, 1]."""
    mask = vocab_mask(scores.shape, ids)
    forced = torch.where(mask, 0.0, -torch.inf).to(scores.dtype)
    return torch.where(where, forced, scores)


class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Forces `bos_token_id` right after the decoder's start token."""

    config_fields = ("forced_bos_token_id",)

    def __init__(self, bos_token_id: int) -> None:
        self.forced_bos_token_id = check_number("bos_token_id", bos_token_id, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Force the token in rows of length 1."""
        return force_tokens(scores, context.param("forced_bos_token_id"), context.length == 1)


class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Forces one of `eos_token_id` as the last token before `max_length`."""

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the forced tokens."""
        return {"forced_eos_token_id": as_id_list(config.forced_eos_token_id)}

    def __init__(self, max_length: int, eos_token_id: TokenIds, device: str = "cpu") -> None:  # noqa: ARG002
        self.max_length = check_number("max_length", max_length, 1, integer=True)
        self.forced_eos_token_id = as_id_list(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Force the tokens in rows that have one token left."""
        return force_tokens(
            scores, context.param("forced_eos_token_id"), context.length == context.param("max_length") - 1
        )


class ForceTokensLogitsProcessor(LogitsProcessor):
    """Forces tokens at given lengths of a row: `force_token_map` is a list of pairs `[length, token]`."""

    def __init__(self, force_token_map: Sequence[Sequence[int]]) -> None:
        self.forced_tokens = [
            [check_number("force_token_map", value, 0, integer=True) for value in pair]
            for pair in force_token_map
        ]

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Return the pairs of length and token; index 1 of `forced_decoder_ids` is the first new token."""
        pairs: Any = config.forced_decoder_ids or ()
        forced = [[prompt.length + index - 1, token] for index, token in pairs if token is not None]
        return {"forced_tokens": forced}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Force the tokens of rows that have one of their lengths."""
        pairs = context.param("forced_tokens")  # [N, K, 2]
        is_due = pairs[..., 0] == context.length  # [N, K]
        return force_tokens(scores, torch.where(is_due, pairs[..., 1], -1), is_due.any(1, keepdim=True))


class ExponentialDecayLengthPenalty(LogitsProcessor):
    """Makes the end tokens exponentially more likely after a number of generated tokens.

    `exponential_decay_length_penalty` is a pair `(start, factor)`: `n` tokens after `start`, the score of an
    end token grows by its absolute value times `factor ** n - 1`. A masked end token stays masked.
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
        """Return the start and the factor."""
        return _decay_params(config.exponential_decay_length_penalty, prompt.length)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Raise the scores of the end tokens."""
        overrun = (context.length - context.param("decay_start")).clamp(min=0)
        # In float32 the relative error of the power would be its exponent times 6e-8.
        dtype = torch.float32 if scores.device.type == "mps" else torch.float64
        factor = context.param("decay_factor").to(dtype) + context.param("decay_residual").to(dtype)
        limits = torch.finfo(scores.dtype)
        growth = (factor**overrun - 1).clamp(limits.min, limits.max).to(scores.dtype)

        def grown(old: Tensor) -> Tensor:
            new = (old + old.abs() * growth).clamp(limits.min, limits.max)
            return torch.where((overrun > 0) & old.isfinite(), new, old)

        return map_token_scores(scores, context.param("eos_token_ids"), grown)


def _decay_params(pair: Any, prompt_length: int) -> dict[str, Any]:
    """Return the row length after which the decay starts, and the factor split into two float32 parts."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError("exponential_decay_length_penalty", "must be a pair (start, factor)", pair)
    start = check_number("exponential_decay_length_penalty", pair[0], 0, integer=True)
    factor = float(check_number("exponential_decay_length_penalty", pair[1], 0.0))
    rounded = float(torch.tensor(factor, dtype=torch.float32))
    decay_start = min(start + prompt_length, 2**62)  # longer than any row, and within int64
    return {"decay_start": decay_start, "decay_factor": factor, "decay_residual": factor - rounded}


THOUGHT_PARAM = "thought_tracker"  # the row parameter with a request's `ThoughtTracker`


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Forces `thinking_end` after `thinking_budget` tokens (budget forcing, Muennighoff et al. 2025).

    Reasoning starts after the last `thinking_start` in the row, prompt included, or, if that is not set, at
    the first generated token. It ends at the next `thinking_end`. At the budget the tokens of `thinking_end`
    are forced one by one, continuing a partial match at the end of the row. In a direct call, the first
    `prompt_length` ids are the prompt.
    """

    config_fields = ("thinking_budget",)

    def __init__(
        self,
        thinking_budget: int,
        thinking_end: TokenIds,
        thinking_start: TokenIds | None = None,
        prompt_length: int = 0,
    ) -> None:
        self.thinking_budget = check_number("thinking_budget", thinking_budget, 0, integer=True)
        self.thinking_end = as_id_list(thinking_end)
        if not self.thinking_end:
            raise InputError("thinking_end", "must contain at least one token id", thinking_end)
        self.thinking_start = [] if thinking_start is None else as_id_list(thinking_start)
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Return the budget, and the two sequences as lists."""
        names = ("thinking_start", "thinking_end")  # without an end, admission finds it by the tokenizer
        sequences = {name: list(getattr(config, name, None) or ()) for name in names}
        return {**super().params_from_config(config, prompt), **sequences}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Force the next token of `thinking_end` in rows that have used up the budget."""
        states, is_over = thought_states(context)
        if not is_over:
            return scores
        start, end = context.param("thinking_start"), context.param("thinking_end")
        # One extra column, for rows without tokens.
        tokens = pad(torch.where(context.valid, context.tokens, -1), (0, 1), value=-1)  # [N, L + 1]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        size = (start >= 0).sum(1, keepdim=True)
        last_start = torch.where(sequence_starts(tokens, start), positions, -1).amax(1, keepdim=True)
        begin = torch.where(size > 0, last_start + size, context.length - context.generated)
        ended = (sequence_starts(tokens, end) & (positions >= begin)).any(1, keepdim=True)
        thinking = ((size == 0) | (last_start >= 0)) & ~ended
        if states:
            thinking, begin = self._tracked(states, context, thinking, begin)
        over_budget = thinking & (context.length - begin >= context.param("thinking_budget"))
        return force_tokens(
            scores, end.gather(1, matched_end_tokens(tokens, end, begin, context.length)), over_budget
        )

    def _tracked(
        self, states: Sequence[ThoughtState | None], context: Context, thinking: Tensor, begin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which rows think, and where each has begun, for those whose thought is told by its text."""
        is_tracked = torch.tensor([[state is not None] for state in states], device=thinking.device)
        thinks = [[state is not None and state.region == "reasoning"] for state in states]
        begins = torch.tensor([[0 if state is None else state.begin] for state in states])
        first = context.length - context.generated + begins.to(begin.device)
        return (
            torch.where(is_tracked, torch.tensor(thinks, device=thinking.device), thinking),
            torch.where(is_tracked, first, begin),
        )


def thought_states(context: Context) -> tuple[list[ThoughtState | None], bool]:
    """The states of rows whose thought is told by its text, and whether any row may be over its budget."""
    if not context.has_param(THOUGHT_PARAM):
        return [], True
    trackers: list[ThoughtTracker | None] = context.object_param(THOUGHT_PARAM)
    states: list[ThoughtState | None] = []
    is_over = False
    for tracker, text in zip(trackers, context.new_token_arrays(), strict=True):
        state = None if tracker is None else tracker.at(text)
        states.append(state)
        if tracker is None or state is None or tracker.budget is None:
            is_over = True
        elif state.region == "reasoning":
            is_over = is_over or len(text) - state.begin >= tracker.budget
    return states, is_over


def sequence_starts(tokens: Tensor, sequence: Tensor) -> Tensor:
    """Mask of the positions in tokens [N, L] where the row's sequence [N, W], padded with -1, starts."""
    matches = (tokens >= 0) & (sequence[:, :1] >= 0)
    for offset in range(sequence.shape[1]):
        expected = sequence[:, offset : offset + 1]
        shifted = pad(tokens[:, offset:], (0, min(offset, tokens.shape[1])), value=-1)
        matches &= (shifted == expected) | (expected < 0)
    return matches


def matched_end_tokens(tokens: Tensor, end: Tensor, begin: Tensor, length: Tensor) -> Tensor:
    """Length of the longest proper prefix of `end` [N, W] that the row ends with, from `begin` on [N, 1]."""
    width = end.shape[1]
    positions = length + torch.arange(1 - width, 0, device=end.device)  # the last W - 1 positions
    tail = tokens.gather(1, positions.clamp(min=0))
    count = torch.zeros_like(begin)
    for size in range(1, width):
        matches = (tail[:, width - 1 - size :] == end[:, :size]).all(1, keepdim=True)
        count = torch.where(matches & (length - size >= begin), size, count)
    return count
