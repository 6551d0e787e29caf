"""The answer in a completion: the last match of a regular expression."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any, Final

from descant.errors import InputError

__all__ = ["MAX_SEARCHED_CHARS", "AnswerPattern"]

MAX_SEARCHED_CHARS: Final = 2048  # of the end of a text, where the last match is
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_ALTERNATIVES: Final = ("BRANCH", "GROUPREF_EXISTS")


class AnswerPattern:
    """Takes the answer out of a text: group 1 of the last match, or the whole match without a group.

    Only the last `MAX_SEARCHED_CHARS` characters are searched: the time of Python's regular expressions may
    grow with a power of the text's length. It grows exponentially where a repeated group matches one text in
    several ways, so a repeated group with a repetition or alternatives in it is refused.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._regex = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError("pattern", f"must be a regular expression ({error})", pattern) from None
        if self._regex.groups > 1:
            must, advice = "must have at most one group", "write (?:...) for groups that are not the answer"
            raise InputError("pattern", must, pattern, advice)
        # The parser of `re` has no public name; a parser of our own would have to follow its every change.
        if _has_ambiguous_repeat(importlib.import_module("re._parser").parse(pattern), is_repeated=False):
            must = "must have no repeated group with a repetition or alternatives in it"
            raise InputError("pattern", must, pattern, "repeat a set of characters, as in [0-9,]+")

    def find(self, text: str) -> str | None:
        """The answer without the white space around it; None: there is none, or it is blank."""
        answer = None
        for match in self._regex.finditer(text, max(len(text) - MAX_SEARCHED_CHARS, 0)):
            found = match.group(self._regex.groups)  # 0 is the whole match
            if found is not None and found.strip():
                answer = found.strip()
        return answer


def _has_ambiguous_repeat(parsed: Iterable[tuple[Any, Any]], is_repeated: bool) -> bool:
    """Whether a parsed pattern has a repetition or alternatives in what is repeated."""
    for operation, argument in parsed:
        name, is_inner_repeated = str(operation), is_repeated
        if name in _ALTERNATIVES and is_repeated:
            return True
        if name in _REPEATS:
            low, high, _ = argument
            if is_repeated and low != high:
                return True
            is_inner_repeated = is_repeated or high > 1
        if any(_has_ambiguous_repeat(inner, is_inner_repeated) for inner in _inner_patterns(name, argument)):
            return True
    return False


def _inner_patterns(name: str, argument: Any) -> list[Any]:
    """The parsed patterns inside of one operation."""
    if name in _REPEATS or name == "SUBPATTERN":
        return [argument[-1]]
    if name in ("ASSERT", "ASSERT_NOT"):
        return [argument[1]]
    if name == "BRANCH":
        return list(argument[1])
    if name == "GROUPREF_EXISTS":
        return [one for one in argument[1:] if one is not None]
    return [argument] if name == "ATOMIC_GROUP" else []
