"""The rows of a packed forward: the tokens of all rows one after the other, none of them padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

# Rows are attended together if the longest has at most this share of the slots of the shortest, or if they
# differ by at most so many slots: another call costs more than to read and mask those.
_MAX_RATIO = 1.5
_TOLERATED_SLOTS = 128
# The same for the number of fed tokens, whose square counts.
_TOLERATED_WIDTH = 16


@dataclass(eq=False)
class PackedGroup:
    """Rows of a packed forward that are attended in one call, padded to the longest.

    Its tensors are computed once for all layers.
    """

    index: Array  # [G] which rows of the forward
    rows: Array  # [G] their rows in the cache
    starts: Array  # [G] the first position that each feeds
    widths: Array  # [G] how many it feeds
    offsets: Array  # [G] where its tokens begin in the packed sequence
    has_all_rows: bool = False  # whether it has all rows of the forward, in their order
    memo: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def is_first_write(self) -> bool:
        """Whether nothing is cached of any row, so that attention reads the new keys alone."""
        return not self.starts.any()

    @cached_property
    def width(self) -> int:
        """The most tokens that a row feeds."""
        return int(self.widths.max())

    @cached_property
    def is_dense(self) -> bool:
        """Whether all tokens of the forward are its own, in order, and as many of each row."""
        return self.has_all_rows and int(self.widths.min()) == self.width

    @cached_property
    def stops(self) -> Array:
        """The number of slots of each row [G]."""
        return np.asarray(self.starts + self.widths)

    @cached_property
    def num_slots(self) -> int:
        """The number of slots of the longest row."""
        return int(self.stops.max())

    @cached_property
    def columns(self) -> Array:
        """Which of its row's fed tokens each padded token stands for [G, W]; the last for padding."""
        return np.asarray(np.minimum(np.arange(self.width), self.widths[:, None] - 1))

    def token_index(self, device: torch.device) -> Tensor:
        """Where the padded tokens of each row are in the packed sequence [G * W]."""
        return self._index("tokens", device, lambda: np.ravel(self.offsets[:, None] + self.columns))

    def _index(self, name: str, device: torch.device, make: Callable[[], Array]) -> Tensor:
        """An index on a device."""
        if (name, device) not in self.memo:
            self.memo[name, device] = torch.from_numpy(make()).to(device, non_blocking=True)
        index: Tensor = self.memo[name, device]
        return index

    def real_index(self, device: torch.device) -> Tensor | None:
        """Which of G * W padded tokens are real [P]; None: all of them."""
        if int(self.widths.min()) == self.width:
            return None
        return self._index(
            "real", device, lambda: np.flatnonzero(np.arange(self.width) < self.widths[:, None])
        )

    def mask(self, query: Tensor, repeats: int) -> Tensor | None:
        """The additive mask [G, 1, repeats * W, S] of queries that are repeated; None: all slots are seen.

        One row of queries is enough if each row feeds one token.
        """
        if self.width == 1 and int(self.stops.min()) == self.num_slots:
            return None
        key = ("mask", query.device, query.dtype, repeats)
        if key not in self.memo:
            last = torch.from_numpy(self.starts[:, None] + self.columns).to(query.device, non_blocking=True)
            hidden = torch.arange(self.num_slots, device=query.device) > last[..., None]  # [G, W, S]
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None]
            self.memo[key] = mask if self.width == 1 else mask.repeat(1, 1, repeats, 1)
        made: Tensor = self.memo[key]
        return made


class PackedSpan:
    """Where a packed forward writes: for each row its first slot, and how many."""

    def __init__(self, rows: Array, starts: Array, widths: Array) -> None:
        self.rows, self.starts, self.widths = rows, starts, widths  # [N] each
        self.offsets: Array = np.cumsum(widths) - widths  # [N]
        self.num_tokens = int(widths.sum())
        self.read_length = int((starts + widths).max())
        self.memo: dict[Any, Any] = {}  # what a cache computes once for all layers

    @cached_property
    def is_decode(self) -> bool:
        """Whether each row feeds one token."""
        return self.num_tokens == len(self.rows)

    @cached_property
    def rectangle(self) -> tuple[slice, slice] | None:
        """The rows and slots of a write that is a rectangle of adjacent rows; None: it is not."""
        rows, starts, widths = self.rows, self.starts, self.widths
        first, count, start, width = int(rows[0]), len(rows), int(starts[0]), int(widths[0])
        if count > 1 and not (
            (rows == np.arange(first, first + count)).all()
            and (starts == start).all()
            and (widths == width).all()
        ):
            return None
        return slice(first, first + count), slice(start, start + width)

    @cached_property
    def token_rows(self) -> Array:
        """The row of each token [P], as an index into `rows`."""
        return np.repeat(np.arange(len(self.rows)), self.widths)

    @cached_property
    def columns(self) -> Array:
        """Which of its row's fed tokens each token is [P]."""
        return np.asarray(np.arange(self.num_tokens) - self.offsets[self.token_rows])

    @cached_property
    def positions(self) -> Array:
        """The position of each token [P]."""
        return np.asarray(self.starts[self.token_rows] + self.columns)

    @cached_property
    def groups(self) -> list[PackedGroup]:
        """The rows in groups of similar length."""
        is_first = self.starts == 0
        parts = _split_similar(np.flatnonzero(is_first), self.widths, _TOLERATED_WIDTH)
        for part in _split_similar(np.flatnonzero(~is_first), self.widths, _TOLERATED_WIDTH):
            parts += _split_similar(part, self.starts, _TOLERATED_SLOTS)
        has_all_rows = len(parts) == 1  # each part is in order
        return [
            PackedGroup(
                part, self.rows[part], self.starts[part], self.widths[part], self.offsets[part], has_all_rows
            )
            for part in parts
        ]


def _split_similar(index: Array, sizes: Array, tolerance: int) -> list[Array]:
    """Rows in groups in which sizes are similar; each group is in order."""
    if not len(index):
        return []
    own = sizes[index]
    if int(own.max()) <= max(int(own.min()) + tolerance, _MAX_RATIO * int(own.min())):
        return [index]
    order = index[np.argsort(own, kind="stable")]
    parts = []
    while len(order):
        smallest = int(sizes[order[0]])
        count = int((sizes[order] <= max(smallest + tolerance, _MAX_RATIO * smallest)).sum())
        parts.append(np.sort(order[:count]))
        order = order[count:]
    return parts
