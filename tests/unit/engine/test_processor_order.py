"""Where processors of one's own run: after bans and grammars and before the samplers, or where they say."""

from __future__ import annotations

import re

import pytest
import torch

import descant
from descant import InputError, LogitsProcessor, RowError
from descant.models.loading.tiny_llama import toy
from tests.support.json_tokenizer import tokenizer

EOS = 2
PATTERN = "[a-c]{3}[0-9]{2}"


def top_two(scores):
    return scores.masked_fill(scores < scores.topk(2).values[..., -1:], -torch.inf)


class TopTwo(LogitsProcessor):
    """The two likeliest tokens."""

    def process(self, context, scores):
        return top_two(scores)


class Uniform(LogitsProcessor):
    """Permits every token again."""

    def process(self, context, scores):
        return torch.zeros_like(scores)


def run(**how):
    model = toy(vocab_size=len(tokenizer()), seed=2)
    given = {"max_new_tokens": 8, "do_sample": True, "seed": 4, "eos_token_id": EOS, "pad_token_id": 0, **how}
    ids = descant.generate(model, torch.tensor([[5, 40, 41]]), tokenizer=tokenizer(), **given)
    return ids[0, 3:].tolist()


@pytest.mark.parametrize("own", [TopTwo(), lambda ids, scores: top_two(scores)], ids=["class", "function"])
@pytest.mark.parametrize(
    "rule",
    [{"grammar": {"regex": PATTERN}}, {"suppress_tokens": list(range(6, 270))}],
    ids=["grammar", "bans"],
)
def test_a_filter_of_ones_own_keeps_permitted_tokens(own, rule):
    assert run(**rule, top_k=0, logits_processor=[own]) == run(**rule, top_k=2)


@pytest.mark.parametrize("name", ["custom", "top_k"])
def test_a_grammar_holds_after_processors_of_ones_own(name):
    own = type("Uniform", (Uniform,), {"order_name": name})()
    ids = run(grammar={"regex": PATTERN}, logits_processor=[own])
    assert re.fullmatch(PATTERN, tokenizer().decode([token for token in ids if token not in (0, EOS)]))

    def only_a_banned_one(input_ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([EOS]), 0.0)

    with pytest.raises(RowError, match="`grammar` and `logits_processor` must leave enough"):
        run(grammar={"regex": PATTERN}, logits_processor=[only_a_banned_one])


def test_a_processor_names_its_place():
    seen = {"custom": [], "top_k": []}

    def recorder(place):
        def record(input_ids, scores):
            seen[place].append(scores.clone())
            return scores

        record.order_name = place
        return record

    run(temperature=2.0, top_k=3, logits_processor=[recorder("top_k"), recorder("custom")])
    at_custom, at_top_k = seen["custom"][0], seen["top_k"][0]
    assert torch.equal(at_top_k.topk(3).values, (at_custom / 2.0).topk(3).values)
    assert int(at_top_k.isfinite().sum()) == 3
    wrong = type("Wrong", (TopTwo,), {"order_name": "topk"})()
    with pytest.raises(InputError, match=r"`order_name` of a processor must be a name of `processor_order`"):
        run(logits_processor=[wrong])
