"""Tests of this recipe, behind those of every one."""

import torch

import descant
from descant import testing


def test_more_tries_are_never_less_likely(recipe):
    model, prompt = testing.toy(), torch.tensor([[5, 9, 14]])

    config = {"recipe": recipe, "min_new_tokens": 8, "max_new_tokens": 8}

    def mean_logprob(tries):
        ids = descant.generate(model, prompt, **config, tries=tries)
        with torch.no_grad():
            logprobs = model(ids).logits[:, 2:-1].log_softmax(-1)
        return float(logprobs.gather(2, ids[:, 3:, None]).mean())

    one, four, sixteen = (mean_logprob(tries) for tries in (1, 4, 16))
    assert one <= four + 1e-5
    assert four <= sixteen + 1e-5
