"""The tokens removed at a prompt's end, and the tokens that may replace them."""

from __future__ import annotations

import pytest

from descant.tokenization.token_healing import HealedSuffix, TokenPrefixIndex
from tests.contracts import configs
from tests.support.byte_tokenizer import SPECIAL, TEXTS, tokenizer


def ids(*texts: bytes | str) -> list[int]:
    return [TEXTS.index(text if isinstance(text, bytes) else text.encode()) for text in texts]


def healed_text(*prompt: bytes | str) -> bytes:
    return HealedSuffix.from_prompt(tokenizer(), ids(*prompt)).text


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "http"], b"http"),  # -> "https"
        (["a", "http", ":"], b":"),  # -> "://"
        (["a", "b"], b""),  # nothing is longer
        (["a", " "], b" "),  # -> " un", " universe"
        (["a", " un", "ivers"], b" univers"),  # two tokens, though nothing begins with "ivers" alone
        (["a", " ", "u", "n", "i"], b" uni"),
        (["a", b"\xc3"], b"\xc3"),  # the first byte of é
        (["a", b"\xe2", b"\x82"], b"\xe2\x82"),  # two of the three of €
        (["a", b"\xc3\xa9"], b""),  # a whole character that nothing extends
        (["http"], b""),  # one token: nothing stays before it
        (["http", ":"], b":"),
        (["<s>", "http"], b"http"),  # the begin token stays
        (["a", "http", "</s>"], b""),  # a special token ends it
        (["</s>", " un", "ivers"], b" univers"),
        (["a", "<"], b""),  # special tokens are no text, so none extends this
        (["a", "x", "yz"], b"xyz"),  # "xyzzy" is longer, though "yz" begins nothing
    ],
)
def test_what_is_taken_off(prompt, expected):
    assert healed_text(*prompt) == expected


def test_an_empty_prompt_has_nothing_to_take_off():
    assert HealedSuffix.from_prompt(tokenizer(), []).tokens == []


def test_ids_beyond_the_tokenizer_stay():
    assert HealedSuffix.from_prompt(tokenizer(), [5, 1000]).tokens == []
    assert HealedSuffix.from_prompt(tokenizer(), [5, 1000, *ids("http")]).tokens == ids("http")


def allowed(tail: HealedSuffix, *new: bytes | str) -> list[bytes] | None:
    found = tail.allowed_ids(ids(*new))
    return None if found is None else sorted({TEXTS[at] for at in found})


def test_what_may_follow():
    tail = HealedSuffix.from_prompt(tokenizer(), ids("a", " un", "ivers"))
    assert allowed(tail) == [b" un", b" universe", b" university"]
    assert allowed(tail, " un") == [b"ivers", b"iverse"]
    assert allowed(tail, " universe") is None
    assert allowed(tail, " un", "ivers") is None
    assert allowed(tail, " un", "ivers", "e") is None


def test_special_tokens_never_follow():
    special = set(ids(*SPECIAL))
    spellings = TokenPrefixIndex.from_tokenizer(tokenizer())
    assert not special & spellings.text_ids
    assert not special & set(spellings.ids_with_prefix(b"<").tolist())
    assert ids("<")[0] in spellings.ids_with_prefix(b"<").tolist()


def test_of_every_prompt_what_is_allowed_agrees_and_can_be_said():
    # The law itself, by brute force.
    plain = [at for at in range(len(TEXTS)) if at not in ids(*SPECIAL)]
    some = plain[::3] + ids(" ", "u", "n", " un", "ivers", "x", "yz", b"\xe2", b"\x82", "http", ":")
    count = 0
    for first in some:
        for second in some:
            tail = HealedSuffix.from_prompt(tokenizer(), [*ids("a"), first, second])
            runs = [TEXTS[second], TEXTS[first] + TEXTS[second]]
            longest = max((run for run in runs if any(_longer(t, run) for t in plain)), key=len, default=b"")
            assert tail.text == longest
            for said in range(len(tail)):
                rest = b"".join(TEXTS[at] for at in tail.tokens[said:])
                found = set(tail.allowed_ids(tail.tokens[:said]).tolist())
                assert found == {at for at in plain if TEXTS[at].startswith(rest)} | {tail.tokens[said]}
                assert tail.tokens[said] in found  # so there is always a way
            count += len(tail) > 0
    assert count > 100


def _longer(token: int, text: bytes) -> bool:
    return TEXTS[token] != text and TEXTS[token].startswith(text)


def test_spellings_are_made_once_and_anew_for_other_special_tokens():
    one = tokenizer()
    assert TokenPrefixIndex.from_tokenizer(one) is TokenPrefixIndex.from_tokenizer(one)
    other = configs.tokenizer()
    before = TokenPrefixIndex.from_tokenizer(other)
    try:
        other.pad_token = "!"
        assert configs.TEXTS.index("!") not in TokenPrefixIndex.from_tokenizer(other).text_ids
    finally:
        other.pad_token = None
    assert configs.TEXTS.index("!") in before.text_ids


def test_a_stop_string_counts_after_the_text_that_was_there():
    tail = HealedSuffix.from_prompt(tokenizer(), ids("a", "http", ":"))
    assert not tail.completes_string(ids("a", "http"), ids(":"), [":"])
    assert tail.completes_string(ids("a", "http"), ids("://"), ["/"])
    assert tail.completes_string(ids("a", "http"), ids("://"), ["p://"])
    assert tail.completes_string(ids("a", "http"), ids(":", "a", ":"), [":"])
    assert not tail.completes_string(ids("a", "http"), ids(":"), ["http:"])
    assert tail.completes_string(ids("a", "http"), ids("://"), ["p:/"])  # it ends beyond the colon
