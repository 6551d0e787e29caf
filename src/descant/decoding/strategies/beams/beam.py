"""Beam search and beam sampling: several rows per request, continued by their best candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import (
    Array,
    NoiseSource,
    RankGroup,
    StopCondition,
    StrategyDefaults,
    StrategyTraits,
)
from descant.core.records import ForwardOutput, Hypothesis, Proposal, RecordedLines, Selection
from descant.core.rows import Rows, index_rows
from descant.decoding.strategies.beams.finished_pool import BeamScoring, FinishedHypotheses, top_unfinished

LIMIT_REASONS = ("length", "time")  # these finish a row whatever its token


class BeamSettings(NamedTuple):
    """The settings that requests of one beam search share."""

    num_beams: int  # beams per request
    num_groups: int = 1  # groups the beams are divided into (diverse beam search)
    candidates_per_beam: int = 2  # candidates considered per beam
    do_sample: bool = False  # sample candidates instead of ranking them

    @property
    def group_size(self) -> int:
        """Beams per group."""
        return self.num_beams // self.num_groups


class BeamCandidates(NamedTuple):
    """The candidates of one step on the host, best (or first sampled) first [B, K]."""

    sum_logprobs: Array  # summed log-probabilities
    parent_rows: Array  # the row of each candidate
    parent_slots: Array  # the slot of that row
    tokens: Array
    finish_reasons: Sequence[tuple[str, Array]]  # the candidates that each reason finishes, bool

    def finish_reason(self, index: int, rank: int) -> str:
        """Why candidate `rank` of request `index` finishes."""
        return next(name for name, mask in self.finish_reasons if mask[index, rank])

    def reason_mask(self, *names: str) -> Array:
        """Which candidates finish for one of these reasons, or for any [B, K]."""
        matches = np.zeros(self.sum_logprobs.shape, dtype=bool)
        for name, mask in self.finish_reasons:  # one name may be there twice
            if not names or name in names:
                matches |= mask
        return matches

    def top(self, finished: Array, width: int) -> BeamCandidates:
        """The `width` best that do not finish [B, W]; the sum of others, where too few are left, is -inf."""
        ranks = top_unfinished(self.sum_logprobs, finished, width)
        lines = np.arange(len(ranks))[:, None]
        unfinished_sums = np.where(finished, -np.inf, self.sum_logprobs)
        return BeamCandidates(
            unfinished_sums[lines, ranks],
            self.parent_rows[lines, ranks],
            self.parent_slots[lines, ranks],
            self.tokens[lines, ranks],
            [(name, mask[lines, ranks]) for name, mask in self.finish_reasons],
        )


@dataclass
class BeamGroup:
    """Requests with equally many rows in one beam group."""

    index: int
    rows: Array  # [B, N] rows of each in the order of their slots
    requests: Array  # [B]
    table: Rows
    pools: FinishedHypotheses

    @cached_property
    def pool_indices(self) -> Array:
        """The index of each request's pool [B]."""
        return self.pools.indices_of(self.requests, self.index)

    @cached_property
    def scoring(self) -> BeamScoring:
        """The scoring of each request."""
        params, first_rows = row_params(self.table), self.rows[:, 0]
        prompt_length = self.table.prompt_length.numpy()[first_rows]
        return BeamScoring(
            self.table.length.numpy()[first_rows] + 1 - prompt_length,
            params["max_length"].numpy()[first_rows] - prompt_length,
            params["early_stopping"].numpy()[first_rows],
            params["length_penalty"].numpy()[first_rows],
        )


class TableLayout(NamedTuple):
    """The requests of a table version; the order of a request's own rows is that of their slots."""

    version: object
    key: Array  # [R] of each row, to which its slot is added
    batches: Sequence[tuple[Array | None, Array]]  # places in the order of rows (None: all), and the requests

    @classmethod
    def from_rows(cls, rows: Rows, num_beams: int) -> Self:
        """The layout of a table, batched by the requests' number of rows: one at the first token."""
        requests, rank, counts = np.unique(rows.request.numpy(), return_inverse=True, return_counts=True)
        batches: list[tuple[Array | None, Array]] = []
        for count in sorted(set(counts.tolist())):
            is_own = counts == count
            place = None if is_own.all() else np.flatnonzero(np.repeat(is_own, counts))
            batches.append((place, requests[is_own]))
        return cls(rows.version, rank * num_beams, batches)

    def row_order(self, rows: Rows) -> Array:
        """The rows by request and slot [R]."""
        return np.argsort(self.key + rows.slot.numpy())


def append_beam_indices(rows: Rows, parents: Array, slots: Array) -> Tensor:
    """The parents' beam indices with the chosen slots appended [R', C], equally wide for all of a table."""
    beam_indices = torch.from_numpy(rows.column("beam_indices").numpy()[parents])
    position = rows.length.numpy() - rows.prompt_length.numpy()
    width = int(position.max()) + 1
    if width > beam_indices.shape[1]:
        beam_indices = torch.nn.functional.pad(beam_indices, (0, width), value=-1)
    beam_indices.numpy()[np.arange(len(parents)), position[parents]] = slots
    return beam_indices


class BeamSearch(StrategyDefaults):
    """`num_beams` rows per request after a prefill of one row; finished hypotheses go to the request's pools.

    The score of a candidate is the sum of its processed log-probabilities; that of a finished hypothesis is
    divided by its number of new tokens to the power of `length_penalty`. A request ends by its own pools
    alone, independent of the batch. With `do_sample` the candidates are sampled instead of ranked.

    With several groups (Vijayakumar et al. 2018, arXiv 1610.02424) each group is its own search with its own
    pool. Groups choose in order; the tokens an earlier group has chosen in this step are passed to the
    processors of later groups, which penalise them. Finished groups no longer count.
    """

    traits = StrategyTraits(forks=True)
    needs_log_probs = True
    columns: Mapping[str, Tensor] = {
        "score": torch.zeros(1),  # the sum of the row's log-probabilities
        # the slot that each new token was chosen from
        "beam_indices": torch.full((1, 32), -1, dtype=torch.int32),
    }

    def __init__(
        self,
        settings: BeamSettings,
        noise: NoiseSource,
        stop: StopCondition,
        rank_group: RankGroup | None = None,
    ) -> None:
        self._settings = settings
        self._noise = noise
        self._stop = stop
        self._rank_group = rank_group
        self.has_groups = settings.num_groups > 1  # then it processes its rows group by group
        self._pooled_version: object = None  # version of a table whose requests all have pools
        self._finished_pools = FinishedHypotheses(settings.group_size, settings.num_groups)
        self._layout: TableLayout | None = None  # of the table with the last version

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """Continue every request with its best candidates; finished requests are removed."""
        if rows.version != self._pooled_version:
            self._pooled_version = rows.version
            self._finished_pools.add_requests(np.unique(rows.request.numpy()))
        if self.has_groups:
            return self._select_by_group(rows, output)
        parts = [self._select_group(rows, output.logits[:, 0], group) for group in self._groups(rows, 0)]
        return parts[0] if len(parts) == 1 else self._merge_selections(parts)

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's finished hypotheses, best first."""
        hypotheses = self.finished_so_far(request)
        self.drop(request)
        return hypotheses

    def drop(self, request: int) -> None:
        """Discard a request."""
        self._finished_pools.remove_request(request)

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the pools of now."""
        restore_pools, pooled_version = self._finished_pools.checkpoint(), self._pooled_version

        def restore() -> None:
            restore_pools()
            self._pooled_version = pooled_version

        return restore

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's finished hypotheses so far, best first."""
        return self._finished_pools.get(request)

    # -------------------------------------------------------------------- groups
    def _groups(self, rows: Rows, group_index: int) -> list[BeamGroup]:
        """A group of every request, batched by the requests' number of rows."""
        settings, pools = self._settings, self._finished_pools
        if self._layout is None or self._layout.version != rows.version:
            self._layout = TableLayout.from_rows(rows, settings.num_beams)
        order, groups = self._layout.row_order(rows), []
        for place, requests in self._layout.batches:
            index = (order if place is None else order[place]).reshape(len(requests), -1)
            if settings.num_groups == 1:
                groups.append(BeamGroup(0, index, requests, rows, pools))
                continue
            # A request at its first token has one row, which is of every group.
            in_group = (rows.length == rows.prompt_length).numpy()[index]
            in_group |= rows.slot.numpy()[index] // settings.group_size == group_index
            counts = in_group.sum(1)
            for count in sorted(set(counts.tolist()) - {0}):
                own = counts == count
                members = index[own][in_group[own]].reshape(-1, count)
                groups.append(BeamGroup(group_index, members, requests[own], rows, pools))
        return groups

    def _select_by_group(self, rows: Rows, output: ForwardOutput) -> Selection:
        """The selection of every group, each given the tokens of the groups before it."""
        settings, parts, recorded = self._settings, [], []
        requests, request_index = np.unique(rows.request.numpy(), return_inverse=True)
        earlier_tokens = np.full((len(requests), settings.num_beams), -1)
        assert output.process_rows is not None
        for group_index in range(settings.num_groups):
            groups, first_slot = self._groups(rows, group_index), group_index * settings.group_size
            if not groups:
                continue
            group_rows = np.sort(np.concatenate([group.rows.ravel() for group in groups]))
            row_earlier_tokens = torch.from_numpy(earlier_tokens[request_index[group_rows]])
            scores = output.process_rows(
                torch.from_numpy(group_rows),
                {"earlier_group_tokens": row_earlier_tokens.to(rows.tokens.device)},
            )
            recorded.append(self._recorded_lines(rows, group_rows, first_slot, scores))
            all_scores = scores.new_full((len(rows), scores.shape[1]), -torch.inf)
            all_scores[torch.from_numpy(group_rows).to(scores.device)] = scores
            for group in groups:
                part, tokens = self._select_group_tokens(rows, all_scores, group)
                parts.append(part)
                lines = np.searchsorted(requests, group.requests)
                earlier_tokens[lines, first_slot : first_slot + tokens.shape[1]] = tokens
        merged = self._merge_selections(parts)
        assert merged.parents is not None
        # A request finishes with its last group.
        running = set(rows.request[merged.parents].tolist())
        ended = dict.fromkeys(key for key in (*merged.finished, *merged.failed) if key not in running)
        failed = [request for request in ended if not self.finished_so_far(request)]
        return merged._replace(
            finished=[request for request in ended if request not in failed],
            failed=failed,
            recorded_lines=RecordedLines(*(_cat(part) for part in zip(*recorded, strict=True))),
        )

    def _recorded_lines(
        self, rows: Rows, group_rows: Array, first_slot: int, scores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A group's recorded lines: at the first token one row counts for all of the group's slots."""
        is_unexpanded = (rows.length == rows.prompt_length).numpy()[group_rows]
        position = np.arange(len(group_rows)).repeat(np.where(is_unexpanded, self._settings.group_size, 1))
        offset = np.arange(len(position)) - np.searchsorted(position, position)
        own_slot = rows.slot.numpy()[group_rows][position]
        slot = np.where(is_unexpanded[position], first_slot + offset, own_slot)
        index = torch.from_numpy(position)
        return torch.from_numpy(group_rows)[index], torch.from_numpy(slot), index_rows(scores, index)

    # -------------------------------------------------------------------- one group
    def _select_group(self, rows: Rows, scores: Tensor, group: BeamGroup) -> Selection:
        """One step of a group, from scores [R, V]."""
        candidates, width = self._top_candidates(rows, scores, group), self._settings.num_beams
        if not (candidates.finish_reasons or self._settings.do_sample or self._finished_pools.has_entries):
            best_sums = candidates.sum_logprobs[:, :width]
            if best_sums.shape[1] == width and best_sums.min() > -np.inf:  # false for NaN
                return self._continue_all(rows, candidates, best_sums)
        ended = candidates.reason_mask()
        kept = candidates.top(ended, width)
        finished = self._add_finished(rows, group, candidates, _top_only(ended, width))
        continues = self._finished_pools.can_improve(
            group.pool_indices, group.scoring, kept.sum_logprobs[:, 0]
        ) & ~ended.all(1)
        selection = self._build_selection(rows, group, candidates, kept, continues)
        return selection._replace(finished_sequences=finished)

    def _continue_all(self, rows: Rows, candidates: BeamCandidates, best_sums: Array) -> Selection:
        """Continue every request with its first candidates, with sums [B, W]: nothing has finished yet.

        The general way gives the same; most steps of most searches need no more than this.
        """
        batch, width = best_sums.shape
        slot = np.arange(width) if batch == 1 else np.tile(np.arange(width), batch)
        parents, parent_slots, tokens = (part[:, :width].ravel() for part in candidates[1:4])
        return _to_selection(rows, parents, parent_slots, tokens, slot, best_sums.ravel())

    def _select_group_tokens(self, rows: Rows, scores: Tensor, group: BeamGroup) -> tuple[Selection, Array]:
        """One step of one of several groups, and the chosen tokens [B, W], padded with -1.

        Candidates that finish by their token are handled first, those cut off by length or time last.
        """
        candidates = self._top_candidates(rows, scores, group)
        ended = candidates.reason_mask("eos", "stop")
        kept = self._choose_beams(rows, scores, group, candidates, ended)
        finished = self._add_finished(rows, group, candidates, _top_only(ended, self._settings.group_size))
        continues = self._finished_pools.can_improve(
            group.pool_indices, group.scoring, candidates.sum_logprobs[:, 0]
        )
        is_possible = kept.sum_logprobs > -np.inf
        truncated = kept.reason_mask(*LIMIT_REASONS) & is_possible
        if truncated.any():
            finished += self._add_finished(rows, group, kept, truncated & continues[:, None])
            continues &= ~truncated.any(1)
        selection = self._build_selection(rows, group, candidates, kept, continues)
        return selection._replace(finished_sequences=finished), np.where(is_possible, kept.tokens, -1)

    def _choose_beams(
        self,
        rows: Rows,  # noqa: ARG002
        scores: Tensor,  # noqa: ARG002
        group: BeamGroup,  # noqa: ARG002
        candidates: BeamCandidates,
        ended: Array,
    ) -> BeamCandidates:
        """The candidates that become the group's beams [B, W], among those that no token has ended."""
        return candidates.top(ended, self._settings.group_size)

    def _build_selection(
        self, rows: Rows, group: BeamGroup, candidates: BeamCandidates, kept: BeamCandidates, continues: Array
    ) -> Selection:
        """The `kept` candidates [B, W] as rows, for the requests that continue."""
        continues = continues & (kept.sum_logprobs[:, 0] > -np.inf)
        # A request without possible candidates finishes with its results, or fails if it has none.
        possible = candidates.sum_logprobs.max(1) > -np.inf
        if not possible.all():
            possible |= self._has_results(group)
        is_kept = (kept.sum_logprobs > -np.inf) & continues[:, None]
        slot = np.nonzero(is_kept)[1] + group.index * self._settings.group_size
        sums, parents, parent_slots, tokens = (part[is_kept] for part in kept[:4])
        return _to_selection(rows, parents, parent_slots, tokens, slot, sums.astype(np.float32))._replace(
            finished=group.requests[possible & ~continues].tolist(),
            failed=group.requests[~possible].tolist(),
        )

    def _has_results(self, group: BeamGroup) -> Array:
        """Which requests have finished hypotheses [B]."""
        return ~self._finished_pools.is_empty(group.pool_indices)

    def _top_candidates(self, rows: Rows, scores: Tensor, group: BeamGroup) -> BeamCandidates:
        """The top candidates of every request, or as many sampled without replacement."""
        settings, flat = self._settings, group.rows.ravel()
        batch, beams = group.rows.shape
        vocab_size = scores.shape[1]
        row_sums = torch.from_numpy(rows.column("score").numpy()[flat]).to(scores.device, non_blocking=True)
        is_in_order = len(flat) == scores.shape[0] and bool((flat[1:] > flat[:-1]).all())
        row_scores = scores if is_in_order else index_rows(scores, torch.from_numpy(flat))
        total = (row_scores + row_sums[:, None]).view(batch, beams * vocab_size)
        count = min(settings.candidates_per_beam * settings.group_size, total.shape[1])
        if settings.do_sample:
            # Draw noise for all `num_beams` even at the first token, so that the stream keeps its shape.
            first_rows = rows.take(torch.from_numpy(group.rows[:, 0]))
            first_rows = first_rows.replace(slot=torch.zeros(batch, dtype=torch.long))
            noise = self._noise.draw(first_rows, settings.num_beams * vocab_size)[:, : total.shape[1]]
            flat_index = (total.softmax(-1) / noise).topk(count).indices
            best = total.gather(1, flat_index)
        else:
            best, flat_index = total.topk(count)
        sums, host_index = self._to_host(best, flat_index)
        beam, tokens = np.divmod(host_index, vocab_size)
        parents = flat[beam + np.arange(0, batch * beams, beams)[:, None]]
        reasons = self._stop.finish_reasons(
            rows, torch.from_numpy(parents.ravel()), torch.from_numpy(tokens.ravel())
        )
        # All groups start from the prompt's row, each at its own first slot.
        slots = rows.slot.numpy()[parents]
        if beams == 1:
            slots = np.maximum(slots, group.index * settings.group_size)
        return BeamCandidates(
            sums, parents, slots, tokens, [(name, mask.reshape(batch, count)) for name, mask in reasons]
        )

    def _add_finished(
        self, rows: Rows, group: BeamGroup, candidates: BeamCandidates, ready: Array
    ) -> list[tuple[int, Hypothesis]]:
        """Offer the `ready` candidates to the pools; returns those accepted, each with its parent row."""
        added: list[tuple[int, Hypothesis]] = []
        if not ready.any():
            return added
        closed = self._finished_pools.is_full(group.pool_indices) & (group.scoring.early_stopping == 1)
        scores = group.scoring.normalized_scores(candidates.sum_logprobs)

        def make(accepted: Sequence[tuple[int, int, float]]) -> list[Hypothesis]:
            parents = [int(candidates.parent_rows[index, rank]) for index, rank, _ in accepted]
            tokens = index_rows(rows.tokens, torch.tensor(parents)).cpu()  # [N, C]
            for (index, rank, score), row, row_tokens in zip(accepted, parents, tokens, strict=True):
                added.append((row, self._hypothesis(rows, candidates, (index, rank), score, row_tokens)))
            return [hypothesis for _, hypothesis in added]

        self._finished_pools.insert_best(
            group.pool_indices, np.where(ready & ~closed[:, None], scores, -np.inf), make
        )
        return added

    def _hypothesis(
        self, rows: Rows, candidates: BeamCandidates, place: tuple[int, int], score: float, row_tokens: Tensor
    ) -> Hypothesis:
        """The candidate at a place (request index, rank) as a finished hypothesis."""
        row = int(candidates.parent_rows[place])
        start, stop = int(rows.prompt_length[row]), int(rows.length[row])
        beam_indices = rows.column("beam_indices")[row, : stop - start].tolist()
        token = row_tokens.new_tensor([candidates.tokens[place]])
        return Hypothesis(
            torch.cat((row_tokens[start:stop], token)),
            candidates.finish_reason(*place),
            score,
            (*beam_indices, int(candidates.parent_slots[place])),
        )

    def _merge_selections(self, parts: Sequence[Selection]) -> Selection:
        """The selections of several groups as one."""
        return Selection(
            _cat(part.tokens for part in parts),
            _cat(part.parents for part in parts),
            slot=_cat(part.slot for part in parts),
            columns={name: _cat(part.columns[name] for part in parts) for name in parts[0].columns},
            finished=[request for part in parts for request in part.finished],
            failed=[request for part in parts for request in part.failed],
            host_tokens=_cat(part.host_tokens for part in parts),
            finished_sequences=[finished for part in parts for finished in part.finished_sequences],
        )


def _to_selection(
    rows: Rows, parents: Array, parent_slots: Array, tokens: Array, slot: Array, sums: Array
) -> Selection:
    """The chosen candidates as rows [R']."""
    host_tokens = torch.from_numpy(tokens)
    return Selection(
        host_tokens.to(rows.tokens.device, non_blocking=True),
        torch.from_numpy(parents),
        slot=torch.from_numpy(slot),
        columns={
            "score": torch.from_numpy(sums),
            "beam_indices": append_beam_indices(rows, parents, parent_slots),
        },
        host_tokens=host_tokens,
    )


def _top_only(mask: Array, width: int) -> Array:
    """The mask [B, K] within the first `width` ranks."""
    return mask & (np.arange(mask.shape[1]) < width)


def _cat(parts: Iterable[Any]) -> Tensor:
    return torch.cat(list(parts))
