"""Contrastive search against one that recomputes the whole text for every candidate of every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import descant
from descant import ConfigError, InputError
from descant.decoding.processors.allowed_sequences import AllowedSequences
from tests.support.tiny_models import Tiny, pad, prompts

NEAR = {"rtol": 0.0, "atol": 2e-4}
NEW = 10
LOW = pytest.mark.parametrize("low", [False, True], ids=["side by side", "one by one"])

Rule = Callable[[list[int], Tensor], Tensor]  # of the text and the scores [V]


@dataclass
class Found:
    """The new tokens and what was seen on the way."""

    new: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    margin: float = float("inf")  # by which the closest choice was made


@dataclass
class Reference:
    """Contrastive search without a cache."""

    tiny: Tiny
    width: int = 4
    alpha: float = 0.6
    new: int = NEW
    ends: tuple[int, ...] = ()
    rules: tuple[Rule, ...] = ()
    source: list[int] | None = None

    @torch.no_grad()
    def read(self, text: list[int]) -> tuple[Tensor, Tensor]:
        """The logits after a text [V] and its last layer's states [T, D]."""
        model, ids = self.tiny.model, torch.tensor([text])
        if self.source is not None:
            said = model(
                input_ids=torch.tensor([self.source]), decoder_input_ids=ids, output_hidden_states=True
            )
            return said.logits[0, -1], said.decoder_hidden_states[-1][0]
        said = model(ids, output_hidden_states=True)
        return said.logits[0, -1], said.hidden_states[-1][0]

    def search(self, prompt: list[int]) -> Found:
        """The tokens after a prompt."""
        found, text = Found(), list(prompt)
        logits, _ = self.read(text)
        while len(found.new) < self.new:
            scores = logits
            for rule in self.rules:
                scores = rule(text, scores)
            found.logits.append(logits)
            found.scores.append(scores)
            probs, tokens = scores.softmax(-1).topk(self.width)
            worth = []
            for prob, token in zip(probs.tolist(), tokens.tolist(), strict=True):
                if not prob:
                    continue
                after, states = self.read([*text, token])
                alike = torch.cosine_similarity(states[:-1], states[-1:], dim=-1).max()
                worth.append(((1 - self.alpha) * prob - self.alpha * float(alike), token, after))
            worth.sort(key=lambda one: -one[0])
            if len(worth) > 1:
                found.margin = min(found.margin, worth[0][0] - worth[1][0])
            _, token, logits = worth[0]
            found.new.append(token)
            text.append(token)
            if token in self.ends:
                break
        assert found.margin > 1e-5, "a choice too close to be compared: take another prompt"
        return found


# ------------------------------------------------------------------------ rules, written out
def penalised(text: list[int], scores: Tensor) -> Tensor:
    """A repetition penalty of 1.4."""
    scores = scores.clone()
    for token in set(text):
        scores[token] = scores[token] / 1.4 if scores[token] > 0 else scores[token] * 1.4
    return scores


def unrepeated(text: list[int], scores: Tensor) -> Tensor:
    """No token twice."""
    scores = scores.clone()
    scores[text] = -torch.inf
    return scores


def no_end_before(length: int, ends: tuple[int, ...]) -> Rule:
    """No end token before so many tokens."""

    def rule(text: list[int], scores: Tensor) -> Tensor:
        scores = scores.clone()
        if len(text) < length:
            scores[list(ends)] = -torch.inf
        return scores

    return rule


def texts(tiny: Tiny, lengths=(6, 1, 11), seed=50) -> list[list[int]]:
    return prompts(tiny.arch, lengths, seed)


def call(tiny: Tiny, rows: list[list[int]], **fields: Any) -> Any:
    """The new tokens of a ragged batch, without end tokens by default."""
    ids, mask = pad(rows, tiny.arch.pad, "right" if tiny.encoder_decoder else "left")
    found = descant.generate(
        tiny.model, input_ids=ids, attention_mask=mask,
        **{"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": NEW, "eos_token_id": None, **fields},
    )  # fmt: skip
    width = 1 if tiny.encoder_decoder else ids.shape[1]
    return (found.sequences if isinstance(found, dict) else found)[:, width:].tolist(), found


@LOW
@pytest.mark.parametrize(("width", "alpha"), [(2, 0.9), (4, 0.6), (7, 0.3)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens(tiny, name, width, alpha, low):
    rows = texts(tiny(name))
    found, _ = call(tiny(name), rows, penalty_alpha=alpha, top_k=width, low_memory=low)
    assert found == [Reference(tiny(name), width, alpha).search(row).new for row in rows]


@LOW
def test_tokens_after_an_encoder(tiny, low):
    t5 = tiny("t5")
    rows = texts(t5)
    found, _ = call(t5, rows, low_memory=low)
    assert found == [Reference(t5, source=row).search([t5.arch.start]).new for row in rows]


@pytest.mark.ci_cases("fields0-rules0-one by one", "fields1-rules1-side by side", "fields2-rules2-one by one")
@LOW
@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({"repetition_penalty": 1.4}, (penalised,)),
        ({"no_repeat_ngram_size": 1}, (unrepeated,)),
        ({"repetition_penalty": 1.4, "no_repeat_ngram_size": 1}, (penalised, unrepeated)),
    ],
)
def test_processors(tiny, fields, rules, low):
    llama = tiny("llama")
    rows = texts(llama)
    found, _ = call(llama, rows, **fields, low_memory=low)
    expected = [Reference(llama, rules=rules).search(row).new for row in rows]
    assert found == expected
    assert found != call(llama, rows)[0]


@LOW
def test_ends_and_least_lengths(tiny, low):
    llama = tiny("llama")
    rows = texts(llama)
    free = [Reference(llama).search(row).new for row in rows]
    ends = (free[0][3], free[1][5])
    expected = [Reference(llama, ends=ends).search(row).new for row in rows]
    assert len(expected[0]) < NEW
    found, _ = call(llama, rows, eos_token_id=list(ends), pad_token_id=0, low_memory=low)
    wide = max(map(len, expected))
    assert found == [[*one, *[0] * (wide - len(one))] for one in expected]
    for field_, least in (("min_new_tokens", 7), ("min_length", 10)):
        bounds = [least + (len(row) if field_ == "min_new_tokens" else 0) for row in rows]
        rules = [no_end_before(bound, ends) for bound in bounds]
        expected = [
            Reference(llama, ends=ends, rules=(rule,)).search(row).new
            for row, rule in zip(rows, rules, strict=True)
        ]
        wide = max(map(len, expected))
        found, _ = call(
            llama, rows, eos_token_id=list(ends), pad_token_id=0, low_memory=low, **{field_: least}
        )
        assert found == [[*one, *[0] * (wide - len(one))] for one in expected]


@LOW
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_record(tiny, name, low):
    model = tiny(name)
    rows = texts(model, (6, 3))
    found, record = call(
        model, rows, repetition_penalty=1.4, low_memory=low, logprobs=3,
        return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True,
    )  # fmt: skip
    assert [len(record.scores), len(record.logits), len(record.hidden_states)] == [NEW, NEW, NEW]
    for line, row in enumerate(rows):
        own = Reference(model, rules=(penalised,)).search(row)
        assert found[line] == own.new
        logs = record.logprobs[line]
        with torch.no_grad():
            whole = model.model(torch.tensor([[*row, *own.new]]), output_hidden_states=True).hidden_states
        for at, token in enumerate(own.new):
            torch.testing.assert_close(record.scores[at][line], own.scores[at], **NEAR)
            torch.testing.assert_close(record.logits[at][line], own.logits[at], **NEAR)
            raw, law = own.logits[at].log_softmax(-1), own.scores[at].log_softmax(-1)
            assert float(logs.raw[at]) == pytest.approx(float(raw[token]), abs=1e-3)
            assert float(logs.processed[at]) == pytest.approx(float(law[token]), abs=1e-3)
            assert logs.top[at].tolist() == raw.topk(3).indices.tolist()
            for layer, states in enumerate(record.hidden_states[at]):
                there = slice(0, len(row)) if at == 0 else slice(len(row) + at - 1, len(row) + at)
                here = states[line, -len(row) :] if at == 0 else states[line]
                torch.testing.assert_close(here, whole[layer][0, there], **NEAR)


@LOW
def test_the_table_of_positions_is_used_to_its_end(tiny, low):
    """A candidate is fed before it is chosen, so that one token fewer than with greedy search fits."""
    gpt2 = tiny("gpt2")
    row = texts(gpt2, (90,))
    found, _ = call(gpt2, row, max_new_tokens=6, low_memory=low)
    assert found[0] == Reference(gpt2, new=6).search(row[0]).new
    with pytest.raises(ConfigError, match="`max_new_tokens` must leave room: the model has 96 positions"):
        call(gpt2, row, max_new_tokens=7, low_memory=low)
    with pytest.raises(ConfigError, match="`max_length` must leave room: the model has 96 positions"):
        call(gpt2, row, max_new_tokens=None, max_length=97, low_memory=low)
    greedy = descant.generate(gpt2.model, torch.tensor(row), max_new_tokens=7, eos_token_id=None)
    assert greedy.shape[1] == 97


@LOW
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embeddings_in_place_of_ids(tiny, name, low):
    model = tiny(name)
    row = texts(model, (7,))[0]
    with torch.no_grad():
        embeddings = model.model.get_input_embeddings()(torch.tensor([row]))
    asked = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": NEW, "eos_token_id": None, "low_memory": low}
    if low:
        with pytest.raises(InputError, match="`inputs_embeds` must come with `input_ids`"):
            descant.generate(model.model, inputs_embeds=embeddings, **asked)
    else:
        found = descant.generate(model.model, inputs_embeds=embeddings, **asked)
        assert found.tolist() == [Reference(model).search(row).new]
    found = descant.generate(model.model, inputs_embeds=embeddings, input_ids=torch.tensor([row]), **asked)
    assert found[0, len(row) :].tolist() == Reference(model).search(row).new


@LOW
def test_a_text_that_nothing_may_follow(tiny, low):
    """Sequences out of a list, after whose end token nothing is allowed: that is an end and no failure."""
    llama = tiny("llama")
    listed = [[5, 6, 7], [5, 8], [9, 10, 11, 12], [40], [41, 42, 43]]
    allowed = AllowedSequences(listed, llama.arch.eos)
    rows = texts(llama)

    def only(text: list[int], scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        open_ = allowed.allowed(text[len(row) :])
        kept[open_] = scores[open_]
        return kept

    expected = []
    for row in rows:
        expected.append(Reference(llama, ends=(llama.arch.eos,), rules=(only,)).search(row).new)
        assert expected[-1][:-1] in listed
    found, _ = call(
        llama,
        rows,
        prefix_allowed_tokens_fn=allowed,
        eos_token_id=llama.arch.eos,
        pad_token_id=0,
        low_memory=low,
    )
    wide = max(map(len, expected))
    assert found == [[*one, *[0] * (wide - len(one))] for one in expected]
    # The same where the length ends it.
    found, _ = call(llama, rows, prefix_allowed_tokens_fn=last_of_two, max_new_tokens=2, low_memory=low)
    assert [len(one) for one in found] == [2, 2, 2]


def last_of_two(batch: int, ids: Tensor) -> list[int]:
    """Allows something at two places, wherever the prompt ended."""
    return [] if ids[-1] in (60, 61) else [60, 61] if ids[-1] in (50, 51) else [50, 51]
