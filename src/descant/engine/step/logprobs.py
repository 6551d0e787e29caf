"""The log-probabilities of every new token, recorded in a column that follows the rows.

An entry is a block [1 + n, 3]: the token and its `n` alternatives, the most probable tokens before the
processors, each with its log-probability before and after these. Tokens below 2 ** 24 are exact as floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.records import Logprobs, Observation, Proposal, Selection, Tokens
from descant.core.rows import index_rows, on_device

_INITIAL_CAPACITY = 16


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
        top_raw, top = self.raw.topk(count)
        values = (top.to(top_raw.dtype), top_raw, self.processed.gather(2, top))
        self._top = torch.stack(values, -1)  # [W, K + 1, n, 3]

    def entries(self, rows: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
        """The entries [N, 1 + n, 3] of tokens [N] after `index` drafts [N] of fed rows [N] (host)."""
        device = tokens.device
        place = on_device(self._line_of[rows], device), on_device(index, device)
        raw, processed = self.raw[(*place, tokens)], self.processed[(*place, tokens)]
        own = torch.stack((tokens.to(raw.dtype), raw, processed), -1)
        return torch.cat((own[:, None], self._top[place]), 1)

    def run_entries(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The entries [N, T, 1 + n, 3] of consecutive tokens [N, T] after the fed rows [N] (host)."""
        count, width = tokens.shape
        lines, index = rows.repeat_interleave(width), torch.arange(width).repeat(count)
        entries = self.entries(lines, index, tokens.flatten())
        return entries.view(count, width, *entries.shape[1:])


class LogprobsRecorder:
    """Records the log-probabilities of rows whose request sets `logprobs`.

    Entries beyond a row's new tokens are undefined. All stay on the device until a sequence ends.
    """

    column_name = "token_logprobs"

    def new_column(self, rows: int, count: int, device: torch.device) -> Tensor:
        """The column [R, C, 1 + n, 3] of rows without new tokens, with `count` alternatives per token."""
        return torch.zeros(rows, _INITIAL_CAPACITY, 1 + count, 3, device=device)

    def observe(self, observation: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the log-probabilities of every new token."""
        rows = observation.rows
        column = rows.column(self.column_name)
        num_top = row_params(rows)["logprobs"]  # [R] (host); -1: none
        if not bool((num_top >= 0).any()):
            return selection  # others of the table ask for them; the column follows the rows
        logprobs = _StepLogprobs(observation, num_top, column.shape[2] - 1)
        num_new = rows.length - rows.prompt_length
        for row, sequence in selection.finished_sequences:
            if num_top[row] >= 0:
                # Its last tokens are not in the row yet, unless they were appended in an earlier step.
                size, count = int(num_new[row]), int(num_top[row])
                last = sequence.tokens[size:].to(column.device)
                entries = logprobs.run_entries(torch.tensor([row]), last[None])[0]
                block = torch.cat((column[row, :size], entries))[:, : 1 + count].cpu()
                top, top_raw, top_processed = block[:, 1:].unbind(-1)
                sequence.logprobs = Logprobs(
                    block[:, 0, 1], block[:, 0, 2], top.long(), top_raw, top_processed
                )
        emitted = selection.emitted
        if emitted is not None:
            emitted = _with_logprobs(emitted, logprobs, column, num_new, num_top)
        written = _write_new_tokens(column, logprobs, proposal, selection, (num_new, num_top))
        columns = {**selection.columns, self.column_name: written}
        return selection._replace(columns=columns, emitted=emitted)


def _write_new_tokens(
    column: Tensor,
    logprobs: _StepLogprobs,
    proposal: Proposal,
    selection: Selection,
    of_rows: tuple[Tensor, Tensor],
) -> Tensor:
    """The column of the new rows, with their new tokens; `of_rows` are `num_new` and `num_top` [R]."""
    num_new, num_top = of_rows
    parents = torch.arange(len(selection.tokens)) if selection.parents is None else selection.parents
    column = index_rows(column, parents)
    index = (num_top[parents] >= 0).nonzero().squeeze(1)
    if not len(index):
        return column
    tokens, parents = index_rows(_new_tokens(proposal, selection, parents), index), parents[index]
    start, width, capacity = num_new[parents], tokens.shape[1], column.shape[1]
    need = int(start.max()) + width
    if need > capacity:
        size = max(need, 2 * capacity) - capacity
        column = torch.cat((column, column.new_zeros(len(column), size, *column.shape[2:])), 1)
    place = start.to(column.device, non_blocking=True)[:, None] + torch.arange(width, device=column.device)
    column[on_device(index, column.device)[:, None], place] = logprobs.run_entries(parents, tokens)
    return column


def _new_tokens(proposal: Proposal, selection: Selection, parents: Tensor) -> Tensor:
    """The new tokens of each new row [R', K + 1]: its accepted drafts and its token."""
    tokens = selection.tokens[:, None]
    accepted = selection.accepted
    if proposal.drafts is None or accepted is None or int(accepted.max() if len(accepted) else 0) <= 0:
        return tokens
    width = int(accepted.max())
    run = torch.cat((index_rows(proposal.drafts[:, :width], parents), tokens), 1)
    return run.scatter(1, accepted.clamp(min=0).to(run.device)[:, None], tokens)


def _with_logprobs(
    emitted: Tokens, logprobs: _StepLogprobs, column: Tensor, num_new: Tensor, num_top: Tensor
) -> Tokens:
    """The emitted tokens with their log-probabilities; one device-to-host copy.

    `num_new` and `num_top` are the number of new tokens and of alternatives of each fed row [R] (host).
    """
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
    tokens = emitted.token[wanted].to(column.device)
    entries = logprobs.entries(rows, (index - next_index).clamp(min=0), tokens)
    is_new = index >= next_index
    if not bool(is_new.all()):  # some were chosen, and recorded, in an earlier step
        recorded = column[rows.to(column.device), index.clamp(max=column.shape[1] - 1).to(column.device)]
        entries = torch.where(is_new.to(column.device)[:, None, None], entries, recorded)
    host = entries.cpu()
    if len(wanted) < len(num_top):
        host = host.new_full((len(num_top), *host.shape[1:]), torch.nan).index_copy(0, wanted, host)
    top, top_raw, top_processed = host[:, 1:].unbind(-1)
    return emitted._replace(
        raw=host[:, 0, 1],
        processed=host[:, 0, 2],
        num_top=num_top,
        top=top.nan_to_num(-1).long(),
        top_raw=top_raw,
        top_processed=top_processed,
    )
