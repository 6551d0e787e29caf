"""The interface of grammar libraries: compiled grammars, their matchers, and token masks."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import takewhile
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from descant.config.grammar_spec import GrammarSpec
from descant.errors import InputError, MissingExtra
from descant.tokenization.regions import ThoughtState, ThoughtTracker
from descant.tokenization.token_bytes import TokenBytes


class UnsupportedGrammar(Exception):
    """A grammar that a backend cannot run, with the reason as its text."""


def decode_prefix(prefix: bytes) -> str:
    """The text before a grammar, which must end with a whole character."""
    try:
        return prefix.decode()
    except UnicodeDecodeError:
        raise UnsupportedGrammar(
            "the prompt ends within a character, which token healing cannot keep"
        ) from None


class GrammarMatcher(ABC):
    """A position in the language of a grammar: after some tokens, all of which are text."""

    def __init__(self, matcher: Any, backend: GrammarBackend) -> None:
        self.matcher, self.backend = matcher, backend  # `matcher` is the library's

    @abstractmethod
    def accept(self, tokens: Sequence[int]) -> int:
        """Advance over as many of the tokens as the grammar permits; return how many these are."""

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        if count:
            self.matcher.rollback(count)

    @abstractmethod
    def copy(self) -> Self:
        """Another matcher at the same position."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the text so far is a whole text of the language."""

    @abstractmethod
    def is_final(self) -> bool:
        """Whether it is complete and nothing may follow."""

    def failure(self) -> str | None:
        """Why it cannot go on, after it has exceeded a bound of its library; None: it can."""
        return None

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """The tokens that most likely spell what must follow; empty: several texts may, or none."""


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar compiled for a vocabulary; several requests may share it."""

    backend: GrammarBackend
    compiled: Any  # what the library makes matchers from
    nbytes: int  # an estimate of its memory
    source: tuple[str, bytes]  # the content of its spec, and the prefix

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the beginning."""
        return self.backend.new_matcher(self.compiled)


class GrammarBackend(ABC):
    """A grammar library with one vocabulary."""

    name: ClassVar[str]  # of the library, its package and its extra

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        try:
            self._library: Any = import_module(self.name)
        except ImportError:
            raise MissingExtra(self.name, f"`grammar` with {self.name}") from None
        self.vocabulary = vocabulary
        self.mask_width = (vocabulary.size + 31) // 32  # 32-bit words of a token mask
        self._executor: Any = None  # the library's threads, from the first masks of several matchers on

    @abstractmethod
    def compile(self, spec: GrammarSpec, prefix: bytes = b"") -> CompiledGrammar:
        """Compile the grammar of texts that begin with `prefix`, which is followed by the spec's.

        Raises `UnsupportedGrammar` for a grammar that it cannot run exactly, or that is invalid.
        """

    @abstractmethod
    def new_matcher(self, compiled: Any) -> GrammarMatcher:
        """A matcher at the beginning of a compiled grammar."""

    @abstractmethod
    def fill_masks(self, matchers: Sequence[Any], masks: NDArray[Any], lines: Sequence[int]) -> None:
        """Set `masks[lines[i]]` to the tokens that may follow `matchers[i]`, a bit each, end tokens aside.

        The matchers must be different objects: the library's threads fill them at once. The mask of one that
        fails is undefined.
        """


class GrammarVocabulary:
    """The text bytes of each token, and texts as tokens.

    Special tokens have no bytes, so that no grammar permits them: decoding would drop them from the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: list[bytes] = list(TokenBytes.from_tokenizer(tokenizer).without_special.bytes)
        if not any(self.tokens):
            raise InputError("tokenizer", "must have tokens with text", tokenizer)
        if all(self.tokens):
            self.tokens.append(b"")
        # A token that is never text, for libraries that need an end token.
        self.end_token = self.tokens.index(b"")
        try:  # no strong reference: what is compiled for a tokenizer must not keep it alive
            self._tokenizer: Any = weakref.ref(tokenizer)
        except TypeError:
            self._tokenizer = lambda: tokenizer

    @property
    def size(self) -> int:
        """The number of tokens, the end token included."""
        return len(self.tokens)

    def leading_text(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that is no text.

        Padding of drafts may be the end token of a library, and a model may have more tokens than these.
        """
        return list(takewhile(lambda token: 0 <= token < self.size and bool(self.tokens[token]), tokens))

    def clear_unused(self, masks: NDArray[Any], lines: Sequence[int]) -> None:
        """Clear the bits of `end_token` and of no token in some lines of masks [N, W]."""
        index = list(lines)
        masks[index, self.end_token // 32] &= np.uint32(~(1 << (self.end_token % 32)) & 0xFFFFFFFF)
        if self.size % 32:
            masks[index, self.size // 32] &= np.uint32((1 << (self.size % 32)) - 1)

    @cached_property
    def _token_by_bytes(self) -> dict[bytes, int]:
        return {text: token for token, text in reversed(list(enumerate(self.tokens))) if text}

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self.tokens))

    def encode(self, data: bytes) -> list[int]:
        """Tokens with exactly these bytes: the tokenizer's own, or else the longest that match."""
        text = data.decode("utf-8", "ignore")
        ids = self._encode_text(text) if text.encode() == data else []
        return ids if b"".join(self.tokens[token] for token in ids) == data else self._encode_longest(data)

    def _encode_text(self, text: str) -> list[int]:
        """The tokenizer's tokens of a text; none if it adds others, or cannot tell."""
        try:
            found = self._tokenizer().encode(text, add_special_tokens=False)
        except Exception:  # code of the user, or the tokenizer is gone
            return []
        ids = [int(token) for token in getattr(found, "ids", found)]
        return ids if len(self.leading_text(ids)) == len(ids) else []

    def _encode_longest(self, data: bytes) -> list[int]:
        """The longest token at each position; stops where none matches."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            for length in range(min(self._max_token_bytes, len(data) - start), 0, -1):
                token = self._token_by_bytes.get(data[start : start + length])
                if token is not None:
                    ids.append(token)
                    start += length
                    break
            else:
                break
        return ids


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

    def __init__(
        self, grammar: CompiledGrammar, end_token_ids: Sequence[int], thought: ThoughtTracker | None = None
    ) -> None:
        self.grammar, self.thought = grammar, thought
        self.end_token_ids = np.array(sorted(set(end_token_ids)), dtype=np.int64)
        self.failure: str | None = None  # the bound of the library that a text has exceeded
        self._positions: dict[bytes, _Position] = {}  # by their tokens, the least recently used first

    def answer(self, text: Array) -> Array | None:
        """The part of a text that the grammar rules: what follows its thought; None: it thinks."""
        if self.thought is None:
            return text
        found = self.thought.at(text)
        return None if found.region == "reasoning" else text[found.begin :]

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
        self._positions = {
            key: position for key, position in self._positions.items() if position.matcher is not matcher
        }
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
    answers = [pool.answer(text) for pool, text in zip(pools, texts, strict=True)]
    for line, (pool, text) in enumerate(zip(pools, answers, strict=True)):
        if text is None:
            continue
        source = first.setdefault((pool, text.tobytes()), line)
        if source == line:
            waiting.setdefault(pool, []).append(line)
        else:
            same.append((line, source))
    counts = {pool: len(lines) for pool, lines in waiting.items()}
    while waiting:
        busy: dict[GrammarMatcher, int] = {}  # the line of each matcher that is filled in this round
        for pool, lines in list(waiting.items()):
            later = [line for line in lines if not _place(pool, answers[line], line, busy, masks)]
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
    for line, pool in enumerate(pools):
        if pool.thought is not None:
            _set_thought_tokens(masks, line, pool, pool.thought.at(texts[line]))


def _set_thought_tokens(masks: Array, line: int, pool: MatcherPool, found: ThoughtState) -> None:
    """Permit the tokens of a thought, or those that open one."""
    assert pool.thought is not None
    if found.region == "reasoning":
        masks[line] = pool.thought.mask(found, masks.shape[1])
        _set_end_tokens(masks[line], pool.end_token_ids, is_complete=False)
    elif found.region == "start":
        masks[line] |= pool.thought.mask(found, masks.shape[1])


def _place(pool: MatcherPool, text: Any, line: int, busy: dict[GrammarMatcher, int], masks: Array) -> bool:
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
    """The number of tokens that two texts have in common at their beginning."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
