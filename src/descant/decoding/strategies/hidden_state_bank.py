"""The hidden states of contrastive search: collected from forwards, stored as unit vectors per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.core.records import ForwardOutput
from descant.core.rows import index_rows
from descant.errors import UnsupportedModel

__all__ = ["HiddenStateBank", "last_hidden_states"]


class HiddenStateBank:
    """The hidden states of all positions of each request, as unit vectors [M, C, D]."""

    def __init__(self) -> None:
        self._bank: Tensor | None = None  # [M, C, D]
        self._lengths = np.zeros(0, dtype=np.int64)  # [M]
        self._requests = np.zeros(0, dtype=np.int64)  # [M]

    def add(self, request: int, states: Tensor) -> None:
        """Add a request with its states [T, D]."""
        unit = torch.nn.functional.normalize(states.float(), dim=-1)
        size = len(unit)
        if self._bank is None or not len(self._requests):
            self._bank = unit.new_zeros(1, size + 64, unit.shape[1])
        else:
            self._bank = torch.cat((self._bank, torch.zeros_like(self._bank[:1])))
        self._requests = np.append(self._requests, request)
        self._lengths = np.append(self._lengths, size)
        self._ensure_capacity(size)
        self._bank[-1, :size] = unit

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the states of now: later ones are written behind them."""
        return partial(self._restore, self._bank, self._lengths.copy(), self._requests)

    def _restore(self, bank: Tensor | None, lengths: Array, requests: Array) -> None:
        self._bank, self._lengths, self._requests = bank, lengths, requests

    def remove(self, request: int) -> None:
        """Remove a request."""
        keep = self._requests != request
        if self._bank is None or keep.all():
            return
        self._requests, self._lengths = self._requests[keep], self._lengths[keep]
        self._bank = index_rows(self._bank, torch.from_numpy(np.flatnonzero(keep))) if keep.any() else None

    def max_similarity(self, requests: Array, states: Tensor) -> Tensor:
        """The largest cosine similarity of each unit vector [B, k, D] with its request's states [B, k]."""
        bank, indices = self._bank_rows(requests)
        lengths = self._lengths[indices]
        bank = bank[:, : int(lengths.max())]
        similarity = torch.bmm(states, bank.transpose(1, 2))
        is_stored = torch.arange(bank.shape[1]) < torch.from_numpy(lengths)[:, None]
        return similarity.masked_fill(~is_stored.to(similarity.device)[:, None], -torch.inf).amax(-1)

    def append(self, requests: Array, states: Tensor) -> None:
        """Append one position to each request [B, D]."""
        if not len(requests):
            return
        indices = self._bank_indices(requests)
        self._ensure_capacity(int(self._lengths[indices].max()) + 1)
        assert self._bank is not None
        positions = torch.from_numpy(np.stack((indices, self._lengths[indices]))).to(self._bank.device)
        self._bank[positions[0], positions[1]] = states
        self._lengths[indices] += 1

    def _bank_indices(self, requests: Array) -> Array:
        order = np.argsort(self._requests)
        return np.asarray(order[np.searchsorted(self._requests, requests, sorter=order)])

    def _bank_rows(self, requests: Array) -> tuple[Tensor, Array]:
        """The bank reordered to `requests`, and their indices in it."""
        assert self._bank is not None
        indices = self._bank_indices(requests)
        if len(indices) == len(self._requests) and (indices == np.arange(len(indices))).all():
            return self._bank, indices
        return index_rows(self._bank, torch.from_numpy(indices)), indices

    def _ensure_capacity(self, size: int) -> None:
        assert self._bank is not None
        capacity = self._bank.shape[1]
        if capacity < size:
            new_capacity = max(size + 64, capacity + capacity // 2)
            self._bank = torch.nn.functional.pad(self._bank, (0, 0, 0, new_capacity - capacity))


def last_hidden_states(output: ForwardOutput, rows: int) -> list[Tensor]:
    """The last layer's states at each row's fed positions, drafts included [T, D]."""
    names = ("hidden_states", "decoder_hidden_states")
    by_row: dict[int, Tensor] = {}
    for states in output.states:
        layers: Any = next((states[name] for name in names if states.get(name) is not None), None)
        if layers is None:
            raise UnsupportedModel(
                "contrastive search needs hidden states, but the model does not return them"
            )
        last_layer, fed_lengths = layers[-1], states["fed_length"].tolist()
        for position, row in enumerate(states["rows"].tolist()):
            by_row[row] = last_layer[position, : fed_lengths[position]]
    index: Sequence[int] = range(rows) if output.row_index is None else output.row_index.tolist()
    return [by_row[row] for row in index]
