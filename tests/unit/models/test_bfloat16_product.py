"""Products with bfloat16 weights: sums in float32, one rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from descant.models.fast import products as module
from descant.models.fast.products import (
    BFloat16Forward,
    bfloat16_product,
    has_bfloat16_product,
    plain_product,
)


def weights_of(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


@pytest.fixture(params=[True, False])
def any_number(request, monkeypatch) -> bool:
    """Whether the CPU is one on which the kernel serves any number of vectors."""
    monkeypatch.setattr(module, "serves_any_number", lambda: request.param)
    return request.param


@pytest.mark.parametrize("size", [1, 21, 64, 576, 1000])
@pytest.mark.parametrize("lines", [1, 2, 7, 16, 61, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_exact_product_rounded_once(size, lines, has_bias, monkeypatch):
    monkeypatch.setattr(module, "serves_any_number", lambda: True)
    torch.manual_seed(0)
    (weight,) = weights_of((39, size))
    vectors = torch.randn(1, lines, size).bfloat16()
    bias = torch.randn(39).bfloat16() if has_bias else None
    out = bfloat16_product(vectors, [weight], bias)
    exact = functional.linear(vectors.double(), weight.double(), None if bias is None else bias.double())
    assert out.shape == (1, lines, 39)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)


def test_a_product_does_not_depend_on_the_others(monkeypatch):
    monkeypatch.setattr(module, "serves_any_number", lambda: True)
    torch.manual_seed(0)
    (weight,) = weights_of((39, 100))
    vectors = torch.randn(75, 100).bfloat16()
    alone = torch.cat([bfloat16_product(one[None], [weight], None) for one in vectors])
    for lines in (2, 3, 5, 16, 75):
        assert torch.equal(bfloat16_product(vectors[:lines], [weight], None), alone[:lines])
    rows = [bfloat16_product(vectors, [row[None]], None) for row in weight]
    assert torch.equal(torch.cat(rows, 1), alone)


def test_many_vectors_are_left_to_torch_where_it_has_instructions(any_number):
    torch.manual_seed(0)
    weights, vectors = weights_of((48, 64), (16, 64)), torch.randn(3, 64).bfloat16()
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plain_product", lambda *args: calls.append(args) or plain_product(*args))
        out = bfloat16_product(vectors, weights, None)
    assert bool(calls) is not any_number
    expected = functional.linear(vectors.float(), torch.cat(weights).float())
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-3)


def test_the_instructions_of_the_cpu_decide(monkeypatch):
    for name, is_there, expected in (
        ("_is_avx512_bf16_supported", True, False),
        ("_is_amx_tile_supported", True, False),
        (None, False, True),
    ):
        for own in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, own, lambda found=own == name and is_there: found)
        monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
        assert module.serves_any_number.__wrapped__() is expected
    for own in ("_is_avx2_supported", "_is_avx512_supported"):
        monkeypatch.setattr(torch.cpu, own, lambda: False)
    assert module.serves_any_number.__wrapped__() is False


def test_products_of_the_same_vector_follow_each_other():
    torch.manual_seed(0)
    weights = weights_of((48, 64), (16, 64), (3, 64))
    vector = torch.randn(2, 64).bfloat16()[1:]
    out = torch.ops.descant.bfloat16_linear(vector, weights, None)
    parts = [bfloat16_product(vector, [weight], None) for weight in weights]
    assert torch.equal(out, torch.cat(parts, -1))
    strided = torch.stack((vector, vector), -1)[..., 0]
    assert torch.equal(bfloat16_product(strided, weights, None), out)


def test_what_it_does_not_serve_is_left_to_torch(monkeypatch):
    torch.manual_seed(0)
    (weight,) = weights_of((48, 64))
    vector = torch.randn(1, 64).bfloat16()
    assert has_bfloat16_product(weight)
    assert not has_bfloat16_product(weight.float())
    assert not has_bfloat16_product(weight.to("meta"))
    other = weight.t().contiguous().t()
    assert torch.equal(bfloat16_product(vector, [other], None), functional.linear(vector, other))
    full = bfloat16_product(vector.float(), [weight.float()], None)
    assert torch.equal(full, functional.linear(vector.float(), weight.float()))
    monkeypatch.setattr(module, "_product_kernel", lambda _dtype: None)
    assert not has_bfloat16_product(weight)
    assert torch.equal(bfloat16_product(vector, [weight], None), functional.linear(vector, weight))


def test_the_forward_of_a_layer_until_it_is_restored(monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48).bfloat16()
    assert BFloat16Forward.serves(layer)
    assert not BFloat16Forward.serves(None)
    assert not BFloat16Forward.serves(torch.nn.Linear(64, 48))
    forward = BFloat16Forward(layer)
    forward.install()
    assert not BFloat16Forward.serves(layer)
    calls = []
    monkeypatch.setattr(
        module, "bfloat16_product", lambda *args: calls.append(args) or bfloat16_product(*args)
    )
    vector = torch.randn(1, 64).bfloat16()
    out = layer(vector)  # with gradients
    assert out.requires_grad
    assert not calls
    with torch.no_grad():
        torch.testing.assert_close(layer(vector), out.detach(), rtol=2**-7, atol=1e-3)
        assert len(calls) == 1
        assert torch.equal(copy.deepcopy(layer)(vector), out.detach())
        assert len(calls) == 1
        layer.float()
        assert layer(vector.float()).dtype is torch.float32
        assert len(calls) == 1
    forward.restore()
    forward.restore()
    assert "forward" not in layer.__dict__
