"""Chance: torch's own stream for a seeded call, or a stream of its own for every seeded row.

A token is drawn by the exponential race: divide each probability by an independent exponential
variable and take the largest; the largest `k` are `k` draws without replacement. torch.multinomial
draws just so, which is why the same torch seed gives the same tokens as transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.counter_rng import UINT32_MASK, counter_bits, murmur_mix
from descant.core.rows import Rows, index_rows

__all__ = ["SamplingNoise", "keyed_exponential"]


def keyed_exponential(
    seed: Tensor, slot: Tensor, position: Tensor, size: int, device: torch.device
) -> Tensor:
    """Exponential variables that depend on nothing but (seed, slot, position, index) [R, size].

    The first three are on the host [R]. Being counters and not a sequence, they are the same whoever
    else is in the batch, in whatever order, on whatever device.
    """
    first = counter_bits(seed, slot, position)
    second = murmur_mix((first + 0x2545F491) & UINT32_MASK)
    first, second = (part[:, None].to(device, non_blocking=True) for part in (first, second))
    index = torch.arange(size, device=device) * 0x9E3779B1
    bits = murmur_mix(murmur_mix((index + first) & UINT32_MASK) ^ second)
    return -torch.log1p(-(bits.to(torch.float32) + 0.5) * 2.0**-32)


class SamplingNoise:
    """The noise of a table: rows with a seed draw from their own stream, the others from torch's.

    Torch's stream is drawn for every line of the admitted batch, also for rows that have ended, so
    that a row's luck does not depend on when its neighbours end; transformers does the same.
    """

    def __init__(self) -> None:
        self.num_rows = 0  # how many lines the call that draws from torch's stream has

    def draw(self, rows: Rows, size: int) -> Tensor:
        """One line of `size` exponential variables for each row [R, size]."""
        params = row_params(rows)
        seed, device = params["seed"], rows.tokens.device
        shared = seed < 0
        if not bool(shared.any()):
            return keyed_exponential(seed, rows.slot, rows.position, size, device)
        line = params["noise_row"] + rows.slot
        stream = torch.empty(self.num_rows, size, device=device).exponential_()
        if bool(shared.all()):
            return stream if torch.equal(line, torch.arange(self.num_rows)) else index_rows(stream, line)
        noise = keyed_exponential(seed, rows.slot, rows.position, size, device)
        here = shared.nonzero().squeeze(1)
        return noise.index_copy(0, here.to(device), index_rows(stream, line[here]))
