"""Token timestamps from cross-attention by dynamic time warping (Sakoe and Chiba, 1978)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from descant.api.whisper.fallback import WindowResult
from descant.core.interfaces import Array

__all__ = ["TimestampAligner", "dynamic_time_warping"]


@dataclass(frozen=True)
class TimestampAligner:
    """Computes token times from the alignment heads."""

    heads: Sequence[tuple[int, int]]  # pairs of layer and head
    median_filter_width: int  # odd, in encoder positions
    seconds_per_position: float  # of the encoder

    def token_times(self, result: WindowResult, num_positions: int | None) -> Tensor:
        """The start of each token in seconds from the start of the window [T].

        Only the first `num_positions` encoder positions are audio; None: all.
        """
        count = len(result.tokens)
        # The last token was not fed, so it has no attention.
        num_fed = result.length_with_eos - 1
        output = torch.zeros(count)
        if num_fed <= 0:
            return output
        attention = self._alignment_attention(result, num_fed)
        attention = attention if num_positions is None else attention[..., : max(num_positions, 1)]
        starts = dynamic_time_warping(-self._normalize_attention(attention).double().numpy())
        times = torch.tensor(starts * self.seconds_per_position, dtype=torch.float32)
        output[: min(num_fed, count)] = times[:count]
        output[num_fed:] = times[-1]
        return output

    def _alignment_attention(self, result: WindowResult, num_fed: int) -> Tensor:
        """The attention of the alignment heads for each token that was fed [H, T, S]."""
        attention, output = result.output["cross_attentions"], result.output
        beams = output["beam_indices"][result.row].tolist() if "beam_indices" in output else None
        steps = []
        for step in range(1, num_fed + 1):
            row = result.row if beams is None or beams[step] < 0 else beams[step]
            steps.append(torch.stack([attention[step][layer][row, head, 0] for layer, head in self.heads]))
        return torch.stack(steps, 1).float().cpu()

    def _normalize_attention(self, attention: Tensor) -> Tensor:
        """The mean of the heads, each standardized over tokens and median-filtered over time [T, S]."""
        deviation = attention.std(-2, keepdim=True, unbiased=False)
        normalized = (attention - attention.mean(-2, keepdim=True)) / deviation
        half = self.median_filter_width // 2
        if normalized.shape[-1] > half:
            padded = torch.nn.functional.pad(normalized, (half, half, 0, 0), mode="reflect")
            normalized = padded.unfold(-1, self.median_filter_width, 1).sort(-1).values[..., half]
        return normalized.mean(0)


def dynamic_time_warping(cost: Array) -> Array:
    """The first column of each row on the cheapest monotonic path [T] through costs [T, S].

    The table is filled by diagonals, as a cell depends on the two diagonals before only.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0.0
    # The predecessor of each cell: 0 the diagonal one, 1 the row before, 2 the column before.
    previous = np.full((rows + 1, columns + 1), 2, dtype=np.int8)
    previous[1:, 0] = 1
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, above, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        choice = np.where((both < above) & (both < left), 0, np.where((above < both) & (above < left), 1, 2))
        minimum = np.choose(choice, (both, above, left))
        total[row, column] = cost[row - 1, column - 1] + minimum
        previous[row, column] = choice
    starts = np.zeros(rows, dtype=np.int64)
    row, column = rows, columns
    while row > 0 or column > 0:
        if row > 0:
            starts[row - 1] = max(column - 1, 0)
        step = previous[row, column]
        row, column = row - (step != 2), column - (step != 1)
    return starts
