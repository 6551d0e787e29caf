"""Images, sounds and marks of a batch, dealt out to its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from descant.errors import InputError

__all__ = ["is_per_token", "split_by_prompt"]

# Inputs that have one entry for each token of a prompt, beside those that say which type it is of; and how
# many dimensions they have for one prompt, where the same name means something else with more.
_PER_TOKEN_DIMS = {
    "bbox": 2,
    "cross_attention_mask": 3,
    "image_attention_mask": 2,
    "image_embeds_position_mask": 1,
    "langs": 1,
}

# What the name of an input says about the medium that it belongs to.
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


# Inputs that point at the features of all media of a batch, one after the other, and the media they are of.
_FEATURE_INDEX_INPUTS = {"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"}


def is_per_token(name: str, dimensions: int) -> bool:
    """Whether an input of so many dimensions, for one prompt, has one entry for each of its tokens."""
    return _PER_TOKEN_DIMS.get(name) == dimensions or name.endswith("token_type_ids")


def split_by_prompt(
    given: Mapping[str, Any], ids: Tensor | None, here: Tensor | None, marks: Mapping[str, int], count: int
) -> list[dict[str, Any]]:
    """What of the inputs belongs to each of `count` prompts.

    Marks have one entry for each token [B, L, ...] and lose their padding; media keep their leading
    dimension: one entry a prompt, or as many as the prompt has places for, which `marks` tells by kind.
    """
    lines: list[dict[str, Any]] = [{} for _ in range(count)]
    deal = _MediaSplitter(given, ids, marks, count)
    for name, value in given.items():
        if isinstance(value, Tensor) and ids is not None and is_per_token(name, value.ndim - 1):
            for line, part in enumerate(_split_per_token(name, value, ids, here)):
                lines[line][name] = part
        elif count == 1 or not isinstance(value, Tensor | list | tuple):
            for one in lines:
                one[name] = value
        else:
            for line, part in enumerate(deal.split(name, value)):
                lines[line][name] = part
    for name, media in _FEATURE_INDEX_INPUTS.items():
        if name in given and media in given:
            _rebase_indices(lines, name, media)
    return [_trim_audio_padding(_drop_empty(line)) for line in lines]


def _rebase_indices(lines: Sequence[dict[str, Any]], name: str, media: str) -> None:
    """Let the pointers of each prompt count from its own first feature; what is negative points nowhere."""
    before = 0
    for line in lines:
        line[name] = torch.where(line[name] < 0, line[name], line[name] - before)
        before += line[media].shape[:2].numel()


def _trim_audio_padding(line: dict[str, Any]) -> dict[str, Any]:
    """A sound without the silence that only fills it up to its neighbours in the batch."""
    sound, mask = line.get("input_values"), line.get("padding_mask")
    if sound is None or mask is None or sound.shape[-1] != mask.shape[-1]:
        return line
    long = int(mask.long().sum(-1).max())
    return {**line, "input_values": sound[..., :long], "padding_mask": mask[..., :long]}


def _drop_empty(line: dict[str, Any]) -> dict[str, Any]:
    """What there is of a prompt's media: a batch may hold pictures of its neighbours only."""
    return {name: value for name, value in line.items() if not isinstance(value, Tensor) or value.numel()}


def _split_per_token(name: str, value: Tensor, ids: Tensor, here: Tensor | None) -> list[Tensor]:
    """Marks of each prompt's tokens, those of the padding left out."""
    if value.shape[:2] != ids.shape:
        raise InputError(name, f"must have an entry for each token {list(ids.shape)}", value)
    keep = torch.ones_like(ids, dtype=torch.bool) if here is None else here
    return [line[kept] for line, kept in zip(value, keep, strict=True)]


def _media_type(name: str) -> str:
    for kind, words in _MEDIA_KEYWORDS.items():
        if any(word in name for word in words):
            return kind
    return ""


def _patch_grids(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """For each kind of medium, the table that says how many patches each one has [M, 2 or 3]."""
    return {
        _media_type(name): value
        for name, value in given.items()
        if ("_grid_" in name or name in ("target_sizes", "spatial_shapes"))
        and isinstance(value, Tensor)
        and value.ndim == 2
    }


class _MediaSplitter:
    """How the media of one batch are dealt out to its prompts."""

    def __init__(
        self, given: Mapping[str, Any], ids: Tensor | None, marks: Mapping[str, int], count: int
    ) -> None:
        self._ids, self._placeholder_tokens, self._num_prompts = ids, marks, count
        self._patch_grids = _patch_grids(given)

    def split(self, name: str, value: Any) -> list[Any]:
        """What of an input belongs to each prompt."""
        kind = _media_type(name)
        token, grid = self._placeholder_tokens.get(kind), self._patch_grids.get(kind)
        size = len(value)
        if self._ids is None or token is None:
            if size != self._num_prompts:
                raise InputError(name, f"must have an entry for each of {self._num_prompts} prompts", value)
            return _split_entries(name, value, [1] * size)
        number = size if grid is None else len(grid)
        patches = [1] * size if grid is None else grid.prod(1).tolist()
        each = self._media_per_prompt(name, value, number, patches, self._ids == token)
        if size == number:
            return _split_entries(name, value, each)
        ends, firsts = [0, *accumulate(patches)], [0, *accumulate(each)]
        shares = [ends[firsts[line + 1]] - ends[firsts[line]] for line in range(self._num_prompts)]
        if size == 1 and value.shape[-1] % sum(patches) == 0:  # all in one line, one behind the other
            wide = value.shape[-1] // sum(patches)
            return list(value.split([share * wide for share in shares], -1))
        return _split_entries(name, value, shares)

    def _media_per_prompt(
        self, name: str, value: Any, number: int, patches: Sequence[int], there: Tensor
    ) -> list[int]:
        """How many of `number` media each prompt has places for."""
        places = there.sum(1).tolist()
        if number == self._num_prompts and all(places):
            return [1] * number
        runs = ((there[:, 1:] & ~there[:, :-1]).sum(1) + there[:, 0]).tolist()
        if sum(runs) == number:
            return [int(run) for run in runs]
        if sum(place > 0 for place in places) == number:
            return [int(place > 0) for place in places]
        return _count_by_patches(name, value, places, patches)


def _count_by_patches(name: str, value: Any, places: Sequence[int], patches: Sequence[int]) -> list[int]:
    """How many media each prompt holds: their patches fill its places, all at the same rate."""
    total = sum(places)
    each, at = [], 0
    for line, place in enumerate(places):
        filled, first = 0, at
        while at < len(patches) and filled * total < place * sum(patches):
            filled += patches[at]
            at += 1
        if filled * total != place * sum(patches):
            must = f"must fill the places that prompt {line} has for it"
            raise InputError(name, must, value, "pass this prompt by itself")
        each.append(at - first)
    return each


def _split_entries(name: str, value: Any, shares: Sequence[int]) -> list[Any]:
    """The entries of an input, so many for each prompt."""
    ends = list(accumulate(shares))
    if ends[-1] != len(value):
        raise InputError(name, f"must have {ends[-1]} entries in all", value)
    return [value[end - share : end] for end, share in zip(ends, shares, strict=True)]
