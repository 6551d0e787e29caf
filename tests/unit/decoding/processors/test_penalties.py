"""Penalties by hand: sources of a whole batch, ids that name nothing, repeats of any length."""

from __future__ import annotations

import random

import pytest
import torch

from descant.decoding.processors.base import BoundProcessor
from descant.decoding.processors.penalties import (
    DRYLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    map_token_scores,
)
from descant.errors import InputError
from tests.unit.decoding.processors.reference import context


def test_a_batch_of_sources_given_by_hand_follows_the_rows():
    """In the loop the rows of a batch change: each is identified by its prompt's index."""
    processor = EncoderRepetitionPenaltyLogitsProcessor(0.5, torch.tensor([[0, 0], [1, 2]]))
    lines = context(random.Random(1), [[3]] * 3, [1] * 3, [{"prompt_index": batch} for batch in (1, 0, 1)])
    answer = BoundProcessor(processor).process(lines, torch.ones(3, 4))
    assert answer.tolist() == [[1, 0.5, 0.5, 1], [0.5, 1, 1, 1], [1, 0.5, 0.5, 1]]


def test_lines_must_share_the_sources_evenly():
    processor = EncoderRepetitionPenaltyLogitsProcessor(0.5, torch.tensor([[0], [1]]))
    with pytest.raises(InputError, match="`input_ids` must have a multiple of 2 rows"):
        processor(torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 4))


def test_the_first_tokens_can_be_left_out():
    ids, scores = torch.tensor([[1, 2, 3]]), torch.ones(1, 5)
    answer = RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=2)(ids, scores)
    assert answer.tolist() == [[1, 1, 1, 0.5, 1]]
    assert torch.equal(RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=3)(ids, scores), scores)


def test_ids_that_name_nothing_change_nothing():
    scores = torch.tensor([[1.0, 2.0, 3.0]] * 4)
    ids = torch.tensor([[-1, -1, -1], [-1, 2, -1], [0, 7, 2], [7, 9, 3]])
    answer = map_token_scores(scores, ids, lambda old: old * 10)
    assert answer.tolist() == [[1, 2, 3], [1, 2, 30], [10, 2, 30], [1, 2, 3]]
    assert torch.equal(map_token_scores(scores, ids[:, :0], lambda old: old * 10), scores)


# -------------------------------------------------------------------------- the slow versions


def test_by_hand():
    ids, scores = torch.tensor([[1, 1, 2, 1, 1]]), torch.zeros(1, 4)
    assert PresencePenaltyLogitsProcessor(0.5)(ids, scores).tolist() == [[0.0, -0.5, -0.5, 0.0]]
    assert PresencePenaltyLogitsProcessor(0.5, prompt_length=3)(ids, scores).tolist() == [
        [0.0, -0.5, 0.0, 0.0]
    ]
    assert FrequencyPenaltyLogitsProcessor(0.5, prompt_length=1)(ids, scores).tolist() == [
        [0.0, -1.5, -0.5, 0.0]
    ]
    # "1 1" came before, then 2: a match of two. After one 1 of it came 1: a match of one.
    assert DRYLogitsProcessor(3.0)(ids, scores).tolist() == [[0.0, 0.0, -3.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1)(ids, scores).tolist() == [[0.0, -3.0, -6.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1, dry_range=2)(ids, scores).tolist() == [[0.0, -3.0, 0.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1, 0, [2])(ids, scores).tolist() == [[0.0, -3.0, 0.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1, 0, [1])(ids, scores).tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_a_loop_of_any_length_keeps_the_scores_finite():
    found = DRYLogitsProcessor(0.8)(torch.full((1, 3000), 1), torch.tensor([[0.0, 5.0]]))
    assert found.isfinite().all()
    assert found[0, 0] == 0.0
    assert found[0, 1] < -1e20
    found = DRYLogitsProcessor(0.0)(torch.full((1, 3000), 1), torch.tensor([[0.0, 5.0]]))
    assert found.tolist() == [[0.0, 5.0]]


def test_a_row_without_tokens_is_left_alone():
    scores = torch.randn(2, 5)
    for processor in (
        PresencePenaltyLogitsProcessor(1.0),
        FrequencyPenaltyLogitsProcessor(1.0),
        DRYLogitsProcessor(1.0),
    ):
        for width in (0, 1):
            found = processor(torch.zeros(2, width, dtype=torch.long)[:, :width], scores)
            if width == 0 or isinstance(processor, DRYLogitsProcessor):
                assert torch.equal(found, scores)
            assert found is not scores
