"""Beam scorers for callers who write the beam search loop themselves.

They use the pools and rules of the strategies; forwards and beams are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.decoding.constraints import Constraint, ConstraintListState
from descant.decoding.strategies.beams.constrained import (
    ConstrainedCandidate,
    advancing_tokens,
    allocate_by_bank,
)
from descant.decoding.strategies.beams.scorer_base import (
    BeamHypothesis,
    BeamIndices,
    BeamScorer,
    EosTokenIds,
    PooledBeamScorer,
    ScorerCandidates,
    ScorerInputs,
)
from descant.errors import InputError

__all__ = ["BeamScorer", "BeamSearchScorer", "ConstrainedBeamSearchScorer"]


class BeamSearchScorer(PooledBeamScorer):
    """The rules of beam search, with or without groups, for a batch whose beams the caller keeps.

    The caller's loop passes the best candidates of every request to `process` and continues with the beams it
    returns; when `is_done`, or at its own limit, it calls `finalize`. With several groups (Vijayakumar et al.
    2018, arXiv 1610.02424) it calls `process` once per group, with that group's rows.

    A sum is divided by the number of new tokens to the power of `length_penalty`; `decoder_prompt_len`
    defaults to the width of the first step's `input_ids`.
    """

    def process(  # type: ignore[override]  # noqa: PLR0913 - as documented
        self,
        input_ids: Tensor,
        next_scores: Tensor,
        next_tokens: Tensor,
        next_indices: Tensor,
        pad_token_id: int | Tensor | None = None,
        eos_token_id: EosTokenIds = None,
        beam_indices: BeamIndices = None,
        group_index: int = 0,
        decoder_prompt_len: int | None = None,
    ) -> dict[str, Tensor]:
        """The beams of the next step [B * G], from the best candidates of this one [B, K], best first.

        `next_indices` are the beams, from 0, that the candidates continue. Requests that are done get the pad
        token on their own rows.
        """
        inputs = ScorerInputs(
            input_ids,
            next_scores,
            next_tokens,
            next_indices,
            pad_token_id,
            eos_token_id,
            beam_indices,
            group_index,
            decoder_prompt_len,
        )
        return self._process_step(inputs)


class ConstrainedBeamSearchScorer(PooledBeamScorer):
    """The rules of constrained beam search, for a batch whose beams the caller keeps.

    Only new tokens count. Sequences with unmet constraints are returned last, and only if too few meet all of
    them; `unmet_constraints` lists the indices of the unmet ones.
    """

    num_tiers = 3  # all constraints met, truncated with unmet ones, finished with unmet ones

    def __init__(  # noqa: PLR0913 - as documented
        self,
        batch_size: int,
        num_beams: int,
        constraints: Sequence[Constraint],
        device: torch.device | str,
        length_penalty: float = 1.0,
        do_early_stopping: bool | str = False,
        num_beam_hyps_to_keep: int = 1,
        num_beam_groups: int = 1,
        max_length: int | None = None,
    ) -> None:
        super().__init__(
            batch_size,
            num_beams,
            device,
            length_penalty,
            do_early_stopping,
            num_beam_hyps_to_keep,
            num_beam_groups,
            max_length,
        )
        self.constraints = constraints
        self._initial_state = ConstraintListState(constraints)
        self._beam_states = [BeamConstraintStates(self._initial_state) for _ in range(self.num_beam_groups)]

    def process(  # type: ignore[override]  # noqa: PLR0913 - as documented
        self,
        input_ids: Tensor,
        next_scores: Tensor,
        next_tokens: Tensor,
        next_indices: Tensor,
        scores_for_all_vocab: Tensor,
        pad_token_id: int | Tensor | None = None,
        eos_token_id: EosTokenIds = None,
        beam_indices: BeamIndices = None,
        decoder_prompt_len: int | None = None,
        group_index: int = 0,
    ) -> dict[str, Tensor]:
        """The beams of the next step [B * G], from the best candidates and all sums [B * G, V]."""
        inputs = ScorerInputs(
            input_ids,
            next_scores,
            next_tokens,
            next_indices,
            pad_token_id,
            eos_token_id,
            beam_indices,
            group_index,
            decoder_prompt_len,
            scores_for_all_vocab,
        )
        if scores_for_all_vocab.ndim != 2 or len(scores_for_all_vocab) != len(input_ids):
            must = f"must be of shape [{len(input_ids)}, V]"
            raise InputError("scores_for_all_vocab", must, scores_for_all_vocab)
        return self._process_step(inputs)

    def _choose_beams(
        self, inputs: ScorerInputs, candidates: ScorerCandidates, best: Array, is_active: Array
    ) -> tuple[Array, Array, Array]:
        """Rows, tokens and sums of the beams that continue [B, G], allocated by constraint steps met."""
        states = self._beam_states[candidates.group_index]
        states.begin_step(inputs.input_ids[:, self._prompt_length :].tolist(), self.group_size)
        rows, tokens, sums = super()._choose_beams(inputs, candidates, best, is_active)
        likely = {
            index: [
                ConstrainedCandidate(row, token, total, states.state_after(row, token), None)
                for row, token, total in zip(
                    *(part[index].tolist() for part in (rows, tokens, sums)), strict=True
                )
                if total > -np.inf
            ]
            for index in np.flatnonzero(is_active).tolist()
        }
        advancing = self._advancing_candidates(inputs, candidates, likely)
        for index, entries in likely.items():
            for rank, entry in enumerate(allocate_by_bank(entries, advancing[index], self.group_size)):
                rows[index, rank], tokens[index, rank], sums[index, rank] = (
                    entry.row,
                    entry.token,
                    entry.sum_logprob,
                )
        return rows, tokens, sums

    def _advancing_candidates(
        self,
        inputs: ScorerInputs,
        candidates: ScorerCandidates,
        likely: Mapping[int, Sequence[ConstrainedCandidate]],
    ) -> dict[int, list[ConstrainedCandidate]]:
        """Further candidates that advance a constraint, by request."""
        assert inputs.scores_for_all_vocab is not None
        beam_states, size = self._beam_states[candidates.group_index], self.group_size
        pairs = []
        for index, entries in likely.items():
            group_rows = range(index * size, (index + 1) * size)
            row_states = {
                row: beam_states.state(row) for row in group_rows if beam_states.first_rows[row] == row
            }
            known = {(beam_states.first_rows[entry.row], entry.token) for entry in entries}
            pairs += advancing_tokens(row_states, known, inputs.scores_for_all_vocab.shape[1])
        pairs = [pair for pair in pairs if pair[1] not in candidates.eos_token_ids]
        advancing: dict[int, list[ConstrainedCandidate]] = {index: [] for index in likely}
        if pairs:
            rows, tokens = torch.tensor(pairs, device=inputs.scores_for_all_vocab.device).T
            for (row, token), total in zip(
                pairs, inputs.scores_for_all_vocab[rows, tokens].tolist(), strict=True
            ):
                if total > -np.inf:
                    advancing[row // size].append(
                        ConstrainedCandidate(row, token, total, beam_states.state_after(row, token), None)
                    )
        return advancing

    def _unmet_constraints(self, candidates: ScorerCandidates, index: int, rank: int) -> tuple[int, ...]:
        row = int(candidates.rows[index, rank])
        if candidates.tokens is not None:
            return (
                self._beam_states[candidates.group_index]
                .state_after(row, int(candidates.tokens[index, rank]))
                .unmet_indices
            )
        state = self._initial_state.copy(stateful=False)
        state.reset(candidates.input_ids[row, self._prompt_length :].tolist())
        return state.unmet_indices

    def _tier(self, candidates: ScorerCandidates, unmet: tuple[int, ...]) -> int:
        if not unmet:
            return 0
        return 1 if candidates.tokens is None else 2

    def _build_output(self, hypotheses: Sequence[BeamHypothesis], *arguments: Any) -> dict[str, Any]:
        return super()._build_output(hypotheses, *arguments) | {
            "unmet_constraints": tuple(hypothesis.unmet_constraints for hypothesis in hypotheses)
        }


class BeamConstraintStates:
    """The constraint states of a group's rows, cached by their token sequences."""

    def __init__(self, initial_state: ConstraintListState) -> None:
        self._initial_state = initial_state
        self._current_states: dict[tuple[int, ...], ConstraintListState] = {}  # before this step
        self._next_states: dict[tuple[int, ...], ConstraintListState] = {}  # after this step
        self._sequences: list[tuple[int, ...]] = []
        self.first_rows: list[int] = []  # the request's first row with the same tokens

    def begin_step(self, sequences: Sequence[Sequence[int]], num_beams: int) -> None:
        """Start a step with these token sequences, `num_beams` per request."""
        self._current_states, self._next_states = self._next_states, {}
        self._sequences = [tuple(sequence) for sequence in sequences]
        row_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self.first_rows = [
            row_of.setdefault((row // num_beams, sequence), row)
            for row, sequence in enumerate(self._sequences)
        ]

    def state(self, row: int) -> ConstraintListState:
        """The constraint state of a row."""
        sequence = self._sequences[row]
        if sequence not in self._current_states:
            self._current_states[sequence] = state = self._initial_state.copy(stateful=False)
            state.reset(sequence)
        return self._current_states[sequence]

    def state_after(self, row: int, token: int) -> ConstraintListState:
        """The constraint state of a row after one more token."""
        sequence = (*self._sequences[row], token)
        if sequence not in self._next_states:
            self._next_states[sequence] = state = self.state(row).copy()
            state.add(token)
        return self._next_states[sequence]
