"""A returned sequence as JSON values: its text, its number of tokens, why it ended, and its probabilities."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

from descant.core.records import Hypothesis, Logprobs
from descant.engine.request import Request
from descant.tokenization.detokenizer import IncrementalDetokenizer

__all__ = ["completion_record", "completion_text"]


def completion_record(tokenizer: Any, request: Request, hypothesis: Hypothesis) -> dict[str, Any]:
    """One returned sequence as JSON values."""
    ids = hypothesis.tokens.tolist()
    completion: dict[str, Any] = {
        "text": completion_text(tokenizer, request, ids),
        "tokens": len(ids),
        "finish_reason": hypothesis.reason,
    }
    if hypothesis.score is not None:
        completion["score"] = float(hypothesis.score)
    if hypothesis.logprobs is not None:
        completion["logprobs"] = _logprobs(tokenizer, ids, hypothesis.logprobs)
    return completion


def completion_text(tokenizer: Any, request: Request, ids: list[int]) -> str:
    """The text that a sequence adds to its prompt, as a stream would give it."""
    stream = IncrementalDetokenizer(
        tokenizer,
        prompt_ids=torch.as_tensor(request.prompt).tolist(),
        stop_strings=request.generation_config.stop_strings or (),
        skip_special_tokens=True,
    )
    return stream.put(ids) + stream.end()


def _logprobs(tokenizer: Any, ids: list[int], logprobs: Logprobs) -> list[dict[str, Any]]:
    """For each token its log-probabilities before and after the processors, and the likeliest tokens."""
    tables = (logprobs.raw, logprobs.processed, logprobs.top, logprobs.top_raw, logprobs.top_processed)
    lines = zip(ids, *(table.tolist() for table in tables), strict=True)
    return [
        {
            **_logprob(tokenizer, token, raw, processed),
            "top": [_logprob(tokenizer, *alternative) for alternative in zip(*best, strict=True)],
        }
        for token, raw, processed, *best in lines
    ]


def _logprob(tokenizer: Any, token: int, raw: float, processed: float) -> dict[str, Any]:
    # JSON has no infinity: a masked token has no log-probability.
    left = processed if isfinite(processed) else None
    return {"id": token, "token": tokenizer.decode([token]), "raw": raw, "processed": left}
