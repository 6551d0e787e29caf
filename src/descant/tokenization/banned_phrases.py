"""Phrases that must not be said: where one is under way, where one was completed, and where it began."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from descant.tokenization.stop_strings import StopTable
from descant.tokenization.token_bytes import Vocabulary

__all__ = ["Phrases"]


class Phrases:
    """Some phrases as their tokenizer spells them, across any tokens; special tokens say nothing."""

    def __init__(self, vocabulary: Vocabulary, strings: Sequence[str]) -> None:
        self.table = StopTable(vocabulary.plain, strings)
        self._texts = [one.encode() for one in self.table.strings]
        self._bytes = vocabulary.plain.bytes

    @classmethod
    def of(cls, tokenizer: Any, strings: Sequence[str]) -> Phrases:
        """The phrases of a request, made once while anybody uses them."""
        vocabulary, key = Vocabulary.of(tokenizer), tuple(sorted(set(strings)))
        with _lock:
            known = _made.setdefault(vocabulary, weakref.WeakValueDictionary())
            found = known.get(key)
            if found is None:
                found = known[key] = cls(vocabulary, key)
            return found

    def under_way(self, state: int, tokens: Sequence[int]) -> int:
        """How many of the last of these tokens a phrase may have begun in, after which the state is this."""
        depth = int(self.table.depth[state])
        count = 0
        while depth > 0:
            count += 1
            depth -= len(self._said(tokens[-count]))
        return count

    def began(self, tokens: Sequence[int], skip: int = 0) -> int | None:
        """The token in which a phrase begins that the last one completes; of several, the latest.

        What begins in the first `skip` bytes is no matter.
        """
        texts = [self._said(one) for one in tokens]
        whole = b"".join(texts)
        edge = len(whole) - len(texts[-1])  # it ends beyond this
        found = [whole.rfind(text, max(edge - len(text) + 1, skip, 0)) for text in self._texts]
        at = max(found)
        if at < 0:
            return None
        place = 0
        while at >= len(texts[place]):
            at -= len(texts[place])
            place += 1
        return place

    def size(self, tokens: Sequence[int]) -> int:
        """How many bytes these tokens say."""
        return sum(len(self._said(one)) for one in tokens)

    def _said(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""


_made: weakref.WeakKeyDictionary[Vocabulary, weakref.WeakValueDictionary[tuple[str, ...], Phrases]]
_made = weakref.WeakKeyDictionary()
_lock = threading.Lock()
