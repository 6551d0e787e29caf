"""Matching of banned phrases: partial matches, complete matches, and where a match starts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from descant.tokenization.stop_strings import StopStringMatcher
from descant.tokenization.token_bytes import TokenBytes

__all__ = ["PhraseMatcher"]


class PhraseMatcher:
    """Matches phrases across any token boundaries; special tokens have no text."""

    def __init__(self, vocabulary: TokenBytes, strings: Sequence[str]) -> None:
        self.matcher = StopStringMatcher(vocabulary.without_special, strings)
        self._phrase_bytes = [string.encode() for string in self.matcher.strings]
        self._token_bytes = vocabulary.without_special.bytes

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, strings: Sequence[str]) -> PhraseMatcher:
        """The matcher of a tokenizer and its phrases, cached while in use."""
        vocabulary, key = TokenBytes.from_tokenizer(tokenizer), tuple(sorted(set(strings)))
        with _lock:
            matchers = _matchers.setdefault(vocabulary, weakref.WeakValueDictionary())
            matcher = matchers.get(key)
            if matcher is None:
                matcher = matchers[key] = cls(vocabulary, key)
            return matcher

    def partial_tokens(self, state: int, tokens: Sequence[int]) -> int:
        """The number of last tokens that a partial match in this state covers."""
        depth = int(self.matcher.matched_bytes[state])
        count = 0
        while depth > 0:
            count += 1
            depth -= len(self._bytes_of(tokens[-count]))
        return count

    def match_start(self, tokens: Sequence[int], skip: int = 0) -> int | None:
        """The index of the token where a phrase starts that the last token completes; the latest of several.

        Matches that start in the first `skip` bytes are ignored.
        """
        pieces = [self._bytes_of(token) for token in tokens]
        text = b"".join(pieces)
        last_start = len(text) - len(pieces[-1])  # a match must end beyond this
        offset = max(
            text.rfind(phrase, max(last_start - len(phrase) + 1, skip, 0)) for phrase in self._phrase_bytes
        )
        if offset < 0:
            return None
        index = 0
        while offset >= len(pieces[index]):
            offset -= len(pieces[index])
            index += 1
        return index

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """The number of bytes of these tokens."""
        return sum(len(self._bytes_of(token)) for token in tokens)

    def _bytes_of(self, token: int) -> bytes:
        return self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""


_matchers: weakref.WeakKeyDictionary[TokenBytes, weakref.WeakValueDictionary[tuple[str, ...], PhraseMatcher]]
_matchers = weakref.WeakKeyDictionary()
_lock = threading.Lock()
