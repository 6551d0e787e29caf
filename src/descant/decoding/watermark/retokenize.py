"""Retokenization: the token sequences a text may originally have had.

A text that was cut, stripped or retyped may tokenize differently. Every additional tokenization is another
test, and the p-values of all are corrected for it. Since contexts are short, a tokenization that differs
only at its start adds few new inputs; it is tried only if these are worth the correction.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from descant.decoding.watermark.scores import WatermarkScheme

__all__ = ["Offsets", "Retokenization", "retokenizations", "tokenize"]

Offsets = tuple[tuple[int, int], ...]

# A marked token adds about 0.15 nats of evidence (green list, default bias), and a second tokenization costs
# log 2 = 0.69 nats: with fewer new inputs it could not pay off even if it were right.
_MIN_NEW_NGRAMS: Final = 5
_WORD: Final = re.compile(r"\S+(?=\s)")
# Replacements by word processors and web pages, character by character.
_TYPOGRAPHY: Final = str.maketrans("\u2018\u2019\u201c\u201d\u00a0", "''\"\" ")


@dataclass(frozen=True)
class Retokenization:
    """A tokenization: `ids`, of which the first `prompt_length` are not scored, after `context`."""

    ids: tuple[int, ...]
    prompt_length: int = 0
    context: tuple[int, ...] = ()
    offsets: Offsets | None = None  # of each token in the text, if the tokenizer provides them

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens before the first scored one."""
        return self.context + self.ids[: self.prompt_length]

    def last_prefix_ids(self, reach: int) -> tuple[int, ...]:
        """The last `reach` prefix tokens, or fewer if there are fewer."""
        return self.prefix_ids[max(0, len(self.prefix_ids) - reach) :]

    def scored_ngrams(self, width: int, reach: int) -> set[tuple[int, ...]]:
        """The n-grams a scheme scores, with `width` context tokens and `reach` prompt tokens."""
        run = self.last_prefix_ids(reach) + self.ids[self.prompt_length :]
        return {run[end - width : end + 1] for end in range(width, len(run))}


def tokenize(tokenizer: Any, text: str) -> tuple[tuple[int, ...], Offsets | None]:
    """Tokenize without special tokens; return the ids, and the character offsets if available."""
    is_fast = bool(getattr(tokenizer, "is_fast", False))
    encoding = tokenizer(
        text, add_special_tokens=False, **({"return_offsets_mapping": True} if is_fast else {})
    )
    ids = tuple(int(token) for token in encoding["input_ids"])
    if not is_fast:
        return ids, None
    return ids, tuple((int(begin), int(end)) for begin, end in encoding["offset_mapping"])


def retokenizations(
    tokenizer: Any, text: str, prompt: str | None, scheme: WatermarkScheme
) -> list[Retokenization]:
    """Return the tokenizations of a text that are worth their correction, the plain one first.

    Their number depends on the text and the scheme's context size, never on the key.
    """
    selected: list[Retokenization] = []
    known_ngrams: set[tuple[int, ...]] = set()
    for candidate in _candidates(tokenizer, text, prompt):
        ngrams = candidate.scored_ngrams(scheme.context_size, scheme.prompt_reach)
        if not selected or len(ngrams - known_ngrams) >= _MIN_NEW_NGRAMS:
            selected.append(candidate)
            known_ngrams |= ngrams
    return selected


def _candidates(tokenizer: Any, text: str, prompt: str | None) -> Iterator[Retokenization]:
    first = _tokenize_whole(tokenizer, text, prompt)
    yield first
    prompt_end = _prompt_end(text, prompt)
    continuation, prefix = text[prompt_end:], first.prefix_ids
    if prompt_end:  # the continuation alone, as it was generated
        yield replace(_tokenize_slice(tokenizer, continuation, prompt_end), context=prefix)
    if indent := len(continuation) - len(continuation.lstrip()):
        yield replace(_tokenize_slice(tokenizer, continuation[indent:], prompt_end + indent), context=prefix)
    elif continuation:
        yield replace(_tokenize_slice(tokenizer, " " + continuation, prompt_end - 1), context=prefix)
    for word in itertools.islice(
        _WORD.finditer(continuation), 2
    ):  # the text may start in the middle of a word
        yield _tokenize_slice(tokenizer, continuation[word.end() :], prompt_end + word.end())
    normalized, positions = _normalize_typography(text)
    if normalized != text:
        candidate = _tokenize_whole(
            tokenizer, normalized, None if prompt is None else _normalize_typography(prompt)[0]
        )
        yield _map_offsets(candidate, lambda index: positions[index])


def _tokenize_whole(tokenizer: Any, text: str, prompt: str | None) -> Retokenization:
    """Tokenize the text as it is. A prompt it starts with is not scored; any other prompt becomes context."""
    ids, offsets = tokenize(tokenizer, text)
    if not prompt:
        return Retokenization(ids, offsets=offsets)
    prompt_end = _prompt_end(text, prompt)
    if not prompt_end:
        return Retokenization(ids, context=tokenize(tokenizer, prompt)[0], offsets=offsets)
    if offsets is None:
        prompt_ids = tokenize(tokenizer, text[:prompt_end])[0]
        return Retokenization(
            prompt_ids + tokenize(tokenizer, text[prompt_end:])[0], prompt_length=len(prompt_ids)
        )
    prompt_length = sum(1 for begin, _ in offsets if begin < prompt_end)
    return Retokenization(ids, prompt_length=prompt_length, offsets=offsets)


def _tokenize_slice(tokenizer: Any, piece: str, begin: int) -> Retokenization:
    """Tokenize a slice of the text that starts at `begin`."""
    ids, offsets = tokenize(tokenizer, piece)
    return _map_offsets(Retokenization(ids, offsets=offsets), lambda index: max(0, index + begin))


def _map_offsets(tokens: Retokenization, to_original: Callable[[int], int]) -> Retokenization:
    """Map the offsets of a changed text back to the original text."""
    if tokens.offsets is None:
        return tokens
    return replace(
        tokens, offsets=tuple((to_original(begin), to_original(end)) for begin, end in tokens.offsets)
    )


def _prompt_end(text: str, prompt: str | None) -> int:
    """End of the prompt that the text starts with, ignoring surrounding white space; 0 if it does not."""
    stripped = (prompt or "").strip()
    begin = len(text) - len(text.lstrip())
    return begin + len(stripped) if stripped and text.startswith(stripped, begin) else 0


def _normalize_typography(text: str) -> tuple[str, list[int]]:
    """Return the text in plain typography, and the original position of each character and of the end."""
    positions = [
        index for index, char in enumerate(text) if not (char == "\r" and text.startswith("\n", index + 1))
    ]
    return "".join(text[index] for index in positions).translate(_TYPOGRAPHY), [*positions, len(text)]
