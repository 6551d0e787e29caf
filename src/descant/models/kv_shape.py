"""Size of the keys and values of a model, measured with a short forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache, state_signature
from descant.models.model_adapter import adapter_of
from descant.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Lengths at which the state of a recurrent model is measured: if its size grows linearly between them, it is
# taken to grow linearly at all lengths.
_PROBE_LENGTHS = (8, 16, 24)


class LayerKVShape(NamedTuple):
    """Keys and values of one token in one layer."""

    num_heads: int
    key_dim: int  # per head
    value_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class KVShape:
    """Cache size of a model: keys and values per token, cross-attention, recurrent state."""

    layers: Mapping[int, LayerKVShape]
    cross_bytes: int = 0  # bytes per encoder position, once per request
    state_bytes: int | None = 0  # bytes per row of any length; None: unknown
    state_bytes_per_token: int = 0  # bytes per position of a row, in a recurrent state

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of one row, all layers."""
        return sum(shape.nbytes for shape in self.layers.values()) + self.state_bytes_per_token


_kv_shape_by_model: WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, KVShape]] = WeakKeyDictionary()


def kv_shape_of(model: PreTrainedModel) -> KVShape:
    """The KVShape of a model, measured once: by one token, or a few for recurrent models."""
    known = _kv_shape_by_model.get(model)
    if known is None or known[0] != model.dtype:
        known = _kv_shape_by_model[model] = (model.dtype, _measure(model))
    return known[1]


def max_token_bytes(model: Any, layers: int, size: int | None) -> int | None:
    """An upper bound for the bytes per token of most models, without a forward; None: unknown."""
    # The heads together may be wider than the embeddings, rarely by more than a factor of 4.
    return None if size is None else 4 * layers * 2 * size * model.dtype.itemsize


class _ShapeRecorderCache(DenseStore):
    """A cache that records the shapes of its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerKVShape] = {}

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span and record the shape."""
        self.shapes[layer] = LayerKVShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return super().update(layer, key, value, span)


def _measure(model: PreTrainedModel) -> KVShape:
    adapter = adapter_of(model)
    if adapter.traits.cache_type == "recurrent":
        return _measure_state(adapter)
    cache = _ShapeRecorderCache()
    cross = _feed_row(adapter, cache, 1) if adapter.traits.cache_type == "kv" else 0
    return KVShape(dict(sorted(cache.shapes.items())), cross)


def _measure_state(adapter: TransformersModel) -> KVShape:
    """The KVShape of a recurrent model."""
    sizes = []
    unknown = KVShape({}, state_bytes=None)
    for length in _PROBE_LENGTHS:
        cache = RecurrentStateCache(adapter.traits.cache_argument)
        try:
            _feed_row(adapter, cache, length)
        except Exception:  # many need more inputs than tokens
            return unknown
        sizes.append(_state_bytes(cache.read_state(torch.tensor([0])), adapter.traits.cache_argument))
    first, *others = (after - before for before, after in pairwise(sizes))
    growth, remainder = divmod(first, _PROBE_LENGTHS[1] - _PROBE_LENGTHS[0])
    if remainder or growth < 0 or any(other != first for other in others):
        return unknown
    return KVShape({}, state_bytes=sizes[0] - growth * _PROBE_LENGTHS[0], state_bytes_per_token=growth)


def _feed_row(adapter: TransformersModel, cache: RowCache, length: int) -> int:
    """Feed one row of `length` tokens; returns the cross-attention bytes of its one encoder position."""
    if adapter.traits.is_encoder_decoder:
        states = torch.zeros(
            1, adapter.traits.embedding_size or 1, dtype=adapter.model.dtype, device=adapter.device
        )
        adapter.add_requests([0], {"encoder_outputs": [states]})
    cache.extend(1)
    tokens = torch.zeros(1, length, dtype=torch.long, device=adapter.device)
    size, zero = torch.tensor([length]), torch.zeros(1, dtype=torch.long)
    rows = Rows(
        tokens, length=size, cached_length=zero, offset=zero, prompt_length=size, request=zero, slot=zero
    )
    # A model in training mode may draw random numbers (dropout); the global generator must not change.
    devices = [adapter.device] if adapter.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=adapter.model.training):
        adapter.forward(rows, Proposal(), cache)
    # Private access: only this measurement needs the size.
    return 0 if adapter.encoder is None else adapter.encoder._cross_cache.nbytes


def _state_bytes(state: Any, name: str) -> int:
    """Bytes of the tensors of a state."""
    parts = [part for part in state_signature(state, 1, name) if isinstance(part, tuple)]
    return sum(abs(torch.Size(shape).numel()) * dtype.itemsize for shape, dtype, _ in parts)
