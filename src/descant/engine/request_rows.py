"""The rows of admitted requests, and how they join those that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from descant.core.context import RowParams, columns_from_rows, row_params
from descant.core.rows import Rows
from descant.engine.running_requests import RunningRequests

__all__ = ["join_rows", "new_rows", "restored_rows"]

_MAX_NEW_TOKENS_ALLOCATED: Final = 256  # columns of the token table beyond the prompts; it grows later


def new_rows(running: RunningRequests, numbers: Sequence[int], device: torch.device) -> Rows:
    """One row for each of these running requests: its prompt, nothing of it cached."""
    resolved = [running.requests[number].resolved for number in numbers]
    prompts = [one.prompt for one in resolved]
    length = torch.tensor([prompt.shape[0] for prompt in prompts])
    params = RowParams(columns_from_rows([running.requests[number].row_values() for number in numbers]))
    max_new = int((params["max_length"] - length).max())
    width = int(length.max()) + min(max_new, _MAX_NEW_TOKENS_ALLOCATED)
    on_device = [prompt.to(device, non_blocking=True) for prompt in prompts]
    padded = torch.nn.utils.rnn.pad_sequence(on_device, batch_first=True)
    tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    tokens[:, : padded.shape[1]] = padded
    zeros = torch.zeros_like(length)
    return Rows(
        tokens,
        length=length,
        cached_length=zeros,
        offset=torch.tensor([one.offset for one in resolved]),
        prompt_length=length.clone(),
        request=torch.tensor(numbers),
        slot=zeros.clone(),
        columns={"params": params, **running.new_columns(len(prompts), params, prompts)},
    )


def restored_rows(running: RunningRequests, rows: Rows, others: Sequence[str] = ()) -> Rows:
    """Rows that have left a table, with the columns that it needs now; `others` are kept too."""
    needed = running.new_columns(len(rows), row_params(rows))
    names = needed.keys() | {"params", *others}
    columns = {name: value for name, value in rows.columns.items() if name in names}
    return rows.replace(columns={**needed, **columns})


def join_rows(running: RunningRequests, rows: Rows, new: Rows) -> Rows:
    """The rows of a table and new ones; the former get the columns that only the new ones bring."""
    columns = dict(rows.columns)
    if not new.columns.keys() <= columns.keys():
        columns = {**running.new_columns(len(rows), row_params(rows)), **columns}
    # Columns that no running request needs any more are dropped.
    return rows.replace(columns={name: columns[name] for name in new.columns}).cat(new)
