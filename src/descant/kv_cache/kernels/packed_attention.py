"""Attention of a packed forward: every row attends to its own slots, in groups of similar length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from descant.kv_cache.attention.attention_proxy import AttentionCall, KVProxy, sdpa
from descant.kv_cache.attention.packed_span import PackedGroup, PackedSpan
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore


class PackingUnsupported(Exception):
    """A model computes attention in a way that a packed forward cannot follow."""


PackedCache = DenseStore | PagedStore  # those that a packed forward can write


class PackedKV(KVProxy):
    """One layer's keys or values of a packed forward.

    Query heads that share a key head are folded into the positions, so that keys are not repeated for them.
    """

    def __init__(
        self, tensor: Tensor, cache: PackedCache, layer: int, span: PackedSpan, mask: Tensor
    ) -> None:
        super().__init__(tensor.shape, tensor)
        self.new, self.cache, self.layer, self.span, self.mask = tensor, cache, layer, span, mask

    def build_tensor(self) -> Tensor:
        """Not possible: rows have different slots."""
        raise PackingUnsupported("the model uses keys or values outside of scaled_dot_product_attention")

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [1, Hq, P, E]."""
        mask = call.mask
        if mask is None or mask.data_ptr() != self.mask.data_ptr() or call.is_causal or call.dropout:
            raise PackingUnsupported("the model does not attend by the mask that it is given")
        assert isinstance(values, PackedKV)
        groups, query = self.span.groups, call.query
        if len(groups) == 1 and self.span.is_decode:  # tokens are in the order of the rows
            return self._attend_group(values, groups[0], query.transpose(0, 2), call).transpose(0, 2)
        if len(groups) == 1 and groups[0].is_dense:
            result = self._attend_group(values, groups[0], _split_rows(query, groups[0], None), call)
            return result.transpose(0, 1).flatten(1, 2)[None]
        out: Tensor | None = None
        for group in groups:
            tokens, real = group.token_index(query.device), group.real_index(query.device)
            result = self._attend_group(values, group, _split_rows(query, group, tokens), call)
            flat = result.transpose(0, 1).flatten(1, 2)  # [Hq, G * W, E]
            if out is None:
                out = flat.new_empty(flat.shape[0], self.span.num_tokens, flat.shape[2])
            if real is None:
                out[:, tokens] = flat
            else:
                out[:, tokens[real]] = flat[:, real]
        assert out is not None
        return out[None]

    def _attend_group(
        self, values: PackedKV, group: PackedGroup, query: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output [G, Hq, W, E] of the queries of a group [G, Hq, W, D]."""
        query_heads, heads = query.shape[1], self.shape[1]
        if group.is_first_write:
            tokens = None if group.is_dense else group.token_index(query.device)
            keys, new_values = _split_rows(self.new, group, tokens), _split_rows(values.new, group, tokens)
            causal = AttentionCall(query, None, 0.0, group.width > 1, call.scale, query_heads != heads)
            return sdpa(keys, new_values, causal)
        cached_keys, cached_values = self.cache.read_group(self.layer, group)
        if isinstance(cached_keys, KVProxy) and isinstance(cached_values, KVProxy):
            own = AttentionCall(query, group.mask(query, 1), 0.0, False, call.scale, query_heads != heads)
            return cached_keys.attend(cached_values, own)
        assert isinstance(cached_keys, Tensor)
        assert isinstance(cached_values, Tensor)
        folded = query.reshape(len(query), heads, -1, query.shape[3])  # [G, H, Hq / H * W, D]
        mask = group.mask(query, query_heads // heads)
        out = sdpa(cached_keys, cached_values, AttentionCall(folded, mask, scale=call.scale))
        return out.reshape(*query.shape[:3], -1)


class JoinedKV(KVProxy):
    """One layer's keys or values of a packed forward on several caches, whose tokens follow each other."""

    def __init__(self, tensor: Tensor, parts: Sequence[PackedKV]) -> None:
        super().__init__(tensor.shape, tensor)
        self.parts = parts

    def build_tensor(self) -> Tensor:
        """Not possible: rows have different slots."""
        return self.parts[0].build_tensor()

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [1, Hq, P, E]."""
        assert isinstance(values, JoinedKV)
        sizes = [part.span.num_tokens for part in self.parts]
        queries = call.query.split(sizes, 2)
        parts = zip(self.parts, values.parts, queries, strict=True)
        return torch.cat([keys.attend(own, call._replace(query=query)) for keys, own, query in parts], 2)


def _split_rows(packed: Tensor, group: PackedGroup, tokens: Tensor | None) -> Tensor:
    """The vectors [G, H, W, D] of a group, out of those of all tokens [1, H, P, D].

    None for `tokens` says that the group has all of them.
    """
    own = packed[0] if tokens is None else packed[0].index_select(1, tokens)
    return own.view(own.shape[0], len(group.rows), group.width, -1).transpose(0, 1)


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
