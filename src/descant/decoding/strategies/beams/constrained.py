"""Constrained beam search: beams are steered towards texts that meet the constraints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, NoiseSource, RankGroup, StopCondition
from descant.core.records import ForwardOutput, Hypothesis, Proposal, RequestFault, Selection
from descant.core.rows import Rows, index_rows
from descant.decoding.constraints import ConstraintListState
from descant.decoding.strategies.beams.beam import (
    LIMIT_REASONS,
    BeamCandidates,
    BeamGroup,
    BeamSearch,
    BeamSettings,
)
from descant.errors import InputError


class ConstrainedCandidate(NamedTuple):
    """One candidate with its constraint state."""

    row: int
    token: int
    sum_logprob: float
    constraint_state: ConstraintListState  # after the token
    finish_reason: str | None = None  # why it is truncated; None: it is not


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
        self._token_states: dict[tuple[int, int], ConstraintListState] = {}  # by row and token, in this step
        self._unmet: dict[int, list[tuple[bool, Hypothesis]]] = {}  # finished with unmet ones

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """Continue every request with its best candidates; finished requests are removed."""
        self._token_states = {}
        selection = super().select(rows, proposal, output)
        assert selection.parents is not None
        assert selection.slot is not None
        assert selection.host_tokens is not None
        chosen = zip(selection.parents.tolist(), selection.host_tokens.tolist(), strict=True)
        states = [self._state_after(rows, row, token) for row, token in chosen]
        next_states: dict[int, dict[int, ConstraintListState]] = {}
        places = zip(rows.request[selection.parents].tolist(), selection.slot.tolist(), states, strict=True)
        for request, slot, state in places:
            next_states.setdefault(request, {})[slot] = state
        self._constraint_states |= next_states
        for request in (*selection.finished, *selection.failed):
            self._constraint_states.pop(request, None)
        steps = torch.tensor([state.steps_met for state in states], dtype=torch.long)
        return selection._replace(columns={**selection.columns, "constraint_steps": steps})

    def drop(self, request: int) -> None:
        """Discard a request."""
        super().drop(request)
        self._constraint_states.pop(request, None)
        self._unmet.pop(request, None)

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the pools and constraint states of now."""
        restore_pools, states, unmet = super().checkpoint(), dict(self._constraint_states), dict(self._unmet)

        def restore() -> None:
            restore_pools()
            self._constraint_states, self._unmet = states, unmet

        return restore

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's finished hypotheses, best first; those with unmet constraints come last."""
        return super().finished_so_far(request) + [
            hypothesis for _, hypothesis in self._unmet.get(request, ())
        ]

    def _has_results(self, group: BeamGroup) -> Array:
        return np.array([bool(self.finished_so_far(request)) for request in group.requests.tolist()])

    def _select_group(self, rows: Rows, scores: Tensor, group: BeamGroup) -> Selection:
        return self._select_group_tokens(rows, scores, group)[0]

    def _choose_beams(
        self, rows: Rows, scores: Tensor, group: BeamGroup, candidates: BeamCandidates, ended: Array
    ) -> BeamCandidates:
        """The group's beams [B, W], allocated by the constraint steps they have met."""
        width = self._settings.group_size
        best = candidates.top(ended, width)
        likely = [self._likely_candidates(rows, best, index) for index in range(len(group.rows))]
        advancing = self._advancing_candidates(rows, scores, group, likely)
        chosen = [allocate_by_bank(*both, width) for both in zip(likely, advancing, strict=True)]
        self._keep_completed(rows, scores, group, chosen)
        shape = best.sum_logprobs.shape[0], width
        truncated = {name: np.zeros(shape, dtype=bool) for name in LIMIT_REASONS}
        kept = BeamCandidates(
            np.full(shape, -np.inf, dtype=np.float32),
            candidates.parent_rows[:, :1].repeat(width, 1),
            candidates.parent_slots[:, :1].repeat(width, 1),
            np.zeros(shape, dtype=np.int64),
            list(truncated.items()),
        )
        is_fresh, slots = (rows.length == rows.prompt_length).numpy(), rows.slot.numpy()
        for index, entries in enumerate(chosen):
            for rank, entry in enumerate(entries):
                place = index, rank
                kept.sum_logprobs[place], kept.tokens[place] = entry.sum_logprob, entry.token
                kept.parent_rows[place] = entry.row
                if not is_fresh[entry.row]:
                    kept.parent_slots[place] = slots[entry.row]
                if entry.finish_reason is not None:
                    truncated[entry.finish_reason][place] = True
        return kept

    # -------------------------------------------------------------------- candidates
    def _row_state(self, rows: Rows, row: int) -> ConstraintListState:
        """The constraint state of a row."""
        if rows.length[row] == rows.prompt_length[row]:
            states = row_params(rows).values["constraint_state"]
            assert not isinstance(states, Tensor)
            initial: ConstraintListState = states[row]
            return initial.copy(stateful=False)
        return self._constraint_states[int(rows.request[row])][int(rows.slot[row])]

    def _state_after(self, rows: Rows, row: int, token: int) -> ConstraintListState:
        """The constraint state of a row after one more token."""
        state = self._token_states.get((row, token))
        if state is None:
            state = self._row_state(rows, row).copy()
            with _user_code(int(rows.request[row])):
                state.add(token)
            self._token_states[row, token] = state
        return state

    def _likely_candidates(self, rows: Rows, best: BeamCandidates, index: int) -> list[ConstrainedCandidate]:
        """The candidates of a request that plain beam search would keep."""
        entries = []
        finished = best.reason_mask()[index]
        for rank in np.flatnonzero(best.sum_logprobs[index] > -np.inf).tolist():
            row, token = int(best.parent_rows[index, rank]), int(best.tokens[index, rank])
            state, total = self._state_after(rows, row, token), float(best.sum_logprobs[index, rank])
            reason = best.finish_reason(index, rank) if finished[rank] else None
            entries.append(ConstrainedCandidate(row, token, total, state, reason))
        return entries

    def _advancing_candidates(
        self, rows: Rows, scores: Tensor, group: BeamGroup, likely: Sequence[Sequence[ConstrainedCandidate]]
    ) -> list[list[ConstrainedCandidate]]:
        """Further candidates that advance a constraint, by request."""
        pairs: list[tuple[int, int]] = []
        waiting: list[int] = []  # rows in a constraint gap, where no token advances
        for index, candidates in enumerate(likely):
            states = {row: self._row_state(rows, row) for row in group.rows[index].tolist()}
            rows_with_candidates = {entry.row for entry in candidates}
            with _user_code(int(group.requests[index])):
                known = {(entry.row, entry.token) for entry in candidates}
                pairs += advancing_tokens(states, known, scores.shape[1])
                waiting += [
                    row
                    for row, state in states.items()
                    if row not in rows_with_candidates and not state.completed and state.advance() is None
                ]
        entries = self._make_candidates(rows, scores, pairs) + self._best_continuations(rows, scores, waiting)
        return [[entry for entry in entries if entry.row in own] for own in group.rows.tolist()]

    def _make_candidates(
        self, rows: Rows, scores: Tensor, pairs: Sequence[tuple[int, int]]
    ) -> list[ConstrainedCandidate]:
        """Candidates for (row, token), without those that are impossible or finish by their token."""
        if not pairs:
            return []
        parents, tokens = torch.tensor(pairs).T
        device = scores.device
        sums = scores[parents.to(device), tokens.to(device)] + rows.column("score")[parents].to(device)
        values = self._to_host(sums[:, None], tokens[:, None].to(device))[0][:, 0].tolist()
        reasons = self._stop.finish_reasons(rows, parents, tokens)
        entries = []
        for position, ((row, token), total) in enumerate(zip(pairs, values, strict=True)):
            own_reasons = [name for name, mask in reasons if mask[position]]
            if total > -np.inf and all(name in LIMIT_REASONS for name in own_reasons):
                state = self._state_after(rows, row, token)
                entries.append(ConstrainedCandidate(row, token, total, state, *own_reasons[:1]))
        return entries

    def _best_continuations(
        self, rows: Rows, scores: Tensor, waiting: Sequence[int]
    ) -> list[ConstrainedCandidate]:
        """The most likely candidate of each waiting row that does not finish."""
        if not waiting:
            return []
        count = min(self._settings.candidates_per_beam, scores.shape[1])
        top = index_rows(scores, torch.tensor(waiting)).topk(count).indices
        top = (top if self._rank_group is None else self._rank_group.broadcast(top)).cpu()
        pairs = [(row, token) for row, tokens in zip(waiting, top.tolist(), strict=True) for token in tokens]
        best: dict[int, ConstrainedCandidate] = {}
        for entry in self._make_candidates(rows, scores, pairs):
            best.setdefault(entry.row, entry)
        return list(best.values())

    def _keep_completed(
        self, rows: Rows, scores: Tensor, group: BeamGroup, chosen: list[list[ConstrainedCandidate]]
    ) -> None:
        """Keep one row that meets all constraints if no other does and too few tokens are left."""
        tokens_left = group.scoring.max_new_tokens - group.scoring.num_new_tokens
        for index in np.flatnonzero(self._finished_pools.is_empty(group.pool_indices)).tolist():
            states = {row: self._row_state(rows, row) for row in group.rows[index].tolist()}
            initial, entries = next(iter(states.values())).copy(stateful=False), chosen[index]
            with _user_code(int(group.requests[index])):
                is_late = tokens_left[index] < initial.min_tokens_left
            if is_late and entries and not any(entry.constraint_state.completed for entry in entries):
                completed = [row for row, state in states.items() if state.completed]
                best = self._best_continuations(rows, scores, completed)
                if best:
                    del entries[self._settings.group_size - 1 :]
                    entries.append(max(best, key=lambda entry: entry.sum_logprob))

    # -------------------------------------------------------------------- finished hypotheses
    def _add_finished(
        self, rows: Rows, group: BeamGroup, candidates: BeamCandidates, ready: Array
    ) -> list[tuple[int, Hypothesis]]:
        """Offer finished candidates that meet all constraints to the pools; keep the others aside."""
        is_met, finished = ready.copy(), []
        ended = candidates.reason_mask("eos", "stop")  # also at the last token, whose reason is "length"
        scores = group.scoring.normalized_scores(candidates.sum_logprobs)
        for index, rank in np.argwhere(ready & (candidates.sum_logprobs > -np.inf)).tolist():
            row, token = int(candidates.parent_rows[index, rank]), int(candidates.tokens[index, rank])
            if self._state_after(rows, row, token).completed:
                continue
            is_met[index, rank] = False
            tokens = rows.tokens[row].cpu()
            hypothesis = self._hypothesis(rows, candidates, (index, rank), float(scores[index, rank]), tokens)
            finished.append((row, hypothesis))
            request = int(group.requests[index])
            entry = bool(ended[index, rank]), hypothesis
            unmet = sorted((*self._unmet.get(request, ()), entry), key=_unmet_order)
            self._unmet[request] = unmet[: self._settings.num_beams]
        return finished + super()._add_finished(rows, group, candidates, is_met)

    def _hypothesis(
        self, rows: Rows, candidates: BeamCandidates, place: tuple[int, int], score: float, row_tokens: Tensor
    ) -> Hypothesis:
        """A candidate as a finished hypothesis, with what it has met."""
        hypothesis = super()._hypothesis(rows, candidates, place, score, row_tokens)
        state = self._state_after(rows, int(candidates.parent_rows[place]), int(candidates.tokens[place]))
        hypothesis.unmet_constraints, hypothesis.constraint_steps = state.unmet_indices, state.steps_met
        return hypothesis


def _unmet_order(entry: tuple[bool, Hypothesis]) -> tuple[bool, int, float]:
    """Those that were truncated first, then by the number of unmet constraints and by score."""
    ended, hypothesis = entry
    return ended, len(hypothesis.unmet_constraints or ()), -(hypothesis.score or 0.0)


@contextmanager
def _user_code(request: int) -> Iterator[None]:
    """Attribute what constraints raise to the request that they belong to."""
    try:
        yield
    except Exception as error:
        raise RequestFault({request: error}) from error


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
    """`width` of both kinds of candidates: the best of every bank, then the second best, and so on.

    A bank is the number of constraint steps a candidate has met; higher banks come first (Post and Vilar
    2018, arXiv 1804.06609).
    """
    if not advancing:
        return likely
    banks: dict[int, list[ConstrainedCandidate]] = {}
    for entry in sorted(likely + advancing, key=lambda entry: -entry.sum_logprob):
        banks.setdefault(entry.constraint_state.get_bank(), []).append(entry)
    ranks = zip_longest(*(banks[bank] for bank in sorted(banks, reverse=True)))
    return [entry for rank in ranks for entry in rank if entry is not None][:width]
