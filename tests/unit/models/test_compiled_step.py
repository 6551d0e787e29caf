"""The compiled step: compiled once for its shape, and the same step for all that.

What is compiled again, and when, is torch's tracer's business and not its backend's: most tests have
the backend that runs what was traced as it is, which takes seconds.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch._dynamo as dynamo

import descant
from descant import GenerationConfig, Request, Session
from descant.config.compile_config import CompileConfig
from descant.errors import ConfigError, UnsupportedModel
from descant.kv_cache.stores.dense import DenseStore, StaticStore
from descant.models.fast.compiled_step import (
    _GroupedKVProxy,
    compiled_steps_of,
    uncompilable_reason,
)
from descant.models.forward.traits import traits_of
from descant.testing import ReferenceCache
from descant.testing.outcome import compare, outcomes
from tests.contracts.subjects import mixed, of_method, requests
from tests.support.tiny_models import prompts

TRACED = CompileConfig(backend="eager")


def steps(model):
    return compiled_steps_of(model, traits_of(model))


def static(capacity=64, rows=None, config=TRACED):
    return StaticStore(capacity, rows, config)


def same(model, given, cache, expected=None):
    """Raise unless the requests come to on the cache what they come to on lists."""
    expected = outcomes(model, given, cache=ReferenceCache()) if expected is None else expected
    for place, pair in enumerate(zip(expected, outcomes(model, given, cache=cache), strict=True)):
        compare(*pair, f"request {place}")


def raise_cause(model, given, cache):
    """Raise what made the first of the requests fail."""
    raise outcomes(model, given, cache=cache)[0].error.__cause__


def plain(tiny, lengths, seed=0, **more):
    given = {"max_new_tokens": 5, "eos_token_id": None, **more}
    return [Request(text, GenerationConfig(**given)) for text in prompts(tiny.arch, lengths, seed)]


@pytest.fixture
def fresh(tiny):
    """`fresh(name)`: a model for which nothing was compiled."""
    return lambda name="llama", **more: copy.deepcopy(tiny(name, **more).model)


# ---------------------------------------------------------------------- once
def test_fifty_prompts_of_different_length_compile_one_step(tiny, fresh):
    model = fresh()
    with dynamo.config.patch(error_on_recompile=True):
        for number in range(50):
            request = plain(tiny("llama"), [2 + 3 * number], number, max_new_tokens=4)
            same(model, request, static(160), outcomes(model, request, cache=DenseStore()))
    assert steps(model).num_graphs == 1


def test_batches_share_the_steps_of_their_buckets(tiny, fresh):
    model = fresh()
    graphs = []
    with dynamo.config.patch(recompile_limit=1):  # torch counts those of each step by themselves
        for rows in (1, 3, 4, 2, 3, 1):
            same(model, plain(tiny("llama"), range(2, 2 + rows)), static())
            graphs.append(steps(model).num_graphs)
    assert graphs == [1, 2, 2, 3, 3, 3]


def test_a_session_in_which_rows_come_and_go(tiny):
    one = tiny("llama")
    session = Session(one.model, cache=static())
    for length in (3, 9):
        session.admit(*plain(one, [length, length + 1], max_new_tokens=6))
        session.step()
        session.step()
    list(session.drain())
    before = steps(one.model).num_graphs
    session.admit(*plain(one, [4, 17, 5], max_new_tokens=6))
    list(session.drain())
    assert steps(one.model).num_graphs == before


def test_capacities_are_rounded_so_that_they_share_a_step(tiny, fresh):
    model = fresh()
    for capacity in (40, 100, 256):
        same(model, plain(tiny("llama"), [6]), static(capacity))
    assert steps(model).num_graphs == 1
    same(model, plain(tiny("llama"), [6]), static(257))
    assert steps(model).num_graphs == 2


def test_the_mode_of_the_caller_is_no_matter(tiny, fresh):
    model = fresh()
    same(model, plain(tiny("llama"), [6]), static())
    with torch.inference_mode():
        same(model, plain(tiny("llama"), [7]), static())
    with torch.enable_grad():
        same(model, plain(tiny("llama"), [8]), static())
    assert steps(model).num_graphs == 1


def test_other_settings_are_another_step(tiny, fresh):
    model = fresh()
    same(model, plain(tiny("llama"), [6]), static())
    same(model, plain(tiny("llama"), [6]), static(config=CompileConfig(backend="eager", dynamic=True)))
    assert steps(model).num_graphs == 2


def test_a_model_that_changes_is_compiled_again(tiny, fresh):
    """It is right first, and fast then."""
    model = fresh()
    request = plain(tiny("llama"), [6])
    same(model, request, static())
    model.model.layers[0].self_attn.scaling *= 2
    same(model, request, static())
    assert steps(model).num_graphs == 2
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.flip(0))
    same(model, request, static())
    assert steps(model).num_graphs == 2  # weights are inputs


# ---------------------------------------------------------------------- the same
@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma"])
def test_models_of_other_kinds(tiny, name):
    """A window, a table of positions, one head of keys for all."""
    one = tiny(name)
    before = steps(one.model).num_graphs
    same(one.model, of_method(one, "beam-2", count=1), static())
    assert steps(one.model).num_graphs > before


def test_all_methods_in_one_session(tiny):
    one = tiny("llama")
    same(one.model, mixed(one), static(128))


def test_a_model_whose_attention_is_exchanged(tiny, fresh):
    model = fresh()
    same(model, plain(tiny("llama"), [9, 3]), static())
    first = steps(model)
    model.set_attn_implementation("eager")
    same(model, plain(tiny("llama"), [9, 3]), static())
    assert steps(model) is not first
    assert steps(model).num_graphs == 1
    assert not steps(model).traits.grouped_kv


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "sampled"])
def test_drafts_go_through_the_same_blocks(tiny, more):
    one = tiny("llama")
    given = {"max_new_tokens": 25, "eos_token_id": None, "prompt_lookup_num_tokens": 3, **more}
    texts = [Request(text * 3, GenerationConfig(**given)) for text in prompts(one.arch, [4, 3], 8)]
    expected = outcomes(one.model, texts, cache=ReferenceCache())
    found = outcomes(one.model, texts, cache=static())
    assert [end.tokens for end in found] == [end.tokens for end in expected]


def test_lines_that_hold_nothing_are_written_and_never_seen(tiny, fresh):
    """Three rows are fed as four; the fourth becomes a row later."""
    model, one = fresh(), tiny("llama")
    texts = plain(one, [5, 6, 7, 4], max_new_tokens=8)
    expected = outcomes(model, texts, cache=ReferenceCache())
    session = Session(model, cache=static(rows=4))
    session.admit(*texts[:3])
    session.step()
    session.step()
    session.admit(texts[3])
    ends = {}
    for event in session.drain():
        if isinstance(event, descant.Finished):
            ends[event.request] = event.hypotheses[0].tokens.tolist()
    assert [ends[number] for number in range(4)] == [one.tokens[0] for one in expected]


def test_inductor_gives_what_lists_give(tiny, fresh):
    model, one = fresh(), tiny("llama")
    for length in (3, 30):
        same(model, plain(one, [length], max_new_tokens=8), static(config=CompileConfig()))
    assert steps(model).num_graphs == 1


# ---------------------------------------------------------------------- keys that heads share
def test_heads_that_share_keys_repeat_nothing():
    block, other = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    keys, values = _GroupedKVProxy(block), _GroupedKVProxy(other)
    query, mask = torch.randn(2, 6, 1, 4), torch.rand(2, 1, 1, 7) > 0.3
    mask[..., 0] = True
    wide = [one[:, :, None, :, :].expand(2, 3, 2, 7, 4).reshape(2, 6, 7, 4) for one in (keys, values)]
    assert all(isinstance(one, _GroupedKVProxy) for one in wide)
    assert wide[0].shape == (2, 6, 7, 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    must = attention(query, block.repeat_interleave(2, 1), other.repeat_interleave(2, 1), attn_mask=mask)
    assert torch.allclose(attention(query, *wide, attn_mask=mask, scale=None), must, atol=1e-6)
    # Whatever else is asked, it is a tensor.
    bias = torch.randn(2, 6, 1, 7)
    must = attention(query, block.repeat_interleave(2, 1), other.repeat_interleave(2, 1), attn_mask=bias)
    assert torch.allclose(attention(query, *wide, attn_mask=bias), must, atol=1e-6)
    assert torch.equal(wide[0].transpose(2, 3), block.repeat_interleave(2, 1).transpose(2, 3))
    assert torch.equal(torch.cat((wide[0], wide[1])), torch.cat((block, other)).repeat_interleave(2, 1))
    assert torch.equal(keys[0, 1], block[0, 1])


def test_torch_attention_gets_keys_as_they_are(tiny, fresh):
    seen = []

    def backend(graph, inputs):
        asked = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        seen.extend([list(one.meta["example_value"].shape) for one in node.args[:2]] for node in asked)
        return graph.forward

    model = fresh()
    same(model, plain(tiny("llama"), [5]), static(config=CompileConfig(backend=backend)))
    assert seen == [[[1, 2, 2, 8], [1, 2, 256, 8]]] * 2  # four query heads share two of keys


def test_keys_are_plain_tensors_where_torch_cannot_follow(tiny, fresh, monkeypatch):
    def broken(cls, func, types, args=(), kwargs=None):
        dynamo.graph_break()

    monkeypatch.setattr(_GroupedKVProxy, "__torch_function__", classmethod(broken))
    model = fresh()
    same(model, plain(tiny("llama"), [5]), static())
    assert steps(model).num_graphs == 1
    assert [one._traits.grouped_kv for one in steps(model)._steps_by_shape.values()] == [False]


# ---------------------------------------------------------------------- whose it is
def test_the_model_stays_as_it_was_and_is_let_go(tiny, fresh):
    model = fresh()
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    same(model, plain(tiny("llama"), [5]), static())
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_states_that_are_asked_for_come_uncompiled(tiny, fresh):
    model, one = fresh(), tiny("llama")
    given = {"penalty_alpha": 0.5, "top_k": 3, "max_new_tokens": 4}
    same(model, [Request(text, GenerationConfig(**given)) for text in prompts(one.arch, [5], 1)], static())
    assert steps(model).num_graphs == 0


# ---------------------------------------------------------------------- what cannot be
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_model_with_an_encoder_is_refused(tiny, name):
    one = tiny(name)
    assert "encoder" in uncompilable_reason(one.model, traits_of(one.model))
    given = requests(one, [GenerationConfig(max_new_tokens=5, eos_token_id=None)], [4])
    with pytest.raises(
        UnsupportedModel, match=r"has an encoder.*cannot be compiled: leave out `compile_config`"
    ):
        raise_cause(one.model, given, static())


class Noisy(torch.nn.Module):
    """A layer that does what no graph can hold."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        dynamo.graph_break()
        return self.inner(hidden)


def test_a_step_that_is_no_graph_is_an_error(tiny, fresh):
    model = fresh()
    model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp)
    request = plain(tiny("llama"), [5])
    with pytest.raises(UnsupportedModel, match="step of LlamaForCausalLM cannot be compiled"):
        raise_cause(model, request, static())
    same(model, request, static(config=CompileConfig(fullgraph=False, backend="eager")))


@pytest.mark.ci_cases("True")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_is_compiled_too_often_does_not_go_on_uncompiled(tiny, fresh, fullgraph):
    model, request = fresh(), plain(tiny("llama"), [5], max_new_tokens=3)
    config = CompileConfig(fullgraph=fullgraph, backend="eager")
    with dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            model.model.layers[0].self_attn.scaling *= 1.5
            same(model, request, static(config=config))
        model.model.layers[0].self_attn.scaling *= 1.5
        with pytest.raises(UnsupportedModel, match="hit torch's recompile limit"):
            raise_cause(model, request, static(config=config))
    assert steps(model).num_graphs == 2


@pytest.mark.parametrize(
    "config",
    [
        CompileConfig(backend="no such"),
        CompileConfig(mode="no such"),
        CompileConfig(options={"no such": 1}),
    ],
)
def test_settings_that_torch_refuses_are_an_error(tiny, config):
    one = tiny("llama")
    with pytest.raises(ConfigError, match="compile_config"):
        raise_cause(one.model, plain(one, [5]), static(config=config))
