"""Tests of this recipe, behind those of every one."""

import torch

import descant
from descant import testing


def test_drafts_save_forwards_and_keep_the_output(recipe):
    model, prompt = testing.toy(), torch.tensor([[5, 9, 14] * 4])
    # A bias towards the prompt's tokens makes the text repeat itself.
    config = {"max_new_tokens": 24, "logit_bias": {5: 20.0, 9: 20.0, 14: 20.0}}
    expected = descant.generate(model, prompt, **config)
    output = descant.generate(
        model, prompt, **config, recipe=recipe, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert output.speculation[0].saved_forwards > 0
