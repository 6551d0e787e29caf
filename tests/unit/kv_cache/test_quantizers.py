"""Quantizers: values equal those of the packages, for any grouping."""

from __future__ import annotations

import sys

import pytest
import torch

from descant.errors import ConfigError, MissingExtra
from descant.kv_cache.stores.quantizers import BACKENDS, HQQ, Quanto, _pack, _unpack, build_quantizer
from tests.support.extras import need_hqq


def content(heads, length, size, seed=0, dtype=torch.float32):
    """Keys with outliers in some channels, as models have them [H, C, D]."""
    drawn = torch.randn(heads, length, size, generator=torch.Generator().manual_seed(seed))
    return (drawn * torch.linspace(0.1, 4, size)).to(dtype)


def again(coding, *contents, lines=1):
    """What is read of contents that were coded one by one [H, N, S, D]."""
    parts = [coding.encode(one) for one in contents]
    heads, _, size = contents[0].shape
    into = contents[0].new_empty(heads, lines, sum(one.shape[1] for one in contents) // lines, size)
    coding.decode(parts, into)
    return into


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 5, 8, 24, 64])
def test_codes_come_out_of_bytes_as_they_went_in(bits, size):
    codes = torch.randint(0, 2**bits, (2, 3, size), generator=torch.Generator().manual_seed(size))
    packed = _pack(codes.to(torch.uint8), bits)
    found = _unpack(packed, bits)
    assert torch.equal(found[..., :size], codes)
    assert not found[..., size:].any()
    assert packed.shape[-1] * 8 < size * bits + 24 + 1  # no more than what the last bytes leave empty


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("axis", [0, -1])
def test_quanto_gives_what_the_package_would(bits, axis):
    package = pytest.importorskip("optimum.quanto")
    from optimum.quanto.tensor.grouped import ungroup

    keys = content(3, 128, 64)
    whole = keys[None]
    kind = {2: package.qint2, 4: package.qint4}[bits]
    scale, shift = package.MaxOptimizer()(whole, kind, axis, 64)
    codes = torch.ops.quanto.quantize_affine(whole, bits, axis, 64, scale, shift)
    expected = ungroup(scale * codes - shift, axis, whole.shape)[0]
    assert torch.equal(again(Quanto(bits, axis_key=axis).key_codec, keys)[:, 0], expected)


@pytest.mark.hqq
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq_gives_what_the_package_would(bits):
    need_hqq()
    from hqq.core.quantize import Quantizer

    keys = content(3, 40, 64)
    codes, found = Quantizer.quantize(
        keys.reshape(-1, 64), nbits=bits, axis=1, group_size=64, device="cpu", compute_dtype=torch.float32
    )
    expected = Quantizer.dequantize(codes, {**found, "compute_dtype": torch.float32}).view_as(keys)
    torch.testing.assert_close(again(HQQ(bits, 1, 1).key_codec, keys)[:, 0], expected, rtol=1e-5, atol=1e-5)


SHAPES = [(3, 130, 64), (2, 5, 80), (1, 1, 7), (1, 1, 1), (2, 71, 96), (4, 64, 20), (2, 9, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 64, 128])
@pytest.mark.parametrize("axis", [0, -1])
def test_groups_of_any_size_are_as_near_as_their_steps_allow(shape, size, axis):
    keys = content(*shape)
    found = again(Quanto(4, axis_key=axis, q_group_size=size).key_codec, keys)[:, 0]
    of = 2 if axis == 0 else 1
    step = (keys.amax(of, keepdim=True) - keys.amin(of, keepdim=True)) / 15  # at the most, that of a group
    assert ((found - keys).abs() <= step / 2 + 1e-5).all()


@pytest.mark.hqq
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq_takes_any_shape(shape, axis, bits):
    need_hqq()
    keys = content(*shape)
    found = again(HQQ(bits, axis_key=axis, q_group_size=64).key_codec, keys)[:, 0]
    of = 2 if axis == 1 else 1
    reach = keys.amax(of, keepdim=True) - keys.amin(of, keepdim=True)
    assert ((found - keys).abs() <= 1.5 * reach / (2**bits - 1) + 1e-4).all()


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("shape", [(2, 7, 64), (2, 64, 24)], ids=str)
def test_parts_are_read_together_as_alone(axis, shape):
    """Whatever stands beside it, and in whichever line, a part decodes to the same numbers."""
    coding = Quanto(4, axis_key=axis).key_codec
    some = [content(*shape, seed=seed) for seed in range(4)]
    alone = [again(coding, one)[:, 0] for one in some]
    assert torch.equal(again(coding, *some)[:, 0], torch.cat(alone, 1))
    assert torch.equal(
        again(coding, *some, lines=2), torch.stack([torch.cat(alone[:2], 1), torch.cat(alone[2:], 1)], 1)
    )
    uneven = [some[0][:, :5], some[1], some[2][:, :1]]
    parts = [again(coding, one)[:, 0] for one in uneven]
    assert torch.equal(again(coding, *uneven)[:, 0], torch.cat(parts, 1))


@pytest.mark.parametrize("axis", [0, -1])
def test_equal_numbers_come_back_and_leave_others_alone(axis):
    keys = content(2, 6, 64)
    keys[0] = 3.7
    keys[1, :, 0] = 0.0
    found = again(Quanto(4, axis_key=axis).key_codec, keys)[:, 0]
    assert torch.equal(found[0], keys[0])
    assert (found[1] - keys[1]).abs().max() < 2


def test_a_channel_that_differs_costs_less_over_positions():
    """Why there are two axes: what one channel has that others have not, positions share."""
    keys = content(2, 64, 64)
    keys[..., 5] += 50
    errors = [(again(Quanto(4, axis_key=axis).key_codec, keys)[:, 0] - keys).abs().mean() for axis in (0, -1)]
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kept", [None, torch.float16, torch.float32])
def test_scales_are_kept_as_asked_and_keys_come_back_as_they_came(dtype, kept):
    coding = Quanto(4, compute_dtype=kept).key_codec
    keys = content(2, 10, 64, dtype=dtype)
    packed = coding.encode(keys)
    assert packed.scale.dtype == packed.offset.dtype == (kept or dtype)
    found = again(coding, keys)
    assert found.dtype == dtype
    assert (found[:, 0].float() - keys.float()).abs().max() < 1.2


def test_few_bits_take_few_bytes():
    keys = content(3, 1024, 64)
    for bits, most in ((4, 5.01), (2, 3.01)):
        assert Quanto(bits).key_codec.encode(keys).nbytes * 8 / keys.numel() < most
    assert Quanto(4, compute_dtype=torch.float16).key_codec.encode(keys).nbytes * 8 / keys.numel() < 4.51


def test_what_is_coded_carries_no_gradient():
    packed = Quanto(4).key_codec.encode(content(2, 3, 64).requires_grad_())
    assert not any(part.requires_grad for part in packed)


class Config:
    """A QuantizedCacheConfig as far as it is asked."""

    backend, nbits, axis_key, axis_value, q_group_size, compute_dtype = "Quanto", 2, -1, 0, 32, None


def test_a_config_says_which():
    assert build_quantizer(Config()) == Quanto(2, -1, 0, 32)
    bad = Config()
    bad.backend = "gguf"
    with pytest.raises(ConfigError, match="`backend` must be one of quanto, hqq, got 'gguf'"):
        build_quantizer(bad)


@pytest.mark.parametrize(
    ("backend", "wrong", "name"),
    [
        ("quanto", {"nbits": 3}, "nbits"),
        ("quanto", {"axis_key": 1}, "axis_key"),
        ("quanto", {"axis_value": 2}, "axis_value"),
        ("quanto", {"q_group_size": 0}, "q_group_size"),
        ("quanto", {"compute_dtype": torch.int8}, "compute_dtype"),
        ("hqq", {"nbits": 5}, "nbits"),
        ("hqq", {"axis_key": -1}, "axis_key"),
    ],
)
def test_wrong_settings_are_named(backend, wrong, name):
    with pytest.raises(ConfigError, match=f"`{name}` must be") as caught:
        BACKENDS[backend](**wrong)
    assert caught.value.field == name


@pytest.mark.parametrize(("backend", "module"), [("quanto", "optimum.quanto"), ("hqq", "hqq.core.quantize")])
def test_a_missing_package_is_named_when_the_cache_is_made(backend, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"pip install descant\[{backend}\]") as caught:
        BACKENDS[backend]()
    assert caught.value.extra == backend
