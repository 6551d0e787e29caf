"""Rewinding: a row is cut back to where something began that must not be, and goes another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.core.records import ForwardOutput, Hypothesis, Proposal, RecordedLines, Selection, Tokens
from descant.core.rows import Column, Rows, index_rows
from descant.decoding.strategies.sampling import Sampling, finished_requests
from descant.errors import InputError

__all__ = ["Backtracking", "PendingTokens", "Retraction", "pending_tokens_of"]

NO_MASKED_TOKENS = torch.full((1, 1), -1)
NO_MASKS: Mapping[int, frozenset[int]] = {}


class Retraction(NamedTuple):
    """What becomes of a row's last tokens, the one that it has just chosen among them."""

    pending: int = 0  # how many of them may still be taken back
    backtrack: int = 0  # how many of them are, now: the first of these is not said again at its place
    matcher_state: int = (
        0  # of who reads token by token: what is to be found again should the row come back here
    )


class _Checkpoint(NamedTuple):
    """A place between tokens: the state of who reads there, and how many tokens before it are not certain."""

    matcher_state: int
    num_pending: int


INITIAL_CHECKPOINT = _Checkpoint(0, 0)


class PendingTokens(NamedTuple):
    """What a row keeps: its last tokens that may still be taken back, and what it may not say there.

    `marks` stand before the first of `held` and after each, `masks` go by place among them.
    """

    is_expanded: bool = True  # whether its request has split up into rows
    tokens: tuple[int, ...] = ()
    checkpoints: tuple[_Checkpoint, ...] = (INITIAL_CHECKPOINT,)
    masked_by_position: Mapping[int, frozenset[int]] = NO_MASKS
    num_backtracks: int = 0  # how often it was cut back

    def after_token(self, token: int, doubt: Retraction) -> tuple[PendingTokens, tuple[int, ...]]:
        """The note after a token, and the tokens certain now."""
        held, back = (*self.tokens, token), doubt.pending
        # Cut back to any place that far before, the row would stand where even earlier tokens may go.
        before = [step + self.checkpoints[-step].num_pending for step in range(1, back + 1)]
        back = max([back, *before])
        if not back:
            return PendingTokens(num_backtracks=self.num_backtracks) if self.num_backtracks else IDLE, held
        marks = (*self.checkpoints, _Checkpoint(doubt.matcher_state, back))
        sure = len(held) - back
        masks = {place - sure: some for place, some in self.masked_by_position.items() if place >= sure}
        return PendingTokens(True, held[sure:], marks[sure:], masks or NO_MASKS, self.num_backtracks), held[
            :sure
        ]

    def backtrack_to(self, place: int, token: int) -> PendingTokens:
        """The note of a row cut back to that place, where it may not say `token` again."""
        masks = {at: some for at, some in self.masked_by_position.items() if at <= place}
        masks[place] = masks.get(place, frozenset()) | {token}
        return PendingTokens(
            True, self.tokens[:place], self.checkpoints[: place + 1], masks, self.num_backtracks + 1
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing that it could take back."""
        return self.is_expanded and not self.tokens and not self.masked_by_position

    @property
    def next_masked_tokens(self) -> list[int]:
        """What the row may not say next."""
        return sorted(self.masked_by_position.get(len(self.tokens), ()))


UNEXPANDED, IDLE = PendingTokens(is_expanded=False), PendingTokens()


@dataclass(frozen=True)
class _PendingColumn:
    """The column of notes."""

    pending: list[PendingTokens]
    is_per_request: ClassVar[bool] = False

    def take(self, parents: Tensor) -> Self:
        """The notes of the new rows."""
        return type(self)([self.pending[row] for row in parents.tolist()])

    def cat(self, other: Self) -> Self:
        """These rows' notes with another table's below."""
        return type(self)([*self.pending, *other.pending])


class _InspectionResult(NamedTuple):
    """What doubts make of the tokens chosen."""

    pending: list[PendingTokens]  # [R]
    final_tokens: list[tuple[int, ...]]  # [R] the tokens of each row that are certain now
    num_backtracked: Array  # [R] how many tokens a row takes back, -1 where the chosen one stays


class Backtracking(Sampling):
    """Greedy search and sampling whose rows may take tokens back; a subclass says which, in `doubt`.

    A row is cut back to before the first of them, which is masked there for as long as the text before it
    stays. Tokens come out once nothing can take them back, so that nothing told is ever untold. The mask is
    a stage of its own, too, before all samplers.
    """

    needs_rewind = True
    columns: Mapping[str, Tensor | Column] = {
        "pending_tokens": _PendingColumn([UNEXPANDED]),
        "masked_tokens": NO_MASKED_TOKENS,
    }

    def inspect(self, written: Sequence[int], cuts: int) -> Retraction:
        """What to make of a row's new tokens, the last just chosen; it was cut back `cuts` times before.

        No more can go now than were loose before, and the token just chosen.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `doubt`")

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """One token a row, or some taken back; rows that end leave."""
        scores = output.logits[:, 0]  # [R, V]
        rows, parents = self._expand_sequences(rows)
        if parents is not None:
            scores = index_rows(scores, parents)
        # Once more, after what forces tokens, and after a user's own: otherwise a row would never get on.
        tokens, best, host = self._choose_tokens(rows, _mask_tokens(scores, rows.column("masked_tokens")))
        quiet = bool(best.min() > -np.inf) and self._can_skip_inspection(rows, host.numpy())
        if quiet:
            reasons = self._stop.finish_reasons(rows, None, host)
            if not reasons:  # nothing changes but the tokens
                emitted = Tokens(rows.request, rows.slot, host, parents)
                slot = None if parents is None else rows.slot
                return Selection(tokens, parents, slot=slot, emitted=emitted, host_tokens=host)
        failed = sorted(set(rows.request.numpy()[~(best > -np.inf)].tolist()))
        gone = np.isin(rows.request.numpy(), failed)
        verdict = _apply_retractions(rows, host.tolist(), self._inspect_rows(rows, host), gone)
        stays = verdict.num_backtracked < 0
        if not quiet:
            reasons = self._finish_reasons(rows, host, stays & ~gone)
        for _, which in reasons:
            gone = gone | which
        retired = self._collect_finished(rows, host, gone, reasons, failed) if gone.any() else []
        keep = torch.from_numpy(np.flatnonzero(~gone))
        whence = torch.arange(len(rows)) if parents is None else parents
        accepted = torch.from_numpy(np.where(stays, 0, -verdict.num_backtracked))[keep]
        kept = [verdict.pending[row] for row in keep.tolist()]
        moved = parents is not None or len(keep) < len(rows)
        return Selection(
            index_rows(tokens, keep) if moved else tokens,
            whence[keep] if moved else None,
            None if stays.all() else accepted,
            slot=rows.slot[keep] if moved else None,
            columns={"pending_tokens": _PendingColumn(kept), "masked_tokens": _masked_column(kept)},
            emit_mode=bool(stays.all()) or torch.from_numpy(np.where(stays, 1, -1))[keep],
            emitted=_emitted_tokens(rows, whence, verdict, dict(retired), failed),
            finished=finished_requests(rows, gone, failed),
            failed=failed,
            host_tokens=host[keep],
            finished_sequences=[(int(whence[row]), one) for row, one in retired],
            recorded_lines=RecordedLines(whence, rows.slot),
        )

    def _is_unexpanded(self, rows: Rows) -> Tensor:
        """Which rows have not split up yet: one may be back at its prompt."""
        return torch.tensor([not note.is_expanded for note in pending_tokens_of(rows)])

    def _can_skip_inspection(self, rows: Rows, tokens: Array) -> bool:  # noqa: ARG002
        """Whether it is known at once that no row takes back or holds anything, before and after these."""
        return False

    def _inspect_rows(self, rows: Rows, tokens: Tensor) -> list[Retraction]:
        """What to make of each row's token [R] (host)."""
        written = rows.tokens.cpu()
        doubts = []
        for row, (note, token) in enumerate(zip(pending_tokens_of(rows), tokens.tolist(), strict=True)):
            new = written[row, int(rows.prompt_length[row]) : int(rows.length[row])].tolist()
            doubts.append(self.inspect([*new, token], note.num_backtracks))
        return doubts

    def _finish_reasons(self, rows: Rows, host: Tensor, asked: Array) -> Sequence[tuple[str, Array]]:
        """Why rows end, of those that keep their token."""
        if asked.all():
            return self._stop.finish_reasons(rows, None, host)
        index = torch.from_numpy(np.flatnonzero(asked))
        reasons = []
        for name, which in self._stop.finish_reasons(rows, index, host[index]):
            whole = np.zeros(len(rows), dtype=bool)
            whole[index.numpy()] = which
            reasons.append((name, whole))
        return reasons


def _mask_tokens(scores: Tensor, masked: Tensor) -> Tensor:
    """The scores [R, V] without the tokens that each row may not say [R, W] (host)."""
    row, column = (masked >= 0).nonzero(as_tuple=True)
    if not len(row):
        return scores
    scores = scores.clone()
    scores[row.to(scores.device), masked[row, column].to(scores.device)] = -torch.inf
    return scores


def pending_tokens_of(rows: Rows) -> list[PendingTokens]:
    """What the rows keep."""
    column = rows.columns["pending_tokens"]
    assert isinstance(column, _PendingColumn)
    return column.pending


def _apply_retractions(
    rows: Rows, tokens: Sequence[int], doubts: Sequence[Retraction], dead: Array
) -> _InspectionResult:
    """What becomes of each row's token, of rows that are not dead."""
    found: list[PendingTokens] = []
    told: list[tuple[int, ...]] = []
    back = np.full(len(rows), -1)
    for row, (note, token, doubt) in enumerate(zip(pending_tokens_of(rows), tokens, doubts, strict=True)):
        certain: tuple[int, ...] = ()
        if doubt.backtrack and not dead[row]:
            place = len(note.tokens) + 1 - doubt.backtrack
            if place < 0:
                must = f"must not take back more than the {len(note.tokens)} that were loose, and the new one"
                raise InputError(
                    "inspect", must, doubt.backtrack, "let it say of more tokens that they are loose"
                )
            back[row] = doubt.backtrack - 1
            note = note.backtrack_to(place, (*note.tokens, token)[place])
        else:
            note, certain = note.after_token(token, doubt)
        found.append(note)
        told.append(certain)
    return _InspectionResult(found, told, back)


def _masked_column(notes: Sequence[PendingTokens]) -> Tensor:
    """What each row may not say next, -1 where there is nothing [R, W] (host)."""
    lines = [note.next_masked_tokens if note.masked_by_position else [] for note in notes]
    wide = max(map(len, lines), default=0)
    if not wide:
        return NO_MASKED_TOKENS.expand(len(notes), 1)
    return torch.tensor([[*line, *[-1] * (wide - len(line))] for line in lines])


def _emitted_tokens(
    rows: Rows,
    whence: Tensor,
    verdict: _InspectionResult,
    ended: Mapping[int, Hypothesis],
    failed: Sequence[int],
) -> Tokens | None:
    """The tokens that are certain now: all of a row that ends."""
    line: list[int] = []
    token: list[int] = []
    place: list[int] = []
    last: dict[int, Hypothesis] = {}
    new = (rows.length - rows.prompt_length).tolist()
    for row, (note, certain) in enumerate(zip(verdict.pending, verdict.final_tokens, strict=True)):
        if int(rows.request[row]) in failed:
            continue
        ends = row in ended
        out = (*certain, *note.tokens) if ends else certain
        # After its choice the row has a token more, and the last of what it still holds is that one.
        first = new[row] + 1 - len(certain) - len(note.tokens)
        line += [row] * len(out)
        token += out
        place += range(first, first + len(out))
        if ends:
            last[len(line) - 1] = ended[row]
    if not line:
        return None
    index = torch.tensor(line)
    return Tokens(
        rows.request[index],
        rows.slot[index],
        torch.tensor(token),
        whence[index],
        finished=last,
        new_index=torch.tensor(place),
    )
