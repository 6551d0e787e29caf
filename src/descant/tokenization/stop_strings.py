"""Stop strings as automata: over tokens, for the loop, and over text, for those who show it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from descant.errors import InputError
from descant.tokenization.token_bytes import TokenBytes

__all__ = ["StopStringBuffer", "StopStringMatcher", "normalize_stop_strings"]

Array = np.ndarray[Any, np.dtype[Any]]
_MAX_MATCHERS = 32  # tables remembered for each vocabulary


def normalize_stop_strings(given: Any) -> tuple[str, ...]:
    """The stop strings of a request, each once, in their order."""
    field, must = "stop_strings", "must be a string or a list of strings, none of them empty"
    try:
        strings: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        raise InputError(field, must, given) from None
    if not strings or not all(isinstance(one, str) and one for one in strings):
        raise InputError(field, must, given)
    for one in strings:
        if any("\ud800" <= char <= "\udfff" for char in one):
            raise InputError(field, "must be text, without lone surrogates", one)
    return tuple(dict.fromkeys(strings))


class _ByteAutomaton(NamedTuple):
    """Which prefix of a stop string the text so far ends with, the longest (Aho and Corasick, 1975)."""

    next_state: Array  # [S, 256] the state after a byte
    depth: Array  # [S] how many bytes of the text it holds
    is_match: Array  # [S] whether a stop string ends here
    prefixes: list[bytes]  # [S] the prefix itself, shorter ones first

    @classmethod
    def from_strings(cls, strings: Sequence[bytes]) -> _ByteAutomaton:
        """The automaton of some strings; state 0 holds nothing."""
        texts = sorted({one[:n] for one in strings for n in range(len(one) + 1)}, key=lambda t: (len(t), t))
        number = {text: at for at, text in enumerate(texts)}
        after = np.zeros((len(texts), 256), np.int32)
        ends = np.array([text in strings for text in texts])
        behind = [0] * len(texts)  # the longest proper suffix that is a state, too
        for size, level in itertools.groupby(texts[1:], len):
            nodes = [(number[text], number[text[:-1]], text[-1]) for text in level]
            for node, parent, byte in nodes:
                behind[node] = int(after[behind[parent], byte]) if size > 1 else 0
            for node, parent, byte in nodes:
                after[parent, byte] = node
            for node, _, _ in nodes:
                after[node] = after[behind[node]]
                ends[node] |= ends[behind[node]]
        return cls(after, np.array([len(text) for text in texts]), ends, texts)


class _CompactTable:
    """A table [V, S] kept by the few rows it has: `lookup[tokens, states]` reads it like an array.

    Tokens of no bytes, -1 and ids beyond the vocabulary among them, share row 0.
    """

    def __init__(self, kind: Array, rows: Array) -> None:
        self._row_of_token = kind  # [V + 1] the row of each token, then that of all others
        self._rows = rows  # [C, S]
        self.shape = len(kind) - 1, rows.shape[1]
        self.dtype = rows.dtype

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        tokens, states = key
        return self._rows[self._row_of_token[np.minimum(tokens, self.shape[0])], states]


class StopStringMatcher:
    """What every token does to every state of matching: `next[token, state]` and `hits[token, state]`.

    A row starts in state 0, or in `run(prompt)`. `hits` says that some stop string ends inside the token,
    wherever it began; `next` is the state after it. States are small integers below `states`.
    """

    def __init__(self, vocabulary: TokenBytes, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.vocab_size = vocabulary.size
        encoded = [one.encode() for one in strings]
        self.max_match_tokens = max(map(len, encoded))  # no match spans more tokens that have bytes
        automaton = _ByteAutomaton.from_strings(encoded)
        self.num_states = len(automaton.prefixes)
        self.matched_bytes = automaton.depth  # [S] how many bytes of a stop string the text ends with
        self._row_of_token, rows, hits = _build_tables(vocabulary, automaton)
        self.transition = _CompactTable(self._row_of_token, rows)
        self.matches = _CompactTable(self._row_of_token, hits)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, stop_strings: str | Iterable[str]) -> StopStringMatcher:
        """The table of a tokenizer and its stop strings, made once for each."""
        strings = tuple(sorted(normalize_stop_strings(stop_strings)))
        vocabulary = TokenBytes.from_tokenizer(tokenizer)
        with _lock:
            known = _matchers.setdefault(vocabulary, OrderedDict())
            if strings not in known:
                known[strings] = cls(vocabulary, strings)
                if len(known) > _MAX_MATCHERS:
                    known.popitem(last=False)
            known.move_to_end(strings)
            return known[strings]

    def state_after(self, ids: Any) -> Any:
        """The state after ids [L], a number, or [N, L], an array [N]; only their last few matter."""
        ids = np.asarray(ids, np.int64)
        state = np.zeros(ids.shape[:-1], self.transition.dtype)
        window = ids[..., -self.max_match_tokens :]
        if window.shape[-1] < ids.shape[-1] and bool(
            (self._row_of_token[self._clamp_ids(window)] == 0).any()
        ):
            # Tokens without bytes take no room in a match.
            order = np.argsort(self._row_of_token[self._clamp_ids(ids)] != 0, axis=-1, kind="stable")
            window = np.take_along_axis(ids, order[..., -self.max_match_tokens :], -1)
        for at in range(window.shape[-1]):
            state = self.transition[window[..., at], state]
        return int(state) if ids.ndim == 1 else state

    def ends_with_match(self, ids: Array) -> Array:
        """Whether a stop string ends inside the last of the ids [N, L], each row by itself [N]."""
        if ids.shape[1] == 0:
            return np.zeros(len(ids), bool)
        found: Array = self.matches[ids[:, -1], self.state_after(ids[:, :-1])]
        return found

    def _clamp_ids(self, ids: Array) -> Array:
        return np.minimum(ids, self.vocab_size)


_matchers: weakref.WeakKeyDictionary[TokenBytes, OrderedDict[tuple[str, ...], StopStringMatcher]]
_matchers = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _TokenSpans:
    """The tokens of a vocabulary as an automaton is led over them."""

    def __init__(self, vocabulary: TokenBytes) -> None:
        self.data = vocabulary.data
        self.start, self.stop = vocabulary.offsets[:-1], vocabulary.offsets[1:]
        self.length = self.stop - self.start
        self.is_token_end = np.zeros(len(self.data) + 1, bool)  # where a token ends
        self.is_token_end[self.stop] = True
        self.first_byte = np.full(len(self.length), -1, np.int16)
        full = self.length > 0
        self.first_byte[full] = self.data[self.start[full]]

    def token_at(self, at: Array) -> Array:
        """The tokens that these places in the data belong to."""
        return np.searchsorted(self.start, at, side="right") - 1


class _DefaultTransitions(NamedTuple):
    """What each token does to a state of which nothing lives on after the token's first byte."""

    next_state: Array  # [V] the state after it
    contains_match: Array  # [V] whether it holds a whole stop string
    matching_first_byte: Array  # [V] its first byte, if some stop string ends in that, or -1


class _ExceptionTransitions(NamedTuple):
    """What tokens do to the states that live on longer."""

    token: Array  # [P] ascending
    state: Array  # [P]
    next_state: Array  # [P] the state after it
    is_match: Array  # [P] whether a stop string ends after the token's first byte


def _build_tables(vocabulary: TokenBytes, automaton: _ByteAutomaton) -> tuple[Array, Array, Array]:
    """The row of each token [V + 1], and the rows [C, S]: the state after it, and whether it hits.

    What came before is forgotten at the first byte that does not go on with it, so a token does the
    same to most states, and the few exceptions are found by themselves. Tokens that do the same to
    all states share a row, and row 0 is that of tokens without bytes.
    """
    tokens, states = _TokenSpans(vocabulary), len(automaton.prefixes)
    plain = _default_transitions(tokens, automaton)
    walks = _exception_transitions(tokens, automaton, plain)
    key = 1 + ((plain.matching_first_byte + 1) * states + plain.next_state) * 2 + plain.contains_match
    key[tokens.length == 0] = 0
    odd, index = np.unique(walks.token, return_inverse=True)
    key[odd] = _refine_keys(key[odd], walks, index, states)
    kind, example = _compress_keys(np.append(key, 0))
    example[0] = 0

    after = plain.next_state[example][:, None].repeat(states, 1)
    hits = (
        plain.contains_match[example][:, None]
        | _first_byte_matches(automaton)[plain.matching_first_byte[example]]
    )
    after[0], hits[0] = np.arange(states), False
    shown = example[kind[walks.token]] == walks.token
    row = kind[walks.token[shown]], walks.state[shown]
    after[row] = walks.next_state[shown]
    hits[row] |= walks.is_match[shown]
    return kind.astype(np.min_scalar_type(len(after))), after.astype(np.min_scalar_type(states)), hits


def _first_byte_matches(automaton: _ByteAutomaton) -> Array:
    """Whether a stop string ends in a byte, by byte and state [257, S]; in none, at the end."""
    return np.append(
        automaton.is_match[automaton.next_state].T, np.zeros((1, len(automaton.is_match)), bool), 0
    )


def _default_transitions(tokens: _TokenSpans, automaton: _ByteAutomaton) -> _DefaultTransitions:
    """The places of every beginning of a stop string in all tokens, found from those one byte shorter."""
    rest, inside = np.zeros(len(tokens.length), np.int64), np.zeros(len(tokens.length), bool)
    places = {text: np.flatnonzero(tokens.data == text[0]) for text in automaton.prefixes if len(text) == 1}
    for state, text in enumerate(automaton.prefixes[1:], 1):
        size = len(text)
        if size > 1:
            at = places[text[:-1]]
            at = at[tokens.data[at + size - 1] == text[-1]]
        else:
            at = places[text]
        if automaton.is_match[state]:
            inside[tokens.token_at(at)] = True
        over = tokens.is_token_end[at + size]
        rest[tokens.token_at(at[over])] = state  # longer ones come later
        places[text] = at[~over]
    closing: Array = np.any(_first_byte_matches(automaton), axis=1)
    closing = closing[tokens.first_byte]
    return _DefaultTransitions(rest, inside, np.where(closing, tokens.first_byte, -1).astype(np.int64))


def _exception_transitions(
    tokens: _TokenSpans, automaton: _ByteAutomaton, plain: _DefaultTransitions
) -> _ExceptionTransitions:
    """The automaton led over the tokens from all states at once, for as long as a state's own text lasts."""
    after, depth, ends = automaton.next_state, automaton.depth, automaton.is_match
    found, pairs = [], []
    for byte in np.flatnonzero((depth[after] > 1).any(0)).tolist():
        states = np.flatnonzero(depth[after[:, byte]] > 1)
        some = np.flatnonzero(tokens.first_byte == byte)
        whole = tokens.length[some] == 1
        short, some = some[whole].repeat(len(states)), some[~whole]
        again = np.tile(states, int(whole.sum()))
        found.append((short, again, after[again, byte], np.zeros(len(short), bool)))
        # By second byte, before tokens and states are paired: few pairs get that far.
        going = depth[after[after[states, byte]]] > 2  # [A, 256]
        second = tokens.data[tokens.start[some] + 1]
        useful = going.any(0)[second]
        some, second = some[useful], second[useful]
        which, token = np.nonzero(going[:, second])
        pairs.append((some[token], states[which], after[after[states[which], byte], second[token]]))
    none = np.zeros(0, np.int64)
    token, state, now = (np.concatenate(part) for part in zip((none,) * 3, *pairs, strict=True))
    hit = ends[now]
    for size in range(2, int(depth.max())):
        over = tokens.length[token] == size
        found.append((token[over], state[over], now[over], hit[over]))
        token, state, now, hit = (part[~over] for part in (token, state, now, hit))
        now = after[now, tokens.data[tokens.start[token] + size]]
        going = depth[now] > size + 1
        told = ~going & hit & ~plain.contains_match[token]
        found.append((token[told], state[told], plain.next_state[token[told]], hit[told]))
        token, state, now, hit = (part[going] for part in (token, state, now, hit | ends[now]))
    walks = [np.concatenate(part) for part in zip((none, none, none, none.astype(bool)), *found, strict=True)]
    order = np.argsort(walks[0] * len(depth) + walks[1])
    return _ExceptionTransitions(*(part[order] for part in walks))


def _refine_keys(key: Array, walks: _ExceptionTransitions, index: Array, states: int) -> Array:
    """Keys of tokens [E], told apart by their exceptions, of which `index` [P] says whose they are."""
    code = (walks.state * states + walks.next_state) * 2 + walks.is_match
    begin = np.searchsorted(index, np.arange(len(key)))
    count = np.diff(begin, append=len(index))
    top = 2 * 257 * states + 1  # beyond every plain key
    for turn in range(int(count.max(initial=0))):
        some = np.flatnonzero(count > turn)
        number, seen = _compress_keys(key[some] * (2 * states * states) + code[begin[some] + turn])
        key[some] = top + number
        top += len(seen)
    return key


def _compress_keys(keys: Array) -> tuple[Array, Array]:
    """The keys [E] by small numbers in their order, and an index of each [C]."""
    top = int(keys.max(initial=0)) + 1
    if top > 1 << 20:
        _, example, number = np.unique(keys, return_index=True, return_inverse=True)
        return number, example
    there = np.zeros(top, bool)
    there[keys] = True
    number = (np.cumsum(there) - 1)[keys]
    example = np.zeros(int(number.max(initial=-1)) + 1, np.int64)
    example[number] = np.arange(len(keys))
    return number, example


class StopStringBuffer:
    """Text on its way to a reader, cut before the first stop string and held back where one may begin.

    The first stop string is the one that ends first, and of those that end together the longest.
    """

    def __init__(self, stop_strings: str | Iterable[str]) -> None:
        self.strings = normalize_stop_strings(stop_strings)
        self.matched_string: str | None = None
        self._proper_prefixes = {one[:n] for one in self.strings for n in range(1, len(one))}
        self._max_length = max(map(len, self.strings))
        self._buffer = ""

    def feed(self, delta: str) -> str:
        """What can be shown now that `delta` came; "" once a stop string has come."""
        if self.matched_string is not None:
            return ""
        text = self._buffer + delta
        found = [(at + len(one), at, one) for one in self.strings if (at := text.find(one)) >= 0]
        if found:
            _, at, self.matched_string = min(found)
            self._buffer = ""
            return text[:at]
        sizes = range(min(self._max_length - 1, len(text)), 0, -1)
        keep = next((n for n in sizes if text[-n:] in self._proper_prefixes), 0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The rest, when no more text comes."""
        rest, self._buffer = self._buffer, ""
        return rest
