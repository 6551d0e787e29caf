"""Prepacked weights: the same products, which notice changed weights and can be undone."""

from __future__ import annotations

import copy

import pytest
import torch

import descant
from descant import DescantError, InputError
from descant.models.fast.products import PackedProduct
from descant.testing import outcomes, toy


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 320), torch.nn.Linear(8, 8))


def packed_counts(layer):
    """The numbers of lines for which the packed product is used."""
    return sorted(key[0] for key, exact in layer[0].forward._is_exact.items() if exact)


@torch.no_grad()
def test_products_are_the_same(layer):
    inputs = [torch.randn(lines, 256) for lines in (1, 3, 4, 5, 16, 17, 24, 128, 129)] + [
        torch.randn(2, 3, 256)
    ]
    plain = [layer[0](one) for one in inputs]
    with descant.prepack_weights(layer) as packed:
        assert isinstance(packed, descant.PrepackedWeights)
        assert packed.num_layers == 1  # the other is too small
        assert packed.nbytes == 2 * 256 * 320 * 4
        for _ in range(2):  # the first product of each size is compared with the plain one
            for one, expected in zip(inputs, plain, strict=True):
                torch.testing.assert_close(layer[0](one), expected, atol=1e-4, rtol=1e-4)
        assert packed_counts(layer) == [4, 5, 6, 16, 17]  # oneDNN's need no comparison
    assert "forward" not in layer[0].__dict__


@torch.no_grad()
def test_changed_weights_are_noticed(layer):
    packed, one = descant.prepack_weights(layer), torch.randn(8, 256)
    layer[0](one)
    layer[0].weight.mul_(2.0)
    expected = torch.nn.functional.linear(one, layer[0].weight, layer[0].bias)
    assert torch.equal(layer[0](one), expected)
    packed.restore()
    packed = descant.prepack_weights(layer)
    layer[0](one)
    layer[0].weight = torch.nn.Parameter(torch.zeros(320, 256))
    assert torch.equal(layer[0](one), layer[0].bias.expand(8, -1))


def test_a_step_that_torch_does_not_count_is_noticed_by_a_call(monkeypatch):
    monkeypatch.setattr("descant.models.fast.products._MIN_NUMEL", 1)
    model, ids = toy(), torch.arange(5, 25)[None]
    with descant.prepack_weights(model):
        descant.generate(model, ids, max_new_tokens=2)
        model(ids, labels=ids).loss.backward()
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
        call = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
        found = descant.generate(model, ids, **call).logits
        expected = descant.generate(copy.deepcopy(model), ids, **call).logits
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))


@torch.no_grad()
def test_a_product_that_differs_is_never_used(layer, monkeypatch):
    one = torch.randn(8, 256)
    plain = layer[0](one)
    descant.prepack_weights(layer)
    monkeypatch.setattr(PackedProduct, "_mkl_product", lambda *_: torch.zeros(8, 320))
    for _ in range(2):
        assert torch.equal(layer[0](one), plain)
    assert packed_counts(layer) == []


def test_gradients_come_from_the_plain_weights(layer):
    with descant.prepack_weights(layer):
        layer[0](torch.randn(8, 256)).sum().backward()
    assert layer[0].weight.grad is not None


@torch.no_grad()
def test_a_copy_is_plain(layer):
    one = torch.randn(8, 256)
    with descant.prepack_weights(layer):
        other = copy.deepcopy(layer)
        layer[0].weight.zero_()
    assert float(other[0](one).abs().max()) > 0.5


def test_what_cannot_be_prepacked_is_refused(layer, monkeypatch):
    with pytest.raises(InputError, match="`model` must have linear layers of float32 weights on the CPU"):
        descant.prepack_weights(layer.double())
    layer.float()
    with (
        descant.prepack_weights(layer),
        pytest.raises(InputError, match="`model` must not be prepacked already"),
    ):
        descant.prepack_weights(layer)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    with pytest.raises(DescantError, match="needs a torch build with MKL and oneDNN"):
        descant.prepack_weights(layer)


def test_tokens_of_a_session_are_the_same(tiny, monkeypatch):
    monkeypatch.setattr("descant.models.fast.products._MIN_NUMEL", 1)
    model = tiny("llama").model
    requests = [
        descant.Request(
            [5 + at, 9, 4], descant.GenerationConfig(max_new_tokens=6, num_beams=1 + at % 3, **sampling)
        )
        for at, sampling in enumerate([{}, {"do_sample": True, "seed": 3}, {}] * 3)
    ]
    plain = outcomes(model, requests)
    with descant.prepack_weights(model) as packed:
        found = outcomes(model, requests)
        assert any(layer.forward._is_exact for layer in packed._layers)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
