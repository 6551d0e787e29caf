"""Biases of tokens and of sequences: rows of different length, sums, and wrong arguments."""

from __future__ import annotations

import math
import random

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.bans import LogitBiasLogitsProcessor, SequenceBiasLogitsProcessor
from descant.errors import InputError
from tests.unit.decoding.processors.reference import context

NEVER = -math.inf


def test_sequences_of_ragged_rows():
    rng = random.Random(6)
    hit = 0
    for _ in range(300):
        rows = [[rng.randrange(3) for _ in range(rng.randint(0, 6))] for _ in range(4)]
        rows[0] = rows[0] or [1]
        given = [
            {
                tuple(rng.randrange(3) for _ in range(rng.randint(1, 4))): float(rng.randint(-8, 8))
                for _ in range(rng.randint(1, 6))
            }
            for _ in rows
        ]
        params = [
            SequenceBiasLogitsProcessor.params_from_config(GenerationConfig(sequence_bias=own), PromptInfo(1))
            for own in given
        ]
        answer = SequenceBiasLogitsProcessor.make_unbound().process(
            context(rng, rows, [0] * 4, params), torch.zeros(4, 4)
        )
        expected = torch.zeros(4, 4)
        for line, (row, own) in enumerate(zip(rows, given, strict=True)):
            for word, bias in own.items():
                begun = len(word) - 1
                if len(row) >= begun and tuple(row[len(row) - begun :]) == word[:-1]:
                    expected[line, word[-1]] += bias
                    hit += 1
        assert torch.equal(answer, expected)
    assert hit > 1000


def test_both_forms_mean_the_same():
    ids, scores = torch.tensor([[1, 2]]), torch.zeros(1, 5)
    one = SequenceBiasLogitsProcessor({(2, 3): -1.5, (4,): 2.0})(ids, scores)
    two = SequenceBiasLogitsProcessor([[[2, 3], -1.5], [[4], 2.0]])(ids, scores)
    assert one.tolist() == two.tolist() == [[0.0, 0.0, 0.0, -1.5, 2.0]]


def test_a_sequence_named_twice_has_the_last_bias():
    processor = SequenceBiasLogitsProcessor([[[1], 5.0], [[1], 2.0]])
    assert processor(torch.tensor([[0]]), torch.zeros(1, 2)).tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize(
    "given",
    [{}, [], None, 3, {(): 1.0}, {(1,): "a"}, {(1,): math.nan}, {(1,): True}, {(-1,): 1.0}, {("a",): 1.0},
     {1: 1.0}, [[1, 2]], [[[1]]], [[[1], 1.0, 2.0]], [1.0], "ab"],
    ids=str,
)  # fmt: skip
def test_biases_that_are_none_are_refused(given):
    with pytest.raises(InputError, match="`sequence_bias` must"):
        SequenceBiasLogitsProcessor(given)


def test_tokens_of_rows_with_biases_of_their_own():
    rng = random.Random(7)
    given = [{0: 2.5, 3: -50.0}, {1: -100.0}, {2: 1e-3, 0: 1.0, 1: 4.0}]
    params = [
        LogitBiasLogitsProcessor.params_from_config(GenerationConfig(logit_bias=own), PromptInfo(1))
        for own in given
    ]
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    scores[2, 1] = NEVER
    answer = LogitBiasLogitsProcessor.make_unbound().process(
        context(rng, [[1], [2, 2], [3]], [1] * 3, params), scores
    )
    expected = scores.clone()
    for line, own in enumerate(given):
        for token, bias in own.items():
            expected[line, token] += bias
    assert torch.equal(answer, expected)


def test_a_token_can_be_ruled_out():
    answer = LogitBiasLogitsProcessor({1: NEVER, 2: 0.5})(torch.tensor([[0]]), torch.zeros(1, 3))
    assert answer.tolist() == [[0.0, NEVER, 0.5]]


@pytest.mark.parametrize(
    "given", [{}, None, [1], {1: "a"}, {1: math.nan}, {-1: 1.0}, {1.5: 1.0}, {"5": 1.0}], ids=str
)
def test_token_biases_that_are_none_are_refused(given):
    with pytest.raises(InputError, match="`logit_bias` must"):
        LogitBiasLogitsProcessor(given)


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        (SequenceBiasLogitsProcessor({(1, 5): 1.0}), "sequence_bias"),
        (SequenceBiasLogitsProcessor({(5, 1): 1.0}), "sequence_bias"),
        (LogitBiasLogitsProcessor({5: 1.0}), "logit_bias"),
    ],
)
def test_a_token_beyond_the_vocabulary_is_refused(processor, name):
    with pytest.raises(InputError, match=f"`{name}` must have token ids below 5, the vocabulary size, got 5"):
        processor(torch.tensor([[1]]), torch.zeros(1, 5))
