"""Penalties: rows of different length, sources of a whole batch, ids that name nothing."""

from __future__ import annotations

import random

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.base import BoundProcessor
from descant.decoding.processors.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    map_token_scores,
)
from descant.errors import InputError
from tests.unit.decoding.processors.reference import context


def penalised(line, tokens, penalty):
    """Each token once, however often it occurs."""
    expected = line.clone()
    for token in set(tokens):
        expected[token] = expected[token] * penalty if expected[token] < 0 else expected[token] / penalty
    return expected


def test_only_what_a_row_holds_is_penalised_and_only_once():
    rng = random.Random(8)
    for seed in range(200):
        rows = [[rng.randrange(9) for _ in range(rng.randint(0, 9))] for _ in range(4)]
        rows[0] = rows[0] or [1]
        params = [{"repetition_penalty": rng.uniform(0.3, 3.0)} for _ in rows]
        scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)) * 3
        scores[2, 3] = -torch.inf
        answer = RepetitionPenaltyLogitsProcessor.make_unbound().process(
            context(rng, rows, [0] * 4, params), scores
        )
        for line, row, own in zip(range(4), rows, params, strict=True):
            expected = penalised(scores[line], row, own["repetition_penalty"])
            assert torch.allclose(answer[line], expected, rtol=1e-6)


def test_sources_of_different_length():
    rng = random.Random(9)
    for seed in range(100):
        sources = [[rng.randrange(9) for _ in range(rng.randint(0, 6))] for _ in range(4)]
        config = GenerationConfig(encoder_repetition_penalty=rng.uniform(0.3, 3.0))
        params = [
            EncoderRepetitionPenaltyLogitsProcessor.params_from_config(
                config, PromptInfo(1, source_ids=lambda own=own: own)
            )
            for own in sources
        ]
        scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)) * 3
        lines = context(rng, [[1]] * 4, [0] * 4, params)
        answer = EncoderRepetitionPenaltyLogitsProcessor.make_unbound().process(lines, scores)
        for line, own in enumerate(sources):
            expected = penalised(scores[line], own, 1 / config.encoder_repetition_penalty)
            assert torch.allclose(answer[line], expected, rtol=1e-6)


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


@pytest.mark.parametrize("kind", [RepetitionPenaltyLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor])
@pytest.mark.parametrize("penalty", [0, -1.0, "2", None, True])
def test_a_penalty_is_above_0(kind, penalty):
    others = (torch.tensor([[1]]),) if kind is EncoderRepetitionPenaltyLogitsProcessor else ()
    with pytest.raises(InputError, match="`penalty` must be"):
        kind(penalty, *others)


@pytest.mark.parametrize(
    "ids", [torch.zeros(1, 2, 3), torch.tensor([0.5]), torch.zeros(0, 3), torch.tensor(3)]
)
def test_a_source_is_ids(ids):
    with pytest.raises(InputError, match="`encoder_input_ids` must be token ids"):
        EncoderRepetitionPenaltyLogitsProcessor(1.5, ids)
