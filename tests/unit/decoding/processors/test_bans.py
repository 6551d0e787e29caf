"""Bans and biases of tokens and of sequences by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.bans import (
    LogitBiasLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from descant.errors import InputError
from tests.unit.decoding.processors.reference import context


def banned(answer):
    return [line.isneginf().nonzero()[:, 0].tolist() for line in answer]


def test_an_ngram_counts_only_while_all_of_it_is_in_the_window():
    row = torch.tensor([[1, 2, 3, 0, 1, 2]])
    for window, expected in ((5, []), (6, [3]), (0, [3])):
        answer = NoRepeatNGramLogitsProcessor(3, window=window)(row, torch.zeros(1, 5))
        assert banned(answer) == [expected]


def _words(words, **given):
    return GenerationConfig(bad_words_ids=words, **given)


def test_a_word_that_is_an_end_is_passed_over():
    for eos in (0, [3, 0], torch.tensor([0])):
        answer = NoBadWordsLogitsProcessor([[0], [1], [0, 2]], eos)(torch.tensor([[5]]), torch.zeros(1, 6))
        assert banned(answer) == [[1]]
    columns = NoBadWordsLogitsProcessor.params_from_config(
        _words([[0], [4, 5]], eos_token_id=0), PromptInfo(1)
    )
    assert columns == {"bad_words_ids": [[4, 5]], "bad_words_sizes": [2]}
    nothing = NoBadWordsLogitsProcessor([[0]], 0)(torch.tensor([[5]]), torch.zeros(1, 6))
    assert banned(nothing) == [[]]


# ------------------------------------------------------------------------------- prefix functions
def test_the_function_sees_each_row_without_padding_and_with_its_prompt():
    rng, seen = random.Random(1), []

    def allow(batch, ids):
        seen.append((batch, ids.tolist()))
        ids.zero_()  # its own copy
        return [batch]

    rows = [[1, 2, 3], [4], [2, 2]]
    params = [{"prefix_allowed_tokens_fn": allow, "prompt_index": batch} for batch in (2, 0, 2)]
    lines = context(rng, rows, [1, 1, 1], params)
    before = lines.tokens.clone()
    answer = PrefixConstrainedLogitsProcessor.make_unbound().process(lines, torch.zeros(3, 4))
    assert seen == [(2, [1, 2, 3]), (0, [4]), (2, [2, 2])]
    assert banned(answer) == [[0, 1, 3], [1, 2, 3], [0, 1, 3]]
    assert torch.equal(lines.tokens, before)


def test_by_hand_lines_belong_to_prompts_by_beams():
    processor = PrefixConstrainedLogitsProcessor(lambda batch, ids: [batch], 2)
    assert banned(processor(torch.zeros(4, 1), torch.zeros(4, 2))) == [[1], [1], [0], [0]]


@pytest.mark.parametrize("answer", [torch.tensor([2, 0]), (2, 0), {0, 2}, range(0, 3, 2), [2, 0, 2]])
def test_any_collection_of_ids_is_an_answer(answer):
    processor = PrefixConstrainedLogitsProcessor(lambda batch, ids: answer, 1)
    assert banned(processor(torch.zeros(1, 1), torch.zeros(1, 4))) == [[1, 3]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], r"must allow at least one token, also for prompt 1, got \[\]: return the end token"),
        (torch.tensor([]), "must allow at least one token"),
        (None, "must return a list of token ids, got None"),
        ("ab", "must return a list of token ids"),
        ([4], "must return token ids below 4, the vocabulary size, got 4"),
        ([-1], "must return token ids below 4"),
        ([0.5], "must return token ids below 4"),
    ],
)
def test_an_answer_that_is_none_is_refused(answer, words):
    processor = PrefixConstrainedLogitsProcessor(lambda batch, ids: answer if batch else [0], 1)
    with pytest.raises(InputError, match=f"`prefix_allowed_tokens_fn` {words}") as error:
        processor(torch.zeros(2, 1), torch.zeros(2, 4))
    assert error.value.field == "prefix_allowed_tokens_fn"


NEVER = -math.inf


def test_both_forms_mean_the_same():
    ids, scores = torch.tensor([[1, 2]]), torch.zeros(1, 5)
    one = SequenceBiasLogitsProcessor({(2, 3): -1.5, (4,): 2.0})(ids, scores)
    two = SequenceBiasLogitsProcessor([[[2, 3], -1.5], [[4], 2.0]])(ids, scores)
    assert one.tolist() == two.tolist() == [[0.0, 0.0, 0.0, -1.5, 2.0]]


def test_a_sequence_named_twice_has_the_last_bias():
    processor = SequenceBiasLogitsProcessor([[[1], 5.0], [[1], 2.0]])
    assert processor(torch.tensor([[0]]), torch.zeros(1, 2)).tolist() == [[0.0, 2.0]]


def test_a_token_can_be_ruled_out():
    answer = LogitBiasLogitsProcessor({1: NEVER, 2: 0.5})(torch.tensor([[0]]), torch.zeros(1, 3))
    assert answer.tolist() == [[0.0, NEVER, 0.5]]
