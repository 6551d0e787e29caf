"""Packed forwards: rows of any lengths as one sequence of tokens, without padding (Yu et al. 2022, Orca)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from descant.core.interfaces import KVCache, KVSpan, ModelTraits, PromptChunk, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.errors import InputError
from descant.kv_cache.attention.attention_proxy import AttentionCall
from descant.kv_cache.attention.packed_span import PackedSpan
from descant.kv_cache.kernels.decode_attention import DecodeAttention, PagedDecodeAttention
from descant.kv_cache.kernels.packed_attention import FlexDecodeAttention, JoinedKV, PackedCache, PackedKV
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from descant.models.fast.compiled_layers import MIN_TOKENS, compiled_layers_of
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.encoder import SelfAttentionView
from descant.models.forward.inputs import fed_tokens
from descant.models.wrapping.wrapped_model import eager_call

# A subclass may change how slots are written.
_PACKABLE_CACHES = (DenseStore, PagedStore)


class PackedOutput(NamedTuple):
    """The result of a packed forward."""

    logits: Tensor  # [N, K + 1, V]
    num_tokens: int  # the number of fed tokens
    hidden_states: tuple[Tensor, ...] | None = None  # [N, T, D] by layer, if they are requested


class PackedForwards:
    """The packed forwards of a model, which may feed chunks of prompts too.

    transformers declares which models it can pack for its own packed forwards
    (`_supports_attention_backend`). A model that does not call scaled_dot_product_attention with the mask it
    gets shows that in its first packed forward. `model.packed_forwards = False` turns them off.
    """

    def __init__(self, model: Any, traits: ModelTraits, is_spread: bool = False) -> None:
        self._model, self._traits = model, traits
        self.off_reason = _unpackable_reason(model, traits, is_spread)  # None: they are on
        self.compiled_layers = compiled_layers_of(model) if self.off_reason is None else None
        self._windows = [window for window in traits.sliding_windows.values() if window is not None]

    def can_pack_cache(self, cache: RowCache) -> bool:
        """Whether rows of the model are packed, and this cache takes packed writes."""
        return self.off_reason is None and type(cache) in _PACKABLE_CACHES

    def can_pack(self, rows: Rows, proposal: Proposal, cache: RowCache, states: Sequence[str] = ()) -> bool:
        """Whether rows can be packed: the cache takes packed writes, and no row is longer than a window.

        The forward must be able to return the states too.
        """
        if not self.can_pack_cache(cache) or not self.can_return(states):
            return False
        return not self._windows or int(rows.position.max()) + proposal.width < min(self._windows)

    def can_return(self, states: Sequence[str]) -> bool:
        """Whether packed forwards return these states; without compiled layers they have less to gain."""
        return not states or (tuple(states) == ("hidden_states",) and self.compiled_layers is not None)

    def run(
        self,
        batches: Sequence[PackedBatch],
        with_logits: bool,
        with_states: bool = False,
        chunks: Sequence[PromptChunk] = (),
    ) -> tuple[Tensor, list[PackedOutput]]:
        """Feed batches that have all rows, one after the other, the first with the chunks.

        The logits [R, K + 1, V] of the rows in their order, and the output of each forward.
        """
        outputs = []
        for batch in batches:
            outputs.append(self._run_batch(batch, with_logits, with_states, chunks))
            chunks = ()
        if len(outputs) == 1:
            return outputs[0].logits, outputs
        logits = torch.cat([output.logits for output in outputs])
        order = torch.from_numpy(np.argsort(np.concatenate([batch.span.rows for batch in batches])))
        return logits[order.to(logits.device)], outputs

    def _run_batch(
        self, batch: PackedBatch, with_logits: bool, with_states: bool, chunks: Sequence[PromptChunk]
    ) -> PackedOutput:
        """Feed a batch and the chunks; beside a batch whose states are returned chunks wait."""
        chunks = [chunk for chunk in chunks if self.can_pack(chunk.rows, Proposal(), chunk.cache)]
        chunks = [] if with_states else chunks
        batches = [batch, *(PackedBatch.of_chunk(chunk) for chunk in chunks)]
        inputs = _joined_inputs(batches, self._traits, with_logits)
        num_tokens = sum(part.span.num_tokens for part in batches)
        if with_states:
            inputs["output_hidden_states"] = True
        output = self._call_model(inputs, num_tokens)
        for chunk in chunks:
            chunk.is_fed = True
        logits = batch.logits_by_row(output.logits, self._traits, with_logits, is_whole=not chunks)
        hidden = output.get("hidden_states") if with_states else None
        return PackedOutput(
            logits, num_tokens, hidden and tuple(batch.states_by_row(layer) for layer in hidden)
        )

    def _call_model(self, inputs: dict[str, Any], num_tokens: int) -> Any:
        """The output of the model, whose layers run compiled if they are."""
        compiled = self.compiled_layers
        # One graph serves all sizes from two on. Where padding costs, a single token has another.
        is_padded = num_tokens < MIN_TOKENS and _can_pad(self._model)
        if compiled is None or not compiled.num_layers:  # they may have been restored
            return eager_call(self._model)(**inputs, use_cache=True, return_dict=True)
        if is_padded:
            for name in ("input_ids", "position_ids"):
                inputs[name] = inputs[name].expand(1, MIN_TOKENS).contiguous()
            inputs["attention_mask"] = tree_map(_pad_mask, inputs["attention_mask"])
            if self._traits.supports_logits_to_keep and "logits_to_keep" not in inputs:
                inputs["logits_to_keep"] = torch.zeros(1, dtype=torch.long, device=inputs["input_ids"].device)
        inputs["past_key_values"].use_decode_kernel()
        with compiled.running(inputs["past_key_values"]):
            output = eager_call(self._model)(**inputs, use_cache=True, return_dict=True)
        if is_padded and not self._traits.supports_logits_to_keep:
            output.logits = output.logits[:, :num_tokens]
        return output


def _unpackable_reason(model: Any, traits: ModelTraits, is_spread: bool) -> str | None:
    """Why rows of a model are not packed; None: positions are given, and rows meet in attention only."""
    own = traits.prepares_own_inputs or traits.has_own_position_ids or traits.needs_own_cache
    reasons = {
        "`model.packed_forwards` is False": not _is_switched_on(model),
        "the model does not use a KV cache": traits.cache_type != "kv",
        f"its attention is {traits.attn_implementation}, not sdpa": traits.attn_implementation != "sdpa",
        "the model does not take position ids and a 4D mask": own or not traits.supports_custom_mask,
        "the model has an encoder": traits.is_encoder_decoder,
        "every token has another input beside it": traits.has_aligned_inputs,
        "the model takes one row at a time": traits.needs_batch_size_one,
        "the model does not declare transformers' attention interface": not getattr(
            model, "_supports_attention_backend", False
        ),
        "the model is spread over devices or processes": is_spread,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_switched_on(model: Any) -> bool:
    """The switch of packed forwards, an attribute of the model."""
    value = getattr(model, "packed_forwards", True)
    if not isinstance(value, bool):
        raise InputError("model.packed_forwards", "must be True or False", value)
    return value


def _can_pad(model: Any) -> bool:
    """Whether two lines cost what one does: not in half precision on a CPU, where one line is faster."""
    weight = next(model.parameters())
    return weight.dtype is torch.float32 or weight.device.type != "cpu"


def _pad_mask(mask: Tensor) -> Tensor:
    return mask.expand(1, 1, MIN_TOKENS, MIN_TOKENS)


class PackedBatch:
    """Rows of one cache in a packed forward."""

    def __init__(self, rows: Rows, proposal: Proposal, cache: RowCache, batch: ForwardBatch) -> None:
        widths = np.ones(batch.num_rows, dtype=np.int64) if batch.width == 1 else batch.fed_length.numpy()
        index = np.arange(batch.num_rows) if batch.rows is None else batch.rows.numpy()
        self.span = PackedSpan(index, batch.cached_length.numpy(), widths)
        self.cache = cast(PackedCache, cache)
        self._rows, self._proposal, self._batch = rows, proposal, batch
        host = np.stack((self.span.positions, self.span.token_rows * batch.width + self.span.columns))
        self._index = torch.from_numpy(host).to(rows.tokens.device, non_blocking=True)  # [2, P]

    @classmethod
    def of_chunk(cls, chunk: PromptChunk) -> PackedBatch:
        """The batch of a chunk of a prompt."""
        rows = chunk.rows
        return cls(rows, Proposal(), chunk.cache, ForwardBatch.from_lengths(rows.cached_length, rows.pending))

    @property
    def positions(self) -> Tensor:
        """The position of each token [1, P]."""
        return self._index[:1]

    def tokens(self) -> Tensor:
        """The fed tokens [1, P]."""
        tokens = fed_tokens(self._rows, self._proposal, self._batch)  # [N, T]
        return tokens.view(1, -1) if self.span.is_decode else tokens.flatten()[self._index[1]][None]

    @property
    def is_one_logit_each(self) -> bool:
        """Whether the fed tokens are those of the logits; rows of other batches may have drafts."""
        return self.span.is_decode and not self._proposal.width

    def logits_by_row(self, logits: Tensor, traits: ModelTraits, with_logits: bool, is_whole: bool) -> Tensor:
        """The logits [N, K + 1, V] of each row's last pending token and drafts, out of [1, P, V].

        `is_whole` says that the forward has fed nothing else.
        """
        num_logits = self._proposal.width + 1
        if not with_logits:
            return logits.new_zeros(self._batch.num_rows, num_logits, 0)
        if not (traits.supports_logits_to_keep or (self.is_one_logit_each and is_whole)):
            logits = logits[:, self.logit_index().to(logits.device, non_blocking=True)]
        return logits.view(self._batch.num_rows, num_logits, -1)

    def states_by_row(self, states: Tensor) -> Tensor:
        """The states [N, T, D] of the fed tokens of each row, out of [1, P, D]; the last again as padding."""
        span, width = self.span, self._batch.width
        if span.num_tokens == len(span.rows) * width:
            return states[0, : span.num_tokens].view(len(span.rows), width, -1)
        columns = np.minimum(np.arange(width), span.widths[:, None] - 1)
        return states[0, torch.from_numpy(span.offsets[:, None] + columns).to(states.device)]

    def logit_index(self) -> Tensor:
        """Where the logits of each row are in the packed sequence [N * (K + 1)] (host)."""
        span, num_drafts = self.span, np.asarray(self._proposal.draft_counts(self._batch.rows))
        first = span.widths - num_drafts - 1
        columns = np.minimum(first[:, None] + np.arange(self._proposal.width + 1), span.widths[:, None] - 1)
        return torch.from_numpy((span.offsets[:, None] + columns).ravel())


def _joined_inputs(batches: Sequence[PackedBatch], traits: ModelTraits, with_logits: bool) -> dict[str, Any]:
    """The arguments of a forward that feeds these batches one after the other; logits are of the first."""
    first = batches[0]
    tokens, positions = first.tokens(), first.positions
    if len(batches) > 1:
        tokens = torch.cat([tokens, *(part.tokens() for part in batches[1:])], 1)
        positions = torch.cat([part.positions for part in batches], 1)
    size, device = tokens.shape[1], tokens.device
    # Its content is never read: attention compares its address.
    own_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    mask: Any = own_mask.expand(1, 1, size, size)
    if len(traits.sliding_windows) > 1:
        mask = dict.fromkeys(traits.sliding_windows, mask)
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
    inputs["past_key_values"] = _PackedView(batches, own_mask)
    if not with_logits:
        inputs["logits_to_keep"] = torch.zeros(0, dtype=torch.long, device=device)
    elif traits.supports_logits_to_keep and not (first.is_one_logit_each and len(batches) == 1):
        inputs["logits_to_keep"] = first.logit_index().to(device, non_blocking=True)
    return inputs


class _PackedView(SelfAttentionView):
    """The caches of all batches, as a model takes its cache in a packed forward."""

    def __init__(self, batches: Sequence[PackedBatch], mask: Tensor) -> None:
        length = max(part.span.read_length for part in batches)
        super().__init__(cast(KVCache, batches[0].cache), KVSpan(None, length - 1, 1, length))
        self._batches, self._mask = batches, mask
        self.num_tokens = sum(part.span.num_tokens for part in batches)
        self._decode: DecodeAttention | FlexDecodeAttention | PagedDecodeAttention | None = None

    def use_decode_kernel(self) -> None:
        """Attend with the kernel for one token per row, where there is one for this forward."""
        if len(self._batches) == 1:
            cache, span, device = self._batches[0].cache, self._batches[0].span, self._mask.device
            flex = FlexDecodeAttention.create(cache, span, device)
            self._decode = (
                flex or DecodeAttention.create(cache, span) or PagedDecodeAttention.create(cache, span)
            )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float | None) -> Tensor:
        """Write one layer's keys and values [1, H, P, D]; the attention output [1, P, Hq, E].

        Tokens may be padded at the end.
        """
        if self._decode is not None:
            decoded = self._decode.attend(query, key, value, layer, scale)
            if decoded is not None:
                return decoded
        num_padding = query.shape[2] - self.num_tokens
        if num_padding:
            query, key, value = (vectors[:, :, : self.num_tokens] for vectors in (query, key, value))
        keys, values = self.update(key, value, layer)
        out: Tensor = keys.attend(values, AttentionCall(query, self._mask, scale=scale)).transpose(1, 2)
        if num_padding:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, num_padding))
        return out.contiguous()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Write one layer's new keys and values [1, H, P, D]; returns proxies that attend by row."""
        parts = [(key_states, value_states)]
        if len(self._batches) > 1:
            sizes = [part.span.num_tokens for part in self._batches]
            parts = list(zip(key_states.split(sizes, 2), value_states.split(sizes, 2), strict=True))
        keys, values = [], []
        for batch, (key, value) in zip(self._batches, parts, strict=True):
            cache, span = batch.cache, batch.span
            cache.write_packed(layer_idx, key, value, span)
            keys.append(PackedKV(key, cache, layer_idx, span, self._mask))
            values.append(PackedKV(value, cache, layer_idx, span, self._mask))
        if len(keys) == 1:
            return keys[0], values[0]
        return JoinedKV(key_states, keys), JoinedKV(value_states, values)
