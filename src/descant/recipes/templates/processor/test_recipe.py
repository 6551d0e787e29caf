"""Tests of this recipe, behind those of every one."""

import torch


def test_temperature_decreases(recipe):
    processor = recipe(first=2.0, last=1.0, span=4).processor
    scores = torch.tensor([[0.0, 6.0]])
    for new, temperature in ((0, 2.0), (2, 1.5), (4, 1.0), (9, 1.0)):
        ids = torch.zeros(1, new, dtype=torch.long)  # all of them new
        assert torch.allclose(processor(ids, scores), scores / temperature)
