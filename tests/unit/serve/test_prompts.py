"""Prompts as tokens: long ones are not encoded whole to be refused, or to be cut."""

from __future__ import annotations

import random

import pytest

from descant.serve.http.errors import ApiError
from descant.serve.model.prompts import PromptEncoder, PromptRoom
from tests.support import json_tokenizer


class CountingTokenizer:
    """Counts the characters that are encoded."""

    def __init__(self):
        self.tokenizer, self.num_chars = json_tokenizer.tokenizer(), 0

    def __call__(self, text, **options):
        self.num_chars += len(text)
        return self.tokenizer(text, **options)


@pytest.fixture
def counting():
    return CountingTokenizer()


TEXT = "".join(random.Random(1).choices('abme \n{":,n</s>', k=200_000))


def test_a_text_that_does_not_fit_is_not_encoded_whole(counting):
    with pytest.raises(ApiError, match="at most 1000 tokens, it has more") as caught:
        PromptEncoder(counting, 276, None).text(TEXT, PromptRoom(1000))
    assert caught.value.code == "context_length_exceeded"
    assert counting.num_chars < 20_000


@pytest.mark.parametrize("kept", [1, 50, 3000])
def test_the_last_tokens_are_those_of_the_whole_text(counting, kept):
    whole = PromptEncoder(counting, 276, None).text(TEXT)
    counting.num_chars = 0
    assert PromptEncoder(counting, 276, None).text(TEXT, PromptRoom(100, kept))[-kept:] == whole[-kept:]
    assert counting.num_chars < 40_000


def test_what_fits_is_encoded_as_it_is(counting):
    encoder = PromptEncoder(counting, 276, None)
    whole = encoder.text(TEXT)
    assert encoder.text(TEXT, PromptRoom(len(whole))) == encoder.text(TEXT, PromptRoom()) == whole
    for prompt, take in ((TEXT, encoder.text), (whole, encoder.ids)):
        with pytest.raises(ApiError, match=f"at most {len(whole) - 1} tokens, it has {len(whole)}"):
            take(prompt, PromptRoom(len(whole) - 1))
        assert take(prompt, PromptRoom(5, kept=len(whole))) == whole
