"""Speech: the rules of Whisper's timestamps and of Bark's two codebooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.decoding.processors.lengths import as_id_list
from descant.errors import InputError

__all__ = ["AlternatingCodebooksLogitsProcessor", "WhisperTimeStampLogitsProcessor"]


class WhisperTimeStampLogitsProcessor(LogitsProcessor):
    """Keeps Whisper's timestamps in order (Radford et al. 2022): in pairs, never back, one at the start.

    Timestamps are the tokens after `no_timestamps_token_id`, text the tokens before the end token. When
    all timestamps together are likelier than any other token, one of them is next. By hand, the tokens
    are read from `generate_config`, any object with the documented attributes.
    """

    def __init__(
        self,
        generate_config: Any,
        begin_index: int | None = None,
        _detect_timestamp_from_logprob: bool | None = None,
    ) -> None:
        name, told = "no_timestamps_token_id", _detect_timestamp_from_logprob
        self.no_timestamps_token_id = check_number(
            name, getattr(generate_config, name, None), 0, integer=True
        )
        latest = getattr(generate_config, "max_initial_timestamp_index", None)
        self.max_initial_timestamp_index = -1 if latest is None else latest
        ends = (getattr(generate_config, end, None) for end in ("eos_token_id", "bos_token_id"))
        self.eos_token_ids = next((as_id_list(end) for end in ends if end is not None), [])
        if not self.eos_token_ids:
            raise InputError("generate_config", "must have an `eos_token_id`", None)
        forced = getattr(generate_config, "forced_decoder_ids", None) or ()
        self.begin_index = check_number("begin_index", begin_index or len(forced) + 1, 0, integer=True)
        told = getattr(generate_config, "_detect_timestamp_from_logprob", True) if told is None else told
        self.detect_timestamps = int(told)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Where the timestamps are and how late the first may be."""
        latest = config.max_initial_timestamp_index
        return {
            "no_timestamps_token_id": config.no_timestamps_token_id,
            "max_initial_timestamp_index": -1 if latest is None else latest,
            "detect_timestamps": 1,
        }

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without what breaks the rules."""
        none = context.param("no_timestamps_token_id")
        begin = none + 1  # the first timestamp
        token = torch.arange(scores.shape[1], device=scores.device)  # [V]
        banned = (token == none) | _timestamp_violations(context, token, begin)
        latest = context.param("max_initial_timestamp_index")
        wrong_start = (token < begin) | ((latest >= 0) & (token > begin + latest))
        banned |= wrong_start & (context.length == context.param("begin_index"))
        kept = scores.masked_fill(banned, -torch.inf)
        # Whether a timestamp is next is a question to the law that the rules leave.
        law = kept.float().log_softmax(-1)
        stamps = torch.where(token >= begin, law, -torch.inf).logsumexp(-1, keepdim=True)
        text = torch.where(token >= begin, -torch.inf, law).amax(-1, keepdim=True)
        certain = (stamps > text) & (context.param("detect_timestamps") > 0)
        return kept.masked_fill(certain & (token < begin), -torch.inf)


def _timestamp_violations(context: Context, token: Tensor, begin: Tensor) -> Tensor:
    """Which tokens [V] break the pairs or go back in time after what each line has said [N, V]."""
    tokens = torch.nn.functional.pad(context.tokens, (0, 1))  # never empty
    start = context.param("begin_index")
    at = torch.arange(tokens.shape[1], device=tokens.device)
    stamp = (at >= start) & (at < context.length) & (tokens >= begin)  # [N, L + 1]

    def stamped(back: int) -> Tensor:
        return stamp.gather(1, (context.length - back).clamp(min=0)) & (context.length - back >= start)

    said = context.length - start
    alone = stamped(1) & (said >= 2) & ~stamped(2)  # a pair has begun
    paired = stamped(1) & ~alone
    newest = torch.where(stamp, at, -1).amax(1, keepdim=True)
    # The second of a pair may repeat the first; the next pair begins later.
    floor = tokens.gather(1, newest.clamp(min=0)) + torch.where(alone, 0, 1)
    back = (newest >= 0) & (token >= begin) & (token < floor)
    return back | (paired & (token >= begin)) | (alone & (token < context.param("eos_token_ids")[:, :1]))


class AlternatingCodebooksLogitsProcessor(LogitsProcessor):
    """Makes Bark take tokens of its two codebooks in turn, the first after `input_start_len` tokens.

    The vocabulary is `semantic_vocab_size` tokens that never come, the `codebook_size` tokens of the
    first codebook, then the second.
    """

    def __init__(self, input_start_len: int, semantic_vocab_size: int, codebook_size: int) -> None:
        self.input_start_len = check_number("input_start_len", input_start_len, 0, integer=True)
        self.semantic_vocab_size = check_number("semantic_vocab_size", semantic_vocab_size, 0, integer=True)
        self.codebook_size = check_number("codebook_size", codebook_size, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores of the codebook whose turn it is."""
        token = torch.arange(scores.shape[1], device=scores.device)
        first = context.param("semantic_vocab_size")
        second = first + context.param("codebook_size")
        turn = (context.length - context.param("input_start_len")) % 2 == 0
        kept = torch.where(turn, (token >= first) & (token < second), token >= second)
        return scores.masked_fill(~kept, -torch.inf)
