"""Cross-attention cache: encoder outputs and their keys and values, once per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from descant.core.rows import index_rows

__all__ = ["CrossAttentionCache"]


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


class CrossAttentionCache:
    """Encoder outputs, masks, and each layer's keys and values, one entry per request.

    All rows of a request read the same entry: as a view if all rows belong to one request, or if row `i`
    reads entry `i`; otherwise gathered for each layer and freed after it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._sorted_entries: tuple[Tensor, Tensor] | None = None  # sorted requests and their entries
        self._mask: Tensor | None = None  # [M, T] mask of the encoder input
        self._other_outputs: dict[str, Tensor] = {}  # [M, ...] further encoder outputs, by name
        self._encoder_states: Tensor | None = None  # [M, S, D]
        self._keys: dict[int, Tensor] = {}  # [M, H, S, D] by layer
        self._values: dict[int, Tensor] = {}

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
        first = 0
        if self._mask is None or not self._entries:
            self._entries, self._mask, self._encoder_states = {}, mask, states
            self._other_outputs = dict(others)
            self._keys, self._values = {}, {}
        else:
            assert self._encoder_states is not None
            first = len(self._mask)  # includes entries of removed requests
            self._mask = _concat_padded(self._mask, mask)
            self._encoder_states = _concat_padded(self._encoder_states, states)
            self._other_outputs = {
                name: _concat_padded(self._other_outputs[name], value) for name, value in others.items()
            }
        self._sorted_entries = None
        self._entries.update({request: first + index for index, request in enumerate(requests)})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests; entries are freed once at most half are in use."""
        for request in requests:
            self._entries.pop(request, None)
        self._sorted_entries = None
        if self._mask is None or 2 * len(self._entries) > len(self._mask):
            return
        keep = torch.tensor(list(self._entries.values()), dtype=torch.long)
        self._entries = {request: index for index, request in enumerate(self._entries)}
        self._mask = index_rows(self._mask, keep)
        self._encoder_states = (
            None if self._encoder_states is None else index_rows(self._encoder_states, keep)
        )
        self._other_outputs = {name: index_rows(value, keep) for name, value in self._other_outputs.items()}
        for store in (self._keys, self._values):
            for layer, block in store.items():
                store[layer] = index_rows(block, keep)  # each on the device of its layer

    def entry_index(self, requests: Tensor) -> Tensor | None:
        """The entry of each row's request, for `requests` [R] (host); None if row `i` reads entry `i`."""
        assert self._mask is not None
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
        assert self._mask is not None
        return self._gather_rows(self._mask, entries)

    def encoder_states(self, entries: Tensor | None) -> Tensor:
        """The encoder output of each row [R, S, D]."""
        assert self._encoder_states is not None
        return self._gather_rows(self._encoder_states, entries)

    def other_outputs(self, entries: Tensor | None) -> dict[str, Tensor]:
        """The further encoder outputs of each row [R, ...]."""
        return {name: self._gather_rows(value, entries) for name, value in self._other_outputs.items()}

    def keys(self, layer: int, entries: Tensor | None) -> Tensor:
        """One layer's keys for each row [R, H, S, D]."""
        return self._gather_rows(self._keys[layer], entries)

    def values(self, layer: int, entries: Tensor | None) -> Tensor:
        """One layer's values for each row [R, H, S, D]."""
        return self._gather_rows(self._values[layer], entries)

    def write(self, layer: int, key: Tensor, value: Tensor, entries: Tensor | None) -> None:
        """Store one layer's keys and values of requests at their first forward [B, H, S, D]."""
        assert self._encoder_states is not None
        count, size = self._encoder_states.shape[:2]
        grown = []
        for store, block in ((self._keys, key), (self._values, value)):
            if entries is not None:
                old, new = store.get(layer), block
                block = new.new_zeros(count, new.shape[1], size, new.shape[3])
                if old is not None:
                    block[: len(old), :, : old.shape[2]] = old
                block[entries.to(new.device), :, : new.shape[2]] = new
            grown.append(block)
        self._values[layer], self._keys[layer] = grown[1], grown[0]  # both or none

    def _gather_rows(self, block: Tensor, entries: Tensor | None) -> Tensor:
        if entries is None:
            return block
        if bool((entries == entries[0]).all()):
            entry = int(entries[0])
            return block[entry : entry + 1].expand(len(entries), *block.shape[1:])
        return block.index_select(0, entries.to(block.device, non_blocking=True))
