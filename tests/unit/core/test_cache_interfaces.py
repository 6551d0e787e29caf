"""Where a forward writes: the rows and starts of a span on the host."""

from __future__ import annotations

import pytest
import torch

from descant.core.interfaces import KVSpan


@pytest.mark.parametrize(
    ("rows", "start", "expected"),
    [
        (None, 5, ([0, 1, 2], [5, 5, 5])),
        (None, [4, 5, 6], ([0, 1, 2], [4, 5, 6])),
        ([2, 0], 5, ([2, 0], [5, 5])),
        ([2, 0], [6, 4], ([2, 0], [6, 4])),
    ],
)
@pytest.mark.parametrize("on_host", [False, True])
def test_rows_and_starts_on_the_host(rows, start, expected, on_host):
    def place(values):
        """The values on the device; a tensor without data shows that the device is not read."""
        if not isinstance(values, list):
            return values
        return torch.empty(len(values), device="meta") if on_host else torch.tensor(values)

    span = KVSpan(
        rows=place(rows),
        start=place(start),
        width=1,
        read_length=7,
        host_rows=torch.tensor(rows) if on_host and rows else None,
        host_starts=torch.tensor(start) if on_host and isinstance(start, list) else None,
    )
    index, starts = span.on_host(3)
    assert (index.tolist(), starts.tolist()) == expected


@pytest.mark.parametrize(("start", "first"), [(0, True), (1, False), (torch.zeros(2), False)])
def test_a_first_write_starts_at_slot_zero_in_every_row(start, first):
    assert KVSpan(rows=None, start=start, width=2, read_length=2).is_first_write is first
