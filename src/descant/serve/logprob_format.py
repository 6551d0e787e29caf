"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from descant.engine.events import TokenLogprobs
from descant.serve.served_model import ServedModel

__all__ = ["CompletionLogprobs", "chat_logprobs"]

_LEAST: Final = -9999.0  # JSON has no infinity; OpenAI's API writes this number


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else _LEAST


def chat_logprobs(
    model: ServedModel, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """The entries of `logprobs.content`: of the model itself, before temperature and processors."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = model.token_text(token), list(model.token_data(token))
        return {"token": text, "logprob": _finite(logprob), "bytes": data}

    return [
        {
            **entry(token, one.raw),
            "top_logprobs": [entry(other, raw) for other, raw, _ in one.top],
        }
        for token, one in zip(tokens, logprobs, strict=True)
    ]


@dataclass
class CompletionLogprobs:
    """The `logprobs` of a text completion, whose offsets count from the beginning of its text."""

    model: ServedModel
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    # A character may have several tokens; it counts with the last of them.
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("ignore")
    )

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token; the first of a prompt has no log-probability."""
        text = self.model.token_text(token)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        if token not in self.model.token_bytes.special_ids:  # which the text leaves out
            self.offset += len(self.characters.decode(self.model.token_data(token)))
        if logprobs is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(_finite(logprobs.raw))
        # Tokens with the same text: the first is the more probable.
        top: dict[str, float] = {}
        for other, raw, _ in logprobs.top:
            top.setdefault(self.model.token_text(other), _finite(raw))
        top.setdefault(text, _finite(logprobs.raw))
        self.top_logprobs.append(top)

    def take(self) -> dict[str, Any]:
        """The entries so far as JSON values; further ones begin anew behind them."""
        data = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return data
