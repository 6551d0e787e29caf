"""After `attach`, lengths in a left-padded batch are those of transformers 4.52.4: the padding counts."""

from __future__ import annotations

import pytest
import torch

import descant
from tests.unit.core.test_call_batch import padded

CALLS = {
    "max_length": {"max_length": 12},
    "forced end": {"max_length": 12, "forced_eos_token_id": 7},
    "min_length": {"min_length": 10, "max_new_tokens": 5},
    "both": {"min_length": 10, "max_length": 13},
    "sampling": {"max_length": 11, "do_sample": True, "top_k": 5},
}


@pytest.mark.parametrize("call", CALLS)
def test_lengths_count_the_padding(call, tiny, reference):
    one = tiny("llama")
    inputs = padded(one, (8, 3, 5))
    theirs = reference.generate(one.folder, inputs, CALLS[call], seed=4)["sequences"]
    descant.attach(one.model)
    try:
        torch.manual_seed(4)
        ours = one.model.generate(**inputs, **CALLS[call])
    finally:
        descant.detach(one.model)
    assert ours.tolist() == theirs.tolist()
