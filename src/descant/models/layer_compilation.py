"""`compile_layers`: compiles the decoder layers of a model and compares them with its own code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.dense import DenseStore
from descant.models.compiled_layers import (
    CompiledLayers,
    compiled_layers_of,
    decoder_layers,
    previous_layers,
    trace_error,
)
from descant.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compile_layers"]

# Prompts by forward. The first has so many tokens as no other size of a model, so that torch takes no other
# for it.
_LENGTHS = ((6, 7), (5,))
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest logit
_HALF_TOLERANCE = 0.1


def compile_layers(model: PreTrainedModel) -> CompiledLayers:
    """Compile the decoder layers of a model, so that a forward runs fewer and larger operators.

    One graph serves all layers of a kind and all numbers of tokens, so compilation takes seconds. In half
    precision on a CPU single tokens have another, and in bfloat16 a kernel for their products. Graphs are
    used by every forward that can be packed; others run the layers as they are. It replaces the `forward` of
    the layers, and in bfloat16 on a CPU that of the output embeddings, which `restore()` of the result
    undoes. Outputs differ by rounding alone. When a call or a session begins and the model was changed (other
    weights, types, hooks, attributes of modules, training mode), its own code runs again. To prepack the
    weights too, do that first.
    """
    if compiled_layers_of(model) is not None:
        raise InputError("model", "must not be compiled already", type(model).__name__, "restore it first")
    if (previous := previous_layers(model)) is not None:
        previous.restore()
    layers = decoder_layers(model)
    if any("forward" in layer.__dict__ for layer in layers):
        must = "must have layers without a `forward` of their own"
        raise InputError("model", must, type(layers[0]).__name__, "remove it first")
    expected = _check_logits(model)
    compiled, start = CompiledLayers(model, layers), time.perf_counter()
    try:
        for _ in range(2):  # the first time the layers are traced
            logits = _check_logits(model, compiled)
            error = float((logits - expected).abs().max() / expected.abs().max())
            if not error <= _TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
                raise UnsupportedModel(f"its logits differ by {error:.1e} of the largest")
        if not compiled.graphs:
            raise UnsupportedModel("its layers are not called")
    except (UnsupportedModel, torch._dynamo.exc.TorchDynamoException) as failure:
        compiled.restore()
        raise trace_error(model, failure) from failure
    except BaseException:
        compiled.restore()
        raise
    compiled.compile_seconds = time.perf_counter() - start
    compiled.register(model)
    return compiled


def _check_logits(model: PreTrainedModel, compiled: CompiledLayers | None = None) -> Tensor:
    """The logits [N, V] of packed forwards of several sizes: prompts, a step of two rows, a step of one."""
    adapter = TransformersModel(model)
    if adapter.unpacked_reason is not None:
        name = type(model).__name__
        reason = f"{name} has no packed forwards, which compiled layers need ({adapter.unpacked_reason})"
        raise UnsupportedModel(reason)
    adapter.use_compiled_layers(compiled)
    devices = [adapter.device] if adapter.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=model.training):
        logits = [one for lengths in _LENGTHS for one in _row_logits(adapter, lengths)]
    if adapter.unpacked_reason is not None:
        raise UnsupportedModel(
            f"the forwards of {type(model).__name__} are not packed: {adapter.unpacked_reason}"
        )
    return torch.cat(logits)


def _row_logits(adapter: TransformersModel, lengths: Sequence[int]) -> Iterator[Tensor]:
    """The logits [R, V] after prompts of these lengths, and after one more token."""
    cache, count = DenseStore(), len(lengths)
    cache.extend(count)
    size = max(lengths) + 1
    vocab_size = adapter.traits.vocab_size
    # From the middle of the vocabulary: special tokens in a row let rounding grow without bound.
    numbers = torch.arange(count * size, device=adapter.device).view(count, size)
    tokens = (37 * numbers + vocab_size // 2) % vocab_size
    length = torch.tensor(lengths)
    zero, index = torch.zeros_like(length), torch.arange(count)
    rows = Rows(tokens, length, zero, offset=zero, prompt_length=length, request=index, slot=zero)
    yield adapter.forward(rows, Proposal(), cache).logits[:, -1]
    cache.commit(None, length)
    rows = rows.replace(length=length + 1, cached_length=length)
    yield adapter.forward(rows, Proposal(), cache).logits[:, -1]
