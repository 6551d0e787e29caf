"""The cache of lists: of every row, for every layer, a list of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, VisibleSlots

__all__ = ["ReferenceCache", "Retention", "RetentionPolicy"]

KVEntry = tuple[Tensor, Tensor]  # key and value of one position, [H, D] each
# Of the positions that a row has, those that a layer still shows, in the order of their slots.
RetentionPolicy = Callable[[Sequence[int]], Sequence[int]]
Retention = (
    RetentionPolicy | Sequence[RetentionPolicy | None]
)  # of every layer, or one by one; None: all positions


class ReferenceCache:
    """The cache that is obviously right, and slow.

    With `keeps` it shows what a cache that forgets would show: it forgets nothing, and looks away.
    """

    max_rewind: int | None = None

    def __init__(self, retention: Retention | None = None) -> None:
        self._retention = retention
        self._rows: list[dict[int, list[KVEntry]]] = []
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host)."""
        return torch.tensor(self._lengths, dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """What the positions take in memory, those that several rows have counted once."""
        return _total_nbytes(entry for row in self._rows for held in row.values() for entry in held)

    @property
    def visible_nbytes(self) -> int:
        """What the positions take in memory that will be shown again."""
        return _total_nbytes(
            held[at]
            for row, length in zip(self._rows, self._lengths, strict=True)
            for layer, held in row.items()
            for at in self.visible_positions(layer, length)
        )

    def visible_positions(self, layer: int, length: int) -> Sequence[int]:
        """The positions that the layer shows of a row with so many."""
        policy = self._policy(layer)
        return range(length) if policy is None else policy(range(length))

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._rows += [{} for _ in range(rows)]
        self._lengths += [0] * rows

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """How many positions the layer shows of each row before the write; None: all of them."""
        if self._policy(layer) is None:
            return None
        held = torch.tensor([len(self.visible_positions(layer, start)) for _, start in self._span_rows(span)])
        return VisibleSlots(held, int(held.max()) + span.width)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows show then [N, H, S, D], else zeros."""
        key, value = key.clone(), value.clone()
        shown: list[list[KVEntry]] = []
        for line, (place, start) in enumerate(self._span_rows(span)):
            held = self._rows[place].setdefault(layer, [])
            if start > len(held):
                raise AssertionError(f"row {place} holds {len(held)} positions, {start} is written: a gap")
            held[start:] = zip(key[line].unbind(1), value[line].unbind(1), strict=True)
            shown.append([held[at] for at in self.visible_positions(layer, start)] + held[start:])
        reach = self.visible_slots(layer, span)
        size = span.read_length if reach is None else reach.num_slots
        keys = key.new_zeros(len(shown), key.shape[1], size, key.shape[3])
        values = value.new_zeros(len(shown), value.shape[1], size, value.shape[3])
        for line, entries in enumerate(shown):
            keys[line, :, : len(entries)] = torch.stack([one for one, _ in entries], 1)
            values[line, :, : len(entries)] = torch.stack([two for _, two in entries], 1)
        return keys, values

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` (None: `i`) cut to `lengths[i]`."""
        whence = range(len(self._rows)) if parents is None else parents.tolist()
        self._lengths = lengths.tolist()
        self._rows = [
            {layer: held[:length] for layer, held in self._rows[parent].items()}
            for parent, length in zip(whence, self._lengths, strict=True)
        ]

    def select(self, rows: Tensor) -> Self:
        """Another cache with these rows (host), as last committed."""
        made = type(self)(self._retention)
        made._rows, made._lengths = list(self._rows), list(self._lengths)
        made.commit(rows, self.lengths[rows])
        return made

    def join(self, other: Self) -> None:
        """Append the rows of another one."""
        self._rows += other._rows
        self._lengths += other._lengths

    def to(self, device: torch.device | str) -> None:
        """Move every position."""
        for row in self._rows:
            for held in row.values():
                held[:] = [(key.to(device), value.to(device)) for key, value in held]

    def state(self) -> dict[str, Tensor]:
        """The keys and the values [H, L, D] of every row and layer, and the lengths, as last committed."""
        made = {"lengths": self.lengths}
        for number, (row, length) in enumerate(zip(self._rows, self._lengths, strict=True)):
            for layer, held in row.items():
                for name, some in zip(("keys", "values"), zip(*held[:length], strict=True), strict=False):
                    made[f"{number}.{layer}.{name}"] = torch.stack(some, 1)
        return made

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty cache."""
        self.extend(len(state["lengths"]))
        self._lengths = state["lengths"].tolist()
        for name in state:
            number, *rest = name.split(".")
            if rest[1:] == ["keys"]:
                both = (state[f"{number}.{rest[0]}.{what}"].clone().unbind(1) for what in ("keys", "values"))
                self._rows[int(number)][int(rest[0])] = list(zip(*both, strict=True))

    def _policy(self, layer: int) -> RetentionPolicy | None:
        """What the layer shows; None: everything."""
        return (
            self._retention
            if self._retention is None or callable(self._retention)
            else self._retention[layer]
        )

    def _span_rows(self, span: KVSpan) -> list[tuple[int, int]]:
        """The rows of a span, each with its start."""
        rows = list(range(len(self._rows))) if span.rows is None else span.rows.tolist()
        starts = [span.start] * len(rows) if isinstance(span.start, int) else span.start.tolist()
        return list(zip(rows, starts, strict=True))


def _total_nbytes(entries: object) -> int:
    """What distinct positions take in memory."""
    found = {id(entry): entry for entry in entries}  # type: ignore[attr-defined]
    return sum(key.nbytes + value.nbytes for key, value in found.values())
