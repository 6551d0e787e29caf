"""The vocabulary of a tokenizer as grammar libraries take it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from descant.errors import InputError
from descant.tokenization.token_bytes import TokenBytes

__all__ = ["GrammarVocabulary"]


class GrammarVocabulary:
    """The text bytes of each token, and texts as tokens.

    Special tokens have no bytes, so that no grammar permits them: decoding would drop them from the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: list[bytes] = list(TokenBytes.from_tokenizer(tokenizer).without_special.bytes)
        if not any(self.tokens):
            raise InputError("tokenizer", "must have tokens with text", tokenizer)
        if all(self.tokens):
            self.tokens.append(b"")
        # A token that is never text, for libraries that need an end token.
        self.end_token = self.tokens.index(b"")
        try:  # no strong reference: what is compiled for a tokenizer must not keep it alive
            self._tokenizer: Any = weakref.ref(tokenizer)
        except TypeError:
            self._tokenizer = lambda: tokenizer

    @property
    def size(self) -> int:
        """The number of tokens, the end token included."""
        return len(self.tokens)

    def leading_text(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that is no text.

        Padding of drafts may be the end token of a library, and a model may have more tokens than these.
        """
        return list(takewhile(lambda token: 0 <= token < self.size and bool(self.tokens[token]), tokens))

    def clear_unused(self, masks: NDArray[Any], lines: Sequence[int]) -> None:
        """Clear the bits of `end_token` and of no token in some lines of masks [N, W]."""
        index = list(lines)
        masks[index, self.end_token // 32] &= np.uint32(~(1 << (self.end_token % 32)) & 0xFFFFFFFF)
        if self.size % 32:
            masks[index, self.size // 32] &= np.uint32((1 << (self.size % 32)) - 1)

    @cached_property
    def _token_by_bytes(self) -> dict[bytes, int]:
        return {text: token for token, text in reversed(list(enumerate(self.tokens))) if text}

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self.tokens))

    def encode(self, data: bytes) -> list[int]:
        """Tokens with exactly these bytes: the tokenizer's own, or else the longest that match."""
        text = data.decode("utf-8", "ignore")
        ids = self._encode_text(text) if text.encode() == data else []
        return ids if b"".join(self.tokens[token] for token in ids) == data else self._encode_longest(data)

    def _encode_text(self, text: str) -> list[int]:
        """The tokenizer's tokens of a text; none if it adds others, or cannot tell."""
        try:
            found = self._tokenizer().encode(text, add_special_tokens=False)
        except Exception:  # code of the user, or the tokenizer is gone
            return []
        ids = [int(token) for token in getattr(found, "ids", found)]
        return ids if len(self.leading_text(ids)) == len(ids) else []

    def _encode_longest(self, data: bytes) -> list[int]:
        """The longest token at each position; stops where none matches."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            for length in range(min(self._max_token_bytes, len(data) - start), 0, -1):
                token = self._token_by_bytes.get(data[start : start + length])
                if token is not None:
                    ids.append(token)
                    start += length
                    break
            else:
                break
        return ids
