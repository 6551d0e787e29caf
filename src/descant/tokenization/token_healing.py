"""Token healing: the last tokens of a prompt are removed, and the model generates their text again."""

from __future__ import annotations

import bisect
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from descant.tokenization.token_bytes import TokenBytes


class TokenPrefixIndex:
    """The text tokens of a vocabulary, sorted by their bytes for prefix search."""

    def __init__(self, vocabulary: TokenBytes, special: frozenset[int]) -> None:
        self.token_bytes = vocabulary.bytes  # of every token by id
        order = sorted(
            (text, id_) for id_, text in enumerate(self.token_bytes) if text and id_ not in special
        )
        self._sorted_bytes = [text for text, _ in order]
        self._sorted_ids = np.array([id_ for _, id_ in order], np.int64)
        self.text_ids = frozenset(self._sorted_ids.tolist())
        self.max_bytes = max(map(len, self._sorted_bytes), default=0)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenPrefixIndex:
        """The index of a tokenizer, cached."""
        vocabulary = TokenBytes.from_tokenizer(tokenizer)
        special = vocabulary.special_ids | frozenset(getattr(tokenizer, "all_special_ids", ()))
        with _lock:
            indexes = _indexes.setdefault(vocabulary, {})
            if special not in indexes:
                indexes[special] = cls(vocabulary, special)
            return indexes[special]

    def ids_with_prefix(self, text: bytes) -> NDArray[Any]:
        """The tokens whose bytes start with `text`."""
        return self._sorted_ids[bisect.bisect_left(self._sorted_bytes, text) : self._prefix_end(text)]

    def has_longer_token(self, text: bytes) -> bool:
        """Whether some token starts with `text` and is longer."""
        return bisect.bisect_right(self._sorted_bytes, text) < self._prefix_end(text)

    def _prefix_end(self, text: bytes) -> int:
        return bisect.bisect_right(self._sorted_bytes, text + b"\xff" * self.max_bytes)


_indexes: weakref.WeakKeyDictionary[TokenBytes, dict[frozenset[int], TokenPrefixIndex]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


class HealedSuffix:
    """The last tokens that were removed from a prompt, and whose text must be generated again.

    Allowed next is a token that covers all of the remaining text, or the removed token itself. Tokens that
    cover a part of it are excluded: their probability includes continuations that do not match the text, and
    the result would be a tokenization that no tokenizer produces.
    """

    def __init__(self, prefix_index: TokenPrefixIndex | None = None, tokens: Sequence[int] = ()) -> None:
        self.prefix_index = prefix_index
        self.tokens = list(tokens)
        self._allowed_cache = functools.cache(self._compute_allowed)

    @classmethod
    def from_prompt(cls, tokenizer: Any, ids: Sequence[int]) -> HealedSuffix:
        """The suffix to remove from a prompt: the most tokens whose text some longer token starts with.

        Special tokens and the first token are not removed.
        """
        prefix_index = TokenPrefixIndex.from_tokenizer(tokenizer)
        text, num_removed = b"", 0
        for count in range(1, len(ids)):
            token = int(ids[-count])
            if token not in prefix_index.text_ids:
                break
            text = prefix_index.token_bytes[token] + text
            if len(text) >= prefix_index.max_bytes:
                break
            if prefix_index.has_longer_token(text):
                num_removed = count
        return cls(prefix_index, [int(token) for token in ids[len(ids) - num_removed :]])

    def __len__(self) -> int:
        """The number of removed tokens; at most as many are needed to generate their text."""
        return len(self.tokens)

    @functools.cached_property
    def text(self) -> bytes:
        """The text to generate again."""
        return self._bytes_of(self.tokens)

    def allowed_ids(self, new: Sequence[int]) -> NDArray[Any] | None:
        """The tokens allowed after these new ones; None for any, once the text is complete."""
        count = len(new)
        # A token that differs from the removed one covers all of the remaining text.
        return self._allowed_cache(count) if count < len(self) and list(new) == self.tokens[:count] else None

    def completes_string(self, before: Sequence[int], new: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the last of the new tokens completes one of the strings beyond the prompt's own text."""
        prompt, text, last = self._bytes_of(before), self._bytes_of([*before, *new]), self._bytes_of(new[-1:])
        start = max(len(prompt) + len(self.text), len(text) - len(last))
        encoded = [string.encode() for string in strings]
        return any(text.find(string, max(start - len(string) + 1, 0)) >= 0 for string in encoded)

    def _compute_allowed(self, count: int) -> NDArray[Any]:
        assert self.prefix_index is not None
        covering = self.prefix_index.ids_with_prefix(self._bytes_of(self.tokens[count:]))
        return np.append(covering, self.tokens[count])

    def _bytes_of(self, tokens: Sequence[int]) -> bytes:
        pieces = self.prefix_index.token_bytes if self.prefix_index is not None else []
        return b"".join([pieces[token] for token in tokens if 0 <= token < len(pieces)])
