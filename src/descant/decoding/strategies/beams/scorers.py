"""Beam scorers for callers who write the beam search loop themselves.

They use the pools and rules of the strategies; forwards and beams are the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from descant.config import field_types as kinds
from descant.config.fields import FieldType
from descant.core.interfaces import Array
from descant.core.records import Hypothesis
from descant.decoding.constraints import Constraint, ConstraintListState
from descant.decoding.strategies.beams.constrained import (
    ConstrainedCandidate,
    advancing_tokens,
    allocate_by_bank,
)
from descant.decoding.strategies.beams.finished_pool import BeamScoring, FinishedHypotheses, top_unfinished
from descant.errors import InputError, RowError

EosTokenIds = int | Sequence[int] | Tensor | None
Texts = Sequence[tuple[int, ...]]  # the new tokens of each row
BeamIndices = Sequence[Sequence[int | Tensor]] | Tensor | None
MIN_SCORE = np.finfo(np.float64).min
LENGTH_PENALTY = kinds.real(-50.0, 50.0)


class BeamScorer(ABC):
    """Decides in a caller's beam search loop which beams continue and which sequences are returned."""

    @abstractmethod
    def process(
        self,
        input_ids: Tensor,
        next_scores: Tensor,
        next_tokens: Tensor,
        next_indices: Tensor,
        **kwargs: Any,
    ) -> Mapping[str, Tensor]:
        """The beams of the next step, from the best candidates of this one [B, K]."""

    @abstractmethod
    def finalize(
        self,
        input_ids: Tensor,
        final_beam_scores: Tensor,
        final_beam_tokens: Tensor,
        final_beam_indices: Tensor,
        max_length: int | None,
        **kwargs: Any,
    ) -> Mapping[str, Any]:
        """The best sequences, after the last step."""


@dataclass
class ScorerCandidates:
    """Candidates on the host [B, n]; B counts the requests, in `finalize` every group of each."""

    input_ids: Tensor  # [R, L]
    sum_logprobs: Array  # float64
    rows: Array  # the row of `input_ids` that each continues or is
    tokens: Array | None  # the tokens that follow; None: the rows themselves
    pool_indices: Array  # [B] index of each one's pool
    scoring: BeamScoring
    beam_indices: BeamIndices
    end_tokens: tuple[int, ...] = ()

    def to_hypothesis(self, index: int, rank: int, score: float, unmet: tuple[int, ...]) -> Hypothesis:
        """A candidate as a finished sequence."""
        row = int(self.rows[index, rank])
        tokens, beam_indices = self.input_ids[row].cpu(), None
        if self.beam_indices is not None:
            beam_indices = tuple(int(beam) for beam in self.beam_indices[row] if int(beam) >= 0)
        if self.tokens is not None:
            tokens = torch.cat((tokens, tokens.new_tensor([self.tokens[index, rank]])))
            beam_indices = None if beam_indices is None else (*beam_indices, row)
        return Hypothesis(tokens, "eos", score, beam_indices, unmet_constraints=unmet)


class PooledBeamScorer(BeamScorer):
    """Base of both scorers: pools of finished sequences for every group of every request."""

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
        self.batch_size = _parse("batch_size", batch_size, kinds.integer(1))
        self.num_beams = _parse("num_beams", num_beams, kinds.integer(2))
        self.num_beam_groups = _parse("num_beam_groups", num_beam_groups, kinds.integer(1))
        if self.num_beams % self.num_beam_groups:
            raise InputError("num_beam_groups", f"must divide num_beams={num_beams}", num_beam_groups)
        self.group_size = self.num_beams // self.num_beam_groups
        self.device = torch.device(device)
        self.length_penalty = _parse("length_penalty", length_penalty, LENGTH_PENALTY)
        self.do_early_stopping = _parse("do_early_stopping", do_early_stopping, kinds.early_stopping_mode())
        self.num_beam_hyps_to_keep = _parse("num_beam_hyps_to_keep", num_beam_hyps_to_keep, kinds.integer(1))
        if num_beam_hyps_to_keep > num_beams:
            raise InputError(
                "num_beam_hyps_to_keep", f"must be at most num_beams={num_beams}", num_beam_hyps_to_keep
            )
        self.max_length = None if max_length is None else _parse("max_length", max_length, kinds.integer(1))
        if self.do_early_stopping == "never" and self.max_length is None:
            raise InputError("max_length", 'must be given with do_early_stopping="never"', None)
        # In the order in which they are returned: all constraints met, truncated with unmet ones, finished
        # with unmet ones.
        sizes = self.group_size, self.num_beam_groups
        self._finished_pools = [FinishedHypotheses(*sizes) for _ in range(3)]
        for pools in self._finished_pools:
            pools.add_requests(np.arange(self.batch_size))
        self._done: Array = np.zeros((self.batch_size, self.num_beam_groups), dtype=bool)
        self._prompt_length: int | None = None  # set in the first step

    @property
    def is_done(self) -> bool:
        """Whether no request can still improve."""
        return bool(self._done.all())

    def finalize(  # type: ignore[override]  # noqa: PLR0913 - as documented
        self,
        input_ids: Tensor,
        final_beam_scores: Tensor,
        final_beam_tokens: Tensor,  # noqa: ARG002 - `input_ids` end with them
        final_beam_indices: Tensor,  # noqa: ARG002
        max_length: int | None,
        pad_token_id: int | Tensor | None = None,
        eos_token_id: EosTokenIds = None,  # noqa: ARG002 - finished sequences have theirs
        beam_indices: BeamIndices = None,
        decoder_prompt_len: int | None = None,
    ) -> dict[str, Any]:
        """The `num_beam_hyps_to_keep` best sequences of every request.

        `input_ids` [B * num_beams, L] are the beams after the last step, `final_beam_scores` their sums.
        """
        if not self._done.all():
            rows = np.arange(self.batch_size * self.num_beams).reshape(-1, self.group_size)
            _check_shape("input_ids", input_ids, [rows.size, input_ids.shape[-1]])
            _check_shape("final_beam_scores", final_beam_scores, [rows.size])
            _check_beam_indices(beam_indices, rows.size)
            sums = _to_float64("final_beam_scores", final_beam_scores).reshape(rows.shape)
            scoring = self._beam_scoring(len(rows), input_ids.shape[1], decoder_prompt_len, None)
            pools = np.arange(len(rows))
            candidates = ScorerCandidates(input_ids, sums, rows, None, pools, scoring, beam_indices)
            self._add_finished(candidates, np.repeat(~self._done.reshape(-1, 1), self.group_size, 1))
            self._done[:] = True
        hypotheses = [
            hypothesis for request in range(self.batch_size) for hypothesis in self._best_hypotheses(request)
        ]
        return self._build_output(hypotheses, input_ids, max_length, pad_token_id)

    # -------------------------------------------------------------------- one step
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
        size, requests = self.group_size, np.arange(self.batch_size)
        group = _parse("group_index", group_index, kinds.integer(0))
        if group >= self.num_beam_groups:
            raise InputError("group_index", f"must be below num_beam_groups={self.num_beam_groups}", group)
        _check_shape("input_ids", input_ids, [self.batch_size * size, input_ids.shape[-1]])
        _check_beam_indices(beam_indices, len(input_ids))
        given = next_scores, next_tokens, next_indices
        sums, tokens, indices = self._parse_candidates(*given)
        candidates = ScorerCandidates(
            input_ids,
            sums,
            requests[:, None] * size + indices,
            tokens,
            requests * self.num_beam_groups + group,
            self._beam_scoring(self.batch_size, input_ids.shape[1] + 1, decoder_prompt_len, input_ids),
            beam_indices,
            _eos_token_ids(eos_token_id),
        )
        beams = self._advance(candidates, group, pad_token_id)
        names = ("next_beam_scores", "next_beam_tokens", "next_beam_indices")
        return {
            name: torch.from_numpy(part.flatten()).to(like.dtype).to(input_ids.device)
            for name, part, like in zip(names, beams, given, strict=True)
        }

    def _advance(
        self, candidates: ScorerCandidates, group: int, pad_token_id: int | Tensor | None
    ) -> list[Array]:
        """Sums, tokens and rows of the beams that continue [B, G]; finished candidates go to their pools."""
        size, sums, tokens = self.group_size, candidates.sum_logprobs, candidates.tokens
        assert tokens is not None
        is_active, is_end = ~self._done[:, group], np.isin(tokens, candidates.end_tokens)
        if not is_active.all() and pad_token_id is None:
            raise InputError("pad_token_id", "must be given when requests of a batch are done", None)
        if (is_active & ((~is_end).sum(1) < size)).any():
            must = f"must have at least {size} tokens per prompt that are not end tokens"
            hint = f"pass the best {size} * (1 + the number of end tokens) candidates"
            raise InputError("next_tokens", must, tokens.tolist(), hint)
        # Impossible candidates may fill up the beams, but must rank above end tokens (-inf here).
        best = top_unfinished(np.maximum(sums, MIN_SCORE), is_end, size)
        chosen = self._choose_beams(candidates, best, is_active)
        ready = is_end & is_active[:, None] & (sums > -np.inf)
        ready[:, size:] = False
        self._add_finished(candidates, ready)
        self._done[:, group] |= ~self._finished_pools[0].can_improve(
            candidates.pool_indices, candidates.scoring, sums.max(1)
        )
        own_rows = np.arange(self.batch_size * size).reshape(-1, size)
        idle: tuple[Any, ...] = (0.0, int(pad_token_id or 0), own_rows)  # of requests that are done
        return [np.where(is_active[:, None], *pair) for pair in zip(chosen, idle, strict=True)]

    def _choose_beams(
        self,
        candidates: ScorerCandidates,
        best: Array,
        is_active: Array,  # noqa: ARG002
    ) -> tuple[Array, Array, Array]:
        """Sums, tokens and rows of the beams that continue [B, G]; `best` are the top ranks."""
        assert candidates.tokens is not None
        lines = np.arange(len(best))[:, None]
        return (
            candidates.sum_logprobs[lines, best],
            candidates.tokens[lines, best],
            candidates.rows[lines, best],
        )

    def _add_finished(self, candidates: ScorerCandidates, ready: Array) -> None:
        """Offer the ready candidates to the pools of their tiers."""
        scores = candidates.scoring.normalized_scores(candidates.sum_logprobs)
        unmet = {
            place: self._unmet_constraints(candidates, *place) for place in map(tuple, np.argwhere(ready))
        }
        tier = np.full(ready.shape, -1)
        for place, indices in unmet.items():
            tier[place] = 0 if not indices else 1 if candidates.tokens is None else 2
        for tier_index, pools in enumerate(self._finished_pools):
            if (tier == tier_index).any():
                pools.insert_best(
                    candidates.pool_indices,
                    np.where(tier == tier_index, scores, -np.inf),
                    lambda accepted: [
                        candidates.to_hypothesis(index, rank, score, unmet[index, rank])
                        for index, rank, score in accepted
                    ],
                )

    def _unmet_constraints(self, candidates: ScorerCandidates, index: int, rank: int) -> tuple[int, ...]:  # noqa: ARG002
        """The indices of a candidate's unmet constraints."""
        return ()

    # -------------------------------------------------------------------- arguments
    def _parse_candidates(
        self, next_scores: Tensor, next_tokens: Tensor, next_indices: Tensor
    ) -> tuple[Array, Array, Array]:
        """Sums, tokens and beams of the candidates on the host [B, K], validated."""
        shape = next_scores.shape
        if len(shape) != 2 or shape[0] != self.batch_size:
            raise InputError("next_scores", f"must be of shape [{self.batch_size}, K]", next_scores)
        _check_shape("next_tokens", next_tokens, list(shape))
        _check_shape("next_indices", next_indices, list(shape))
        sums = _to_float64("next_scores", next_scores)
        tokens, beams = torch.stack((next_tokens.long(), next_indices.long())).cpu()
        if not ((beams >= 0) & (beams < self.group_size)).all():
            raise InputError("next_indices", f"must be from 0 to {self.group_size - 1}", beams.tolist())
        return sums, tokens.numpy(), beams.numpy()

    def _beam_scoring(
        self, count: int, length: int, prompt_length: int | None, input_ids: Tensor | None
    ) -> BeamScoring:
        """The scoring parameters of sequences with this many tokens.

        The prompt length is as given, or the width of the first step's `input_ids`.
        """
        if prompt_length is not None:
            prompt_length = int(_parse("decoder_prompt_len", prompt_length, kinds.integer(0)))
        elif self._prompt_length is not None:
            prompt_length = self._prompt_length
        elif input_ids is not None:
            prompt_length = input_ids.shape[1]
        else:
            raise InputError("decoder_prompt_len", "must be given if `process` was never called", None)
        if length <= prompt_length:
            raise InputError(
                "decoder_prompt_len", f"must be below the sequence length {length}", prompt_length
            )
        max_length = length if self.max_length is None else self.max_length
        if max_length <= prompt_length and self.do_early_stopping == "never":
            raise InputError("max_length", f"must be above the prompt length {prompt_length}", max_length)
        self._prompt_length = prompt_length
        early_stopping = {False: 0, True: 1, "never": 2}[self.do_early_stopping]
        lengths = (length - prompt_length, max_length - prompt_length)
        return BeamScoring(
            *(np.full(count, part) for part in (*lengths, early_stopping, self.length_penalty))
        )

    # -------------------------------------------------------------------- results
    def _best_hypotheses(self, request: int) -> list[Hypothesis]:
        """A request's best sequences, best first."""
        hypotheses = [hypothesis for pools in self._finished_pools for hypothesis in pools.get(request)]
        num_wanted = self.num_beam_hyps_to_keep
        if len(hypotheses) < num_wanted:
            hint = "allow more tokens, or keep fewer"
            message = (
                f"prompt {request} must have {num_wanted} possible sequences, got {len(hypotheses)}: {hint}"
            )
            raise RowError(message, request)
        return hypotheses[:num_wanted]

    def _build_output(
        self,
        hypotheses: Sequence[Hypothesis],
        input_ids: Tensor,
        max_length: int | None,
        pad_token_id: int | Tensor | None,
    ) -> dict[str, Any]:
        """The sequences as tensors."""
        widths = {len(hypothesis.tokens) for hypothesis in hypotheses}
        width = max(widths)
        if max_length is not None and max_length < width:
            raise InputError("max_length", f"must be at least the longest sequence, {width}", max_length)
        if len(widths) > 1 and pad_token_id is None:
            raise InputError("pad_token_id", "must be given when sequences differ in length", None)
        tokens = [hypothesis.tokens for hypothesis in hypotheses]
        sequences = pad_sequence(tokens, batch_first=True, padding_value=int(pad_token_id or 0))
        indices = [hypothesis.beam_indices or () for hypothesis in hypotheses]
        beam_indices = torch.tensor([[*row, *[-1] * (width - len(row))] for row in indices])
        has_beam_indices = all(hypothesis.beam_indices is not None for hypothesis in hypotheses)
        scores = torch.tensor([hypothesis.score for hypothesis in hypotheses], dtype=torch.float32)
        return {
            "sequences": sequences.to(input_ids.device),
            "sequence_scores": scores.to(self.device),
            "beam_indices": beam_indices.to(input_ids.device) if has_beam_indices else None,
        }


def _parse(name: str, value: Any, kind: FieldType) -> Any:
    """The value of an argument, validated as `kind`."""
    try:
        return kind.parse(value)
    except Exception:
        raise InputError(name, f"must be {kind.expected}", value) from None


def _eos_token_ids(value: EosTokenIds) -> tuple[int, ...]:
    """The end tokens as a tuple."""
    if value is None:
        return ()
    token_ids = _parse("eos_token_id", value, kinds.token_or_tokens())
    return token_ids if isinstance(token_ids, tuple) else (token_ids,)


def _to_float64(name: str, scores: Tensor) -> Array:
    """Scores on the host, in float64."""
    values: Array = scores.detach().cpu().double().numpy()
    if np.isnan(values).any():
        raise InputError(name, "must not contain NaN", scores)
    return values


def _check_shape(name: str, value: Tensor, shape: list[int]) -> None:
    if list(value.shape) != shape:
        raise InputError(name, f"must be of shape {shape}", value)


def _check_beam_indices(beam_indices: BeamIndices, count: int) -> None:
    """Raise unless there is one entry per row."""
    if beam_indices is not None and len(beam_indices) != count:
        hint = "pass one for each row of input_ids, in its order"
        raise InputError("beam_indices", f"must have {count} entries", len(beam_indices), hint)


class BeamSearchScorer(PooledBeamScorer):
    """The rules of beam search, with or without groups, for a batch whose beams the caller keeps.

    The caller's loop passes the best candidates of every request to `process` and continues with the beams it
    returns; when `is_done`, or at its own limit, it calls `finalize`. With several groups (Vijayakumar et al.
    2018, arXiv 1610.02424) it calls `process` once per group, with that group's rows.

    A sum is divided by the number of new tokens to the power of `length_penalty`; `decoder_prompt_len`
    defaults to the width of the first step's `input_ids`.
    """


class ConstrainedBeamSearchScorer(PooledBeamScorer):
    """The rules of constrained beam search, for a batch whose beams the caller keeps.

    Only new tokens count. Sequences with unmet constraints are returned last, and only if too few meet all of
    them; `unmet_constraints` lists the indices of the unmet ones.
    """

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
        # By the new tokens that they have read.
        self._states: dict[tuple[int, ...], ConstraintListState] = {(): ConstraintListState(constraints)}
        self._all_scores = torch.zeros(0, 0)  # of the current step

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
        shape = scores_for_all_vocab.shape
        if len(shape) != 2 or shape[0] != len(input_ids):
            raise InputError(
                "scores_for_all_vocab", f"must be of shape [{len(input_ids)}, V]", scores_for_all_vocab
            )
        self._all_scores = scores_for_all_vocab
        candidates = (input_ids, next_scores, next_tokens, next_indices)
        ends = (pad_token_id, eos_token_id)
        return super().process(*candidates, *ends, beam_indices, group_index, decoder_prompt_len)

    def _choose_beams(
        self, candidates: ScorerCandidates, best: Array, is_active: Array
    ) -> tuple[Array, Array, Array]:
        """Sums, tokens and rows of the beams that continue [B, G], allocated by constraint steps met."""
        texts = [tuple(tokens) for tokens in candidates.input_ids[:, self._prompt_length :].tolist()]
        self._states = {
            text: state for text, state in self._states.items() if not text or len(text) >= len(texts[0])
        }
        sums, tokens, rows = super()._choose_beams(candidates, best, is_active)
        for index in np.flatnonzero(is_active).tolist():
            chosen = zip(*(part[index].tolist() for part in (rows, tokens, sums)), strict=True)
            likely = self._make_candidates(texts, chosen)
            advancing = self._advancing_candidates(candidates, index, texts, likely)
            for rank, entry in enumerate(allocate_by_bank(likely, advancing, self.group_size)):
                place = index, rank
                sums[place], tokens[place], rows[place] = entry.sum_logprob, entry.token, entry.row
        return sums, tokens, rows

    def _advancing_candidates(
        self, candidates: ScorerCandidates, index: int, texts: Texts, likely: Sequence[ConstrainedCandidate]
    ) -> list[ConstrainedCandidate]:
        """Further candidates of a request that advance a constraint."""
        own_rows = range(index * self.group_size, (index + 1) * self.group_size)
        first_rows = {texts[row]: row for row in reversed(own_rows)}  # of rows with the same tokens
        states = {row: self._state(text) for text, row in sorted(first_rows.items(), key=itemgetter(1))}
        known = {(first_rows[texts[entry.row]], entry.token) for entry in likely}
        pairs = [
            pair
            for pair in advancing_tokens(states, known, self._all_scores.shape[1])
            if pair[1] not in candidates.end_tokens
        ]
        if not pairs:
            return []
        rows, tokens = torch.tensor(pairs, device=self._all_scores.device).T
        totals = self._all_scores[rows, tokens].tolist()
        return self._make_candidates(
            texts, ((*pair, total) for pair, total in zip(pairs, totals, strict=True))
        )

    def _make_candidates(
        self, texts: Texts, chosen: Iterable[tuple[int, int, float]]
    ) -> list[ConstrainedCandidate]:
        """The possible candidates among (row, token, sum)."""
        return [
            ConstrainedCandidate(row, token, total, self._state((*texts[row], token)))
            for row, token, total in chosen
            if total > -np.inf
        ]

    def _unmet_constraints(self, candidates: ScorerCandidates, index: int, rank: int) -> tuple[int, ...]:
        row = int(candidates.rows[index, rank])
        text = candidates.input_ids[row, self._prompt_length :].tolist()
        last = [] if candidates.tokens is None else [int(candidates.tokens[index, rank])]
        return self._state((*text, *last)).unmet_indices

    def _state(self, text: tuple[int, ...]) -> ConstraintListState:
        """The constraint state after these new tokens."""
        if text not in self._states:
            previous = self._states.get(text[:-1])
            state = self._states[()].copy(stateful=False) if previous is None else previous.copy()
            for token in text if previous is None else text[-1:]:
                state.add(token)
            self._states[text] = state
        return self._states[text]

    def _build_output(self, hypotheses: Sequence[Hypothesis], *arguments: Any) -> dict[str, Any]:
        return super()._build_output(hypotheses, *arguments) | {
            "unmet_constraints": tuple(hypothesis.unmet_constraints for hypothesis in hypotheses)
        }
