"""Speculative decoding: a drafter proposes several tokens, one forward verifies them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import (
    Array,
    DraftContext,
    Drafter,
    NoiseSource,
    RankGroup,
    StopCondition,
    StrategyTraits,
)
from descant.core.records import ForwardOutput, Hypothesis, Proposal, RecordedLines, Selection, Tokens
from descant.core.rows import Column, Rows, index_rows
from descant.decoding.speculative.acceptance import DRAFT_SCHEDULES, AcceptanceStats, DraftLengthController
from descant.decoding.speculative.draft_model import limit_to_cache
from descant.decoding.speculative.lookup import FollowedRows
from descant.decoding.strategies.sampling import Sampling, finished_requests

_PREFILL_THRESHOLD = 16  # a row with more pending tokens is in prefill
_HEURISTIC, _TRANSIENT, _ADAPTIVE = (DRAFT_SCHEDULES.index(name) for name in DRAFT_SCHEDULES[1:])


class _Verification(NamedTuple):
    """The result of verifying the drafts (host)."""

    next_tokens: Tensor  # [R] the token after the accepted drafts, on the rows' device
    output_tokens: Tensor  # [R, K + 1] the accepted drafts and that token
    num_accepted: Array  # [R]
    has_token: Array  # [R] whether any token was possible


class _RowsBySampling(NamedTuple):
    """The rows of a table version, by how they choose."""

    version: object
    greedy: Tensor  # [N] (host)
    seeded: Tensor  # sample with counter-based noise, fixed per position
    unseeded: Tensor  # sample with the call's generator


class SpeculativeSampling(Sampling):
    """Greedy search and sampling with drafts: each row accepts a prefix of its drafts and one more token.

    A greedy row accepts the drafts that equal its own choices. So does a row with a seed: its noise is fixed
    per position, so its tokens equal those sampled without drafts (Daliri et al. 2024, arXiv 2408.07978). Any
    other sampling row accepts a draft with probability `p / q` and otherwise samples from the residual of `p`
    over `q`, which preserves the distribution (Leviathan et al. 2023, arXiv 2211.17192).
    """

    traits = StrategyTraits(feeds_rejected_tokens=True)
    drafter: Drafter  # always set
    columns: Mapping[str, Tensor | Column] = {"acceptance_stats": AcceptanceStats.new()}

    def __init__(
        self, drafter: Drafter, noise: NoiseSource, stop: StopCondition, rank_group: RankGroup | None = None
    ) -> None:
        super().__init__(noise, stop, rank_group)
        self.drafter, self._followed_rows = drafter, FollowedRows()
        self._length_controller = DraftLengthController()
        self._rows_by_sampling: _RowsBySampling | None = None
        # Where the "heuristic" schedule continues, by the requested number of drafts.
        self._heuristic_lengths: dict[int, int] = {}
        self._forward_start, self._timed_positions = 0.0, 0  # of the current forward; 0: it is not timed
        self._untried_drafts: Proposal | None = None  # drafts before trimming, where some were dropped

    def propose(self, rows: Rows, context: DraftContext) -> Proposal:
        """The drafter's tokens, limited to the remaining length and to what pays off."""
        stats = _stats_of(rows)
        max_drafts = limit_to_cache(self._max_drafts(rows, stats), rows, context)
        adaptive = row_params(rows)["draft_schedule"].numpy() == _ADAPTIVE
        # Results that depend on the generator's state must not depend on timings.
        use_timings = self._rank_group is None and not len(self._split_by_sampling(rows).unseeded)
        self._untried_drafts = None
        if not self.drafter.is_model_free and adaptive.any():
            width = self._length_controller.choose_length(
                stats.shared_acceptance_rate, max_drafts, is_model_free=False, use_timings=use_timings
            )
            max_drafts = np.where(adaptive, np.minimum(max_drafts, width), max_drafts)
        self._followed_rows.commit(self.drafter, rows, stats.draft_row)
        start = _clock_seconds(rows)
        proposal = _clip_drafts(self.drafter.draft(rows, torch.from_numpy(max_drafts), context), max_drafts)
        now = _clock_seconds(rows)
        # A probe of some rows tells nothing about the time of all.
        is_probe = not self.drafter.is_model_free and 0 < int((max_drafts > 0).sum()) < len(rows)
        if proposal.width and not (self.drafter.is_model_free or is_probe):
            self._length_controller.record_draft(proposal.width, now - start)
        decoding = rows.pending.numpy() <= _PREFILL_THRESHOLD
        if self.drafter.is_model_free and proposal.drafts is not None and (adaptive & decoding).any():
            # Drafts in a prefill are free by comparison, so only decoding rows are trimmed.
            proposal = self._trim_drafts(proposal, stats, adaptive & decoding, use_timings)
        if self._rank_group is not None:
            proposal = self._broadcast_drafts(rows, proposal, int(max_drafts.max()))
        single_token = bool((rows.pending == 1).all()) and not is_probe
        self._timed_positions = len(rows) * (proposal.width + 1) if single_token else 0
        self._forward_start = now
        return proposal

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """Verify the drafts and append one more token; finished rows are removed."""
        scores = output.logits
        rows, parents = self._expand_sequences(rows)
        if parents is not None:
            scores, proposal = index_rows(scores, parents), proposal.take(parents)
        num_drafts = np.broadcast_to(np.asarray(proposal.draft_counts()), len(rows)).copy()
        drafts = rows.tokens.new_zeros(len(rows), 0) if proposal.drafts is None else proposal.drafts
        proposal = Proposal(None, drafts, torch.from_numpy(num_drafts), proposal.draft_probs)
        verified = self._verify(rows, scores, proposal)
        if self._timed_positions:
            self._length_controller.record_forward(
                self._timed_positions, _clock_seconds(rows) - self._forward_start, scores.shape[1] - 1
            )
            self._timed_positions = 0
        # A stop condition inside the accepted drafts discards the tokens after it.
        num_tokens = verified.num_accepted + verified.has_token
        num_kept, reasons = self._stop.first_stop(rows, verified.output_tokens, num_tokens)
        fed_rows = np.arange(len(rows)) if parents is None else parents.numpy()
        stats = self._update_stats(
            rows, fed_rows, num_drafts, np.minimum(verified.num_accepted, num_kept), verified
        )
        rows = rows.replace(columns={**rows.columns, "acceptance_stats": stats})
        return self._build_selection(
            rows, verified, _KeptLengths(num_kept, reasons, fed_rows, num_drafts), parents
        )

    # -------------------------------------------------------------------- draft length
    def _max_drafts(self, rows: Rows, stats: AcceptanceStats) -> Array:
        """The maximum number of drafts of each row [R]."""
        params = row_params(rows)
        requested, schedule = params["draft_tokens"].numpy(), params["draft_schedule"].numpy()
        initial = np.array(
            [self._heuristic_lengths.get(count, count) for count in requested.tolist()], dtype=np.int64
        )
        initial = np.where(schedule == _HEURISTIC, initial, requested)
        is_heuristic = (schedule == _HEURISTIC) | (schedule == _TRANSIENT)
        length = np.where(stats.draft_length > 0, stats.draft_length, initial)
        room_left = (params["last_length"] - rows.length).numpy()
        limit = np.minimum(np.where(is_heuristic, length, requested), room_left)
        # A row that is expanded at its first token has no continuation common to all its sequences.
        unexpanded = (
            self._is_unexpanded(rows) & ((params["num_sequences"] > 1) | (params["has_side_inputs"] > 0))
        ).numpy()
        return np.where(unexpanded, 0, limit).clip(min=0)

    def _trim_drafts(
        self, proposal: Proposal, stats: AcceptanceStats, adaptive: Array, use_timings: bool
    ) -> Proposal:
        """Shorten the drafts of adaptive rows to the length that pays off."""
        num_drafts = np.asarray(proposal.draft_counts())
        length = self._length_controller.choose_length(
            stats.acceptance_rate, num_drafts, is_model_free=True, use_timings=use_timings
        )
        trimmed = np.where(adaptive, np.minimum(num_drafts, length), num_drafts)
        if (trimmed == num_drafts).all():
            return proposal
        self._untried_drafts = proposal
        return _shorten_drafts(proposal, trimmed)

    def _broadcast_drafts(self, rows: Rows, proposal: Proposal, max_width: int) -> Proposal:
        """The drafts of rank 0, at most `max_width` per row."""
        assert self._rank_group is not None
        drafts = rows.tokens.new_zeros(len(rows), max_width)
        if proposal.drafts is not None:
            drafts[:, : proposal.width] = proposal.drafts
        num_drafts = torch.as_tensor(proposal.draft_counts()).expand(len(rows)).to(drafts.device)
        packed = self._rank_group.broadcast(torch.cat((num_drafts[:, None], drafts), 1))
        num_drafts = packed[:, 0].cpu()
        width = int(num_drafts.max())
        if not width:
            return Proposal()
        return Proposal(None, packed[:, 1 : 1 + width].contiguous(), num_drafts, proposal.draft_probs)

    def _update_stats(
        self, rows: Rows, fed_rows: Array, num_drafts: Array, num_accepted: Array, verified: _Verification
    ) -> AcceptanceStats:
        """The acceptance statistics after this step."""
        params = row_params(rows)
        schedule = params["draft_schedule"].numpy()
        stats = _stats_of(rows).after_step(fed_rows, num_drafts, num_accepted)
        if self._untried_drafts is not None and self._untried_drafts.drafts is not None:
            # Untried drafts can be checked for free against the chosen token.
            first_untried = self._untried_drafts.drafts[:, 0].cpu().numpy()[fed_rows]
            is_untried = (np.asarray(self._untried_drafts.draft_counts())[fed_rows] > 0) & (num_drafts == 0)
            stats = stats.after_untried(first_untried == verified.output_tokens[:, 0].numpy(), is_untried)
        is_heuristic = ((schedule == _HEURISTIC) | (schedule == _TRANSIENT)) & (num_drafts > 0)
        if is_heuristic.any():
            requested = params["draft_tokens"].numpy()
            length = np.where(stats.draft_length > 0, stats.draft_length, requested)
            length = np.where(
                is_heuristic,
                np.where(num_accepted == num_drafts, length + 2, np.maximum(length - 1, 1)),
                stats.draft_length,
            )
            for row in np.flatnonzero(is_heuristic & (schedule == _HEURISTIC)).tolist():
                self._heuristic_lengths[int(requested[row])] = int(length[row])
            stats = stats.with_draft_length(length)
        return stats

    # -------------------------------------------------------------------- verification
    def _split_by_sampling(self, rows: Rows) -> _RowsBySampling:
        """The rows by how they choose, cached per table version."""
        if self._rows_by_sampling is None or self._rows_by_sampling.version != rows.version:
            params = row_params(rows)
            sampled, unseeded = params["do_sample"].bool(), params["seed"] < 0
            masks = (~sampled, sampled & ~unseeded, sampled & unseeded)
            self._rows_by_sampling = _RowsBySampling(
                rows.version, *(mask.nonzero().squeeze(1) for mask in masks)
            )
        return self._rows_by_sampling

    def _verify(self, rows: Rows, scores: Tensor, proposal: Proposal) -> _Verification:
        """Verify all drafts with one device-to-host copy."""
        kinds = self._split_by_sampling(rows)
        parts: list[tuple[Tensor | None, Tensor]] = []
        for index, verify_rows in (
            (kinds.greedy, _verify_greedy),
            (kinds.seeded, self._verify_seeded),
            (kinds.unseeded, self._rejection_sample),
        ):
            if len(index) == len(rows):
                parts = [(None, verify_rows(rows, scores, proposal))]
                break
            if len(index):
                own = rows.take(index), index_rows(scores, index), proposal.take(index)
                parts.append((index, verify_rows(*own)))
        packed = parts[0][1]
        if parts[0][0] is not None:
            packed = packed.new_zeros(len(rows), packed.shape[1])
            for part_index, rows_result in parts:
                assert part_index is not None
                packed = packed.index_copy(0, part_index.to(packed.device), rows_result)
        assert proposal.drafts is not None
        packed = torch.cat((packed, proposal.drafts), 1)
        if self._rank_group is not None:
            packed = self._rank_group.broadcast(packed)
        host = packed.cpu()
        output_tokens = torch.cat((host[:, 3:], host.new_zeros(len(host), 1)), 1)
        output_tokens.scatter_(1, host[:, 1:2], host[:, :1])
        return _Verification(
            packed[:, 0].contiguous(), output_tokens, host[:, 1].numpy(), host[:, 2].numpy().astype(bool)
        )

    def _verify_seeded(self, rows: Rows, scores: Tensor, proposal: Proposal) -> Tensor:
        """Verify rows whose noise is fixed per position [N, 3]."""
        assert proposal.drafts is not None
        vocab_size, on_cpu = scores.shape[-1], scores.device.type == "cpu"
        choices = []
        for position in range(scores.shape[1]):
            noise = self._noise.draw(rows.replace(length=rows.length + position), vocab_size)
            choices.append(scores[:, position].softmax(-1).div_(noise).max(-1))
            # On CPU the check needs no copy: stop once no row accepts its draft.
            if (
                on_cpu
                and position < proposal.width
                and not (proposal.drafts[:, position] == choices[-1].indices).any()
            ):
                break
        best, tokens = (torch.stack(part, 1) for part in zip(*choices, strict=True))
        padding = (0, scores.shape[1] - len(choices))
        best, tokens = (torch.nn.functional.pad(part, padding) for part in (best, tokens))
        return _accept_matching(tokens, best > 0, proposal)

    def _rejection_sample(self, rows: Rows, scores: Tensor, proposal: Proposal) -> Tensor:
        """Verify rows that sample with the call's generator [N, 3]."""
        drafts, draft_probs, num_drafts = proposal.drafts, proposal.draft_probs, proposal.num_drafts
        assert drafts is not None
        assert num_drafts is not None
        count, width = drafts.shape
        accepted = torch.zeros(count, dtype=torch.long, device=scores.device)
        num_drafts = num_drafts.to(scores.device, non_blocking=True)
        if width:
            p = scores[:, :width].softmax(-1).gather(2, drafts[..., None])[..., 0]  # [N, K]
            q = (
                torch.ones_like(p)
                if draft_probs is None
                else draft_probs.gather(2, drafts[..., None])[..., 0]
            )
            uniform = self._noise.draw(rows, width).neg().exp()
            is_accepted = (uniform * q < p) & (
                torch.arange(width, device=num_drafts.device) < num_drafts[:, None]
            )
            accepted = is_accepted.long().cumprod(1).sum(1)
        row = torch.arange(count, device=scores.device)
        probs = scores[row, accepted].softmax(-1)  # [N, V]
        if width:
            is_rejected = accepted < num_drafts
            position = accepted.clamp(max=width - 1)
            if draft_probs is None:
                residual = probs.scatter(1, drafts[row, position][:, None], 0.0)
            else:
                residual = (probs - draft_probs[row, position]).clamp_(min=0.0)
            # Rounding can leave an empty residual where both distributions are equal.
            probs = torch.where((is_rejected & (residual.sum(-1) > 0))[:, None], residual, probs)
        best, tokens = probs.div_(self._noise.draw(rows, probs.shape[1])).max(-1)
        return torch.stack((tokens, accepted, (best > 0).long()), 1)

    # -------------------------------------------------------------------- selection
    def _build_selection(
        self, rows: Rows, verified: _Verification, kept: _KeptLengths, parents: Tensor | None
    ) -> Selection:
        """The rows that continue, the emitted tokens and the finished sequences."""
        requests = rows.request.numpy()
        is_finished = np.array([reason is not None for reason in kept.finish_reasons])
        has_failed = ~is_finished & ~verified.has_token
        failed = sorted(set(requests[has_failed].tolist()))
        removed = is_finished | np.isin(requests, failed)
        stats = _stats_of(rows)
        index = np.flatnonzero(is_finished & ~np.isin(requests, failed))
        last_tokens = [verified.output_tokens[row, : int(kept.num_kept[row])] for row in index.tolist()]
        finished = self._record_finished(
            rows, index, last_tokens, [kept.finish_reasons[row] for row in index.tolist()]
        )
        for row, hypothesis in finished:
            hypothesis.speculation = stats.report(row)
        emitted, lines = _emitted_tokens(rows, verified, kept, finished)
        recorded_lines = None if verified.output_tokens.shape[1] == 1 else lines
        fed_rows = None if parents is None else torch.from_numpy(kept.fed_rows)
        if not removed.any():
            accepted = (
                None if verified.output_tokens.shape[1] == 1 else torch.from_numpy(verified.num_accepted)
            )
            slot = None if parents is None else rows.slot
            selection = Selection(verified.next_tokens, fed_rows, accepted, slot, {"acceptance_stats": stats})
            return selection._replace(
                emitted=emitted, host_tokens=_last_tokens(verified), recorded_lines=recorded_lines
            )
        kept_rows = torch.from_numpy(np.flatnonzero(~removed))
        return Selection(
            index_rows(verified.next_tokens, kept_rows),
            torch.from_numpy(kept.fed_rows)[kept_rows],
            torch.from_numpy(verified.num_accepted)[kept_rows],
            rows.slot[kept_rows],
            {"acceptance_stats": stats.take(kept_rows)},
            emitted=emitted,
            finished=finished_requests(rows, removed, failed),
            failed=failed,
            host_tokens=_last_tokens(verified)[kept_rows],
            finished_sequences=[(int(kept.fed_rows[row]), hypothesis) for row, hypothesis in finished],
            recorded_lines=recorded_lines,
        )


class _KeptLengths(NamedTuple):
    """The number of output tokens that each row keeps."""

    num_kept: Array  # [R] number of output tokens kept
    finish_reasons: Sequence[str | None]  # [R] why the row finishes at the last of them; None: it continues
    fed_rows: Array  # [R] the fed row of each
    num_drafts: Array  # [R] number of drafts fed


def _clip_drafts(proposal: Proposal, max_drafts: Array) -> Proposal:
    """Limit drafts to `max_drafts` per row; a user's drafter may return more."""
    if proposal.drafts is None:
        return proposal
    given = np.broadcast_to(np.asarray(proposal.draft_counts()), len(max_drafts))
    num_drafts = np.minimum(given, max_drafts)
    if int(num_drafts.max(initial=0)) == proposal.width and (num_drafts == given).all():
        return proposal
    return _shorten_drafts(proposal, num_drafts)


def _shorten_drafts(proposal: Proposal, num_drafts: Array) -> Proposal:
    """The first `num_drafts` [R] drafts of each row."""
    width = int(num_drafts.max(initial=0))
    if not width:
        return Proposal()
    assert proposal.drafts is not None
    probs = None if proposal.draft_probs is None else proposal.draft_probs[:, :width]
    return Proposal(None, proposal.drafts[:, :width], torch.from_numpy(num_drafts), probs)


def _clock_seconds(rows: Rows) -> float:
    """Seconds of CPU time of this thread on CPU, wall time on other devices."""
    return time.thread_time() if rows.tokens.device.type == "cpu" else time.perf_counter()


def _stats_of(rows: Rows) -> AcceptanceStats:
    """The acceptance statistics of the rows."""
    stats = rows.columns["acceptance_stats"]
    assert isinstance(stats, AcceptanceStats)
    return stats


def _verify_greedy(rows: Rows, scores: Tensor, proposal: Proposal) -> Tensor:  # noqa: ARG001
    """Verify rows that take the most likely token [N, 3]."""
    best, tokens = scores.max(-1)
    return _accept_matching(tokens, best > -torch.inf, proposal)


def _accept_matching(tokens: Tensor, is_possible: Tensor, proposal: Proposal) -> Tensor:
    """Accept drafts that equal the row's own choices [N, K + 1]: (token, num_accepted, is_possible)."""
    assert proposal.drafts is not None
    assert proposal.num_drafts is not None
    width = proposal.width
    num_drafts = proposal.num_drafts.to(tokens.device, non_blocking=True)
    matches = (proposal.drafts == tokens[:, :width]) & is_possible[:, :width]
    matches &= torch.arange(width, device=num_drafts.device) < num_drafts[:, None]
    accepted = matches.long().cumprod(1).sum(1)[:, None]
    return torch.cat((tokens.gather(1, accepted), accepted, is_possible.gather(1, accepted).long()), 1)


def _last_tokens(verified: _Verification) -> Tensor:
    """The token after the accepted drafts [R], on the host."""
    return verified.output_tokens.gather(1, torch.from_numpy(verified.num_accepted)[:, None]).squeeze(1)


def _emitted_tokens(
    rows: Rows, verified: _Verification, kept: _KeptLengths, finished: Sequence[tuple[int, Hypothesis]]
) -> tuple[Tokens, RecordedLines]:
    """All kept tokens, row by row, and the positions of their scores."""
    row_of_token = np.repeat(np.arange(len(rows)), kept.num_kept)
    position_of_token = np.arange(len(row_of_token)) - np.repeat(
        np.cumsum(kept.num_kept) - kept.num_kept, kept.num_kept
    )
    last_index = np.cumsum(kept.num_kept) - 1
    row_index, position = torch.from_numpy(row_of_token), torch.from_numpy(position_of_token)
    fed_rows = torch.from_numpy(kept.fed_rows[row_of_token])
    emitted = Tokens(
        rows.request[row_index],
        rows.slot[row_index],
        verified.output_tokens[row_index, position],
        fed_rows,
        finished={int(last_index[row]): hypothesis for row, hypothesis in finished},
        new_index=(rows.length - rows.prompt_length)[row_index] + position,
        num_drafts=torch.from_numpy(kept.num_drafts[row_of_token]),
        is_draft=position < torch.from_numpy(verified.num_accepted)[row_index],
    )
    return emitted, RecordedLines(fed_rows, rows.slot[row_index], draft_index=position)
