"""What a model keeps of each token, found by feeding it one."""

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
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.recurrent_state import RecurrentStateCache, state_signature
from descant.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["KVShape", "LayerKVShape", "kv_shape_of", "max_token_bytes"]

# Lengths at which the state of a model that keeps one is weighed: what is alike in all of them does not
# grow, and what grows evenly from one to the next grows so for ever.
_PROBE_LENGTHS = (8, 16, 24)


class LayerKVShape(NamedTuple):
    """What one layer keeps of a token."""

    num_heads: int
    key_dim: int  # numbers a head
    value_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What one token takes."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class KVShape:
    """What a model keeps: of every token in each layer, of what an encoder read, or a state of its own."""

    layers: Mapping[int, LayerKVShape]
    cross_bytes: int = 0  # bytes of a position that the encoder gave, once a request
    state_bytes: int | None = 0  # bytes of a row, however long it is; None: not to be known
    state_bytes_per_token: int = 0  # bytes of a position of a row, in a state of the model's own

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one row, all layers."""
        return sum(shape.nbytes for shape in self.layers.values()) + self.state_bytes_per_token


_kv_shape_by_model: WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, KVShape]] = WeakKeyDictionary()


def kv_shape_of(model: PreTrainedModel) -> KVShape:
    """What a model keeps, measured once: one token is fed, or a few where it keeps a state of its own."""
    known = _kv_shape_by_model.get(model)
    if known is None or known[0] != model.dtype:
        known = _kv_shape_by_model[model] = (model.dtype, _measure(model))
    return known[1]


def max_token_bytes(model: Any, layers: int, size: int | None) -> int | None:
    """A bound for the bytes of a token that most models keep to, found without a forward; None: unknown."""
    # Heads together may be wider than the embeddings, seldom by more than this.
    return None if size is None else 4 * layers * 2 * size * model.dtype.itemsize


class _ShapeRecorderCache(DenseStore):
    """A cache that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerKVShape] = {}

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then."""
        self.shapes[layer] = LayerKVShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return super().update(layer, key, value, span)


def _measure(model: PreTrainedModel) -> KVShape:
    port = TransformersModel(model)
    if port.traits.cache_type == "recurrent":
        return _measure_state(port)
    cache = _ShapeRecorderCache()
    cross = _feed_row(port, cache, 1) if port.traits.cache_type == "kv" else 0
    return KVShape(dict(sorted(cache.shapes.items())), cross)


def _measure_state(port: TransformersModel) -> KVShape:
    """What a model keeps that keeps a state of its own."""
    sizes = []
    unknown = KVShape({}, state_bytes=None)
    for length in _PROBE_LENGTHS:
        cache = RecurrentStateCache(port.traits.cache_argument)
        try:
            _feed_row(port, cache, length)
        except Exception:  # whatever it misses: many want more than tokens to begin with
            return unknown
        sizes.append(_state_bytes(cache.read_state(torch.tensor([0])), port.traits.cache_argument))
    first, *others = (later - sooner for sooner, later in pairwise(sizes))
    grows, rest = divmod(first, _PROBE_LENGTHS[1] - _PROBE_LENGTHS[0])
    if rest or grows < 0 or any(other != first for other in others):
        return unknown
    return KVShape({}, state_bytes=sizes[0] - grows * _PROBE_LENGTHS[0], state_bytes_per_token=grows)


def _feed_row(port: TransformersModel, cache: RowCache, length: int) -> int:
    """Have a row of that many tokens read; the bytes that its encoder's one position takes."""
    if port.traits.is_encoder_decoder:
        states = torch.zeros(1, port.traits.embedding_size or 1, dtype=port.model.dtype, device=port.device)
        port.add_requests([0], {"encoder_outputs": [states]})
    cache.extend(1)
    tokens = torch.zeros(1, length, dtype=torch.long, device=port.device)
    size, zero = torch.tensor([length]), torch.zeros(1, dtype=torch.long)
    rows = Rows(
        tokens, length=size, cached_length=zero, offset=zero, prompt_length=size, request=zero, slot=zero
    )
    # A model that is being trained may draw, which must not move anybody's generator.
    devices = [port.device] if port.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=port.model.training):
        port.forward(rows, Proposal(), cache)
    # Looked up where it lies: nothing else asks for it.
    return 0 if port._encoder is None else port._encoder._cross_cache.nbytes


def _state_bytes(state: Any, name: str) -> int:
    """What the tensors of a state take."""
    parts = [part for part in state_signature(state, 1, name) if isinstance(part, tuple)]
    return sum(abs(torch.Size(shape).numel()) * dtype.itemsize for shape, dtype, _ in parts)
