"""Stop strings: an automaton over tokens for decoding, and a text buffer for streaming."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from descant.config.field_types import texts_problem
from descant.errors import InputError
from descant.tokenization.token_bytes import TokenBytes

# What is kept for each vocabulary of matchers that no request uses any more.
_MAX_MATCHERS = 32
_MAX_MATCHER_BYTES = 2**24


def normalize_stop_strings(given: Any) -> tuple[str, ...]:
    """The distinct stop strings of a request, in order."""
    field, must = "stop_strings", "must be a string or a list of strings, none of them empty"
    try:
        strings: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        raise InputError(field, must, given) from None
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise InputError(field, must, given)
    if problem := texts_problem(strings):
        raise InputError(field, f"must be {problem}", given)
    for string in strings:
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise InputError(field, "must be text without lone surrogates", string)
    return tuple(dict.fromkeys(strings))


class _ByteAutomaton(NamedTuple):
    """Aho-Corasick automaton (1975); a state is the longest stop-string prefix that the text ends with."""

    next_state: NDArray[Any]  # [S, 256] the state after a byte
    depth: NDArray[Any]  # [S] length of the prefix
    is_match: NDArray[Any]  # [S] whether a stop string ends here
    prefixes: list[bytes]  # [S] the prefixes, shorter ones first

    @classmethod
    def from_strings(cls, strings: Sequence[bytes]) -> _ByteAutomaton:
        """The automaton of some strings; state 0 is the empty prefix."""
        prefixes = sorted(
            {text[:n] for text in strings for n in range(len(text) + 1)}, key=lambda p: (len(p), p)
        )
        state_of = {prefix: state for state, prefix in enumerate(prefixes)}
        next_state = np.zeros((len(prefixes), 256), np.int32)
        is_match = np.array([prefix in strings for prefix in prefixes])
        failure = [0] * len(prefixes)  # the longest proper suffix that is also a state
        for size, level in itertools.groupby(prefixes[1:], len):
            nodes = [(state_of[prefix], state_of[prefix[:-1]], prefix[-1]) for prefix in level]
            for node, parent, byte in nodes:
                failure[node] = int(next_state[failure[parent], byte]) if size > 1 else 0
            for node, parent, byte in nodes:
                next_state[parent, byte] = node
            for node, _, _ in nodes:
                next_state[node] = next_state[failure[node]]
                is_match[node] |= is_match[failure[node]]
        return cls(next_state, np.array([len(prefix) for prefix in prefixes]), is_match, prefixes)


class _CompactTable:
    """A table [V, S] stored by its distinct rows: `table[tokens, states]` reads it like an array.

    Tokens without bytes, -1 and ids beyond the vocabulary share row 0.
    """

    def __init__(self, row_of_token: NDArray[Any], rows: NDArray[Any]) -> None:
        self._row_of_token = row_of_token  # [V + 1] the row of each token, then that of all other ids
        self._rows = rows  # [C, S]
        self.shape = len(row_of_token) - 1, rows.shape[1]
        self.dtype = rows.dtype

    @property
    def nbytes(self) -> int:
        """The memory of the distinct rows in bytes."""
        return self._rows.nbytes

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        tokens, states = key
        return self._rows[self._row_of_token[np.minimum(tokens, self.shape[0])], states]


class StopStringMatcher:
    """An automaton over tokens: `transition[token, state]` and `matches[token, state]`.

    A row starts in state 0, or in `state_after(prompt)`. `matches` is true if a stop string ends inside the
    token, wherever it started; `transition` is the state after the token. States are ints < `num_states`.
    """

    def __init__(self, vocabulary: TokenBytes, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.vocab_size = vocabulary.size
        encoded = [string.encode() for string in strings]
        self.max_match_tokens = max(map(len, encoded))  # limit of the tokens with bytes in a match
        automaton = _ByteAutomaton.from_strings(encoded)
        self.num_states = len(automaton.prefixes)
        self.matched_bytes = automaton.depth  # [S] length of the partial match
        self._row_of_token, next_states, is_match = _build_tables(vocabulary, automaton)
        self.transition = _CompactTable(self._row_of_token, next_states)
        self.matches = _CompactTable(self._row_of_token, is_match)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, stop_strings: str | Iterable[str]) -> StopStringMatcher:
        """The matcher of a tokenizer and its stop strings: the same one while it is in use, or cached."""
        strings = tuple(sorted(normalize_stop_strings(stop_strings)))
        vocabulary = TokenBytes.from_tokenizer(tokenizer)
        with _lock:
            matchers = _matchers.setdefault(vocabulary, _MatcherCache())
            matcher = matchers.get(strings)
            if matcher is None:
                matcher = cls(vocabulary, strings)
            matchers.keep(matcher)
            return matcher

    @property
    def nbytes(self) -> int:
        """The memory of its tables in bytes."""
        tables = self.transition.nbytes + self.matches.nbytes
        return tables + self._row_of_token.nbytes + self.matched_bytes.nbytes

    def state_after(self, ids: Any) -> Any:
        """The state after ids: an int for [L], an array [N] for [N, L]. Only the last few ids are read."""
        ids = np.asarray(ids, np.int64)
        state = np.zeros(ids.shape[:-1], self.transition.dtype)
        window = ids[..., -self.max_match_tokens :]
        if window.shape[-1] < ids.shape[-1] and bool(
            (self._row_of_token[self._clamp_ids(window)] == 0).any()
        ):
            # Tokens without bytes do not count towards the length of a match.
            order = np.argsort(self._row_of_token[self._clamp_ids(ids)] != 0, axis=-1, kind="stable")
            window = np.take_along_axis(ids, order[..., -self.max_match_tokens :], -1)
        for index in range(window.shape[-1]):
            state = self.transition[window[..., index], state]
        return int(state) if ids.ndim == 1 else state

    def ends_with_match(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Whether a stop string ends inside the last id of each row of [N, L], as [N]."""
        if ids.shape[1] == 0:
            return np.zeros(len(ids), bool)
        is_match: NDArray[Any] = self.matches[ids[:, -1], self.state_after(ids[:, :-1])]
        return is_match

    def _clamp_ids(self, ids: NDArray[Any]) -> NDArray[Any]:
        clamped: NDArray[Any] = np.minimum(ids, self.vocab_size)
        return clamped


class _MatcherCache:
    """The matchers of a vocabulary: all that are in use, and the latest of the others, bounded in bytes."""

    def __init__(self) -> None:
        self._in_use: weakref.WeakValueDictionary[tuple[str, ...], StopStringMatcher]
        self._in_use = weakref.WeakValueDictionary()
        self._latest: OrderedDict[tuple[str, ...], StopStringMatcher] = OrderedDict()

    def get(self, strings: tuple[str, ...]) -> StopStringMatcher | None:
        """The matcher of these strings; None: there is none."""
        return self._in_use.get(strings)

    def keep(self, matcher: StopStringMatcher) -> None:
        """Keep a matcher as the latest one; the oldest are dropped, and one that is too large is not kept."""
        self._in_use[matcher.strings] = matcher
        self._latest[matcher.strings] = matcher
        self._latest.move_to_end(matcher.strings)
        while len(self._latest) > _MAX_MATCHERS or self.nbytes > _MAX_MATCHER_BYTES:
            self._latest.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """The memory of the matchers that are kept, in bytes."""
        return sum(matcher.nbytes for matcher in self._latest.values())


_matchers: weakref.WeakKeyDictionary[TokenBytes, _MatcherCache] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _TokenSpans:
    """The bytes of all tokens of a vocabulary, with the range of each token."""

    def __init__(self, vocabulary: TokenBytes) -> None:
        self.data = vocabulary.data
        self.start, self.stop = vocabulary.offsets[:-1], vocabulary.offsets[1:]
        self.length = self.stop - self.start
        self.is_token_end = np.zeros(len(self.data) + 1, bool)
        self.is_token_end[self.stop] = True
        self.first_byte = np.full(len(self.length), -1, np.int16)
        has_bytes = self.length > 0
        self.first_byte[has_bytes] = self.data[self.start[has_bytes]]

    def token_at(self, offsets: NDArray[Any]) -> NDArray[Any]:
        """The tokens that these offsets into the data belong to."""
        return np.searchsorted(self.start, offsets, side="right") - 1


class _DefaultTransitions(NamedTuple):
    """Transitions from states whose partial match ends at the token's first byte."""

    next_state: NDArray[Any]  # [V] the state after it
    contains_match: NDArray[Any]  # [V] whether a whole stop string is inside the token
    matching_first_byte: NDArray[Any]  # [V] its first byte if some stop string ends with it, else -1


class _ExceptionTransitions(NamedTuple):
    """Transitions from states whose partial match continues beyond the token's first byte."""

    token: NDArray[Any]  # [P] ascending
    state: NDArray[Any]  # [P]
    next_state: NDArray[Any]  # [P] the state after it
    is_match: NDArray[Any]  # [P] whether a stop string ends after the token's first byte


def _build_tables(
    vocabulary: TokenBytes, automaton: _ByteAutomaton
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The row of each token [V + 1], and the distinct rows [C, S] of next states and of matches.

    A partial match ends at the first byte that does not continue it, so a token has the same transition from
    most states; the few exceptions are computed separately. Tokens with equal transitions share a row. Row 0
    is that of tokens without bytes.
    """
    tokens, num_states = _TokenSpans(vocabulary), len(automaton.prefixes)
    default = _default_transitions(tokens, automaton)
    exceptions = _exception_transitions(tokens, automaton, default)
    key = (
        1 + ((default.matching_first_byte + 1) * num_states + default.next_state) * 2 + default.contains_match
    )
    key[tokens.length == 0] = 0
    special, index = np.unique(exceptions.token, return_inverse=True)
    key[special] = _refine_keys(key[special], exceptions, index, num_states)
    row_of_token, example = _compress_keys(np.append(key, 0))
    example[0] = 0

    row_type, state_type = np.min_scalar_type(len(example)), np.min_scalar_type(num_states)
    next_states = default.next_state[example].astype(state_type)[:, None].repeat(num_states, 1)
    is_match = (
        default.contains_match[example][:, None]
        | _first_byte_matches(automaton)[default.matching_first_byte[example]]
    )
    next_states[0], is_match[0] = np.arange(num_states), False
    is_example = example[row_of_token[exceptions.token]] == exceptions.token
    cells = row_of_token[exceptions.token[is_example]], exceptions.state[is_example]
    next_states[cells] = exceptions.next_state[is_example]
    is_match[cells] |= exceptions.is_match[is_example]
    return row_of_token.astype(row_type), next_states, is_match


def _first_byte_matches(automaton: _ByteAutomaton) -> NDArray[Any]:
    """Whether a stop string ends with a byte in a state [257, S]; the last row is for no byte."""
    return np.append(
        automaton.is_match[automaton.next_state].T, np.zeros((1, len(automaton.is_match)), bool), 0
    )


def _default_transitions(tokens: _TokenSpans, automaton: _ByteAutomaton) -> _DefaultTransitions:
    """The default transitions, from the offsets of every prefix in all tokens.

    The offsets of a prefix are a subset of those of the prefix one byte shorter.
    """
    next_state = np.zeros(len(tokens.length), np.int64)
    contains_match = np.zeros(len(tokens.length), bool)
    prefixes = automaton.prefixes
    offsets_of = {text: np.flatnonzero(tokens.data == text[0]) for text in prefixes if len(text) == 1}
    for state, text in enumerate(prefixes[1:], 1):
        size = len(text)
        if size > 1:
            offsets = offsets_of[text[:-1]]
            offsets = offsets[tokens.data[offsets + size - 1] == text[-1]]
        else:
            offsets = offsets_of[text]
        if automaton.is_match[state]:
            contains_match[tokens.token_at(offsets)] = True
        at_end = tokens.is_token_end[offsets + size]
        next_state[tokens.token_at(offsets[at_end])] = state  # longer prefixes come later
        offsets_of[text] = offsets[~at_end]
    is_last_byte: NDArray[Any] = np.any(_first_byte_matches(automaton), axis=1)
    first_byte = np.where(is_last_byte[tokens.first_byte], tokens.first_byte, -1).astype(np.int64)
    return _DefaultTransitions(next_state, contains_match, first_byte)


def _exception_transitions(
    tokens: _TokenSpans, automaton: _ByteAutomaton, default: _DefaultTransitions
) -> _ExceptionTransitions:
    """The exceptions, by running all pairs of token and state while the state's own match continues."""
    next_state, depth, is_match = automaton.next_state, automaton.depth, automaton.is_match
    results, pairs = [], []
    for byte in np.flatnonzero((depth[next_state] > 1).any(0)).tolist():
        states = np.flatnonzero(depth[next_state[:, byte]] > 1)
        ids = np.flatnonzero(tokens.first_byte == byte)
        is_single = tokens.length[ids] == 1
        single, ids = ids[is_single].repeat(len(states)), ids[~is_single]
        repeated = np.tile(states, int(is_single.sum()))
        results.append((single, repeated, next_state[repeated, byte], np.zeros(len(single), bool)))
        # Filter by the second byte before pairing tokens with states: few pairs remain.
        continues = depth[next_state[next_state[states, byte]]] > 2  # [A, 256]
        second = tokens.data[tokens.start[ids] + 1]
        is_candidate = continues.any(0)[second]
        ids, second = ids[is_candidate], second[is_candidate]
        which, column = np.nonzero(continues[:, second])
        reached = next_state[next_state[states[which], byte], second[column]]
        pairs.append((ids[column], states[which], reached))
    empty = np.zeros(0, np.int64)
    token, state, current = (np.concatenate(part) for part in zip((empty,) * 3, *pairs, strict=True))
    matched = is_match[current]
    for size in range(2, int(depth.max())):
        at_end = tokens.length[token] == size
        results.append((token[at_end], state[at_end], current[at_end], matched[at_end]))
        token, state, current, matched = (part[~at_end] for part in (token, state, current, matched))
        current = next_state[current, tokens.data[tokens.start[token] + size]]
        continues = depth[current] > size + 1
        ended = ~continues & matched & ~default.contains_match[token]
        results.append((token[ended], state[ended], default.next_state[token[ended]], matched[ended]))
        matched = matched | is_match[current]
        token, state, current, matched = (part[continues] for part in (token, state, current, matched))
    initial = (empty, empty, empty, empty.astype(bool))
    columns = [np.concatenate(part) for part in zip(initial, *results, strict=True)]
    order = np.argsort(columns[0] * len(depth) + columns[1])
    return _ExceptionTransitions(*(part[order] for part in columns))


def _refine_keys(
    key: NDArray[Any], exceptions: _ExceptionTransitions, index: NDArray[Any], num_states: int
) -> NDArray[Any]:
    """The keys of tokens [E] with their exceptions included; `index` [P] is the token of each exception."""
    code = (exceptions.state * num_states + exceptions.next_state) * 2 + exceptions.is_match
    first = np.searchsorted(index, np.arange(len(key)))
    count = np.diff(first, append=len(index))
    next_key = 2 * 257 * num_states + 1  # above every default key
    for number in range(int(count.max(initial=0))):
        members = np.flatnonzero(count > number)
        combined = key[members] * (2 * num_states * num_states) + code[first[members] + number]
        compressed, examples = _compress_keys(combined)
        key[members] = next_key + compressed
        next_key += len(examples)
    return key


def _compress_keys(keys: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rank of each key among the distinct keys [E], and an index of each distinct key [C]."""
    limit = int(keys.max(initial=0)) + 1
    if limit > 1 << 20:
        _, example, rank = np.unique(keys, return_index=True, return_inverse=True)
        return rank, example
    occurs = np.zeros(limit, bool)
    occurs[keys] = True
    rank = (np.cumsum(occurs) - 1)[keys]
    example = np.zeros(int(rank.max(initial=-1)) + 1, np.int64)
    example[rank] = np.arange(len(keys))
    return rank, example


class StopStringBuffer:
    """Streamed text that is cut before the first stop string and held back where one may start.

    The first stop string is the one that ends first, and the longest of those that end together.
    """

    def __init__(self, stop_strings: str | Iterable[str]) -> None:
        self.strings = normalize_stop_strings(stop_strings)
        self.matched_string: str | None = None
        self._proper_prefixes = {string[:n] for string in self.strings for n in range(1, len(string))}
        self._max_length = max(map(len, self.strings))
        self._buffer = ""

    def feed(self, delta: str) -> str:
        """Add text and return what is final; "" after a stop string."""
        if self.matched_string is not None:
            return ""
        text = self._buffer + delta
        starts = [(text.find(string), string) for string in self.strings]
        matches = [(start + len(string), start, string) for start, string in starts if start >= 0]
        if matches:
            _, start, self.matched_string = min(matches)
            self._buffer = ""
            return text[:start]
        sizes = range(min(self._max_length - 1, len(text)), 0, -1)
        keep = next((n for n in sizes if text[-n:] in self._proper_prefixes), 0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, once no more text follows."""
        text, self._buffer = self._buffer, ""
        return text


class PhraseMatcher:
    """Matches phrases across any token boundaries; special tokens have no text."""

    def __init__(self, vocabulary: TokenBytes, strings: Sequence[str]) -> None:
        self.matcher = StopStringMatcher(vocabulary.without_special, strings)
        self._phrase_bytes = [string.encode() for string in self.matcher.strings]
        self._token_bytes = vocabulary.without_special.bytes

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, strings: Sequence[str]) -> PhraseMatcher:
        """The matcher of a tokenizer and its phrases, cached while in use."""
        vocabulary, key = TokenBytes.from_tokenizer(tokenizer), tuple(sorted(set(strings)))
        with _ban_lock:
            matchers = _ban_matchers.setdefault(vocabulary, weakref.WeakValueDictionary())
            matcher = matchers.get(key)
            if matcher is None:
                matcher = matchers[key] = cls(vocabulary, key)
            return matcher

    def partial_tokens(self, state: int, tokens: Sequence[int]) -> int:
        """The number of last tokens that a partial match in this state covers."""
        depth = int(self.matcher.matched_bytes[state])
        count = 0
        while depth > 0:
            count += 1
            depth -= len(self._bytes_of(tokens[-count]))
        return count

    def match_start(self, tokens: Sequence[int], skip: int = 0) -> int | None:
        """The index of the token where a phrase starts that the last token completes; the latest of several.

        Matches that start in the first `skip` bytes are ignored.
        """
        pieces = [self._bytes_of(token) for token in tokens]
        text = b"".join(pieces)
        last_start = len(text) - len(pieces[-1])  # a match must end beyond this
        offset = max(
            text.rfind(phrase, max(last_start - len(phrase) + 1, skip, 0)) for phrase in self._phrase_bytes
        )
        if offset < 0:
            return None
        index = 0
        while offset >= len(pieces[index]):
            offset -= len(pieces[index])
            index += 1
        return index

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """The number of bytes of these tokens."""
        return sum(len(self._bytes_of(token)) for token in tokens)

    def _bytes_of(self, token: int) -> bytes:
        return self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""


_ban_matchers: weakref.WeakKeyDictionary[
    TokenBytes, weakref.WeakValueDictionary[tuple[str, ...], PhraseMatcher]
]
_ban_matchers = weakref.WeakKeyDictionary()
_ban_lock = threading.Lock()
