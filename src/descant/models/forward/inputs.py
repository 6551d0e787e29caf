"""Splits the multimodal inputs of a batch by prompt."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from descant.core.interfaces import ModelTraits, VisibleSlots
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows, last_tokens
from descant.errors import InputError
from descant.kv_cache.stores.recurrent_state import copy_state
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.traits import MODULE_STATE_ATTRS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fed_tokens(rows: Rows, proposal: Proposal, batch: ForwardBatch) -> Tensor:
    """The pending tokens and drafts of each row [N, T]; the content after a row's last one is arbitrary."""
    index, width = batch.rows, batch.width
    tokens = rows.tokens if index is None else index_rows(rows.tokens, index)
    device = tokens.device
    if index is None and width == 1:  # the last token of each row
        return last_tokens(rows)[:, None]
    start = batch.cached_length - (rows.offset if index is None else rows.offset[index])
    columns = start.to(device)[:, None]
    if width != 1:
        columns = columns + torch.arange(width, device=device)
    fed = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
    if proposal.drafts is None:
        return fed
    drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
    num_pending = batch.fed_length - proposal.draft_counts(index)
    draft_index = torch.arange(width, device=device) - num_pending.to(device)[:, None]
    return torch.where(draft_index >= 0, drafts.gather(1, draft_index.clamp(0, drafts.shape[1] - 1)), fed)


def full_tokens(rows: Rows, proposal: Proposal, batch: ForwardBatch) -> Tensor:
    """All tokens of rows with their drafts [N, L], aligned at the right; 0 for positions without a token."""
    index, length = batch.rows, batch.read_length
    tokens = rows.tokens if index is None else index_rows(rows.tokens, index)
    if batch.start is not None and proposal.drafts is None and not rows.offset.any():
        return tokens[:, :length]
    offsets = rows.offset if index is None else rows.offset[index]
    num_tokens = rows.length if index is None else rows.length[index]
    num_drafts = torch.as_tensor(proposal.draft_counts(index))
    known = torch.cat((tokens, tokens.new_zeros(len(tokens), proposal.width)), 1)
    if proposal.drafts is not None:
        drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
        columns = num_tokens[:, None] + torch.arange(proposal.width)
        known = known.scatter(1, columns.to(known.device), drafts)
    padding = length - (offsets + num_tokens + num_drafts)
    source = torch.arange(length) - (padding + offsets)[:, None]
    aligned = known.gather(1, source.clamp(min=0).to(known.device))
    return aligned.masked_fill((source < 0).to(known.device), 0)


_SLOT_STEP: Final = 256


@lru_cache(maxsize=16)
def _slot_indices(device: torch.device, count: int) -> Tensor:
    """0 to `count - 1` on a device; most steps read as many slots as the one before."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


def attention_mask(
    positions: Tensor,
    read_length: int,
    visible: Mapping[str, VisibleSlots],
    windows: Mapping[str, int | None],
    dtype: torch.dtype | None,
) -> Tensor | dict[str, Tensor]:
    """The slots that each fed position [N, T] attends to [N, 1, T, S], by layer type if there are several.

    `windows` are those of the types. The mask is additive in `dtype`, which eager attention needs; None: it
    is bool.
    """
    device, width = positions.device, positions.shape[1]
    masks = {}
    for layer_type, window in windows.items():
        own_slots, num_slots = positions, read_length  # by default slot `p` holds position `p`
        if (slots := visible.get(layer_type)) is not None:
            past = slots.past_lengths.to(device, non_blocking=True)
            own_slots, num_slots = past[:, None] + torch.arange(width, device=device), slots.num_slots
        all_slots = _slot_indices(device, -(-num_slots // _SLOT_STEP) * _SLOT_STEP)[:num_slots]
        mask = all_slots <= own_slots[..., None]  # [N, T, S]
        if window is not None:
            mask = mask & (all_slots > own_slots[..., None] - window)
        if dtype is not None:
            additive = torch.zeros(mask.shape, dtype=dtype, device=device)
            mask = additive.masked_fill(~mask, torch.finfo(dtype).min)
        masks[layer_type] = mask[:, None]
    return next(iter(masks.values())) if len(masks) == 1 else masks


def needs_no_mask(visible: Mapping[str, VisibleSlots], width: int) -> bool:
    """Whether all rows have equally many visible slots, none of them stale."""
    return all(
        slots.num_slots == int(slots.past_lengths[0]) + width
        and bool((slots.past_lengths == slots.past_lengths[0]).all())
        for slots in visible.values()
    )


def row_logits(logits: Tensor, index: Tensor) -> Tensor:
    """The logits of each row at the positions `index` [N, K + 1] (host)."""
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits[rows, index.to(logits.device)]


def logit_positions(
    proposal: Proposal, batch: ForwardBatch, traits: ModelTraits, device: torch.device, is_multi_device: bool
) -> tuple[int | Tensor | list[int] | None, Tensor | None]:
    """The `logits_to_keep` argument, and the index of each row's logits among those [N, K + 1]."""
    last = batch.fed_length - proposal.draft_counts(batch.rows) - 1
    positions = (last[:, None] + torch.arange(proposal.width + 1)).clamp(max=batch.width - 1)
    if not traits.supports_logits_to_keep:
        return None, positions
    if bool((last == last[0]).all()) and int(last[0]) + proposal.width + 1 == batch.width:
        return proposal.width + 1, None
    distinct, index = torch.unique(positions, return_inverse=True)
    # The index must be on the device of the last layer or on the host; accelerate moves tensor arguments.
    return distinct.tolist() if is_multi_device else distinct.to(device), index


def padded_embeds(
    prompts: Sequence[Tensor | None], tokens: Tensor, batch: ForwardBatch, embed: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The prompt embeddings of rows, right-padded [N, T, D], with embedded tokens for rows that have none.

    None if no row has any.
    """
    if all(prompt is None for prompt in prompts):
        return None
    embeds = [
        embed(tokens[row, : int(batch.fed_length[row])]) if prompt is None else prompt
        for row, prompt in enumerate(prompts)
    ]
    return torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)


# Inputs with one entry per token, besides token types, and their number of dimensions for one prompt: some
# models use the same name for inputs of more dimensions.
_PER_TOKEN_DIMS = {
    "bbox": 2,
    "cross_attention_mask": 3,
    "image_attention_mask": 2,
    "image_embeds_position_mask": 1,
    "langs": 1,
}

# Parts of input names that tell the media type.
_MEDIA_KEYWORDS = {
    "video": ("video",),
    "audio": ("audio", "input_features", "feature", "input_values", "speech", "padding_mask"),
    "image": (
        "image",
        "pixel",
        "patch",
        "aspect",
        "vision",
        "flattened",
        "num_crops",
        "target_sizes",
        "spatial_shapes",
    ),
}


# Inputs that index into the concatenated features of all media of a batch -> the input of those media.
_FEATURE_INDEX_INPUTS = {"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"}


def is_per_token(name: str, dimensions: int) -> bool:
    """Whether an input with this many dimensions for one prompt has one entry per token."""
    return _PER_TOKEN_DIMS.get(name) == dimensions or name.endswith("token_type_ids")


def split_by_prompt(
    given: Mapping[str, Any],
    ids: Tensor | None,
    mask: Tensor | None,
    placeholders: Mapping[str, int],
    count: int,
) -> list[dict[str, Any]]:
    """Split the inputs of a batch into those of each of `count` prompts.

    Per-token inputs [B, L, ...] lose their padding (`mask`). Media keep their leading dimension: one entry
    per prompt, or one per placeholder token; `placeholders` maps media types to these tokens.
    """
    prompts: list[dict[str, Any]] = [{} for _ in range(count)]
    splitter = _MediaSplitter(given, ids, placeholders, count)
    for name, value in given.items():
        if isinstance(value, Tensor) and ids is not None and is_per_token(name, value.ndim - 1):
            for inputs, part in zip(prompts, _split_per_token(name, value, ids, mask), strict=True):
                inputs[name] = part
        elif count == 1 or not isinstance(value, Tensor | list | tuple) or getattr(value, "ndim", 1) == 0:
            for inputs in prompts:
                inputs[name] = value
        else:
            for inputs, part in zip(prompts, splitter.split(name, value), strict=True):
                inputs[name] = part
    for name, media in _FEATURE_INDEX_INPUTS.items():
        if name in given and media in given:
            _rebase_indices(prompts, name, media)
    return [_trim_audio_padding(_drop_empty(inputs)) for inputs in prompts]


def _rebase_indices(prompts: Sequence[dict[str, Any]], name: str, media: str) -> None:
    """Make the feature indices of each prompt relative to its own first feature; negative ones are unused."""
    offset = 0
    for inputs in prompts:
        inputs[name] = torch.where(inputs[name] < 0, inputs[name], inputs[name] - offset)
        offset += inputs[media].shape[:2].numel()


def _trim_audio_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Remove the padding of audio to the longest in the batch."""
    audio, mask = inputs.get("input_values"), inputs.get("padding_mask")
    if audio is None or mask is None or audio.shape[-1] != mask.shape[-1]:
        return inputs
    length = int(mask.long().sum(-1).max())
    return {**inputs, "input_values": audio[..., :length], "padding_mask": mask[..., :length]}


def _drop_empty(inputs: dict[str, Any]) -> dict[str, Any]:
    """Remove empty tensors: only some prompts of a batch may have media."""
    return {name: value for name, value in inputs.items() if not isinstance(value, Tensor) or value.numel()}


def _split_per_token(name: str, value: Tensor, ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """A per-token input by prompt, without padding."""
    if value.shape[:2] != ids.shape:
        raise InputError(name, f"must have an entry for each token {list(ids.shape)}", value)
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return [entries[is_token] for entries, is_token in zip(value, keep, strict=True)]


def _media_type(name: str) -> str:
    for kind, words in _MEDIA_KEYWORDS.items():
        if any(word in name for word in words):
            return kind
    return ""


def _patch_grids(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The patch grid of each media type [M, 2 or 3], one row per medium."""
    return {
        _media_type(name): value
        for name, value in given.items()
        if ("_grid_" in name or name in ("target_sizes", "spatial_shapes"))
        and isinstance(value, Tensor)
        and value.ndim == 2
    }


class _MediaSplitter:
    """Splits the media of one batch by prompt."""

    def __init__(
        self, given: Mapping[str, Any], ids: Tensor | None, placeholders: Mapping[str, int], count: int
    ) -> None:
        self._ids, self._placeholder_tokens, self._num_prompts = ids, placeholders, count
        self._patch_grids = _patch_grids(given)

    def split(self, name: str, value: Any) -> list[Any]:
        """The part of an input that belongs to each prompt."""
        kind = _media_type(name)
        token, grid = self._placeholder_tokens.get(kind), self._patch_grids.get(kind)
        size = len(value)
        if self._ids is None or token is None:
            if size != self._num_prompts:
                raise InputError(name, f"must have an entry for each of {self._num_prompts} prompts", value)
            return _split_entries(name, value, [1] * size)
        num_media = size if grid is None else len(grid)
        patches = [1] * size if grid is None else grid.prod(1).tolist()
        media_counts = self._media_per_prompt(name, value, num_media, patches, self._ids == token)
        if size == num_media:
            return _split_entries(name, value, media_counts)
        patch_ends, media_ends = [0, *accumulate(patches)], [0, *accumulate(media_counts)]
        patch_counts = [patch_ends[stop] - patch_ends[start] for start, stop in pairwise(media_ends)]
        if size == 1 and value.shape[-1] % sum(patches) == 0:  # all media concatenated in one row
            width = value.shape[-1] // sum(patches)
            return list(value.split([count * width for count in patch_counts], -1))
        return _split_entries(name, value, patch_counts)

    def _media_per_prompt(
        self, name: str, value: Any, num_media: int, patches: Sequence[int], is_placeholder: Tensor
    ) -> list[int]:
        """The number of `num_media` media of each prompt, by its placeholder tokens."""
        placeholders = is_placeholder.sum(1).tolist()
        if num_media == self._num_prompts and all(placeholders):
            return [1] * num_media
        runs = ((is_placeholder[:, 1:] & ~is_placeholder[:, :-1]).sum(1) + is_placeholder[:, 0]).tolist()
        if sum(runs) == num_media:
            return [int(run) for run in runs]
        if sum(count > 0 for count in placeholders) == num_media:
            return [int(count > 0) for count in placeholders]
        return _count_by_patches(name, value, placeholders, patches)


def _count_by_patches(
    name: str, value: Any, placeholders: Sequence[int], patches: Sequence[int]
) -> list[int]:
    """The number of media of each prompt, if all have the same ratio of patches to placeholder tokens."""
    num_placeholders, num_patches = sum(placeholders), sum(patches)
    counts, stop = [], 0
    for prompt, num_tokens in enumerate(placeholders):
        filled, start = 0, stop
        while stop < len(patches) and filled * num_placeholders < num_tokens * num_patches:
            filled += patches[stop]
            stop += 1
        if filled * num_placeholders != num_tokens * num_patches:
            must = f"must match the placeholder tokens of prompt {prompt}"
            raise InputError(name, must, value, "pass this prompt by itself")
        counts.append(stop - start)
    return counts


def _split_entries(name: str, value: Any, counts: Sequence[int]) -> list[Any]:
    """Split an input into `counts[i]` entries for prompt `i`."""
    ends = list(accumulate(counts))
    if ends[-1] != len(value):
        raise InputError(name, f"must have {ends[-1]} entries in all", value)
    return [value[end - count : end] for end, count in zip(ends, counts, strict=True)]


@dataclass
class RequestInputs:
    """The inputs of one request besides its tokens."""

    media: dict[str, Any] = field(default_factory=dict)  # fed once, with the prompt
    per_token: dict[str, Tensor] = field(default_factory=dict)  # [L, ...] each, one entry per prompt token
    step_kwargs: dict[str, Any] | None = None  # inputs of every later forward; None: not yet known
    # What the model made of them in the last forward, and its first and last position; None: nothing.
    update: tuple[int | None, int, dict[str, Any]] | None = None
    position_delta: Tensor | None = None  # [k] offset of its positions from its token count, if it has any


class RequestInputsMap(dict[int, RequestInputs]):
    """The RequestInputs of the running requests that have any, by request number."""

    def add_requests(
        self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]], device: torch.device
    ) -> None:
        """Store the inputs of new requests, per-token inputs and media apart."""
        for index, request in enumerate(requests):
            extra = RequestInputs()
            for name, values in inputs.items():
                value = values[index]
                if value is None:
                    continue
                value = value.to(device) if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and is_per_token(name, value.ndim):
                    extra.per_token[name] = value
                else:
                    extra.media[name] = value
            if extra.media or extra.per_token:
                self[request] = extra

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the inputs of finished requests."""
        for request in requests:
            self.pop(request, None)

    def drop_media(self, requests: Sequence[int]) -> None:
        """Drop media that have been fed and are not needed again."""
        for request in requests:
            if (extra := self.get(request)) is not None:
                extra.media = {}

    def set_position_delta(self, request: int, delta: Tensor) -> None:
        """Set the position offset of a request [k]."""
        self.setdefault(request, RequestInputs()).position_delta = delta

    def position_deltas(self, requests: Sequence[int]) -> Tensor | None:
        """The position offsets of rows [k, N], zero if a request has none; None if no request has any."""
        deltas = [
            extra.position_delta if (extra := self.get(request)) is not None else None for request in requests
        ]
        known = [delta for delta in deltas if delta is not None]
        if not known:
            return None
        return torch.stack([torch.zeros_like(known[0]) if delta is None else delta for delta in deltas], 1)

    def batch_keys(self, fresh: set[int], prepares_own_inputs: bool) -> dict[int, object]:
        """Keys of the requests that share a forward only with requests of the same key.

        `fresh` are the requests before their first forward; a model with `prepares_own_inputs` may use the
        inputs of a request again in later forwards.
        """
        keys: dict[int, object] = {}
        for request, extra in self.items():
            if request in fresh:
                if extra.media or (prepares_own_inputs and extra.per_token):
                    keys[request] = request
                elif extra.per_token:
                    keys[request] = tuple(sorted(extra.per_token))
            elif prepares_own_inputs and (
                extra.step_kwargs or (extra.step_kwargs is None and (extra.media or extra.per_token))
            ):
                keys[request] = request
            elif "token_type_ids" in extra.per_token:
                keys[request] = "token_type_ids"
        return keys


# Cache arguments that `prepare_inputs_for_generation` takes under their own name; other models take the
# default name.
_PREPARE_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")


# What layers that grow by concatenation replace as a whole.
_REPLACED_TENSORS = frozenset({"keys", "values", "indexer_keys"})


# The time steps that layers of Mamba 2 clamp, in a forward of several tokens alone.
_STEP_LIMIT = "time_step_limit"
_NO_LIMIT = (0.0, math.inf)


class InputPreparer:
    """Builds the inputs of one forward by the model's own `prepare_inputs_for_generation`.

    The rows of the forward have equal length. The model is passed whole rows, its cache and the inputs of the
    request, and selects from these. What it selects at the second forward is passed at every later one.
    """

    def __init__(self, model: PreTrainedModel, traits: ModelTraits, request_inputs: RequestInputsMap) -> None:
        self.model: Any = model
        self.traits, self._request_inputs = traits, request_inputs
        self._skips_position_ids = False  # the model computes positions in its forward

    def prepare_inputs(
        self, tokens: Tensor, batch: ForwardBatch, past: Any, requests: Sequence[int], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a forward, from whole rows [N, L] of which the last `width` tokens are new."""
        is_first = batch.start == 0
        traits, extra = self.traits, self._request_inputs.get(requests[0])
        self._accept_update(extra, batch)
        request_kwargs = self._request_kwargs(extra, len(tokens), is_first)
        kwargs: dict[str, Any] = {**more, **request_kwargs, "use_cache": traits.cache_type != "none"}
        if past is not None:
            is_named = traits.cache_argument in _PREPARE_CACHE_ARGUMENTS
            kwargs[traits.cache_argument if is_named else "past_key_values"] = past
        mask = "decoder_attention_mask" if traits.is_encoder_decoder else "attention_mask"
        if mask in traits.input_names:
            kwargs[mask] = tokens.new_ones(len(tokens), batch.read_length)
        if traits.supports_position_ids:
            positions = self._position_ids(tokens, batch, requests, kwargs)
            if positions is not None:
                kwargs["position_ids"] = positions
        if traits.supports_logits_to_keep:
            kwargs["logits_to_keep"] = kwargs.get("logits_to_keep", 1)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=None if is_first else batch.width,
            is_first_iteration=is_first,
            **kwargs,
        )
        if "logits_to_keep" in inputs:  # some replace it by a number of their config
            inputs["logits_to_keep"] = kwargs["logits_to_keep"]
        if extra is not None and not is_first and extra.step_kwargs is None:
            extra.step_kwargs = {
                name: value for name, value in request_kwargs.items() if inputs.get(name) is not None
            }
            extra.media, extra.per_token = {}, {}
        return inputs

    def update_model_kwargs(self, output: Any, batch: ForwardBatch, requests: Sequence[int]) -> None:
        """Update the request's inputs after a forward, by the model's own method; the next one uses them."""
        extra = self._request_inputs.get(requests[0])
        if extra is None or not (extra.step_kwargs or extra.media or extra.per_token):
            return
        kwargs = dict(
            self.model._update_model_kwargs_for_generation(
                output,
                self._request_kwargs(extra, 1, is_first=False),
                is_encoder_decoder=self.traits.is_encoder_decoder,
            )
        )
        for name in (self.traits.cache_argument, "encoder_outputs"):
            kwargs.pop(name, None)
        kwargs = {name: value[:1] if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        extra.update = batch.start, batch.read_length, kwargs

    @staticmethod
    def _accept_update(extra: RequestInputs | None, batch: ForwardBatch) -> None:
        """Use the inputs that the last forward left, unless that forward is repeated: it was interrupted."""
        if extra is None or extra.update is None:
            return
        start, read_length, kwargs = extra.update
        extra.update = None
        if (start, read_length) == (batch.start, batch.read_length):
            return
        if extra.step_kwargs is None:
            extra.media = {name: value for name, value in kwargs.items() if name not in extra.per_token}
            extra.per_token = {name: kwargs[name][0] for name in extra.per_token if name in kwargs}
        else:
            extra.step_kwargs = kwargs

    def _request_kwargs(self, extra: RequestInputs | None, count: int, is_first: bool) -> dict[str, Any]:
        """The inputs of a request, expanded to its current number of rows."""
        if extra is None:
            return {}
        if extra.step_kwargs is not None:
            kwargs = dict(extra.step_kwargs)
        else:
            kwargs = {**extra.media, **{name: value[None] for name, value in extra.per_token.items()}}
        if is_first or count == 1:
            return kwargs
        return {
            name: value.expand(count, *value.shape[1:])
            if isinstance(value, Tensor) and len(value) == 1
            else value
            for name, value in kwargs.items()
        }

    def _position_ids(
        self, tokens: Tensor, batch: ForwardBatch, requests: Sequence[int], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """The positions of whole rows [N, L], or [k, N, L] for multi-dimensional positions (M-RoPE)."""
        count, length = len(tokens), batch.read_length
        if self.traits.has_own_position_ids and batch.start == 0:
            position_ids = model_position_ids(self.model, self._request_inputs, tokens, requests, kwargs)
            self._skips_position_ids = position_ids is None
            return position_ids
        if self._skips_position_ids:
            return None
        positions = torch.arange(length, device=tokens.device).expand(count, length)
        deltas = self._request_inputs.position_deltas(requests)
        return positions if deltas is None else positions + deltas[..., None].to(positions.device)


def model_position_ids(
    model: Any,
    request_inputs: RequestInputsMap,
    tokens: Tensor,
    requests: Sequence[int],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """Positions of new rows as the model computes them [k, N, L]; stores the offset of each request."""
    with preserve_rope_deltas(model):
        position_ids: Tensor | None = model._prepare_position_ids_for_generation(tokens, dict(kwargs))
    if position_ids is not None and position_ids.ndim == 3:
        mask = kwargs.get("attention_mask")
        lengths = [tokens.shape[1]] * len(tokens) if mask is None else mask.sum(1).tolist()
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            request_inputs.set_position_delta(request, position_ids[:, row, length - 1] + 1 - length)
    return position_ids


@contextlib.contextmanager
def preserve_rope_deltas(model: Any) -> Iterator[None]:
    """Restore the `rope_deltas` that a model sets on its modules while it computes positions."""
    saved = [(module, module.rope_deltas) for module in model.modules() if "rope_deltas" in vars(module)]
    try:
        yield
    finally:
        for module, value in saved:
            module.rope_deltas = value


class RecurrentStateHandler:
    """State of recurrent models: a cache of their own class, or whatever they return.

    Some keep part of the state on their modules; it is set there for a forward and removed afterwards.
    """

    def __init__(self, model: PreTrainedModel, traits: ModelTraits) -> None:
        self.model: Any = model
        self.traits = traits
        self._module_attrs = [
            (module, name)
            for module in model.modules()
            for name in MODULE_STATE_ATTRS
            if name in vars(module)
        ]
        self._limited_modules = [
            module
            for module in model.modules()
            if tuple(vars(module).get(_STEP_LIMIT, _NO_LIMIT)) != _NO_LIMIT
        ]

    @property
    def reads_prompts_apart(self) -> bool:
        """Whether a prompt that is read at once has another state than one that is read token by token."""
        return bool(self._limited_modules)

    def new_state(self) -> Any:
        """The state before the first forward."""
        past: Any = None
        if self.model._supports_default_dynamic_cache():
            text = self.model.config.get_text_config(decoder=True)
            past = DynamicCache(config=text)
            if self.traits.is_encoder_decoder:
                past = EncoderDecoderCache(past, DynamicCache(config=text))
        return (past, [None] * len(self._module_attrs)) if self._module_attrs else past

    def model_cache(self, state: Any) -> Any:
        """The part of a state that the model takes as its cache argument."""
        return state[0] if self._module_attrs else state

    def writable_state(self, state: Any) -> Any:
        """A copy of a state for one forward, which writes to it: the state itself stays as it is."""
        return copy_state(state, _is_replaced)

    @contextlib.contextmanager
    def install_state(self, state: Any, continues: bool) -> Iterator[list[Any]]:
        """Set the module part of a state for one forward; the list then holds its new values.

        `continues`: the forward feeds several tokens after a state, as it would one by one.
        """
        new_values: list[Any] = []
        settings = [(module, name, state[1][at]) for at, (module, name) in enumerate(self._module_attrs)]
        if continues:
            settings += [(module, _STEP_LIMIT, _NO_LIMIT) for module in self._limited_modules]
        saved = [getattr(module, name) for module, name, _ in settings]
        try:
            for module, name, value in settings:
                setattr(module, name, value)
            yield new_values
            new_values += [getattr(module, name) for module, name in self._module_attrs]
        finally:
            for (module, name, _), value in zip(settings, saved, strict=True):
                setattr(module, name, value)

    def next_state(self, output: Any, state: Any, module_values: list[Any]) -> Any:
        """The state after a forward: the cache that the model returned, else the one it wrote to."""
        past = output.get(self.traits.cache_argument) if hasattr(output, "get") else None
        past = self.model_cache(state) if past is None else past
        return (past, module_values) if self._module_attrs else past


def _is_replaced(owner: Any, name: str) -> bool:
    """Whether a cache layer replaces an attribute at every forward, and never writes to it."""
    return name in _REPLACED_TENSORS and isinstance(owner, DynamicLayer)
