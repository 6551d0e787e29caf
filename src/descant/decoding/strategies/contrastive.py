"""Contrastive search: rank the most likely candidates by how much they differ from the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import (
    Array,
    DraftContext,
    NoiseSource,
    RankGroup,
    StopCondition,
    StrategyDefaults,
    StrategyTraits,
)
from descant.core.records import ForwardOutput, Hypothesis, Proposal, RecordedLines, Selection, Tokens
from descant.core.rows import Rows, index_rows
from descant.errors import UnsupportedModel


class HiddenStateBank:
    """The hidden states of all positions of each request, as unit vectors [M, C, D]."""

    def __init__(self) -> None:
        self._bank: Tensor | None = None  # [M, C, D]
        self._lengths = np.zeros(0, dtype=np.int64)  # [M]
        self._requests = np.zeros(0, dtype=np.int64)  # [M]

    def add(self, request: int, states: Tensor) -> None:
        """Add a request with its states [T, D]."""
        unit = torch.nn.functional.normalize(states.float(), dim=-1)
        size = len(unit)
        if self._bank is None or not len(self._requests):
            self._bank = unit.new_zeros(1, size + 64, unit.shape[1])
        else:
            self._bank = torch.cat((self._bank, torch.zeros_like(self._bank[:1])))
        self._requests = np.append(self._requests, request)
        self._lengths = np.append(self._lengths, size)
        self._ensure_capacity(size)
        self._bank[-1, :size] = unit

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the states of now: later ones are written behind them."""
        return partial(self._restore, self._bank, self._lengths.copy(), self._requests)

    def _restore(self, bank: Tensor | None, lengths: Array, requests: Array) -> None:
        self._bank, self._lengths, self._requests = bank, lengths, requests

    def remove(self, request: int) -> None:
        """Remove a request."""
        keep = self._requests != request
        if self._bank is None or keep.all():
            return
        self._requests, self._lengths = self._requests[keep], self._lengths[keep]
        self._bank = index_rows(self._bank, torch.from_numpy(np.flatnonzero(keep))) if keep.any() else None

    def max_similarity(self, requests: Array, states: Tensor) -> Tensor:
        """The largest cosine similarity of each unit vector [B, k, D] with its request's states [B, k]."""
        indices, bank = self._bank_indices(requests), self._bank
        assert bank is not None
        if len(indices) != len(self._requests) or (indices != np.arange(len(indices))).any():
            bank = index_rows(bank, torch.from_numpy(indices))
        lengths = self._lengths[indices]
        bank = bank[:, : int(lengths.max())]
        similarity = torch.bmm(states, bank.transpose(1, 2))
        is_stored = torch.arange(bank.shape[1]) < torch.from_numpy(lengths)[:, None]
        return similarity.masked_fill(~is_stored.to(similarity.device)[:, None], -torch.inf).amax(-1)

    def append(self, requests: Array, states: Tensor) -> None:
        """Append one position to each request [B, D]."""
        if not len(requests):
            return
        indices = self._bank_indices(requests)
        self._ensure_capacity(int(self._lengths[indices].max()) + 1)
        assert self._bank is not None
        positions = torch.from_numpy(np.stack((indices, self._lengths[indices]))).to(self._bank.device)
        self._bank[positions[0], positions[1]] = states
        self._lengths[indices] += 1

    def _bank_indices(self, requests: Array) -> Array:
        order = np.argsort(self._requests)
        return np.asarray(order[np.searchsorted(self._requests, requests, sorter=order)])

    def _ensure_capacity(self, size: int) -> None:
        assert self._bank is not None
        capacity = self._bank.shape[1]
        if capacity < size:
            new_capacity = max(size + 64, capacity + capacity // 2)
            self._bank = torch.nn.functional.pad(self._bank, (0, 0, 0, new_capacity - capacity))


def last_hidden_states(output: ForwardOutput, rows: int) -> list[Tensor]:
    """The last layer's states at each row's fed positions, drafts included [T, D]."""
    names = ("hidden_states", "decoder_hidden_states")
    by_row: dict[int, Tensor] = {}
    for states in output.states:
        layers: Any = next((states[name] for name in names if states.get(name) is not None), None)
        if layers is None:
            raise UnsupportedModel(
                "contrastive search needs hidden states, but the model does not return them"
            )
        last_layer, fed_lengths = layers[-1], states["fed_length"].tolist()
        for position, row in enumerate(states["rows"].tolist()):
            by_row[row] = last_layer[position, : fed_lengths[position]]
    index: Sequence[int] = range(rows) if output.row_index is None else output.row_index.tolist()
    return [by_row[row] for row in index]


class _ChosenRows(NamedTuple):
    """The row chosen for each request in a step, and the candidates that follow it (host)."""

    rows: Array  # [B] the chosen row
    candidate_tokens: Tensor  # [B, k]
    candidate_probs: Array  # [B, k] 0 where there is no candidate
    has_no_candidates: Array  # [B] whether no token can follow the row


class _HiddenStateSearch(StrategyDefaults):
    """The hidden states and finished sequences that both kinds of contrastive search keep by request."""

    required_states = ("hidden_states",)

    def __init__(self, noise: NoiseSource, stop: StopCondition, rank_group: RankGroup | None = None) -> None:  # noqa: ARG002
        self._stop = stop
        self._rank_group = rank_group
        self._hidden_states = HiddenStateBank()
        self._done: dict[int, Hypothesis] = {}

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's only sequence."""
        hypothesis = self._done[request]
        self.drop(request)
        return [hypothesis]

    def drop(self, request: int) -> None:
        """Discard a request."""
        self._hidden_states.remove(request)
        self._done.pop(request, None)

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the hidden states and sequences of now."""
        restore_states, done = self._hidden_states.checkpoint(), dict(self._done)

        def restore() -> None:
            restore_states()
            self._done = done

        return restore

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """Empty: the only sequence finishes with its request."""
        del request
        return []


class ContrastiveSearch(_HiddenStateSearch):
    """`top_k` rows per request that differ in their last token (Su et al. 2022, arXiv 2202.06417).

    The last token is a candidate: it is fed, and the row with the best `(1 - alpha) * p - alpha * s` stays,
    where `p` is the token's probability and `s` the largest cosine similarity of its hidden state with the
    states before it. The chosen row is forked into its own most likely continuations.
    """

    traits = StrategyTraits(forks=True, needs_prompt_states=True, feeds_rejected_tokens=True)
    columns: Mapping[str, Tensor] = {
        "candidate_prob": torch.zeros(1),  # the probability of the row's last token
        "candidate_token": torch.full((1,), -1),  # that token, on the host
        # index of the reason why it would finish the row; -1: it does not
        "finish_reason_index": torch.full((1,), -1),
    }

    def __init__(self, noise: NoiseSource, stop: StopCondition, rank_group: RankGroup | None = None) -> None:
        super().__init__(noise, stop, rank_group)
        self._finish_reasons: list[str] = []

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """Choose the best candidate of each request and fork it into its continuations."""
        hidden = last_hidden_states(output, len(rows))
        row_groups = _rows_by_request(rows)
        fresh = (rows.length == rows.prompt_length).numpy()[row_groups[:, 0]]
        for row in row_groups[fresh, 0].tolist():
            self._hidden_states.add(int(rows.request[row]), hidden[row])
        last_hidden = torch.stack([states[-1] for states in hidden])
        chosen = self._choose_candidates(rows, row_groups, fresh, last_hidden, output.logits[:, 0])
        reason_index = rows.column("finish_reason_index").numpy()[chosen.rows]
        is_finished = (reason_index >= 0) & ~fresh  # a finished row needs no continuation
        is_failed = chosen.has_no_candidates & ~is_finished
        failed = rows.request.numpy()[chosen.rows[is_failed]].tolist()
        continues = ~is_finished & ~is_failed
        emitting = (~fresh & ~is_failed).nonzero()[0]
        finished = self._collect_finished(rows, chosen.rows[is_finished], reason_index[is_finished])
        index_of = {row: index for index, row in enumerate(chosen.rows[emitting].tolist())}
        emitting_rows = torch.from_numpy(chosen.rows[emitting])
        emitted = Tokens(
            rows.request[emitting_rows],
            torch.zeros_like(emitting_rows),
            rows.column("candidate_token")[emitting_rows],
            emitting_rows,
            finished={index_of[row]: hypothesis for row, hypothesis in finished},
            already_appended=True,
        )
        return self._fork_candidates(rows, chosen, continues)._replace(
            emitted=emitted if len(emitting) else None,
            finished=rows.request.numpy()[chosen.rows[is_finished]].tolist(),
            failed=failed,
            finished_sequences=finished,
        )

    def _choose_candidates(
        self, rows: Rows, row_groups: Array, fresh: Array, last_hidden: Tensor, scores: Tensor
    ) -> _ChosenRows:
        """Choose one row of each group [B, k], and find the tokens that may follow it."""
        params, device = row_params(rows), scores.device
        alpha, top_k = (params[name].numpy()[row_groups[:, 0]] for name in ("penalty_alpha", "top_k"))
        requests = rows.request.numpy()[row_groups[:, 0]]
        index = torch.from_numpy(row_groups).to(device)  # [B, k], -1 where a group is smaller
        unit = torch.nn.functional.normalize(last_hidden.float(), dim=-1)
        candidate_states = unit[index.clamp(min=0)]  # [B, k, D]
        similarity = self._hidden_states.max_similarity(requests, candidate_states)  # [B, k]
        candidate_probs = rows.column("candidate_prob").to(device)[index.clamp(min=0)]
        weight = torch.from_numpy(alpha).to(device, torch.float32)[:, None]
        contrastive_scores = ((1 - weight) * candidate_probs - weight * similarity).masked_fill(
            index < 0, -torch.inf
        )
        best = torch.where(torch.from_numpy(fresh).to(device), 0, contrastive_scores.argmax(1))
        row = index.gather(1, best[:, None]).squeeze(1)
        # Only the chosen rows need candidates.
        width = min(int(top_k.max()), scores.shape[1])
        probs, tokens = scores[row].softmax(-1).topk(width)
        host_probs, packed = self._to_host(probs, torch.cat((best[:, None], tokens), 1))
        host_best = packed[:, 0]
        chosen_rows = row_groups[np.arange(len(row_groups)), host_best]
        self._hidden_states.append(
            requests[~fresh],
            candidate_states[torch.arange(len(candidate_states)), torch.from_numpy(host_best).to(device)][
                torch.from_numpy(~fresh).to(device)
            ],
        )
        next_probs = np.where(np.arange(width) < top_k[:, None], host_probs, 0.0)
        return _ChosenRows(
            chosen_rows, torch.from_numpy(packed[:, 1:]), np.nan_to_num(next_probs), ~(host_probs[:, 0] > 0)
        )

    def _fork_candidates(self, rows: Rows, chosen: _ChosenRows, continues: Array) -> Selection:
        """Fork the chosen rows into their candidates."""
        index, rank = np.nonzero((chosen.candidate_probs > 0) & continues[:, None])
        parents = torch.from_numpy(chosen.rows[index])
        tokens = torch.from_numpy(chosen.candidate_tokens.numpy()[index, rank])
        reason_index = np.full(len(index), -1)
        for name, mask in reversed(self._stop.finish_reasons(rows, parents, tokens)) if len(index) else ():
            if name not in self._finish_reasons:
                self._finish_reasons.append(name)
            reason_index[mask] = self._finish_reasons.index(name)
        recorded_rows = torch.from_numpy(chosen.rows[continues])
        return Selection(
            tokens.to(rows.tokens.device, non_blocking=True),
            parents,
            slot=torch.from_numpy(rank),
            columns={
                "candidate_prob": torch.from_numpy(chosen.candidate_probs[index, rank].astype(np.float32)),
                "candidate_token": tokens,
                "finish_reason_index": torch.from_numpy(reason_index),
            },
            host_tokens=tokens,
            recorded_lines=RecordedLines(recorded_rows, torch.zeros_like(recorded_rows)),
        )

    def _collect_finished(
        self, rows: Rows, index: Array, reason_index: Array
    ) -> list[tuple[int, Hypothesis]]:
        """Record the finished rows: (row, hypothesis) pairs."""
        host_tokens = index_rows(rows.tokens, torch.from_numpy(index)).cpu()
        finished = []
        for position, (row, reason) in enumerate(zip(index.tolist(), reason_index.tolist(), strict=True)):
            start, stop = int(rows.prompt_length[row]), int(rows.length[row])
            hypothesis = Hypothesis(host_tokens[position, start:stop].clone(), self._finish_reasons[reason])
            self._done[int(rows.request[row])] = hypothesis
            finished.append((row, hypothesis))
        return finished


@dataclass
class _CandidateRound:
    """The candidates for one request's next token, scored one at a time, and the best so far."""

    tokens: list[int]
    probs: list[float]
    index: int = 0
    best_score: float = -np.inf
    best_index: int = 0
    best_hidden_state: Tensor | None = None  # [D] of the best, a unit vector
    # tokens and probabilities that follow the best candidate
    next_candidates: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))


class LowMemoryContrastiveSearch(_HiddenStateSearch):
    """Contrastive search that scores its candidates one at a time, as drafts of one row per request.

    It stores keys and values once and needs `top_k` forwards per token. A row's last token is fed again with
    each candidate, so its logits are available whenever a candidate is chosen.
    """

    traits = StrategyTraits(max_rewind=1, needs_prompt_states=True, feeds_rejected_tokens=True)

    def __init__(self, noise: NoiseSource, stop: StopCondition, rank_group: RankGroup | None = None) -> None:
        super().__init__(noise, stop, rank_group)
        self._rounds: dict[int, _CandidateRound] = {}

    def propose(self, rows: Rows, context: DraftContext) -> Proposal:  # noqa: ARG002
        """The next candidate of every request that has one."""
        rounds = [self._rounds.get(request) for request in rows.request.tolist()]
        if not any(rounds):
            return Proposal()
        drafts = [[current.tokens[current.index] if current else 0] for current in rounds]
        num_drafts = torch.tensor([int(current is not None) for current in rounds])
        return Proposal(None, torch.tensor(drafts).to(rows.tokens.device), num_drafts)

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """Score the fed candidates; requests that have scored all of theirs choose the best."""
        hidden, requests = last_hidden_states(output, len(rows)), rows.request.tolist()
        fresh = np.array([request not in self._rounds for request in requests])
        for row in np.flatnonzero(fresh).tolist():
            self._hidden_states.add(requests[row], hidden[row])
        unit = torch.nn.functional.normalize(torch.stack([states[-1] for states in hidden]).float(), dim=-1)
        similarity = self._hidden_states.max_similarity(rows.request.numpy(), unit[:, None]).squeeze(1)
        logit_index = torch.from_numpy(np.where(fresh, 0, 1)).to(
            unit.device
        )  # after the row, or after the candidate
        scores = output.logits[torch.arange(len(rows), device=unit.device), logit_index]
        width = min(int(row_params(rows)["top_k"].max()), scores.shape[1])
        probs, tokens = scores.softmax(-1).topk(width)
        values, host_tokens = self._to_host(torch.cat((similarity[:, None], probs), 1), tokens)
        ready, failed = [], []
        for row, request in enumerate(requests):
            count = int(row_params(rows)["top_k"][row])
            valid = [rank for rank in range(min(count, width)) if values[row, 1 + rank] > 0]
            candidates = (
                [int(host_tokens[row, rank]) for rank in valid],
                [float(values[row, 1 + rank]) for rank in valid],
            )
            if fresh[row]:
                if not valid:
                    failed.append(request)
                    continue
                self._rounds[request] = _CandidateRound(*candidates)
            elif self._score_candidate(rows, row, float(values[row, 0]), unit[row], candidates):
                ready.append(row)
        # A prompt is recorded when it is prefilled, a token when it is chosen.
        recorded_rows = torch.tensor(sorted({*ready, *np.flatnonzero(fresh).tolist()}), dtype=torch.long)
        return self._build_selection(rows, ready, failed)._replace(
            recorded_lines=RecordedLines(recorded_rows, torch.zeros_like(recorded_rows))
        )

    def drop(self, request: int) -> None:
        """Discard a request."""
        super().drop(request)
        self._rounds.pop(request, None)

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the hidden states, candidates and sequences of now."""
        restore_done = super().checkpoint()
        rounds = {request: replace(current) for request, current in self._rounds.items()}

        def restore() -> None:
            restore_done()
            self._rounds = rounds

        return restore

    def _score_candidate(
        self,
        rows: Rows,
        row: int,
        similarity: float,
        state: Tensor,
        candidates: tuple[list[int], list[float]],
    ) -> bool:
        """Score one candidate; True if it was the last of its round."""
        current = self._rounds[int(rows.request[row])]
        alpha = float(row_params(rows)["penalty_alpha"][row])
        score = (1 - alpha) * current.probs[current.index] - alpha * similarity
        if score > current.best_score:
            current.best_score, current.best_index = score, current.index
            current.best_hidden_state, current.next_candidates = state, candidates
        current.index += 1
        return current.index == len(current.tokens)

    def _build_selection(self, rows: Rows, ready: list[int], failed: list[int]) -> Selection:
        """Append the chosen token to the ready rows; all other rows are fed again."""
        tokens, emit_mode = torch.zeros(len(rows), dtype=torch.long), torch.full((len(rows),), -1)
        for row in ready:
            current = self._rounds[int(rows.request[row])]
            tokens[row], emit_mode[row] = current.tokens[current.best_index], 1
            assert current.best_hidden_state is not None
            self._hidden_states.append(rows.request.numpy()[row : row + 1], current.best_hidden_state[None])
        ready_rows = torch.tensor(ready, dtype=torch.long)
        reasons = self._stop.finish_reasons(rows, ready_rows, tokens[ready_rows]) if ready else []
        finished, removed = [], {row for row in range(len(rows)) if int(rows.request[row]) in failed}
        for index, row in enumerate(ready):
            reason = next((name for name, mask in reasons if mask[index]), None)
            request = int(rows.request[row])
            current = self._rounds[request]
            if reason is not None:
                new_tokens = rows.tokens[row, int(rows.prompt_length[row]) : int(rows.length[row])].cpu()
                self._done[request] = Hypothesis(torch.cat((new_tokens, tokens[row : row + 1])), reason)
                finished.append((row, self._done[request]))
                removed.add(row)
            elif not current.next_candidates[0]:
                failed.append(request)
                removed.add(row)
            else:
                self._rounds[request] = _CandidateRound(*current.next_candidates)
        emitted = Tokens(
            rows.request[ready_rows],
            torch.zeros_like(ready_rows),
            tokens[ready_rows],
            ready_rows,
            finished={ready.index(row): hypothesis for row, hypothesis in finished},
        )
        kept_rows = torch.tensor([row for row in range(len(rows)) if row not in removed], dtype=torch.long)
        return Selection(
            tokens[kept_rows].to(rows.tokens.device),
            kept_rows,
            torch.zeros_like(kept_rows),
            emit_mode=emit_mode[kept_rows],
            emitted=emitted if ready else None,
            finished=[int(rows.request[row]) for row, _ in finished],
            failed=failed,
            host_tokens=tokens[kept_rows],
            finished_sequences=finished,
        )


def _rows_by_request(rows: Rows) -> Array:
    """The rows of each request, by slot, padded with -1 [B, k]."""
    order = np.lexsort((rows.slot.numpy(), rows.request.numpy()))
    _, first, counts = np.unique(rows.request.numpy()[order], return_index=True, return_counts=True)
    rank = np.arange(counts.max())
    position = np.minimum(first[:, None] + rank, len(order) - 1)
    return np.asarray(np.where(rank < counts[:, None], order[position], -1))
