"""Caches as the forward of a model takes them, and the encoder of an encoder-decoder model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from descant.core.interfaces import KVCache, KVSpan, ModelTraits
from descant.core.rows import index_rows
from descant.errors import InputError
from descant.kv_cache.attention.attention_proxy import KVProxy, with_queries
from descant.models.forward.inputs import is_per_token
from descant.models.forward.traits import has_override
from descant.models.wrapping.peft_adapters import PeftAdapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _pad_dim(block: Tensor, size: int, dim: int) -> Tensor:
    """A block padded with zeros along `dim` to `size`."""
    missing = size - block.shape[dim]
    if missing <= 0:
        return block
    shape = list(block.shape)
    shape[dim] = missing
    return torch.cat((block, block.new_zeros(shape)), dim)


def _concat_padded(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate two blocks [B, S, ...] along the batch, padding the shorter one."""
    if first.ndim == 1:
        return torch.cat((first, second))
    size = max(first.shape[1], second.shape[1])
    return torch.cat((_pad_dim(first, size, 1), _pad_dim(second, size, 1)))


def _merge_outputs(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], counts: tuple[int, int]
) -> dict[str, Tensor]:
    """The outputs of two groups of requests by name; zeros for a group that has none of that name."""
    merged = {}
    for name in {**first, **second}:
        known = first[name] if name in first else second[name]
        parts = [
            part[name] if name in part else known.new_zeros(count, *known.shape[1:])
            for part, count in zip((first, second), counts, strict=True)
        ]
        merged[name] = _concat_padded(*parts)
    return merged


class CrossAttentionCache:
    """Encoder outputs, masks, and each layer's keys and values, one entry per request.

    All rows of a request read the same entry: as a view if all rows belong to one request, or if row `i`
    reads entry `i`; otherwise gathered for each layer and freed after it.
    """

    # From the first request on:
    _mask: Tensor  # [M, T] of the encoder input
    _encoder_states: Tensor  # [M, S, D]

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._sorted_entries: tuple[Tensor, Tensor] | None = None  # sorted requests and their entries
        self._other_outputs: dict[str, Tensor] = {}  # [M, ...] further encoder outputs, by name
        self._keys: dict[int, Tensor] = {}  # [M, H, S, D] by layer
        self._values: dict[int, Tensor] = {}
        self._written_sizes: dict[int, int] = {}  # by layer: the encoder positions it was written for

    @property
    def num_layers(self) -> int:
        """The number of layers that have been written."""
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(block.nbytes for store in (self._keys, self._values) for block in store.values())

    def add_requests(
        self, requests: Sequence[int], states: Tensor, mask: Tensor, others: Mapping[str, Tensor]
    ) -> None:
        """Store new requests: encoder states [B, S, D], mask [B, T] and further outputs [B, ...]."""
        # Everything is computed before anything is stored: a failure leaves the cache as it was.
        numbers = {request: index for index, request in enumerate(requests)}
        if not self._entries:
            self._entries, self._mask, self._encoder_states = numbers, mask, states
            self._other_outputs, self._sorted_entries = dict(others), None
            self._keys, self._values, self._written_sizes = {}, {}, {}
            return
        first = len(self._mask)  # includes entries of removed requests
        merged = _merge_outputs(self._other_outputs, others, (first, len(mask)))
        blocks = _concat_padded(self._mask, mask), _concat_padded(self._encoder_states, states)
        entries = self._entries | {request: first + index for request, index in numbers.items()}
        self._entries, self._sorted_entries = entries, None
        self._mask, self._encoder_states = blocks
        self._other_outputs = merged

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests; entries are freed once at most half are in use."""
        removed = set(requests)
        entries = {request: entry for request, entry in self._entries.items() if request not in removed}
        if not self._entries or 2 * len(entries) > len(self._mask):
            self._entries, self._sorted_entries = entries, None
            return
        keep = torch.tensor(list(entries.values()), dtype=torch.long)
        blocks = index_rows(self._mask, keep), index_rows(self._encoder_states, keep)
        others = {name: index_rows(value, keep) for name, value in self._other_outputs.items()}
        # Each layer on its own device. A request that was never fed has no keys and values yet.
        keys, values = (
            {layer: index_rows(self._fit_block(layer, block), keep) for layer, block in store.items()}
            for store in (self._keys, self._values)
        )
        sizes = dict.fromkeys(keys, self._encoder_states.shape[1])
        self._entries = {request: index for index, request in enumerate(entries)}
        self._sorted_entries = None
        self._mask, self._encoder_states = blocks
        self._other_outputs, self._keys, self._values, self._written_sizes = others, keys, values, sizes

    def entry_index(self, requests: Tensor) -> Tensor | None:
        """The entry of each row's request, for `requests` [R] (host); None if row `i` reads entry `i`."""
        if self._sorted_entries is None:  # needed in every step, changes only with the requests
            known = torch.tensor(sorted(self._entries), dtype=torch.long)
            indices = torch.tensor([self._entries[request] for request in known.tolist()], dtype=torch.long)
            self._sorted_entries = known, indices
        known, indices = self._sorted_entries
        entries = indices[torch.searchsorted(known, requests)]
        if len(entries) == len(self._mask) and torch.equal(entries, torch.arange(len(entries))):
            return None
        return entries

    def mask(self, entries: Tensor | None) -> Tensor:
        """The encoder mask of each row [R, S]."""
        return self._gather_rows(self._mask, entries)

    def encoder_states(self, entries: Tensor | None) -> Tensor:
        """The encoder output of each row [R, S, D]."""
        return self._gather_rows(self._encoder_states, entries)

    def other_outputs(self, entries: Tensor | None) -> dict[str, Tensor]:
        """The further encoder outputs of each row [R, ...]."""
        return {name: self._gather_rows(value, entries) for name, value in self._other_outputs.items()}

    def keys(self, layer: int, entries: Tensor | None) -> Tensor:
        """One layer's keys for each row [R, H, S, D]."""
        return self._gather_rows(self._fit_block(layer, self._keys[layer]), entries)

    def values(self, layer: int, entries: Tensor | None) -> Tensor:
        """One layer's values for each row [R, H, S, D]."""
        return self._gather_rows(self._fit_block(layer, self._values[layer]), entries)

    def write(self, layer: int, key: Tensor, value: Tensor, entries: Tensor | None) -> None:
        """Store one layer's keys and values of requests at their first forward [B, H, S, D]."""
        if entries is not None:
            stores = (self._keys, key), (self._values, value)
            key, value = (self._insert_entries(store.get(layer), block, entries) for store, block in stores)
        # The blocks are complete before either is stored: an error above leaves both as they were.
        self._values[layer], self._keys[layer] = value, key
        self._written_sizes[layer] = self._encoder_states.shape[1]

    def _insert_entries(self, old: Tensor | None, block: Tensor, entries: Tensor) -> Tensor:
        """A layer's block for all requests: the old one, with these entries replaced by `block`."""
        count, size = self._encoder_states.shape[:2]
        grown = block.new_zeros(count, block.shape[1], size, block.shape[3])
        if old is not None:
            grown[: len(old), :, : old.shape[2]] = old
        grown[entries.to(block.device), :, : block.shape[2]] = block
        return grown

    def _fit_block(self, layer: int, block: Tensor) -> Tensor:
        """A layer's block grown to all requests: some may not be fed yet, and be longer than the others."""
        count, size = self._encoder_states.shape[:2]
        missing = size - self._written_sizes.get(layer, size)
        return _pad_dim(_pad_dim(block, count, 0), block.shape[2] + missing, 2)

    def _gather_rows(self, block: Tensor, entries: Tensor | None) -> Tensor:
        if entries is None:
            return block
        if bool((entries == entries[0]).all()):
            entry = int(entries[0])
            return block[entry : entry + 1].expand(len(entries), *block.shape[1:])
        return block.index_select(0, entries.to(block.device, non_blocking=True))


class SelfAttentionView(TransformersCache):
    """Self-attention keys and values: writes go to `store` at `span`, reads come from there."""

    # The base constructor would create layers; this view has none, so it is not called.
    layers: Any = ()
    offloading = False
    layer_class_to_replicate = None
    is_sliding: Any = (False,)  # by layer: whether it has a window; models look for the first
    is_linear: Any = (False,)  # by layer: the store has keys and values only
    is_dummy: Any = (False,)
    is_compileable = False  # transformers must not compile the forward
    is_initialized = True  # the store allocates at the first write

    def __init__(self, store: KVCache, span: KVSpan, sliding: Sequence[bool] = (False,)) -> None:
        self._store, self._span = store, span
        self.is_sliding = sliding
        if len(sliding) > 1:
            self.is_linear = self.is_dummy = (False,) * len(sliding)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values [N, H, T, D]; returns all visible ones [N, H, S, D]."""
        visible: tuple[Any, Any] = self._store.update(layer_idx, key_states, value_states, self._span)
        return with_queries(visible, key_states.shape[2]) if isinstance(visible[0], KVProxy) else visible

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:  # noqa: ARG002
        """The number of cached positions of the longest row."""
        return self._span.read_length - self._span.width

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """The number of keys that attention will see, and the position of the first.

        Used for rows of equal length only: visible slots count as the positions just before the fed ones.
        """
        span = self._span
        slots = self._store.visible_slots(layer_idx, span)
        if slots is None:
            return span.read_length, 0
        return slots.num_slots, span.read_length - span.width - int(slots.past_lengths[0])

    get_query_offset = get_seq_length  # the position of the first fed token

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        # Models test `if past_key_values` for the presence of a cache, also of an empty one.
        return True


class _CrossAttentionLayer:
    """One layer of a CrossAttentionCache, gathered for the fed rows on access."""

    def __init__(self, cache: CrossAttentionCache, layer: int, entries: Tensor | None) -> None:
        self._cross_cache, self._layer, self._entries = cache, layer, entries

    @property
    def keys(self) -> Tensor:
        return self._cross_cache.keys(self._layer, self._entries)

    @property
    def values(self) -> Tensor:
        return self._cross_cache.values(self._layer, self._entries)


class CrossAttentionView(SelfAttentionView):
    """Cross-attention keys and values, computed once per request and shared by its rows."""

    def __init__(
        self, cache: CrossAttentionCache, entries: Tensor | None, span: KVSpan, num_layers: int
    ) -> None:
        self.layers = [_CrossAttentionLayer(cache, layer, entries) for layer in range(num_layers)]
        self._cross_cache, self._entries, self._span = cache, entries, span

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the encoder's output at a request's first forward [B, H, S, D]."""
        self._cross_cache.write(layer_idx, key_states, value_states, self._entries)
        return key_states, value_states


class EncoderDecoderView(EncoderDecoderCache):
    """A self-attention and a cross-attention view, as encoder-decoder models expect."""

    def __init__(self, own: SelfAttentionView, cross: CrossAttentionView, num_layers: int) -> None:
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = cross
        self.is_updated = dict.fromkeys(range(num_layers), True)

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first fed token."""
        return int(self.self_attention_cache.get_query_offset(layer_idx))


# Inputs without a batch dimension, which are padded to a common length.
_PADDABLE_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "encoder_outputs")

# Model types that modify the encoder output in place.
_MUTATING_MODEL_TYPES = frozenset({"moonshine_streaming"})


class Encoder:
    """Runs the encoder on new requests in batches and provides the decoder's inputs."""

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        states: Sequence[str],
        device: torch.device,
        adapters: PeftAdapters,
    ) -> None:
        self.model: Any = model
        self.traits, self.device, self._adapters = traits, device, adapters
        self.last_output: Any = {}  # with the requested states
        self.keeps_finished = False  # whether outputs outlive their requests, for `cross_attention`
        self._output_flags = {f"output_{name}": True for name in states}
        self._cross_cache = CrossAttentionCache()
        self._output_class: Any = BaseModelOutput  # class of `encoder_outputs` for the decoder
        self._forward_params = inspect.signature(model.forward).parameters
        self._has_own_encode = has_override(model, "_maybe_prepare_encoder_kwargs_for_generation")

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Run the encoder on new requests, or store the outputs that the user passed."""
        batches = [
            (part, self._collate_part(inputs, part)) for part in _group_compatible(inputs, len(requests))
        ]
        if not all(fed for _, (fed, _) in batches):  # before any encoder runs
            raise InputError(self.traits.main_input_name, "must hold the encoder's input", None)
        for part, (fed, lengths) in batches:
            numbers = [requests[index] for index in part]
            with self._adapters.applied(numbers):
                states, mask, others = self._encode_batch(fed, lengths)
            self._cross_cache.add_requests(numbers, states, mask, others)

    def _collate_part(
        self, inputs: Mapping[str, Sequence[Any]], part: Sequence[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """The inputs of the requests `part` as batches by name, and their lengths where they are padded."""
        fed: dict[str, Any] = {}
        lengths: list[int] = []
        for name, all_values in inputs.items():
            values = [all_values[index] for index in part]
            if values[0] is None:
                continue
            if _is_paddable(name, values[0].shape):
                lengths = lengths or [len(value) for value in values]
                fed[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True).to(self.device)
            else:
                fed[name] = torch.cat(values).to(self.device)
        return fed, lengths

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the outputs of finished requests."""
        if not self.keeps_finished:
            self._cross_cache.remove_requests(requests)

    def cross_attention(self, requests: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values [R, H, S, D], as rows of the requests [R] (host) read them."""
        cross, entries = self._cross_cache, self._cross_cache.entry_index(requests)
        return [
            (cross.keys(layer, entries), cross.values(layer, entries)) for layer in range(cross.num_layers)
        ]

    def _encode_batch(
        self, fed: dict[str, Any], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The encoder states [B, S, D], the mask of its input [B, T], and its further outputs."""
        mask = fed.get("attention_mask")
        states = fed.pop("encoder_outputs", None)
        if mask is None:
            main = (
                states
                if states is not None
                else fed.get(self.traits.main_input_name, next(iter(fed.values())))
            )
            # Inputs other than tokens count as unpadded; their length is the second dimension.
            mask = main.new_ones(main.shape[:2], dtype=torch.long)
            if lengths:
                fits = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
                mask = fits.long().to(self.device)
            if lengths or "attention_mask" in self._forward_params:
                fed["attention_mask"] = mask
        if states is not None:
            return states, mask, {}
        self.last_output = self._call_encoder(fed)
        self._output_class = type(self.last_output)
        others = {
            name: value
            for name, value in self.last_output.items()
            if isinstance(value, Tensor) and name != "last_hidden_state" and len(value) == len(mask)
        }
        return self.last_output[0].to(self.device), mask, others

    def _call_encoder(self, fed: dict[str, Any]) -> Any:
        """The encoder's output, by the model's own method to prepare it if it has one."""
        if self._has_own_encode:
            main = fed.pop(self.traits.main_input_name)
            settings = self.model.generation_config
            return self.model._maybe_prepare_encoder_kwargs_for_generation(
                main, fed, self.traits.main_input_name, settings
            )["encoder_outputs"]
        encoder = self.model.get_encoder()
        params = inspect.signature(encoder.forward).parameters
        takes_any = any(param.kind is inspect.Parameter.VAR_KEYWORD for param in params.values())
        fed = {name: value for name, value in fed.items() if takes_any or name in params}
        return encoder(**fed, **self._output_flags, return_dict=True)

    def entry_index(self, requests: Tensor) -> Tensor | None:
        """The cross-attention entry of each row; None if row `i` reads entry `i`."""
        return self._cross_cache.entry_index(requests)

    def decoder_inputs(self, entries: Tensor | None) -> dict[str, Any]:
        """The encoder outputs and mask that the decoder takes, for rows that read these entries."""
        states = self._cross_cache.encoder_states(entries)
        if self.model.config.model_type in _MUTATING_MODEL_TYPES:
            states = states.clone()
        outputs = {"last_hidden_state": states, **self._cross_cache.other_outputs(entries)}
        inputs: dict[str, Any] = {"encoder_outputs": self._output_class(**outputs)}
        if "attention_mask" in self._forward_params:
            inputs["attention_mask"] = self._cross_cache.mask(entries)
        return inputs

    def states_and_mask(self, entries: Tensor | None) -> tuple[Tensor, Tensor]:
        """The encoder states [N, S, D] and the mask [N, S] of rows that read these entries."""
        return self._cross_cache.encoder_states(entries), self._cross_cache.mask(entries)

    def decoder_cache(
        self, entries: Tensor | None, own: SelfAttentionView, span: KVSpan
    ) -> EncoderDecoderView:
        """The decoder's cache: self-attention and cross-attention."""
        is_first = isinstance(span.start, int) and span.start == 0  # no keys and values of the encoder yet
        num_layers = 0 if is_first else self._cross_cache.num_layers
        cross = CrossAttentionView(self._cross_cache, entries, span, num_layers)
        return EncoderDecoderView(own, cross, num_layers)


def _is_paddable(name: str, shape: Sequence[int]) -> bool:
    """Whether an input has one entry per token and can be padded."""
    return name in _PADDABLE_INPUTS or is_per_token(name, len(shape))


def _group_compatible(inputs: Mapping[str, Sequence[Any]], count: int) -> list[list[int]]:
    """Groups of requests to encode together: they have the same inputs, and only tokens need padding."""
    groups: dict[object, list[int]] = {}
    for index in range(count):
        given = ((name, values[index]) for name, values in inputs.items() if values[index] is not None)
        shapes = tuple((name, tuple(value.shape)) for name, value in given)
        # With media, tokens are not padded either: the encoder may concatenate them with the media.
        only_paddable = all(_is_paddable(name, shape) for name, shape in shapes)
        key = tuple(name for name, _ in shapes) if only_paddable else shapes
        groups.setdefault(key, []).append(index)
    return list(groups.values())
