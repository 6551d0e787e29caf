"""Splits the multimodal inputs of a batch by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from descant.errors import InputError

__all__ = ["is_per_token", "split_by_prompt"]

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
        """How many of `num_media` media each prompt has, by its placeholder tokens."""
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
    """How many media each prompt has, if all media have the same ratio of patches to placeholder tokens."""
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
