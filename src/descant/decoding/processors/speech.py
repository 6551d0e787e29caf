"""Processors of speech models: Whisper's timestamps and Bark's alternating codebooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, as_id_list, check_number
from descant.errors import InputError


class WhisperTimeStampLogitsProcessor(LogitsProcessor):
    """Enforces Whisper's timestamp rules (Radford et al. 2022): paired, non-decreasing, one at the start.

    Timestamps are the tokens after `no_timestamps_token_id`, text tokens come before the end token. If all
    timestamps together are more likely than any text token, a timestamp is forced. In a direct call, the
    tokens are read from `generate_config`, any object with the documented attributes.
    """

    def __init__(
        self,
        generate_config: Any,
        begin_index: int | None = None,
        _detect_timestamp_from_logprob: bool | None = None,
    ) -> None:
        name, detect = "no_timestamps_token_id", _detect_timestamp_from_logprob
        self.no_timestamps_token_id = check_number(
            name, getattr(generate_config, name, None), 0, integer=True
        )
        max_initial = getattr(generate_config, "max_initial_timestamp_index", None)
        self.max_initial_timestamp_index = -1 if max_initial is None else max_initial
        end_candidates = (getattr(generate_config, field, None) for field in ("eos_token_id", "bos_token_id"))
        self.eos_token_ids = next((as_id_list(ids) for ids in end_candidates if ids is not None), [])
        if not self.eos_token_ids:
            raise InputError("generate_config", "must have an `eos_token_id`", None)
        forced = getattr(generate_config, "forced_decoder_ids", None) or ()
        self.begin_index = check_number("begin_index", begin_index or len(forced) + 1, 0, integer=True)
        detect = (
            getattr(generate_config, "_detect_timestamp_from_logprob", True) if detect is None else detect
        )
        self.detect_timestamps = int(detect)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the timestamp range and the latest initial timestamp."""
        max_initial = config.max_initial_timestamp_index
        return {
            "no_timestamps_token_id": config.no_timestamps_token_id,
            "max_initial_timestamp_index": -1 if max_initial is None else max_initial,
            "detect_timestamps": 1,
        }

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that violate the timestamp rules."""
        no_timestamps = context.param("no_timestamps_token_id")
        first_timestamp = no_timestamps + 1
        token = torch.arange(scores.shape[1], device=scores.device)  # [V]
        banned = (token == no_timestamps) | _timestamp_violations(context, token, first_timestamp)
        max_initial = context.param("max_initial_timestamp_index")
        wrong_start = (token < first_timestamp) | (
            (max_initial >= 0) & (token > first_timestamp + max_initial)
        )
        banned |= wrong_start & (context.length == context.param("begin_index"))
        masked = scores.masked_fill(banned, -torch.inf)
        # The decision between timestamp and text uses the distribution after the rules.
        log_probs = masked.float().log_softmax(-1)
        timestamp_mass = torch.where(token >= first_timestamp, log_probs, -torch.inf).logsumexp(
            -1, keepdim=True
        )
        best_text = torch.where(token >= first_timestamp, -torch.inf, log_probs).amax(-1, keepdim=True)
        is_timestamp = (timestamp_mass > best_text) & (context.param("detect_timestamps") > 0)
        return masked.masked_fill(is_timestamp & (token < first_timestamp), -torch.inf)


def _timestamp_violations(context: Context, token: Tensor, first_timestamp: Tensor) -> Tensor:
    """Mask of the tokens [V] that break a timestamp pair or go back in time [N, V]."""
    tokens = torch.nn.functional.pad(context.tokens, (0, 1))  # at least one column
    start = context.param("begin_index")
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_timestamp = (
        (positions >= start) & (positions < context.length) & (tokens >= first_timestamp)
    )  # [N, L + 1]

    def timestamp_at(offset: int) -> Tensor:
        return is_timestamp.gather(1, (context.length - offset).clamp(min=0)) & (
            context.length - offset >= start
        )

    num_new = context.length - start
    is_open = timestamp_at(1) & (num_new >= 2) & ~timestamp_at(2)  # the pair's second timestamp is missing
    is_closed = timestamp_at(1) & ~is_open
    newest = torch.where(is_timestamp, positions, -1).amax(1, keepdim=True)
    # A pair's second timestamp may equal its first; the next pair starts later.
    earliest = tokens.gather(1, newest.clamp(min=0)) + torch.where(is_open, 0, 1)
    backwards = (newest >= 0) & (token >= first_timestamp) & (token < earliest)
    return (
        backwards
        | (is_closed & (token >= first_timestamp))
        | (is_open & (token < context.param("eos_token_ids")[:, :1]))
    )


class AlternatingCodebooksLogitsProcessor(LogitsProcessor):
    """Alternates between Bark's two codebooks, starting with the first after `input_start_len` tokens.

    The vocabulary is `semantic_vocab_size` masked tokens, then `codebook_size` tokens of the first codebook,
    then the second codebook.
    """

    def __init__(self, input_start_len: int, semantic_vocab_size: int, codebook_size: int) -> None:
        self.input_start_len = check_number("input_start_len", input_start_len, 0, integer=True)
        self.semantic_vocab_size = check_number("semantic_vocab_size", semantic_vocab_size, 0, integer=True)
        self.codebook_size = check_number("codebook_size", codebook_size, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask all tokens outside the current codebook."""
        token = torch.arange(scores.shape[1], device=scores.device)
        first = context.param("semantic_vocab_size")
        second = first + context.param("codebook_size")
        first_turn = (context.length - context.param("input_start_len")) % 2 == 0
        allowed = torch.where(first_turn, (token >= first) & (token < second), token >= second)
        return scores.masked_fill(~allowed, -torch.inf)
