"""Bounds of generation parameters, generous for use and small enough that a request cannot stall a server.

A table over the vocabulary is built for stop strings and banned phrases: it grows with their bytes times the
tokens that touch them. Stop tokens are compared in every step.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "MAX_PHRASES",
    "MAX_PHRASE_BYTES",
    "MAX_STOP_TOKENS",
    "MAX_TEXTS",
    "MAX_TEXT_BYTES",
    "texts_problem",
]

MAX_STOP_TOKENS: Final = 4_096  # of `stop_token_ids` and `eos_token_id`
MAX_TEXTS: Final = 256  # of `stop_strings` and `dry_sequence_breakers`
MAX_TEXT_BYTES: Final = 4_096  # of all their texts together, in UTF-8
MAX_PHRASES: Final = 2_048  # of `banned_phrases`, which are lists of words more often
MAX_PHRASE_BYTES: Final = 16_384


def texts_problem(texts: tuple[str, ...], most: int = MAX_TEXTS, size: int = MAX_TEXT_BYTES) -> str | None:
    """The bound that texts exceed, as the end of "must be ..."; None: they exceed none."""
    if len(texts) > most:
        return f"at most {most} texts, and these are {len(texts)}"
    given = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if given > size:
        return f"at most {size} bytes of text in all, and these are {given}"
    return None
