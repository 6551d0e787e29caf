"""The benchmark of the server: the same prompts and lengths for sides with token ids and sides with texts."""

from __future__ import annotations

import json
import os

import pytest

from bench.server import Load, http_side, ids_body, plain_words, text_body
from tests.support import pretrained


@pytest.fixture(scope="module")
def tokenizer():
    return pretrained.tokenizer("smol-draft")


def test_prompts_of_words_are_the_same_as_texts_and_as_ids(tokenizer):
    words = plain_words(tokenizer)
    assert len(words) > 1000
    work = Load.make(words, 4, 8, seed=1)
    assert work == Load.make(words, 4, 8, seed=1) != Load.make(words, 4, 8, seed=2)
    for prompt in work.prompts:
        ids, text = (make(prompt, 8) for make in (ids_body("m"), text_body("m", tokenizer)))
        assert ids["prompt"] == tokenizer(text["prompt"])["input_ids"] == prompt
        assert ids["max_tokens"] == text["max_tokens"] == 8
        assert json.loads(text["generation_config"])["eos_token_id"] == -1


def test_a_side_with_another_number_of_tokens_is_refused(monkeypatch):
    used = {"prompt_tokens": 2, "completion_tokens": 3}
    monkeypatch.setattr("bench.server.stream", lambda *_, **__: iter([{"usage": used}, "[DONE]"]))
    side = http_side(1, os.getpid(), ids_body("m"))
    assert side(Load([[1, 2]], 3)).tokens == 3
    with pytest.raises(RuntimeError, match="must read 2 and generate 4"):
        side(Load([[1, 2]], 4))
    used.clear()
    with pytest.raises(RuntimeError, match="must read 2 and generate 3"):
        side(Load([[1, 2]], 3))
