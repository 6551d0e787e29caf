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
from descant.tokenization.token_bytes import Vocabulary

__all__ = ["Holdback", "StopTable", "stop_strings_of"]

Array = np.ndarray[Any, np.dtype[Any]]
_KEPT = 32  # tables remembered for each vocabulary


def stop_strings_of(given: Any) -> tuple[str, ...]:
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


class _Automaton(NamedTuple):
    """Which prefix of a stop string the text so far ends with, the longest (Aho and Corasick, 1975)."""

    after: Array  # [S, 256] the state after a byte
    depth: Array  # [S] how many bytes of the text it holds
    ends: Array  # [S] whether a stop string ends here
    texts: list[bytes]  # [S] the prefix itself, shorter ones first

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> _Automaton:
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


class _Lookup:
    """A table [V, S] kept by the few rows it has: `lookup[tokens, states]` reads it like an array.

    Tokens of no bytes, -1 and ids beyond the vocabulary among them, share row 0.
    """

    def __init__(self, kind: Array, rows: Array) -> None:
        self._kind = kind  # [V + 1] the row of each token, then that of all others
        self._rows = rows  # [C, S]
        self.shape = len(kind) - 1, rows.shape[1]
        self.dtype = rows.dtype

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        tokens, states = key
        return self._rows[self._kind[np.minimum(tokens, self.shape[0])], states]


class StopTable:
    """What every token does to every state of matching: `next[token, state]` and `hits[token, state]`.

    A row starts in state 0, or in `run(prompt)`. `hits` says that some stop string ends inside the token,
    wherever it began; `next` is the state after it. States are small integers below `states`.
    """

    def __init__(self, vocabulary: Vocabulary, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.size = vocabulary.size
        encoded = [one.encode() for one in strings]
        self.reach = max(map(len, encoded))  # no match spans more tokens that have bytes
        automaton = _Automaton.of(encoded)
        self.states = len(automaton.texts)
        self.depth = automaton.depth  # [S] how many bytes of a stop string the text ends with
        self._kind, rows, hits = _composed(vocabulary, automaton)
        self.next = _Lookup(self._kind, rows)
        self.hits = _Lookup(self._kind, hits)

    @classmethod
    def of(cls, tokenizer: Any, stop_strings: str | Iterable[str]) -> StopTable:
        """The table of a tokenizer and its stop strings, made once for each."""
        strings = tuple(sorted(stop_strings_of(stop_strings)))
        vocabulary = Vocabulary.of(tokenizer)
        with _lock:
            known = _tables.setdefault(vocabulary, OrderedDict())
            if strings not in known:
                known[strings] = cls(vocabulary, strings)
                if len(known) > _KEPT:
                    known.popitem(last=False)
            known.move_to_end(strings)
            return known[strings]

    def run(self, ids: Any) -> Any:
        """The state after ids [L], a number, or [N, L], an array [N]; only their last few matter."""
        ids = np.asarray(ids, np.int64)
        state = np.zeros(ids.shape[:-1], self.next.dtype)
        window = ids[..., -self.reach :]
        if window.shape[-1] < ids.shape[-1] and bool((self._kind[self._known(window)] == 0).any()):
            # Tokens without bytes take no room in a match.
            order = np.argsort(self._kind[self._known(ids)] != 0, axis=-1, kind="stable")
            window = np.take_along_axis(ids, order[..., -self.reach :], -1)
        for at in range(window.shape[-1]):
            state = self.next[window[..., at], state]
        return int(state) if ids.ndim == 1 else state

    def judge(self, ids: Array) -> Array:
        """Whether a stop string ends inside the last of the ids [N, L], each row by itself [N]."""
        if ids.shape[1] == 0:
            return np.zeros(len(ids), bool)
        found: Array = self.hits[ids[:, -1], self.run(ids[:, :-1])]
        return found

    def _known(self, ids: Array) -> Array:
        return np.minimum(ids, self.size)


_tables: weakref.WeakKeyDictionary[Vocabulary, OrderedDict[tuple[str, ...], StopTable]]
_tables = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Tokens:
    """The tokens of a vocabulary as an automaton is led over them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.data = vocabulary.data
        self.start, self.stop = vocabulary.offsets[:-1], vocabulary.offsets[1:]
        self.length = self.stop - self.start
        self.edge = np.zeros(len(self.data) + 1, bool)  # where a token ends
        self.edge[self.stop] = True
        self.first = np.full(len(self.length), -1, np.int16)
        full = self.length > 0
        self.first[full] = self.data[self.start[full]]

    def around(self, at: Array) -> Array:
        """The tokens that these places in the data belong to."""
        return np.searchsorted(self.start, at, side="right") - 1


class _Plain(NamedTuple):
    """What each token does to a state of which nothing lives on after the token's first byte."""

    rest: Array  # [V] the state after it
    inside: Array  # [V] whether it holds a whole stop string
    opening: Array  # [V] its first byte, if some stop string ends in that, or -1


class _Walks(NamedTuple):
    """What tokens do to the states that live on longer."""

    token: Array  # [P] ascending
    state: Array  # [P]
    after: Array  # [P] the state after it
    hit: Array  # [P] whether a stop string ends after the token's first byte


def _composed(vocabulary: Vocabulary, automaton: _Automaton) -> tuple[Array, Array, Array]:
    """The row of each token [V + 1], and the rows [C, S]: the state after it, and whether it hits.

    What came before is forgotten at the first byte that does not go on with it, so a token does the
    same to most states, and the few exceptions are found by themselves. Tokens that do the same to
    all states share a row, and row 0 is that of tokens without bytes.
    """
    tokens, states = _Tokens(vocabulary), len(automaton.texts)
    plain = _plain(tokens, automaton)
    walks = _walks(tokens, automaton, plain)
    key = 1 + ((plain.opening + 1) * states + plain.rest) * 2 + plain.inside
    key[tokens.length == 0] = 0
    odd, index = np.unique(walks.token, return_inverse=True)
    key[odd] = _split(key[odd], walks, index, states)
    kind, example = _numbered(np.append(key, 0))
    example[0] = 0

    after = plain.rest[example][:, None].repeat(states, 1)
    hits = plain.inside[example][:, None] | _openings(automaton)[plain.opening[example]]
    after[0], hits[0] = np.arange(states), False
    shown = example[kind[walks.token]] == walks.token
    row = kind[walks.token[shown]], walks.state[shown]
    after[row] = walks.after[shown]
    hits[row] |= walks.hit[shown]
    return kind.astype(np.min_scalar_type(len(after))), after.astype(np.min_scalar_type(states)), hits


def _openings(automaton: _Automaton) -> Array:
    """Whether a stop string ends in a byte, by byte and state [257, S]; in none, at the end."""
    return np.append(automaton.ends[automaton.after].T, np.zeros((1, len(automaton.ends)), bool), 0)


def _plain(tokens: _Tokens, automaton: _Automaton) -> _Plain:
    """The places of every beginning of a stop string in all tokens, found from those one byte shorter."""
    rest, inside = np.zeros(len(tokens.length), np.int64), np.zeros(len(tokens.length), bool)
    places = {text: np.flatnonzero(tokens.data == text[0]) for text in automaton.texts if len(text) == 1}
    for state, text in enumerate(automaton.texts[1:], 1):
        size = len(text)
        if size > 1:
            at = places[text[:-1]]
            at = at[tokens.data[at + size - 1] == text[-1]]
        else:
            at = places[text]
        if automaton.ends[state]:
            inside[tokens.around(at)] = True
        over = tokens.edge[at + size]
        rest[tokens.around(at[over])] = state  # longer ones come later
        places[text] = at[~over]
    closing: Array = np.any(_openings(automaton), axis=1)
    closing = closing[tokens.first]
    return _Plain(rest, inside, np.where(closing, tokens.first, -1).astype(np.int64))


def _walks(tokens: _Tokens, automaton: _Automaton, plain: _Plain) -> _Walks:
    """The automaton led over the tokens from all states at once, for as long as a state's own text lasts."""
    after, depth, ends = automaton.after, automaton.depth, automaton.ends
    found, pairs = [], []
    for byte in np.flatnonzero((depth[after] > 1).any(0)).tolist():
        states = np.flatnonzero(depth[after[:, byte]] > 1)
        some = np.flatnonzero(tokens.first == byte)
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
        told = ~going & hit & ~plain.inside[token]
        found.append((token[told], state[told], plain.rest[token[told]], hit[told]))
        token, state, now, hit = (part[going] for part in (token, state, now, hit | ends[now]))
    walks = [np.concatenate(part) for part in zip((none, none, none, none.astype(bool)), *found, strict=True)]
    order = np.argsort(walks[0] * len(depth) + walks[1])
    return _Walks(*(part[order] for part in walks))


def _split(key: Array, walks: _Walks, index: Array, states: int) -> Array:
    """Keys of tokens [E], told apart by their exceptions, of which `index` [P] says whose they are."""
    code = (walks.state * states + walks.after) * 2 + walks.hit
    begin = np.searchsorted(index, np.arange(len(key)))
    count = np.diff(begin, append=len(index))
    top = 2 * 257 * states + 1  # beyond every plain key
    for turn in range(int(count.max(initial=0))):
        some = np.flatnonzero(count > turn)
        number, seen = _numbered(key[some] * (2 * states * states) + code[begin[some] + turn])
        key[some] = top + number
        top += len(seen)
    return key


def _numbered(keys: Array) -> tuple[Array, Array]:
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


class Holdback:
    """Text on its way to a reader, cut before the first stop string and held back where one may begin.

    The first stop string is the one that ends first, and of those that end together the longest.
    """

    def __init__(self, stop_strings: str | Iterable[str]) -> None:
        self.strings = stop_strings_of(stop_strings)
        self.matched: str | None = None
        self._begun = {one[:n] for one in self.strings for n in range(1, len(one))}
        self._longest = max(map(len, self.strings))
        self._held = ""

    def feed(self, delta: str) -> str:
        """What can be shown now that `delta` came; "" once a stop string has come."""
        if self.matched is not None:
            return ""
        text = self._held + delta
        found = [(at + len(one), at, one) for one in self.strings if (at := text.find(one)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        keep = next((n for n in sizes if text[-n:] in self._begun), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        return rest
