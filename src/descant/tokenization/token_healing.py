"""Token healing: a prompt's last tokens are taken off, and the model says their text again in its own way."""

from __future__ import annotations

import bisect
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from descant.tokenization.token_bytes import TokenBytes

__all__ = ["HealedSuffix", "TokenPrefixIndex"]

Array = np.ndarray[Any, np.dtype[Any]]


class TokenPrefixIndex:
    """The tokens of a vocabulary that stand for text, in the order of their bytes."""

    def __init__(self, vocabulary: TokenBytes, special: frozenset[int]) -> None:
        self.token_bytes = vocabulary.bytes  # of every token by id
        order = sorted((text, at) for at, text in enumerate(self.token_bytes) if text and at not in special)
        self._sorted_bytes = [text for text, _ in order]
        self._sorted_ids = np.array([at for _, at in order], np.int64)
        self.text_ids = frozenset(self._sorted_ids.tolist())  # the tokens that are text
        self.max_bytes = max(map(len, self._sorted_bytes), default=0)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenPrefixIndex:
        """Those of a tokenizer, made once for each."""
        vocabulary = TokenBytes.from_tokenizer(tokenizer)
        special = vocabulary.special_ids | frozenset(getattr(tokenizer, "all_special_ids", ()))
        with _lock:
            known = _indexes.setdefault(vocabulary, {})
            if special not in known:
                known[special] = cls(vocabulary, special)
            return known[special]

    def ids_with_prefix(self, text: bytes) -> Array:
        """The tokens whose bytes begin with these."""
        return self._sorted_ids[bisect.bisect_left(self._sorted_bytes, text) : self._prefix_end(text)]

    def has_longer_token(self, text: bytes) -> bool:
        """Whether some token begins with these bytes and goes on."""
        return bisect.bisect_right(self._sorted_bytes, text) < self._prefix_end(text)

    def _prefix_end(self, text: bytes) -> int:
        return bisect.bisect_right(self._sorted_bytes, text + b"\xff" * self.max_bytes)


_indexes: weakref.WeakKeyDictionary[TokenBytes, dict[frozenset[int], TokenPrefixIndex]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


class HealedSuffix:
    """The last tokens of a prompt, taken off it, whose text new tokens have to say again.

    What may follow is a token that says all that is left, and maybe more, or the token that stood there.
    Tokens that say another part of it agree with the text, too, but a model rates them by all that could
    come after them, most of which does not agree, and what comes of it is split as no tokenizer would.
    """

    def __init__(self, spellings: TokenPrefixIndex | None = None, tokens: Sequence[int] = ()) -> None:
        self.prefix_index = spellings
        self.tokens = list(tokens)
        self._allowed_cache = functools.cache(self._compute_allowed)

    @classmethod
    def from_prompt(cls, tokenizer: Any, ids: Sequence[int]) -> HealedSuffix:
        """What is taken off a prompt: as many last tokens as some longer token begins with the text of.

        Special tokens stay, and so does the first token: before it there is nothing to go by.
        """
        spellings = TokenPrefixIndex.from_tokenizer(tokenizer)
        text, most = b"", 0
        for count in range(1, len(ids)):
            token = int(ids[-count])
            if token not in spellings.text_ids:
                break
            text = spellings.token_bytes[token] + text
            if len(text) >= spellings.max_bytes:
                break
            if spellings.has_longer_token(text):
                most = count
        return cls(spellings, [int(one) for one in ids[len(ids) - most :]])

    def __len__(self) -> int:
        """How many tokens were taken off: no more are needed to say their text again."""
        return len(self.tokens)

    @functools.cached_property
    def text(self) -> bytes:
        """What has to be said again."""
        return self._bytes_of(self.tokens)

    def allowed_ids(self, new: Sequence[int]) -> Array | None:
        """The tokens that may follow these new ones; None for any, all being said."""
        said = len(new)
        # Whoever has left the way of the old tokens did so with one that said all the rest.
        return self._allowed_cache(said) if said < len(self) and list(new) == self.tokens[:said] else None

    def completes_string(self, before: Sequence[int], new: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the last of the new tokens ends one of the strings after the text that was there before."""
        first, whole, last = self._bytes_of(before), self._bytes_of([*before, *new]), self._bytes_of(new[-1:])
        edge = max(len(first) + len(self.text), len(whole) - len(last))
        parts = [one.encode() for one in strings]
        return any(whole.find(part, max(edge - len(part) + 1, 0)) >= 0 for part in parts)

    def _compute_allowed(self, said: int) -> Array:
        assert self.prefix_index is not None
        return np.append(
            self.prefix_index.ids_with_prefix(self._bytes_of(self.tokens[said:])), self.tokens[said]
        )

    def _bytes_of(self, tokens: Sequence[int]) -> bytes:
        texts = self.prefix_index.token_bytes if self.prefix_index is not None else []
        return b"".join([texts[one] for one in tokens if 0 <= one < len(texts)])
