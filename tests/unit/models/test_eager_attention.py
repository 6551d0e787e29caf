"""Attention weights of a model that does not compute them: a view of it does, for that call."""

from __future__ import annotations

import copy

import pytest
import torch

import descant
from descant.models.wrapping.wrapped_model import with_eager_attention

ASKED = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_attentions": True}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_attentions_of_a_default_model_equal_those_of_an_eager_one(name, tiny):
    one, eager = tiny(name, attn_implementation="sdpa"), tiny(name, attn_implementation="eager")
    model, ids = one.model, torch.tensor([[5, 6, 7], [8, 9, 10]])
    hooks = [len(part._forward_hooks) for part in model.modules()]
    before = copy.deepcopy(model.config.to_dict()), model.config._attn_implementation, list(vars(model))
    out = descant.generate(model, ids, **ASKED)
    wanted = descant.generate(eager.model, ids, **ASKED)
    assert out.sequences.tolist() == wanted.sequences.tolist()
    states = "decoder_attentions" if one.encoder_decoder else "attentions"
    for mine, theirs in zip(out[states], wanted[states], strict=True):
        for layer, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(layer, other)
    assert (model.config.to_dict(), model.config._attn_implementation, list(vars(model))) == before
    assert [len(part._forward_hooks) for part in model.modules()] == hooks
    assert model.config._attn_implementation == "sdpa"


def test_the_view_shares_weights_and_nothing_that_is_written(tiny):
    model = tiny("llama", attn_implementation="sdpa").model
    view = with_eager_attention(model)
    assert type(view) is type(model)
    parts = dict(view.named_modules())
    assert parts.keys() == dict(model.named_modules()).keys()
    for name, part in model.named_modules():
        assert parts[name] is not part
        assert parts[name]._buffers is not part._buffers
        if hasattr(part, "config"):
            assert parts[name].config is not part.config
            assert parts[name].config._attn_implementation == "eager"
    assert all(ours is theirs for ours, theirs in zip(view.parameters(), model.parameters(), strict=True))
    assert len({id(part.config) for part in view.modules() if hasattr(part, "config")}) == 1
    eager = tiny("llama", attn_implementation="eager").model
    assert with_eager_attention(eager) is eager
