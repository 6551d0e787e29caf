"""Beam search and beam sampling: several rows per request, continued by their best candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, Drafter, NoiseSource, RankGroup, StopCondition, StrategyTraits
from descant.core.records import DraftContext, ForwardOutput, Hypothesis, Proposal, Selection
from descant.core.rows import Rows, index_rows
from descant.decoding.strategies.beams.candidates import (
    LIMIT_REASONS,
    BeamCandidates,
    BeamGroup,
    BeamSettings,
    TableLayout,
    append_beam_indices,
    concat_recorded_lines,
    recorded_lines,
)
from descant.decoding.strategies.beams.finished_pool import FinishedHypotheses, top_unfinished

__all__ = ["BeamSearch", "BeamSettings"]

NO_DRAFTS = Proposal()


class BeamSearch:
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
    required_states: Sequence[str] = ()
    drafter: Drafter | None = None
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
        self._pooled_version: object = None  # version of a table whose requests all have pools
        self._finished_pools = FinishedHypotheses(settings.group_size)
        self._layout: TableLayout | None = None  # of the table with the last version

    @property
    def has_groups(self) -> bool:
        """Whether the strategy processes its rows group by group."""
        return self._settings.num_groups > 1

    def propose(self, rows: Rows, context: DraftContext) -> Proposal:  # noqa: ARG002
        """No drafts."""
        return NO_DRAFTS

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """Continue every request with its best candidates; finished requests are removed."""
        settings = self._settings
        if rows.version != self._pooled_version:
            self._pooled_version = rows.version
            pool_keys = np.unique(rows.request.numpy())[:, None] * settings.num_groups + np.arange(
                settings.num_groups
            )
            self._finished_pools.add_keys(pool_keys.flatten())
        if not self.has_groups:
            groups = self._table_groups(rows)
            parts = [self._select_group(rows, output.logits[:, 0], group) for group in groups]
            return parts[0] if len(parts) == 1 else self._merge_selections(parts)
        return self._select_by_group(rows, output)

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's finished hypotheses, best first."""
        hypotheses = self.finished_so_far(request)
        self.drop(request)
        return hypotheses

    def drop(self, request: int) -> None:
        """Discard a request."""
        for group in range(self._settings.num_groups):
            self._finished_pools.remove_key(request * self._settings.num_groups + group)

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the pools of now."""
        return partial(self._restore, self._finished_pools.checkpoint(), self._pooled_version)

    def _restore(self, restore_pools: Callable[[], None], pooled_version: object) -> None:
        restore_pools()
        self._pooled_version = pooled_version

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's finished hypotheses so far, best first."""
        keys = range(request * self._settings.num_groups, (request + 1) * self._settings.num_groups)
        hypotheses: list[Hypothesis] = [entry for key in keys for entry in self._finished_pools.get(key)]
        return (
            sorted(hypotheses, key=lambda hypothesis: -(hypothesis.score or 0.0))
            if self.has_groups
            else hypotheses
        )

    # -------------------------------------------------------------------- groups
    def _select_by_group(self, rows: Rows, output: ForwardOutput) -> Selection:
        """The selection of every group, each given the tokens of the groups before it."""
        settings, parts, recorded = self._settings, [], []
        fresh = (rows.length == rows.prompt_length).numpy()
        requests = np.unique(rows.request.numpy())
        earlier_tokens = np.full((len(requests), settings.num_beams), -1)
        assert output.process_rows is not None
        for group_index in range(settings.num_groups):
            group_rows = np.flatnonzero(fresh | (rows.slot.numpy() // settings.group_size == group_index))
            if not len(group_rows):
                continue
            request_index = np.searchsorted(requests, rows.request.numpy()[group_rows])
            row_earlier_tokens = torch.from_numpy(earlier_tokens[request_index]).to(rows.tokens.device)
            scores = output.process_rows(
                torch.from_numpy(group_rows), {"earlier_group_tokens": row_earlier_tokens}
            )
            recorded.append(
                recorded_lines(
                    rows, group_rows, fresh, group_index * settings.group_size, settings.group_size, scores
                )
            )
            all_scores = scores.new_full((len(rows), scores.shape[1]), -torch.inf)
            all_scores[torch.from_numpy(group_rows).to(scores.device)] = scores
            for group in self._beam_groups(rows, group_index, group_rows):
                part, tokens = self._select_group_tokens(rows, all_scores, group)
                parts.append(part)
                first = group_index * settings.group_size
                earlier_tokens[np.searchsorted(requests, group.requests), first : first + tokens.shape[1]] = (
                    tokens
                )
        return self._merge_groups(rows, parts)._replace(recorded_lines=concat_recorded_lines(recorded))

    def _merge_groups(self, rows: Rows, parts: Sequence[Selection]) -> Selection:
        """The groups' selections as one: a request finishes with its last group."""
        merged = self._merge_selections(parts)
        assert merged.parents is not None
        running = set(rows.request[merged.parents].tolist())
        ended = [
            request for request in dict.fromkeys((*merged.finished, *merged.failed)) if request not in running
        ]
        empty = [request for request in ended if not self.finished_so_far(request)]
        return merged._replace(finished=[request for request in ended if request not in empty], failed=empty)

    # -------------------------------------------------------------------- one group
    def _beam_groups(self, rows: Rows, group_index: int, group_rows: Array) -> list[BeamGroup]:
        """The requests with rows among `group_rows`, batched by their number of rows."""
        request, slot = rows.request.numpy()[group_rows], rows.slot.numpy()[group_rows]
        order = group_rows[np.lexsort((slot, request))]
        requests, counts = np.unique(request, return_counts=True)
        groups = []
        # Requests at their first token have one row, all others `group_size`.
        for count in sorted(set(counts.tolist())):
            index = torch.from_numpy(order[np.repeat(counts == count, counts)].reshape(-1, count))
            batch = requests[counts == count]
            num_groups = self._settings.num_groups
            groups.append(BeamGroup(group_index, index, batch, rows, self._finished_pools, num_groups))
        return groups

    def _table_groups(self, rows: Rows) -> list[BeamGroup]:
        """The same for all rows of a table without groups; only the order of a request's rows changes."""
        if self._layout is None or self._layout.version != rows.version:
            self._layout = TableLayout.from_rows(rows, self._settings.num_beams)
        order = self._layout.row_order(rows)
        return [
            BeamGroup(
                0,
                torch.from_numpy(
                    (order if one.place is None else order[one.place]).reshape(-1, one.num_rows)
                ),
                one.requests,
                rows,
                self._finished_pools,
            )
            for one in self._layout.batches
        ]

    def _select_group(self, rows: Rows, scores: Tensor, group: BeamGroup) -> Selection:
        """One step of a group, from scores [R, V]."""
        candidates = self._top_candidates(rows, scores, group)
        width = self._settings.num_beams
        if not (candidates.finish_reasons or self._settings.do_sample or self._finished_pools.has_entries):
            best_sums = candidates.sum_logprobs[:, :width]
            if best_sums.shape[1] == width and best_sums.min() > -np.inf:  # false for NaN
                return self._continue_all(rows, candidates, best_sums)
        best = top_unfinished(candidates.sum_logprobs, candidates.finished_mask, width)
        unfinished_sums = np.where(candidates.finished_mask, -np.inf, candidates.sum_logprobs)
        best_sums = unfinished_sums[np.arange(len(best))[:, None], best]
        finished = self._add_finished(rows, group, candidates, candidates.finished_mask)
        continues = self._finished_pools.can_improve(
            group.pool_indices, group.scoring, best_sums[:, 0]
        ) & ~candidates.finished_mask.all(1)
        selection = self._build_selection(rows, group, candidates, best, best_sums, continues)
        return selection._replace(finished_sequences=finished)

    def _continue_all(self, rows: Rows, candidates: BeamCandidates, best_sums: Array) -> Selection:
        """Continue every request with its first candidates, with sums [B, W]: nothing has finished yet.

        The general way gives the same; most steps of most searches need no more than this.
        """
        batch, width = best_sums.shape
        parents, parent_slots, tokens = (
            torch.from_numpy(part.numpy()[:, :width].ravel())
            for part in (candidates.parent_rows, candidates.parent_slots, candidates.tokens)
        )
        slot = np.arange(width) if batch == 1 else np.tile(np.arange(width), batch)
        return Selection(
            tokens.to(rows.tokens.device, non_blocking=True),
            parents,
            slot=torch.from_numpy(slot),
            columns={
                "score": torch.from_numpy(best_sums.ravel()),
                "beam_indices": append_beam_indices(rows, parents, parent_slots),
            },
            host_tokens=tokens,
        )

    def _select_group_tokens(self, rows: Rows, scores: Tensor, group: BeamGroup) -> tuple[Selection, Array]:
        """One step of one of several groups, and the chosen tokens [B, W], padded with -1.

        Candidates that finish by their token are handled first, those cut off by length or time last.
        """
        candidates = self._top_candidates(rows, scores, group)
        truncated = candidates.reason_mask(*LIMIT_REASONS)
        ended = candidates.finished_mask & ~(truncated & ~candidates.reason_mask("eos", "stop"))
        best = top_unfinished(candidates.sum_logprobs, ended, self._settings.group_size)
        best_sums = np.take_along_axis(np.where(ended, -np.inf, candidates.sum_logprobs), best, 1)
        finished = self._add_finished(rows, group, candidates, ended)
        continues = self._finished_pools.can_improve(
            group.pool_indices, group.scoring, candidates.sum_logprobs[:, 0]
        )
        if truncated.any():
            selected = np.zeros_like(truncated)
            np.put_along_axis(selected, best, best_sums > -np.inf, 1)
            finished += self._add_finished(
                rows, group, candidates, selected & truncated & continues[:, None], include_all=True
            )
            continues &= ~truncated.all(1)
        tokens = np.where(best_sums > -np.inf, np.take_along_axis(candidates.tokens.numpy(), best, 1), -1)
        selection = self._build_selection(rows, group, candidates, best, best_sums, continues)
        return selection._replace(finished_sequences=finished), tokens

    def _build_selection(
        self,
        rows: Rows,
        group: BeamGroup,
        candidates: BeamCandidates,
        best: Array,
        best_sums: Array,
        continues: Array,
    ) -> Selection:
        """The candidates `best` [B, W] with sums `best_sums` as rows, for the requests that continue."""
        continues = continues & (best_sums[:, 0] > -np.inf)
        # A request without possible candidates finishes with its results, or fails if it has none.
        possible = candidates.sum_logprobs.max(1) > -np.inf
        if not possible.all():
            possible |= self._has_results(group)
        is_kept = (best_sums > -np.inf) & continues[:, None]
        index, slot = np.nonzero(is_kept)
        rank = best[index, slot]
        parents, parent_slots = (
            torch.from_numpy(part.numpy()[index, rank])
            for part in (candidates.parent_rows, candidates.parent_slots)
        )
        tokens = torch.from_numpy(candidates.tokens.numpy()[index, rank])
        return Selection(
            tokens.to(rows.tokens.device, non_blocking=True),
            parents,
            slot=torch.from_numpy(slot + group.group_index * self._settings.group_size),
            columns={
                "score": torch.from_numpy(best_sums[is_kept].astype(np.float32)),
                "beam_indices": append_beam_indices(rows, parents, parent_slots),
            },
            finished=group.requests[possible & ~continues].tolist(),
            failed=group.requests[~possible].tolist(),
            host_tokens=tokens,
        )

    def _has_results(self, group: BeamGroup) -> Array:
        """Which requests have finished hypotheses [B]."""
        return ~self._finished_pools.is_empty(group.pool_indices)

    def _top_candidates(self, rows: Rows, scores: Tensor, group: BeamGroup) -> BeamCandidates:
        """The top candidates of every request, or as many sampled without replacement."""
        index, settings = group.rows, self._settings
        batch, beams = index.shape
        vocab_size = scores.shape[1]
        flat = index.numpy().ravel()
        row_sums = torch.from_numpy(rows.column("score").numpy()[flat]).to(scores.device, non_blocking=True)
        is_in_order = len(flat) == scores.shape[0] and bool((flat[1:] > flat[:-1]).all())
        row_scores = scores if is_in_order else index_rows(scores, torch.from_numpy(flat))
        total = (row_scores + row_sums[:, None]).view(batch, beams * vocab_size)
        count = min(settings.candidates_per_beam * settings.group_size, total.shape[1])
        if settings.do_sample:
            # Draw noise for all `num_beams` even at the first token, so that the stream keeps its shape.
            first_rows = rows.take(index[:, 0]).replace(slot=torch.zeros(batch, dtype=torch.long))
            noise = self._noise.draw(first_rows, settings.num_beams * vocab_size)[:, : total.shape[1]]
            flat_index = (total.softmax(-1) / noise).topk(count).indices
            best = total.gather(1, flat_index)
        else:
            best, flat_index = total.topk(count)
        sums, host_index = self._to_host(best, flat_index)
        beam, token = np.divmod(host_index, vocab_size)
        tokens = torch.from_numpy(token)
        parents = torch.from_numpy(flat[beam + np.arange(0, batch * beams, beams)[:, None]])
        reasons = self._stop.finish_reasons(rows, parents.flatten(), tokens.flatten())
        finished = np.zeros((batch, count), dtype=bool)
        for _, mask in reasons:
            finished |= mask.reshape(batch, count)
        # All groups start from the prompt's row, each at its own first slot.
        slots = torch.from_numpy(rows.slot.numpy()[parents.numpy()])
        if beams == 1:
            slots = slots.clamp(min=group.group_index * settings.group_size)
        return BeamCandidates(sums, parents, slots, tokens, finished, reasons)

    def _to_host(self, best: Tensor, flat_index: Tensor) -> tuple[Array, Array]:
        """The scores and the indices of the candidates [B, K] on the host, the same on all ranks."""
        if best.device.type == "cpu" and self._rank_group is None:
            return best.numpy(), flat_index.numpy()
        # One device-to-host copy per step: scores are bit-cast, as floats cannot hold large indices.
        packed = torch.stack((best.contiguous().view(torch.int32).long(), flat_index))
        bits, index = (packed if self._rank_group is None else self._rank_group.broadcast(packed)).cpu()
        return bits.to(torch.int32).view(torch.float32).numpy(), index.numpy()

    def _add_finished(
        self,
        rows: Rows,
        group: BeamGroup,
        candidates: BeamCandidates,
        ready: Array,
        include_all: bool = False,
    ) -> list[tuple[int, Hypothesis]]:
        """Offer the `ready` candidates to the pools: the first `group_size` of them, or all."""
        width = candidates.sum_logprobs.shape[1] if include_all else self._settings.group_size
        ready = ready[:, :width]
        if not ready.any():
            return []
        closed = self._finished_pools.is_full(group.pool_indices) & (group.scoring.early_stopping == 1)
        ready = ready & ~closed[:, None]
        scores = np.where(ready, group.scoring.normalized_scores(candidates.sum_logprobs[:, :width]), -np.inf)

        def build(accepted: Sequence[tuple[int, int, float]]) -> list[tuple[int, Hypothesis]]:
            return [
                self._hypothesis(rows, candidates, index, rank, score, tokens)
                for (index, rank, score), tokens in zip(
                    accepted, _parent_tokens(rows, candidates, accepted), strict=True
                )
            ]

        return self._add_to_pools(group, scores, build)

    def _add_to_pools(self, group: BeamGroup, scores: Array, build: Any) -> list[tuple[int, Hypothesis]]:
        """Offer hypotheses to the pools; returns those accepted, each with its parent row."""
        added: list[tuple[int, Hypothesis]] = []

        def make(accepted: Sequence[tuple[int, int, float]]) -> list[Hypothesis]:
            added.extend(build(accepted))
            return [hypothesis for _, hypothesis in added]

        self._finished_pools.insert_best(group.pool_indices, scores, make)
        return added

    def _hypothesis(
        self,
        rows: Rows,
        candidates: BeamCandidates,
        index: int,
        rank: int,
        score: float,
        parent_tokens: Tensor,
    ) -> tuple[int, Hypothesis]:
        """A candidate as a finished hypothesis, with its parent row."""
        row = int(candidates.parent_rows[index, rank])
        start, stop = int(rows.prompt_length[row]), int(rows.length[row])
        beam_indices = rows.column("beam_indices")[row, : stop - start].tolist()
        tokens = torch.cat((parent_tokens[start:stop], candidates.tokens[index, rank : rank + 1]))
        return row, Hypothesis(
            tokens,
            candidates.finish_reason(index, rank),
            score,
            (*beam_indices, int(candidates.parent_slots[index, rank])),
        )

    def _merge_selections(self, parts: Sequence[Selection]) -> Selection:
        """The selections of several groups as one."""
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
            finished_sequences=[finished for part in parts for finished in part.finished_sequences],
        )


def _parent_tokens(
    rows: Rows, candidates: BeamCandidates, accepted: Sequence[tuple[int, int, float]]
) -> Tensor:
    """The tokens of the candidates' parent rows [N, C] (host)."""
    parents = torch.tensor([int(candidates.parent_rows[index, rank]) for index, rank, _ in accepted])
    return index_rows(rows.tokens, parents).cpu()


def _pad_to_widest(column: object, name: str, parts: Sequence[Selection]) -> Tensor:
    """A part's column, padded to the widest part's width."""
    values = _as_tensor(column)
    width = max(_as_tensor(part.columns[name]).shape[-1] for part in parts) if values.ndim > 1 else 0
    return (
        torch.nn.functional.pad(values, (0, width - values.shape[-1]), value=-1)
        if values.ndim > 1
        else values
    )


def _as_tensor(column: object) -> Tensor:
    assert isinstance(column, Tensor)
    return column
