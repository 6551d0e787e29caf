"""Guidance by halves of a batch: what must fit together, and wrong arguments."""

from __future__ import annotations

import pytest
import torch

from descant.errors import InputError
from descant.processors import ClassifierFreeGuidanceLogitsProcessor


def test_the_first_half_is_with_the_prompt():
    scores = torch.tensor([[1.0, 2.0], [3.0, 3.0], [0.0, 2.5], [5.0, 1.0]])
    answer = ClassifierFreeGuidanceLogitsProcessor(2)(torch.zeros(2, 4, dtype=torch.long), scores)
    assert answer.tolist() == [[2.0, 1.5], [1.0, 5.0]]


def test_halves_must_fit_the_ids():
    with pytest.raises(InputError, match="`scores` must have 4 lines, two for each of `input_ids`"):
        ClassifierFreeGuidanceLogitsProcessor(2.0)(torch.zeros(2, 1), torch.zeros(2, 3))


@pytest.mark.parametrize("scale", [1, 1.0, 0.5, "3", None, True])
def test_a_scale_is_above_1(scale):
    with pytest.raises(InputError, match="`guidance_scale` must be"):
        ClassifierFreeGuidanceLogitsProcessor(scale)
