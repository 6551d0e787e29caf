"""Contrastive search: the likeliest candidates, ranked by how unlike they are to what stands before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, NoiseSource, RankGroup, StopCondition
from descant.core.records import (
    DraftContext,
    ForwardOutput,
    Hypothesis,
    Proposal,
    RecordedLines,
    Selection,
    Tokens,
)
from descant.core.rows import Rows, index_rows
from descant.errors import UnsupportedModel

__all__ = ["ContrastiveSearch", "LowMemoryContrastiveSearch"]

NO_DRAFTS = Proposal()


class _ChosenRows(NamedTuple):
    """What the requests of a step choose: one row each, and the candidates that follow it (host)."""

    rows: Array  # [B] the row chosen
    candidate_tokens: Tensor  # [B, k]
    candidate_probs: Array  # [B, k] 0 where there is no such candidate
    has_no_candidates: Array  # [B] whether the row has nothing to go on with


class ContrastiveSearch:
    """`top_k` rows a request, which differ in their last token (Su et al. 2022, arXiv 2202.06417).

    That token is tentative: it is fed, and the row whose `(1 - alpha) * p - alpha * s` is best stays, with
    `p` the token's probability and `s` the largest cosine of its hidden state with those before it. The
    row that stays is forked again into its own likeliest continuations.
    """

    needs_log_probs = False
    required_states = ("hidden_states",)
    columns: Mapping[str, Tensor] = {
        "candidate_prob": torch.zeros(1),  # the probability of the row's last token
        "candidate_token": torch.full((1,), -1),  # that token, on the host
        "finish_reason_index": torch.full(
            (1,), -1
        ),  # why it would end the row, as a place in a list; -1: it does not
    }

    def __init__(self, noise: NoiseSource, stop: StopCondition, peers: RankGroup | None = None) -> None:  # noqa: ARG002
        self._stop = stop
        self._peers = peers
        self._hidden_states = HiddenStateBank()
        self._finish_reasons: list[str] = []
        self._done: dict[int, Hypothesis] = {}

    def propose(self, rows: Rows, aid: DraftContext) -> Proposal:  # noqa: ARG002
        """Nothing: candidates are rows."""
        return NO_DRAFTS

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """The best candidate of each request, and the candidates after it."""
        hidden = last_hidden_states(output, len(rows))
        families = _rows_by_request(rows)
        fresh = (rows.length == rows.prompt_length).numpy()[families[:, 0]]
        for row in families[fresh, 0].tolist():
            self._hidden_states.add(int(rows.request[row]), hidden[row])
        last = torch.stack([part[-1] for part in hidden])
        choice = self._choose_candidates(rows, families, fresh, last, output.logits[:, 0])
        ending = rows.column("finish_reason_index").numpy()[choice.rows]
        over = (ending >= 0) & ~fresh  # what has ended needs nothing to go on with
        dead = choice.has_no_candidates & ~over
        failed = rows.request.numpy()[choice.rows[dead]].tolist()
        goes = ~over & ~dead
        told = (~fresh & ~dead).nonzero()[0]
        retired = self._collect_finished(rows, choice.rows[over], ending[over])
        places = {row: place for place, row in enumerate(choice.rows[told].tolist())}
        whose = torch.from_numpy(choice.rows[told])
        emitted = Tokens(
            rows.request[whose],
            torch.zeros_like(whose),
            rows.column("candidate_token")[whose],
            whose,
            finished={places[row]: one for row, one in retired},
            already_appended=True,
        )
        return self._fork_candidates(rows, choice, goes)._replace(
            emitted=emitted if len(told) else None,
            finished=rows.request.numpy()[choice.rows[over]].tolist(),
            failed=failed,
            finished_sequences=retired,
        )

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's one sequence."""
        self._hidden_states.remove(request)
        return [self._done.pop(request)]

    def drop(self, request: int) -> None:
        """Forget a request."""
        self._hidden_states.remove(request)
        self._done.pop(request, None)

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """Nothing ends while the request goes on."""
        del request
        return []

    def _choose_candidates(
        self, rows: Rows, families: Array, fresh: Array, last: Tensor, scores: Tensor
    ) -> _ChosenRows:
        """The row of each family that stays, with the continuations of all its rows to choose from."""
        params, device = row_params(rows), scores.device
        alpha, count = (params[name].numpy()[families[:, 0]] for name in ("penalty_alpha", "top_k"))
        requests = rows.request.numpy()[families[:, 0]]
        index = torch.from_numpy(families).to(device)  # [B, k], -1 where a family is smaller
        unit = torch.nn.functional.normalize(last.float(), dim=-1)
        mine = unit[index.clamp(min=0)]  # [B, k, D]
        alike = self._hidden_states.max_similarity(requests, mine)  # [B, k]
        sure = rows.column("candidate_prob").to(device)[index.clamp(min=0)]
        weight = torch.from_numpy(alpha).to(device, torch.float32)[:, None]
        value = ((1 - weight) * sure - weight * alike).masked_fill(index < 0, -torch.inf)
        best = torch.where(torch.from_numpy(fresh).to(device), 0, value.argmax(1))
        row = index.gather(1, best[:, None]).squeeze(1)
        # Only rows that stay have candidates worth looking for.
        width = min(int(count.max()), scores.shape[1])
        probs, tokens = scores[row].softmax(-1).topk(width)
        # The one transfer of the step; probabilities travel as their bits beside the integers.
        bits = probs.contiguous().view(torch.int32).long()
        word = torch.cat((best[:, None], tokens, bits), 1)
        word = (word if self._peers is None else self._peers.broadcast(word)).cpu()
        picked = families[np.arange(len(families)), word[:, 0].numpy()]
        self._hidden_states.append(
            requests[~fresh],
            mine[torch.arange(len(mine)), word[:, 0].to(device)][torch.from_numpy(~fresh).to(device)],
        )
        sums = word[:, 1 + width :].to(torch.int32).view(torch.float32).numpy()
        kept = np.where(np.arange(width) < count[:, None], sums, 0.0)
        return _ChosenRows(picked, word[:, 1 : 1 + width], np.nan_to_num(kept), ~(sums[:, 0] > 0))

    def _fork_candidates(self, rows: Rows, choice: _ChosenRows, goes: Array) -> Selection:
        """The rows that stay, forked into their candidates."""
        line, rank = np.nonzero((choice.candidate_probs > 0) & goes[:, None])
        parents = torch.from_numpy(choice.rows[line])
        tokens = torch.from_numpy(choice.candidate_tokens.numpy()[line, rank])
        ending = np.full(len(line), -1)
        for name, which in reversed(self._stop.finish_reasons(rows, parents, tokens)) if len(line) else ():
            if name not in self._finish_reasons:
                self._finish_reasons.append(name)
            ending[which] = self._finish_reasons.index(name)
        counted = torch.from_numpy(choice.rows[goes])
        return Selection(
            tokens.to(rows.tokens.device, non_blocking=True),
            parents,
            slot=torch.from_numpy(rank),
            columns={
                "candidate_prob": torch.from_numpy(choice.candidate_probs[line, rank].astype(np.float32)),
                "candidate_token": tokens,
                "finish_reason_index": torch.from_numpy(ending),
            },
            host_tokens=tokens,
            recorded_lines=RecordedLines(counted, torch.zeros_like(counted)),
        )

    def _collect_finished(self, rows: Rows, index: Array, ending: Array) -> list[tuple[int, Hypothesis]]:
        """Keep what the requests that end have written: each with its row."""
        written = index_rows(rows.tokens, torch.from_numpy(index)).cpu()
        kept = []
        for line, (row, reason) in enumerate(zip(index.tolist(), ending.tolist(), strict=True)):
            start, stop = int(rows.prompt_length[row]), int(rows.length[row])
            one = Hypothesis(written[line, start:stop].clone(), self._finish_reasons[reason])
            self._done[int(rows.request[row])] = one
            kept.append((row, one))
        return kept


@dataclass
class _CandidateRound:
    """The candidates of one request's next token, tried one after the other, and the best so far."""

    tokens: list[int]
    probs: list[float]
    index: int = 0
    best_score: float = -np.inf
    best_index: int = 0
    best_hidden_state: Tensor | None = None  # [D] of the best, a unit vector
    next_candidates: tuple[list[int], list[float]] = field(
        default_factory=lambda: ([], [])
    )  # what follows the best


class LowMemoryContrastiveSearch:
    """Contrastive search that tries its candidates one after the other, as drafts of one row a request.

    It keeps one copy of keys and values and takes `top_k` forwards a token. A row's last token is fed
    again with each candidate, so that what it says of the next token is known whenever one is chosen.
    """

    needs_log_probs = False
    required_states = ("hidden_states",)
    columns: Mapping[str, Tensor] = {}

    def __init__(self, noise: NoiseSource, stop: StopCondition, peers: RankGroup | None = None) -> None:  # noqa: ARG002
        self._stop = stop
        self._peers = peers
        self._hidden_states = HiddenStateBank()
        self._rounds: dict[int, _CandidateRound] = {}
        self._done: dict[int, Hypothesis] = {}

    def propose(self, rows: Rows, aid: DraftContext) -> Proposal:  # noqa: ARG002
        """The next candidate of every request that has any."""
        rounds = [self._rounds.get(request) for request in rows.request.tolist()]
        if not any(rounds):
            return NO_DRAFTS
        drafts = [[one.tokens[one.index] if one else 0] for one in rounds]
        tried = torch.tensor([int(one is not None) for one in rounds])
        return Proposal(None, torch.tensor(drafts).to(rows.tokens.device), tried)

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """The best candidate of the requests that have tried all of theirs."""
        hidden, requests = last_hidden_states(output, len(rows)), rows.request.tolist()
        fresh = np.array([request not in self._rounds for request in requests])
        for row in np.flatnonzero(fresh).tolist():
            self._hidden_states.add(requests[row], hidden[row])
        unit = torch.nn.functional.normalize(torch.stack([part[-1] for part in hidden]).float(), dim=-1)
        alike = self._hidden_states.max_similarity(rows.request.numpy(), unit[:, None]).squeeze(1)
        place = torch.from_numpy(np.where(fresh, 0, 1)).to(unit.device)  # after the row, or the candidate
        scores = output.logits[torch.arange(len(rows), device=unit.device), place]
        width = min(int(row_params(rows)["top_k"].max()), scores.shape[1])
        probs, tokens = scores.softmax(-1).topk(width)
        bits = torch.cat((alike[:, None], probs), 1).contiguous().view(torch.int32).long()
        word = torch.cat((bits, tokens), 1)
        word = (word if self._peers is None else self._peers.broadcast(word)).cpu()
        values = word[:, : 1 + width].to(torch.int32).view(torch.float32).numpy()
        ready, failed = [], []
        for row, request in enumerate(requests):
            count = int(row_params(rows)["top_k"][row])
            kept = [at for at in range(min(count, width)) if values[row, 1 + at] > 0]
            coming = (
                [int(word[row, 1 + width + at]) for at in kept],
                [float(values[row, 1 + at]) for at in kept],
            )
            if fresh[row]:
                if not kept:
                    failed.append(request)
                    continue
                self._rounds[request] = _CandidateRound(*coming)
            elif self._score_candidate(rows, row, float(values[row, 0]), unit[row], coming):
                ready.append(row)
        # The prompt is told of when it is read, a choice when it is made.
        told = torch.tensor(sorted({*ready, *np.flatnonzero(fresh).tolist()}), dtype=torch.long)
        return self._build_selection(rows, ready, failed)._replace(
            recorded_lines=RecordedLines(told, torch.zeros_like(told))
        )

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's one sequence."""
        found = self._done.pop(request)
        self.drop(request)
        return [found]

    def drop(self, request: int) -> None:
        """Forget a request."""
        self._hidden_states.remove(request)
        self._rounds.pop(request, None)
        self._done.pop(request, None)

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """Nothing ends while the request goes on."""
        del request
        return []

    def _score_candidate(
        self, rows: Rows, row: int, alike: float, state: Tensor, coming: tuple[list[int], list[float]]
    ) -> bool:
        """Take what a candidate is worth; whether it was the last."""
        one = self._rounds[int(rows.request[row])]
        alpha = float(row_params(rows)["penalty_alpha"][row])
        value = (1 - alpha) * one.probs[one.index] - alpha * alike
        if value > one.best_score:
            one.best_score, one.best_index, one.best_hidden_state, one.next_candidates = (
                value,
                one.index,
                state,
                coming,
            )
        one.index += 1
        return one.index == len(one.tokens)

    def _build_selection(self, rows: Rows, ready: list[int], failed: list[int]) -> Selection:
        """The rows with the token of those that are ready; all others are asked again."""
        tokens, emits = torch.zeros(len(rows), dtype=torch.long), torch.full((len(rows),), -1)
        for row in ready:
            one = self._rounds[int(rows.request[row])]
            tokens[row], emits[row] = one.tokens[one.best_index], 1
            assert one.best_hidden_state is not None
            self._hidden_states.append(rows.request.numpy()[row : row + 1], one.best_hidden_state[None])
        now = torch.tensor(ready, dtype=torch.long)
        reasons = self._stop.finish_reasons(rows, now, tokens[now]) if ready else []
        retired, gone = [], {row for row in range(len(rows)) if int(rows.request[row]) in failed}
        for place, row in enumerate(ready):
            why = next((name for name, which in reasons if which[place]), None)
            request = int(rows.request[row])
            one = self._rounds[request]
            if why is not None:
                written = rows.tokens[row, int(rows.prompt_length[row]) : int(rows.length[row])].cpu()
                self._done[request] = Hypothesis(torch.cat((written, tokens[row : row + 1])), why)
                retired.append((row, self._done[request]))
                gone.add(row)
            elif not one.next_candidates[0]:
                failed.append(request)
                gone.add(row)
            else:
                self._rounds[request] = _CandidateRound(*one.next_candidates)
        ends = {ready.index(row): one for row, one in retired}
        emitted = Tokens(rows.request[now], torch.zeros_like(now), tokens[now], now, finished=ends)
        keep = torch.tensor([row for row in range(len(rows)) if row not in gone], dtype=torch.long)
        return Selection(
            tokens[keep].to(rows.tokens.device),
            keep,
            torch.zeros_like(keep),
            emit_mode=emits[keep],
            emitted=emitted if ready else None,
            finished=[int(rows.request[row]) for row, _ in retired],
            failed=failed,
            host_tokens=tokens[keep],
            finished_sequences=retired,
        )


class HiddenStateBank:
    """The hidden states of all positions of each request, as unit vectors, one line a request."""

    def __init__(self) -> None:
        self._bank: Tensor | None = None  # [M, C, D]
        self._lengths = np.zeros(0, dtype=np.int64)  # [M]
        self._requests = np.zeros(0, dtype=np.int64)  # [M]

    def add(self, request: int, states: Tensor) -> None:
        """Take a new request's [T, D]."""
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

    def remove(self, request: int) -> None:
        """Forget a request."""
        keep = self._requests != request
        if self._bank is None or keep.all():
            return
        self._requests, self._lengths = self._requests[keep], self._lengths[keep]
        self._bank = index_rows(self._bank, torch.from_numpy(np.flatnonzero(keep))) if keep.any() else None

    def max_similarity(self, requests: Array, states: Tensor) -> Tensor:
        """The largest cosine of each unit vector [B, k, D] with the past of its request [B, k]."""
        bank, lines = self._bank_rows(requests)
        lengths = self._lengths[lines]
        bank = bank[:, : int(lengths.max())]
        alike = torch.bmm(states, bank.transpose(1, 2))
        there = torch.arange(bank.shape[1]) < torch.from_numpy(lengths)[:, None]
        return alike.masked_fill(~there.to(alike.device)[:, None], -torch.inf).amax(-1)

    def append(self, requests: Array, states: Tensor) -> None:
        """One more position a request [B, D]."""
        if not len(requests):
            return
        lines = self._bank_indices(requests)
        self._ensure_capacity(int(self._lengths[lines].max()) + 1)
        assert self._bank is not None
        at = torch.from_numpy(np.stack((lines, self._lengths[lines]))).to(self._bank.device)
        self._bank[at[0], at[1]] = states
        self._lengths[lines] += 1

    def _bank_indices(self, requests: Array) -> Array:
        order = np.argsort(self._requests)
        return np.asarray(order[np.searchsorted(self._requests, requests, sorter=order)])

    def _bank_rows(self, requests: Array) -> tuple[Tensor, Array]:
        """The bank with a line for each request, in that order."""
        assert self._bank is not None
        lines = self._bank_indices(requests)
        if len(lines) == len(self._requests) and (lines == np.arange(len(lines))).all():
            return self._bank, lines
        return index_rows(self._bank, torch.from_numpy(lines)), lines

    def _ensure_capacity(self, size: int) -> None:
        assert self._bank is not None
        have = self._bank.shape[1]
        if have < size:
            wide = max(size + 64, have + have // 2)
            self._bank = torch.nn.functional.pad(self._bank, (0, 0, 0, wide - have))


def last_hidden_states(output: ForwardOutput, rows: int) -> list[Tensor]:
    """The last layer's states of each row's fed positions, drafts included [T, D]."""
    names = ("hidden_states", "decoder_hidden_states")
    found: dict[int, Tensor] = {}
    for part in output.states:
        layers: Any = next((part[name] for name in names if part.get(name) is not None), None)
        if layers is None:
            raise UnsupportedModel("contrastive search needs hidden states, which the model does not give")
        whole, fed = layers[-1], part["fed_length"].tolist()
        for at, row in enumerate(part["rows"].tolist()):
            found[row] = whole[at, : fed[at]]
    index: Sequence[int] = range(rows) if output.row_index is None else output.row_index.tolist()
    return [found[row] for row in index]


def _rows_by_request(rows: Rows) -> Array:
    """The rows of each request, by slot [B, k], -1 where one has fewer."""
    order = np.lexsort((rows.slot.numpy(), rows.request.numpy()))
    _, first, counts = np.unique(rows.request.numpy()[order], return_index=True, return_counts=True)
    at = np.arange(counts.max())
    place = np.minimum(first[:, None] + at, len(order) - 1)
    return np.asarray(np.where(at < counts[:, None], order[place], -1))
