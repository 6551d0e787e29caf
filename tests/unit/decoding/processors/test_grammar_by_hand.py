"""`GrammarLogitsProcessor` called by hand: permitted tokens, the end token, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

import descant
from tests.support import pretrained


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(pretrained.folder("smollm2"))


def permitted(tokenizer, processor, text, prompt=()):
    ids = torch.tensor([[*prompt, *tokenizer.encode(text)]], dtype=torch.long)
    scores = processor(ids, torch.zeros(1, len(tokenizer)))
    assert set(scores.unique().tolist()) <= {0.0, -torch.inf}
    return {tokenizer.decode([token]) for token in scores[0].isfinite().nonzero().squeeze(1).tolist()}


def test_tokens_that_continue_the_text_are_permitted(tokenizer):
    processor = descant.GrammarLogitsProcessor({"choice": ["red", "reed"]}, tokenizer)
    assert permitted(tokenizer, processor, "r") == {"e", "ed", "ee", "eed"}
    assert permitted(tokenizer, processor, "ree") == {"d"}


def test_the_end_is_permitted_where_the_text_is_complete(tokenizer):
    processor = descant.GrammarLogitsProcessor({"regex": "ab?"}, tokenizer)
    assert permitted(tokenizer, processor, "a") == {"b", tokenizer.eos_token}
    assert permitted(tokenizer, processor, "ab") == {tokenizer.eos_token}


def test_the_prompt_is_not_part_of_the_text(tokenizer):
    prompt = tokenizer.encode("Colour: ")
    processor = descant.GrammarLogitsProcessor({"choice": ["red"]}, tokenizer, prompt_length=len(prompt))
    assert permitted(tokenizer, processor, "re", prompt) == {"d"}
