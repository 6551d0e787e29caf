"""The log-probabilities of every new token, recorded in a column that follows the rows.

An entry is a block [1 + n, 3]: the token and its `n` alternatives, the most probable tokens before the
processors, each with its log-probability before and after these. Tokens below 2 ** 24 are exact as floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Self

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.records import Logprobs, Observation, Proposal, Selection, Support, Tokens
from descant.core.rows import Rows, index_rows, on_device

_INITIAL_CAPACITY = 16
SUPPORT_COLUMN: Final = "token_support"


class TokenSupport(NamedTuple):
    """The tokens that one token was chosen from, and its log-probability by the model among these."""

    token_ids: Tensor  # [N] int32 (host)
    logprob: float


@dataclass(frozen=True)
class SupportColumn:
    """The support of every new token of each row; entries beyond a row's new tokens are undefined."""

    entries: tuple[tuple[TokenSupport, ...], ...]
    is_per_request: ClassVar[bool] = False

    def take(self, parents: Tensor) -> Self:
        """The column of new rows: row `i` continues old row `parents[i]`."""
        return type(self)(tuple(self.entries[parent] for parent in parents.tolist()))

    def cat(self, other: Self) -> Self:
        """This column followed by another table's."""
        return type(self)((*self.entries, *other.entries))


def _token_supports(raw: Tensor, processed: Tensor, tokens: Tensor) -> list[TokenSupport]:
    """The support of tokens [N], each after a line of log-probabilities [N, V] before and after processors.

    It is copied to the host: of a distribution that no processor cuts it is the vocabulary.
    """
    kept = processed > -torch.inf
    total = raw.masked_fill(~kept, -torch.inf).logsumexp(-1)
    own = (raw.gather(1, tokens[:, None])[:, 0] - total).tolist()
    sizes = kept.sum(1).tolist()
    ids = kept.nonzero()[:, 1].to(torch.int32).cpu().split(sizes)
    return [TokenSupport(part.clone(), value) for part, value in zip(ids, own, strict=True)]


def _joined(entries: Sequence[TokenSupport]) -> Support:
    """The support of a sequence."""
    sizes = torch.tensor([0, *(len(entry.token_ids) for entry in entries)])
    ids = [entry.token_ids for entry in entries]
    return Support(
        torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int32),
        sizes.cumsum(0),
        torch.tensor([entry.logprob for entry in entries], dtype=torch.float32),
    )


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

    def supports(self, rows: Tensor, index: Tensor, tokens: Tensor) -> list[TokenSupport]:
        """The support of tokens [N] after `index` drafts [N] of fed rows [N] (host)."""
        device = tokens.device
        place = self._line_of[rows].to(device, non_blocking=True), index.to(device, non_blocking=True)
        return _token_supports(self.raw[place], self.processed[place], tokens)


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
                    block[:, 0, 1],
                    block[:, 0, 2],
                    top.long(),
                    top_raw,
                    top_processed,
                    _sequence_support(rows, row, logprobs, last, size),
                )
        emitted = selection.emitted
        if emitted is not None:
            emitted = _with_logprobs(emitted, logprobs, column, num_new, num_top)
        written = _write_new_tokens(column, logprobs, proposal, selection, (num_new, num_top))
        columns = {**selection.columns, self.column_name: written}
        if SUPPORT_COLUMN in rows.columns:
            columns[SUPPORT_COLUMN] = _next_supports(rows, logprobs, proposal, selection, num_new)
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


def _sequence_support(
    rows: Rows, row: int, logprobs: _StepLogprobs, last: Tensor, size: int
) -> Support | None:
    """The support of a sequence: the row's `size` new tokens, and its last ones; None: it is not wanted."""
    column = rows.columns.get(SUPPORT_COLUMN)
    if not isinstance(column, SupportColumn) or not int(row_params(rows)["logprobs_support"][row]):
        return None
    entries = column.entries[row][:size]
    index = torch.arange(len(last))
    return _joined([*entries, *logprobs.supports(torch.full_like(index, row), index, last)])


def _next_supports(
    rows: Rows, logprobs: _StepLogprobs, proposal: Proposal, selection: Selection, num_new: Tensor
) -> SupportColumn:
    """The column of the new rows, with the support of their new tokens."""
    column = rows.columns[SUPPORT_COLUMN]
    assert isinstance(column, SupportColumn)
    is_wanted = row_params(rows)["logprobs_support"].tolist()
    parents = torch.arange(len(selection.tokens)) if selection.parents is None else selection.parents
    tokens = _new_tokens(proposal, selection, parents)  # [R', K + 1]
    accepted = [0] * len(parents) if selection.accepted is None else selection.accepted.tolist()
    entries: list[tuple[TokenSupport, ...]] = []
    for child, (parent, count) in enumerate(zip(parents.tolist(), accepted, strict=True)):
        if not is_wanted[parent]:
            entries.append(())
            continue
        index = torch.arange(max(count, 0) + 1)
        new = logprobs.supports(torch.full_like(index, parent), index, tokens[child, : len(index)])
        entries.append((*column.entries[parent][: int(num_new[parent])], *new))
    return SupportColumn(tuple(entries))


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
