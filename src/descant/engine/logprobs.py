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

    def write(self, rows: Tensor, start: Tensor, entries: tuple[Tensor, ...]) -> LogprobsColumn:
        """Write entries [N, T, ...] of `rows` from the indices `start` on (host), in place; the column.

        The tensors must not be shared; the returned column has new ones where they had to grow.
        """
        width = entries[0].shape[1]
        need = int(start.max()) + width if len(start) else 0
        device = self.raw.device
        index = start.to(device, non_blocking=True)[:, None] + torch.arange(width, device=device)
        row_index = rows.to(device, non_blocking=True)[:, None]
        written = []
        for part, entry in zip(self.tensors(), entries, strict=True):
            capacity = part.shape[1]
            if need > capacity:
                more = part.new_zeros(len(part), max(need, 2 * capacity) - capacity, *part.shape[2:])
                part = torch.cat((part, more), 1)
            part[row_index, index] = entry
            written.append(part)
        return LogprobsColumn(*written)


class _StepLogprobs:
    """The log-probabilities of a step, for the fed rows whose request asks for them."""

    def __init__(self, observation: Observation, num_top: Tensor, count: int) -> None:
        logits, scores = observation.logits, observation.scores  # [R, K + 1, V]
        is_wanted = num_top >= 0  # [R] (host)
        self._line_of = is_wanted.cumsum(0) - 1  # [R] (host) the line of each wanted row below
        if not bool(is_wanted.all()):
            index = is_wanted.nonzero().squeeze(1)
            logits, scores = index_rows(logits, index), index_rows(scores, index)
        self.raw = logits.log_softmax(-1)  # [W, K + 1, V]
        self.processed = self.raw if scores is logits else scores.log_softmax(-1)
        self.top_raw, self.top = self.raw.topk(min(count, self.raw.shape[-1]))  # [W, K + 1, n]
        self.top_processed = self.processed.gather(2, self.top)

    def entries(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The entries of consecutive tokens [N, T] after the fed rows `rows` [N] (host)."""
        line, width = self._line_of[rows], tokens.shape[1]
        own = [
            index_rows(part[:, :width], line).gather(2, tokens[..., None])[..., 0]
            for part in (self.raw, self.processed)
        ]
        top = [index_rows(part[:, :width], line) for part in (self.top, self.top_raw, self.top_processed)]
        return (*own, *top)

    def entries_at(self, rows: Tensor, index: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The entries of single tokens [N] after `index` drafts [N] of the fed rows `rows` [N] (host)."""
        device = tokens.device
        place = self._line_of[rows].to(device, non_blocking=True), index.to(device, non_blocking=True)
        own = [part[(*place, tokens)] for part in (self.raw, self.processed)]
        return (*own, *(part[place] for part in (self.top, self.top_raw, self.top_processed)))


class LogprobsRecorder:
    """Records the log-probabilities of rows whose request sets `logprobs`."""

    column_name = "token_logprobs"

    def observe(self, observation: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the log-probabilities of every new token."""
        rows = observation.rows
        column = rows.columns[self.column_name]
        assert isinstance(column, LogprobsColumn)
        num_top = row_params(rows)["logprobs"]  # [R] (host); -1: none
        if not bool((num_top >= 0).any()):
            return selection  # others of the table ask for them; the column follows the rows
        logprobs = _StepLogprobs(observation, num_top, column.top.shape[2])
        num_new = rows.length - rows.prompt_length
        written = _write_new_tokens(column, logprobs, proposal, selection, (num_new, num_top))
        for row, sequence in selection.finished_sequences:
            if num_top[row] >= 0:
                # Its last tokens are not in the row yet, unless they were appended in an earlier step.
                num_last = len(sequence.tokens) - int(num_new[row])
                last = sequence.tokens[len(sequence.tokens) - num_last :].to(column.raw.device)
                entry = logprobs.entries(torch.tensor([row]), last[None])
                sequence.logprobs = _sequence_logprobs(rows, column, row, entry)
        emitted = selection.emitted
        if emitted is not None:
            emitted = _with_logprobs(emitted, logprobs, column, (num_new, num_top))
        columns = {**selection.columns, self.column_name: written}
        return selection._replace(columns=columns, emitted=emitted)


def _write_new_tokens(
    column: LogprobsColumn,
    logprobs: _StepLogprobs,
    proposal: Proposal,
    selection: Selection,
    of_rows: tuple[Tensor, Tensor],
) -> LogprobsColumn:
    """The column of the new rows, with their new tokens; `of_rows` are `num_new` and `num_top` [R]."""
    num_new, num_top = of_rows
    parents = selection.parents
    if parents is None:
        parents = torch.arange(len(selection.tokens))
    tokens = _new_tokens(proposal, selection, parents)
    written = column.take(parents)
    index = (num_top[parents] >= 0).nonzero().squeeze(1)
    if not len(index):
        return written
    if len(index) < len(parents):
        tokens, parents = index_rows(tokens, index), parents[index]
    return written.write(index, num_new[parents], logprobs.entries(parents, tokens))


def _with_logprobs(
    emitted: Tokens, logprobs: _StepLogprobs, column: LogprobsColumn, of_rows: tuple[Tensor, Tensor]
) -> Tokens:
    """The emitted tokens with their log-probabilities; one device-to-host copy.

    `of_rows` are the number of new tokens and of alternatives of each fed row [R] (host).
    """
    num_new, num_top = of_rows
    rows = torch.arange(len(emitted.token)) if emitted.row is None else emitted.row
    num_top = num_top[rows]
    wanted = (num_top >= 0).nonzero().squeeze(1)
    if not len(wanted):
        return emitted
    rows = rows[wanted]
    next_index = num_new[rows]
    index = next_index if emitted.new_index is None else emitted.new_index[wanted]
    if emitted.already_appended:
        index = next_index - 1
    tokens = emitted.token[wanted].to(column.raw.device)
    values = _emitted_entries(logprobs, column, rows, (index, next_index), tokens)
    parts = [part.float().reshape(len(wanted), -1) for part in values]  # a token is exact below 2 ** 24
    host = torch.cat(parts, 1).cpu()
    if len(wanted) < len(num_top):
        host = host.new_full((len(num_top), host.shape[1]), torch.nan).index_copy(0, wanted, host)
    top, top_raw, top_processed = host[:, 2:].tensor_split(3, 1)
    return emitted._replace(
        raw=host[:, 0],
        processed=host[:, 1],
        num_top=num_top,
        top=top.nan_to_num(-1).long(),
        top_raw=top_raw,
        top_processed=top_processed,
    )


def _new_tokens(proposal: Proposal, selection: Selection, parents: Tensor) -> Tensor:
    """The new tokens of each new row [R', K + 1]: its accepted drafts and its token."""
    tokens = selection.tokens[:, None]
    accepted = selection.accepted
    if proposal.drafts is None or accepted is None or int(accepted.max() if len(accepted) else 0) <= 0:
        return tokens
    width = int(accepted.max())
    run = torch.cat((index_rows(proposal.drafts[:, :width], parents), tokens), 1)
    return run.scatter(1, accepted.clamp(min=0).to(run.device)[:, None], tokens)


def _emitted_entries(
    logprobs: _StepLogprobs,
    column: LogprobsColumn,
    rows: Tensor,
    indices: tuple[Tensor, Tensor],
    tokens: Tensor,
) -> list[Tensor]:
    """The entries of each token [N] of its row [N]: of one chosen now, or as recorded before.

    `indices` are those of the tokens and of their rows' next tokens among the new ones [N] (host).
    """
    index, next_index = indices
    new = logprobs.entries_at(rows, (index - next_index).clamp(min=0), tokens)
    is_new = index >= next_index
    if bool(is_new.all()):
        return list(new)
    device = tokens.device
    place = rows.to(device), index.clamp(max=column.raw.shape[1] - 1).to(device)
    new_on_device = is_new.to(device)
    merged = []
    for fresh, recorded in zip(new, column.tensors(), strict=True):
        old = recorded[place]
        mask = new_on_device if old.ndim == 1 else new_on_device[:, None]
        merged.append(torch.where(mask, fresh, old))
    return merged


def _sequence_logprobs(rows: Rows, column: LogprobsColumn, row: int, last: tuple[Tensor, ...]) -> Logprobs:
    """The entries of a row and its last ones [1, T, ...], on the host."""
    size = int(rows.length[row] - rows.prompt_length[row])
    count = int(row_params(rows)["logprobs"][row])
    parts = [
        torch.cat((part[row, :size], entry[0])).cpu()
        for part, entry in zip(column.tensors(), last, strict=True)
    ]
    raw, processed, top, top_raw, top_processed = parts
    return Logprobs(raw, processed, top[:, :count], top_raw[:, :count], top_processed[:, :count])
