"""Constrained beam search: beams are led towards texts that hold what they must."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, NoiseSource, RankGroup, StopCondition
from descant.core.records import ForwardOutput, Hypothesis, Proposal, Selection
from descant.core.rows import Rows, index_rows
from descant.decoding.constraints import ConstraintListState
from descant.decoding.strategies.beams.beam import (
    LIMIT_REASONS,
    BeamCandidates,
    BeamGroup,
    BeamSearch,
    BeamShape,
)
from descant.decoding.strategies.beams.finished_pool import bank_order, top_unfinished
from descant.errors import InputError

__all__ = ["ConstrainedBeamSearch", "ConstrainedCandidate", "advancing_tokens", "allocate_by_bank"]


class ConstrainedCandidate(NamedTuple):
    """One continuation that may be kept."""

    row: int
    token: int
    sum_logprob: float
    constraint_state: ConstraintListState  # of the constraints after it
    finish_reason: str | None  # why it is cut off


class ConstrainedBeamSearch(BeamSearch):
    """A beam search whose results meet their request's constraints, or say which they do not.

    Beside the likeliest continuations there are those that go on with a constraint; beams are dealt out
    by how much of the constraints each has met (Post and Vilar 2018, arXiv 1804.06609). Only new tokens
    count. A text that ends before it has met all of them is kept in reserve, and returned after those
    that have where these are too few.
    """

    columns: Mapping[str, Tensor] = {
        **BeamSearch.columns,
        "constraint_steps": torch.zeros(1, dtype=torch.long),  # steps of its constraints that the row has met
    }

    def __init__(
        self, shape: BeamShape, noise: NoiseSource, stop: StopCondition, peers: RankGroup | None = None
    ) -> None:
        super().__init__(shape, noise, stop, peers)
        self._constraint_states: dict[int, dict[int, ConstraintListState]] = {}  # by request and slot
        self._next_states: dict[int, dict[int, ConstraintListState]] = {}  # the same after this step
        self._token_states: dict[tuple[int, int], ConstraintListState] = {}  # by row and token, in this step
        self._unmet_truncated: dict[int, list[Hypothesis]] = {}  # what was cut off
        self._unmet_finished: dict[int, list[Hypothesis]] = {}  # what ended by itself

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """The continuations that are kept of every request."""
        self._token_states, self._next_states = {}, {request: {} for request in set(rows.request.tolist())}
        selection = super().select(rows, proposal, output)
        self._constraint_states |= self._next_states
        for request in (*selection.finished, *selection.failed):
            self._constraint_states.pop(request, None)
        return selection

    def drop(self, request: int) -> None:
        """Forget a request."""
        super().drop(request)
        for kept in (self._constraint_states, self._unmet_truncated, self._unmet_finished):
            kept.pop(request, None)

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's pools so far, best first, and after them what does not meet all constraints."""
        found = super().finished_so_far(request)
        for some in (self._unmet_truncated, self._unmet_finished):
            found += sorted(
                some.get(request, ()), key=lambda one: (len(one.unmet_constraints or ()), -(one.score or 0.0))
            )
        return found

    def _has_results(self, team: BeamGroup) -> Array:
        return np.array([bool(self.finished_so_far(request)) for request in team.requests.tolist()])

    def _select_group(self, rows: Rows, scores: Tensor, team: BeamGroup) -> Selection:
        return self._select_group_tokens(rows, scores, team)[0]

    def _select_group_tokens(self, rows: Rows, scores: Tensor, team: BeamGroup) -> tuple[Selection, Array]:
        """One step of a team, and the tokens chosen [B, W]."""
        found = self._top_candidates(rows, scores, team)
        final = found.reason_mask("eos", "stop")
        best = top_unfinished(found.sum_logprobs, final, self._shape.group_size)
        entries = self._unconstrained_candidates(rows, found, final, best)
        led = self._advancing_candidates(rows, scores, team, entries)
        chosen = [
            allocate_by_bank(some, more, self._shape.group_size)
            for some, more in zip(entries, led, strict=True)
        ]
        self._keep_completed(rows, scores, team, chosen)
        retired = self._route_finished(rows, team, found, final)
        going = self._finished_pools.can_improve(team.pool_indices, team.scoring, found.sum_logprobs[:, 0])
        kept = self._as_beam_candidates(rows, found, chosen)
        cut = kept.reason_mask(*LIMIT_REASONS)
        if cut.any():
            retired += self._route_finished(rows, team, kept, cut & going[:, None], truncated=True)
            going &= ~cut.any(1)
        place = np.broadcast_to(np.arange(kept.sum_logprobs.shape[1]), kept.sum_logprobs.shape)
        for line in np.flatnonzero(going).tolist():
            states = self._next_states[int(team.requests[line])]
            for slot, entry in enumerate(chosen[line]):
                states[slot + team.group_index * self._shape.group_size] = entry.constraint_state
        tokens = np.where(kept.sum_logprobs > -np.inf, kept.tokens.numpy(), -1)
        return self._with_constraint_steps(
            rows, self._build_selection(rows, team, kept, place, kept.sum_logprobs, going, retired)
        ), tokens

    def _with_constraint_steps(self, rows: Rows, kept: Selection) -> Selection:
        """The same, with what each row has met."""
        assert kept.parents is not None
        assert kept.slot is not None
        whose = zip(rows.request[kept.parents].tolist(), kept.slot.tolist(), strict=True)
        met = torch.tensor(
            [self._next_states[request][slot].steps_met for request, slot in whose], dtype=torch.long
        )
        return kept._replace(columns={**kept.columns, "constraint_steps": met})

    # -------------------------------------------------------------------- what may be kept
    def _row_state(self, rows: Rows, row: int) -> ConstraintListState:
        """The constraints as a row has met them."""
        request, slot = int(rows.request[row]), int(rows.slot[row])
        if rows.length[row] == rows.prompt_length[row]:
            demands = row_params(rows).values["constraint_state"]
            assert not isinstance(demands, Tensor)
            first: ConstraintListState = demands[row]
            return first.copy(stateful=False)
        return self._constraint_states[request][slot]

    def _state_after(self, rows: Rows, row: int, token: int) -> ConstraintListState:
        """The constraints as a row has met them with one more token."""
        known = self._token_states.get((row, token))
        if known is None:
            known = self._token_states[row, token] = self._row_state(rows, row).copy()
            known.add(token)
        return known

    def _unconstrained_candidates(
        self, rows: Rows, found: BeamCandidates, final: Array, best: Array
    ) -> list[list[ConstrainedCandidate]]:
        """The candidates that beams would keep without constraints, by request."""
        entries = []
        for line, places in enumerate(best.tolist()):
            some = []
            for place in places:
                score = float(found.sum_logprobs[line, place])
                if final[line, place] or score == -np.inf:
                    continue
                row, token = int(found.parent_rows[line, place]), int(found.tokens[line, place])
                reason = found.finish_reason(line, place) if found.finished_mask[line, place] else None
                some.append(
                    ConstrainedCandidate(row, token, score, self._state_after(rows, row, token), reason)
                )
            entries.append(some)
        return entries

    def _advancing_candidates(
        self, rows: Rows, scores: Tensor, team: BeamGroup, entries: Sequence[Sequence[ConstrainedCandidate]]
    ) -> list[list[ConstrainedCandidate]]:
        """The continuations that go on with a constraint, besides those at hand, by request."""
        pairs: list[tuple[int, int, int]] = []
        led: list[list[ConstrainedCandidate]] = [[] for _ in entries]
        waiting: list[tuple[int, int]] = []  # rows in the gap after a constraint, which no token leads on
        for line, some in enumerate(entries):
            seen = {(entry.row, entry.token) for entry in some}
            states = {row: self._row_state(rows, row) for row in team.rows[line].tolist()}
            pairs += [(line, *pair) for pair in advancing_tokens(states, seen, scores.shape[1])]
            held = {entry.row for entry in some}
            waiting += [
                (line, row)
                for row, state in states.items()
                if row not in held and not state.completed and state.advance() is None
            ]
        for line, entry in zip(
            (line for line, *_ in pairs), self._make_candidates(rows, scores, pairs), strict=True
        ):
            led[line] += [] if entry is None else [entry]
        for line, entry in self._best_continuations(rows, scores, waiting):
            led[line].append(entry)
        return led

    def _make_candidates(
        self, rows: Rows, scores: Tensor, pairs: Sequence[tuple[int, int, int]]
    ) -> list[ConstrainedCandidate | None]:
        """Continuations given as line, row and token; None where one is impossible or ends by itself."""
        if not pairs:
            return []
        _, whence, tokens = torch.tensor(pairs).T
        device = scores.device
        sums = scores[whence.to(device), tokens.to(device)] + rows.column("score")[whence].to(device)
        bits = sums.contiguous().view(torch.int32).long()
        bits = (bits if self._peers is None else self._peers.broadcast(bits)).cpu()
        values = bits.to(torch.int32).view(torch.float32).tolist()
        reasons = self._stop.finish_reasons(rows, whence, tokens)
        entries: list[ConstrainedCandidate | None] = []
        for at, (_, row, token) in enumerate(pairs):
            why = [name for name, which in reasons if which[at]]
            able = values[at] > -np.inf and all(name in LIMIT_REASONS for name in why)
            state = self._state_after(rows, row, token) if able else None
            entries.append(
                None
                if state is None
                else ConstrainedCandidate(row, token, values[at], state, why[0] if why else None)
            )
        return entries

    def _best_continuations(
        self, rows: Rows, scores: Tensor, wanted: Sequence[tuple[int, int]]
    ) -> list[tuple[int, ConstrainedCandidate]]:
        """The likeliest continuation that does not end, of rows given as line and row."""
        if not wanted:
            return []
        index = torch.tensor([row for _, row in wanted])
        top = index_rows(scores, index).topk(min(self._shape.candidates_per_beam, scores.shape[1])).indices
        top = (top if self._peers is None else self._peers.broadcast(top)).cpu()
        pairs = [
            (line, row, token)
            for (line, row), some in zip(wanted, top.tolist(), strict=True)
            for token in some
        ]
        found: dict[tuple[int, int], ConstrainedCandidate] = {}
        for (line, row, _), entry in zip(pairs, self._make_candidates(rows, scores, pairs), strict=True):
            if entry is not None:
                found.setdefault((line, row), entry)
        return [(line, entry) for (line, _), entry in found.items()]

    def _keep_completed(
        self, rows: Rows, scores: Tensor, team: BeamGroup, chosen: list[list[ConstrainedCandidate]]
    ) -> None:
        """Keep a text that has met everything where none else has and there is no time to begin again."""
        left = team.scoring.max_new_tokens - team.scoring.num_new_tokens
        wanted = []
        for line in np.flatnonzero(self._finished_pools.is_empty(team.pool_indices)).tolist():
            states = {row: self._row_state(rows, row) for row in team.rows[line].tolist()}
            late = left[line] < next(iter(states.values())).copy(stateful=False).min_tokens_left
            if late and chosen[line] and not any(entry.constraint_state.completed for entry in chosen[line]):
                wanted += [(line, row) for row, state in states.items() if state.completed]
        best: dict[int, ConstrainedCandidate] = {}
        for line, entry in self._best_continuations(rows, scores, wanted):
            if line not in best or entry.sum_logprob > best[line].sum_logprob:
                best[line] = entry
        for line, entry in best.items():
            chosen[line][-1 if len(chosen[line]) == self._shape.group_size else len(chosen[line]) :] = [entry]

    def _as_beam_candidates(
        self, rows: Rows, found: BeamCandidates, chosen: Sequence[Sequence[ConstrainedCandidate]]
    ) -> BeamCandidates:
        """The entries as candidates [B, W], of sum -inf where there are fewer."""
        shape = (len(chosen), self._shape.group_size)
        sums = np.full(shape, -np.inf, dtype=found.sum_logprobs.dtype)
        whence, tokens = found.parent_rows[:, :1].repeat(1, shape[1]), torch.zeros(shape, dtype=torch.long)
        cut = {name: np.zeros(shape, dtype=bool) for name in LIMIT_REASONS}
        for line, some in enumerate(chosen):
            for place, entry in enumerate(some):
                sums[line, place], whence[line, place], tokens[line, place] = (
                    entry.sum_logprob,
                    entry.row,
                    entry.token,
                )
                if entry.finish_reason is not None:
                    cut[entry.finish_reason][line, place] = True
        ends = np.logical_or.reduce(list(cut.values()))
        reasons = [(name, which.flatten()) for name, which in cut.items() if which.any()]
        slots = rows.slot[whence]
        first = found.parent_slots[:, :1].expand_as(slots)
        slots = torch.where(rows.length[whence] == rows.prompt_length[whence], first, slots)
        return BeamCandidates(sums, whence, slots, tokens, ends, reasons)

    # -------------------------------------------------------------------- what ends
    def _route_finished(
        self, rows: Rows, team: BeamGroup, found: BeamCandidates, ready: Array, truncated: bool = False
    ) -> list[tuple[int, Hypothesis]]:
        """Offer what has ended and meets all constraints to the pools; put the rest in reserve."""
        wide = found.sum_logprobs.shape[1] if truncated else self._shape.group_size
        met = np.zeros_like(ready)
        retired = []
        shares = team.scoring.normalized_scores(found.sum_logprobs)
        for line, place in np.argwhere(ready[:, :wide] & (found.sum_logprobs[:, :wide] > -np.inf)).tolist():
            row, token = int(found.parent_rows[line, place]), int(found.tokens[line, place])
            if self._state_after(rows, row, token).completed:
                met[line, place] = True
                continue
            written = rows.tokens[row].cpu()
            one = self._hypothesis(rows, found, line, place, float(shares[line, place]), written)
            retired.append(one)
            some = (self._unmet_truncated if truncated else self._unmet_finished).setdefault(
                int(team.requests[line]), []
            )
            some.append(one[1])
            some.sort(key=lambda other: (len(other.unmet_constraints or ()), -(other.score or 0.0)))
            del some[self._shape.num_beams :]
        return retired + self._add_finished(rows, team, found, met, include_all=truncated)

    def _hypothesis(
        self, rows: Rows, found: BeamCandidates, line: int, place: int, score: float, written: Tensor
    ) -> tuple[int, Hypothesis]:
        """A candidate as a sequence that has ended, with the row it continued."""
        row, one = super()._hypothesis(rows, found, line, place, score, written)
        state = self._state_after(rows, row, int(found.tokens[line, place]))
        one.unmet_constraints, one.constraint_steps = state.unmet_indices, state.steps_met
        return row, one


def advancing_tokens(
    states: Mapping[int, ConstraintListState], seen: Collection[tuple[int, int]], vocabulary: int
) -> list[tuple[int, int]]:
    """The rows and tokens that go on with a constraint, but those seen, by what each row has met."""
    pairs = []
    for row, state in states.items():
        for token in () if state.completed else state.advance() or ():
            if not 0 <= token < vocabulary:
                must = f"must advance by tokens below {vocabulary}, the vocabulary"
                raise InputError("constraints", must, token)
            if (row, token) not in seen:
                pairs.append((row, token))
    return pairs


def allocate_by_bank(
    likely: list[ConstrainedCandidate], led: list[ConstrainedCandidate], width: int
) -> list[ConstrainedCandidate]:
    """`width` of the likeliest continuations and of those that are led, the best of every bank first."""
    if not led:
        return likely
    both = likely + led
    banks = np.array([entry.constraint_state.get_bank() for entry in both])
    sums = np.array([entry.sum_logprob for entry in both])
    return [both[place] for place in bank_order(banks, sums, width)]
