"""Sampling noise: torch's generator for a seeded call, or a stream of its own for every seeded row.

A token is drawn by the exponential race: divide each probability by an independent exponential variable and
take the largest; the largest `k` are `k` draws without replacement. torch.multinomial does the same, which
is why the same torch seed gives the same tokens as transformers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from descant.core.context import UINT32_MASK, counter_bits, murmur_mix, row_params
from descant.core.rows import Rows, index_rows

MAX_SEED = 2**62  # seeds that are drawn or derived are below it


def keyed_exponential(
    seed: Tensor, slot: Tensor, position: Tensor, size: int, device: torch.device
) -> Tensor:
    """Exponential variables that depend on nothing but (seed, slot, position, index) [R, size].

    The first three are on the host [R]. They are counter-based: the same in any batch, order or device.
    """
    keys = torch.stack(_row_keys(seed, slot, position)).to(device, non_blocking=True)[..., None]
    return _exponential(keys[0], keys[1], torch.arange(size, device=device))


def keyed_normal(seed: Tensor, slot: Tensor, position: Tensor, size: int) -> Tensor:
    """Normal variables that depend on nothing but (seed, slot, position, index) [R, size], in float64.

    All are on the host: a quantile may differ between devices in the last digits.
    """
    first, second = (part[:, None] for part in _row_keys(seed, slot, position))
    bits = _indexed_bits(first, second, torch.arange(size))
    normal: Tensor = torch.special.ndtri((bits.to(torch.float64) + 0.5) * 2.0**-32)
    return normal


class _SentKeys(NamedTuple):
    """The keys of some rows at this and the following positions, on a device."""

    rows: Tensor  # [2, R] seed and slot of each row (host)
    position: Tensor  # [R] the first position of each row (host)
    keys: Tensor  # [S, 2, R, 1] for each of these steps


_KEYS_SENT: Final = 32  # steps for which the keys are sent to a device at once


def _row_keys(seed: Tensor, slot: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The two keys of the variables of each row [R] (host)."""
    first = counter_bits(seed, slot, position)
    return first, torch.from_numpy(murmur_mix((first.numpy() + 0x2545F491) & UINT32_MASK))


def _exponential(first: Tensor, second: Tensor, index: Tensor) -> Tensor:
    """The variables with these indices, of rows with these keys."""
    bits = _indexed_bits(first, second, index)
    return -torch.log1p(-(bits.to(torch.float32) + 0.5) * 2.0**-32)


def _indexed_bits(first: Tensor, second: Tensor, index: Tensor) -> Tensor:
    """32 bits for each of these indices, of rows with these keys."""
    bits: Tensor = murmur_mix(murmur_mix((index * 0x9E3779B1 + first) & UINT32_MASK) ^ second)
    return bits


class SamplingNoise:
    """The noise of a table: seeded rows draw from their own stream, the others from torch's generator.

    torch's generator is advanced for every row of the admitted batch, also for rows that have ended, so
    that a row's noise does not depend on when its neighbours end; transformers does the same.
    """

    num_rows = 0  # rows of the call that draws from torch's generator
    _sent: _SentKeys | None = None

    def draw_at(self, rows: Rows, row: Tensor, index: Tensor) -> Tensor | None:
        """The variables of `draw` at these rows and indices [K] (host); None: one is of torch's generator."""
        seed = row_params(rows)["seed"]
        if bool((seed < 0).any()):
            return None
        first, second = _row_keys(seed, rows.slot, rows.position)
        return _exponential(first[row], second[row], index)

    def _device_keys(self, rows: Tensor, position: Tensor, device: torch.device) -> Tensor:
        """The keys [2, R, 1] of rows [2, R] (host) on a device; most steps find them there."""
        sent = self._sent
        if sent is not None and sent.keys.device == device and torch.equal(sent.rows, rows):
            steps = (position - sent.position).numpy()
            if 0 <= steps[0] < _KEYS_SENT and (steps == steps[0]).all():
                return sent.keys[steps[0]]
        ahead = [torch.stack(_row_keys(rows[0], rows[1], position + step)) for step in range(_KEYS_SENT)]
        keys = torch.stack(ahead).to(device, non_blocking=True)[..., None]
        self._sent = _SentKeys(rows, position.clone(), keys)
        return keys[0]

    def draw(self, rows: Rows, size: int) -> Tensor:
        """`size` exponential variables for each row [R, size]."""
        params = row_params(rows)
        seed, device = params["seed"], rows.tokens.device
        unseeded = seed < 0
        if not bool(unseeded.any()):
            if device.type == "cpu":
                return keyed_exponential(seed, rows.slot, rows.position, size, device)
            keys = self._device_keys(torch.stack((seed, rows.slot)), rows.position, device)
            return _exponential(keys[0], keys[1], torch.arange(size, device=device))
        noise_row = params["noise_row"] + rows.slot
        stream = torch.empty(self.num_rows, size, device=device).exponential_()
        if bool(unseeded.all()):
            in_order = torch.equal(noise_row, torch.arange(self.num_rows))
            return stream if in_order else index_rows(stream, noise_row)
        noise = keyed_exponential(seed, rows.slot, rows.position, size, device)
        index = unseeded.nonzero().squeeze(1)
        return noise.index_copy(0, index.to(device), index_rows(stream, noise_row[index]))
