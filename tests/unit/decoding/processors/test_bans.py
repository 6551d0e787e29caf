"""Bans: n-grams in a window, words, functions; rows of different length, and wrong arguments."""

from __future__ import annotations

import math
import random

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.bans import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
from descant.errors import InputError
from tests.unit.decoding.processors.prefixes import allowed_after
from tests.unit.decoding.processors.reference import context

NEVER = -math.inf


def banned(answer):
    return [line.isneginf().nonzero()[:, 0].tolist() for line in answer]


def repeated(row, size, window, store=None):
    """What would repeat an n-gram of the row, or of `store`, one comparison at a time."""
    if len(row) < size - 1:
        return []
    begun = row[len(row) - size + 1 :]
    source = row if store is None else store
    first = max(0, len(row) - window) if window and store is None else 0
    found = {
        source[at + size - 1]
        for at in range(first, len(source) - size + 1)
        if source[at : at + size - 1] == begun
    }
    return sorted(found)


def test_ngrams_of_ragged_rows_with_sizes_and_windows_of_their_own():
    rng = random.Random(3)
    hit = 0
    for _ in range(300):
        rows = [[rng.randrange(3) for _ in range(rng.randint(0, 14))] for _ in range(5)]
        rows[0] = rows[0] or [1]
        params = [
            {
                "no_repeat_ngram_size": rng.randint(1, 5),
                "no_repeat_ngram_window": rng.choice([0, 2, 4, 7, 99]),
            }
            for _ in rows
        ]
        lines = context(rng, rows, [0] * len(rows), params)
        answer = NoRepeatNGramLogitsProcessor.make_unbound().process(lines, torch.zeros(5, 4))
        expected = [repeated(row, *own.values()) for row, own in zip(rows, params, strict=True)]
        assert banned(answer) == expected
        hit += sum(map(bool, expected))
    assert hit > 300


def test_an_ngram_counts_only_while_all_of_it_is_in_the_window():
    row = torch.tensor([[1, 2, 3, 0, 1, 2]])
    for window, expected in ((5, []), (6, [3]), (0, [3])):
        answer = NoRepeatNGramLogitsProcessor(3, window=window)(row, torch.zeros(1, 5))
        assert banned(answer) == [expected]


def test_ngrams_of_sources_of_different_length():
    rng = random.Random(4)
    for _ in range(200):
        rows = [[rng.randrange(3) for _ in range(rng.randint(0, 8))] for _ in range(4)]
        rows[0] = rows[0] or [1]
        params = [
            {
                "encoder_no_repeat_ngram_size": rng.randint(1, 4),
                "source_ids": [rng.randrange(3) for _ in range(rng.randint(0, 9))],
            }
            for _ in rows
        ]
        lines = context(rng, rows, [0] * len(rows), params)
        answer = EncoderNoRepeatNGramLogitsProcessor.make_unbound().process(lines, torch.zeros(4, 4))
        expected = [
            repeated(row, own["encoder_no_repeat_ngram_size"], 0, own["source_ids"])
            for row, own in zip(rows, params, strict=True)
        ]
        assert banned(answer) == expected


def test_a_source_has_no_padding():
    config = GenerationConfig(encoder_no_repeat_ngram_size=2)
    columns = EncoderNoRepeatNGramLogitsProcessor.params_from_config(
        config, PromptInfo(3, source_ids=lambda: [7, 8])
    )
    assert columns == {"encoder_no_repeat_ngram_size": 2, "source_ids": [7, 8]}


def test_words_of_ragged_rows():
    rng = random.Random(5)
    hit = 0
    for _ in range(300):
        rows = [[rng.randrange(3) for _ in range(rng.randint(0, 6))] for _ in range(4)]
        rows[0] = rows[0] or [1]
        words = [
            [[rng.randrange(3) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 4))]
            for _ in rows
        ]
        params = [NoBadWordsLogitsProcessor.params_from_config(_words(own), PromptInfo(1)) for own in words]
        answer = NoBadWordsLogitsProcessor.make_unbound().process(
            context(rng, rows, [0] * len(rows), params), torch.zeros(4, 4)
        )
        expected = [
            sorted({word[-1] for word in own if row[len(row) - len(word) + 1 :] == word[:-1]
                    and len(row) >= len(word) - 1})
            for row, own in zip(rows, words, strict=True)
        ]  # fmt: skip
        assert banned(answer) == expected
        hit += sum(map(bool, expected))
    assert hit > 300


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


@pytest.mark.parametrize("words", [[], [[]], [3], [["a"]], [[-1]], [[1.5]], [[True]], "ab", None])
def test_words_that_are_none_are_refused(words):
    with pytest.raises(InputError, match=r"`bad_words_ids` must (be a list|contain)"):
        NoBadWordsLogitsProcessor(words)


def test_a_word_beyond_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="`bad_words_ids` must have token ids below 5"):
        NoBadWordsLogitsProcessor([[1, 5]])(torch.tensor([[1]]), torch.zeros(1, 5))


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


def test_rows_may_have_functions_of_their_own():
    rng = random.Random(1)
    params = [{"prefix_allowed_tokens_fn": lambda b, ids, t=t: {t, 3}, "prompt_index": 0} for t in range(3)]
    answer = PrefixConstrainedLogitsProcessor.make_unbound().process(
        context(rng, [[0]] * 3, [1] * 3, params), torch.zeros(3, 4)
    )
    assert banned(answer) == [[1, 2], [0, 2], [0, 1]]


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


def test_what_cannot_be_called_is_refused():
    with pytest.raises(InputError, match="must be a function"):
        PrefixConstrainedLogitsProcessor([1, 2], 1)


def test_the_function_of_these_tests_depends_on_everything():
    allowed = allowed_after(1, 50)
    ids = torch.tensor([1, 2, 3])
    assert allowed(0, ids) != allowed(1, ids)
    assert allowed(0, ids) != allowed(0, ids[:2])
    assert allowed(0, ids) != allowed_after(2, 50)(0, ids)


@pytest.mark.parametrize("kind", [NoRepeatNGramLogitsProcessor, None])
@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_an_ngram_has_at_least_one_token(kind, size):
    with pytest.raises(InputError, match="ngram_size` must be an integer"):
        kind(size) if kind else EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([[1]]))
