"""Speculation: several tokens a forward, guessed by a drafter and confirmed or corrected by the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import params_of
from descant.core.interfaces import Array, Drafter, Noise, Peers, Stop
from descant.core.records import Aid, Hypothesis, Output, Proposal, Selection, Tokens, Told
from descant.core.rows import Column, Rows, pick
from descant.decoding.speculative.acceptance import SCHEDULES, Pace, Tally
from descant.decoding.strategies.sampling import Sampling, over

__all__ = ["Speculative"]

_FEW = 16  # a row with more tokens pending reads its prompt
_HEURISTIC, _TRANSIENT, _ADAPTIVE = (SCHEDULES.index(name) for name in SCHEDULES[1:])


class _Verdict(NamedTuple):
    """What the model makes of the drafts (host)."""

    tokens: Tensor  # [R] the token after the accepted drafts, on the rows' device
    run: Tensor  # [R, K + 1] the accepted drafts and that token
    accepted: Array  # [R]
    sound: Array  # [R] whether there was a token to choose


class _Kinds(NamedTuple):
    """The rows of a layout by how they choose."""

    version: object
    greedy: Tensor  # [N] (host)
    seeded: Tensor  # draw from a stream of their own, in which a place has its noise whoever asks
    shared: Tensor  # draw from the call's


class Speculative(Sampling):
    """Greedy search and sampling with drafts: each row takes the longest run of guesses that stands, and one.

    A greedy row keeps the guesses that are its own choices. So does a row with a seed: the noise belongs to
    the place, hence its tokens are those that it draws without drafts (Daliri et al. 2024, arXiv 2408.07978).
    Any other row that draws keeps a guess with probability `p / q` and else draws from what is left of `p`
    over `q`, which leaves the law as it was (Leviathan et al. 2023, arXiv 2211.17192).
    """

    columns: Mapping[str, Tensor | Column] = {"drafts": Tally.new()}

    def __init__(self, drafter: Drafter, noise: Noise, stop: Stop, peers: Peers | None = None) -> None:
        super().__init__(noise, stop, peers)
        self.drafter = drafter
        self._pace = Pace()
        self._kinds: _Kinds | None = None
        self._begins: dict[int, int] = {}  # where "heuristic" goes on, by the number that was asked for
        self._began = 0.0
        self._timed = 0  # positions of the forward at hand, 0 where it is not to be timed
        self._passed: Proposal | None = None  # what was guessed, and not tried

    def propose(self, rows: Rows, aid: Aid) -> Proposal:
        """What the drafter guesses, as far as there is room and it pays."""
        tally = _tally(rows)
        most = self._most(rows, tally)
        if aid.cache.rewind is not None:
            # A cache that forgets lets a prompt see all of itself, which a guess beside it must not.
            most = np.where(rows.cached.numpy() == 0, 0, most)
        adaptive = params_of(rows)["draft_schedule"].numpy() == _ADAPTIVE
        # A result that hangs on torch's generator must not hang on a clock as well.
        measured = self._peers is None and not len(self._kinds_of(rows).shared)
        self._passed = None
        if not self.drafter.cheap and adaptive.any():
            width = self._pace.width(tally.rate, most, cheap=False, measured=measured)
            most = np.where(adaptive, np.minimum(most, width), most)
        self.drafter.commit(torch.from_numpy(tally.place), rows.length)
        began = _clock(rows)
        guessed = _within(self.drafter.draft(rows, torch.from_numpy(most), aid), most)
        now = _clock(rows)
        if guessed.width and not self.drafter.cheap:
            self._pace.guessed(guessed.width, now - began)
        stepping = rows.pending.numpy() <= _FEW
        if self.drafter.cheap and guessed.drafts is not None and (adaptive & stepping).any():
            # A guess after a prompt costs nothing beside it.
            guessed = self._trimmed(guessed, tally, adaptive & stepping, measured)
        if self._peers is not None:
            guessed = self._agreed(rows, guessed, int(most.max()))
        alone = bool((rows.pending == 1).all())
        self._timed = len(rows) * (guessed.width + 1) if alone else 0
        self._began = now
        return guessed

    def select(self, rows: Rows, proposal: Proposal, output: Output) -> Selection:
        """The guesses that stand and one token more; rows that end leave."""
        scores, drafts, probs = output.logits, proposal.drafts, proposal.probs
        tried = np.broadcast_to(np.asarray(proposal.tried()), len(rows)).copy()
        rows, parents = self._fanned(rows)
        if parents is not None:
            tried, scores = tried[parents.numpy()], pick(scores, parents)
            drafts = None if drafts is None else pick(drafts, parents)
            probs = None if probs is None else pick(probs, parents)
        if drafts is None:
            drafts = rows.tokens.new_zeros(len(rows), 0)
        verdict = self._verified(rows, scores, Proposal(None, drafts, torch.from_numpy(tried), probs))
        if self._timed:
            self._pace.took(self._timed, _clock(rows) - self._began, scores.shape[1] - 1)
            self._timed = 0
        # A run ends where one of its tokens ends the row, whatever the model said after that.
        count = verdict.accepted + verdict.sound
        stands, why = self._stop.first(rows, verdict.run, count)
        fed = np.arange(len(rows)) if parents is None else parents.numpy()
        tally = self._counted(rows, fed, tried, np.minimum(verdict.accepted, stands), verdict)
        rows = rows.changed(columns={**rows.columns, "drafts": tally})
        return self._kept(rows, verdict, _Run(stands, why, fed, tried), parents)

    # -------------------------------------------------------------------- how many to try
    def _most(self, rows: Rows, tally: Tally) -> Array:
        """How many tokens each row may try [R]."""
        params = params_of(rows)
        wanted, schedule = params["draft_tokens"].numpy(), params["draft_schedule"].numpy()
        begins = np.array([self._begins.get(one, one) for one in wanted.tolist()], dtype=np.int64)
        begins = np.where(schedule == _HEURISTIC, begins, wanted)
        moves = (schedule == _HEURISTIC) | (schedule == _TRANSIENT)
        size = np.where(tally.size > 0, tally.size, begins)
        room = (params["last"] - rows.length).numpy()
        most = np.minimum(np.where(moves, size, wanted), room)
        # A row that splits up at its first choice has nothing yet that all of its parts go on with.
        waits = (self._fresh(rows) & ((params["copies"] > 1) | (params["beside"] > 0))).numpy()
        return np.where(waits, 0, most).clip(min=0)

    def _trimmed(self, guessed: Proposal, tally: Tally, adaptive: Array, measured: bool) -> Proposal:
        """As much of the guesses as pays, for rows that leave that open."""
        n = np.asarray(guessed.tried())
        width = self._pace.width(tally.rate, n, cheap=True, measured=measured)
        kept = np.where(adaptive, np.minimum(n, width), n)
        if (kept == n).all():
            return guessed
        self._passed = guessed
        widest = int(kept.max())
        if not widest:
            return Proposal()
        assert guessed.drafts is not None
        probs = None if guessed.probs is None else guessed.probs[:, :widest]
        return Proposal(None, guessed.drafts[:, :widest], torch.from_numpy(kept), probs)

    def _agreed(self, rows: Rows, guessed: Proposal, wide: int) -> Proposal:
        """The guesses of the first of the peers, `wide` at the most."""
        assert self._peers is not None
        drafts = rows.tokens.new_zeros(len(rows), wide)
        if guessed.drafts is not None:
            drafts[:, : guessed.width] = guessed.drafts
        n = torch.as_tensor(guessed.tried()).expand(len(rows)).to(drafts.device)
        word = self._peers.word(torch.cat((n[:, None], drafts), 1))
        n = word[:, 0].cpu()
        widest = int(n.max())
        if not widest:
            return Proposal()
        return Proposal(None, word[:, 1 : 1 + widest].contiguous(), n, guessed.probs)

    def _counted(self, rows: Rows, fed: Array, tried: Array, right: Array, verdict: _Verdict) -> Tally:
        """The rows' tallies after this step."""
        params = params_of(rows)
        schedule = params["draft_schedule"].numpy()
        tally = _tally(rows).counted(fed, tried, right)
        if self._passed is not None and self._passed.drafts is not None:
            # What was passed over costs nothing to be judged by what came.
            first = self._passed.drafts[:, 0].cpu().numpy()[fed]
            asked = (np.asarray(self._passed.tried())[fed] > 0) & (tried == 0)
            tally = tally.heard(first == verdict.run[:, 0].numpy(), asked)
        moves = ((schedule == _HEURISTIC) | (schedule == _TRANSIENT)) & (tried > 0)
        if moves.any():
            wanted = params["draft_tokens"].numpy()
            size = np.where(tally.size > 0, tally.size, wanted)
            size = np.where(moves, np.where(right == tried, size + 2, np.maximum(size - 1, 1)), tally.size)
            for row in np.flatnonzero(moves & (schedule == _HEURISTIC)).tolist():
                self._begins[int(wanted[row])] = int(size[row])
            tally = tally.sized(size)
        return tally

    # -------------------------------------------------------------------- what stands
    def _kinds_of(self, rows: Rows) -> _Kinds:
        if self._kinds is None or self._kinds.version != rows.version:
            params = params_of(rows)
            drawn, shared = params["do_sample"].bool(), params["seed"] < 0
            parts = (~drawn, drawn & ~shared, drawn & shared)
            self._kinds = _Kinds(rows.version, *(part.nonzero().squeeze(1) for part in parts))
        return self._kinds

    def _verified(self, rows: Rows, scores: Tensor, tried: Proposal) -> _Verdict:
        """The drafts that stand, and what follows them: one transfer."""
        kinds = self._kinds_of(rows)
        parts: list[tuple[Tensor | None, Tensor]] = []
        for index, judge in (
            (kinds.greedy, _greedy),
            (kinds.seeded, self._keyed),
            (kinds.shared, self._weighed),
        ):
            if len(index) == len(rows):
                parts = [(None, judge(rows, scores, tried))]
                break
            if len(index):
                some = _some(tried, index)
                parts.append((index, judge(rows.take(index), pick(scores, index), some)))
        word = parts[0][1]
        if parts[0][0] is not None:
            word = word.new_zeros(len(rows), word.shape[1])
            for whose, part in parts:
                assert whose is not None
                word = word.index_copy(0, whose.to(word.device), part)
        assert tried.drafts is not None
        word = torch.cat((word, tried.drafts), 1)
        if self._peers is not None:
            word = self._peers.word(word)
        host = word.cpu()
        run = torch.cat((host[:, 3:], host.new_zeros(len(host), 1)), 1)
        run.scatter_(1, host[:, 1:2], host[:, :1])
        return _Verdict(word[:, 0].contiguous(), run, host[:, 1].numpy(), host[:, 2].numpy().astype(bool))

    def _keyed(self, rows: Rows, scores: Tensor, tried: Proposal) -> Tensor:
        """The verdict on rows whose noise belongs to the place."""
        assert tried.drafts is not None
        size, here = scores.shape[-1], scores.device.type == "cpu"
        choices = []
        for place in range(scores.shape[1]):
            noise = self._noise.draw(rows.changed(length=rows.length + place), size)
            choices.append(scores[:, place].softmax(-1).div_(noise).max(-1))
            # Where asking costs nothing, what lies behind the last draft that stands is left alone.
            if here and place < tried.width and not (tried.drafts[:, place] == choices[-1].indices).any():
                break
        best, tokens = (torch.stack(part, 1) for part in zip(*choices, strict=True))
        short = (0, scores.shape[1] - len(choices))
        best, tokens = (torch.nn.functional.pad(part, short) for part in (best, tokens))
        return _matched(tokens, best > 0, tried)

    def _weighed(self, rows: Rows, scores: Tensor, tried: Proposal) -> Tensor:
        """The verdict on rows that draw from the call's noise."""
        drafts, probs, n = tried.drafts, tried.probs, tried.n
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
    def _kept(self, rows: Rows, verdict: _Verdict, run: _Run, parents: Tensor | None) -> Selection:
        requests = rows.request.numpy()
        ended = np.array([reason is not None for reason in run.why])
        lost = ~ended & ~verdict.sound
        failed = sorted(set(requests[lost].tolist()))
        gone = ended | np.isin(requests, failed)
        tally = _tally(rows)
        index = np.flatnonzero(ended & ~np.isin(requests, failed))
        new = [verdict.run[row, : int(run.stands[row])] for row in index.tolist()]
        retired = self._retire(rows, index, new, [run.why[row] for row in index.tolist()])
        for row, one in retired:
            one.speculation = tally.report(row)
        emitted, said = _spoken(rows, verdict, run, retired)
        told = None if verdict.run.shape[1] == 1 else said
        whence = None if parents is None else torch.from_numpy(run.fed)
        if not gone.any():
            accepted = None if verdict.run.shape[1] == 1 else torch.from_numpy(verdict.accepted)
            slot = None if parents is None else rows.slot
            chosen = Selection(verdict.tokens, whence, accepted, slot, {"drafts": tally})
            return chosen._replace(emitted=emitted, host=_last(verdict), told=told)
        keep = torch.from_numpy(np.flatnonzero(~gone))
        return Selection(
            pick(verdict.tokens, keep),
            torch.from_numpy(run.fed)[keep],
            torch.from_numpy(verdict.accepted)[keep],
            rows.slot[keep],
            {"drafts": tally.take(keep)},
            emitted=emitted,
            finished=over(rows, gone, failed),
            failed=failed,
            host=_last(verdict)[keep],
            retired=[(int(run.fed[row]), one) for row, one in retired],
            told=told,
        )


class _Run(NamedTuple):
    """How far each row's run goes."""

    stands: Array  # [R] how many tokens of it stand
    why: Sequence[str | None]  # what ends the row at the last of them
    fed: Array  # [R] the fed row that each continues
    tried: Array  # [R] how many drafts it tried


def _within(guessed: Proposal, most: Array) -> Proposal:
    """What was guessed as far as it may be, no wider than its longest run: drafters are not only ours."""
    if guessed.drafts is None:
        return guessed
    told = np.broadcast_to(np.asarray(guessed.tried()), len(most))
    n = np.minimum(told, most)
    wide = int(n.max(initial=0))
    if wide == guessed.width and (n == told).all():
        return guessed
    if not wide:
        return Proposal()
    probs = None if guessed.probs is None else guessed.probs[:, :wide]
    return Proposal(None, guessed.drafts[:, :wide], torch.from_numpy(n), probs)


def _clock(rows: Rows) -> float:
    """Seconds, as far as this thread works where it does the work: what others take is not counted."""
    return time.thread_time() if rows.tokens.device.type == "cpu" else time.perf_counter()


def _tally(rows: Rows) -> Tally:
    tally = rows.columns["drafts"]
    assert isinstance(tally, Tally)
    return tally


def _some(tried: Proposal, index: Tensor) -> Proposal:
    """The drafts of some rows."""
    assert tried.drafts is not None
    assert tried.n is not None
    probs = None if tried.probs is None else pick(tried.probs, index)
    return Proposal(None, pick(tried.drafts, index), tried.n[index], probs)


def _greedy(rows: Rows, scores: Tensor, tried: Proposal) -> Tensor:  # noqa: ARG001
    """The verdict on rows that take the likeliest token."""
    best, tokens = scores.max(-1)
    return _matched(tokens, best > -torch.inf, tried)


def _matched(tokens: Tensor, sound: Tensor, tried: Proposal) -> Tensor:
    """The verdict where a draft stands that is the row's own choice [N, K + 1]: token, accepted, sound."""
    assert tried.drafts is not None
    assert tried.n is not None
    width = tried.width
    n = tried.n.to(tokens.device, non_blocking=True)
    agree = (tried.drafts == tokens[:, :width]) & sound[:, :width]
    agree &= torch.arange(width, device=n.device) < n[:, None]
    accepted = agree.long().cumprod(1).sum(1)[:, None]
    return torch.cat((tokens.gather(1, accepted), accepted, sound.gather(1, accepted).long()), 1)


def _last(verdict: _Verdict) -> Tensor:
    """The token after the accepted drafts [R], on the host."""
    return verdict.run.gather(1, torch.from_numpy(verdict.accepted)[:, None]).squeeze(1)


def _spoken(
    rows: Rows, verdict: _Verdict, run: _Run, retired: Sequence[tuple[int, Hypothesis]]
) -> tuple[Tokens, Told]:
    """The tokens of all runs, row by row, and where their scores are."""
    line = np.repeat(np.arange(len(rows)), run.stands)
    at = np.arange(len(line)) - np.repeat(np.cumsum(run.stands) - run.stands, run.stands)
    last = np.cumsum(run.stands) - 1
    whose, place = torch.from_numpy(line), torch.from_numpy(at)
    fed = torch.from_numpy(run.fed[line])
    emitted = Tokens(
        rows.request[whose],
        rows.slot[whose],
        verdict.run[whose, place],
        fed,
        ended={int(last[row]): one for row, one in retired},
        place=(rows.length - rows.prompt)[whose] + place,
        tried=torch.from_numpy(run.tried[line]),
        guessed=place < torch.from_numpy(verdict.accepted)[whose],
    )
    return emitted, Told(fed, rows.slot[whose], at=place)
