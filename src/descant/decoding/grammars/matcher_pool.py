"""The matchers of a request: what may follow any of its texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from descant.decoding.grammars.backend import CompiledGrammar, GrammarMatcher

__all__ = ["MatcherPool", "fill_masks"]

Array = NDArray[Any]

_MIN_MATCHERS: Final = 4  # that stay at any time


class _Position(NamedTuple):
    """A matcher, and the tokens it has accepted."""

    matcher: GrammarMatcher
    tokens: Array  # [T]


class MatcherPool:
    """A few matchers of one grammar, each after some tokens, which answer for any text.

    What may follow is a function of a row's new tokens. For a text, the nearest matcher is rolled back to
    what both have in common and accepts the rest. So forks, drafts, rejections and rows that take tokens back
    need no bookkeeping.
    """

    def __init__(self, grammar: CompiledGrammar, end_token_ids: Sequence[int]) -> None:
        self.grammar = grammar
        self.end_token_ids = np.array(sorted(set(end_token_ids)), dtype=np.int64)
        self.failure: str | None = None  # the bound of the library that a text has exceeded
        self._positions: dict[bytes, _Position] = {}  # by their tokens, the least recently used first

    def move(self, text: Array, busy: Collection[GrammarMatcher] = ()) -> tuple[GrammarMatcher | None, bool]:
        """A matcher after a text, and whether the text is in the language so far.

        A `busy` matcher stays where it is. None: the text continues that of a busy one, which then serves
        both in turn, as for a draft and the next.
        """
        key, common = self._nearest(text)
        if key is None:
            matcher, tokens = self.grammar.new_matcher(), text[:0]
        else:
            matcher, tokens = self._positions[key]
            if matcher not in busy:
                del self._positions[key]
            elif common == len(tokens):
                return None, True
            else:
                matcher = matcher.copy()
        matcher.rollback(len(tokens) - common)
        rest = text[common:].tolist()
        accepted = matcher.accept(rest) if rest else 0
        if self.note_failure(matcher):
            return matcher, False
        tokens = text[: common + accepted].copy()
        self._positions[tokens.tobytes()] = _Position(matcher, tokens)
        return matcher, accepted == len(rest)

    def note_failure(self, matcher: GrammarMatcher) -> bool:
        """Whether a matcher cannot go on; it is not used again."""
        failure = matcher.failure()
        if failure is None:
            return False
        self.failure = failure
        self._positions = {key: one for key, one in self._positions.items() if one.matcher is not matcher}
        return True

    def trim(self, num_lines: int) -> None:
        """Drop matchers that the last step of this many lines has not used."""
        excess = len(self._positions) - max(_MIN_MATCHERS, 2 * num_lines)
        for key in list(self._positions)[: max(excess, 0)]:
            del self._positions[key]

    def _nearest(self, text: Array) -> tuple[bytes | None, int]:
        """The key of the matcher that has most in common with a text, and how many tokens that is."""
        for length in (len(text), len(text) - 1):  # nearly always
            key = text[: max(length, 0)].tobytes()
            if key in self._positions:
                return key, max(length, 0)
        best, most = None, 0
        for key, (_, tokens) in self._positions.items():
            common = _common_length(tokens, text)
            if best is None or common > most or (common == most and len(key) < len(best)):
                best, most = key, common
        return best, most


def fill_masks(pools: Sequence[MatcherPool], texts: Sequence[Array], masks: Array) -> None:
    """Set each line of `masks` [N, W] to the tokens that may follow its text, its end tokens included.

    All pools have the same backend. Nothing may follow a text that is not in the language, as that of a wrong
    draft, or one at which a bound of the library is exceeded: then `MatcherPool.failure` says which.
    """
    waiting: dict[MatcherPool, list[int]] = {}
    first: dict[tuple[MatcherPool, bytes], int] = {}  # the first line with a text: others have its mask
    same: list[tuple[int, int]] = []
    for line, (pool, text) in enumerate(zip(pools, texts, strict=True)):
        source = first.setdefault((pool, text.tobytes()), line)
        if source == line:
            waiting.setdefault(pool, []).append(line)
        else:
            same.append((line, source))
    counts = {pool: len(lines) for pool, lines in waiting.items()}
    while waiting:
        busy: dict[GrammarMatcher, int] = {}  # the line of each matcher that is filled in this round
        for pool, lines in list(waiting.items()):
            later = [line for line in lines if not _place(pool, texts[line], line, busy, masks)]
            if later:
                waiting[pool] = later
            else:
                del waiting[pool]
        if busy:
            pools[0].grammar.backend.fill_masks(list(busy), masks, list(busy.values()))
            for matcher, line in busy.items():
                if pools[line].note_failure(matcher):
                    masks[line] = 0
                else:
                    _set_end_tokens(masks[line], pools[line].end_token_ids, matcher.is_complete())
    for pool, count in counts.items():
        pool.trim(count)
    for line, source in same:
        masks[line] = masks[source]


def _place(pool: MatcherPool, text: Array, line: int, busy: dict[GrammarMatcher, int], masks: Array) -> bool:
    """Move a matcher to the text of a line, to be filled in this round; False: it waits for the next one."""
    matcher, is_valid = pool.move(text, busy)
    if matcher is None:
        return False
    if is_valid:
        busy[matcher] = line
    else:
        masks[line] = 0
    return True


def _set_end_tokens(mask: Array, end_token_ids: Array, is_complete: bool) -> None:
    """Permit the end tokens where the text is complete, and forbid them elsewhere."""
    ids = end_token_ids[end_token_ids < len(mask) * 32]
    bits = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
    words = ids // 32
    if is_complete:
        np.bitwise_or.at(mask, words, bits)
    else:
        np.bitwise_and.at(mask, words, ~bits)


def _common_length(first: Array, second: Array) -> int:
    """How many tokens two texts have in common at their beginning."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
