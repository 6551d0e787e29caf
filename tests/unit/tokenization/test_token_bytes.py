"""The bytes of a token are what it adds to a text, for every kind of tokenizer."""

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import descant
from descant.tokenization import token_bytes
from descant.tokenization.token_bytes import TokenBytes
from tests.support import pretrained, wordpiece

TEXTS = [
    "Hello world! It's 42° — naïve café, isn't it?",
    "\n\n\tdef f(x):\n        return x ** 2  # two  spaces\r\n",
    "日本語の文、한국어 문장。 हिन्दी क्षत्रिय நன்றி ภาษาไทย",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 n\u0303 a\u0308\u0323 \u200b\ufeff𝔘𝔫𝔦 𐍈",
    " a space before, and one after ",
    "",
]
BYTEWISE = ["smollm2", "minimind2-small", "whisper-tiny.en"]


@pytest.fixture(scope="module")
def loaded():
    return pretrained.tokenizer


def encoded(tokenizer, text):
    known = TokenBytes.from_tokenizer(tokenizer).bytes
    return b"".join(known[at] for at in tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", [*BYTEWISE, "gemma3-270m"])
def test_the_bytes_of_a_text_s_tokens_are_the_text(name, text, loaded):
    assert encoded(loaded(name), text) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_but_for_the_space_that_a_tokenizer_puts_first(text, loaded):
    assert encoded(loaded("stories15m"), text) == (b" " + text.encode() if text else b"")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("name", ["whisper-tiny.en", "gemma3-270m"])
def test_any_text(name, text, loaded):
    text = text.replace("▁", "_")  # which is a space to sentencepiece
    assert encoded(loaded(name), text) == text.encode()


def test_a_tokenizer_that_normalises_is_right_about_what_it_kept(loaded):
    text = "The  naive café is closed, ﬁnally: it's 42."
    assert (
        encoded(loaded("flan-t5-small-titles"), text).decode()
        == " The naive café is closed, finally: it's 42."
    )


@pytest.mark.parametrize("name", [*BYTEWISE, "gemma3-270m", "stories15m", "flan-t5-small-titles"])
def test_any_tokens_in_a_row_are_what_the_tokenizer_decodes(name, loaded):
    tokenizer, draw = loaded(name), random.Random(name)
    known = TokenBytes.from_tokenizer(tokenizer)
    assert known.size == len(tokenizer) == len(known.bytes)
    whole = [at for at in range(known.size) if not broken(known.bytes[at])]
    for _ in range(300):
        ids = draw.choices(whole, k=draw.randint(1, 12))
        text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(known.bytes[at] for at in ids).decode().removeprefix(" ") == text.removeprefix(" "), (
            ids
        )


def broken(some):
    try:
        some.decode()
    except UnicodeDecodeError:
        return True
    return False


@pytest.mark.parametrize("name", ["gemma3-270m", "stories15m"])
def test_sentencepiece_s_byte_tokens(name, loaded):
    tokenizer = loaded(name)
    for byte in range(256):
        at = tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")
        assert TokenBytes.from_tokenizer(tokenizer).bytes[at] == bytes([byte])


def test_wordpiece_continues_words_and_spaces_them():
    tokenizer = wordpiece.tokenizer()
    known, ids = TokenBytes.from_tokenizer(tokenizer).bytes, tokenizer.get_vocab()
    assert known[ids["end"]] == b" end"
    assert known[ids["##per"]] == b"per"
    assert known[ids["!"]] == b"!", "the decoder puts no space before it"
    assert known[ids["[SEP]"]] == b"[SEP]"
    for text in wordpiece.TEXT:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoded(tokenizer, text).decode() == " " + tokenizer.backend_tokenizer.decode(own)


def test_wordpiece_without_cleanup_spaces_punctuation():
    tokenizer = wordpiece.tokenizer(cleanup=False)
    assert TokenBytes.from_tokenizer(tokenizer).bytes[tokenizer.get_vocab()["!"]] == b" !"


def words(*tokens, decoder=None, before=None, **ids):
    """A tokenizer of whole words, numbered in their order."""
    made = Tokenizer(
        models.WordLevel({token: at for at, token in enumerate(tokens)} | ids, unk_token=tokens[0])
    )
    if decoder is not None:
        made.decoder = decoder
    if before is not None:
        made.pre_tokenizer = before
    return made


SEQUENCE, SPACES = decoders.Sequence, decoders.Replace("▁", " ")
CASES = {
    "words joined by spaces": (words("[u]", "a", "b"), [b" [u]", b" a", b" b"]),
    "end-of-word marks": (words("un</w>", "a", decoder=decoders.BPEDecoder("</w>")), [b"un ", b"a"]),
    "a mark of its own": (words("_a", "b_", decoder=decoders.Metaspace("_", "first")), [b" a", b"b "]),
    "no decoder, but bytes before": (words("Ġa", "é", before=pre_tokenizers.ByteLevel()), [b" a", b"\xe9"]),
    "no decoder, but spaces before": (words("▁a", "b", before=pre_tokenizers.Metaspace()), [b" a", b"b"]),
    "not of the bytes' alphabet": (
        words("日", "a b", "é", decoder=decoders.ByteLevel()),
        ["日".encode(), b"a b", b"\xe9"],
    ),
    "stripped": (
        words("▁▁a▁", "b", decoder=SEQUENCE([SPACES, decoders.Strip(" ", 1, 1)])),
        [b" a", b"b"],
    ),
    "stripped when whole": (
        words("▁a▁", "b", decoder=SEQUENCE([SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 1)])),
        [b" a ", b"b"],
    ),
    "longer replacements": (words("a--b", "-", decoder=decoders.Replace("--", "—")), ["a—b".encode(), b"-"]),
    "bytes that are none": (words("<0xG0>", "<0x0A>", decoder=decoders.ByteFallback()), [b"<0xG0>", b"\n"]),
    "a decoder of its own kind": (
        words("a", "b|", "|", decoder=decoders.Replace(Regex(r"\|$"), " ")),
        [b"a", b"b ", b" "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_decoders(case):
    tokenizer, expected = CASES[case]
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert TokenBytes.from_tokenizer(wrapped).bytes == expected


def test_a_bare_tokenizer_will_do():
    assert TokenBytes.from_tokenizer(words("▁a", "b", decoder=decoders.Metaspace())).bytes == [b" a", b"b"]


def test_ids_without_a_token_have_no_bytes():
    known = TokenBytes.from_tokenizer(words("a", "b", c=5))
    assert known.bytes == [b" a", b" b", b"", b"", b"", b" c"]
    assert known.size == 6


@pytest.mark.parametrize("hole", [0, 700, 1499])
def test_ids_without_a_token_among_many(hole):
    """Also where a token that holds a space makes up for it."""
    ids = [at for at in range(1501) if at != hole]
    tokens = {f"▁{at}" if at != 1200 else "▁a b": at for at in ids}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="▁1"))
    tokenizer.decoder = decoders.Metaspace()
    known = TokenBytes.from_tokenizer(tokenizer)
    assert known.bytes == [
        b"" if at == hole else b" a b" if at == 1200 else f" {at}".encode() for at in range(1501)
    ]


@pytest.mark.parametrize("fallback", [True, False])
def test_byte_tokens_among_many(fallback):
    tokens = ["<0xE2>", "▁<0x0A>", *(f"▁{at}" for at in range(1500))]
    tail = [decoders.ByteFallback(), decoders.Fuse()] if fallback else [decoders.Fuse()]
    known = TokenBytes.from_tokenizer(words(*tokens, decoder=SEQUENCE([SPACES, *tail])))
    assert known.bytes[:3] == [b"\xe2" if fallback else b"<0xE2>", b" <0x0A>", b" 0"]


def test_added_tokens(loaded):
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.folder("minimind2-small"))
    before = TokenBytes.from_tokenizer(tokenizer)
    assert TokenBytes.from_tokenizer(tokenizer) is before, "made once"
    tokenizer.add_tokens(["née", "x y"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<é▁>"]})
    after = TokenBytes.from_tokenizer(tokenizer)
    assert after is not before
    assert after.bytes[before.size :] == ["née".encode(), b"x y", "<é▁>".encode()]
    assert encoded(tokenizer, "one née x y<é▁>!") == "one née x y<é▁>!".encode()


def test_tokens_added_to_few():
    tokenizer = words("a", "Ġb", decoder=decoders.ByteLevel())
    tokenizer.add_tokens(["née"])
    tokenizer.add_special_tokens(["é"])
    assert TokenBytes.from_tokenizer(tokenizer).bytes == [b"a", b" b", "née".encode(), "é".encode()]
    tokenizer = words("a", "▁b", decoder=decoders.Metaspace())
    tokenizer.add_tokens(["▁c"])
    tokenizer.add_special_tokens(["▁d"])
    assert TokenBytes.from_tokenizer(tokenizer).bytes == [b"a", b" b", b" c", "▁d".encode()]


def test_tokens_added_to_many(loaded):
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.folder("stories15m"))
    tokenizer.add_tokens(["▁▁▁x"])
    assert TokenBytes.from_tokenizer(tokenizer).bytes[-1] == b"   x"


def test_special_tokens_are_their_own_text(loaded):
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.folder("stories15m"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a▁b>", "<0x0A>"]})
    ids = tokenizer.get_vocab()
    assert TokenBytes.from_tokenizer(tokenizer).bytes[ids["<a▁b>"]] == "<a▁b>".encode()
    assert TokenBytes.from_tokenizer(tokenizer).bytes[ids["</s>"]] == b"</s>"


def slow(tokens, **traits):
    """A tokenizer written in Python, of which only a few traits are known."""
    return SimpleNamespace(get_vocab=lambda: {token: at for at, token in enumerate(tokens)}, **traits)


def test_slow_tokenizers():
    assert TokenBytes.from_tokenizer(slow(["▁a", "<0xE2>", "b"], sp_model=None)).bytes == [
        b" a",
        b"\xe2",
        b"b",
    ]
    assert TokenBytes.from_tokenizer(slow(["Ġa", "âĤ"], byte_decoder={})).bytes == [b" a", b"\xe2\x82"]
    assert TokenBytes.from_tokenizer(slow(["a", "##b"], wordpiece_tokenizer=None)).bytes == [b" a", b"b"]
    assert TokenBytes.from_tokenizer(slow([b"\xe2\x82", b"a"], convert_tokens_to_string="".join)).bytes == [
        b"\xe2\x82",
        b"a",
    ]


def test_a_tokenizer_of_an_unknown_kind_is_asked():
    tokenizer = transformers.ByT5Tokenizer()
    known = TokenBytes.from_tokenizer(tokenizer)
    for text in TEXTS:
        assert encoded(tokenizer, text) == text.encode()
    assert known.bytes[tokenizer.eos_token_id] == b"</s>"

    shouting = slow(
        ["a", "+b", "é"],
        tokenize=list,
        convert_tokens_to_string=lambda some: "".join(some).upper().replace("+", " "),
    )
    assert TokenBytes.from_tokenizer(shouting).bytes == [b"A", b" B", "É".encode()]


@pytest.mark.parametrize("nothing", [object(), SimpleNamespace(get_vocab=lambda: {"a": 0})])
def test_what_is_no_tokenizer_is_refused(nothing):
    with pytest.raises(descant.InputError, match="tokenizer"):
        TokenBytes.from_tokenizer(nothing)


def test_a_tokenizer_is_not_kept_alive():
    tokenizer = wordpiece.tokenizer()
    before = len(token_bytes._by_tokenizer)
    watched = weakref.ref(TokenBytes.from_tokenizer(tokenizer))
    assert len(token_bytes._by_tokenizer) == before + 1
    del tokenizer
    gc.collect()
    assert watched() is None
    assert len(token_bytes._by_tokenizer) == before
