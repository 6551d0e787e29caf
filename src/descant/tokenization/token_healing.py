"""Token healing: a prompt's last tokens are taken off, and the model says their text again in its own way."""

from __future__ import annotations

import bisect
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from descant.tokenization.token_bytes import Vocabulary

__all__ = ["Spellings", "Tail"]

Array = np.ndarray[Any, np.dtype[Any]]


class Spellings:
    """The tokens of a vocabulary that stand for text, in the order of their bytes."""

    def __init__(self, vocabulary: Vocabulary, special: frozenset[int]) -> None:
        self.bytes = vocabulary.bytes  # of every token by id
        order = sorted((text, at) for at, text in enumerate(self.bytes) if text and at not in special)
        self._texts = [text for text, _ in order]
        self._ids = np.array([at for _, at in order], np.int64)
        self.plain = frozenset(self._ids.tolist())  # the tokens that are text
        self.longest = max(map(len, self._texts), default=0)

    @classmethod
    def of(cls, tokenizer: Any) -> Spellings:
        """Those of a tokenizer, made once for each."""
        vocabulary = Vocabulary.of(tokenizer)
        special = vocabulary.special | frozenset(getattr(tokenizer, "all_special_ids", ()))
        with _lock:
            known = _made.setdefault(vocabulary, {})
            if special not in known:
                known[special] = cls(vocabulary, special)
            return known[special]

    def beginning(self, text: bytes) -> Array:
        """The tokens whose bytes begin with these."""
        return self._ids[bisect.bisect_left(self._texts, text) : self._after(text)]

    def longer(self, text: bytes) -> bool:
        """Whether some token begins with these bytes and goes on."""
        return bisect.bisect_right(self._texts, text) < self._after(text)

    def _after(self, text: bytes) -> int:
        return bisect.bisect_right(self._texts, text + b"\xff" * self.longest)


_made: weakref.WeakKeyDictionary[Vocabulary, dict[frozenset[int], Spellings]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Tail:
    """The last tokens of a prompt, taken off it, whose text new tokens have to say again.

    What may follow is a token that says all that is left, and maybe more, or the token that stood there.
    Tokens that say another part of it agree with the text, too, but a model rates them by all that could
    come after them, most of which does not agree, and what comes of it is split as no tokenizer would.
    """

    def __init__(self, spellings: Spellings | None = None, tokens: Sequence[int] = ()) -> None:
        self.spellings = spellings
        self.tokens = list(tokens)
        self._allowed = functools.cache(self._found)

    @classmethod
    def of(cls, tokenizer: Any, ids: Sequence[int]) -> Tail:
        """What is taken off a prompt: as many last tokens as some longer token begins with the text of.

        Special tokens stay, and so does the first token: before it there is nothing to go by.
        """
        spellings = Spellings.of(tokenizer)
        text, most = b"", 0
        for count in range(1, len(ids)):
            token = int(ids[-count])
            if token not in spellings.plain:
                break
            text = spellings.bytes[token] + text
            if len(text) >= spellings.longest:
                break
            if spellings.longer(text):
                most = count
        return cls(spellings, [int(one) for one in ids[len(ids) - most :]])

    def __len__(self) -> int:
        """How many tokens were taken off: no more are needed to say their text again."""
        return len(self.tokens)

    @functools.cached_property
    def text(self) -> bytes:
        """What has to be said again."""
        return self._said(self.tokens)

    def allowed(self, new: Sequence[int]) -> Array | None:
        """The tokens that may follow these new ones; None for any, all being said."""
        said = len(new)
        # Whoever has left the way of the old tokens did so with one that said all the rest.
        return self._allowed(said) if said < len(self) and list(new) == self.tokens[:said] else None

    def closes(self, before: Sequence[int], new: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the last of the new tokens ends one of the strings after the text that was there before."""
        first, whole, last = self._said(before), self._said([*before, *new]), self._said(new[-1:])
        edge = max(len(first) + len(self.text), len(whole) - len(last))
        parts = [one.encode() for one in strings]
        return any(whole.find(part, max(edge - len(part) + 1, 0)) >= 0 for part in parts)

    def _found(self, said: int) -> Array:
        assert self.spellings is not None
        return np.append(self.spellings.beginning(self._said(self.tokens[said:])), self.tokens[said])

    def _said(self, tokens: Sequence[int]) -> bytes:
        texts = self.spellings.bytes if self.spellings is not None else []
        return b"".join([texts[one] for one in tokens if 0 <= one < len(texts)])
