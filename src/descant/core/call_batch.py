"""The rows of a call at fixed indices, for user code that keeps state by the index of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context, row_params
from descant.core.rows import Rows, index_rows

__all__ = ["BatchPart", "CallBatches"]


class BatchPart(NamedTuple):
    """Some lines of a context, as user code is shown them in one call."""

    lines: Tensor | None  # [N] (host) which lines; None: all
    input_ids: Tensor  # [M, W] padded on the left; rows that have ended are padded on the right
    row_of_line: Tensor | None = None  # [N] (host) the shown row of each line; None: line `i` is row `i`
    line_of_row: Tensor | None = None  # [M] (host) the line that a shown row repeats, -1 if it has ended

    def expand(self, values: Tensor) -> Tensor:
        """Values [N, ...] of the lines as those of the shown rows [M, ...]; 0 for rows that have ended."""
        if self.line_of_row is None:
            return values.clone()
        has_ended = (self.line_of_row < 0).to(values.device)
        shown = index_rows(values, self.line_of_row.clamp(min=0))
        return shown.masked_fill_(has_ended.view(-1, *[1] * (values.ndim - 1)), 0)

    def select(self, values: Tensor) -> Tensor:
        """Values [M, ...] of the shown rows as those of the lines [N, ...]."""
        return values if self.row_of_line is None else index_rows(values, self.row_of_line)


class CallBatches:
    """Arranges the running rows of each call as the batch that the call began with.

    A row of a call has one index from the first step on. When it ends, it stays in what is shown, with its
    final tokens and then the pad token, as in transformers. A prompt with several sequences is shown as that
    many rows from the first step on. Rows that are not part of such a batch, those of beam search and of
    drafts among them, are shown as they are, in groups of equal width.
    """

    def __init__(self) -> None:
        self._ended: dict[int, dict[int, Tensor]] = {}  # by batch and row: the final ids [L]

    def record_finished(self, rows: Rows, emitted: Any) -> None:
        """Keep the final ids of the rows that the tokens of a step (`Tokens`) end."""
        params: Mapping[str, Any] = row_params(rows).values
        if not emitted.finished or "batch_size" not in params:
            return
        for index, hypothesis in emitted.finished.items():
            fed_row = index if emitted.row is None else int(emitted.row[index])
            if int(params["batch_size"][fed_row]) < 2:
                continue
            length = int(rows.prompt_length[fed_row])
            padding = max(0, int(params["padded_width"][fed_row]) - length)
            left = rows.tokens.new_full((padding,), int(params["pad_token_id"][fed_row]))
            ids = (left, rows.tokens[fed_row, :length], hypothesis.tokens.to(rows.tokens.device))
            row = int(params["batch_row"][fed_row]) + int(emitted.slot[index])
            self._ended.setdefault(int(params["batch_id"][fed_row]), {})[row] = torch.cat(ids)

    def split(self, context: Context) -> list[BatchPart]:
        """The lines of a context in parts, each for one call of user code."""
        places = context.batch_places()
        if places is None:
            self._ended.clear()
            return _split_by_width(context, None)
        batch_id, row, size, copies = places
        self._ended = {key: rows for key, rows in self._ended.items() if key in batch_id}
        parts, others = [], np.flatnonzero(size < 2).tolist()
        for key in dict.fromkeys(batch_id[size > 1].tolist()):
            lines = np.flatnonzero((batch_id == key) & (size > 1))
            part = self._arrange(context, lines, (key, row[lines], int(size[lines[0]]), copies[lines]))
            if part is None:
                others += lines.tolist()
            else:
                parts.append(part)
        if others:
            parts += _split_by_width(context, torch.tensor(sorted(others)))
        return parts

    def _arrange(self, context: Context, lines: Any, place: tuple[int, Any, int, Any]) -> BatchPart | None:
        """The lines of one call as its whole batch; None if they are no batch of one width."""
        key, row, size, copies = place
        shown = np.repeat(row, copies) + np.concatenate([np.arange(count) for count in copies])
        part = context if len(lines) == context.num_lines else context.take(torch.from_numpy(lines))
        if len(set(shown.tolist())) < len(shown) or shown.max() >= size or part.num_widths > 1:
            return None
        index = None if part is context else torch.from_numpy(lines)
        ids = part.left_padded()
        if len(shown) == size and (shown == np.arange(size)).all() and len(row) == size:
            return BatchPart(index, ids)
        line_of_row = torch.full((size,), -1)
        line_of_row[torch.from_numpy(shown)] = torch.from_numpy(np.repeat(np.arange(len(row)), copies))
        result = index_rows(ids, line_of_row.clamp(min=0))
        ended = self._ended.get(key, {})
        pad = part.param("pad_token_id")[:1]
        for number in (line_of_row < 0).nonzero().squeeze(1).tolist():
            result[number] = pad[0]
            if number in ended:
                final = ended[number][: result.shape[1]]
                result[number, : len(final)] = final
        return BatchPart(index, result, torch.from_numpy(row.copy()), line_of_row)


def _split_by_width(context: Context, lines: Tensor | None) -> list[BatchPart]:
    """Running rows as they are, in groups of equal width."""
    part = context if lines is None else context.take(lines)
    parts = []
    for group in part.equal_width_groups():
        index = group if lines is None else lines if group is None else lines[group]
        ids = (part if group is None else part.take(group)).left_padded()
        parts.append(BatchPart(index, ids))
    return parts
