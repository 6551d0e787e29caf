"""The matchers of a request: what may follow any of its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from descant.decoding.grammars.backend import CompiledGrammar, GrammarMatcher

__all__ = ["MatcherPool", "fill_masks"]

Array = NDArray[Any]

_MIN_MATCHERS: Final = 4  # that stay at any time
_ALL_BITS: Final = np.uint32(0xFFFFFFFF)


@dataclass(eq=False)
class _Position:
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
        self._positions: list[_Position] = []  # the least recently used first

    def move(self, text: Array, busy: Sequence[GrammarMatcher] = ()) -> tuple[GrammarMatcher | None, bool]:
        """A matcher after a text, and whether the text is in the language so far.

        A `busy` matcher stays where it is. None: the text continues that of a busy one, which then serves
        both in turn, as for a draft and the next.
        """
        position, common = self._nearest(text)
        if position is None:
            position = _Position(self.grammar.new_matcher(), text[:0])
        elif position.matcher not in busy:
            self._positions.remove(position)
        elif common == len(position.tokens):
            return None, True
        else:
            position = _Position(position.matcher.copy(), position.tokens)
        self._positions.append(position)
        matcher = position.matcher
        matcher.rollback(len(position.tokens) - common)
        rest = text[common:].tolist()
        accepted = matcher.accept(rest) if rest else 0
        position.tokens = text[: common + accepted].copy()
        return matcher, accepted == len(rest)

    def trim(self, num_lines: int) -> None:
        """Drop matchers that the last step of this many lines has not used."""
        del self._positions[: -max(_MIN_MATCHERS, 2 * num_lines)]

    def _nearest(self, text: Array) -> tuple[_Position | None, int]:
        """The matcher that has most in common with a text, and how many tokens that is."""
        best, most = None, 0
        for one in self._positions:
            common = _common_length(one.tokens, text)
            if best is None or common > most or (common == most and len(one.tokens) < len(best.tokens)):
                best, most = one, common
        return best, most


def fill_masks(pools: Sequence[MatcherPool], texts: Sequence[Array], masks: Array) -> None:
    """Set each line of `masks` [N, W] to the tokens that may follow its text, its end tokens included.

    All pools have the same backend. A line whose text is not in the language permits everything: it follows a
    draft that is rejected, or is padding.
    """
    waiting: dict[MatcherPool, list[int]] = {}
    for line, pool in enumerate(pools):
        waiting.setdefault(pool, []).append(line)
    counts = {pool: len(lines) for pool, lines in waiting.items()}
    while waiting:
        matchers: list[GrammarMatcher] = []
        lines: list[int] = []
        for pool, pool_lines in list(waiting.items()):
            busy: list[GrammarMatcher] = []
            later: list[int] = []
            for line in pool_lines:
                matcher, is_valid = pool.move(texts[line], busy)
                if matcher is None:
                    later.append(line)
                elif is_valid:
                    busy.append(matcher)
                    lines.append(line)
                else:
                    masks[line] = _ALL_BITS
            matchers += busy
            if later:
                waiting[pool] = later
            else:
                del waiting[pool]
                pool.trim(counts[pool])
        if matchers:
            pools[lines[0]].grammar.backend.fill_masks(matchers, masks, lines)
            for matcher, line in zip(matchers, lines, strict=True):
                _set_end_tokens(masks[line], pools[line].end_token_ids, matcher.is_complete())


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
