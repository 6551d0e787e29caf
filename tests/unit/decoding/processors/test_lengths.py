"""Lengths by hand: the decay after many tokens, forced tokens, the thinking budget."""

from __future__ import annotations

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.lengths import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    ForceTokensLogitsProcessor,
    ThinkingBudgetLogitsProcessor,
)


@pytest.mark.parametrize("factor", [1.01, 1.1])
def test_the_power_is_exact_after_many_tokens(factor):
    """In float32 it is off by 1e-5 here."""
    ids, scores = torch.zeros(1, 700, dtype=torch.long), torch.tensor([[1.0, 2.0]])
    answer = ExponentialDecayLengthPenalty((0, factor), 0, 0)(ids, scores)
    assert answer[0, 0].item() == pytest.approx(factor**700, rel=2e-7)


def test_a_forced_end_may_be_token_0():
    columns = ForcedEOSTokenLogitsProcessor.params_from_config(
        GenerationConfig(forced_eos_token_id=0), PromptInfo(1)
    )
    assert columns == {"forced_eos_token_id": [0]}


def test_tokens_are_forced_at_their_length_alone():
    force = ForceTokensLogitsProcessor([[2, 1], [4, 0]])
    for length, wanted in ((1, None), (2, 1), (3, None), (4, 0)):
        scores = torch.randn(2, 5)
        forced = force(torch.zeros(2, length, dtype=torch.long), scores)
        if wanted is None:
            assert torch.equal(forced, scores)
        else:
            assert forced.argmax(-1).tolist() == [wanted, wanted]
            assert forced.isfinite().sum(-1).tolist() == [1, 1]


def generate_row(processor, row, choices):
    """A row that goes on with the choices, but for what is forced."""
    row, forced = list(row), []
    for token in choices:
        scores = processor(torch.tensor([row], dtype=torch.long), torch.zeros(1, 10))[0]
        if scores.isinf().any():
            token = int(scores.argmax())
            forced.append(token)
        row.append(token)
    return row, forced


def test_a_thought_is_closed_and_not_opened_again():
    processor = ThinkingBudgetLogitsProcessor(3, [7, 8, 7, 9], [5, 6])
    row, forced = generate_row(processor, [1, 5, 6], [1] * 12)
    assert row == [1, 5, 6, 1, 1, 1, 7, 8, 7, 9, 1, 1, 1, 1, 1]
    assert forced == [7, 8, 7, 9]
    # It had begun to close by itself: only the rest is forced.
    row, forced = generate_row(processor, [1, 5, 6], [1, 7, 8, 1, 1, 1])
    assert (row[3:], forced) == ([1, 7, 8, 7, 9, 1], [7, 9])
    row, forced = generate_row(processor, [5, 6], [7, 8, 7, 8, 1, 1, 1])
    assert (row[2:], forced) == ([7, 8, 7, 9, 1, 1, 1], [9])
    # What it ends with may be the beginning of the end twice over: of 7 8 7 8, the last 7 8 count.
    row, forced = generate_row(
        ThinkingBudgetLogitsProcessor(4, [7, 8, 7, 9], [5, 6]), [5, 6], [7, 8, 7, 8, 1, 1, 1]
    )
    assert (row[2:], forced) == ([7, 8, 7, 8, 7, 9, 1], [7, 9])
    # Closed in time: nothing is forced. A second thought has a budget of its own.
    row, forced = generate_row(processor, [5, 6, 7, 8, 7, 9], [1, 1, 1, 1, 5, 6, 1, 1, 1, 1, 1, 1, 1])
    assert (row[12:], forced) == ([1, 1, 1, 7, 8, 7, 9], [7, 8, 7, 9])


def test_without_a_start_everything_generated_is_thought():
    processor = ThinkingBudgetLogitsProcessor(2, 9, prompt_length=3)
    row, forced = generate_row(processor, [9, 9, 9], [1] * 5)
    assert (row[3:], forced) == ([1, 1, 9, 1, 1], [9])
    assert generate_row(ThinkingBudgetLogitsProcessor(0, 9), [], [1, 1, 1]) == ([9, 1, 1], [9])
