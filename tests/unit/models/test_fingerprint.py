"""The fingerprint of a model: the same wherever it is, another after any edit of its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, optim
from torch.nn.utils import prune

import descant
from descant.models.wrapping.fingerprint import check_fingerprint, fingerprint


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


def replaced_weight(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() + 0.5)


EDITS: tuple[Callable[[Any], None], ...] = (
    one_row, one_value, swapped_rows, through_data, negated, replaced_weight,
)  # fmt: skip


def fused_step(optimizer: type[torch.optim.Optimizer], model: Any) -> None:
    """A step that torch does not count on a CPU."""
    ids = torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    optimizer(model.parameters(), lr=1e-3, fused=True).step()  # type: ignore[call-arg]


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.3)


def scaled(model: Any) -> None:
    for layer in lora_layers(model):
        layer.set_scale("first", 3.0)


def merged(model: Any) -> None:
    """The adapter that is not active, which PEFT adds through `.data`."""
    for layer in lora_layers(model):
        layer.merge(adapter_names=["second"])


def rotated(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data *= 0.5


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, out: out * 1.5)


def in_training(model: Any) -> None:
    model.train()


def lora_layers(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if hasattr(layer, "lora_A")]


STEPS = [partial(fused_step, one) for one in (optim.AdamW, optim.Adam, optim.SGD, optim.Adagrad)]
ADAPTER_EDITS = (scaled, merged)


def edit_name(edit: Any) -> str:
    return edit.args[0].__name__ if isinstance(edit, partial) else edit.__name__


def with_adapters(model: Any) -> Any:
    for name in ("first", "second"):
        config = LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
        model.add_adapter(config, adapter_name=name)
    model.set_adapter("first")
    return model


def num_hits(model: Any, prefixes: descant.PrefixCache) -> int:
    """How often a prompt was found in a prefix cache, after a request of a session."""
    session = descant.Session(model, prefix_cache=prefixes)
    session.admit(descant.Request(range(5, 15), descant.GenerationConfig(max_new_tokens=2)))
    for _ in session.drain():
        pass
    return prefixes.report().hits


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.parametrize(
    "edit",
    [
        *(one for one in EDITS if one is not through_data),
        *STEPS, pruned, *ADAPTER_EDITS, rotated, hooked, in_training,
    ],
    ids=edit_name,
)  # fmt: skip
def test_a_prefix_cache_forgets_what_another_model_has_read(edit: Callable[[Any], None], model: Any) -> None:
    model = with_adapters(model) if edit in ADAPTER_EDITS else model
    prefixes = descant.PrefixCache(block=4)
    assert [num_hits(model, prefixes) for _ in range(2)] == [0, 1]
    edit(model)
    assert [num_hits(model, prefixes) for _ in range(2)] == [1, 2]


def test_an_edit_while_a_request_runs_keeps_its_keys_out(model: Any) -> None:
    prefixes = descant.PrefixCache(block=4)
    session = descant.Session(model, prefix_cache=prefixes)
    config = descant.GenerationConfig(max_new_tokens=4, min_new_tokens=4)
    session.admit(descant.Request(range(5, 15), config))
    session.step()
    scale = model.model.layers[0].register_forward_hook(lambda _, __, out: out * 1.5)
    for _ in session.drain():
        pass
    scale.remove()
    assert [num_hits(model, prefixes) for _ in range(2)] == [0, 1]


def set_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


@pytest.mark.parametrize("edit", [through_data, set_attribute], ids=edit_name)
def test_a_reported_change_makes_everything_stale(edit: Callable[[Any], None], model: Any) -> None:
    """One that no comparison of some numbers sees."""
    prefixes, known = descant.PrefixCache(block=4), descant.prefill(model, range(5, 13))
    assert [num_hits(model, prefixes) for _ in range(2)] == [0, 1]
    edit(model)
    descant.weights_changed(model)
    assert [num_hits(model, prefixes) for _ in range(2)] == [1, 2]
    request = descant.Request(range(5, 15), past_key_values=known)
    with pytest.raises(descant.InputError, match=r"made by this model after its last `weights_changed`"):
        descant.Session(model).admit(request)
    after = descant.prefill(model, range(5, 13))
    descant.Session(model).admit(replace(request, past_key_values=after))
    with pytest.raises(descant.InputError, match="must be a torch module"):
        descant.weights_changed(descant.ProxyTuning(model, model, model))


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


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.parametrize(
    "edit",
    [*(one for one in EDITS if one is not through_data), *STEPS, pruned, *ADAPTER_EDITS, hooked],
    ids=edit_name,
)
def test_a_call_refuses_a_cache_after_an_edit(edit: Callable[[Any], None], model: Any) -> None:
    model = with_adapters(model) if edit in ADAPTER_EDITS else model
    known = descant.prefill(model, [5, 6, 7, 8])
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    length = {"max_new_tokens": 2, "min_new_tokens": 2}
    assert descant.generate(model, ids, past_key_values=known, **length).shape == (1, 7)
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
    monkeypatch.setattr(
        "descant.models.wrapping.fingerprint._checksum", lambda weight: read.append("read") or b""
    )
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
