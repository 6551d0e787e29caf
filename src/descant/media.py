"""Images, sounds and marks of a batch, dealt out to its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from descant.errors import InputError

__all__ = ["dealt", "is_mark"]

# Inputs that have one entry for each token of a prompt, beside those that say which type it is of.
_MARKS = frozenset(
    {
        "bbox", "cross_attention_mask", "image_attention_mask", "image_embeds_position_mask", "langs",
    }
)  # fmt: skip

# What the name of an input says about the medium that it belongs to.
_WORDS = {
    "video": ("video",),
    "audio": ("audio", "input_features", "feature", "input_values", "speech", "padding_mask"),
    "image": ("image", "pixel", "patch", "aspect", "vision", "flattened", "num_crops"),
}


# Inputs that count through the media of all prompts, so that a prompt cannot be given its own.
_JOINT = frozenset({"image_token_pooling", "video_token_pooling"})


def is_mark(name: str) -> bool:
    """Whether an input has one entry for each token of a prompt."""
    return name in _MARKS or name.endswith("token_type_ids")


def dealt(
    given: Mapping[str, Any], ids: Tensor | None, here: Tensor | None, marks: Mapping[str, int], count: int
) -> list[dict[str, Any]]:
    """What of the inputs belongs to each of `count` prompts.

    Marks have one entry for each token [B, L, ...] and lose their padding; media keep their leading
    dimension: one entry a prompt, or as many as the prompt has places for, which `marks` tells by kind.
    """
    lines: list[dict[str, Any]] = [{} for _ in range(count)]
    deal = _Deal(given, ids, marks, count)
    for name, value in given.items():
        if is_mark(name) and isinstance(value, Tensor) and ids is not None:
            for line, part in enumerate(_marked(name, value, ids, here)):
                lines[line][name] = part
        elif name in _JOINT and count > 1:
            raise InputError(name, "must be given for one prompt at a time, for it counts through all", value)
        elif count == 1 or not isinstance(value, Tensor | list | tuple):
            for one in lines:
                one[name] = value
        else:
            for line, part in enumerate(deal.parts(name, value)):
                lines[line][name] = part
    return [_present(line) for line in lines]


def _present(line: dict[str, Any]) -> dict[str, Any]:
    """What there is of a prompt's media: a batch may hold pictures of its neighbours only."""
    return {name: value for name, value in line.items() if not isinstance(value, Tensor) or value.numel()}


def _marked(name: str, value: Tensor, ids: Tensor, here: Tensor | None) -> list[Tensor]:
    """Marks of each prompt's tokens, those of the padding left out."""
    if value.shape[:2] != ids.shape:
        raise InputError(name, f"must have an entry for each token {list(ids.shape)}", value)
    keep = torch.ones_like(ids, dtype=torch.bool) if here is None else here
    return [line[kept] for line, kept in zip(value, keep, strict=True)]


def _kind(name: str) -> str:
    for kind, words in _WORDS.items():
        if any(word in name for word in words):
            return kind
    return ""


def _grids(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """For each kind of medium, the table that says how many patches each one has [M, 2 or 3]."""
    return {
        _kind(name) or "image": value
        for name, value in given.items()
        if ("_grid_" in name or name in ("target_sizes", "spatial_shapes"))
        and isinstance(value, Tensor)
        and value.ndim == 2
    }


class _Deal:
    """How the media of one batch are dealt out to its prompts."""

    def __init__(
        self, given: Mapping[str, Any], ids: Tensor | None, marks: Mapping[str, int], count: int
    ) -> None:
        self._ids, self._marks, self._count = ids, marks, count
        self._grids = _grids(given)

    def parts(self, name: str, value: Any) -> list[Any]:
        """What of an input belongs to each prompt."""
        kind = _kind(name)
        token, grid = self._marks.get(kind), self._grids.get(kind)
        size = len(value)
        if grid is None and size == self._count and (self._ids is None or token is None):
            return _split(name, value, [1] * size)
        if self._ids is None or token is None:
            grids = next(iter(self._grids.values()), None)
            if grids is None or size != len(grids) or not self._marks or self._ids is None:
                raise InputError(name, f"must have an entry for each of {self._count} prompts", value)
            return self.parts(next(iter(self._grids)) + name, value)
        number = size if grid is None else len(grid)
        patches = [1] * size if grid is None else grid.prod(1).tolist()
        each = self._media(name, value, number, patches, self._ids == token)
        if size == number:
            return _split(name, value, each)
        ends, firsts = [0, *accumulate(patches)], [0, *accumulate(each)]
        shares = [ends[firsts[line + 1]] - ends[firsts[line]] for line in range(self._count)]
        if size == 1 and value.shape[-1] % sum(patches) == 0:  # all in one line, one behind the other
            wide = value.shape[-1] // sum(patches)
            return list(value.split([share * wide for share in shares], -1))
        return _split(name, value, shares)

    def _media(self, name: str, value: Any, number: int, patches: Sequence[int], there: Tensor) -> list[int]:
        """How many of `number` media each prompt has places for."""
        places = there.sum(1).tolist()
        if number == self._count and all(places):
            return [1] * number
        runs = ((there[:, 1:] & ~there[:, :-1]).sum(1) + there[:, 0]).tolist()
        if sum(runs) == number:
            return [int(run) for run in runs]
        if sum(place > 0 for place in places) == number:
            return [int(place > 0) for place in places]
        return _filled(name, value, places, patches)


def _filled(name: str, value: Any, places: Sequence[int], patches: Sequence[int]) -> list[int]:
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


def _split(name: str, value: Any, shares: Sequence[int]) -> list[Any]:
    """The entries of an input, so many for each prompt."""
    ends = list(accumulate(shares))
    if ends[-1] != len(value):
        raise InputError(name, f"must have {ends[-1]} entries in all", value)
    return [value[end - share : end] for end, share in zip(ends, shares, strict=True)]
