"""The fast paths of a model: which are on, why the others are off, and what turns each on or off."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.kernels.decode_attention import DecodeAttention, PagedDecodeAttention
from descant.kv_cache.stores.dense import DenseStore, StaticStore
from descant.kv_cache.stores.paged import PagedStore
from descant.models.fast.compiled_layers import (
    CompiledLayers,
    compiled_layers_of,
    decoder_layers,
    previous_layers,
    trace_error,
)
from descant.models.fast.compiled_step import uncompilable_reason
from descant.models.fast.products import num_prepacked_layers, unprepackable_reason
from descant.models.model_adapter import adapter_of
from descant.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_COMPILED: Final = 'cache_implementation="static" and compile_config'


@dataclass(frozen=True)
class FastPath:
    """A way to compute the same tokens in less time."""

    name: str
    is_on: bool
    detail: str  # what it does for the model, or why it is off
    switch: str  # what turns it on or off


def fast_paths(model: Any, cache: RowCache | None = None) -> list[FastPath]:
    """The fast paths of a model on a cache; None is the cache that a call takes by default.

    A model without a network of its own has none.
    """
    adapter = model
    if not isinstance(model, TransformersModel):  # it may be behind wrappers
        network = model.network if hasattr(model, "traits") else model
        adapter = None if network is None else adapter_of(network)
    paths = (
        _packed_forwards,
        _grouped_heads,
        _prepacked_weights,
        _compiled_layers,
        _compiled_step,
        _shared_prefixes,
    )
    return [] if adapter is None else [describe(adapter, cache) for describe in paths]


def unshareable_reason(traits: ModelTraits) -> str | None:
    """Why rows of a model cannot share the blocks of a prefix; None: they can."""
    if traits.cache_type != "kv":
        return "the model does not use a KV cache"
    if traits.is_encoder_decoder:
        return "the model has an encoder"
    if traits.attn_implementation != "sdpa":
        return f"its attention is {traits.attn_implementation}, not sdpa"
    return None


def _packed_forwards(model: TransformersModel, cache: RowCache | None) -> FastPath:
    reason = model.unpacked_reason
    if reason is None and cache is not None and not model.can_pack(cache):
        reason = f"{type(cache).__name__} takes no packed writes"
    detail = reason or "rows of any lengths share a forward without padding"
    return FastPath("packed forwards", reason is None, detail, "model.packed_forwards")


def _grouped_heads(model: TransformersModel, cache: RowCache | None) -> FastPath:
    config = model.model.config.get_text_config(decoder=True)
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    packed = _packed_forwards(model, cache)
    if not packed.is_on:
        is_on, detail = False, "rows are not packed"
    elif not isinstance(heads, int) or not isinstance(kv_heads, int) or kv_heads >= heads:
        is_on, detail = False, "every query head has a key head of its own"
    else:
        is_on, detail = True, f"{heads} query heads read {kv_heads} key heads without copies"
    return FastPath("grouped query heads", is_on, detail, packed.switch)


def _prepacked_weights(model: TransformersModel, cache: RowCache | None) -> FastPath:
    del cache
    num_layers = num_prepacked_layers(model.model)
    detail = f"{num_layers} linear layers, for steps of 4 rows or more"
    if not num_layers:
        detail = unprepackable_reason(model.model) or "packed copies take twice the memory of the weights"
    return FastPath("prepacked weights", num_layers > 0, detail, "descant.prepack_weights(model)")


def _compiled_layers(model: TransformersModel, cache: RowCache | None) -> FastPath:
    packed = _packed_forwards(model, cache)
    compiled = compiled_layers_of(model.model)
    if not packed.is_on:
        detail = "rows are not packed"
    elif compiled is not None:
        attention = PagedDecodeAttention if isinstance(cache, PagedStore) else DecodeAttention
        has_kernel = attention.serves(model.model.dtype, model.device)
        kernel = "a kernel" if has_kernel else "FlexAttention" if model.device.type == "cuda" else "no kernel"
        detail = f"{compiled.num_layers} layers, graphs: {compiled.num_graphs}, {kernel} for decode attention"
    elif previous_layers(model.model) is not None:
        detail = "they were restored, or the model was changed since it was compiled"
    else:
        detail = "it is not asked for"
    is_on = packed.is_on and compiled is not None
    return FastPath("compiled layers", is_on, detail, "descant.compile_layers(model)")


def _compiled_step(model: TransformersModel, cache: RowCache | None) -> FastPath:
    is_on = getattr(cache, "compile_config", None) is not None
    detail = "one token per row on blocks of fixed size"
    if not is_on:
        default = (
            "it is not asked for" if isinstance(cache, StaticStore) else "the cache is not of fixed size"
        )
        detail = uncompilable_reason(model.model, model.traits) or default
    return FastPath("compiled step", is_on, detail, "disable_compile" if is_on else _COMPILED)


def _shared_prefixes(model: TransformersModel, cache: RowCache | None) -> FastPath:
    reason = unshareable_reason(model.traits)
    if reason is None and cache is not None and not isinstance(cache, PagedStore):
        reason = f"{type(cache).__name__} has no blocks"
    detail = reason or "rows attend once to a prefix that they share, where it is long, in paged blocks"
    other = "dynamic" if reason is None else "paged"
    return FastPath("shared prefixes", reason is None, detail, f'cache_implementation="{other}"')


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
        logits = [found for lengths in _LENGTHS for found in _row_logits(adapter, lengths)]
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
