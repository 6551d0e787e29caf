"""Differences from transformers that are known: each by name, with its reason and when it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tools.fuzz.cases import Ask, Case
from tools.fuzz.runs import Result

__all__ = ["EXPLAINED", "explanation"]

Holds = Callable[[Case, Ask, Result | Exception, Result], bool]


class Explained(NamedTuple):
    """A known difference: on which side, why, and the requests that have it."""

    oracle: str
    why: str
    holds: Holds


def _raised(text: str) -> Holds:
    """Whether the other side raised an error with this text."""
    return lambda case, ask, expected, found: isinstance(expected, Exception) and text in str(expected)  # noqa: ARG005


def _met(ask: Ask, tokens: Sequence[int]) -> tuple[int, int]:
    """How many forced words a sequence holds, and how many of their tokens, a begun word at its end too."""
    text = list(tokens)
    words = steps = 0
    for word in ask.fields["force_words_ids"]:
        choices = [word] if isinstance(word[0], int) else word
        whole = [len(one) for one in choices if _holds(text, list(one))]
        ends = [size for one in choices for size in range(1, len(one)) if text[-size:] == list(one[:size])]
        words += bool(whole)
        steps += max(whole or ends, default=0)
    return words, steps


def _holds(text: list[int], part: list[int]) -> bool:
    return any(text[start : start + len(part)] == part for start in range(len(text)))


def _unmet(case: Case, ask: Ask, expected: Result | Exception, found: Result) -> bool:  # noqa: ARG001
    """Whether the first sequence that differs meets more of the constraints here than there."""
    if isinstance(expected, Exception) or "force_words_ids" not in ask.fields:
        return False
    for theirs, ours in zip(expected.tokens, found.tokens, strict=True):
        if theirs[: len(ours)] != ours:
            return _met(ask, ours) > _met(ask, theirs)
    return False


def _met_anew(case: Case, ask: Ask, expected: Result | Exception, found: Result) -> bool:  # noqa: ARG001
    """Whether the first sequence that differs meets the constraints here, and there only at the very end.

    Here one beam that meets them is kept once the tokens left are fewer than the longest forced word. There
    it may be dropped; another beam then meets them only after that.
    """
    if isinstance(expected, Exception) or "force_words_ids" not in ask.fields:
        return False
    fields, words = ask.fields, ask.fields["force_words_ids"]
    limit = fields["max_new_tokens"] if "max_new_tokens" in fields else fields["max_length"] - len(ask.prompt)
    longest = max(len(word) if isinstance(word[0], int) else min(map(len, word)) for word in words)
    for theirs, ours in zip(expected.tokens, found.tokens, strict=True):
        if theirs[: len(ours)] != ours:
            late, early = _tokens_until_met(ask, theirs), _tokens_until_met(ask, ours)
            return early is not None and late is not None and max(early, limit - longest + 1) < late
    return False


def _tokens_until_met(ask: Ask, tokens: Sequence[int]) -> int | None:
    """After how many tokens a sequence holds all forced words; None: it does not."""
    count = len(ask.fields["force_words_ids"])
    return next((size for size in range(len(tokens) + 1) if _met(ask, tokens[:size])[0] == count), None)


def _first_end(case: Case, ask: Ask, expected: Result | Exception, found: Result) -> bool:  # noqa: ARG001
    """Whether the sequences are the same but for which end token ends them."""
    ends = ask.fields.get("eos_token_id")
    if isinstance(expected, Exception) or not isinstance(ends, list):
        return False
    pairs = zip(expected.tokens, found.tokens, strict=True)
    both = [[[ends[0] if token in ends else token for token in one] for one in pair] for pair in pairs]
    return all(theirs[: len(ours)] == ours for theirs, ours in both)


def _has(*names: str) -> Holds:
    """Whether a request has all of these fields."""
    return lambda case, ask, expected, found: set(names) <= set(ask.fields)  # noqa: ARG005


def _draft_model_with_encoder(case: Case, ask: Ask, expected: Result | Exception, found: Result) -> bool:  # noqa: ARG001
    """Whether the other side raised for an index, of a request with an encoder and a draft model."""
    return isinstance(expected, IndexError) and ask.drafts and len(ask.source) > 0


EXPLAINED: dict[str, Explained] = {
    "a forced end beside constraints": Explained(
        "4.52.4",
        "its constrained search goes on with a constraint's token where a forced end token rules it out",
        _has("forced_eos_token_id", "force_words_ids"),
    ),
    "constraints that are not met": Explained(
        "4.52.4",
        "it may rank a sequence that meets less of the constraints before one that meets more",
        _unmet,
    ),
    "a beam that meets the constraints is dropped": Explained(
        "4.52.4",
        "it drops a beam that meets all constraints where others are likelier, however few tokens are left",
        _met_anew,
    ),
    "a forced end in contrastive search": Explained(
        "4.52.4",
        "it ranks candidates of probability 0 too, so that a token other than the forced one may win",
        _has("forced_eos_token_id", "penalty_alpha"),
    ),
    "another end token": Explained(
        "4.52.4",
        "its beam scorers end a sequence with the first end token, whichever ended it",
        _first_end,
    ),
    "a beam without an allowed token": Explained(
        "transformers",
        "it raises where the prefix function allows no token for one beam; here that beam ends",
        _raised("`prefix_allowed_tokens_fn` returned an empty list"),
    ),
    "a draft model with an encoder": Explained(
        "transformers",
        "5.23 feeds its tokens again behind its cache, whose positions may be more than its table has",
        _draft_model_with_encoder,
    ),
    "a forced token that is suppressed": Explained(
        "transformers",
        "it refuses a forced token that is suppressed, also where it is never forced",
        _raised("is also in `suppress_tokens`"),
    ),
}


def explanation(case: Case, ask: Ask, oracle: str, expected: Result | Exception, found: Result) -> str | None:
    """The name of what explains a difference; None: it is a defect."""
    for name, one in EXPLAINED.items():
        if one.oracle == oracle and one.holds(case, ask, expected, found):
            return name
    return None
