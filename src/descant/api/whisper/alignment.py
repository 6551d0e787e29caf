"""When each token was spoken: attention over the audio, warped in time (Sakoe and Chiba 1978)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.api.whisper.fallback import WindowResult

__all__ = ["TimestampAligner", "dynamic_time_warping"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TimestampAligner:
    """Finds the times of tokens by the attention heads that follow the speaker."""

    heads: Sequence[tuple[int, int]]  # layer and head
    median_filter_width: int  # width of the median filter over time, odd
    seconds_per_position: float  # for each position of the encoder

    def token_times(self, heard: WindowResult, positions: int | None) -> Tensor:
        """When each token begins, in seconds from the window's beginning, of `positions` of audio [T]."""
        count = len(heard.tokens)
        # The last token was never fed, so nobody knows what it looked at.
        known = heard.length_with_eos - 1
        out = torch.zeros(count)
        if known <= 0:
            return out
        looks = self._alignment_attention(heard, known)
        looks = looks if positions is None else looks[..., : max(positions, 1)]
        begins = dynamic_time_warping(-self._normalize_attention(looks).double().numpy())
        times = torch.tensor(begins * self.seconds_per_position, dtype=torch.float32)
        out[: min(known, count)] = times[:count]
        out[known:] = times[-1]
        return out

    def _alignment_attention(self, heard: WindowResult, known: int) -> Tensor:
        """What the aligned heads attended to while each token was fed [H, T, S]."""
        attention = heard.output["cross_attentions"]
        beams = heard.output["beam_indices"][heard.line].tolist() if "beam_indices" in heard.output else None
        steps = []
        for step in range(1, known + 1):
            line = heard.line if beams is None or beams[step] < 0 else beams[step]
            steps.append(torch.stack([attention[step][layer][line, head, 0] for layer, head in self.heads]))
        return torch.stack(steps, 1).float().cpu()

    def _normalize_attention(self, looks: Tensor) -> Tensor:
        """The mean of the heads, each measured against its own habits and smooth in time [T, S]."""
        spread = looks.std(-2, keepdim=True, unbiased=False)
        clear = (looks - looks.mean(-2, keepdim=True)) / spread
        side = self.median_filter_width // 2
        if clear.shape[-1] > side:
            wide = torch.nn.functional.pad(clear, (side, side, 0, 0), mode="reflect")
            clear = wide.unfold(-1, self.median_filter_width, 1).sort(-1).values[..., side]
        return clear.mean(0)


def dynamic_time_warping(cost: Array) -> Array:
    """The first column of each row on the cheapest path [T] through costs [T, S], which never goes back.

    The table is filled along its diagonals, every cell of which depends on the two before only.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0.0
    came = np.full((rows + 1, columns + 1), 2, dtype=np.int8)  # 0: from both before, 1: row, 2: column
    came[1:, 0] = 1
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, above, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        choice = np.where((both < above) & (both < left), 0, np.where((above < both) & (above < left), 1, 2))
        least = np.choose(choice, (both, above, left))
        total[row, column] = cost[row - 1, column - 1] + least
        came[row, column] = choice
    begins = np.zeros(rows, dtype=np.int64)
    row, column = rows, columns
    while row > 0 or column > 0:
        if row > 0:
            begins[row - 1] = max(column - 1, 0)
        step = came[row, column]
        row, column = row - (step != 2), column - (step != 1)
    return begins
