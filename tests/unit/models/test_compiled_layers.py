"""Compiled layers: the same tokens from fewer operators, until the model changes or they are undone."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version

import descant
from descant import GenerationConfig, InputError, Request, SchedulerConfig, UnsupportedModel
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.kv_cache.kernels.decode_attention import KernelAttention, PagedDecodeAttention
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from descant.models.fast import products as bfloat16_product
from descant.models.fast.compiled_layers import CompiledLayers, compiled_layers_of
from descant.models.fast.packed_forward import PackedForwards
from descant.models.fast_paths import fast_paths
from descant.models.transformers_model import TransformersModel
from descant.testing import check_batch, check_drafts, check_schedule, outcomes

# Graphs of the layers of one kind, of which the models here have two: torch 2.9 reads the index of a layer.
GRAPHS = 1 if Version(torch.__version__) >= Version("2.13") else 2

CONFIGS = [
    {},
    {"do_sample": True, "seed": 3, "top_k": 20},
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 3},
    {"repetition_penalty": 1.3, "max_new_tokens": 9},
]


def requests() -> list[Request]:
    """Requests of several lengths and methods."""
    return [
        Request(list(range(5, 8 + 4 * at)), GenerationConfig(**{"max_new_tokens": 6, **config}))
        for at, config in enumerate(CONFIGS)
    ]


def tokens(model) -> list:
    return [one.tokens for one in outcomes(model, requests())]


@pytest.fixture(scope="module")
def plain(tiny):
    return tiny("llama").model


@pytest.fixture(scope="module")
def compiled(plain):
    """A compiled copy of the model."""
    model = copy.deepcopy(plain)
    with descant.compile_layers(model) as layers:
        assert isinstance(layers, descant.CompiledLayers)
        assert layers.num_layers == model.config.num_hidden_layers
        assert layers.num_graphs == GRAPHS
        assert layers.compile_seconds > 0
        path = next(one for one in fast_paths(model) if one.name == "compiled layers")
        assert path.is_on
        assert path.detail == f"{layers.num_layers} layers, graphs: {GRAPHS}, a kernel for decode attention"
        yield model


def test_tokens_are_the_same(plain, compiled):
    assert tokens(compiled) == tokens(plain)
    assert [one.tokens for request in requests() for one in outcomes(compiled, [request])] == tokens(plain)


def test_layers_run_compiled(compiled, monkeypatch):
    def fail(*_args, **_kwargs):
        raise AssertionError("the code of a layer was run")

    for layer in compiled.model.layers:
        monkeypatch.setattr(layer.forward, "plain", fail)
    descant.generate(compiled, torch.arange(12).view(2, 6), max_new_tokens=4)
    descant.generate(compiled, torch.arange(6).view(1, 6), max_new_tokens=4)


def test_laws_hold(compiled):
    check_batch(compiled, requests())
    check_schedule(compiled, requests(), schedules=3)
    check_drafts(compiled, requests()[:2], rounds=2)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_other_caches_and_chunks(plain, compiled, has_kernel, monkeypatch):
    if not has_kernel:
        monkeypatch.setattr(KernelAttention, "kernel", lambda *_: None)
    prompts = [Request(list(range(4, 40)), GenerationConfig(max_new_tokens=8)), *requests()]
    for scheduler in (None, SchedulerConfig(num_blocks=64, chunk_tokens=7), SchedulerConfig(chunk_tokens=5)):
        found = outcomes(compiled, prompts, scheduler=scheduler)
        assert [one.tokens for one in found] == [one.tokens for one in outcomes(plain, prompts)]
    static = [Request([5, 6], GenerationConfig(max_new_tokens=5, cache_implementation="static"))]
    assert outcomes(compiled, static)[0].tokens == outcomes(plain, static)[0].tokens


def test_hidden_states_come_from_the_compiled_layers(plain, compiled, monkeypatch):
    settings = {"max_new_tokens": 3, "output_hidden_states": True, "return_dict_in_generate": True}
    for prompt in (torch.arange(6).view(1, 6), torch.arange(18).view(3, 6)):
        expected = descant.generate(plain, prompt, **settings).hidden_states
        with monkeypatch.context() as patch:
            for layer in compiled.model.layers:
                patch.setattr(layer.forward, "plain", None)
            found = descant.generate(compiled, prompt, **settings).hidden_states
        assert len(found) == len(expected) == 3
        for step, other in zip(found, expected, strict=True):
            torch.testing.assert_close(step, other)


def test_rows_of_different_length_return_their_own_states(compiled):
    adapter = TransformersModel(compiled, ["hidden_states"])
    lengths = torch.tensor([5, 3])
    zero, index = torch.zeros_like(lengths), torch.arange(2)
    tokens = torch.arange(10, 20).view(2, 5)
    rows = Rows(tokens, lengths, zero, offset=zero, prompt_length=lengths, request=index, slot=zero)
    cache = DenseStore()
    cache.extend(2)
    (states,) = adapter.forward(rows, Proposal(), cache).states
    assert states["fed_length"].tolist() == [5, 3]
    for row, length in enumerate(lengths.tolist()):
        expected = compiled(tokens[row : row + 1, :length], output_hidden_states=True).hidden_states
        for layer, other in zip(states["hidden_states"], expected, strict=True):
            torch.testing.assert_close(layer[row, :length], other[0])


def test_methods_that_read_hidden_states(plain, compiled):
    contrastive = GenerationConfig(max_new_tokens=7, penalty_alpha=0.6, top_k=3)
    prompts = [
        Request([5, 6, 7], contrastive),
        Request(list(range(4, 40)), GenerationConfig(max_new_tokens=8)),
        Request([9, 8, 7, 6], contrastive.replace(low_memory=True)),
        Request([3, 5, 9], GenerationConfig(max_new_tokens=6, dola_layers="low")),
        Request([8, 9], contrastive.replace(cache_implementation="paged")),
    ]
    expected = [one.tokens for one in outcomes(plain, prompts)]
    for scheduler in (None, SchedulerConfig(num_blocks=64, chunk_tokens=7), SchedulerConfig(chunk_tokens=5)):
        assert [one.tokens for one in outcomes(compiled, prompts, scheduler=scheduler)] == expected


def test_attentions_and_plain_models_are_not_packed_for_states(plain, compiled):
    traits = TransformersModel(plain).traits
    assert PackedForwards(compiled, traits).can_return(["hidden_states"])
    assert not PackedForwards(compiled, traits).can_return(["attentions", "hidden_states"])
    assert not PackedForwards(plain, traits).can_return(["hidden_states"])
    assert PackedForwards(plain, traits).can_return([])


def test_the_report_names_the_kernel_of_the_cache(compiled, monkeypatch):
    monkeypatch.setattr(PagedDecodeAttention, "kernel", lambda *_: None)
    for cache, kernel in ((DenseStore(), " a kernel"), (PagedStore(), " no kernel")):
        path = next(one for one in fast_paths(compiled, cache) if one.name == "compiled layers")
        assert path.detail.endswith(f"{kernel} for decode attention")


def test_inference_mode_and_threads(plain, compiled):
    prompt = torch.arange(12).view(2, 6)
    expected = descant.generate(plain, prompt, max_new_tokens=6)
    with torch.inference_mode():
        assert torch.equal(descant.generate(compiled, prompt, max_new_tokens=6), expected)
    results = []

    def run():
        results.append(descant.generate(compiled, prompt, max_new_tokens=6))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert all(torch.equal(one, expected) for one in results)


def test_a_changed_model_runs_its_own_code(compiled):
    assert compiled_layers_of(compiled) is not None
    layer = compiled.model.layers[0].mlp
    hook = layer.register_forward_hook(lambda *_: None)
    assert compiled_layers_of(compiled) is None
    hook.remove()
    weight = layer.up_proj.weight
    layer.up_proj.weight = torch.nn.Parameter(torch.zeros_like(weight))
    try:
        assert compiled_layers_of(compiled) is None
        changed = descant.generate(compiled, torch.arange(6).view(1, 6), max_new_tokens=4)
        other = copy.deepcopy(compiled)
        assert torch.equal(descant.generate(other, torch.arange(6).view(1, 6), max_new_tokens=4), changed)
    finally:
        layer.up_proj.weight = weight
    threads = torch.get_num_threads()
    changes = [
        (compiled.train, compiled.eval),
        (partial(torch.set_num_threads, threads + 1), partial(torch.set_num_threads, threads)),
    ]
    for name, value in (("adapter", "other"), ("scaling", {"other": 2.0}), ("forward", layer.forward)):
        changes.append((partial(setattr, layer, name, value), partial(delattr, layer, name)))
    for change, undo in changes:
        assert compiled_layers_of(compiled) is not None
        change()
        assert compiled_layers_of(compiled) is None
        undo()
    assert compiled_layers_of(compiled) is not None


def test_another_type_runs_its_own_code(plain):
    model = copy.deepcopy(plain)
    layers = descant.compile_layers(model)
    model.bfloat16()  # changes the parameters in place
    assert compiled_layers_of(model) is None
    assert "changed since" in {one.name: one for one in fast_paths(model)}["compiled layers"].detail
    half = copy.deepcopy(plain).bfloat16()
    prompt = torch.arange(12).view(2, 6)
    found, expected = (descant.generate(one, prompt, max_new_tokens=6) for one in (model, half))
    assert torch.equal(found, expected)
    layers.restore()


def test_half_precision(plain, monkeypatch):
    model = copy.deepcopy(plain).bfloat16()
    settings = {"max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
    prompts = (torch.arange(12).view(2, 6), torch.arange(6).view(1, 6))
    expected = [descant.generate(model, one, **settings).logits for one in prompts]
    with descant.compile_layers(model) as layers:
        assert layers.num_graphs == 2 * GRAPHS  # one each is for single tokens
        for layer in model.model.layers:
            monkeypatch.setattr(layer.forward, "plain", None)
        found = [descant.generate(model, one, **settings).logits for one in prompts]
        path = next(one for one in fast_paths(model) if one.name == "compiled layers")
        assert path.detail.endswith(f"graphs: {2 * GRAPHS}, a kernel for decode attention")
        assert "forward" in model.lm_head.__dict__
    assert "forward" not in model.lm_head.__dict__
    for one, two in zip(found, expected, strict=True):
        assert float((one[0] - two[0]).abs().max()) < 0.05 * float(two[0].abs().max())


@pytest.mark.parametrize("has_kernel", [True, False])
def test_one_row_in_half_precision_on_both_caches(plain, has_kernel, monkeypatch):
    if not has_kernel:
        monkeypatch.setattr(bfloat16_product, "_product_kernel", lambda _dtype: None)
    model, prompt = copy.deepcopy(plain).bfloat16(), torch.arange(30, 50).view(1, 20)
    settings = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad(), descant.compile_layers(model):
        for cache in ("dynamic", "paged"):
            out = descant.generate(model, prompt, **settings, cache_implementation=cache)
            for length, logits in enumerate(out.logits, 20):
                expected = plain(out.sequences[:, :length]).logits[:, -1]
                assert float((logits - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_restored_in_a_session(plain):
    model = copy.deepcopy(plain)
    layers = descant.compile_layers(model)
    session = descant.Session(model)
    (number,) = session.admit(Request([5, 6, 7], GenerationConfig(max_new_tokens=6)))
    events = list(session.step())
    layers.restore()
    events += session.drain()
    found = [token for event in events if isinstance(event, descant.Tokens) for token in event.token.tolist()]
    assert number == 0
    expected = descant.generate(plain, torch.tensor([[5, 6, 7]]), max_new_tokens=6)
    assert found == expected[0, 3:].tolist()
    descant.compile_layers(model).restore()


class _TupleLayer(torch.nn.Module):
    """A layer that returns a tuple, as some models have."""

    def forward(self, hidden_states, **_kwargs):
        return (hidden_states,)


def test_layers_that_cannot_be_replaced_are_refused(plain):
    model = copy.deepcopy(plain)
    layer = model.model.layers[1]
    layer.forward = own = layer.forward
    with pytest.raises(InputError, match="`model` must have layers without a `forward` of their own"):
        descant.compile_layers(model)
    assert layer.forward is own
    del layer.__dict__["forward"]
    layers = CompiledLayers(model, [_TupleLayer()])
    with layers, layers.running(None), pytest.raises(UnsupportedModel, match="must return one tensor"):
        layers._layers[0](torch.randn(1, 5, 8))


def test_a_layer_that_depends_on_the_number_of_tokens_is_refused(plain):
    class Short(torch.nn.Module):
        def forward(self, hidden_states, **_kwargs):
            return hidden_states * 2 if hidden_states.shape[1] < 100 else hidden_states

    layers = CompiledLayers(plain, [Short()])
    with (
        layers,
        layers.running(None),
        torch.no_grad(),
        pytest.raises(Exception, match="depends on the number of tokens"),
    ):
        layers._layers[0](torch.randn(1, 5, 8))


def test_weights_may_change_in_place(plain, compiled):
    weight = compiled.model.layers[1].mlp.up_proj.weight
    prompt = torch.arange(12).view(2, 6)
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(-3.0)
    try:
        found = descant.generate(compiled, prompt, max_new_tokens=6)
        expected = descant.generate(copy.deepcopy(compiled), prompt, max_new_tokens=6)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert torch.equal(found, expected)
    assert not torch.equal(found, descant.generate(plain, prompt, max_new_tokens=6))


def test_prepacked_weights_are_used(plain, monkeypatch):
    monkeypatch.setattr("descant.models.fast.products._MIN_NUMEL", 1)
    model = copy.deepcopy(plain)
    with descant.prepack_weights(model) as packed, descant.compile_layers(model) as layers:
        assert tokens(model) == tokens(plain)
        assert layers.num_graphs == GRAPHS
        one = model.model.layers[0]
        size = one.mlp.gate_proj.weight.numel() + one.mlp.up_proj.weight.numel()
        assert one.mlp.gate_proj.forward.nbytes == 2 * 4 * size  # both are packed as one
        assert one.mlp.up_proj.forward.nbytes == 0
        prompt = torch.arange(12).view(2, 6)
        descant.generate(model, prompt, max_new_tokens=4)  # the first product of each size is compared
        with monkeypatch.context() as patch:
            patch.setattr("descant.models.fast.products.plain_product", lambda *_: pytest.fail("plain"))
            descant.generate(model, prompt, max_new_tokens=4)
        packed.restore()  # the graph finds no packed weights and uses the plain ones
        assert tokens(model) == tokens(plain)
    assert "forward" not in model.model.layers[0].__dict__


def test_layers_of_two_kinds():
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    expected = tokens(model)
    with descant.compile_layers(model) as layers:
        assert layers.num_graphs <= 2 * GRAPHS
        assert tokens(model) == expected


def test_what_cannot_be_compiled_is_refused(tiny, compiled):
    with pytest.raises(InputError, match="`model` must not be compiled already"):
        descant.compile_layers(compiled)
    model = tiny("bart").model
    with pytest.raises(UnsupportedModel, match="has no packed forwards, which compiled layers need"):
        descant.compile_layers(model)
    assert all("forward" not in one.__dict__ for one in model.modules())
