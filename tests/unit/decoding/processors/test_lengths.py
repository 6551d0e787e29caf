"""Lengths: the decay of rows of different length, exact after many tokens, and wrong arguments."""

from __future__ import annotations

import random

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.lengths import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    ForceTokensLogitsProcessor,
)
from descant.errors import InputError
from tests.unit.decoding.processors.reference import context


def test_rows_decay_from_their_own_prompts():
    rng = random.Random(10)
    for seed in range(100):
        rows = [[rng.randrange(9) for _ in range(rng.randint(1, 20))] for _ in range(4)]
        prompts = [rng.randint(0, len(row)) for row in rows]
        pairs = [(rng.randint(0, 4), rng.uniform(0.8, 1.6)) for _ in rows]
        ends = [rng.sample(range(9), rng.randint(1, 3)) for _ in rows]
        params = [
            {
                **ExponentialDecayLengthPenalty.params_from_config(
                    GenerationConfig(exponential_decay_length_penalty=pair), PromptInfo(prompt)
                ),
                "eos_token_ids": end,
            }
            for pair, prompt, end in zip(pairs, prompts, ends, strict=True)
        ]
        scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)) * 3
        answer = ExponentialDecayLengthPenalty.make_unbound().process(
            context(rng, rows, prompts, params), scores
        )
        expected = scores.double()
        for line in range(4):
            late = len(rows[line]) - prompts[line] - pairs[line][0]
            for token in ends[line] if late > 0 else ():
                old = expected[line, token]
                expected[line, token] = old + abs(old) * (pairs[line][1] ** late - 1)
        assert torch.allclose(answer.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factor", [1.01, 1.1])
def test_the_power_is_exact_after_many_tokens(factor):
    """In float32 it is off by 1e-5 here."""
    ids, scores = torch.zeros(1, 700, dtype=torch.long), torch.tensor([[1.0, 2.0]])
    answer = ExponentialDecayLengthPenalty((0, factor), 0, 0)(ids, scores)
    assert answer[0, 0].item() == pytest.approx(factor**700, rel=2e-7)


@pytest.mark.parametrize("pair", [None, 3, (1,), (1, 2, 3), (-1, 1.5), (1.5, 1.5), (1, -2.0), (1, "a")])
def test_a_decay_is_a_start_and_a_factor(pair):
    with pytest.raises(InputError, match="`exponential_decay_length_penalty` must be"):
        ExponentialDecayLengthPenalty(pair, 1, 0)


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
