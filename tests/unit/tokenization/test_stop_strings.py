"""Stop strings: the table against a search in the text itself, and text that is held back."""

import gc
import random
import weakref

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import descant
from descant.tokenization import stop_strings
from descant.tokenization.stop_strings import StopStringBuffer, StopStringMatcher
from descant.tokenization.token_bytes import TokenBytes
from tests.support import pretrained, wordpiece


def vocabulary(*tokens):
    return TokenBytes(b"".join(tokens), np.cumsum([0, *map(len, tokens)]))


class Toy:
    """A tokenizer whose tokens are their own text."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def get_vocab(self):
        return {token: at for at, token in enumerate(self.tokens)}

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def fires(known, strings, ids):
    """Whether a stop string ends in the last token, looked for in the text."""
    before = b"".join(known.bytes[at] for at in ids[:-1] if at < known.size)
    text = before + (known.bytes[ids[-1]] if ids[-1] < known.size else b"")
    ends = range(len(before) + 1, len(text) + 1)
    return any(text.endswith(one.encode(), 0, end) for one in strings for end in ends)


WORDS = ["st", "op", "stop", "opera", "sto", "pper", "las", "topper", "s", "to", "pped", "at", "tion"]


MATCHES = ("st op", "stop", "st opera", "sto pper", "las topper", "s to pped")
MISSES = ("stop at", "st op at", "st opera tion", "st", "las", "op st", "to pper")


@pytest.mark.parametrize("tokens", [*MATCHES, *MISSES])
def test_documented_matches(tokens):
    table = StopStringMatcher.from_tokenizer(Toy(*WORDS), ["stop"])
    *before, last = (WORDS.index(token) for token in tokens.split())
    assert bool(table.matches[last, table.state_after(before)]) == (tokens in MATCHES)


def rows(known, strings, token):
    """A token's row of the table, state by state."""
    encoded = [one.encode() for one in strings]
    prefixes = sorted(
        {one[:n] for one in encoded for n in range(len(one) + 1)}, key=lambda one: (len(one), one)
    )
    after, hits = [], []
    for prefix in prefixes:
        text = prefix + known.bytes[token]
        ends = range(len(prefix) + 1, len(text) + 1)
        hits.append(any(text.endswith(one, 0, end) for one in encoded for end in ends))
        rest = next(text[n:] for n in range(len(text) + 1) if text[n:] in prefixes)
        after.append(prefixes.index(rest))
    return after, hits


tokens = st.lists(st.text("ab", max_size=5).map(str.encode) | st.binary(max_size=3), min_size=1, max_size=8)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(tokens, stops)
@settings(max_examples=400, deadline=None)
def test_every_row_of_a_table(tokens, strings):
    known, table = vocabulary(*tokens), StopStringMatcher(vocabulary(*tokens), strings)
    states = np.arange(table.num_states)
    for token in range(len(tokens)):
        after, hits = rows(known, strings, token)
        assert table.transition[token, states].tolist() == after
        assert table.matches[token, states].tolist() == hits


@given(tokens, stops, st.lists(st.integers(0, 8), max_size=12))
@settings(max_examples=150, deadline=None)
def test_the_table_is_a_search_in_the_text(tokens, strings, ids):
    known, table, state = vocabulary(*tokens), StopStringMatcher(vocabulary(*tokens), strings), 0
    for at, token in enumerate(ids):  # some of them beyond the vocabulary
        assert bool(table.matches[token, state]) == fires(known, strings, ids[: at + 1])
        state = int(table.transition[token, state])
        assert state == table.state_after(ids[: at + 1])


STRINGS = [
    ["stop"],
    ["\n\nHuman:", "</answer>"],
    ["e"],
    [" "],
    ["\n\n\n\n"],
    ["Human: ", "    "],
    ["aa", "aaa", "ba", "abab"],
    ["he", "she", "his", "hers"],
    ["é", "👩‍👩‍👧", "日本"],
    ["<|im_end|>", "the end of the world as we know it"],
]


@pytest.fixture(scope="module")
def smollm2():
    return transformers.AutoTokenizer.from_pretrained(pretrained.folder("smollm2"))


@pytest.mark.parametrize("strings", STRINGS, ids=repr)
def test_tables_of_a_real_vocabulary(strings, smollm2):
    known, table, draw = (
        TokenBytes.from_tokenizer(smollm2),
        StopStringMatcher.from_tokenizer(smollm2, strings),
        random.Random(0),
    )
    letters = set("".join(strings).encode())
    near = [at for at, token in enumerate(known.bytes) if letters.issuperset(token)]
    states = np.arange(table.num_states)
    for token in draw.sample(range(known.size), 300) + draw.sample(near, min(300, len(near))):
        after, hits = rows(known, strings, token)
        assert table.transition[token, states].tolist() == after, known.bytes[token]
        assert table.matches[token, states].tolist() == hits, known.bytes[token]


def test_its_shape(smollm2):
    table = StopStringMatcher.from_tokenizer(smollm2, ["stop"])
    assert table.transition.shape == table.matches.shape == (table.vocab_size, table.num_states) == (49152, 5)
    assert table.transition.dtype == np.uint8
    assert table.matches.dtype == bool
    long = StopStringMatcher(vocabulary(b"a"), ["a" * 300])
    assert long.transition.dtype == np.uint16
    assert long.state_after([0] * 299) == 299
    assert long.matches[0, 299]


def test_ids_beyond_the_vocabulary_change_nothing():
    table = StopStringMatcher(vocabulary(b"s", b"top", b""), ["stop"])
    states = np.arange(table.num_states)
    for token in (2, 3, 4, 10**6, -1):
        assert table.transition[token, states].tolist() == states.tolist()
        assert not table.matches[token, states].any()
    assert table.matches[1, table.state_after([0, 2, 3, 99])]
    assert table.matches[1, table.state_after([0] + [2] * 50)], "tokens without bytes take no room"


def test_many_rows_at_once():
    table, draw = (
        StopStringMatcher(vocabulary(b"s", b"to", b"p", b"", b"st", b"op"), ["stop", "tops"]),
        random.Random(1),
    )
    ids = np.array([[draw.randint(0, 6) for _ in range(15)] for _ in range(200)])
    assert table.state_after(ids).tolist() == [table.state_after(row) for row in ids.tolist()]
    assert table.ends_with_match(ids).tolist() == [
        bool(table.matches[row[-1], table.state_after(row[:-1])]) for row in ids
    ]
    assert table.ends_with_match(ids).any()
    assert table.ends_with_match(ids[:, :0]).tolist() == [False] * 200


def test_words_of_wordpiece_are_apart():
    tokenizer = wordpiece.tokenizer()
    ids = tokenizer("the last stop", add_special_tokens=False)["input_ids"]
    assert StopStringMatcher.from_tokenizer(tokenizer, "last stop").ends_with_match(np.array([ids]))[0]
    assert not StopStringMatcher.from_tokenizer(tokenizer, "laststop").ends_with_match(np.array([ids]))[0]


def test_a_table_is_made_once():
    tokenizer = Toy(*WORDS)
    table = StopStringMatcher.from_tokenizer(tokenizer, ["stop", "top"])
    assert StopStringMatcher.from_tokenizer(tokenizer, ("top", "stop", "top")) is table
    assert StopStringMatcher.from_tokenizer(tokenizer, ["stop"]) is not table
    for n in range(stop_strings._MAX_MATCHERS):
        StopStringMatcher.from_tokenizer(tokenizer, [f"s{n}"])
    assert StopStringMatcher.from_tokenizer(tokenizer, ["stop", "top"]) is table, "it is in use"
    for n in range(stop_strings._MAX_MATCHERS):
        StopStringMatcher.from_tokenizer(tokenizer, [f"s{n}"])
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None, "the longest unused go first"


def test_tables_that_nobody_uses_are_bounded_in_bytes(monkeypatch):
    tokenizer = Toy(*WORDS)
    size = StopStringMatcher.from_tokenizer(tokenizer, ["stop"]).nbytes
    assert size > 0
    monkeypatch.setattr(stop_strings, "_MAX_MATCHER_BYTES", 3 * size)
    kept = stop_strings._matchers[TokenBytes.from_tokenizer(tokenizer)]
    for n in range(12):
        StopStringMatcher.from_tokenizer(tokenizer, [f"s{n:03}"])
        assert kept.nbytes <= 3 * size
    long = weakref.ref(StopStringMatcher.from_tokenizer(tokenizer, ["".join(map(chr, range(97, 123))) * 9]))
    gc.collect()
    assert long() is None, "it is larger than all that may be kept"
    assert kept.nbytes == 0


def test_tables_go_with_their_tokenizer():
    tokenizer = Toy(*WORDS)
    table = weakref.ref(StopStringMatcher.from_tokenizer(tokenizer, ["stop"]))
    assert table() is not None
    del tokenizer
    gc.collect()
    assert table() is None


@pytest.mark.parametrize("bad", [[], "", ["a", ""], [1], None, 7, ["\ud800"]])
def test_what_cannot_stop_is_refused(bad):
    for make in (lambda: StopStringMatcher.from_tokenizer(Toy("a"), bad), lambda: StopStringBuffer(bad)):
        with pytest.raises(descant.InputError, match="stop_strings"):
            make()


def first(text, strings):
    """Where the first stop string begins and which it is: the first to end, then the longest."""
    for end in range(1, len(text) + 1):
        ending = [one for one in strings if text.endswith(one, 0, end)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return len(text), None


@given(
    deltas=st.lists(st.text("abc\n", max_size=4), max_size=12),
    strings=st.lists(st.text("abc\n", min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_held_back_text(deltas, strings):
    held, text, shown = StopStringBuffer(strings), "", ""
    for delta in deltas:
        text += delta
        shown += held.feed(delta)
        cut, which = first(text, strings)
        assert held.matched_string == which
        if which is not None:
            assert shown == text[:cut]
            continue
        begun = (n for n in range(len(text), 0, -1) if any(one.startswith(text[-n:]) for one in strings))
        assert shown == text[: len(text) - next(begun, 0)], "no more is held back than may become one"
    cut, _ = first(text, strings)
    assert shown + held.flush() == text[:cut]
    assert held.flush() == ""
