"""Attention sinks: the first positions of a row and its latest, so that it can be as long as one likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.attention_proxy import AttentionCall, KVProxy
from descant.kv_cache.sink_window import SinkWindowBlocks, SinkWindowPlan

__all__ = ["RotateFn", "SinkStore"]

# Keys or queries [N, H, S, D] moved on by so many positions [N], each row by its own number.
RotateFn = Callable[[Tensor, Tensor], Tensor]


class _SinkAttention:
    """How the queries of a forward see sinks and window, on a device."""

    def __init__(self, plan: SinkWindowPlan, device: torch.device, length: int, sinks: int) -> None:
        self.plan, self._window_length, self.num_sinks = plan, length, sinks
        # For the first query of each row how many positions lie forgotten [N]; below 0 where there is room.
        self._sink_shift = torch.from_numpy(plan.start - (length - 1)).to(device, non_blocking=True)
        self._past_lengths = torch.from_numpy(plan.past_lengths).to(device, non_blocking=True)
        self._mask: Tensor | None = None

    def shift_sinks(self, sinks: Tensor, rotation: RotateFn) -> Tensor:
        """Sinks as the first query of each row sees them."""
        return rotation(sinks, self._sink_shift.clamp(min=0))

    def scores(self, query: Tensor, keys: Tensor, rotation: RotateFn | None) -> Tensor:
        """The product of queries [N, Hq, T, D] and keys as each sees them [N, Hq, T, S]; -inf: not seen."""
        scores = _grouped_matmul(query, keys)
        if rotation is not None:
            rows, heads, width, size = query.shape
            shift = (self._sink_shift[:, None] + torch.arange(width, device=query.device)).clamp(min=0)
            # A query that is moved back sees what it would see of keys that are moved on.
            lines = query.transpose(1, 2).reshape(rows * width, heads, 1, size)
            lines = rotation(lines, -shift.flatten()).view(rows, width, heads, size)
            scores[..., : self.num_sinks] = _grouped_matmul(
                lines.transpose(1, 2), keys[:, :, : self.num_sinks]
            )
        return scores.masked_fill(~self._visible_mask(keys.shape[2]), -torch.inf)

    def _visible_mask(self, size: int) -> Tensor:
        """Which slots each query sees [N, 1, T, S]."""
        if self._mask is None:
            device = self._past_lengths.device
            slots = torch.arange(size, device=device)
            own = (
                self._past_lengths[:, None, None] + torch.arange(self.plan.span.width, device=device)[:, None]
            )
            near = (slots > own - (self._window_length - self.num_sinks)) | (slots < self.num_sinks)
            self._mask = (near & (slots <= own))[:, None]
        return self._mask


class _SinkWindowKeys(KVProxy):
    """Keys of which each query sees a window of its own, and the sinks at a distance of its own.

    Laid out, they are as the first query of each row sees them, and later queries see further than they
    should: only of models whose attention is neither torch's nor a product with the keys transposed.
    """

    def __init__(self, keys: Tensor, sight: _SinkAttention, rotation: RotateFn | None) -> None:
        super().__init__(keys.shape, keys)
        self._keys, self._sink_attention, self._rotation = keys, sight, rotation

    def build_tensor(self) -> Tensor:
        """All of it as a tensor [N, H, S, D]."""
        if self._rotation is None:
            return self._keys
        sinks, rest = (
            self._keys[:, :, : self._sink_attention.num_sinks],
            self._keys[:, :, self._sink_attention.num_sinks :],
        )
        return torch.cat((self._sink_attention.shift_sinks(sinks, self._rotation), rest), 2)

    def attend(self, values: KVProxy, asked: AttentionCall) -> Tensor:
        """What the query sees in these keys and those values [N, Hq, T, D]."""
        query, mask = asked.query, asked.mask
        scores = self.scores(query) * (1 / sqrt(query.shape[-1]) if asked.scale is None else asked.scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        return _grouped_matmul(
            torch.dropout(weights, asked.dropout, asked.dropout > 0), values.materialize().mT
        )

    def scores(self, query: Tensor) -> Tensor:
        """The product of the query [N, Hq, T, D] with each key [N, Hq, T, S]; -inf where it is not seen."""
        return self._sink_attention.scores(query, self._keys, self._rotation)

    def transpose(self, first: int, second: int) -> Any:
        """Keys as attention written out multiplies by them."""
        sides = {first % 4, second % 4}
        return _TransposedKeys(self) if sides == {2, 3} else self.materialize().transpose(first, second)


class _TransposedKeys:
    """Keys [N, H, D, S] that a query is multiplied by."""

    def __init__(self, keys: _SinkWindowKeys) -> None:
        self._keys = keys

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._keys.materialize().mT, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
            query, keys = args
            if isinstance(keys, cls) and isinstance(query, Tensor):
                return keys._keys.scores(query)
        laid = [one._keys.materialize().mT if isinstance(one, cls) else one for one in args]
        return func(*laid, **(kwargs or {}))


class _MaterializedValues(KVProxy):
    """Values that are laid out already."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(values.shape, values)
        self._values = values

    def build_tensor(self) -> Tensor:
        """All of it as a tensor [N, H, S, D]."""
        return self._values


def _grouped_matmul(query: Tensor, keys: Tensor) -> Tensor:
    """The products of [N, Hq, T, D] and [N, H, S, D], several heads of the first to one of the second."""
    rows, heads, width, size = query.shape
    few = keys.shape[1]
    lines = query.reshape(rows, few, heads // few * width, size)
    return (lines @ keys.mT).view(rows, heads, width, keys.shape[2])


class SinkStore:
    """Of every row the first `sinks` positions and the latest `length - sinks` (Xiao et al. 2023).

    A query sees the sinks and what comes just before it, `length` positions in all, itself among them, and
    finds them as far away as if nothing else had ever been there: arXiv 2309.17453 counts positions anew in
    the cache for that. Rotary positions are known by their distances alone, so here everything stays where
    it is, but for the sinks: they are read as if they were as many positions further on as lie forgotten
    between, always from what was first written, so that errors do not add up. The rotation may be one for
    each layer; where it is None sinks are read as they were written.

    What a row is first fed, its prompt, is read whole: there a query sees all that comes before it, however
    long, and the window holds from the next forward on (so nothing may be tried along with a prompt).

    A row takes `length - 1 + slack + room` slots at the most, besides what one forward feeds. Rows may be cut
    by `slack` positions.
    """

    def __init__(
        self,
        length: int,
        sinks: int,
        rotation: RotateFn | Sequence[RotateFn | None] | None,
        slack: int = 64,
        room: int = 64,
    ) -> None:
        if sinks < 0:
            raise InputError("sinks", "must be >= 0", sinks)
        if length <= sinks:
            raise InputError("length", f"must be > {sinks}, for so many are sinks", length)
        for name, value, least in (("slack", slack, 0), ("room", room, 1)):
            if value < least:
                raise InputError(name, f"must be >= {least}", value)
        self._init_args = length, sinks, rotation, slack, room
        self._window_length, self._num_sinks, self._rotation = length, sinks, rotation
        self._blocks = SinkWindowBlocks(sinks, length - 1 - sinks, slack, room)
        self.max_rewind: int | None = slack
        self._attention_by_device: dict[torch.device, _SinkAttention] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host), those that it forgot included."""
        return self._blocks.lengths

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self._blocks.nbytes

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._blocks.extend(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, and what it needs no more is forgotten."""
        self._blocks.commit(parents, lengths)

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots:
        """What `update` is about to show."""
        return self._blocks.visible_slots(layer, span)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Any, Any]:
        """Write [N, H, T, D] at the span; the sinks, what comes before the span, and that [N, H, S, D]."""
        plan, rotation = self._blocks.plan(span), self._layer_rotation(layer)
        if span.is_first_write or int((plan.start + span.width).max(initial=0)) <= self._window_length:
            return self._blocks.update(layer, key, value, span)
        one = span.width <= 1 and rotation is not None
        keys, values = self._blocks.update(layer, key, value, span, writable_sinks=one)
        sight = self._sink_attention(plan, key.device)
        if span.width > 1:
            return _SinkWindowKeys(keys, sight, rotation), _MaterializedValues(values)
        if rotation is not None:
            keys[:, :, : self._num_sinks] = sight.shift_sinks(keys[:, :, : self._num_sinks], rotation)
        return keys, values

    def _layer_rotation(self, layer: int) -> RotateFn | None:
        rotation = self._rotation if self._num_sinks else None
        return rotation[layer] if isinstance(rotation, Sequence) else rotation

    def _sink_attention(self, plan: SinkWindowPlan, device: torch.device) -> _SinkAttention:
        """How the fed queries see what is shown: found once a device and forward."""
        known = self._attention_by_device.get(device)
        if known is None or known.plan is not plan:
            known = self._attention_by_device[device] = _SinkAttention(
                plan, device, self._window_length, self._num_sinks
            )
        return known

    # -------------------------------------------------------------------- whole rows
    def select(self, rows: Tensor) -> Self:
        """A copy of these rows [N] (host), as last committed."""
        other = type(self)(*self._init_args)
        other._blocks = self._blocks.select(rows)
        return other

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return self._blocks.layers

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What these rows [N] (host) hold of a layer as last committed, as written, sinks first, packed."""
        return self._blocks.read(layer, rows)

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        if other._init_args[:2] != self._init_args[:2]:
            raise InputError(
                "other", f"must have the length and sinks {self._init_args[:2]}", other._init_args[:2]
            )
        self._blocks.join(other._blocks)

    def to(self, device: torch.device | str) -> None:
        """Move everything it holds."""
        self._blocks.to(device)
        self._attention_by_device = {}

    def state(self) -> dict[str, Tensor]:
        """All that it holds, as last committed: lengths, gaps, and keys and values by layer."""
        return self._blocks.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into a cache that is made alike and holds nothing."""
        self._blocks.load(state)
