"""Packed forwards: rows of any lengths as one sequence of tokens, without padding (Yu et al. 2022, Orca)."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, ModelTraits, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.packed_attention import PackedCache, PackedKV
from descant.kv_cache.packed_span import PackedSpan
from descant.kv_cache.paged import PagedStore
from descant.models.forward_batches import ForwardBatch
from descant.models.forward_inputs import fed_tokens
from descant.models.forward_view import SelfAttentionView

__all__ = ["PackedBatch", "can_pack_model", "can_pack_rows"]


def can_pack_model(model: Any, traits: ModelTraits) -> bool:
    """Whether rows of a model can be packed: positions are given, and rows meet in attention only.

    transformers declares so for its own packed forwards (`_supports_attention_backend`). A model that does
    not call scaled_dot_product_attention with the mask it gets shows that in its first packed forward.
    """
    return (
        traits.cache_type == "kv"
        and traits.attn_implementation == "sdpa"
        and traits.supports_custom_mask
        and not (traits.prepares_own_inputs or traits.has_own_position_ids or traits.needs_own_cache)
        and not (traits.is_encoder_decoder or traits.needs_batch_size_one)
        and bool(getattr(model, "_supports_attention_backend", False))
    )


def can_pack_rows(rows: Rows, proposal: Proposal, cache: RowCache, traits: ModelTraits) -> bool:
    """Whether a cache takes packed writes, and no row is longer than a window."""
    # A subclass may change how slots are written.
    if type(cache) not in (DenseStore, PagedStore):
        return False
    windows = [window for window in traits.sliding_windows.values() if window is not None]
    return not windows or int(rows.position.max()) + proposal.width < min(windows)


class PackedBatch:
    """The inputs of one packed forward, and its logits by row."""

    def __init__(self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch) -> None:
        widths = np.ones(batch.num_rows, dtype=np.int64) if batch.width == 1 else batch.fed_length.numpy()
        self.span = PackedSpan(np.arange(batch.num_rows), batch.cached_length.numpy(), widths)
        self._rows, self._proposal, self._cache, self._batch = rows, proposal, cache, batch
        device = rows.tokens.device
        host = np.stack((self.span.positions, self.span.token_rows * batch.width + self.span.columns))
        self._index = torch.from_numpy(host).to(device, non_blocking=True)  # [2, P]
        # Its content is never read: attention compares its address.
        self._mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)

    def inputs(self, traits: ModelTraits, with_logits: bool) -> dict[str, Any]:
        """The arguments of the model's forward."""
        size = self.span.num_tokens
        tokens = fed_tokens(self._rows, self._proposal, self._batch)  # [N, T]
        tokens = tokens.view(1, -1) if self.span.is_decode else tokens.flatten()[self._index[1]][None]
        mask: Any = self._mask.expand(1, 1, size, size)
        if len(traits.sliding_windows) > 1:
            mask = dict.fromkeys(traits.sliding_windows, mask)
        inputs = {"input_ids": tokens, "position_ids": self._index[:1], "attention_mask": mask}
        inputs["past_key_values"] = _PackedView(cast(PackedCache, self._cache), self.span, self._mask)
        if not with_logits:
            inputs["logits_to_keep"] = torch.zeros(0, dtype=torch.long, device=tokens.device)
        elif traits.supports_logits_to_keep and not self.span.is_decode:
            inputs["logits_to_keep"] = self._logit_index().to(tokens.device, non_blocking=True)
        return inputs

    def logits_by_row(self, logits: Tensor, traits: ModelTraits, with_logits: bool) -> Tensor:
        """The logits [N, K + 1, V] of each row's last pending token and drafts, out of [1, P, V]."""
        num_logits = self._proposal.width + 1
        if not with_logits:
            return logits.new_zeros(self._batch.num_rows, num_logits, 0)
        if not (traits.supports_logits_to_keep or self.span.is_decode):
            logits = logits[:, self._logit_index().to(logits.device, non_blocking=True)]
        return logits.view(self._batch.num_rows, num_logits, -1)

    def _logit_index(self) -> Tensor:
        """Where the logits of each row are in the packed sequence [N * (K + 1)] (host)."""
        span, num_drafts = self.span, np.asarray(self._proposal.draft_counts())
        first = span.widths - num_drafts - 1
        columns = np.minimum(first[:, None] + np.arange(self._proposal.width + 1), span.widths[:, None] - 1)
        return torch.from_numpy((span.offsets[:, None] + columns).ravel())


class _PackedView(SelfAttentionView):
    """A cache as a model takes it in a packed forward."""

    def __init__(self, store: PackedCache, span: PackedSpan, mask: Tensor) -> None:
        whole = KVSpan(None, span.read_length - 1, 1, span.read_length)
        super().__init__(cast(KVCache, store), whole)
        self._packed_store, self._packed_span, self._mask = store, span, mask

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Write one layer's new keys and values [1, H, P, D]; returns proxies that attend by row."""
        store, span = self._packed_store, self._packed_span
        store.write_packed(layer_idx, key_states, value_states, span)
        return (
            PackedKV(key_states, store, layer_idx, span, self._mask),
            PackedKV(value_states, store, layer_idx, span, self._mask),
        )
