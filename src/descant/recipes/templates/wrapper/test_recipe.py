"""Tests of this recipe, behind those of every one."""

import torch

import descant
from descant import testing


def test_output_keeps_to_the_tokens_of_the_prompt(recipe):
    model, prompt = testing.toy(), torch.tensor([[5, 9, 14, 5]])
    config = {"min_new_tokens": 8, "max_new_tokens": 8}
    unmixed = descant.generate(model, prompt, **config)
    mixed = descant.generate(model, prompt, **config, recipe=recipe, share=0.999)
    assert set(mixed[0, 4:].tolist()) <= {5, 9, 14}
    assert not set(unmixed[0, 4:].tolist()) <= {5, 9, 14}
