"""The ledger: what every token of every row had for a probability, kept in a column that follows the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.records import Logprobs, Observation, Proposal, Selection
from descant.core.rows import Rows, concat_padded, index_rows

__all__ = ["LogprobsColumn", "LogprobsRecorder"]


@dataclass(frozen=True)
class LogprobsColumn:
    """The column: for each new token of each row its log-probabilities and the likeliest alternatives.

    What lies beyond a row's new tokens is rubbish. All of it stays on the device until a sequence ends.
    """

    raw: Tensor  # [R, C] before the processors
    processed: Tensor  # [R, C] after them
    top: Tensor  # [R, C, n] the likeliest tokens before them
    top_raw: Tensor  # [R, C, n]
    top_processed: Tensor  # [R, C, n]
    is_per_request: ClassVar[bool] = False

    @classmethod
    def empty(cls, rows: int, count: int, device: torch.device) -> LogprobsColumn:
        """Of rows without new tokens, with `count` alternatives."""
        line = torch.zeros(rows, 16, device=device)
        block = torch.zeros(rows, 16, count, device=device)
        return cls(line, line.clone(), block.long(), block.clone(), block.clone())

    def tensors(self) -> tuple[Tensor, ...]:
        """The five tables."""
        return self.raw, self.processed, self.top, self.top_raw, self.top_processed

    def take(self, parents: Tensor) -> Self:
        """The pages of the new rows."""
        return type(self)(*(index_rows(part, parents) for part in self.tensors()))

    def cat(self, other: Self) -> Self:
        """These rows' pages with another table's below."""
        both = zip(self.tensors(), other.tensors(), strict=True)
        return type(self)(*(concat_padded(mine, theirs) for mine, theirs in both))

    def write(self, at: Tensor, entries: tuple[Tensor, ...]) -> LogprobsColumn:
        """These pages, which nobody else holds, with entries [R, T, ...] from the places `at` (host) on."""
        wide = entries[0].shape[1]
        need = int(at.max()) + wide if len(at) else 0
        place = at.to(self.raw.device, non_blocking=True)[:, None] + torch.arange(
            wide, device=self.raw.device
        )
        new = []
        for part, entry in zip(self.tensors(), entries, strict=True):
            if need > part.shape[1]:
                more = part.new_zeros(
                    len(part), max(need, 2 * part.shape[1]) - part.shape[1], *part.shape[2:]
                )
                part = torch.cat((part, more), 1)
            part[torch.arange(len(part), device=place.device)[:, None], place] = entry
            new.append(part)
        return LogprobsColumn(*new)


class LogprobsRecorder:
    """Writes the pages of rows whose request asks for `logprobs`, and hands them to what ended."""

    column_name = "token_logprobs"

    def observe(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with every new token entered."""
        rows = seen.rows
        pages = rows.columns[self.column_name]
        assert isinstance(pages, LogprobsColumn)
        laws = (seen.logits.log_softmax(-1), seen.scores.log_softmax(-1))  # [R, K + 1, V]
        count, depth = len(selection.tokens), pages.top.shape[2]
        parents = torch.arange(count) if selection.parents is None else selection.parents
        place = (rows.length - rows.prompt_length)[parents]
        new = _new_tokens(proposal, selection, parents)
        entries = _logprob_entries(*laws, parents, new, depth)
        columns = {**selection.columns, self.column_name: pages.take(parents).write(place, entries)}
        for row, ended in selection.finished_sequences:
            # Its last tokens are not in the row yet, unless they were tentative there.
            more = len(ended.tokens) - int(rows.length[row] - rows.prompt_length[row])
            last = ended.tokens[len(ended.tokens) - more :].to(new.device)
            entry = _logprob_entries(*laws, torch.tensor([row]), last[None], depth)
            ended.logprobs = _sequence_logprobs(rows, pages, row, entry)
        emitted = selection.emitted
        if emitted is not None:
            whence = torch.arange(len(emitted.token)) if emitted.row is None else emitted.row
            tokens = emitted.token.to(new.device)
            now = (rows.length - rows.prompt_length)[whence]
            at = (
                now - 1
                if emitted.already_appended
                else now
                if emitted.new_index is None
                else emitted.new_index
            )
            found = [
                _emitted_logprobs(law, page, whence, (at, now), tokens)
                for law, page in zip(laws, (pages.raw, pages.processed), strict=True)
            ]
            both = torch.stack(found).cpu()
            emitted = emitted._replace(raw=both[0], processed=both[1])
        return selection._replace(columns=columns, emitted=emitted)


def _new_tokens(proposal: Proposal, selection: Selection, parents: Tensor) -> Tensor:
    """The new tokens of each new row [R', K + 1]: its drafts up to those accepted, and its token."""
    tokens = selection.tokens[:, None]
    accepted = selection.accepted
    if proposal.drafts is None or accepted is None or int(accepted.max() if len(accepted) else 0) <= 0:
        return tokens
    wide = int(accepted.max())
    run = torch.cat((index_rows(proposal.drafts[:, :wide], parents), tokens), 1)
    return run.scatter(1, accepted.clamp(min=0).to(run.device)[:, None], tokens)


def _logprob_entries(
    raw: Tensor, processed: Tensor, rows: Tensor, run: Tensor, count: int
) -> tuple[Tensor, ...]:
    """What is entered for tokens [N, T], one after the other, after the fed rows `rows` [N]."""
    wide = run.shape[1]
    mine, shaped = (index_rows(law[:, :wide], rows) for law in (raw, processed))
    top_raw, top = mine.topk(min(count, mine.shape[-1]))
    own = [law.gather(2, run[..., None])[..., 0] for law in (mine, shaped)]
    return own[0], own[1], top, top_raw, shaped.gather(2, top)


def _emitted_logprobs(
    law: Tensor, page: Tensor, rows: Tensor, places: tuple[Tensor, Tensor], tokens: Tensor
) -> Tensor:
    """The log-probability of each token [N] of its row [N]: one now chosen, or one written down."""
    at, now = places
    device = law.device
    slot = (at - now).clamp(min=0)
    new = law[rows.to(device, non_blocking=True), slot.to(device, non_blocking=True), tokens]
    if bool((at >= now).all()):
        return new
    old = page[rows.to(device), at.clamp(max=page.shape[1] - 1).to(device)]
    return torch.where((at >= now).to(device), new, old)


def _sequence_logprobs(
    rows: Rows, pages: LogprobsColumn, row: int, last: tuple[Tensor, ...]
) -> Logprobs | None:
    """A row's entries and the last ones [1, T, ...], on the host; None where its request asks for none."""
    size = int(rows.length[row] - rows.prompt_length[row])
    wanted = int(row_params(rows)["logprobs"][row])
    if wanted < 0:
        return None
    whole = [
        torch.cat((part[row, :size], entry[0])).cpu()
        for part, entry in zip(pages.tensors(), last, strict=True)
    ]
    raw, processed, top, top_raw, top_processed = whole
    return Logprobs(raw, processed, top[:, :wanted], top_raw[:, :wanted], top_processed[:, :wanted])
