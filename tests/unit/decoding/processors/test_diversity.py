"""Hamming diversity: by hand as transformers 4.52.4, and as the loop calls it."""

from __future__ import annotations

import random

import pytest
import torch

from descant.core.context import Context, columns_from_rows
from descant.decoding.processors.base import BoundProcessor, LogitsProcessorList
from descant.decoding.processors.filters import TemperatureLogitsWarper
from descant.decoding.processors.guidance import HammingDiversityLogitsProcessor, apply_hamming_penalty
from descant.errors import InputError
from descant.testing import check_processor

VOCABULARY = 11


def calls(seed):
    """One processor's arguments and several calls of it."""
    rng, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    groups = rng.randint(2, 6)
    beams = groups * rng.randint(1, 3) + rng.choice((0, 0, 1))
    batch, size = rng.randint(1, 4), beams // groups
    given = []
    for group in range(groups):
        scores = torch.randn(batch * size, VOCABULARY, generator=chance) * 3
        scores[torch.rand(scores.shape, generator=chance) < 0.1] = -torch.inf
        given.append(
            {
                "input_ids": torch.zeros(batch * size, 3, dtype=torch.long),
                "scores": scores,
                "current_tokens": torch.randint(0, 4, (batch * beams,), generator=chance),
                "beam_group_idx": group,
            }
        )
    penalty = rng.choice((0.1, 0.5, 2.5, 10.0))
    return {"diversity_penalty": penalty, "num_beams": beams, "num_beam_groups": groups}, given


@pytest.mark.parametrize("seed", range(60))
def test_the_same_scores_as_the_reference(seed, reference):
    arguments, given = calls(seed)
    answers = reference.ask("call", name="HammingDiversityLogitsProcessor", arguments=arguments, calls=given)
    mine = HammingDiversityLogitsProcessor(**arguments)
    changed = 0
    for one, theirs in zip(given, answers, strict=True):
        before = one["scores"].clone()
        assert torch.equal(mine(**one), theirs)
        assert torch.equal(one["scores"], before)
        changed += not torch.equal(theirs, before)
    assert changed > 0


def test_a_list_hands_it_what_it_needs():
    scores = torch.zeros(2, 4)
    members = LogitsProcessorList([TemperatureLogitsWarper(0.5), HammingDiversityLogitsProcessor(1.5, 4, 2)])
    tokens = torch.tensor([3, 3, 0, 0])
    answer = members(torch.zeros(2, 1), scores, current_tokens=tokens, beam_group_idx=1)
    assert answer.tolist() == [[0.0, 0.0, 0.0, -3.0]] * 2
    with pytest.raises(InputError, match=r"must contain \['beam_group_idx'\] for HammingDiversity"):
        members(torch.zeros(2, 1), scores, current_tokens=tokens)


def test_each_line_has_its_own_rivals_and_penalty():
    rivals = torch.tensor([[1, 1, 2], [-1, -1, -1], [0, -1, 9]])
    answer = apply_hamming_penalty(torch.ones(3, 4), rivals, torch.tensor([[0.5], [3.0], [2.0]]))
    assert answer.tolist() == [[1, 0, 0.5, 1], [1, 1, 1, 1], [-1, 1, 1, 1]]


def test_in_the_loop_rivals_are_a_column():
    rivals = torch.tensor([[1, 1, 2], [-1, -1, -1]])
    values = columns_from_rows([{"diversity_penalty": 0.5}, {"diversity_penalty": 3.0}])
    length = torch.tensor([1, 1])
    context = Context(
        torch.zeros(2, 1).long(), length, length, values, states={"earlier_group_tokens": rivals}
    )
    answer = HammingDiversityLogitsProcessor.make_unbound().process(context, torch.ones(2, 4))
    assert answer.tolist() == [[1, 0, 0.5, 1], [1, 1, 1, 1]]
    fixed = BoundProcessor(HammingDiversityLogitsProcessor(4.0, 2, 2))
    assert fixed.process(context, torch.ones(2, 4)).tolist() == [[1, -7, -3, 1], [1, 1, 1, 1]]


class _Rivalled:
    """The processor on lines whose rivals are their own last tokens."""

    def process(self, context, scores):
        at = context.length - 1 - torch.arange(3)
        own = torch.where(at >= 0, context.tokens.gather(1, at.clamp(min=0)), -1)
        return HammingDiversityLogitsProcessor.make_unbound().process(
            context.with_states({"earlier_group_tokens": own}), scores
        )


def test_the_law_of_processors():
    check_processor(_Rivalled(), [{"diversity_penalty": 0.5}, {"diversity_penalty": 4.0}])


def test_without_groups_it_is_refused():
    length = torch.tensor([1])
    context = Context(
        torch.zeros(1, 1).long(), length, length, columns_from_rows([{"diversity_penalty": 1.0}])
    )
    with pytest.raises(InputError, match=r"without beam groups.*set num_beam_groups"):
        HammingDiversityLogitsProcessor.make_unbound().process(context, torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("lines", "tokens", "group", "words"),
    [
        (2, 3, 0, "`current_tokens` must have 4 tokens per prompt"),
        (3, 4, 0, "`scores` must have 2 rows"),
        (2, 4, 2, "`beam_group_idx` must be an integer between 0 and 1"),
    ],
)
def test_wrong_calls(lines, tokens, group, words):
    made = HammingDiversityLogitsProcessor(1.0, 4, 2)
    with pytest.raises(InputError, match=words):
        made(torch.zeros(lines, 1), torch.zeros(lines, 5), torch.zeros(tokens).long(), group)
