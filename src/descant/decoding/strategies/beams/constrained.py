"""Constrained beam search: beams are steered towards texts that meet the constraints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, NoiseSource, RankGroup, StopCondition
from descant.core.records import ForwardOutput, Hypothesis, Proposal, Selection
from descant.core.request_fault import RequestFault
from descant.core.rows import Rows, index_rows
from descant.decoding.constraints import ConstraintListState
from descant.decoding.strategies.beams.beam import BeamSearch
from descant.decoding.strategies.beams.candidates import (
    LIMIT_REASONS,
    BeamCandidates,
    BeamGroup,
    BeamSettings,
)
from descant.decoding.strategies.beams.finished_pool import bank_order, top_unfinished
from descant.errors import InputError

__all__ = ["ConstrainedBeamSearch", "ConstrainedCandidate", "advancing_tokens", "allocate_by_bank"]


class ConstrainedCandidate(NamedTuple):
    """One candidate with its constraint state."""

    row: int
    token: int
    sum_logprob: float
    constraint_state: ConstraintListState  # after the token
    finish_reason: str | None  # why it is truncated; None: it is not


class ConstrainedBeamSearch(BeamSearch):
    """Beam search whose results meet their request's constraints, or report the unmet ones.

    Besides the top candidates it considers those that advance a constraint; beams are allocated by the number
    of constraint steps met (Post and Vilar 2018, arXiv 1804.06609). Only new tokens count. A hypothesis that
    finishes with unmet constraints is kept aside, and returned only if too few meet all of them.
    """

    columns: Mapping[str, Tensor] = {
        **BeamSearch.columns,
        "constraint_steps": torch.zeros(1, dtype=torch.long),  # constraint steps the row has met
    }

    def __init__(
        self,
        settings: BeamSettings,
        noise: NoiseSource,
        stop: StopCondition,
        rank_group: RankGroup | None = None,
    ) -> None:
        super().__init__(settings, noise, stop, rank_group)
        self._constraint_states: dict[int, dict[int, ConstraintListState]] = {}  # by request and slot
        self._next_states: dict[
            int, dict[int, ConstraintListState]
        ] = {}  # after this step, by request and slot
        self._token_states: dict[tuple[int, int], ConstraintListState] = {}  # by row and token, in this step
        self._unmet_truncated: dict[
            int, list[Hypothesis]
        ] = {}  # unmet constraints, truncated by length or time
        self._unmet_finished: dict[int, list[Hypothesis]] = {}  # unmet constraints, finished by a token

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """Continue every request with its best candidates; finished requests are removed."""
        self._token_states, self._next_states = {}, {request: {} for request in set(rows.request.tolist())}
        selection = super().select(rows, proposal, output)
        self._constraint_states |= self._next_states
        for request in (*selection.finished, *selection.failed):
            self._constraint_states.pop(request, None)
        return selection

    def drop(self, request: int) -> None:
        """Discard a request."""
        super().drop(request)
        for by_request in (self._constraint_states, self._unmet_truncated, self._unmet_finished):
            by_request.pop(request, None)

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the pools and constraint states of now."""
        restore_pools, states = super().checkpoint(), dict(self._constraint_states)
        truncated, finished = (
            {request: list(unmet) for request, unmet in by_request.items()}
            for by_request in (self._unmet_truncated, self._unmet_finished)
        )

        def restore() -> None:
            restore_pools()
            self._constraint_states, self._unmet_truncated, self._unmet_finished = states, truncated, finished

        return restore

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's finished hypotheses, best first; those with unmet constraints come last."""
        hypotheses = super().finished_so_far(request)
        for unmet in (self._unmet_truncated, self._unmet_finished):
            hypotheses += sorted(
                unmet.get(request, ()),
                key=lambda hypothesis: (len(hypothesis.unmet_constraints or ()), -(hypothesis.score or 0.0)),
            )
        return hypotheses

    def _has_results(self, group: BeamGroup) -> Array:
        return np.array([bool(self.finished_so_far(request)) for request in group.requests.tolist()])

    def _select_group(self, rows: Rows, scores: Tensor, group: BeamGroup) -> Selection:
        return self._select_group_tokens(rows, scores, group)[0]

    def _select_group_tokens(self, rows: Rows, scores: Tensor, group: BeamGroup) -> tuple[Selection, Array]:
        """One step of a group, and the chosen tokens [B, W]."""
        candidates = self._top_candidates(rows, scores, group)
        ended = candidates.reason_mask("eos", "stop")
        best = top_unfinished(candidates.sum_logprobs, ended, self._settings.group_size)
        unconstrained = self._unconstrained_candidates(rows, candidates, ended, best)
        advancing = self._advancing_candidates(rows, scores, group, unconstrained)
        chosen = [
            allocate_by_bank(likely, extra, self._settings.group_size)
            for likely, extra in zip(unconstrained, advancing, strict=True)
        ]
        self._keep_completed(rows, scores, group, chosen)
        finished = self._route_finished(rows, group, candidates, ended)
        continues = self._finished_pools.can_improve(
            group.pool_indices, group.scoring, candidates.sum_logprobs[:, 0]
        )
        kept = self._as_beam_candidates(rows, candidates, chosen)
        truncated = kept.reason_mask(*LIMIT_REASONS)
        if truncated.any():
            finished += self._route_finished(
                rows, group, kept, truncated & continues[:, None], truncated=True
            )
            continues &= ~truncated.any(1)
        rank = np.broadcast_to(np.arange(kept.sum_logprobs.shape[1]), kept.sum_logprobs.shape)
        for index in np.flatnonzero(continues).tolist():
            states = self._next_states[int(group.requests[index])]
            for slot, entry in enumerate(chosen[index]):
                states[slot + group.group_index * self._settings.group_size] = entry.constraint_state
        tokens = np.where(kept.sum_logprobs > -np.inf, kept.tokens.numpy(), -1)
        selection = self._build_selection(rows, group, kept, rank, kept.sum_logprobs, continues)
        selection = selection._replace(finished_sequences=finished)
        return self._with_constraint_steps(rows, selection), tokens

    def _with_constraint_steps(self, rows: Rows, selection: Selection) -> Selection:
        """The selection with the number of constraint steps each row has met."""
        assert selection.parents is not None
        assert selection.slot is not None
        keys = zip(rows.request[selection.parents].tolist(), selection.slot.tolist(), strict=True)
        steps_met = torch.tensor(
            [self._next_states[request][slot].steps_met for request, slot in keys], dtype=torch.long
        )
        return selection._replace(columns={**selection.columns, "constraint_steps": steps_met})

    # -------------------------------------------------------------------- candidates
    def _row_state(self, rows: Rows, row: int) -> ConstraintListState:
        """The constraint state of a row."""
        request, slot = int(rows.request[row]), int(rows.slot[row])
        if rows.length[row] == rows.prompt_length[row]:
            states = row_params(rows).values["constraint_state"]
            assert not isinstance(states, Tensor)
            initial: ConstraintListState = states[row]
            return initial.copy(stateful=False)
        return self._constraint_states[request][slot]

    def _state_after(self, rows: Rows, row: int, token: int) -> ConstraintListState:
        """The constraint state of a row after one more token."""
        state = self._token_states.get((row, token))
        if state is None:
            state = self._row_state(rows, row).copy()
            with _user_code(int(rows.request[row])):
                state.add(token)
            self._token_states[row, token] = state
        return state

    def _unconstrained_candidates(
        self, rows: Rows, candidates: BeamCandidates, ended: Array, best: Array
    ) -> list[list[ConstrainedCandidate]]:
        """The candidates that plain beam search would keep, by request."""
        entries = []
        for index, ranks in enumerate(best.tolist()):
            kept = []
            for rank in ranks:
                score = float(candidates.sum_logprobs[index, rank])
                if ended[index, rank] or score == -np.inf:
                    continue
                row, token = int(candidates.parent_rows[index, rank]), int(candidates.tokens[index, rank])
                reason = (
                    candidates.finish_reason(index, rank) if candidates.finished_mask[index, rank] else None
                )
                kept.append(
                    ConstrainedCandidate(row, token, score, self._state_after(rows, row, token), reason)
                )
            entries.append(kept)
        return entries

    def _advancing_candidates(
        self, rows: Rows, scores: Tensor, group: BeamGroup, entries: Sequence[Sequence[ConstrainedCandidate]]
    ) -> list[list[ConstrainedCandidate]]:
        """Further candidates that advance a constraint, by request."""
        pairs: list[tuple[int, int, int]] = []
        advancing: list[list[ConstrainedCandidate]] = [[] for _ in entries]
        waiting: list[tuple[int, int]] = []  # rows in a constraint gap, where no token advances
        for index, candidates in enumerate(entries):
            known = {(entry.row, entry.token) for entry in candidates}
            states = {row: self._row_state(rows, row) for row in group.rows[index].tolist()}
            rows_with_candidates = {entry.row for entry in candidates}
            with _user_code(int(group.requests[index])):
                pairs += [(index, *pair) for pair in advancing_tokens(states, known, scores.shape[1])]
                waiting += [
                    (index, row)
                    for row, state in states.items()
                    if row not in rows_with_candidates and not state.completed and state.advance() is None
                ]
        for index, entry in zip(
            (index for index, *_ in pairs), self._make_candidates(rows, scores, pairs), strict=True
        ):
            advancing[index] += [] if entry is None else [entry]
        for index, entry in self._best_continuations(rows, scores, waiting):
            advancing[index].append(entry)
        return advancing

    def _make_candidates(
        self, rows: Rows, scores: Tensor, pairs: Sequence[tuple[int, int, int]]
    ) -> list[ConstrainedCandidate | None]:
        """Candidates for (index, row, token); None where one is impossible or finishes by its token."""
        if not pairs:
            return []
        _, parents, tokens = torch.tensor(pairs).T
        device = scores.device
        sums = scores[parents.to(device), tokens.to(device)] + rows.column("score")[parents].to(device)
        bits = sums.contiguous().view(torch.int32).long()
        bits = (bits if self._rank_group is None else self._rank_group.broadcast(bits)).cpu()
        values = bits.to(torch.int32).view(torch.float32).tolist()
        reasons = self._stop.finish_reasons(rows, parents, tokens)
        entries: list[ConstrainedCandidate | None] = []
        for position, (_, row, token) in enumerate(pairs):
            row_reasons = [name for name, mask in reasons if mask[position]]
            is_valid = values[position] > -np.inf and all(name in LIMIT_REASONS for name in row_reasons)
            state = self._state_after(rows, row, token) if is_valid else None
            entries.append(
                None
                if state is None
                else ConstrainedCandidate(
                    row, token, values[position], state, row_reasons[0] if row_reasons else None
                )
            )
        return entries

    def _best_continuations(
        self, rows: Rows, scores: Tensor, waiting: Sequence[tuple[int, int]]
    ) -> list[tuple[int, ConstrainedCandidate]]:
        """The most likely candidate that does not finish, for each (index, row)."""
        if not waiting:
            return []
        index = torch.tensor([row for _, row in waiting])
        top = index_rows(scores, index).topk(min(self._settings.candidates_per_beam, scores.shape[1])).indices
        top = (top if self._rank_group is None else self._rank_group.broadcast(top)).cpu()
        pairs = [
            (request_index, row, token)
            for (request_index, row), tokens in zip(waiting, top.tolist(), strict=True)
            for token in tokens
        ]
        best: dict[tuple[int, int], ConstrainedCandidate] = {}
        for (request_index, row, _), entry in zip(
            pairs, self._make_candidates(rows, scores, pairs), strict=True
        ):
            if entry is not None:
                best.setdefault((request_index, row), entry)
        return [(request_index, entry) for (request_index, _), entry in best.items()]

    def _keep_completed(
        self, rows: Rows, scores: Tensor, group: BeamGroup, chosen: list[list[ConstrainedCandidate]]
    ) -> None:
        """Keep one row that meets all constraints if no other does and too few tokens are left."""
        tokens_left = group.scoring.max_new_tokens - group.scoring.num_new_tokens
        completed_rows = []
        for index in np.flatnonzero(self._finished_pools.is_empty(group.pool_indices)).tolist():
            states = {row: self._row_state(rows, row) for row in group.rows[index].tolist()}
            initial = next(iter(states.values())).copy(stateful=False)
            with _user_code(int(group.requests[index])):
                is_late = tokens_left[index] < initial.min_tokens_left
            if (
                is_late
                and chosen[index]
                and not any(entry.constraint_state.completed for entry in chosen[index])
            ):
                completed_rows += [(index, row) for row, state in states.items() if state.completed]
        best: dict[int, ConstrainedCandidate] = {}
        for index, entry in self._best_continuations(rows, scores, completed_rows):
            if index not in best or entry.sum_logprob > best[index].sum_logprob:
                best[index] = entry
        for index, entry in best.items():
            chosen[index][-1 if len(chosen[index]) == self._settings.group_size else len(chosen[index]) :] = [
                entry
            ]

    def _as_beam_candidates(
        self, rows: Rows, candidates: BeamCandidates, chosen: Sequence[Sequence[ConstrainedCandidate]]
    ) -> BeamCandidates:
        """The chosen entries as candidates [B, W], padded with sum -inf."""
        shape = (len(chosen), self._settings.group_size)
        sums = np.full(shape, -np.inf, dtype=candidates.sum_logprobs.dtype)
        parents, tokens = (
            candidates.parent_rows[:, :1].repeat(1, shape[1]),
            torch.zeros(shape, dtype=torch.long),
        )
        truncated = {name: np.zeros(shape, dtype=bool) for name in LIMIT_REASONS}
        for index, entries in enumerate(chosen):
            for rank, entry in enumerate(entries):
                sums[index, rank], parents[index, rank], tokens[index, rank] = (
                    entry.sum_logprob,
                    entry.row,
                    entry.token,
                )
                if entry.finish_reason is not None:
                    truncated[entry.finish_reason][index, rank] = True
        finished = np.logical_or.reduce(list(truncated.values()))
        reasons = [(name, mask.flatten()) for name, mask in truncated.items() if mask.any()]
        slots = rows.slot[parents]
        initial_slots = candidates.parent_slots[:, :1].expand_as(slots)
        slots = torch.where(rows.length[parents] == rows.prompt_length[parents], initial_slots, slots)
        return BeamCandidates(sums, parents, slots, tokens, finished, reasons)

    # -------------------------------------------------------------------- finished hypotheses
    def _route_finished(
        self, rows: Rows, group: BeamGroup, candidates: BeamCandidates, ready: Array, truncated: bool = False
    ) -> list[tuple[int, Hypothesis]]:
        """Offer finished candidates that meet all constraints to the pools; keep the others aside."""
        width = candidates.sum_logprobs.shape[1] if truncated else self._settings.group_size
        is_met = np.zeros_like(ready)
        finished = []
        scores = group.scoring.normalized_scores(candidates.sum_logprobs)
        for index, rank in np.argwhere(
            ready[:, :width] & (candidates.sum_logprobs[:, :width] > -np.inf)
        ).tolist():
            row, token = int(candidates.parent_rows[index, rank]), int(candidates.tokens[index, rank])
            if self._state_after(rows, row, token).completed:
                is_met[index, rank] = True
                continue
            tokens = rows.tokens[row].cpu()
            hypothesis = self._hypothesis(rows, candidates, index, rank, float(scores[index, rank]), tokens)
            finished.append(hypothesis)
            unmet = (self._unmet_truncated if truncated else self._unmet_finished).setdefault(
                int(group.requests[index]), []
            )
            unmet.append(hypothesis[1])
            unmet.sort(key=lambda other: (len(other.unmet_constraints or ()), -(other.score or 0.0)))
            del unmet[self._settings.num_beams :]
        return finished + self._add_finished(rows, group, candidates, is_met, include_all=truncated)

    def _hypothesis(
        self,
        rows: Rows,
        candidates: BeamCandidates,
        index: int,
        rank: int,
        score: float,
        parent_tokens: Tensor,
    ) -> tuple[int, Hypothesis]:
        """A candidate as a finished hypothesis, with its parent row."""
        row, hypothesis = super()._hypothesis(rows, candidates, index, rank, score, parent_tokens)
        state = self._state_after(rows, row, int(candidates.tokens[index, rank]))
        hypothesis.unmet_constraints, hypothesis.constraint_steps = state.unmet_indices, state.steps_met
        return row, hypothesis


@contextmanager
def _user_code(request: int) -> Iterator[None]:
    """Attribute what constraints raise to the request that they belong to."""
    try:
        yield
    except Exception as error:
        raise RequestFault(request, error) from error


def advancing_tokens(
    states: Mapping[int, ConstraintListState], known: Collection[tuple[int, int]], vocab_size: int
) -> list[tuple[int, int]]:
    """The (row, token) pairs that advance a constraint and are not `known`."""
    pairs = []
    for row, state in states.items():
        for token in () if state.completed else state.advance() or ():
            if not 0 <= token < vocab_size:
                must = f"must advance by tokens below the vocabulary size {vocab_size}"
                raise InputError("constraints", must, token)
            if (row, token) not in known:
                pairs.append((row, token))
    return pairs


def allocate_by_bank(
    likely: list[ConstrainedCandidate], advancing: list[ConstrainedCandidate], width: int
) -> list[ConstrainedCandidate]:
    """`width` of both kinds of candidates, the best of every bank first."""
    if not advancing:
        return likely
    both = likely + advancing
    banks = np.array([entry.constraint_state.get_bank() for entry in both])
    sums = np.array([entry.sum_logprob for entry in both])
    return [both[index] for index in bank_order(banks, sums, width)]
