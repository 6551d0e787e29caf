"""Base of the beam scorers: the rules and pools of a beam search whose loop the caller writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.config import field_types as kinds
from descant.core.interfaces import Array
from descant.decoding.strategies.beams.finished_pool import BeamScoring, FinishedHypotheses, top_unfinished
from descant.errors import InputError, RowError

__all__ = [
    "BeamHypothesis",
    "BeamIndices",
    "BeamScorer",
    "EosTokenIds",
    "PooledBeamScorer",
    "ScorerCandidates",
    "ScorerInputs",
]

EosTokenIds = int | Sequence[int] | Tensor | None
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


class BeamHypothesis(NamedTuple):
    """A finished sequence that may be returned."""

    score: float
    tokens: Tensor  # [L] (host) with the prompt, and the token that ended it
    beam_indices: tuple[int, ...] | None  # the row that each new token was chosen from
    unmet_constraints: tuple[int, ...]  # indices of its unmet constraints


class ScorerInputs(NamedTuple):
    """The arguments of `process`."""

    input_ids: Tensor  # [B * G, L]
    next_scores: Tensor  # [B, K] sums of the best candidates' log-probabilities
    next_tokens: Tensor  # [B, K]
    next_indices: Tensor  # [B, K] beam of the request's group that each continues
    pad_token_id: int | Tensor | None
    eos_token_id: EosTokenIds
    beam_indices: BeamIndices
    group_index: int
    decoder_prompt_len: int | None
    scores_for_all_vocab: Tensor | None = None  # [B * G, V] sums of all candidates


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
    eos_token_ids: tuple[int, ...] = ()  # end tokens
    group_index: int = 0

    def to_hypothesis(self, index: int, rank: int, score: float, unmet: tuple[int, ...]) -> BeamHypothesis:
        """A candidate as a finished sequence."""
        row = int(self.rows[index, rank])
        tokens, beam_indices = self.input_ids[row].cpu(), None
        if self.beam_indices is not None:
            beam_indices = tuple(int(beam) for beam in self.beam_indices[row] if int(beam) >= 0)
        if self.tokens is not None:
            tokens = torch.cat((tokens, tokens.new_tensor([self.tokens[index, rank]])))
            beam_indices = None if beam_indices is None else (*beam_indices, row)
        return BeamHypothesis(score, tokens, beam_indices, unmet)


class PooledBeamScorer(BeamScorer):
    """Base of both scorers: a pool of finished sequences for every group of every request."""

    num_tiers = 1  # pools per group: sequences of a later tier are returned after those of earlier ones

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
        self.batch_size = _parse_argument("batch_size", batch_size, kinds.integer(1))
        self.num_beams = _parse_argument("num_beams", num_beams, kinds.integer(2))
        self.num_beam_groups = _parse_argument("num_beam_groups", num_beam_groups, kinds.integer(1))
        if self.num_beams % self.num_beam_groups:
            raise InputError("num_beam_groups", f"must divide num_beams={num_beams}", num_beam_groups)
        self.group_size = self.num_beams // self.num_beam_groups
        self.device = torch.device(device)
        self.length_penalty = _parse_argument("length_penalty", length_penalty, LENGTH_PENALTY)
        self.do_early_stopping = _parse_argument(
            "do_early_stopping", do_early_stopping, kinds.early_stopping_mode()
        )
        self.num_beam_hyps_to_keep = _parse_argument(
            "num_beam_hyps_to_keep", num_beam_hyps_to_keep, kinds.integer(1)
        )
        if self.num_beam_hyps_to_keep > self.num_beams:
            must = f"must be at most num_beams={num_beams}"
            raise InputError("num_beam_hyps_to_keep", must, num_beam_hyps_to_keep)
        self.max_length = (
            None if max_length is None else _parse_argument("max_length", max_length, kinds.integer(1))
        )
        if self.do_early_stopping == "never" and self.max_length is None:
            raise InputError("max_length", 'must be given with do_early_stopping="never"', None)
        self._finished_pools = [FinishedHypotheses(self.group_size) for _ in range(self.num_tiers)]
        for pools in self._finished_pools:
            pools.add_keys(np.arange(self.batch_size * self.num_beam_groups))
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
            candidates = self._final_candidates(
                input_ids, final_beam_scores, beam_indices, decoder_prompt_len
            )
            ready = np.repeat(~self._done.reshape(-1, 1), self.group_size, 1)
            self._add_finished(candidates, ready)
            self._done[:] = True
        by_request = [self._best_hypotheses(request) for request in range(self.batch_size)]
        return self._build_output(
            [hypothesis for hypotheses in by_request for hypothesis in hypotheses],
            input_ids,
            max_length,
            pad_token_id,
        )

    # -------------------------------------------------------------------- one step
    def _process_step(self, inputs: ScorerInputs) -> dict[str, Tensor]:
        """The beams that continue; finished candidates go to their pools."""
        candidates = self._parse_candidates(inputs)
        assert candidates.tokens is not None
        is_active, size = ~self._done[:, candidates.group_index], self.group_size
        if not is_active.all() and inputs.pad_token_id is None:
            raise InputError("pad_token_id", "must be given when requests of a batch are done", None)
        is_end = np.isin(candidates.tokens, candidates.eos_token_ids)
        if (is_active & ((~is_end).sum(1) < size)).any():
            must = f"must have at least {size} tokens per prompt that are not end tokens"
            hint = f"pass the best {size} * (1 + the number of end tokens) candidates"
            raise InputError("next_tokens", must, candidates.tokens.tolist(), hint)
        # Impossible candidates may fill up the beams, but must rank above end tokens (-inf here).
        best = top_unfinished(np.maximum(candidates.sum_logprobs, MIN_SCORE), is_end, size)
        rows, tokens, sums = self._choose_beams(inputs, candidates, best, is_active)
        ready = is_end & is_active[:, None] & (candidates.sum_logprobs > -np.inf)
        ready[:, size:] = False
        self._add_finished(candidates, ready)
        continues = self._finished_pools[0].can_improve(
            candidates.pool_indices, candidates.scoring, candidates.sum_logprobs.max(1)
        )
        self._done[:, candidates.group_index] |= ~continues
        if not is_active.all():
            own_rows = np.arange(self.batch_size)[:, None] * size + np.arange(size)
            sums, rows = np.where(is_active[:, None], sums, 0.0), np.where(is_active[:, None], rows, own_rows)
            tokens = np.where(is_active[:, None], tokens, int(inputs.pad_token_id or 0))
        device = candidates.input_ids.device
        parts = {
            "next_beam_scores": (sums, inputs.next_scores),
            "next_beam_tokens": (tokens, inputs.next_tokens),
            "next_beam_indices": (rows, inputs.next_indices),
        }
        return {
            name: torch.from_numpy(part.flatten()).to(like.dtype).to(device)
            for name, (part, like) in parts.items()
        }

    def _choose_beams(
        self,
        inputs: ScorerInputs,  # noqa: ARG002
        candidates: ScorerCandidates,
        best: Array,
        is_active: Array,  # noqa: ARG002
    ) -> tuple[Array, Array, Array]:
        """Rows, tokens and sums of the beams that continue [B, G]; `best` are the top ranks."""
        assert candidates.tokens is not None
        return (
            np.take_along_axis(candidates.rows, best, 1),
            np.take_along_axis(candidates.tokens, best, 1),
            np.take_along_axis(candidates.sum_logprobs, best, 1),
        )

    def _add_finished(self, candidates: ScorerCandidates, ready: Array) -> None:
        """Offer the ready candidates to the pools of their tiers."""
        scores = candidates.scoring.normalized_scores(candidates.sum_logprobs)
        unmet = {
            (index, rank): self._unmet_constraints(candidates, index, rank)
            for index, rank in np.argwhere(ready).tolist()
        }
        tier = np.full(ready.shape, -1)
        for (index, rank), unmet_indices in unmet.items():
            tier[index, rank] = self._tier(candidates, unmet_indices)
        for tier_index, pools in enumerate(self._finished_pools):
            in_tier = tier == tier_index
            if in_tier.any():
                pools.insert_best(
                    candidates.pool_indices,
                    np.where(in_tier, scores, -np.inf),
                    lambda accepted: [
                        candidates.to_hypothesis(index, rank, score, unmet[index, rank])
                        for index, rank, score in accepted
                    ],
                )

    def _unmet_constraints(self, candidates: ScorerCandidates, index: int, rank: int) -> tuple[int, ...]:  # noqa: ARG002
        """The indices of a candidate's unmet constraints."""
        return ()

    def _tier(self, candidates: ScorerCandidates, unmet: tuple[int, ...]) -> int:  # noqa: ARG002
        """The tier of a sequence with these unmet constraints."""
        return 0

    # -------------------------------------------------------------------- arguments
    def _parse_candidates(self, inputs: ScorerInputs) -> ScorerCandidates:
        """The validated candidates of a step."""
        size, shape = self.group_size, inputs.next_scores.shape
        group = _parse_argument("group_index", inputs.group_index, kinds.integer(0))
        if group >= self.num_beam_groups:
            raise InputError("group_index", f"must be below num_beam_groups={self.num_beam_groups}", group)
        _check_rows(inputs.input_ids, self.batch_size, size)
        if len(shape) != 2 or shape[0] != self.batch_size:
            raise InputError("next_scores", f"must be of shape [{self.batch_size}, K]", inputs.next_scores)
        for name, value in (("next_tokens", inputs.next_tokens), ("next_indices", inputs.next_indices)):
            if value.shape != shape:
                raise InputError(name, f"must be of the shape of next_scores, {list(shape)}", value)
        _check_beam_indices(inputs.beam_indices, len(inputs.input_ids))
        sums = _to_float64("next_scores", inputs.next_scores)
        tokens, beams = torch.stack((inputs.next_tokens.long(), inputs.next_indices.long())).cpu()
        if not ((beams >= 0) & (beams < size)).all():
            raise InputError("next_indices", f"must be from 0 to {size - 1}", beams.tolist())
        end_tokens, prompt_length = (
            _eos_token_ids(inputs.eos_token_id),
            self._resolve_prompt_length(inputs.decoder_prompt_len, inputs.input_ids),
        )
        scoring = self._beam_scoring(self.batch_size, inputs.input_ids.shape[1] + 1, prompt_length)
        self._prompt_length = prompt_length
        requests = np.arange(self.batch_size)
        return ScorerCandidates(
            inputs.input_ids,
            sums,
            requests[:, None] * size + beams.numpy(),
            tokens.numpy(),
            requests * self.num_beam_groups + group,
            scoring,
            inputs.beam_indices,
            end_tokens,
            group,
        )

    def _final_candidates(
        self, input_ids: Tensor, sums: Tensor, beam_indices: BeamIndices, prompt_length: int | None
    ) -> ScorerCandidates:
        """The beams after the last step, by request and group."""
        count = self.batch_size * self.num_beams
        _check_rows(input_ids, self.batch_size, self.num_beams)
        if sums.shape != (count,):
            raise InputError("final_beam_scores", f"must be of shape [{count}]", sums)
        _check_beam_indices(beam_indices, count)
        num_groups = self._done.size
        resolved_length = self._resolve_prompt_length(prompt_length, None)
        scoring = self._beam_scoring(num_groups, input_ids.shape[1], resolved_length)
        self._prompt_length = resolved_length
        rows = np.arange(count).reshape(num_groups, self.group_size)
        values = _to_float64("final_beam_scores", sums).reshape(rows.shape)
        return ScorerCandidates(input_ids, values, rows, None, np.arange(num_groups), scoring, beam_indices)

    def _resolve_prompt_length(self, prompt_length: int | None, input_ids: Tensor | None) -> int:
        """The prompt length: as given, or the width of the first step's `input_ids`."""
        if prompt_length is not None:
            return int(_parse_argument("decoder_prompt_len", prompt_length, kinds.integer(0)))
        if self._prompt_length is not None:
            return self._prompt_length
        if input_ids is None:
            raise InputError("decoder_prompt_len", "must be given if `process` was never called", None)
        return input_ids.shape[1]

    def _beam_scoring(self, count: int, length: int, prompt_length: int) -> BeamScoring:
        """The scoring parameters of sequences with this many tokens."""
        if length <= prompt_length:
            raise InputError(
                "decoder_prompt_len", f"must be below the sequence length {length}", prompt_length
            )
        if (
            self.max_length is not None
            and self.max_length <= prompt_length
            and self.do_early_stopping == "never"
        ):
            raise InputError(
                "max_length", f"must be above the prompt length {prompt_length}", self.max_length
            )
        max_length = length if self.max_length is None else self.max_length
        early_stopping = {False: 0, True: 1, "never": 2}[self.do_early_stopping]
        num_new, max_new, stopping, penalty = (
            np.full(count, part)
            for part in (
                length - prompt_length,
                max_length - prompt_length,
                early_stopping,
                self.length_penalty,
            )
        )
        return BeamScoring(num_new, max_new, stopping, penalty)

    # -------------------------------------------------------------------- results
    def _best_hypotheses(self, request: int) -> list[BeamHypothesis]:
        """A request's best sequences, best first."""
        keys = range(request * self.num_beam_groups, (request + 1) * self.num_beam_groups)
        hypotheses = []
        for pools in self._finished_pools:
            tier: list[BeamHypothesis] = [hypothesis for key in keys for hypothesis in pools.get(key)]
            hypotheses += sorted(tier, key=lambda hypothesis: -hypothesis.score)
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
        hypotheses: Sequence[BeamHypothesis],
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
        sequences = torch.full((len(hypotheses), width), int(pad_token_id or 0), dtype=input_ids.dtype)
        beam_indices = torch.full((len(hypotheses), width), -1)
        for index, hypothesis in enumerate(hypotheses):
            sequences[index, : len(hypothesis.tokens)] = hypothesis.tokens
            beam_indices[index, : len(hypothesis.beam_indices or ())] = torch.tensor(
                hypothesis.beam_indices or (), dtype=torch.long
            )
        has_beam_indices = all(hypothesis.beam_indices is not None for hypothesis in hypotheses)
        scores = torch.tensor([hypothesis.score for hypothesis in hypotheses], dtype=torch.float32)
        return {
            "sequences": sequences.to(input_ids.device),
            "sequence_scores": scores.to(self.device),
            "beam_indices": beam_indices.to(input_ids.device) if has_beam_indices else None,
        }


def _parse_argument(name: str, value: Any, kind: kinds.FieldType) -> Any:
    """The value of an argument, validated as `kind`."""
    try:
        return kind.parse(value)
    except Exception:
        raise InputError(name, f"must be {kind.expected}", value) from None


def _eos_token_ids(value: EosTokenIds) -> tuple[int, ...]:
    """The end tokens as a tuple."""
    if value is None:
        return ()
    token_ids = _parse_argument("eos_token_id", value, kinds.token_or_tokens())
    return token_ids if isinstance(token_ids, tuple) else (token_ids,)


def _to_float64(name: str, scores: Tensor) -> Array:
    """Scores on the host, in float64."""
    values: Array = scores.detach().cpu().double().numpy()
    if np.isnan(values).any():
        raise InputError(name, "must not contain NaN", scores)
    return values


def _check_rows(input_ids: Tensor, batch: int, beams: int) -> None:
    """Raise unless there is one row for every beam of every request."""
    if input_ids.ndim != 2 or len(input_ids) != batch * beams:
        must = f"must be of shape [{batch * beams}, L], {beams} beams for each of {batch} prompts"
        raise InputError("input_ids", must, input_ids)


def _check_beam_indices(beam_indices: BeamIndices, count: int) -> None:
    """Raise unless there is one entry per row."""
    if beam_indices is not None and len(beam_indices) != count:
        hint = "pass one for each row of input_ids, in its order"
        raise InputError("beam_indices", f"must have {count} entries", len(beam_indices), hint)
