"""Cross-attention memory: what a decoder looks at, kept once a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from descant.core.rows import index_rows

__all__ = ["CrossAttentionCache"]


def _pad_dim(block: Tensor, size: int, dim: int) -> Tensor:
    """A block with zeros behind along `dim` up to `size`."""
    short = size - block.shape[dim]
    if short <= 0:
        return block
    shape = list(block.shape)
    shape[dim] = short
    return torch.cat((block, block.new_zeros(shape)), dim)


def _concat_padded(first: Tensor, second: Tensor) -> Tensor:
    """Two blocks one below the other, the shorter lines padded [B, S, ...]."""
    if first.ndim == 1:
        return torch.cat((first, second))
    size = max(first.shape[1], second.shape[1])
    return torch.cat((_pad_dim(first, size, 1), _pad_dim(second, size, 1)))


class CrossAttentionCache:
    """Encoder outputs, their masks, and each layer's keys and values, one line a request.

    Rows of a request read the same line: as a view where all rows are of one request, or each of its
    own, otherwise gathered for the layer at hand and gone after it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._sorted_entries: tuple[Tensor, Tensor] | None = None  # requests in order, and their lines
        self._mask: Tensor | None = None  # [M, T] of what the encoder read
        self._other_outputs: dict[str, Tensor] = {}  # [M, ...] what else the encoder said, by name
        self._encoder_states: Tensor | None = (
            None  # [M, S, D], only while a request waits for its first forward
        )
        self._keys: dict[int, Tensor] = {}  # [M, H, S, D] a layer
        self._values: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        """How many layers have been written."""
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        """What keys and values take in memory."""
        return sum(block.nbytes for store in (self._keys, self._values) for block in store.values())

    def add_requests(
        self, requests: Sequence[int], states: Tensor, mask: Tensor, beside: Mapping[str, Tensor]
    ) -> None:
        """Take new requests' encoder outputs [B, S, D], mask [B, T], and what else there is a line each."""
        first = 0
        if self._mask is None or not self._entries:
            self._entries, self._mask, self._encoder_states = {}, mask, states
            self._other_outputs = dict(beside)
            self._keys, self._values = {}, {}
        else:
            assert self._encoder_states is not None
            first = len(self._mask)  # lines of requests that have left may still be among them
            self._mask = _concat_padded(self._mask, mask)
            self._encoder_states = _concat_padded(self._encoder_states, states)
            self._other_outputs = {
                name: _concat_padded(self._other_outputs[name], value) for name, value in beside.items()
            }
        self._sorted_entries = None
        self._entries.update({request: first + at for at, request in enumerate(requests)})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget requests; their lines go when fewer than half are in use."""
        for request in requests:
            self._entries.pop(request, None)
        self._sorted_entries = None
        if self._mask is None or 2 * len(self._entries) > len(self._mask):
            return
        keep = torch.tensor(list(self._entries.values()), dtype=torch.long)
        self._entries = {request: at for at, request in enumerate(self._entries)}
        self._mask = index_rows(self._mask, keep)
        self._encoder_states = (
            None if self._encoder_states is None else index_rows(self._encoder_states, keep)
        )
        self._other_outputs = {name: index_rows(value, keep) for name, value in self._other_outputs.items()}
        for store in (self._keys, self._values):
            for layer, block in store.items():
                store[layer] = index_rows(block, keep)  # each layer's on its own device

    def entry_index(self, requests: Tensor) -> Tensor | None:
        """The line of each row's request, for `requests` [R] (host); None where row `i` reads line `i`."""
        assert self._mask is not None
        if self._sorted_entries is None:  # asked every step, and changes when a request comes or goes
            known = torch.tensor(sorted(self._entries), dtype=torch.long)
            held = torch.tensor([self._entries[one] for one in known.tolist()], dtype=torch.long)
            self._sorted_entries = known, held
        known, held = self._sorted_entries
        lines = held[torch.searchsorted(known, requests)]
        if len(lines) == len(self._mask) and torch.equal(lines, torch.arange(len(lines))):
            return None
        return lines

    def mask(self, lines: Tensor | None) -> Tensor:
        """The encoder mask of each row [R, S]."""
        assert self._mask is not None
        return self._gather_rows(self._mask, lines)

    def encoder_states(self, lines: Tensor | None) -> Tensor:
        """The encoder output of each row [R, S, D]."""
        assert self._encoder_states is not None
        return self._gather_rows(self._encoder_states, lines)

    def other_outputs(self, lines: Tensor | None) -> dict[str, Tensor]:
        """What else the encoder said, for each row [R, ...]."""
        return {name: self._gather_rows(value, lines) for name, value in self._other_outputs.items()}

    def keys(self, layer: int, lines: Tensor | None) -> Tensor:
        """One layer's keys for each row [R, H, S, D]."""
        return self._gather_rows(self._keys[layer], lines)

    def values(self, layer: int, lines: Tensor | None) -> Tensor:
        """One layer's values for each row [R, H, S, D]."""
        return self._gather_rows(self._values[layer], lines)

    def write(self, layer: int, key: Tensor, value: Tensor, lines: Tensor | None) -> None:
        """Keep one layer's keys and values of requests at their first forward [B, H, S, D]."""
        assert self._encoder_states is not None
        count, size = self._encoder_states.shape[:2]
        for store, block in ((self._keys, key), (self._values, value)):
            if lines is None:
                store[layer] = block
                continue
            old = store.get(layer)
            grown = block.new_zeros(count, block.shape[1], size, block.shape[3])
            if old is not None:
                grown[: len(old), :, : old.shape[2]] = old
            grown[lines.to(block.device), :, : block.shape[2]] = block
            store[layer] = grown

    def _gather_rows(self, block: Tensor, lines: Tensor | None) -> Tensor:
        if lines is None:
            return block
        if bool((lines == lines[0]).all()):
            at = int(lines[0])
            return block[at : at + 1].expand(len(lines), *block.shape[1:])
        return block.index_select(0, lines.to(block.device, non_blocking=True))
