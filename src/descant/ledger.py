"""The ledger: what every token of every row had for a probability, kept in a column that follows the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from descant.context import params_of
from descant.rows import Rows, join, pick
from descant.step import Logprobs, Observation, Proposal, Selection

__all__ = ["Ledger", "Pages"]


@dataclass(frozen=True)
class Pages:
    """The column: for each new token of each row its log-probabilities and the likeliest alternatives.

    What lies beyond a row's new tokens is rubbish. All of it stays on the device until a sequence ends.
    """

    raw: Tensor  # [R, C] before the processors
    processed: Tensor  # [R, C] after them
    top: Tensor  # [R, C, n] the likeliest tokens before them
    top_raw: Tensor  # [R, C, n]
    top_processed: Tensor  # [R, C, n]
    constant: ClassVar[bool] = False

    @classmethod
    def empty(cls, rows: int, count: int, device: torch.device) -> Pages:
        """Of rows without new tokens, with `count` alternatives."""
        line = torch.zeros(rows, 16, device=device)
        block = torch.zeros(rows, 16, count, device=device)
        return cls(line, line.clone(), block.long(), block.clone(), block.clone())

    def parts(self) -> tuple[Tensor, ...]:
        """The five tables."""
        return self.raw, self.processed, self.top, self.top_raw, self.top_processed

    def take(self, parents: Tensor) -> Self:
        """The pages of the new rows."""
        return type(self)(*(pick(part, parents) for part in self.parts()))

    def cat(self, other: Self) -> Self:
        """These rows' pages with another table's below."""
        both = zip(self.parts(), other.parts(), strict=True)
        return type(self)(*(join(mine, theirs) for mine, theirs in both))

    def written(self, at: Tensor, entries: tuple[Tensor, ...]) -> Pages:
        """These pages, which nobody else holds, with one entry a row at the places `at` (host) [R]."""
        need = int(at.max()) + 1 if len(at) else 0
        place = at.to(self.raw.device, non_blocking=True)
        new = []
        for part, entry in zip(self.parts(), entries, strict=True):
            if need > part.shape[1]:
                more = part.new_zeros(
                    len(part), max(need, 2 * part.shape[1]) - part.shape[1], *part.shape[2:]
                )
                part = torch.cat((part, more), 1)
            part[torch.arange(len(part), device=place.device), place] = entry
            new.append(part)
        return Pages(*new)


class Ledger:
    """Writes the pages of rows whose request asks for `logprobs`, and hands them to what ended."""

    name = "ledger"

    def follow(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:  # noqa: ARG002
        """The selection with every new token entered."""
        rows = seen.rows
        pages = rows.columns[self.name]
        assert isinstance(pages, Pages)
        raw, processed = seen.logits.log_softmax(-1), seen.scores.log_softmax(-1)  # [R, K + 1, V]
        count = len(selection.tokens)
        parents = torch.arange(count) if selection.parents is None else selection.parents
        place = (rows.length - rows.prompt)[parents]
        entries = self._entries(raw, processed, parents, selection.tokens, pages.top.shape[2])
        columns = {**selection.columns, self.name: pages.take(parents).written(place, entries)}
        for row, ended in selection.retired:
            # Its last token is not in the row yet, unless it was tentative there.
            new = len(ended.tokens) - int(rows.length[row] - rows.prompt[row])
            last = ended.tokens[len(ended.tokens) - new :].to(raw.device)
            entry = self._entries(raw, processed, torch.full((new,), row), last, pages.top.shape[2])
            ended.logprobs = _page(rows, pages, row, entry)
        emitted = selection.emitted
        if emitted is not None:
            whence = torch.arange(len(emitted.token)) if emitted.row is None else emitted.row
            tokens = emitted.token.to(raw.device)
            now = (rows.length - rows.prompt)[whence]
            at = now - 1 if emitted.held else now if emitted.place is None else emitted.place
            found = [
                _spoken(law, page, whence, (at, now), tokens)
                for law, page in ((raw, pages.raw), (processed, pages.processed))
            ]
            both = torch.stack(found).cpu()
            emitted = emitted._replace(raw=both[0], processed=both[1])
        return selection._replace(columns=columns, emitted=emitted)

    def _entries(
        self, raw: Tensor, processed: Tensor, rows: Tensor, tokens: Tensor, count: int
    ) -> tuple[Tensor, ...]:
        """What is entered for `tokens` [N] after the fed rows `rows` [N]."""
        top_raw, top = pick(raw[:, 0], rows).topk(min(count, raw.shape[-1]))
        top_processed = pick(processed[:, 0], rows).gather(1, top)
        return _of(raw, rows, tokens), _of(processed, rows, tokens), top, top_raw, top_processed


def _of(law: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token [N] after its row [N]."""
    return law[rows.to(law.device, non_blocking=True), 0, tokens]


def _spoken(law: Tensor, page: Tensor, rows: Tensor, places: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
    """The log-probability of each token [N] of its row [N]: the one now chosen, or one written down."""
    at, now = places
    new = _of(law, rows, tokens)
    if torch.equal(at, now):
        return new
    device = law.device
    old = page[rows.to(device), at.clamp(max=page.shape[1] - 1).to(device)]
    return torch.where((at == now).to(device), new, old)


def _page(rows: Rows, pages: Pages, row: int, last: tuple[Tensor, ...]) -> Logprobs | None:
    """A row's entries and the last one, on the host; None where its request does not ask for them."""
    size = int(rows.length[row] - rows.prompt[row])
    wanted = int(params_of(rows)["logprobs"][row])
    if wanted < 0:
        return None
    whole = [
        torch.cat((part[row, :size], entry)).cpu() for part, entry in zip(pages.parts(), last, strict=True)
    ]
    raw, processed, top, top_raw, top_processed = whole
    return Logprobs(raw, processed, top[:, :wanted], top_raw[:, :wanted], top_processed[:, :wanted])
