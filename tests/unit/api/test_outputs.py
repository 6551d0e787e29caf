"""The records of generate(): ModelOutputs of transformers, by attribute, key, index and position."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields

import pytest
import torch
import transformers
from transformers import generation
from transformers.utils import ModelOutput

import descant

CLASSES = (
    descant.GenerateDecoderOnlyOutput,
    descant.GenerateEncoderDecoderOutput,
    descant.GenerateBeamDecoderOnlyOutput,
    descant.GenerateBeamEncoderDecoderOutput,
)
OURS = {"sequence_counts", "logprobs", "speculation", "unmet_constraints", "trace"}
IDS = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize("kind", CLASSES)
def test_documented_fields_come_first_in_their_order(kind):
    names = [field.name for field in fields(kind)]
    theirs = [field.name for field in fields(getattr(generation, kind.__name__))]
    assert names[: len(theirs)] == theirs
    assert set(names[len(theirs) :]) <= OURS


@pytest.mark.parametrize("kind", CLASSES)
def test_records_are_model_outputs(kind):
    out = kind(IDS)
    assert isinstance(out, ModelOutput)
    assert out.sequences is out["sequences"] is out[0] is IDS
    assert (list(out), len(out.to_tuple()), out.logits) == (["sequences"], 1, None)
    with pytest.raises(KeyError):
        out["logits"]
    with pytest.raises(TypeError, match="alien"):
        kind(IDS, alien=1)
    both = kind(IDS, None, trace="a")
    assert list(both) == ["sequences", "trace"]
    assert copy.deepcopy(both).trace == pickle.loads(pickle.dumps(both))["trace"] == "a"
    assert repr(both) == f"{kind.__name__}(sequences, trace)"


def test_attribute_and_key_stay_one(tiny):
    out = descant.generate(
        tiny("llama").model, IDS, max_new_tokens=2, return_dict_in_generate=True, output_scores=True
    )
    assert isinstance(out, ModelOutput)
    out.scores = (1,)
    assert (out["scores"], out[1]) == ((1,), (1,))
    out["scores"] = (2,)
    assert out.scores == (2,)
    out.logits = (3,)
    assert out["logits"] == (3,)
    out.scores = None
    assert "scores" not in out
    assert out.scores is None


def test_a_call_returns_the_documented_pair(tiny):
    """`generation_output[:2]` is (sequences, scores), also with log-probabilities."""
    out = descant.generate(
        tiny("llama").model,
        IDS,
        max_new_tokens=2,
        return_dict_in_generate=True,
        output_scores=True,
        logprobs=0,
    )
    assert out[:2] == (out.sequences, out.scores)
    assert transformers.utils.ModelOutput in type(out).__mro__
