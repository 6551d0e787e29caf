"""Phrases that must not be said: where one is under way, where one was completed, and where it began."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from descant.tokenization.stop_strings import StopStringMatcher
from descant.tokenization.token_bytes import TokenBytes

__all__ = ["PhraseMatcher"]


class PhraseMatcher:
    """Some phrases as their tokenizer spells them, across any tokens; special tokens say nothing."""

    def __init__(self, vocabulary: TokenBytes, strings: Sequence[str]) -> None:
        self.matcher = StopStringMatcher(vocabulary.without_special, strings)
        self._phrase_bytes = [one.encode() for one in self.matcher.strings]
        self._token_bytes = vocabulary.without_special.bytes

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, strings: Sequence[str]) -> PhraseMatcher:
        """The phrases of a request, made once while anybody uses them."""
        vocabulary, key = TokenBytes.from_tokenizer(tokenizer), tuple(sorted(set(strings)))
        with _lock:
            known = _matchers.setdefault(vocabulary, weakref.WeakValueDictionary())
            found = known.get(key)
            if found is None:
                found = known[key] = cls(vocabulary, key)
            return found

    def partial_tokens(self, state: int, tokens: Sequence[int]) -> int:
        """How many of the last of these tokens a phrase may have begun in, after which the state is this."""
        depth = int(self.matcher.matched_bytes[state])
        count = 0
        while depth > 0:
            count += 1
            depth -= len(self._bytes_of(tokens[-count]))
        return count

    def match_start(self, tokens: Sequence[int], skip: int = 0) -> int | None:
        """The token in which a phrase begins that the last one completes; of several, the latest.

        What begins in the first `skip` bytes is no matter.
        """
        texts = [self._bytes_of(one) for one in tokens]
        whole = b"".join(texts)
        edge = len(whole) - len(texts[-1])  # it ends beyond this
        found = [whole.rfind(text, max(edge - len(text) + 1, skip, 0)) for text in self._phrase_bytes]
        at = max(found)
        if at < 0:
            return None
        place = 0
        while at >= len(texts[place]):
            at -= len(texts[place])
            place += 1
        return place

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """How many bytes these tokens say."""
        return sum(len(self._bytes_of(one)) for one in tokens)

    def _bytes_of(self, token: int) -> bytes:
        return self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""


_matchers: weakref.WeakKeyDictionary[TokenBytes, weakref.WeakValueDictionary[tuple[str, ...], PhraseMatcher]]
_matchers = weakref.WeakKeyDictionary()
_lock = threading.Lock()
