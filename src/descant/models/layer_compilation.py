"""`compile_layers`: compiles the decoder layers of a model and compares them with its own code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.dense import DenseStore
from descant.models.compiled_layers import CompiledLayers, compiled_layers_of, decoder_layers, trace_error
from descant.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compile_layers"]

# Two rows, whose tokens together are no other size of a model.
_LENGTHS = (6, 7)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest logit
_HALF_TOLERANCE = 5e-2


def compile_layers(model: PreTrainedModel) -> CompiledLayers:
    """Compile the decoder layers of a model, so that a forward runs fewer and larger operators.

    One graph serves all layers of a kind and all numbers of tokens, so compilation takes seconds. It is used
    by every forward that can be packed; others run the layers as they are. It replaces the `forward` of the
    layers, which `restore()` of the result undoes. Outputs differ by rounding alone. If the model is changed
    (other weights, hooks, adapters, training mode), its own code runs again. To prepack the weights too, do
    that first.
    """
    if compiled_layers_of(model) is not None:
        raise InputError("model", "must not be compiled already", type(model).__name__, "restore it first")
    layers = decoder_layers(model)
    expected = _packed_logits(model)
    compiled = CompiledLayers(model, layers)
    try:
        logits = _packed_logits(model)
        error = float((logits - expected).abs().max() / expected.abs().max())
        if not error <= _TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
            raise UnsupportedModel(f"its logits differ by {error:.1e} of the largest")
        if not compiled.graphs:
            raise UnsupportedModel("its layers are not called")
    except UnsupportedModel as error:
        compiled.restore()
        raise trace_error(model, error) from error
    except torch._dynamo.exc.TorchDynamoException as error:
        compiled.restore()
        raise trace_error(model, error) from error
    except BaseException:
        compiled.restore()
        raise
    return compiled


def _packed_logits(model: PreTrainedModel) -> Tensor:
    """The logits [2, 1, V] of a packed forward of two short rows."""
    adapter, cache = TransformersModel(model), DenseStore()
    if not adapter.can_pack(cache):
        raise UnsupportedModel(f"{type(model).__name__} has no packed forwards, which compiled layers need")
    cache.extend(2)
    length = torch.tensor(_LENGTHS)
    zero, index = torch.zeros_like(length), torch.arange(2)
    tokens = torch.arange(2 * max(_LENGTHS), device=adapter.device).view(2, -1) % adapter.traits.vocab_size
    rows = Rows(
        tokens, length, cached_length=zero, offset=zero, prompt_length=length, request=index, slot=zero
    )
    devices = [adapter.device] if adapter.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=model.training):
        return adapter.forward(rows, Proposal(), cache).logits
