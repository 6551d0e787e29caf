"""The log-probabilities of every new token, recorded in a column that follows the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.records import Logprobs, Observation, Proposal, Selection, Tokens
from descant.core.rows import Rows, concat_padded, index_rows

__all__ = ["LogprobsColumn", "LogprobsRecorder"]

_INITIAL_CAPACITY = 16


@dataclass(frozen=True)
class LogprobsColumn:
    """For each new token of each row its log-probabilities and those of the most probable tokens.

    Entries beyond a row's new tokens are undefined. All tensors stay on the device until a sequence ends.
    """

    raw: Tensor  # [R, C] before the processors
    processed: Tensor  # [R, C] after them
    top: Tensor  # [R, C, n] the most probable tokens before them
    top_raw: Tensor  # [R, C, n]
    top_processed: Tensor  # [R, C, n]
    is_per_request: ClassVar[bool] = False

    @classmethod
    def empty(cls, rows: int, count: int, device: torch.device) -> LogprobsColumn:
        """The column of rows without new tokens, with `count` alternatives per token."""
        values = torch.zeros(rows, _INITIAL_CAPACITY, device=device)
        top = torch.zeros(rows, _INITIAL_CAPACITY, count, device=device)
        return cls(values, values.clone(), top.long(), top.clone(), top.clone())

    def tensors(self) -> tuple[Tensor, ...]:
        """The five tensors."""
        return self.raw, self.processed, self.top, self.top_raw, self.top_processed

    def take(self, parents: Tensor) -> Self:
        """The column of the new rows."""
        return type(self)(*(index_rows(part, parents) for part in self.tensors()))

    def cat(self, other: Self) -> Self:
        """This column followed by another table's."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return type(self)(*(concat_padded(first, second) for first, second in pairs))

    def write(self, start: Tensor, entries: tuple[Tensor, ...]) -> LogprobsColumn:
        """Write entries [R, T, ...] from the indices `start` (host) on, in place; return the column.

        The tensors must not be shared; the returned column has new ones where they had to grow.
        """
        width = entries[0].shape[1]
        need = int(start.max()) + width if len(start) else 0
        device = self.raw.device
        index = start.to(device, non_blocking=True)[:, None] + torch.arange(width, device=device)
        written = []
        for part, entry in zip(self.tensors(), entries, strict=True):
            capacity = part.shape[1]
            if need > capacity:
                more = part.new_zeros(len(part), max(need, 2 * capacity) - capacity, *part.shape[2:])
                part = torch.cat((part, more), 1)
            part[torch.arange(len(part), device=device)[:, None], index] = entry
            written.append(part)
        return LogprobsColumn(*written)


class LogprobsRecorder:
    """Records the log-probabilities of rows whose request sets `logprobs`."""

    column_name = "token_logprobs"

    def observe(self, observation: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the log-probabilities of every new token."""
        rows = observation.rows
        column = rows.columns[self.column_name]
        assert isinstance(column, LogprobsColumn)
        raw = observation.logits.log_softmax(-1)  # [R, K + 1, V]
        processed = observation.scores.log_softmax(-1)  # [R, K + 1, V]
        count = column.top.shape[2]
        parents = selection.parents
        if parents is None:
            parents = torch.arange(len(selection.tokens))
        num_new = rows.length - rows.prompt_length
        tokens = _new_tokens(proposal, selection, parents)
        entries = _logprob_entries(raw, processed, parents, tokens, count)
        written = column.take(parents).write(num_new[parents], entries)
        for row, sequence in selection.finished_sequences:
            # Its last tokens are not in the row yet, unless they were appended in an earlier step.
            num_last = len(sequence.tokens) - int(num_new[row])
            last = sequence.tokens[len(sequence.tokens) - num_last :].to(tokens.device)
            entry = _logprob_entries(raw, processed, torch.tensor([row]), last[None], count)
            sequence.logprobs = _sequence_logprobs(rows, column, row, entry)
        emitted = selection.emitted
        if emitted is not None:
            emitted = _with_logprobs(emitted, num_new, (raw, processed), column)
        columns = {**selection.columns, self.column_name: written}
        return selection._replace(columns=columns, emitted=emitted)


def _with_logprobs(
    emitted: Tokens, num_new: Tensor, logprobs: tuple[Tensor, Tensor], column: LogprobsColumn
) -> Tokens:
    """The emitted tokens with their log-probabilities; one device-to-host copy."""
    rows = torch.arange(len(emitted.token)) if emitted.row is None else emitted.row
    next_index = num_new[rows]
    index = next_index if emitted.new_index is None else emitted.new_index
    if emitted.already_appended:
        index = next_index - 1
    tokens = emitted.token.to(column.raw.device)
    values = [
        _emitted_logprobs(new, old, rows, (index, next_index), tokens)
        for new, old in zip(logprobs, (column.raw, column.processed), strict=True)
    ]
    both = torch.stack(values).cpu()
    return emitted._replace(raw=both[0], processed=both[1])


def _new_tokens(proposal: Proposal, selection: Selection, parents: Tensor) -> Tensor:
    """The new tokens of each new row [R', K + 1]: its accepted drafts and its token."""
    tokens = selection.tokens[:, None]
    accepted = selection.accepted
    if proposal.drafts is None or accepted is None or int(accepted.max() if len(accepted) else 0) <= 0:
        return tokens
    width = int(accepted.max())
    run = torch.cat((index_rows(proposal.drafts[:, :width], parents), tokens), 1)
    return run.scatter(1, accepted.clamp(min=0).to(run.device)[:, None], tokens)


def _logprob_entries(
    raw: Tensor, processed: Tensor, rows: Tensor, tokens: Tensor, count: int
) -> tuple[Tensor, ...]:
    """The entries of consecutive tokens [N, T] after the fed rows `rows` [N]."""
    width = tokens.shape[1]
    raw, processed = (index_rows(part[:, :width], rows) for part in (raw, processed))
    top_raw, top = raw.topk(min(count, raw.shape[-1]))
    own_raw, own_processed = (part.gather(2, tokens[..., None])[..., 0] for part in (raw, processed))
    return own_raw, own_processed, top, top_raw, processed.gather(2, top)


def _emitted_logprobs(
    logprobs: Tensor, recorded: Tensor, rows: Tensor, indices: tuple[Tensor, Tensor], tokens: Tensor
) -> Tensor:
    """The log-probability of each token [N] of its row [N]: of one chosen now, or as recorded before.

    `indices` are those of the tokens and of their rows' next tokens among the new ones [N] (host).
    """
    index, next_index = indices
    device = logprobs.device
    line = (index - next_index).clamp(min=0)
    new = logprobs[rows.to(device, non_blocking=True), line.to(device, non_blocking=True), tokens]
    is_new = index >= next_index
    if bool(is_new.all()):
        return new
    old = recorded[rows.to(device), index.clamp(max=recorded.shape[1] - 1).to(device)]
    return torch.where(is_new.to(device), new, old)


def _sequence_logprobs(
    rows: Rows, column: LogprobsColumn, row: int, last: tuple[Tensor, ...]
) -> Logprobs | None:
    """The entries of a row and its last ones [1, T, ...], on the host; None: it has no `logprobs`."""
    size = int(rows.length[row] - rows.prompt_length[row])
    count = int(row_params(rows)["logprobs"][row])
    if count < 0:
        return None
    parts = [
        torch.cat((part[row, :size], entry[0])).cpu()
        for part, entry in zip(column.tensors(), last, strict=True)
    ]
    raw, processed, top, top_raw, top_processed = parts
    return Logprobs(raw, processed, top[:, :count], top_raw[:, :count], top_processed[:, :count])
