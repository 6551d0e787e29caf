"""The reference cache: a list of positions for every row and layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, VisibleSlots

KVEntry = tuple[Tensor, Tensor]  # key and value of one position, [H, D] each
# Maps the positions of a row to the visible ones of a layer, in slot order.
RetentionPolicy = Callable[[Sequence[int]], Sequence[int]]
Retention = (
    RetentionPolicy | Sequence[RetentionPolicy | None]
)  # for all layers, or one per layer; None: all positions


class ReferenceCache:
    """A simple and slow cache that is obviously correct.

    With `retention` it shows what an evicting cache would show, but stores everything.
    """

    max_rewind: int | None = None
    capacity: int | None = None

    def __init__(self, retention: Retention | None = None) -> None:
        self._retention = retention
        self._rows: list[dict[int, list[KVEntry]]] = []
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> Tensor:
        """Committed lengths [R] (host)."""
        return torch.tensor(self._lengths, dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """Bytes of all positions; shared ones are counted once."""
        return _total_nbytes(entry for row in self._rows for entries in row.values() for entry in entries)

    @property
    def visible_nbytes(self) -> int:
        """Bytes of the visible positions."""
        return _total_nbytes(
            entries[position]
            for row, length in zip(self._rows, self._lengths, strict=True)
            for layer, entries in row.items()
            for position in self.visible_positions(layer, length)
        )

    def visible_positions(self, layer: int, length: int) -> Sequence[int]:
        """The visible positions of a layer for a row of `length` positions."""
        policy = self._policy(layer)
        return range(length) if policy is None else policy(range(length))

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._rows += [{} for _ in range(rows)]
        self._lengths += [0] * rows

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """The number of visible past positions per row; None: all of them."""
        if self._policy(layer) is None:
            return None
        past_lengths = torch.tensor(
            [len(self.visible_positions(layer, start)) for _, start in self._span_rows(span)]
        )
        return VisibleSlots(past_lengths, int(past_lengths.max()) + span.width)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the visible keys and values [N, H, S, D], zero-padded."""
        key, value = key.clone(), value.clone()
        shown: list[list[KVEntry]] = []
        for line, (row, start) in enumerate(self._span_rows(span)):
            entries = self._rows[row].setdefault(layer, [])
            if start > len(entries):
                raise AssertionError(f"row {row} holds {len(entries)} positions, {start} is written: a gap")
            entries[start:] = zip(key[line].unbind(1), value[line].unbind(1), strict=True)
            shown.append(
                [entries[position] for position in self.visible_positions(layer, start)] + entries[start:]
            )
        slots = self.visible_slots(layer, span)
        size = span.read_length if slots is None else slots.num_slots
        keys = key.new_zeros(len(shown), key.shape[1], size, key.shape[3])
        values = value.new_zeros(len(shown), value.shape[1], size, value.shape[3])
        for line, row_entries in enumerate(shown):
            keys[line, :, : len(row_entries)] = torch.stack([entry_key for entry_key, _ in row_entries], 1)
            values[line, :, : len(row_entries)] = torch.stack(
                [entry_value for _, entry_value in row_entries], 1
            )
        return keys, values

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` (None: `i`) truncated to `lengths[i]`."""
        parent_list = range(len(self._rows)) if parents is None else parents.tolist()
        self._lengths = lengths.tolist()
        self._rows = [
            {layer: entries[:length] for layer, entries in self._rows[parent].items()}
            for parent, length in zip(parent_list, self._lengths, strict=True)
        ]

    def select(self, rows: Tensor) -> Self:
        """Another cache with these rows (host), as last committed."""
        selected = type(self)(self._retention)
        selected._rows, selected._lengths = list(self._rows), list(self._lengths)
        selected.commit(rows, self.lengths[rows])
        return selected

    def join(self, other: Self) -> None:
        """Append the rows of another cache."""
        self._rows += other._rows
        self._lengths += other._lengths

    def to(self, device: torch.device | str) -> None:
        """Move every position."""
        for row in self._rows:
            for entries in row.values():
                entries[:] = [(key.to(device), value.to(device)) for key, value in entries]

    def state(self) -> dict[str, Tensor]:
        """The keys and the values [H, L, D] of every row and layer, and the lengths, as last committed."""
        state = {"lengths": self.lengths}
        for row_number, (row, length) in enumerate(zip(self._rows, self._lengths, strict=True)):
            for layer, entries in row.items():
                for name, tensors in zip(
                    ("keys", "values"), zip(*entries[:length], strict=True), strict=False
                ):
                    state[f"{row_number}.{layer}.{name}"] = torch.stack(tensors, 1)
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty cache."""
        self.extend(len(state["lengths"]))
        self._lengths = state["lengths"].tolist()
        for name in state:
            row_number, *rest = name.split(".")
            if rest[1:] == ["keys"]:
                tensors = (
                    state[f"{row_number}.{rest[0]}.{part}"].clone().unbind(1) for part in ("keys", "values")
                )
                self._rows[int(row_number)][int(rest[0])] = list(zip(*tensors, strict=True))

    def _policy(self, layer: int) -> RetentionPolicy | None:
        """The retention policy of a layer; None: all positions."""
        retention = self._retention
        return retention if retention is None or callable(retention) else retention[layer]

    def _span_rows(self, span: KVSpan) -> list[tuple[int, int]]:
        """The rows of a span, each with its start."""
        rows = list(range(len(self._rows))) if span.rows is None else span.rows.tolist()
        starts = [span.start] * len(rows) if isinstance(span.start, int) else span.start.tolist()
        return list(zip(rows, starts, strict=True))


def _total_nbytes(entries: object) -> int:
    """Bytes of distinct positions."""
    distinct = {id(entry): entry for entry in entries}  # type: ignore[attr-defined]
    return sum(key.nbytes + value.nbytes for key, value in distinct.values())
