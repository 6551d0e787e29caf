"""What a model keeps of each token, found by feeding it one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from descant.core.interfaces import Cache, Span
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.kv_cache.dense import DenseCache
from descant.kv_cache.recurrent_state import ObjectCache, shape_of
from descant.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Geometry", "Shape", "declared", "geometry_of"]

# Lengths at which the state of a model that keeps one is weighed: what is alike in all of them does not
# grow, and what grows evenly from one to the next grows so for ever.
_LENGTHS = (8, 16, 24)


class Shape(NamedTuple):
    """What one layer keeps of a token."""

    heads: int
    keys: int  # numbers a head
    values: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What one token takes."""
        return self.heads * (self.keys + self.values) * self.dtype.itemsize


@dataclass(frozen=True)
class Geometry:
    """What a model keeps: of every token in each layer, of what an encoder read, or a state of its own."""

    layers: Mapping[int, Shape]
    cross: int = 0  # bytes of a position that the encoder gave, once a request
    state: int | None = 0  # bytes of a row, however long it is; None: not to be known
    grows: int = 0  # bytes of a position of a row, in a state of the model's own

    @property
    def token(self) -> int:
        """Bytes of one token of one row, all layers."""
        return sum(shape.nbytes for shape in self.layers.values()) + self.grows


_known: WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, Geometry]] = WeakKeyDictionary()


def geometry_of(model: PreTrainedModel) -> Geometry:
    """What a model keeps, measured once: one token is fed, or a few where it keeps a state of its own."""
    known = _known.get(model)
    if known is None or known[0] != model.dtype:
        known = _known[model] = (model.dtype, _measured(model))
    return known[1]


def declared(model: Any, layers: int, size: int | None) -> int | None:
    """A bound for the bytes of a token that most models keep to, found without a forward; None: unknown."""
    # Heads together may be wider than the embeddings, seldom by more than this.
    return None if size is None else 4 * layers * 2 * size * model.dtype.itemsize


class _Noted(DenseCache):
    """A cache that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, Shape] = {}

    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then."""
        self.shapes[layer] = Shape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return super().update(layer, key, value, span)


def _measured(model: PreTrainedModel) -> Geometry:
    port = TransformersModel(model)
    if port.facts.memory == "own":
        return _weighed(port)
    cache = _Noted()
    cross = _fed(port, cache, 1) if port.facts.memory == "keys" else 0
    return Geometry(dict(sorted(cache.shapes.items())), cross)


def _weighed(port: TransformersModel) -> Geometry:
    """What a model keeps that keeps a state of its own."""
    sizes = []
    unknown = Geometry({}, state=None)
    for length in _LENGTHS:
        cache = ObjectCache(port.facts.past)
        try:
            _fed(port, cache, length)
        except Exception:  # whatever it misses: many want more than tokens to begin with
            return unknown
        sizes.append(_bytes(cache.fetch(torch.tensor([0])), port.facts.past))
    first, *others = (later - sooner for sooner, later in pairwise(sizes))
    grows, rest = divmod(first, _LENGTHS[1] - _LENGTHS[0])
    if rest or grows < 0 or any(other != first for other in others):
        return unknown
    return Geometry({}, state=sizes[0] - grows * _LENGTHS[0], grows=grows)


def _fed(port: TransformersModel, cache: Cache, length: int) -> int:
    """Have a row of that many tokens read; the bytes that its encoder's one position takes."""
    if port.facts.encoder_decoder:
        states = torch.zeros(1, port.facts.size or 1, dtype=port.model.dtype, device=port.device)
        port.open([0], {"encoder_outputs": [states]})
    cache.extend(1)
    tokens = torch.zeros(1, length, dtype=torch.long, device=port.device)
    size, zero = torch.tensor([length]), torch.zeros(1, dtype=torch.long)
    rows = Rows(tokens, length=size, cached=zero, offset=zero, prompt=size, request=zero, slot=zero)
    # A model that is being trained may draw, which must not move anybody's generator.
    devices = [port.device] if port.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=port.model.training):
        port.forward(rows, Proposal(), cache)
    # Looked up where it lies: nothing else asks for it.
    return 0 if port._encoder is None else port._encoder._memory.nbytes


def _bytes(state: Any, name: str) -> int:
    """What the tensors of a state take."""
    parts = [part for part in shape_of(state, 1, name) if isinstance(part, tuple)]
    return sum(abs(torch.Size(shape).numel()) * dtype.itemsize for shape, dtype, _ in parts)
