"""Beam search and beam sampling: several rows a request, and the best of what they can become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, NoiseSource, RankGroup, StopCondition
from descant.core.records import DraftContext, ForwardOutput, Hypothesis, Proposal, RecordedLines, Selection
from descant.core.rows import Rows, index_rows
from descant.decoding.strategies.beams.finished_pool import BeamScoring, FinishedHypotheses, top_unfinished

__all__ = ["LIMIT_REASONS", "BeamCandidates", "BeamGroup", "BeamSearch", "BeamShape"]

NO_DRAFTS = Proposal()
LIMIT_REASONS = ("length", "time")  # what ends a row whatever its token


class BeamShape(NamedTuple):
    """What requests must have in common to share a beam search."""

    num_beams: int  # beams a request
    num_groups: int = 1  # teams into which they are divided
    candidates_per_beam: int = 2  # continuations looked at, a beam
    do_sample: bool = False  # by chance instead of by rank

    @property
    def group_size(self) -> int:
        """Beams a team."""
        return self.num_beams // self.num_groups


@dataclass
class BeamCandidates:
    """The continuations looked at in one step, on the host, best (or first drawn) first [B, K]."""

    sum_logprobs: Array  # summed log-probabilities
    parent_rows: Tensor  # the row each continues
    parent_slots: Tensor  # the same as the slot of its request
    tokens: Tensor
    finished_mask: Array  # bool
    finish_reasons: Sequence[tuple[str, Array]]

    def finish_reason(self, line: int, place: int) -> str:
        """Why that candidate ends."""
        flat = line * self.sum_logprobs.shape[1] + place
        return next(name for name, which in self.finish_reasons if which[flat])

    def reason_mask(self, *names: str) -> Array:
        """Which of them end for one of these reasons [B, K]."""
        found = np.zeros(self.sum_logprobs.size, dtype=bool)
        for name, which in self.finish_reasons:
            if name in names:
                found |= which
        return found.reshape(self.sum_logprobs.shape)


class BeamGroup(NamedTuple):
    """The requests of a step that stand on equally many rows, as one of their teams sees them."""

    group_index: int
    rows: Tensor  # [B, N]
    requests: Array  # [B]
    pool_indices: Array  # [B] of their pools
    scoring: BeamScoring


class BeamSearch:
    """`width` beams a request, after a prefill of one row; hypotheses that end go to the request's pools.

    A candidate's score is the sum of its processed log-probabilities; a finished one is divided by its
    number of new tokens to the power of `length_penalty`. Each request is judged by its own pools alone,
    so that no neighbour can end it. Sampling (`draws`) takes the candidates by chance instead of by rank.

    With several groups (Vijayakumar et al. 2018, arXiv 1610.02424) each is a search of its own, with a
    pool of its own; they choose one after the other, and what a group has chosen in this step is a rival
    to those after it, whose processors make that costlier. A group that has ended is nobody's rival.
    """

    needs_log_probs = True
    columns: Mapping[str, Tensor] = {
        "score": torch.zeros(1),  # the sum of the row's log-probabilities
        "beam_indices": torch.full(
            (1, 32), -1, dtype=torch.int32
        ),  # the slot each of its new tokens was chosen from
    }

    def __init__(
        self, shape: BeamShape, noise: NoiseSource, stop: StopCondition, peers: RankGroup | None = None
    ) -> None:
        self._shape = shape
        self._noise = noise
        self._stop = stop
        self._peers = peers
        self._pooled_version: object = None  # the version of a table all of whose requests have a pool
        self._finished_pools = FinishedHypotheses(shape.group_size)

    @property
    def has_groups(self) -> bool:
        """Whether it has rows processed by itself, group by group."""
        return self._shape.num_groups > 1

    def propose(self, rows: Rows, aid: DraftContext) -> Proposal:  # noqa: ARG002
        """Nothing is guessed ahead."""
        return NO_DRAFTS

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """The best continuations of every request; requests that cannot improve leave."""
        shape = self._shape
        if rows.version != self._pooled_version:
            self._pooled_version = rows.version
            every = np.unique(rows.request.numpy())[:, None] * shape.num_groups + np.arange(shape.num_groups)
            self._finished_pools.add_keys(every.flatten())
        if not self.has_groups:
            teams = self._beam_groups(rows, 0, np.arange(len(rows)))
            parts = [self._select_group(rows, output.logits[:, 0], team) for team in teams]
            return parts[0] if len(parts) == 1 else self._merge_selections(parts)
        return self._select_by_group(rows, output)

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's pools, best first."""
        found = self.finished_so_far(request)
        self.drop(request)
        return found

    def drop(self, request: int) -> None:
        """Forget a request."""
        for group in range(self._shape.num_groups):
            self._finished_pools.remove_key(request * self._shape.num_groups + group)

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's pools so far, best first."""
        keys = range(request * self._shape.num_groups, (request + 1) * self._shape.num_groups)
        found: list[Hypothesis] = [entry for key in keys for entry in self._finished_pools.get(key)]
        return sorted(found, key=lambda one: -(one.score or 0.0)) if self.has_groups else found

    # -------------------------------------------------------------------- groups
    def _select_by_group(self, rows: Rows, output: ForwardOutput) -> Selection:
        """Every group's choice, each knowing what those before it have chosen."""
        shape, parts, shown = self._shape, [], []
        fresh = (rows.length == rows.prompt_length).numpy()
        requests = np.unique(rows.request.numpy())
        rivals = np.full((len(requests), shape.num_beams), -1)
        assert output.process_rows is not None
        for group in range(shape.num_groups):
            mine = np.flatnonzero(fresh | (rows.slot.numpy() // shape.group_size == group))
            if not len(mine):
                continue
            place = np.searchsorted(requests, rows.request.numpy()[mine])
            against = torch.from_numpy(rivals[place]).to(rows.tokens.device)
            scores = output.process_rows(torch.from_numpy(mine), {"earlier_group_tokens": against})
            shown.append(
                _recorded_lines(rows, mine, fresh, group * shape.group_size, shape.group_size, scores)
            )
            whole = scores.new_full((len(rows), scores.shape[1]), -torch.inf)
            whole[torch.from_numpy(mine).to(scores.device)] = scores
            for team in self._beam_groups(rows, group, mine):
                part, tokens = self._select_group_tokens(rows, whole, team)
                parts.append(part)
                first = group * shape.group_size
                rivals[np.searchsorted(requests, team.requests), first : first + tokens.shape[1]] = tokens
        return self._merge_groups(rows, parts)._replace(recorded_lines=_concat_recorded_lines(shown))

    def _merge_groups(self, rows: Rows, parts: Sequence[Selection]) -> Selection:
        """The groups' selections as one: a request ends with its last group."""
        whole = self._merge_selections(parts)
        assert whole.parents is not None
        goes = set(rows.request[whole.parents].tolist())
        over = [request for request in dict.fromkeys((*whole.finished, *whole.failed)) if request not in goes]
        empty = [request for request in over if not self.finished_so_far(request)]
        return whole._replace(finished=[one for one in over if one not in empty], failed=empty)

    # -------------------------------------------------------------------- one team
    def _beam_groups(self, rows: Rows, group: int, mine: Array) -> list[BeamGroup]:
        """The requests that have the rows `mine` in a group, by how many those are."""
        request, slot = rows.request.numpy()[mine], rows.slot.numpy()[mine]
        order = mine[np.lexsort((slot, request))]
        requests, counts = np.unique(request, return_counts=True)
        teams = []
        # Requests at their first choice stand on one row, all others on as many as the team has.
        for count in np.unique(counts):
            index = torch.from_numpy(order[np.repeat(counts == count, counts)].reshape(-1, count))
            whose = requests[counts == count]
            lines = self._finished_pools.indices_of(whose * self._shape.num_groups + group)
            teams.append(BeamGroup(group, index, whose, lines, _beam_scoring(rows, index[:, 0].numpy())))
        return teams

    def _select_group(self, rows: Rows, scores: Tensor, team: BeamGroup) -> Selection:
        """One step of a team, whose scores are `scores` [R, V]."""
        found = self._top_candidates(rows, scores, team)
        best = top_unfinished(found.sum_logprobs, found.finished_mask, self._shape.num_beams)
        alive = np.take_along_axis(np.where(found.finished_mask, -np.inf, found.sum_logprobs), best, 1)
        retired = self._add_finished(rows, team, found, found.finished_mask)
        going = self._finished_pools.can_improve(
            team.pool_indices, team.scoring, alive[:, 0]
        ) & ~found.finished_mask.all(1)
        return self._build_selection(rows, team, found, best, alive, going, retired)

    def _select_group_tokens(self, rows: Rows, scores: Tensor, team: BeamGroup) -> tuple[Selection, Array]:
        """The same by the rules of groups, and the tokens chosen [B, W], -1 where there are fewer.

        What its token ends is judged first, what is cut off by its length or time last.
        """
        found = self._top_candidates(rows, scores, team)
        cut = found.reason_mask(*LIMIT_REASONS)
        final = found.finished_mask & ~(cut & ~found.reason_mask("eos", "stop"))
        best = top_unfinished(found.sum_logprobs, final, self._shape.group_size)
        alive = np.take_along_axis(np.where(final, -np.inf, found.sum_logprobs), best, 1)
        retired = self._add_finished(rows, team, found, final)
        going = self._finished_pools.can_improve(team.pool_indices, team.scoring, found.sum_logprobs[:, 0])
        if cut.any():
            still = np.zeros_like(cut)
            np.put_along_axis(still, best, alive > -np.inf, 1)
            retired += self._add_finished(rows, team, found, still & cut & going[:, None], include_all=True)
            going &= ~cut.all(1)
        tokens = np.where(alive > -np.inf, np.take_along_axis(found.tokens.numpy(), best, 1), -1)
        return self._build_selection(rows, team, found, best, alive, going, retired), tokens

    def _build_selection(  # noqa: PLR0913 - a step's whole outcome
        self,
        rows: Rows,
        team: BeamGroup,
        found: BeamCandidates,
        best: Array,
        alive: Array,
        going: Array,
        retired: list[tuple[int, Hypothesis]],
    ) -> Selection:
        """The candidates `best` [B, W] of sums `alive` as rows, of the requests that go on."""
        going = going & (alive[:, 0] > -np.inf)
        # A request whose every continuation is impossible ends with what it has, or fails with nothing.
        possible = (found.sum_logprobs.max(1) > -np.inf) | self._has_results(team)
        kept = (alive > -np.inf) & going[:, None]
        line, slot = np.nonzero(kept)
        place = best[line, slot]
        parents, whence = (
            torch.from_numpy(part.numpy()[line, place]) for part in (found.parent_rows, found.parent_slots)
        )
        tokens = torch.from_numpy(found.tokens.numpy()[line, place])
        return Selection(
            tokens.to(rows.tokens.device, non_blocking=True),
            parents,
            slot=torch.from_numpy(slot + team.group_index * self._shape.group_size),
            columns={
                "score": torch.from_numpy(alive[kept].astype(np.float32)),
                "beam_indices": _append_beam_indices(rows, parents, whence),
            },
            finished=team.requests[possible & ~going].tolist(),
            failed=team.requests[~possible].tolist(),
            host_tokens=tokens,
            finished_sequences=retired,
        )

    def _has_results(self, team: BeamGroup) -> Array:
        """Which requests have something to return already [B]."""
        return ~self._finished_pools.is_empty(team.pool_indices)

    def _top_candidates(self, rows: Rows, scores: Tensor, team: BeamGroup) -> BeamCandidates:
        """The likeliest continuations of every request, or as many drawn without replacement."""
        index, shape = team.rows, self._shape
        batch, beams = index.shape
        vocabulary = scores.shape[1]
        flat = index.flatten()
        so_far = rows.column("score")[flat].to(scores.device, non_blocking=True)
        lines = scores if torch.equal(flat, torch.arange(len(scores))) else index_rows(scores, flat)
        total = (lines + so_far[:, None]).view(batch, beams * vocabulary)
        count = min(shape.candidates_per_beam * shape.group_size, total.shape[1])
        if shape.do_sample:
            # Noise for all `width` beams also while there is one, so that the stream does not depend on it.
            leader = rows.take(index[:, 0]).replace(slot=torch.zeros(batch, dtype=torch.long))
            noise = self._noise.draw(leader, shape.num_beams * vocabulary)[:, : total.shape[1]]
            at = (total.softmax(-1) / noise).topk(count).indices
            best = total.gather(1, at)
        else:
            best, at = total.topk(count)
        # The one transfer of the step; the scores travel as their bits, since floats hold no large index.
        choice = torch.stack((best.contiguous().view(torch.int32).long(), at))
        bits, places = (choice if self._peers is None else self._peers.broadcast(choice)).cpu()
        beam, tokens = places // vocabulary, places % vocabulary
        parents = index.gather(1, beam)
        reasons = self._stop.finish_reasons(rows, parents.flatten(), tokens.flatten())
        ends = np.zeros((batch, count), dtype=bool)
        for _, which in reasons:
            ends |= which.reshape(batch, count)
        sums = bits.to(torch.int32).view(torch.float32).numpy()
        # All groups begin on the row of the prompt, each on its own first slot.
        slots = (
            rows.slot[parents]
            if beams > 1
            else rows.slot[parents].clamp(min=team.group_index * shape.group_size)
        )
        return BeamCandidates(sums, parents, slots, tokens, ends, reasons)

    def _add_finished(
        self, rows: Rows, team: BeamGroup, found: BeamCandidates, ready: Array, include_all: bool = False
    ) -> list[tuple[int, Hypothesis]]:
        """Put the candidates that are ready, of the first of them or of all, where they are good enough."""
        wide = found.sum_logprobs.shape[1] if include_all else self._shape.group_size
        ready = ready[:, :wide]
        if not ready.any():
            return []
        closed = self._finished_pools.is_full(team.pool_indices) & (team.scoring.early_stopping == 1)
        ready = ready & ~closed[:, None]
        shares = np.where(ready, team.scoring.normalized_scores(found.sum_logprobs[:, :wide]), -np.inf)

        def made(enters: Sequence[tuple[int, int, float]]) -> list[tuple[int, Hypothesis]]:
            return [
                self._hypothesis(rows, found, line, place, score, written)
                for (line, place, score), written in zip(
                    enters, _parent_tokens(rows, found, enters), strict=True
                )
            ]

        return self._add_to_pools(team, shares, made)

    def _add_to_pools(self, team: BeamGroup, shares: Array, made: Any) -> list[tuple[int, Hypothesis]]:
        """Offer sequences to the pools; those that enter, each with the row it continued."""
        entered: list[tuple[int, Hypothesis]] = []

        def make(enters: Sequence[tuple[int, int, float]]) -> list[Hypothesis]:
            entered.extend(made(enters))
            return [one for _, one in entered]

        self._finished_pools.insert_best(team.pool_indices, shares, make)
        return entered

    def _hypothesis(
        self, rows: Rows, found: BeamCandidates, line: int, place: int, score: float, written: Tensor
    ) -> tuple[int, Hypothesis]:
        """A candidate as a sequence that has ended, with the row it continued."""
        row = int(found.parent_rows[line, place])
        start, stop = int(rows.prompt_length[row]), int(rows.length[row])
        trail = rows.column("beam_indices")[row, : stop - start].tolist()
        tokens = torch.cat((written[start:stop], found.tokens[line, place : place + 1]))
        return row, Hypothesis(
            tokens, found.finish_reason(line, place), score, (*trail, int(found.parent_slots[line, place]))
        )

    def _merge_selections(self, parts: Sequence[Selection]) -> Selection:
        """The selections of several teams as one."""
        return Selection(
            torch.cat([part.tokens for part in parts]),
            torch.cat([_as_tensor(part.parents) for part in parts]),
            slot=torch.cat([_as_tensor(part.slot) for part in parts]),
            columns={
                name: torch.cat([_pad_to_widest(part.columns[name], name, parts) for part in parts])
                for name in self.columns
            },
            finished=[request for part in parts for request in part.finished],
            failed=[request for part in parts for request in part.failed],
            host_tokens=torch.cat([_as_tensor(part.host_tokens) for part in parts]),
            finished_sequences=[one for part in parts for one in part.finished_sequences],
        )


def _beam_scoring(rows: Rows, lead: Array) -> BeamScoring:
    """How the candidates of the requests are judged whose first rows are `lead` [B]."""
    params = row_params(rows)
    prompt = rows.prompt_length.numpy()[lead]
    return BeamScoring(
        rows.length.numpy()[lead] + 1 - prompt,
        params["max_length"].numpy()[lead] - prompt,
        params["early_stopping"].numpy()[lead],
        params["length_penalty"].numpy()[lead],
    )


def _parent_tokens(rows: Rows, found: BeamCandidates, enters: Sequence[tuple[int, int, float]]) -> Tensor:
    """The tokens of the rows that candidates continue [N, C] (host)."""
    parents = torch.tensor([int(found.parent_rows[line, place]) for line, place, _ in enters])
    return index_rows(rows.tokens, parents).cpu()


def _recorded_lines(
    rows: Rows, mine: Array, fresh: Array, first: int, team: int, scores: Tensor
) -> RecordedLines:
    """A group's lines of the record: at the first choice one row stands for all of them."""
    copies = np.where(fresh[mine], team, 1)
    line = np.arange(len(mine)).repeat(copies)
    place = np.arange(len(line)) - (np.cumsum(copies) - copies)[line]
    slot = np.where(fresh[mine][line], first + place, rows.slot.numpy()[mine][line])
    whose = torch.from_numpy(line)
    return RecordedLines(torch.from_numpy(mine)[whose], torch.from_numpy(slot), index_rows(scores, whose))


def _concat_recorded_lines(parts: Sequence[RecordedLines]) -> RecordedLines:
    """Several groups' lines as one."""
    scores = [part.scores for part in parts if part.scores is not None]
    return RecordedLines(
        torch.cat([part.rows for part in parts]), torch.cat([part.slot for part in parts]), torch.cat(scores)
    )


def _append_beam_indices(rows: Rows, parents: Tensor, slots: Tensor) -> Tensor:
    """The trails of the new rows: their parents', and the slot that they come from [R', C]."""
    trail = rows.column("beam_indices")[parents]
    at = (rows.length - rows.prompt_length)[parents]
    need = int(at.max()) + 1 if len(at) else 0
    if need > trail.shape[1]:
        trail = torch.nn.functional.pad(trail, (0, need), value=-1)
    return trail.scatter_(1, at[:, None], slots[:, None].to(trail.dtype))


def _pad_to_widest(column: object, name: str, parts: Sequence[Selection]) -> Tensor:
    """A part's column, as wide as the widest part's."""
    mine = _as_tensor(column)
    wide = max(_as_tensor(part.columns[name]).shape[-1] for part in parts) if mine.ndim > 1 else 0
    return torch.nn.functional.pad(mine, (0, wide - mine.shape[-1]), value=-1) if mine.ndim > 1 else mine


def _as_tensor(column: object) -> Tensor:
    assert isinstance(column, Tensor)
    return column
