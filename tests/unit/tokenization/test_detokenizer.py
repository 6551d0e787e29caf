"""The text of growing token sequences, on every kind of tokenizer."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from descant.tokenization.detokenizer import IncrementalDetokenizer
from tests.support import pretrained

LOST = "\ufffd"
BYTE_LEVEL = ("smollm2", "minimind2-small", "whisper-tiny.en")
SENTENCEPIECE = ("stories15m", "gemma3-270m", "flan-t5-small-titles")  # the first two fall back to bytes
WORDPIECE = ("wordpiece", "wordpiece-cleaned")
WHOLE = (*BYTE_LEVEL, *SENTENCEPIECE, "byt5")  # can write any text, but for flan-t5
ALL = (*WHOLE, *WORDPIECE)

TEXTS = (
    "Hello world, this is a test.\nNew line  two spaces\t tab.",
    "👨‍👩‍👧‍👦 family 🇫🇷 flags 🏳️‍🌈!",
    "日本語のテキストと中文字符,한국어",
    "हिन्दी में पाठ, தமிழ் உரை, ภาษาไทยไม่มีช่องว่าง",
    "አማርኛ ጽሑፍ, ꦲꦏ꧀ꦱꦫꦗꦮ𐍈𒀀𒁀𓀀𓂀",
    "a\ufffdb \ufffd\ufffd c",
    "naïve café — “quotes” …",
    "x" * 50 + " " * 30 + "\n\n\n",
)
WORDS = [
    *("[UNK]", "[SEP]", "hello", "world", "don", "it", "we", "you", "do", "n", "t", "s", "m", "v", "r", "re"),
    *("ve", "'", ".", ",", "?", "!", "日", "n't", "'s", "\n", "##ing", "##s", "##é", "##本", "##'", "##t"),
]


@functools.cache
def tokenizer(name: str) -> Any:
    if name == "byt5":
        return transformers.ByT5Tokenizer()
    if name not in WORDPIECE:
        return pretrained.tokenizer(name)
    cleans = name == "wordpiece-cleaned"
    model = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    model.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="[UNK]", sep_token="[SEP]", clean_up_tokenization_spaces=cleans
    )


def encoded(name: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(name)(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces(name: str, ids: list[int], sizes: list[int] | None = None, **options: Any) -> list[str]:
    """What each `put` gives, then `end`; `sizes` says how many tokens come at a time."""
    stream, found, at = IncrementalDetokenizer(tokenizer(name), **options), [], 0
    for size in sizes or [1] * len(ids):
        found.append(stream.put(ids[at : at + size]))
        at += size
    assert at >= len(ids)
    return [*found, stream.end()]


def sizes(count: int, rng: random.Random) -> list[int]:
    """Tokens come one by one, or a few at once."""
    found: list[int] = []
    while sum(found) < count:
        found.append(rng.choice((1, 1, 1, 2, 5)))
    return found


# ------------------------------------------------------------------------ the pieces add up
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_texts(name, skip):
    for text in TEXTS:
        ids = encoded(name, text)
        found = pieces(name, ids, skip_special_tokens=skip)
        assert "".join(found) == tokenizer(name).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ALL)
def test_random_tokens_in_random_sizes(name):
    """Any tokens at all, specials and unknown ones among them; of byte tokens alone see below."""
    rng = random.Random(name)
    loaded = tokenizer(name)
    for _ in range(60):
        ids = [rng.randrange(len(loaded)) for _ in range(rng.randint(1, 80))]
        options = rng.choice(({}, {"skip_special_tokens": True}))
        found = pieces(name, ids, sizes(len(ids), rng), **options)
        assert "".join(found) == loaded.decode(ids, **options)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_random_bytes(name):
    """Bytes that are mostly no characters come out as the tokenizer shows them."""
    rng = random.Random(name)
    loaded = tokenizer(name)
    single = [i for i in range(400) if len(loaded.convert_ids_to_tokens(i)) == 1]
    for _ in range(60):
        ids = rng.choices(single, k=rng.randint(1, 80))
        assert "".join(pieces(name, ids, sizes(len(ids), rng))) == loaded.decode(ids)


def test_random_bytes_with_byte_fallback():
    """Each byte is shown once: in a character, or as broken, even where the run it stands in is broken."""
    rng = random.Random(1)
    loaded = tokenizer("stories15m")
    single = loaded.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    char = encoded("stories15m", "𓀀")[-4:]
    for _ in range(60):
        ids = rng.choices(single[128:], k=rng.randint(0, 9))
        while rng.random() < 0.9:
            ids += rng.choice((char, char, rng.choices(single[128:], k=2), rng.choices(single, k=20)))
        text = "".join(pieces("stories15m", ids, sizes(len(ids), rng)))
        assert sum(1 if char == LOST else len(char.encode()) for char in text) == len(ids)


class Chunks:
    """A tokenizer whose tokens are pieces of UTF-8 of any length; token `i` is the piece `i`."""

    def __init__(self, data: bytes, lengths: list[int]) -> None:
        self.pieces = []
        while data:
            length = lengths.pop() if lengths else 1
            self.pieces.append(data[:length])
            data = data[length:]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[one] for one in ids).decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80), lengths=st.lists(st.integers(1, 7), max_size=80))
def test_tokens_that_end_one_character_and_begin_the_next(text, lengths):
    loaded = Chunks(text.encode(), lengths)
    stream, shown = IncrementalDetokenizer(loaded), ""
    for one in range(len(loaded.pieces)):
        shown += stream.put([one])
        assert text.startswith(shown)
        known = loaded.decode(list(range(one + 1)))
        assert len(shown) >= len(known) - 3 or known.endswith(LOST * 2), "no more is held back than must be"
    assert shown + stream.end() == text


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=60), before=st.text(max_size=30), seed=st.integers(0, 9))
def test_any_text_after_any_prompt(text, before, seed):
    for name in ("smollm2", "stories15m", "byt5"):
        loaded = tokenizer(name)
        prompt, ids = encoded(name, before), encoded(name, text)
        whole, begun = loaded.decode(prompt + ids), loaded.decode(prompt)
        found = pieces(name, ids, sizes(len(ids), random.Random(seed)), prompt_ids=prompt)
        assert "".join(found) == whole[len(begun) :]


def test_a_special_token_in_between_does_not_cost_a_space():
    """Sentencepiece drops the space before a first word, and a context that decodes to nothing has none."""
    name = "stories15m"
    hello, world = encoded(name, "Hello"), encoded(name, "world")
    ids = hello + [2] * 200 + world
    assert "".join(pieces(name, ids, skip_special_tokens=True)) == "Hello world"
    assert "".join(pieces(name, world, prompt_ids=[*hello, 2], skip_special_tokens=True)) == " world"


# ------------------------------------------------------------------------ nothing is broken
@pytest.mark.parametrize("name", ALL)
def test_no_broken_character_is_ever_shown(name):
    for text in TEXTS:
        if LOST in text:
            continue
        ids = encoded(name, text)
        assert LOST not in tokenizer(name).decode(ids)
        assert not any(LOST in piece for piece in pieces(name, ids))


@pytest.mark.parametrize("name", ["smollm2", "stories15m", "byt5"])
def test_a_character_comes_with_its_last_token(name):
    ids = encoded(name, "x𓀀")
    tail = encoded(name, "𓀀")[-4:]
    assert ids[-4:] == tail, "the character takes four tokens"
    found = pieces(name, ids)
    assert "".join(found[:-2]) == "x"
    assert found[-2:] == ["𓀀", ""]


@pytest.mark.parametrize("name", ["smollm2", "stories15m"])
def test_a_whole_character_does_not_wait_for_the_next(name):
    ids = encoded(name, "x𓀀𓂀")
    stream = IncrementalDetokenizer(tokenizer(name))
    assert [stream.put(ids[:-3]), stream.put(ids[-3:])] == ["x𓀀", "𓂀"]


def test_a_genuine_replacement_character_comes_out():
    for name in ("smollm2", "stories15m", "gemma3-270m", "byt5"):
        ids = encoded(name, f"a{LOST}b{LOST}")
        assert "".join(pieces(name, ids)) == f"a{LOST}b{LOST}"
        # Many of them do not wait for the end.
        assert LOST in "".join(pieces(name, encoded(name, LOST * 200))[:-1])


@pytest.mark.parametrize("name", ["smollm2", "stories15m"])
def test_bytes_that_never_become_a_character_come_out(name):
    begun = encoded(name, "𓀀")[-4:-1]
    word = encoded(name, "word")
    assert "".join(pieces(name, word + begun)).rstrip(LOST) == tokenizer(name).decode(word)
    assert LOST in pieces(name, word + begun)[-1]
    middle = pieces(name, begun + word * 2)
    assert LOST in "".join(middle[:-1])
    assert "".join(middle) == tokenizer(name).decode(begun + word * 2)


def test_a_broken_run_of_bytes_takes_nothing_back():
    """Byte fallback shows every byte of a run as broken when one is; what was whole stays shown."""
    name = "stories15m"
    whole = encoded(name, "x𓀀")
    broken = whole + whole[-4:-1] + encoded(name, "word") * 3
    assert tokenizer(name).decode(broken).startswith("x" + LOST * 7)
    text = "".join(pieces(name, broken))
    assert text.startswith("x𓀀" + LOST)
    assert text.count(LOST) == 3
    assert text.endswith("word word word")
    assert "".join(pieces(name, whole + whole[-4:-1])) == "x𓀀" + LOST * 3


def test_a_prompt_that_ends_within_a_character():
    for name in ("smollm2", "stories15m"):
        ids = encoded(name, "see 𓀀 there")
        cut = next(n for n in range(len(ids)) if tokenizer(name).decode(ids[:n]).endswith(LOST))
        for at in range(cut, cut + 3):
            assert "".join(pieces(name, ids[at:], prompt_ids=ids[:at])) == "𓀀 there"
        # What the prompt broke for good is the prompt's.
        word = encoded(name, " there")
        assert "".join(pieces(name, word, prompt_ids=ids[:cut])).strip() == "there"
        assert pieces(name, [], prompt_ids=ids[:cut]) == [""]


def test_a_long_run_of_bytes_before_the_first_new_token():
    """A window that begins within a character would show the whole run as broken."""
    ids = encoded("stories15m", "ꦲꦏꦱꦫꦗꦮꦲꦏꦱꦫꦗꦮ")
    assert len(ids) > 36, "of three tokens each"
    for at in range(20, len(ids)):
        text = "".join(pieces("stories15m", ids[at:], prompt_ids=ids[:at]))
        assert text == "ꦲꦏꦱꦫꦗꦮꦲꦏꦱꦫꦗꦮ"[(at - 1) // 3 :]


def test_cleaned_up_spaces_are_not_shown_before_they_are_cleaned():
    name = "wordpiece-cleaned"
    words = "it ' s hello , world do n ' t . we ' ve \n hello 's !"
    ids = [WORDS.index(word) for word in words.split(" ")]
    assert tokenizer(name).decode(ids) == "it's hello, world don't. we've \n hello's!"
    assert "".join(pieces(name, ids)) == tokenizer(name).decode(ids)
    assert pieces(name, ids)[:4] == ["it", "", "'s", " hello"]


# ------------------------------------------------------------------------ stop strings
def test_a_stop_string_is_never_shown():
    name = "smollm2"
    ids = encoded(name, "One two STO no STOP three")
    found = pieces(name, ids, stop_strings=["STOP"])
    assert "".join(found) == "One two STO no "
    stream = IncrementalDetokenizer(tokenizer(name), stop_strings=["STOP"])
    text = "".join(stream.put([one]) for one in ids)
    assert (text, stream.matched_string) == ("One two STO no ", "STOP")
    assert "".join(pieces(name, encoded(name, "ends in ST"), stop_strings=["STOP"])) == "ends in ST"


# ------------------------------------------------------------------------ cost
@pytest.mark.parametrize("name", ["smollm2", "stories15m", "wordpiece"])
def test_a_token_costs_the_same_at_any_length(name):
    """Counted in tokens decoded, of text, of garbage and of special tokens."""

    class Counting:
        def __init__(self) -> None:
            self.tokens = 0

        def decode(self, ids: list[int], **options: Any) -> str:
            self.tokens += len(ids)
            return str(tokenizer(name).decode(ids, **options))

    rng = random.Random(0)
    kinds = {
        "text": [one for text in TEXTS * 4 for one in encoded(name, text)],
        "garbage": [rng.randrange(3, len(tokenizer(name))) for _ in range(600)],
        "bytes": rng.choices(range(3, 25 if name in WORDPIECE else 250), k=600),
        "special": [tokenizer(name).all_special_ids[0]] * 600,
    }
    for kind, ids in kinds.items():
        for options in ({}, {"skip_special_tokens": True}):
            counting = Counting()
            stream = IncrementalDetokenizer(counting, **options)
            for one in ids:
                stream.put([one])
            assert counting.tokens < 80 * len(ids), kind
            assert kind != "text" or counting.tokens < 40 * len(ids)


def test_nothing_put_is_nothing_shown():
    for name in ("smollm2", "stories15m"):
        assert pieces(name, []) == [""]
        stream = IncrementalDetokenizer(tokenizer(name), prompt_ids=encoded(name, "a b"))
        assert (stream.put([]), stream.end()) == ("", "")
