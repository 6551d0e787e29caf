"""Attention of one new token per row on a GPU by FlexAttention (Dong et al. 2024), without a dense mask.

No GPU has run it here: its results are compared with torch's plain attention under torch.compile on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from descant.kv_cache.dense import DenseStore
from descant.kv_cache.packed_span import PackedGroup, PackedSpan

__all__ = ["FlexDecodeAttention"]


@cache
def _compiled_flex(device_type: str) -> Callable[..., Tensor]:
    """FlexAttention, which would build the whole matrix of scores without torch.compile."""
    # The C++ that torch 2.13 writes for a CPU with dynamic sizes cannot be compiled.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=device_type != "cpu")
    return compiled


class FlexDecodeAttention:
    """The attention of all layers in one forward that feeds one token per row of a dense store.

    All rows are attended in one call. A row's slots from its end on are skipped by blocks.
    """

    def __init__(self, store: DenseStore, span: PackedSpan) -> None:
        self._store, self._span = store, span
        index = np.arange(len(span.rows))
        self._group = PackedGroup(index, span.rows, span.starts, span.widths, span.offsets)
        self._masks: dict[torch.device, Any] = {}

    @classmethod
    def create(cls, store: object, span: PackedSpan, device: torch.device) -> FlexDecodeAttention | None:
        """None if it does not serve such a store, forward or device."""
        if type(store) is not DenseStore or not span.is_decode or device.type != "cuda":
            return None
        return cls(store, span)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float | None) -> Tensor:
        """Write the keys and values [1, H, P, D] of a layer; the attention output [1, P, Hq, E].

        There may be more tokens than rows; their output is 0.
        """
        num_rows, (_, num_heads, num_tokens, _) = len(self._span.rows), query.shape
        self._store.write_packed(layer, key[:, :, :num_rows], value[:, :, :num_rows], self._span)
        keys, values = self._store.read_group(layer, self._group)
        own = query[0, :, :num_rows].transpose(0, 1)[:, :, None]  # [N, Hq, 1, D]
        grouped = num_heads != keys.shape[1]
        mask = self._mask(query.device)
        flex = _compiled_flex(query.device.type)
        found = flex(own, keys, values, block_mask=mask, scale=scale, enable_gqa=grouped)
        out = found[:, :, 0][None]  # [1, N, Hq, E]
        if num_rows < num_tokens:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, num_tokens - num_rows))
        return out.contiguous()

    def _mask(self, device: torch.device) -> Any:
        """Which slots each row sees; made once for all layers."""
        if device not in self._masks:
            stops = torch.from_numpy(self._group.stops).to(device, non_blocking=True)

            def is_visible(row: Tensor, _head: Tensor, _query: Tensor, slot: Tensor) -> Tensor:
                return slot < stops[row]

            size = len(self._span.rows), None, 1, self._group.num_slots
            self._masks[device] = create_block_mask(is_visible, *size, device=str(device))
        return self._masks[device]
