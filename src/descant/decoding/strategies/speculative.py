"""Speculation: several tokens a forward, guessed by a drafter and confirmed or corrected by the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, Drafter, NoiseSource, RankGroup, StopCondition
from descant.core.records import (
    DraftContext,
    ForwardOutput,
    Hypothesis,
    Proposal,
    RecordedLines,
    Selection,
    Tokens,
)
from descant.core.rows import Column, Rows, index_rows
from descant.decoding.speculative.acceptance import DRAFT_SCHEDULES, AcceptanceStats, DraftLengthController
from descant.decoding.strategies.sampling import Sampling, finished_requests

__all__ = ["SpeculativeSampling"]

_PREFILL_THRESHOLD = 16  # a row with more tokens pending reads its prompt
_HEURISTIC, _TRANSIENT, _ADAPTIVE = (DRAFT_SCHEDULES.index(name) for name in DRAFT_SCHEDULES[1:])


class _Verification(NamedTuple):
    """What the model makes of the drafts (host)."""

    next_tokens: Tensor  # [R] the token after the accepted drafts, on the rows' device
    output_tokens: Tensor  # [R, K + 1] the accepted drafts and that token
    num_accepted: Array  # [R]
    has_token: Array  # [R] whether there was a token to choose


class _RowsBySampling(NamedTuple):
    """The rows of a layout by how they choose."""

    version: object
    greedy: Tensor  # [N] (host)
    seeded: Tensor  # draw from a stream of their own, in which a place has its noise whoever asks
    unseeded: Tensor  # draw from the call's


class SpeculativeSampling(Sampling):
    """Greedy search and sampling with drafts: each row takes the longest run of guesses that stands, and one.

    A greedy row keeps the guesses that are its own choices. So does a row with a seed: the noise belongs to
    the place, hence its tokens are those that it draws without drafts (Daliri et al. 2024, arXiv 2408.07978).
    Any other row that draws keeps a guess with probability `p / q` and else draws from what is left of `p`
    over `q`, which leaves the law as it was (Leviathan et al. 2023, arXiv 2211.17192).
    """

    columns: Mapping[str, Tensor | Column] = {"acceptance_stats": AcceptanceStats.new()}

    def __init__(
        self, drafter: Drafter, noise: NoiseSource, stop: StopCondition, peers: RankGroup | None = None
    ) -> None:
        super().__init__(noise, stop, peers)
        self.drafter = drafter
        self._length_controller = DraftLengthController()
        self._rows_by_sampling: _RowsBySampling | None = None
        self._heuristic_lengths: dict[
            int, int
        ] = {}  # where "heuristic" goes on, by the number that was asked for
        self._forward_start = 0.0
        self._timed_positions = 0  # positions of the forward at hand, 0 where it is not to be timed
        self._untried_drafts: Proposal | None = None  # what was guessed, and not tried

    def propose(self, rows: Rows, aid: DraftContext) -> Proposal:
        """What the drafter guesses, as far as there is room and it pays."""
        tally = _stats_of(rows)
        most = self._max_drafts(rows, tally)
        if aid.cache.max_rewind is not None:
            # A cache that forgets lets a prompt see all of itself, which a guess beside it must not.
            most = np.where(rows.cached_length.numpy() == 0, 0, most)
        adaptive = row_params(rows)["draft_schedule"].numpy() == _ADAPTIVE
        # A result that hangs on torch's generator must not hang on a clock as well.
        measured = self._peers is None and not len(self._split_by_sampling(rows).unseeded)
        self._untried_drafts = None
        if not self.drafter.is_model_free and adaptive.any():
            width = self._length_controller.choose_length(
                tally.acceptance_rate, most, is_model_free=False, use_timings=measured
            )
            most = np.where(adaptive, np.minimum(most, width), most)
        self.drafter.commit(torch.from_numpy(tally.draft_row), rows.length)
        began = _clock_seconds(rows)
        guessed = _clip_drafts(self.drafter.draft(rows, torch.from_numpy(most), aid), most)
        now = _clock_seconds(rows)
        if guessed.width and not self.drafter.is_model_free:
            self._length_controller.record_draft(guessed.width, now - began)
        stepping = rows.pending.numpy() <= _PREFILL_THRESHOLD
        if self.drafter.is_model_free and guessed.drafts is not None and (adaptive & stepping).any():
            # A guess after a prompt costs nothing beside it.
            guessed = self._trim_drafts(guessed, tally, adaptive & stepping, measured)
        if self._peers is not None:
            guessed = self._broadcast_drafts(rows, guessed, int(most.max()))
        alone = bool((rows.pending == 1).all())
        self._timed_positions = len(rows) * (guessed.width + 1) if alone else 0
        self._forward_start = now
        return guessed

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """The guesses that stand and one token more; rows that end leave."""
        scores, drafts, probs = output.logits, proposal.drafts, proposal.draft_probs
        tried = np.broadcast_to(np.asarray(proposal.draft_counts()), len(rows)).copy()
        rows, parents = self._expand_sequences(rows)
        if parents is not None:
            tried, scores = tried[parents.numpy()], index_rows(scores, parents)
            drafts = None if drafts is None else index_rows(drafts, parents)
            probs = None if probs is None else index_rows(probs, parents)
        if drafts is None:
            drafts = rows.tokens.new_zeros(len(rows), 0)
        verdict = self._verify(rows, scores, Proposal(None, drafts, torch.from_numpy(tried), probs))
        if self._timed_positions:
            self._length_controller.record_forward(
                self._timed_positions, _clock_seconds(rows) - self._forward_start, scores.shape[1] - 1
            )
            self._timed_positions = 0
        # A run ends where one of its tokens ends the row, whatever the model said after that.
        count = verdict.num_accepted + verdict.has_token
        stands, why = self._stop.first_stop(rows, verdict.output_tokens, count)
        fed = np.arange(len(rows)) if parents is None else parents.numpy()
        tally = self._update_stats(rows, fed, tried, np.minimum(verdict.num_accepted, stands), verdict)
        rows = rows.replace(columns={**rows.columns, "acceptance_stats": tally})
        return self._build_selection(rows, verdict, _KeptLengths(stands, why, fed, tried), parents)

    # -------------------------------------------------------------------- how many to try
    def _max_drafts(self, rows: Rows, tally: AcceptanceStats) -> Array:
        """How many tokens each row may try [R]."""
        params = row_params(rows)
        wanted, schedule = params["draft_tokens"].numpy(), params["draft_schedule"].numpy()
        begins = np.array([self._heuristic_lengths.get(one, one) for one in wanted.tolist()], dtype=np.int64)
        begins = np.where(schedule == _HEURISTIC, begins, wanted)
        moves = (schedule == _HEURISTIC) | (schedule == _TRANSIENT)
        size = np.where(tally.draft_length > 0, tally.draft_length, begins)
        room = (params["last_length"] - rows.length).numpy()
        most = np.minimum(np.where(moves, size, wanted), room)
        # A row that splits up at its first choice has nothing yet that all of its parts go on with.
        waits = (
            self._is_unexpanded(rows) & ((params["num_sequences"] > 1) | (params["has_side_inputs"] > 0))
        ).numpy()
        return np.where(waits, 0, most).clip(min=0)

    def _trim_drafts(
        self, guessed: Proposal, tally: AcceptanceStats, adaptive: Array, measured: bool
    ) -> Proposal:
        """As much of the guesses as pays, for rows that leave that open."""
        n = np.asarray(guessed.draft_counts())
        width = self._length_controller.choose_length(
            tally.acceptance_rate, n, is_model_free=True, use_timings=measured
        )
        kept = np.where(adaptive, np.minimum(n, width), n)
        if (kept == n).all():
            return guessed
        self._untried_drafts = guessed
        widest = int(kept.max())
        if not widest:
            return Proposal()
        assert guessed.drafts is not None
        probs = None if guessed.draft_probs is None else guessed.draft_probs[:, :widest]
        return Proposal(None, guessed.drafts[:, :widest], torch.from_numpy(kept), probs)

    def _broadcast_drafts(self, rows: Rows, guessed: Proposal, wide: int) -> Proposal:
        """The guesses of the first of the peers, `wide` at the most."""
        assert self._peers is not None
        drafts = rows.tokens.new_zeros(len(rows), wide)
        if guessed.drafts is not None:
            drafts[:, : guessed.width] = guessed.drafts
        n = torch.as_tensor(guessed.draft_counts()).expand(len(rows)).to(drafts.device)
        word = self._peers.broadcast(torch.cat((n[:, None], drafts), 1))
        n = word[:, 0].cpu()
        widest = int(n.max())
        if not widest:
            return Proposal()
        return Proposal(None, word[:, 1 : 1 + widest].contiguous(), n, guessed.draft_probs)

    def _update_stats(
        self, rows: Rows, fed: Array, tried: Array, right: Array, verdict: _Verification
    ) -> AcceptanceStats:
        """The rows' tallies after this step."""
        params = row_params(rows)
        schedule = params["draft_schedule"].numpy()
        tally = _stats_of(rows).after_step(fed, tried, right)
        if self._untried_drafts is not None and self._untried_drafts.drafts is not None:
            # What was passed over costs nothing to be judged by what came.
            first = self._untried_drafts.drafts[:, 0].cpu().numpy()[fed]
            asked = (np.asarray(self._untried_drafts.draft_counts())[fed] > 0) & (tried == 0)
            tally = tally.after_untried(first == verdict.output_tokens[:, 0].numpy(), asked)
        moves = ((schedule == _HEURISTIC) | (schedule == _TRANSIENT)) & (tried > 0)
        if moves.any():
            wanted = params["draft_tokens"].numpy()
            size = np.where(tally.draft_length > 0, tally.draft_length, wanted)
            size = np.where(
                moves, np.where(right == tried, size + 2, np.maximum(size - 1, 1)), tally.draft_length
            )
            for row in np.flatnonzero(moves & (schedule == _HEURISTIC)).tolist():
                self._heuristic_lengths[int(wanted[row])] = int(size[row])
            tally = tally.with_draft_length(size)
        return tally

    # -------------------------------------------------------------------- what stands
    def _split_by_sampling(self, rows: Rows) -> _RowsBySampling:
        if self._rows_by_sampling is None or self._rows_by_sampling.version != rows.version:
            params = row_params(rows)
            drawn, shared = params["do_sample"].bool(), params["seed"] < 0
            parts = (~drawn, drawn & ~shared, drawn & shared)
            self._rows_by_sampling = _RowsBySampling(
                rows.version, *(part.nonzero().squeeze(1) for part in parts)
            )
        return self._rows_by_sampling

    def _verify(self, rows: Rows, scores: Tensor, tried: Proposal) -> _Verification:
        """The drafts that stand, and what follows them: one transfer."""
        kinds = self._split_by_sampling(rows)
        parts: list[tuple[Tensor | None, Tensor]] = []
        for index, judge in (
            (kinds.greedy, _verify_greedy),
            (kinds.seeded, self._verify_seeded),
            (kinds.unseeded, self._rejection_sample),
        ):
            if len(index) == len(rows):
                parts = [(None, judge(rows, scores, tried))]
                break
            if len(index):
                some = _take_drafts(tried, index)
                parts.append((index, judge(rows.take(index), index_rows(scores, index), some)))
        word = parts[0][1]
        if parts[0][0] is not None:
            word = word.new_zeros(len(rows), word.shape[1])
            for whose, part in parts:
                assert whose is not None
                word = word.index_copy(0, whose.to(word.device), part)
        assert tried.drafts is not None
        word = torch.cat((word, tried.drafts), 1)
        if self._peers is not None:
            word = self._peers.broadcast(word)
        host = word.cpu()
        run = torch.cat((host[:, 3:], host.new_zeros(len(host), 1)), 1)
        run.scatter_(1, host[:, 1:2], host[:, :1])
        return _Verification(
            word[:, 0].contiguous(), run, host[:, 1].numpy(), host[:, 2].numpy().astype(bool)
        )

    def _verify_seeded(self, rows: Rows, scores: Tensor, tried: Proposal) -> Tensor:
        """The verdict on rows whose noise belongs to the place."""
        assert tried.drafts is not None
        size, here = scores.shape[-1], scores.device.type == "cpu"
        choices = []
        for place in range(scores.shape[1]):
            noise = self._noise.draw(rows.replace(length=rows.length + place), size)
            choices.append(scores[:, place].softmax(-1).div_(noise).max(-1))
            # Where asking costs nothing, what lies behind the last draft that stands is left alone.
            if here and place < tried.width and not (tried.drafts[:, place] == choices[-1].indices).any():
                break
        best, tokens = (torch.stack(part, 1) for part in zip(*choices, strict=True))
        short = (0, scores.shape[1] - len(choices))
        best, tokens = (torch.nn.functional.pad(part, short) for part in (best, tokens))
        return _accept_matching(tokens, best > 0, tried)

    def _rejection_sample(self, rows: Rows, scores: Tensor, tried: Proposal) -> Tensor:
        """The verdict on rows that draw from the call's noise."""
        drafts, probs, n = tried.drafts, tried.draft_probs, tried.num_drafts
        assert drafts is not None
        assert n is not None
        count, width = drafts.shape
        accepted = torch.zeros(count, dtype=torch.long, device=scores.device)
        n = n.to(scores.device, non_blocking=True)
        if width:
            p = scores[:, :width].softmax(-1).gather(2, drafts[..., None])[..., 0]  # [N, K]
            q = torch.ones_like(p) if probs is None else probs.gather(2, drafts[..., None])[..., 0]
            u = self._noise.draw(rows, width).neg().exp()
            stands = (u * q < p) & (torch.arange(width, device=n.device) < n[:, None])
            accepted = stands.long().cumprod(1).sum(1)
        line = torch.arange(count, device=scores.device)
        law = scores[line, accepted].softmax(-1)  # [N, V]
        if width:
            refused = accepted < n
            at = accepted.clamp(max=width - 1)
            if probs is None:
                rest = law.scatter(1, drafts[line, at][:, None], 0.0)
            else:
                rest = (law - probs[line, at]).clamp_(min=0.0)
            # Rounding may leave nothing of a law that is the drafter's own.
            law = torch.where((refused & (rest.sum(-1) > 0))[:, None], rest, law)
        best, tokens = law.div_(self._noise.draw(rows, law.shape[1])).max(-1)
        return torch.stack((tokens, accepted, (best > 0).long()), 1)

    # -------------------------------------------------------------------- what is kept
    def _build_selection(
        self, rows: Rows, verdict: _Verification, run: _KeptLengths, parents: Tensor | None
    ) -> Selection:
        requests = rows.request.numpy()
        ended = np.array([reason is not None for reason in run.finish_reasons])
        lost = ~ended & ~verdict.has_token
        failed = sorted(set(requests[lost].tolist()))
        gone = ended | np.isin(requests, failed)
        tally = _stats_of(rows)
        index = np.flatnonzero(ended & ~np.isin(requests, failed))
        new = [verdict.output_tokens[row, : int(run.num_kept[row])] for row in index.tolist()]
        retired = self._record_finished(rows, index, new, [run.finish_reasons[row] for row in index.tolist()])
        for row, one in retired:
            one.speculation = tally.report(row)
        emitted, said = _emitted_tokens(rows, verdict, run, retired)
        told = None if verdict.output_tokens.shape[1] == 1 else said
        whence = None if parents is None else torch.from_numpy(run.fed_rows)
        if not gone.any():
            accepted = None if verdict.output_tokens.shape[1] == 1 else torch.from_numpy(verdict.num_accepted)
            slot = None if parents is None else rows.slot
            chosen = Selection(verdict.next_tokens, whence, accepted, slot, {"acceptance_stats": tally})
            return chosen._replace(emitted=emitted, host_tokens=_last_tokens(verdict), recorded_lines=told)
        keep = torch.from_numpy(np.flatnonzero(~gone))
        return Selection(
            index_rows(verdict.next_tokens, keep),
            torch.from_numpy(run.fed_rows)[keep],
            torch.from_numpy(verdict.num_accepted)[keep],
            rows.slot[keep],
            {"acceptance_stats": tally.take(keep)},
            emitted=emitted,
            finished=finished_requests(rows, gone, failed),
            failed=failed,
            host_tokens=_last_tokens(verdict)[keep],
            finished_sequences=[(int(run.fed_rows[row]), one) for row, one in retired],
            recorded_lines=told,
        )


class _KeptLengths(NamedTuple):
    """How far each row's run goes."""

    num_kept: Array  # [R] how many tokens of it stand
    finish_reasons: Sequence[str | None]  # what ends the row at the last of them
    fed_rows: Array  # [R] the fed row that each continues
    num_drafts: Array  # [R] how many drafts it tried


def _clip_drafts(guessed: Proposal, most: Array) -> Proposal:
    """What was guessed as far as it may be, no wider than its longest run: drafters are not only ours."""
    if guessed.drafts is None:
        return guessed
    told = np.broadcast_to(np.asarray(guessed.draft_counts()), len(most))
    n = np.minimum(told, most)
    wide = int(n.max(initial=0))
    if wide == guessed.width and (n == told).all():
        return guessed
    if not wide:
        return Proposal()
    probs = None if guessed.draft_probs is None else guessed.draft_probs[:, :wide]
    return Proposal(None, guessed.drafts[:, :wide], torch.from_numpy(n), probs)


def _clock_seconds(rows: Rows) -> float:
    """Seconds, as far as this thread works where it does the work: what others take is not counted."""
    return time.thread_time() if rows.tokens.device.type == "cpu" else time.perf_counter()


def _stats_of(rows: Rows) -> AcceptanceStats:
    tally = rows.columns["acceptance_stats"]
    assert isinstance(tally, AcceptanceStats)
    return tally


def _take_drafts(tried: Proposal, index: Tensor) -> Proposal:
    """The drafts of some rows."""
    assert tried.drafts is not None
    assert tried.num_drafts is not None
    probs = None if tried.draft_probs is None else index_rows(tried.draft_probs, index)
    return Proposal(None, index_rows(tried.drafts, index), tried.num_drafts[index], probs)


def _verify_greedy(rows: Rows, scores: Tensor, tried: Proposal) -> Tensor:  # noqa: ARG001
    """The verdict on rows that take the likeliest token."""
    best, tokens = scores.max(-1)
    return _accept_matching(tokens, best > -torch.inf, tried)


def _accept_matching(tokens: Tensor, sound: Tensor, tried: Proposal) -> Tensor:
    """The verdict where a draft stands that is the row's own choice [N, K + 1]: token, accepted, sound."""
    assert tried.drafts is not None
    assert tried.num_drafts is not None
    width = tried.width
    n = tried.num_drafts.to(tokens.device, non_blocking=True)
    agree = (tried.drafts == tokens[:, :width]) & sound[:, :width]
    agree &= torch.arange(width, device=n.device) < n[:, None]
    accepted = agree.long().cumprod(1).sum(1)[:, None]
    return torch.cat((tokens.gather(1, accepted), accepted, sound.gather(1, accepted).long()), 1)


def _last_tokens(verdict: _Verification) -> Tensor:
    """The token after the accepted drafts [R], on the host."""
    return verdict.output_tokens.gather(1, torch.from_numpy(verdict.num_accepted)[:, None]).squeeze(1)


def _emitted_tokens(
    rows: Rows, verdict: _Verification, run: _KeptLengths, retired: Sequence[tuple[int, Hypothesis]]
) -> tuple[Tokens, RecordedLines]:
    """The tokens of all runs, row by row, and where their scores are."""
    line = np.repeat(np.arange(len(rows)), run.num_kept)
    at = np.arange(len(line)) - np.repeat(np.cumsum(run.num_kept) - run.num_kept, run.num_kept)
    last = np.cumsum(run.num_kept) - 1
    whose, place = torch.from_numpy(line), torch.from_numpy(at)
    fed = torch.from_numpy(run.fed_rows[line])
    emitted = Tokens(
        rows.request[whose],
        rows.slot[whose],
        verdict.output_tokens[whose, place],
        fed,
        finished={int(last[row]): one for row, one in retired},
        new_index=(rows.length - rows.prompt_length)[whose] + place,
        num_drafts=torch.from_numpy(run.num_drafts[line]),
        is_draft=place < torch.from_numpy(verdict.num_accepted)[whose],
    )
    return emitted, RecordedLines(fed, rows.slot[whose], draft_index=place)
