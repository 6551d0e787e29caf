"""Backtracking: rows may remove recent tokens and continue with other tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, StrategyTraits
from descant.core.records import ForwardOutput, Hypothesis, Proposal, RecordedLines, Selection, Tokens
from descant.core.rows import Column, Rows, index_rows
from descant.decoding.strategies.sampling import Sampling, finished_requests
from descant.errors import InputError
from descant.tokenization.stop_strings import PhraseMatcher

NO_MASKED_TOKENS = torch.full((1, 1), -1)
NO_MASKS: Mapping[int, frozenset[int]] = {}


class Retraction(NamedTuple):
    """The verdict on a row's most recent tokens, including the token just chosen."""

    pending: int = 0  # number of trailing tokens that may still be removed
    backtrack: int = 0  # number of trailing tokens to remove now; the first of them is masked at its position
    matcher_state: int = 0  # state of a token-by-token matcher, restored when the row backtracks to here


class _Checkpoint(NamedTuple):
    """The state between two tokens: the matcher state, and how many tokens before it are pending."""

    matcher_state: int
    num_pending: int


INITIAL_CHECKPOINT = _Checkpoint(0, 0)


class PendingTokens(NamedTuple):
    """The pending tokens of a row, and the tokens masked at their positions.

    `checkpoints[0]` is before the first of `tokens`, `checkpoints[i]` after token `i - 1`. The keys of
    `masked_by_position` are indices into `tokens`.
    """

    is_expanded: bool = True  # whether the request has been expanded into its sequences
    tokens: tuple[int, ...] = ()
    checkpoints: tuple[_Checkpoint, ...] = (INITIAL_CHECKPOINT,)
    masked_by_position: Mapping[int, frozenset[int]] = NO_MASKS
    num_backtracks: int = 0  # how many times the row has backtracked

    def after_token(self, token: int, retraction: Retraction) -> tuple[PendingTokens, tuple[int, ...]]:
        """The state after a chosen token, and the tokens that became final."""
        tokens, num_pending = (*self.tokens, token), retraction.pending
        # After backtracking to an earlier checkpoint, tokens pending there may be removed as well.
        reachable = [
            distance + self.checkpoints[-distance].num_pending for distance in range(1, num_pending + 1)
        ]
        num_pending = max([num_pending, *reachable])
        if not num_pending:
            return PendingTokens(num_backtracks=self.num_backtracks) if self.num_backtracks else IDLE, tokens
        checkpoints = (*self.checkpoints, _Checkpoint(retraction.matcher_state, num_pending))
        num_final = len(tokens) - num_pending
        masked = {
            position - num_final: token_ids
            for position, token_ids in self.masked_by_position.items()
            if position >= num_final
        }
        return PendingTokens(
            True, tokens[num_final:], checkpoints[num_final:], masked or NO_MASKS, self.num_backtracks
        ), tokens[:num_final]

    def backtrack_to(self, position: int, token: int) -> PendingTokens:
        """The state after backtracking to that position, where `token` is masked."""
        masked = {
            index: token_ids for index, token_ids in self.masked_by_position.items() if index <= position
        }
        masked[position] = masked.get(position, frozenset()) | {token}
        return PendingTokens(
            True, self.tokens[:position], self.checkpoints[: position + 1], masked, self.num_backtracks + 1
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending and nothing is masked."""
        return self.is_expanded and not self.tokens and not self.masked_by_position

    @property
    def next_masked_tokens(self) -> list[int]:
        """The tokens masked at the next position."""
        return sorted(self.masked_by_position.get(len(self.tokens), ()))


UNEXPANDED, IDLE = PendingTokens(is_expanded=False), PendingTokens()


@dataclass(frozen=True)
class _PendingColumn:
    """The row column of pending tokens."""

    pending: list[PendingTokens]
    is_per_request: ClassVar[bool] = False

    def take(self, parents: Tensor) -> Self:
        """The pending tokens of the new rows."""
        return type(self)([self.pending[row] for row in parents.tolist()])

    def cat(self, other: Self) -> Self:
        """This column followed by another table's column."""
        return type(self)([*self.pending, *other.pending])


class _InspectionResult(NamedTuple):
    """The outcome of a step's retractions."""

    pending: list[PendingTokens]  # [R]
    final_tokens: list[tuple[int, ...]]  # [R] the tokens of each row that became final
    num_backtracked: Array  # [R] number of committed tokens removed, -1 where the chosen token stays


class Backtracking(Sampling):
    """Greedy search and sampling that can remove recent tokens; a subclass decides which in `inspect`.

    A row backtracks to before the first removed token, which stays masked there while the text before it is
    unchanged. Tokens are emitted once they can no longer be removed, so emitted tokens never change. The mask
    is also applied as a processor, before all warpers.
    """

    traits = StrategyTraits(max_rewind=None, feeds_rejected_tokens=True)
    columns: Mapping[str, Tensor | Column] = {
        "pending_tokens": _PendingColumn([UNEXPANDED]),
        "masked_tokens": NO_MASKED_TOKENS,
    }

    def inspect(self, new_tokens: Sequence[int], num_backtracks: int) -> Retraction:
        """The verdict on a row's new tokens, the last of which was just chosen.

        `num_backtracks` counts the row's earlier backtracks. At most the tokens pending before this step and
        the chosen token can be removed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `inspect`")

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """Choose one token per row or backtrack; finished rows are removed."""
        scores = output.logits[:, 0]  # [R, V]
        rows, parents = self._expand_sequences(rows)
        if parents is not None:
            scores = index_rows(scores, parents)
        # Mask again after the processors: a processor that forces a masked token would stall the row.
        tokens, best_scores, host = self._choose_tokens(
            rows, _mask_tokens(scores, rows.column("masked_tokens"))
        )
        skipped = bool(best_scores.min() > -np.inf) and self._can_skip_inspection(rows, host.numpy())
        if skipped:
            reasons = self._stop.finish_reasons(rows, None, host)
            if not reasons:  # only the tokens change
                emitted = Tokens(rows.request, rows.slot, host, parents)
                slot = None if parents is None else rows.slot
                return Selection(tokens, parents, slot=slot, emitted=emitted, host_tokens=host)
        failed = sorted(set(rows.request.numpy()[~(best_scores > -np.inf)].tolist()))
        removed = np.isin(rows.request.numpy(), failed)
        result = _apply_retractions(rows, host.tolist(), self._inspect_rows(rows, host), removed)
        appended = result.num_backtracked < 0
        if not skipped:
            reasons = self._finish_reasons(rows, host, appended & ~removed)
        for _, mask in reasons:
            removed = removed | mask
        finished = (
            self._collect_finished(rows, host, removed & ~np.isin(rows.request.numpy(), failed), reasons)
            if removed.any()
            else []
        )
        kept_rows = torch.from_numpy(np.flatnonzero(~removed))
        parent_rows = torch.arange(len(rows)) if parents is None else parents
        accepted = torch.from_numpy(np.where(appended, 0, -result.num_backtracked))[kept_rows]
        pending = [result.pending[row] for row in kept_rows.tolist()]
        rows_changed = parents is not None or len(kept_rows) < len(rows)
        return Selection(
            index_rows(tokens, kept_rows) if rows_changed else tokens,
            parent_rows[kept_rows] if rows_changed else None,
            None if appended.all() else accepted,
            slot=rows.slot[kept_rows] if rows_changed else None,
            columns={"pending_tokens": _PendingColumn(pending), "masked_tokens": _masked_column(pending)},
            emit_mode=bool(appended.all()) or torch.from_numpy(np.where(appended, 1, -1))[kept_rows],
            emitted=_emitted_tokens(rows, parent_rows, result, dict(finished), failed),
            finished=finished_requests(rows, removed, failed),
            failed=failed,
            host_tokens=host[kept_rows],
            finished_sequences=[(int(parent_rows[row]), hypothesis) for row, hypothesis in finished],
            recorded_lines=RecordedLines(parent_rows, rows.slot),
        )

    def _is_unexpanded(self, rows: Rows) -> Tensor:
        """Which rows are not yet expanded [R]; length cannot tell: a row may backtrack to its prompt."""
        return torch.tensor([not pending.is_expanded for pending in pending_tokens_of(rows)])

    def _can_skip_inspection(self, rows: Rows, tokens: Array) -> bool:  # noqa: ARG002
        """Whether no row has or gets pending tokens in this step; False: inspect the rows."""
        return False

    def _inspect_rows(self, rows: Rows, tokens: Tensor) -> list[Retraction]:
        """The retraction of each row for its chosen token [R] (host)."""
        host_tokens = rows.tokens.cpu()
        retractions = []
        for row, (pending, token) in enumerate(zip(pending_tokens_of(rows), tokens.tolist(), strict=True)):
            new_tokens = host_tokens[row, int(rows.prompt_length[row]) : int(rows.length[row])].tolist()
            retractions.append(self.inspect([*new_tokens, token], pending.num_backtracks))
        return retractions

    def _finish_reasons(
        self, rows: Rows, host_tokens: Tensor, appended: Array
    ) -> Sequence[tuple[str, Array]]:
        """The finish reasons of the rows that append their token."""
        if appended.all():
            return self._stop.finish_reasons(rows, None, host_tokens)
        index = torch.from_numpy(np.flatnonzero(appended))
        reasons = []
        for name, mask in self._stop.finish_reasons(rows, index, host_tokens[index]):
            row_mask = np.zeros(len(rows), dtype=bool)
            row_mask[index.numpy()] = mask
            reasons.append((name, row_mask))
        return reasons


def _mask_tokens(scores: Tensor, masked: Tensor) -> Tensor:
    """Scores [R, V] with the masked tokens [R, W] (host) set to -inf."""
    row, column = (masked >= 0).nonzero(as_tuple=True)
    if not len(row):
        return scores
    scores = scores.clone()
    scores[row.to(scores.device), masked[row, column].to(scores.device)] = -torch.inf
    return scores


def pending_tokens_of(rows: Rows) -> list[PendingTokens]:
    """The pending tokens of each row."""
    column = rows.columns["pending_tokens"]
    assert isinstance(column, _PendingColumn)
    return column.pending


def _apply_retractions(
    rows: Rows, tokens: Sequence[int], retractions: Sequence[Retraction], failed: Array
) -> _InspectionResult:
    """Apply the retraction of each row that has not failed."""
    pending_after: list[PendingTokens] = []
    final_tokens: list[tuple[int, ...]] = []
    num_backtracked = np.full(len(rows), -1)
    for row, (pending, token, retraction) in enumerate(
        zip(pending_tokens_of(rows), tokens, retractions, strict=True)
    ):
        final: tuple[int, ...] = ()
        if retraction.backtrack and not failed[row]:
            position = len(pending.tokens) + 1 - retraction.backtrack
            if position < 0:
                must = f"must remove at most the {len(pending.tokens)} pending tokens and the chosen one"
                raise InputError("inspect", must, retraction.backtrack, "return a larger `pending` earlier")
            num_backtracked[row] = retraction.backtrack - 1
            pending = pending.backtrack_to(position, (*pending.tokens, token)[position])
        else:
            pending, final = pending.after_token(token, retraction)
        pending_after.append(pending)
        final_tokens.append(final)
    return _InspectionResult(pending_after, final_tokens, num_backtracked)


def _masked_column(pending: Sequence[PendingTokens]) -> Tensor:
    """The tokens masked at each row's next position, padded with -1 [R, W] (host)."""
    masked = [row.next_masked_tokens if row.masked_by_position else [] for row in pending]
    width = max(map(len, masked), default=0)
    if not width:
        return NO_MASKED_TOKENS.expand(len(pending), 1)
    return torch.tensor([[*tokens, *[-1] * (width - len(tokens))] for tokens in masked])


def _emitted_tokens(
    rows: Rows,
    parent_rows: Tensor,
    result: _InspectionResult,
    finished_rows: Mapping[int, Hypothesis],
    failed: Sequence[int],
) -> Tokens | None:
    """The tokens that became final; for a finished row, all of its pending tokens."""
    row_index: list[int] = []
    token_ids: list[int] = []
    new_index: list[int] = []
    finished: dict[int, Hypothesis] = {}
    num_new = (rows.length - rows.prompt_length).tolist()
    for row, (pending, final) in enumerate(zip(result.pending, result.final_tokens, strict=True)):
        if int(rows.request[row]) in failed:
            continue
        is_finished = row in finished_rows
        emitted = (*final, *pending.tokens) if is_finished else final
        # The chosen token is not yet in `rows`; it is the last of the pending tokens.
        first = num_new[row] + 1 - len(final) - len(pending.tokens)
        row_index += [row] * len(emitted)
        token_ids += emitted
        new_index += range(first, first + len(emitted))
        if is_finished:
            finished[len(row_index) - 1] = finished_rows[row]
    if not row_index:
        return None
    index = torch.tensor(row_index)
    return Tokens(
        rows.request[index],
        rows.slot[index],
        torch.tensor(token_ids),
        parent_rows[index],
        finished=finished,
        new_index=torch.tensor(new_index),
    )


class BannedPhraseSampling(Backtracking):
    """Greedy search and sampling without the banned phrases (Paech et al. 2025, arXiv 2510.15061).

    When a row's new text completes a phrase, across any token boundaries, the row removes all tokens from the
    one in which the phrase began. All rows are matched at once, each from its own matcher state.
    """

    # (table version, each matcher with its rows)
    _phrase_rows: tuple[object, list[tuple[PhraseMatcher, Array]]] | None = None

    def _can_skip_inspection(self, rows: Rows, tokens: Array) -> bool:
        """Whether no row is inside a phrase before or after these tokens: the common case."""
        if not all(pending.is_idle for pending in pending_tokens_of(rows)):
            return False
        if self._phrase_rows is None or self._phrase_rows[0] != rows.version:
            matchers: Any = row_params(rows).values["phrase_matcher"]
            self._phrase_rows = (rows.version, _rows_by_phrases(matchers))
        for phrases, index in self._phrase_rows[1]:
            row_tokens, initial_states = tokens[index], np.zeros(len(index), np.int64)
            if (
                phrases.matcher.transition[row_tokens, initial_states].any()
                or phrases.matcher.matches[row_tokens, initial_states].any()
            ):
                return False
        return True

    def _inspect_rows(self, rows: Rows, tokens: Tensor) -> list[Retraction]:
        """The retraction of each row for its chosen token."""
        pending_rows: list[PendingTokens] = pending_tokens_of(rows)
        matchers: Any = row_params(rows).values["phrase_matcher"]
        states, matches = _advance_matchers(pending_rows, matchers, tokens.numpy())
        retractions = []
        for row, (pending, token) in enumerate(zip(pending_rows, tokens.tolist(), strict=True)):
            phrases, state, recent = matchers[row], int(states[row]), [*pending.tokens, token]
            start = (
                phrases.match_start(recent, _healed_prompt_bytes(rows, row, phrases, pending))
                if matches[row]
                else None
            )
            if start is None:
                retractions.append(Retraction(phrases.partial_tokens(state, recent), 0, state))
            else:
                retractions.append(Retraction(backtrack=len(recent) - start))
        return retractions


def _advance_matchers(
    pending_rows: Sequence[PendingTokens], matchers: Any, tokens: Array
) -> tuple[Array, Array]:
    """The matcher state after each row's token [R], and whether it completes a phrase [R]."""
    previous = np.array([pending.checkpoints[-1].matcher_state for pending in pending_rows])
    states, matches = np.zeros(len(pending_rows), np.int64), np.zeros(len(pending_rows), dtype=bool)
    for phrases, index in _rows_by_phrases(matchers):
        states[index] = phrases.matcher.transition[tokens[index], previous[index]]
        matches[index] = phrases.matcher.matches[tokens[index], previous[index]]
    return states, matches


def _rows_by_phrases(matchers: Any) -> list[tuple[PhraseMatcher, Array]]:
    """Each distinct matcher with the indices of its rows."""
    distinct = {id(matcher): matcher for matcher in matchers}
    ids = np.array([id(matcher) for matcher in matchers])
    return [(matcher, np.flatnonzero(ids == key)) for key, matcher in distinct.items()]


def _healed_prompt_bytes(rows: Rows, row: int, phrases: PhraseMatcher, pending: PendingTokens) -> int:
    """The number of bytes of a row's pending tokens that repeat the prompt's healed suffix."""
    suffixes: Any = row_params(rows).values.get("healed_suffix")
    suffix = None if suffixes is None else suffixes[row]
    if suffix is None or not len(suffix):
        return 0
    start, stop = int(rows.prompt_length[row]), int(rows.length[row]) - len(pending.tokens)
    return max(0, len(suffix.text) - phrases.num_bytes(rows.tokens[row, start:stop].tolist()))
