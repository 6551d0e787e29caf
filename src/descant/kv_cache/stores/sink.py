"""The attention-sink cache: the first positions of a row and a window of recent ones, for endless texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any, Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.errors import InputError
from descant.kv_cache.attention.attention_proxy import (
    AttentionCall,
    KVProxy,
    TensorKVProxy,
    TransposedKVProxy,
)
from descant.kv_cache.stores.block_store import HeadSize, Workload
from descant.kv_cache.stores.sink_window import SinkWindowBlocks, SinkWindowPlan, check_sizes

__all__ = ["RotateFn", "SinkStore"]

# Rotates keys or queries [N, H, S, D] forward by a number of positions per row [N].
RotateFn = Callable[[Tensor, Tensor], Tensor]


class _SinkAttention:
    """The scores of one forward's queries over sinks and window, on one device."""

    def __init__(self, plan: SinkWindowPlan, device: torch.device, length: int, num_sinks: int) -> None:
        self._width, self._window_length, self.num_sinks = plan.span.width, length, num_sinks
        # [N] the number of dropped positions for the first query of each row; < 0 while the window has room.
        self._sink_shift = torch.from_numpy(plan.start - (length - 1)).to(device, non_blocking=True)
        self._past_lengths = torch.from_numpy(plan.past_lengths).to(device, non_blocking=True)
        self._mask: Tensor | None = None

    def shift_sinks(self, sinks: Tensor, rotate: RotateFn) -> Tensor:
        """The sinks rotated for the first query of each row."""
        return rotate(sinks, self._sink_shift.clamp(min=0))

    def scores(self, query: Tensor, keys: Tensor, rotate: RotateFn | None) -> Tensor:
        """The products of queries [N, Hq, T, D] with keys [N, Hq, T, S]; -inf where a key is not visible."""
        scores = _grouped_matmul(query, keys)
        if rotate is not None:
            rows, heads, width, size = query.shape
            shift = (self._sink_shift[:, None] + torch.arange(width, device=query.device)).clamp(min=0)
            # Rotating a query back gives the same products as rotating the keys forward.
            flat = query.transpose(1, 2).reshape(rows * width, heads, 1, size)
            flat = rotate(flat, -shift.flatten()).view(rows, width, heads, size)
            sink_keys = keys[:, :, : self.num_sinks]
            scores[..., : self.num_sinks] = _grouped_matmul(flat.transpose(1, 2), sink_keys)
        return scores.masked_fill(~self._visible_mask(keys.shape[2]), -torch.inf)

    def _visible_mask(self, size: int) -> Tensor:
        """The slots that each query sees [N, 1, T, S]."""
        if self._mask is None:
            device = self._past_lengths.device
            slots = torch.arange(size, device=device)
            offsets = torch.arange(self._width, device=device)[:, None]
            query_slot = self._past_lengths[:, None, None] + offsets
            in_window = slots > query_slot - (self._window_length - self.num_sinks)
            self._mask = ((in_window | (slots < self.num_sinks)) & (slots <= query_slot))[:, None]
        return self._mask


class _SinkWindowKeys(TensorKVProxy):
    """Keys of a forward of several queries, each with its own window and its own distance to the sinks.

    Works for torch's attention and for eager attention (a product with the transposed keys). Any other
    attention gets the keys as the first query of each row sees them, and later queries see too far back.
    """

    def __init__(self, keys: Tensor, attention: _SinkAttention, rotate: RotateFn | None) -> None:
        super().__init__(keys)
        self._sink_attention, self._rotate = attention, rotate

    def build_tensor(self) -> Tensor:
        """The keys [N, H, S, D] as the first query of each row sees them."""
        if self._rotate is None:
            return self.tensor
        num_sinks = self._sink_attention.num_sinks
        sinks = self._sink_attention.shift_sinks(self.tensor[:, :, :num_sinks], self._rotate)
        return torch.cat((sinks, self.tensor[:, :, num_sinks:]), 2)

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [N, Hq, T, E]."""
        query, mask = call.query, call.mask
        scores = self.scores(query) * (1 / sqrt(query.shape[-1]) if call.scale is None else call.scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        wide = torch.promote_types(query.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(query.dtype)
        weights = torch.dropout(weights, call.dropout, call.dropout > 0)
        return _grouped_matmul(weights, values.materialize().mT)

    def scores(self, query: Tensor) -> Tensor:
        """The product [N, Hq, T, S] of queries [N, Hq, T, D] with the keys; -inf where not visible."""
        return self._sink_attention.scores(query, self.tensor, self._rotate)

    def transpose(self, first: int, second: int) -> Any:
        """The keys transposed; over the last two dimensions a proxy, as in eager attention."""
        if {first % 4, second % 4} == {2, 3}:
            return TransposedKVProxy(self)
        return self.materialize().transpose(first, second)


def _grouped_matmul(query: Tensor, keys: Tensor) -> Tensor:
    """The product [N, Hq, T, S] of [N, Hq, T, D] and [N, H, S, D]; several query heads share a key head."""
    rows, heads, width, size = query.shape
    num_groups = keys.shape[1]
    grouped = query.reshape(rows, num_groups, heads // num_groups * width, size)
    return (grouped @ keys.mT).view(rows, heads, width, keys.shape[2])


class SinkStore(SinkWindowBlocks):
    """The first `sinks` positions of every row and the latest `length - sinks` (Xiao et al. 2023).

    A query sees `length` positions: the sinks, the positions just before it, and itself. arXiv 2309.17453
    renumbers positions within the cache, so that dropped positions leave no gap. Rotary embeddings depend on
    distances only, so here just the sinks are rotated forward, by the number of dropped positions, and
    always from the keys as first written, so errors do not accumulate. `rotation` may differ by layer; where
    it is None, sinks are read as written.

    The prompt, the first forward of a row, is attended in full, whatever its length. The window applies
    from the next forward on, so a prompt must not be fed together with drafts.

    A row has at most `length - 1 + slack + room` slots, besides those of the current forward. Rows may be
    cut by `slack` positions.
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
            raise InputError("length", f"must be > `sinks`, {sinks}", length)
        check_sizes(slack, room)
        super().__init__(sinks, length - 1 - sinks, slack, room)
        self._settings = length, sinks, rotation, slack, room

    def set_rotation(self, rotation: RotateFn | Sequence[RotateFn | None] | None) -> None:
        """Set the rotation of a store before it drops any position."""
        length, sinks, _, *rest = self._settings
        self._settings = length, sinks, rotation, *rest

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Any, Any]:
        """Write [N, H, T, D] at the span; returns sinks, window and the new slots [N, H, S, D]."""
        plan, rotate = self.plan_forward(span), self._layer_rotation(layer)
        if span.is_first_write or int((plan.start + span.width).max(initial=0)) <= self._settings[0]:
            return super().update(layer, key, value, span)
        rotates_in_place = span.width <= 1 and rotate is not None
        keys, values = self._update(layer, key, value, span, rotates_in_place)
        attention = plan.memo.get(("attention", key.device))
        if attention is None:
            attention = _SinkAttention(plan, key.device, self._settings[0], self._num_sinks)
            plan.memo["attention", key.device] = attention
        if span.width > 1:
            return _SinkWindowKeys(keys, attention, rotate), TensorKVProxy(values)
        if rotate is not None:
            keys[:, :, : self._num_sinks] = attention.shift_sinks(keys[:, :, : self._num_sinks], rotate)
        return keys, values

    def head_bytes(self, layer: int, head: HeadSize, workload: Workload) -> tuple[int, int]:
        """The final and peak bytes of one head of a layer, to which the rotation of the sinks is nothing."""
        self.set_rotation(None)
        return super().head_bytes(layer, head, workload)

    def _layer_rotation(self, layer: int) -> RotateFn | None:
        rotation = self._settings[2] if self._num_sinks else None
        return rotation[layer] if isinstance(rotation, Sequence) else rotation

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        own, given = self._settings[:2], other._settings[:2]
        if given != own:
            raise InputError("other", f"must have the length and sinks {own}", given)
        super().join(other)
