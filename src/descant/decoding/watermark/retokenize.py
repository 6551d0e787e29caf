"""Readings: the token sequences that a text may once have been.

A text that was cut, stripped or retyped does not always become its old tokens again. Each other reading that
is tried is another test, which every reading must then pay for. A mark's context is short, so a reading that
differs at its start only asks as many new questions as tokens differ; it is tried where these are worth it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from descant.decoding.watermark.schemes import WatermarkingConfig
from descant.decoding.watermark.scores import WatermarkScheme

__all__ = ["Offsets", "Retokenization", "prompt_reach", "retokenizations", "tokenize"]

Offsets = tuple[tuple[int, int], ...]

# A marked token is worth some 0.15 nats (a green list's at the default bias) and a second reading costs
# log 2 = 0.69: with fewer new questions than this it could not pay even if it were right.
_MIN_NEW_NGRAMS: Final = 5
_WORD: Final = re.compile(r"\S+(?=\s)")
# What word processors and web pages make of plain text, character for character.
_TYPOGRAPHY: Final = str.maketrans("\u2018\u2019\u201c\u201d\u00a0", "''\"\" ")


@dataclass(frozen=True)
class Retokenization:
    """A text as tokens: `ids`, the first `prompt` of which are not scored, and the `context` before them."""

    ids: tuple[int, ...]
    prompt_length: int = 0
    context: tuple[int, ...] = ()
    offsets: Offsets | None = None  # of each token in the text, where the tokenizer tells

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens before the first that is scored."""
        return self.context + self.ids[: self.prompt_length]

    def last_prefix_ids(self, reach: int) -> tuple[int, ...]:
        """The last `reach` of them, or as many as there are."""
        return self.prefix_ids[max(0, len(self.prefix_ids) - reach) :]

    def scored_ngrams(self, width: int, reach: int) -> set[tuple[int, ...]]:
        """What a mark is asked here that hangs on `width` tokens before a token, `reach` into a prompt."""
        run = self.last_prefix_ids(reach) + self.ids[self.prompt_length :]
        return {run[at - width : at + 1] for at in range(width, len(run))}


def prompt_reach(scheme: WatermarkScheme) -> int:
    """How many tokens of a prompt a mark hangs on: a green list's context may be there, the others' not."""
    return scheme.context_size if isinstance(scheme.settings, WatermarkingConfig) else 0


def tokenize(tokenizer: Any, text: str) -> tuple[tuple[int, ...], Offsets | None]:
    """A text's tokens without those a model wants about it, and where each stands in it if that is known."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    told = tokenizer(text, add_special_tokens=False, **({"return_offsets_mapping": True} if fast else {}))
    ids = tuple(int(one) for one in told["input_ids"])
    if not fast:
        return ids, None
    return ids, tuple((int(begin), int(end)) for begin, end in told["offset_mapping"])


def retokenizations(
    tokenizer: Any, text: str, prompt: str | None, scheme: WatermarkScheme
) -> list[Retokenization]:
    """The readings of a text that are worth their correction for a scheme, first the text as it stands.

    How many there are hangs on the text and on the scheme's width, never on the key.
    """
    kept: list[Retokenization] = []
    asked: set[tuple[int, ...]] = set()
    for reading in _candidates(tokenizer, text, prompt):
        questions = reading.scored_ngrams(scheme.context_size, prompt_reach(scheme))
        if not kept or len(questions - asked) >= _MIN_NEW_NGRAMS:
            kept.append(reading)
            asked |= questions
    return kept


def _candidates(tokenizer: Any, text: str, prompt: str | None) -> Iterator[Retokenization]:
    first = _tokenize_whole(tokenizer, text, prompt)
    yield first
    border = _prompt_end(text, prompt)
    rest, known = text[border:], first.prefix_ids
    if border:  # the continuation by itself, as it was before it was put behind the prompt
        yield replace(_tokenize_slice(tokenizer, rest, border), context=known)
    if space := len(rest) - len(rest.lstrip()):
        yield replace(_tokenize_slice(tokenizer, rest[space:], border + space), context=known)
    elif rest:
        yield replace(_tokenize_slice(tokenizer, " " + rest, border - 1), context=known)
    for word in itertools.islice(_WORD.finditer(rest), 2):  # the start may be half a word
        yield _tokenize_slice(tokenizer, rest[word.end() :], border + word.end())
    typed, places = _normalize_typography(text)
    if typed != text:
        reading = _tokenize_whole(
            tokenizer, typed, None if prompt is None else _normalize_typography(prompt)[0]
        )
        yield _map_offsets(reading, lambda at: places[at])


def _tokenize_whole(tokenizer: Any, text: str, prompt: str | None) -> Retokenization:
    """The text as it stands: a prompt it begins with is not scored, one that it lacks comes before it."""
    ids, offsets = tokenize(tokenizer, text)
    if not prompt:
        return Retokenization(ids, offsets=offsets)
    border = _prompt_end(text, prompt)
    if not border:
        return Retokenization(ids, context=tokenize(tokenizer, prompt)[0], offsets=offsets)
    if offsets is None:
        known = tokenize(tokenizer, text[:border])[0]
        return Retokenization(known + tokenize(tokenizer, text[border:])[0], prompt_length=len(known))
    inside = sum(1 for begin, _ in offsets if begin < border)
    return Retokenization(ids, prompt_length=inside, offsets=offsets)


def _tokenize_slice(tokenizer: Any, piece: str, begin: int) -> Retokenization:
    """A piece of the text that begins there."""
    ids, offsets = tokenize(tokenizer, piece)
    return _map_offsets(Retokenization(ids, offsets=offsets), lambda at: max(0, at + begin))


def _map_offsets(reading: Retokenization, place: Callable[[int], int]) -> Retokenization:
    """The reading of a changed text, its offsets those in the text itself."""
    if reading.offsets is None:
        return reading
    return replace(reading, offsets=tuple((place(begin), place(end)) for begin, end in reading.offsets))


def _prompt_end(text: str, prompt: str | None) -> int:
    """Where the prompt that a text begins with ends, white space about it left aside; 0: it does not."""
    bare = (prompt or "").strip()
    begin = len(text) - len(text.lstrip())
    return begin + len(bare) if bare and text.startswith(bare, begin) else 0


def _normalize_typography(text: str) -> tuple[str, list[int]]:
    """The text as it is typed, and where in the text each of its characters (and its end) stands."""
    places = [at for at, one in enumerate(text) if not (one == "\r" and text.startswith("\n", at + 1))]
    return "".join(text[at] for at in places).translate(_TYPOGRAPHY), [*places, len(text)]
