"""The fingerprint of a model: the same wherever it is, another after any edit of its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import descant
from descant.models.fingerprint import check_fingerprint, fingerprint


@pytest.fixture
def model(tiny: Any) -> Any:
    return copy.deepcopy(tiny("llama").model)


@torch.no_grad()
def one_row(model: Any) -> None:
    """One row of a matrix, as an edit of one token does."""
    model.model.embed_tokens.weight[40] *= 1.001


@torch.no_grad()
def one_value(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight[3, 17] += 1e-3


@torch.no_grad()
def swapped_rows(model: Any) -> None:
    weight = model.lm_head.weight
    weight[[10, 11]] = weight[[11, 10]].clone()


def through_data(model: Any) -> None:
    model.lm_head.weight.data[5] = 0


@torch.no_grad()
def negated(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.neg_()


def replaced(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() + 0.5)


EDITS: tuple[Callable[[Any], None], ...] = (
    one_row, one_value, swapped_rows, through_data, negated, replaced,
)  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_a_saved_cache_is_refused_after_an_edit(
    edit: Callable[[Any], None], model: Any, tmp_path: Any
) -> None:
    path = tmp_path / "prompt.safetensors"
    descant.prefill(model, [5, 6, 7, 8]).save(path)
    assert descant.load_cache(path, model).lengths.tolist() == [4]
    edit(model)
    with pytest.raises(descant.InputError, match=r"`model` must be .* weights .*call prefill\(\) again"):
        descant.load_cache(path, model)


@pytest.mark.parametrize(
    "edit", [one for one in EDITS if one is not through_data], ids=lambda one: one.__name__
)
def test_a_call_refuses_a_cache_after_an_edit(edit: Callable[[Any], None], model: Any) -> None:
    known = descant.prefill(model, [5, 6, 7, 8])
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert descant.generate(model, ids, past_key_values=known, max_new_tokens=2).shape == (1, 7)
    edit(model)
    with pytest.raises(descant.InputError, match="`past_key_values` must be made by this model"):
        descant.generate(model, ids, past_key_values=known, max_new_tokens=2)


def test_a_cache_loaded_without_a_model_is_checked_by_the_call(model: Any, tmp_path: Any) -> None:
    path = tmp_path / "prompt.safetensors"
    descant.prefill(model, [5, 6, 7, 8]).save(path)
    through_data(model)
    other = copy.deepcopy(model)  # has never been read
    ids, known = torch.tensor([[5, 6, 7, 8, 9]]), descant.load_cache(path)
    with pytest.raises(descant.InputError, match="whose weights is"):
        descant.generate(other, ids, past_key_values=known, max_new_tokens=2)


def test_the_weights_are_read_once_while_they_do_not_change(model: Any, monkeypatch: Any) -> None:
    made_by = fingerprint(model)
    read: list[str] = []
    monkeypatch.setattr("descant.models.fingerprint._checksum", lambda weight: read.append("read") or b"")
    check_fingerprint(model, made_by, "past_key_values", cheap=True)
    assert not read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_copy_has_the_same_fingerprint_whatever_its_layout(dtype: torch.dtype, model: Any) -> None:
    model = model.to(dtype)
    other = copy.deepcopy(model)
    weight = other.lm_head.weight
    # The same numbers, transposed in memory and off the bounds of words.
    padded = torch.zeros(weight.numel() + 1, dtype=dtype)
    padded[1:] = weight.detach().flatten()
    other.lm_head.weight = torch.nn.Parameter(padded[1:].view_as(weight))
    proj = other.model.layers[0].mlp.up_proj
    proj.weight = torch.nn.Parameter(proj.weight.detach().t().contiguous().t())
    assert fingerprint(other) == fingerprint(model)


def test_saved_buffers_count_and_others_do_not(model: Any) -> None:
    first = fingerprint(model)
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    assert fingerprint(model) == first
    model.register_buffer("codes", torch.arange(5, dtype=torch.uint8))
    second = fingerprint(model)
    assert second["weights"] != first["weights"]
    model.codes[2] += 1
    assert fingerprint(model)["weights"] != second["weights"]


def test_weights_that_are_elsewhere_are_read_there(model: Any) -> None:
    whole = fingerprint(model)

    class Hook:
        def __init__(self, weights: dict[str, Tensor]) -> None:
            self.weights_map = weights

    head = model.lm_head
    stored = {"weight": head.weight.detach().clone()}
    head.weight = torch.nn.Parameter(head.weight.detach().to("meta"))
    assert fingerprint(model)["weights"] != whole["weights"]
    head._hf_hook = Hook(stored)
    assert fingerprint(model) == whole
    stored["weight"][3] += 1
    assert fingerprint(model)["weights"] != whole["weights"]


def test_a_weight_of_several_tensors_is_read_in_parts(model: Any) -> None:
    class Packed(torch.Tensor):
        """A quantized weight: codes and a scale."""

        @staticmethod
        def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

        def __init__(self, codes: Tensor, scale: Tensor) -> None:
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return Packed(args[0].codes, args[0].scale)
            raise NotImplementedError(func)

    packed = Packed(torch.arange(97 * 32).view(97, 32).to(torch.int8), torch.ones(1))
    model.lm_head.weight = torch.nn.Parameter(packed, requires_grad=False)
    first = fingerprint(model)
    packed.codes[9, 9] += 1
    assert fingerprint(model)["weights"] != first["weights"]
