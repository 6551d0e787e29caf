"""Scorers: beam search for those who write the loop themselves, and the rules by which it chooses.

They keep the pools and the rules of the strategies; what the model says, and the beams, are the caller's.
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
    """The rules of beam search, in groups or not, for a batch whose beams the caller keeps.

    The caller's loop gives `process` the best candidates of every request and does as it says; when
    `is_done`, or at its own limit, it calls `finalize`. With several groups (Vijayakumar et al. 2018,
    arXiv 1610.02424) it calls `process` for each of them, with the rows of that group.

    `length_penalty` is the power of the number of new tokens that divides a sum; `decoder_prompt_len`,
    unless given, is the width of the first step's `input_ids`.
    """

    def __init__(  # noqa: PLR0913 - as documented
        self,
        batch_size: int,
        num_beams: int,
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
        """The beams of the next step [B * G], of the best candidates of this one [B, K], best first.

        `next_indices` are the beams of the request, from 0, that the candidates continue. Requests that are
        done are given the pad token on their own rows.
        """
        given = ScorerInputs(
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
        return self._process_step(given)


class ConstrainedBeamSearchScorer(PooledBeamScorer):
    """The same for texts that must meet constraints, towards which beams are led.

    Only new tokens count. Sequences that do not meet all constraints are returned where too few do, after
    those; `unmet_constraints` tells the places of those that are missing.
    """

    num_tiers = 3  # what meets all constraints, what was cut off before, what ended before

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
        """The beams of the next step [B * G], of the best candidates and the sums of all [B * G, V]."""
        given = ScorerInputs(
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
        return self._process_step(given)

    def _choose_beams(
        self, given: ScorerInputs, found: ScorerCandidates, best: Array, live: Array
    ) -> tuple[Array, Array, Array]:
        """Rows, tokens and sums of the beams that go on [B, G], dealt out by how much each has met."""
        texts = self._beam_states[found.group_index]
        texts.begin_step(given.input_ids[:, self._prompt_length :].tolist(), self.group_size)
        rows, tokens, sums = super()._choose_beams(given, found, best, live)
        likely = {
            line: [
                ConstrainedCandidate(row, token, total, texts.state_after(row, token), None)
                for row, token, total in zip(
                    *(part[line].tolist() for part in (rows, tokens, sums)), strict=True
                )
                if total > -np.inf
            ]
            for line in np.flatnonzero(live).tolist()
        }
        led = self._advancing_candidates(given, found, likely)
        for line, some in likely.items():
            for place, one in enumerate(allocate_by_bank(some, led[line], self.group_size)):
                rows[line, place], tokens[line, place], sums[line, place] = (
                    one.row,
                    one.token,
                    one.sum_logprob,
                )
        return rows, tokens, sums

    def _advancing_candidates(
        self,
        given: ScorerInputs,
        found: ScorerCandidates,
        likely: Mapping[int, Sequence[ConstrainedCandidate]],
    ) -> dict[int, list[ConstrainedCandidate]]:
        """The continuations that go on with a constraint, besides the likeliest, by request."""
        assert given.scores_for_all_vocab is not None
        texts, size = self._beam_states[found.group_index], self.group_size
        pairs = []
        for line, some in likely.items():
            mine = range(line * size, (line + 1) * size)
            states = {row: texts.state(row) for row in mine if texts.first_rows[row] == row}
            seen = {(texts.first_rows[entry.row], entry.token) for entry in some}
            pairs += advancing_tokens(states, seen, given.scores_for_all_vocab.shape[1])
        pairs = [pair for pair in pairs if pair[1] not in found.eos_token_ids]
        led: dict[int, list[ConstrainedCandidate]] = {line: [] for line in likely}
        if pairs:
            rows, tokens = torch.tensor(pairs, device=given.scores_for_all_vocab.device).T
            for (row, token), total in zip(
                pairs, given.scores_for_all_vocab[rows, tokens].tolist(), strict=True
            ):
                if total > -np.inf:
                    led[row // size].append(
                        ConstrainedCandidate(row, token, total, texts.state_after(row, token), None)
                    )
        return led

    def _unmet_constraints(self, found: ScorerCandidates, line: int, place: int) -> tuple[int, ...]:
        row = int(found.rows[line, place])
        if found.tokens is not None:
            return (
                self._beam_states[found.group_index]
                .state_after(row, int(found.tokens[line, place]))
                .unmet_indices
            )
        state = self._initial_state.copy(stateful=False)
        state.reset(found.input_ids[row, self._prompt_length :].tolist())
        return state.unmet_indices

    def _tier(self, found: ScorerCandidates, unmet: tuple[int, ...]) -> int:
        if not unmet:
            return 0
        return 1 if found.tokens is None else 2

    def _build_output(self, kept: Sequence[BeamHypothesis], *given: Any) -> dict[str, Any]:
        return super()._build_output(kept, *given) | {
            "unmet_constraints": tuple(one.unmet_constraints for one in kept)
        }


class BeamConstraintStates:
    """What the texts of a group's rows have met of the constraints; each token is read once."""

    def __init__(self, demands: ConstraintListState) -> None:
        self._initial_state = demands
        self._current_states: dict[tuple[int, ...], ConstraintListState] = {}  # after the step before
        self._next_states: dict[tuple[int, ...], ConstraintListState] = {}  # after this step
        self._sequences: list[tuple[int, ...]] = []
        self.first_rows: list[int] = []  # the request's first row of the same text

    def begin_step(self, texts: Sequence[Sequence[int]], beams: int) -> None:
        """Begin a step with these texts, of so many beams a request."""
        self._current_states, self._next_states = self._next_states, {}
        self._sequences = [tuple(text) for text in texts]
        where: dict[tuple[int, tuple[int, ...]], int] = {}
        self.first_rows = [
            where.setdefault((row // beams, text), row) for row, text in enumerate(self._sequences)
        ]

    def state(self, row: int) -> ConstraintListState:
        """The constraints as a row has met them."""
        text = self._sequences[row]
        if text not in self._current_states:
            self._current_states[text] = state = self._initial_state.copy(stateful=False)
            state.reset(text)
        return self._current_states[text]

    def state_after(self, row: int, token: int) -> ConstraintListState:
        """The constraints as a row has met them with one more token."""
        text = (*self._sequences[row], token)
        if text not in self._next_states:
            self._next_states[text] = state = self.state(row).copy()
            state.add(token)
        return self._next_states[text]
