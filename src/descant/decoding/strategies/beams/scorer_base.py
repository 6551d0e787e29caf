"""The judge: the rules and the pools of a beam search whose loop somebody else writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.config import fields as kinds
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
    """What decides in a beam search which beams go on and which sequences are returned."""

    @abstractmethod
    def process(
        self,
        input_ids: Tensor,
        next_scores: Tensor,
        next_tokens: Tensor,
        next_indices: Tensor,
        **kwargs: Any,
    ) -> Mapping[str, Tensor]:
        """The beams of the next step, of the best candidates of this one [B, K]."""

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
    """A sequence that may be returned."""

    score: float
    tokens: Tensor  # [L] (host) with the prompt, and the token that ended it
    beam_indices: tuple[int, ...] | None  # the row each new token was chosen from
    unmet_constraints: tuple[int, ...]  # places of the constraints it does not meet


class ScorerInputs(NamedTuple):
    """The arguments of one step."""

    input_ids: Tensor  # [B * G, L]
    next_scores: Tensor  # [B, K] sums of the best candidates
    next_tokens: Tensor  # [B, K]
    next_indices: Tensor  # [B, K] those of the request's group that they continue
    pad_token_id: int | Tensor | None
    eos_token_id: EosTokenIds
    beam_indices: BeamIndices
    group_index: int
    decoder_prompt_len: int | None
    scores_for_all_vocab: Tensor | None = None  # [B * G, V] the sums of all candidates


@dataclass
class ScorerCandidates:
    """Candidates on the host [B, n], where B are the requests, or at the end every group of each."""

    input_ids: Tensor  # [R, L]
    sum_logprobs: Array  # float64
    rows: Array  # the row of `ids` that each continues, or is
    tokens: Array | None  # those they continue it with
    pool_indices: Array  # [B] of their pools
    scoring: BeamScoring
    beam_indices: BeamIndices
    eos_token_ids: tuple[int, ...] = ()  # the tokens that end
    group_index: int = 0

    def to_hypothesis(self, line: int, place: int, score: float, unmet: tuple[int, ...]) -> BeamHypothesis:
        """A candidate as a sequence."""
        row = int(self.rows[line, place])
        written, beams = self.input_ids[row].cpu(), None
        if self.beam_indices is not None:
            beams = tuple(int(one) for one in self.beam_indices[row] if int(one) >= 0)
        if self.tokens is not None:
            written = torch.cat((written, written.new_tensor([self.tokens[line, place]])))
            beams = None if beams is None else (*beams, row)
        return BeamHypothesis(score, written, beams, unmet)


class PooledBeamScorer(BeamScorer):
    """What both scorers are: a pool of ended sequences for every group of every request."""

    num_tiers = 1  # pools a group: what is in a lower tier is returned after all that is in a higher one

    def __init__(  # noqa: PLR0913 - as documented
        self,
        batch_size: int,
        num_beams: int,
        device: torch.device | str,
        length_penalty: float,
        do_early_stopping: bool | str,
        num_beam_hyps_to_keep: int,
        num_beam_groups: int,
        max_length: int | None,
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
        self._prompt_length: int | None = None  # its length, since the first step

    @property
    def is_done(self) -> bool:
        """Whether no request can come to anything better."""
        return bool(self._done.all())

    def finalize(  # type: ignore[override]  # noqa: PLR0913 - as documented
        self,
        input_ids: Tensor,
        final_beam_scores: Tensor,
        final_beam_tokens: Tensor,  # noqa: ARG002 - `input_ids` end with them
        final_beam_indices: Tensor,  # noqa: ARG002
        max_length: int | None,
        pad_token_id: int | Tensor | None = None,
        eos_token_id: EosTokenIds = None,  # noqa: ARG002 - what ended has its own
        beam_indices: BeamIndices = None,
        decoder_prompt_len: int | None = None,
    ) -> dict[str, Any]:
        """The `num_beam_hyps_to_keep` best sequences of every request, `input_ids` [B * num_beams, L] being
        the beams after the last step and `final_beam_scores` their sums.
        """
        if not self._done.all():
            found = self._final_candidates(input_ids, final_beam_scores, beam_indices, decoder_prompt_len)
            ready = np.repeat(~self._done.reshape(-1, 1), self.group_size, 1)
            self._add_finished(found, ready)
            self._done[:] = True
        kept = [self._best_hypotheses(request) for request in range(self.batch_size)]
        return self._build_output([one for some in kept for one in some], input_ids, max_length, pad_token_id)

    # -------------------------------------------------------------------- a step
    def _process_step(self, given: ScorerInputs) -> dict[str, Tensor]:
        """The beams that go on; what ends goes to its pool."""
        found = self._parse_candidates(given)
        assert found.tokens is not None
        live, size = ~self._done[:, found.group_index], self.group_size
        if not live.all() and given.pad_token_id is None:
            raise InputError("pad_token_id", "must be given when requests of a batch are done", None)
        ends = np.isin(found.tokens, found.eos_token_ids)
        if (live & ((~ends).sum(1) < size)).any():
            must = f"must hold {size} tokens or more for each prompt that do not end it"
            do = f"pass the best {size} * (1 + the number of end tokens) candidates"
            raise InputError("next_tokens", must, found.tokens.tolist(), do)
        # Those of -inf that do not end fill up the beams, and must not be taken for such as end.
        best = top_unfinished(np.maximum(found.sum_logprobs, MIN_SCORE), ends, size)
        rows, tokens, sums = self._choose_beams(given, found, best, live)
        ready = ends & live[:, None] & (found.sum_logprobs > -np.inf)
        ready[:, size:] = False
        self._add_finished(found, ready)
        going = self._finished_pools[0].can_improve(
            found.pool_indices, found.scoring, found.sum_logprobs.max(1)
        )
        self._done[:, found.group_index] |= ~going
        if not live.all():
            own = np.arange(self.batch_size)[:, None] * size + np.arange(size)
            sums, rows = np.where(live[:, None], sums, 0.0), np.where(live[:, None], rows, own)
            tokens = np.where(live[:, None], tokens, int(given.pad_token_id or 0))
        device = found.input_ids.device
        parts = {
            "next_beam_scores": (sums, given.next_scores),
            "next_beam_tokens": (tokens, given.next_tokens),
            "next_beam_indices": (rows, given.next_indices),
        }
        return {
            name: torch.from_numpy(part.flatten()).to(like.dtype).to(device)
            for name, (part, like) in parts.items()
        }

    def _choose_beams(
        self,
        given: ScorerInputs,  # noqa: ARG002
        found: ScorerCandidates,
        best: Array,
        live: Array,  # noqa: ARG002
    ) -> tuple[Array, Array, Array]:
        """Rows, tokens and sums of the beams that go on [B, G], `best` being the likeliest."""
        assert found.tokens is not None
        return (
            np.take_along_axis(found.rows, best, 1),
            np.take_along_axis(found.tokens, best, 1),
            np.take_along_axis(found.sum_logprobs, best, 1),
        )

    def _add_finished(self, found: ScorerCandidates, ready: Array) -> None:
        """Offer the candidates that are ready to the pools of their tiers."""
        shares = found.scoring.normalized_scores(found.sum_logprobs)
        unmet = {
            (line, place): self._unmet_constraints(found, line, place)
            for line, place in np.argwhere(ready).tolist()
        }
        tier = np.full(ready.shape, -1)
        for (line, place), missing in unmet.items():
            tier[line, place] = self._tier(found, missing)
        for number, pools in enumerate(self._finished_pools):
            mine = tier == number
            if mine.any():
                pools.insert_best(
                    found.pool_indices,
                    np.where(mine, shares, -np.inf),
                    lambda enters: [
                        found.to_hypothesis(line, place, score, unmet[line, place])
                        for line, place, score in enters
                    ],
                )

    def _unmet_constraints(self, found: ScorerCandidates, line: int, place: int) -> tuple[int, ...]:  # noqa: ARG002
        """The constraints that a candidate does not meet."""
        return ()

    def _tier(self, found: ScorerCandidates, unmet: tuple[int, ...]) -> int:  # noqa: ARG002
        """Where a sequence belongs that does not meet these constraints."""
        return 0

    # -------------------------------------------------------------------- what is given
    def _parse_candidates(self, given: ScorerInputs) -> ScorerCandidates:
        """The candidates of a step, checked."""
        size, shape = self.group_size, given.next_scores.shape
        group = _parse_argument("group_index", given.group_index, kinds.integer(0))
        if group >= self.num_beam_groups:
            raise InputError("group_index", f"must be below num_beam_groups={self.num_beam_groups}", group)
        _check_rows(given.input_ids, self.batch_size, size)
        if len(shape) != 2 or shape[0] != self.batch_size:
            raise InputError("next_scores", f"must be of shape [{self.batch_size}, K]", given.next_scores)
        for name, one in (("next_tokens", given.next_tokens), ("next_indices", given.next_indices)):
            if one.shape != shape:
                raise InputError(name, f"must be of the shape of next_scores, {list(shape)}", one)
        _check_beam_indices(given.beam_indices, len(given.input_ids))
        sums = _to_float64("next_scores", given.next_scores)
        tokens, beams = torch.stack((given.next_tokens.long(), given.next_indices.long())).cpu()
        if not ((beams >= 0) & (beams < size)).all():
            raise InputError("next_indices", f"must be from 0 to {size - 1}", beams.tolist())
        ends, prompt = (
            _eos_token_ids(given.eos_token_id),
            self._resolve_prompt_length(given.decoder_prompt_len, given.input_ids),
        )
        terms = self._beam_scoring(self.batch_size, given.input_ids.shape[1] + 1, prompt)
        self._prompt_length = prompt
        requests = np.arange(self.batch_size)
        return ScorerCandidates(
            given.input_ids,
            sums,
            requests[:, None] * size + beams.numpy(),
            tokens.numpy(),
            requests * self.num_beam_groups + group,
            terms,
            given.beam_indices,
            ends,
            group,
        )

    def _final_candidates(
        self, input_ids: Tensor, sums: Tensor, trails: BeamIndices, prompt: int | None
    ) -> ScorerCandidates:
        """The beams after the last step, by request and group."""
        count = self.batch_size * self.num_beams
        _check_rows(input_ids, self.batch_size, self.num_beams)
        if sums.shape != (count,):
            raise InputError("final_beam_scores", f"must be of shape [{count}]", sums)
        _check_beam_indices(trails, count)
        teams = self._done.size
        start = self._resolve_prompt_length(prompt, None)
        terms = self._beam_scoring(teams, input_ids.shape[1], start)
        self._prompt_length = start
        rows = np.arange(count).reshape(teams, self.group_size)
        values = _to_float64("final_beam_scores", sums).reshape(rows.shape)
        return ScorerCandidates(input_ids, values, rows, None, np.arange(teams), terms, trails)

    def _resolve_prompt_length(self, prompt: int | None, first: Tensor | None) -> int:
        """The length of the prompt: as told, or the width of the first step's `input_ids`."""
        if prompt is not None:
            return int(_parse_argument("decoder_prompt_len", prompt, kinds.integer(0)))
        if self._prompt_length is not None:
            return self._prompt_length
        if first is None:
            raise InputError("decoder_prompt_len", "must be given where no step came before", None)
        return first.shape[1]

    def _beam_scoring(self, count: int, length: int, prompt: int) -> BeamScoring:
        """How sequences of so many tokens are judged."""
        if length <= prompt:
            raise InputError("decoder_prompt_len", f"must leave new tokens of {length}", prompt)
        if self.max_length is not None and self.max_length <= prompt and self.do_early_stopping == "never":
            raise InputError("max_length", f"must exceed the prompt of {prompt} tokens", self.max_length)
        most = length if self.max_length is None else self.max_length
        early = {False: 0, True: 1, "never": 2}[self.do_early_stopping]
        new, longest, rule, penalty = (
            np.full(count, part) for part in (length - prompt, most - prompt, early, self.length_penalty)
        )
        return BeamScoring(new, longest, rule, penalty)

    # -------------------------------------------------------------------- what is returned
    def _best_hypotheses(self, request: int) -> list[BeamHypothesis]:
        """A request's best sequences, best first."""
        keys = range(request * self.num_beam_groups, (request + 1) * self.num_beam_groups)
        every = []
        for pools in self._finished_pools:
            some: list[BeamHypothesis] = [one for key in keys for one in pools.get(key)]
            every += sorted(some, key=lambda one: -one.score)
        kept = self.num_beam_hyps_to_keep
        if len(every) < kept:
            do = "allow more tokens, or keep fewer"
            message = f"prompt {request} must have {kept} sequences that are possible, got {len(every)}: {do}"
            raise RowError(message, request)
        return every[:kept]

    def _build_output(
        self,
        kept: Sequence[BeamHypothesis],
        input_ids: Tensor,
        max_length: int | None,
        pad: int | Tensor | None,
    ) -> dict[str, Any]:
        """The sequences as tensors."""
        widths = {len(one.tokens) for one in kept}
        width = max(widths)
        if max_length is not None and max_length < width:
            raise InputError("max_length", f"must be at least the longest sequence, {width}", max_length)
        if len(widths) > 1 and pad is None:
            raise InputError("pad_token_id", "must be given where sequences differ in length", None)
        filled = torch.full((len(kept), width), int(pad or 0), dtype=input_ids.dtype)
        trails = torch.full((len(kept), width), -1)
        for line, one in enumerate(kept):
            filled[line, : len(one.tokens)] = one.tokens
            trails[line, : len(one.beam_indices or ())] = torch.tensor(
                one.beam_indices or (), dtype=torch.long
            )
        known = all(one.beam_indices is not None for one in kept)
        scores = torch.tensor([one.score for one in kept], dtype=torch.float32)
        return {
            "sequences": filled.to(input_ids.device),
            "sequence_scores": scores.to(self.device),
            "beam_indices": trails.to(input_ids.device) if known else None,
        }


def _parse_argument(name: str, value: Any, kind: kinds.FieldType) -> Any:
    """The value of an argument, which must be of a kind."""
    try:
        return kind.parse(value)
    except Exception:
        raise InputError(name, f"must be {kind.expected}", value) from None


def _eos_token_ids(value: EosTokenIds) -> tuple[int, ...]:
    """End tokens as a tuple."""
    if value is None:
        return ()
    found = _parse_argument("eos_token_id", value, kinds.token_or_tokens())
    return found if isinstance(found, tuple) else (found,)


def _to_float64(name: str, scores: Tensor) -> Array:
    """Scores on the host, in float64."""
    values: Array = scores.detach().cpu().double().numpy()
    if np.isnan(values).any():
        raise InputError(name, "must not hold NaN", scores)
    return values


def _check_rows(ids: Tensor, batch: int, beams: int) -> None:
    """Raise unless there is a row for every beam of every request."""
    if ids.ndim != 2 or len(ids) != batch * beams:
        must = f"must be of shape [{batch * beams}, L], {beams} beams for each of {batch} prompts"
        raise InputError("input_ids", must, ids)


def _check_beam_indices(trails: BeamIndices, count: int) -> None:
    """Raise unless there is a trail for every row."""
    if trails is not None and len(trails) != count:
        do = "pass one for each row of input_ids, in its order"
        raise InputError("beam_indices", f"must have {count} members", len(trails), do)
