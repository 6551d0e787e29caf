"""Beam search and beam sampling: several rows a request, and the best of what they can become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.context import params_of
from descant.ports import Noise, Peers, Stop
from descant.rows import Rows, pick
from descant.step import Hypothesis, Output, Proposal, Selection

__all__ = ["Beam"]

Array = np.ndarray[Any, np.dtype[Any]]
NOTHING = Proposal()


@dataclass
class _Candidates:
    """The continuations looked at in one step, on the host, best (or first drawn) first [B, K]."""

    scores: Array  # summed log-probabilities
    rows: Tensor  # the row each continues
    slots: Tensor  # the same as the slot of its request
    tokens: Tensor
    ends: Array  # bool
    reasons: Sequence[tuple[str, Array]]

    def reason(self, line: int, place: int) -> str:
        """Why that candidate ends."""
        flat = line * self.scores.shape[1] + place
        return next(name for name, which in self.reasons if which[flat])


class _Asked(NamedTuple):
    """What the requests of a step ask for and have so far [B]."""

    request: Array
    new: Array  # how many new tokens a candidate has
    most: Array  # how many it may have
    early: Array  # 0: by the present length, 1: when the pool is full, 2: when nothing longer can win
    penalty: Array


class Beam:
    """`width` beams a request, after a prefill of one row; hypotheses that end go to the request's pool.

    A candidate's score is the sum of its processed log-probabilities; a finished one is divided by its
    number of new tokens to the power of `length_penalty`. Each request is judged by its own pool alone,
    so that no neighbour can end it. Sampling (`draws`) takes the candidates by chance instead of by rank.
    """

    normalised = True
    columns: Mapping[str, Tensor] = {
        "score": torch.zeros(1),  # the sum of the row's log-probabilities
        "trail": torch.full(
            (1, 32), -1, dtype=torch.int32
        ),  # the slot each of its new tokens was chosen from
    }

    def __init__(
        self, width: int, candidates: int, draws: bool, noise: Noise, stop: Stop, peers: Peers | None = None
    ) -> None:
        self._width = width
        self._count = candidates
        self._draws = draws
        self._noise = noise
        self._stop = stop
        self._peers = peers
        self._known: object = None  # the version of a table all of whose requests have a pool
        self._requests: Array = np.zeros(0, dtype=np.int64)  # [M] ascending
        self._scores: Array = np.zeros((0, width))  # [M, W] of the pools, best first, -inf where none yet
        self._pools: Array = np.zeros((0, width), dtype=object)  # [M, W] Hypothesis, or None where none yet

    def propose(self, rows: Rows) -> Proposal:  # noqa: ARG002
        """Nothing is guessed ahead."""
        return NOTHING

    def select(self, rows: Rows, proposal: Proposal, output: Output) -> Selection:  # noqa: ARG002
        """The best continuations of every request; requests that cannot improve leave."""
        scores = output.logits[:, 0]  # [R, V]
        order = np.lexsort((rows.slot.numpy(), rows.request.numpy()))
        requests, counts = np.unique(rows.request.numpy(), return_counts=True)
        if rows.version != self._known:
            self._known = rows.version
            self._admit(requests)
        # Requests at their first choice stand on one row, all others on `width`.
        parts = [
            self._advanced(
                rows, scores, torch.from_numpy(order[np.repeat(counts == count, counts)].reshape(-1, count))
            )
            for count in np.unique(counts)
        ]
        return parts[0] if len(parts) == 1 else self._together(parts)

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's pool, best first."""
        line = int(np.searchsorted(self._requests, request))
        pool = [entry for entry in self._pools[line] if entry is not None]
        self.drop(request)
        return pool

    def drop(self, request: int) -> None:
        """Forget a request."""
        keep = self._requests != request
        self._requests, self._scores, self._pools = (
            self._requests[keep],
            self._scores[keep],
            self._pools[keep],
        )

    def standing(self, request: int) -> list[Hypothesis]:
        """The request's pool so far, best first."""
        line = np.flatnonzero(self._requests == request)
        return [entry for entry in self._pools[line].flatten() if entry is not None]

    def _together(self, parts: Sequence[Selection]) -> Selection:
        """The selections of several groups of requests as one."""
        return Selection(
            torch.cat([part.tokens for part in parts]),
            torch.cat([_tensor(part.parents) for part in parts]),
            slot=torch.cat([_tensor(part.slot) for part in parts]),
            columns={
                name: torch.cat([_tensor(part.columns[name]) for part in parts]) for name in self.columns
            },
            finished=[request for part in parts for request in part.finished],
            failed=[request for part in parts for request in part.failed],
            host=torch.cat([_tensor(part.host) for part in parts]),
            retired=[one for part in parts for one in part.retired],
        )

    def _admit(self, requests: Array) -> None:
        """An empty pool for every request that has none; requests are numbered as they come."""
        new = requests[~np.isin(requests, self._requests)]
        if len(new):
            shape = (len(new), self._width)
            self._requests = np.concatenate((self._requests, new))
            self._scores = np.concatenate((self._scores, np.full(shape, -np.inf)))
            self._pools = np.concatenate((self._pools, np.full(shape, None)))
            order = np.argsort(self._requests)
            self._requests, self._scores, self._pools = (
                part[order] for part in (self._requests, self._scores, self._pools)
            )

    def _advanced(self, rows: Rows, scores: Tensor, index: Tensor) -> Selection:
        """One step of the requests whose beams are the rows `index` [B, N]."""
        found = self._candidates(rows, scores, index)
        asked = _asked(rows, index[:, 0].numpy())
        running = np.where(found.ends, -np.inf, found.scores)
        best = np.argsort(-running, axis=1, kind="stable")[:, : self._width]
        alive = np.take_along_axis(running, best, 1)
        lines = np.searchsorted(self._requests, asked.request)
        retired = self._collect(rows, asked, found, lines)
        going = self._improvable(asked, lines, alive, found.ends)
        # A request whose every continuation is impossible ends with what it has, or fails with nothing.
        possible = (found.scores.max(1) > -np.inf) | _filled(self._pools[lines]).any(1)
        kept = (alive > -np.inf) & going[:, None]
        line, slot = np.nonzero(kept)
        place = best[line, slot]
        parents, whence = (torch.from_numpy(part.numpy()[line, place]) for part in (found.rows, found.slots))
        tokens = torch.from_numpy(found.tokens.numpy()[line, place])
        sums = torch.from_numpy(alive[kept].astype(np.float32))
        return Selection(
            tokens.to(scores.device, non_blocking=True),
            parents,
            slot=torch.from_numpy(slot),
            columns={"score": sums, "trail": _trails(rows, parents, whence)},
            finished=asked.request[possible & ~going].tolist(),
            failed=asked.request[~possible].tolist(),
            host=tokens,
            retired=retired,
        )

    def _candidates(self, rows: Rows, scores: Tensor, index: Tensor) -> _Candidates:
        """The likeliest continuations of every request, or as many drawn without replacement."""
        batch, beams = index.shape
        vocabulary = scores.shape[1]
        flat = index.flatten()
        so_far = rows.column("score")[flat].to(scores.device, non_blocking=True)
        lines = scores if torch.equal(flat, torch.arange(len(scores))) else pick(scores, flat)
        total = (lines + so_far[:, None]).view(batch, beams * vocabulary)
        count = min(self._count, total.shape[1])
        if self._draws:
            # Noise for all `width` beams also while there is one, so that the stream does not depend on it.
            leader = rows.take(index[:, 0]).changed(slot=torch.zeros(batch, dtype=torch.long))
            noise = self._noise.draw(leader, self._width * vocabulary)[:, : total.shape[1]]
            at = (total.softmax(-1) / noise).topk(count).indices
            best = total.gather(1, at)
        else:
            best, at = total.topk(count)
        # The one transfer of the step; the scores travel as their bits, since floats hold no large index.
        choice = torch.stack((best.contiguous().view(torch.int32).long(), at))
        bits, places = (choice if self._peers is None else self._peers.word(choice)).cpu()
        beam, tokens = places // vocabulary, places % vocabulary
        parents = index.gather(1, beam)
        reasons = self._stop.ended(rows, parents.flatten(), tokens.flatten())
        ends = np.zeros((batch, count), dtype=bool)
        for _, which in reasons:
            ends |= which.reshape(batch, count)
        sums = bits.to(torch.int32).view(torch.float32).numpy()
        return _Candidates(sums, parents, rows.slot[parents], tokens, ends, reasons)

    def _collect(
        self, rows: Rows, asked: _Asked, found: _Candidates, lines: Array
    ) -> list[tuple[int, Hypothesis]]:
        """Put the candidates that end, of the first `width`, into their pools where they are good enough."""
        width = self._width
        ready = found.ends[:, :width]
        if not ready.any():
            return []
        closed = _filled(self._pools[lines]).all(1) & (asked.early == 1)
        ready = ready & ~closed[:, None]
        shares = found.scores[:, :width] / _powers(asked.new, asked.penalty)[:, None]
        shares = np.where(ready, shares, -np.inf)
        merged = np.concatenate((self._scores[lines], shares), 1)
        order = np.argsort(-merged, axis=1, kind="stable")[:, :width]
        self._scores[lines] = np.take_along_axis(merged, order, 1)
        enters = np.argwhere((order >= width) & (self._scores[lines] > -np.inf))
        old = self._pools[lines]
        pools = np.take_along_axis(np.concatenate((old, np.full(shares.shape, None)), 1), order, 1)
        places = order[enters[:, 0], enters[:, 1]] - width
        parents = found.rows[enters[:, 0], places]
        written = pick(rows.tokens, parents).cpu()
        retired = []
        for number, ((line, rank), place) in enumerate(zip(enters.tolist(), places.tolist(), strict=True)):
            row = int(parents[number])
            start, stop = int(rows.prompt[row]), int(rows.length[row])
            trail = rows.column("trail")[row, : stop - start].tolist()
            one = Hypothesis(
                torch.cat((written[number, start:stop], found.tokens[line, place : place + 1])),
                found.reason(line, place),
                float(merged[line, order[line, rank]]),
                (*trail, int(found.slots[line, place])),
            )
            pools[line, rank] = one
            retired.append((row, one))
        self._pools[lines] = pools
        return retired

    def _improvable(self, asked: _Asked, lines: Array, alive: Array, ends: Array) -> Array:
        """Which requests can still better their pool [B]."""
        length = np.where((asked.early == 2) & (asked.penalty > 0), asked.most, asked.new)
        reachable = alive[:, 0] / _powers(length, asked.penalty)
        scores = self._scores[lines]
        full = (scores > -np.inf).all(1)
        able = (alive[:, 0] > -np.inf) & ~(full & (asked.early == 1)) & ~ends.all(1)
        return np.asarray(able & (~full | (reachable > scores.min(1))))


def _asked(rows: Rows, lead: Array) -> _Asked:
    """What the requests ask for whose first rows are `lead` [B]."""
    params = params_of(rows)
    prompt = rows.prompt.numpy()[lead]
    return _Asked(
        rows.request.numpy()[lead],
        rows.length.numpy()[lead] + 1 - prompt,
        params["limit"].numpy()[lead] - prompt,
        params["early_stopping"].numpy()[lead],
        params["length_penalty"].numpy()[lead],
    )


def _filled(pools: Array) -> Array:
    """Which places of the pools hold a hypothesis [B, W]."""
    return np.asarray(pools != np.array(None), dtype=bool)


def _powers(lengths: Array, penalties: Array) -> Array:
    """`length ** penalty` in float64, whose range no penalty that is allowed exceeds [B]."""
    return np.power(lengths.astype(np.float64), penalties)


def _trails(rows: Rows, parents: Tensor, slots: Tensor) -> Tensor:
    """The trails of the new rows: their parents', and the slot that they come from [R', C]."""
    trail = rows.column("trail")[parents]
    at = (rows.length - rows.prompt)[parents]
    need = int(at.max()) + 1 if len(at) else 0
    if need > trail.shape[1]:
        trail = torch.nn.functional.pad(trail, (0, need), value=-1)
    return trail.scatter_(1, at[:, None], slots[:, None].to(trail.dtype))


def _tensor(column: object) -> Tensor:
    assert isinstance(column, Tensor)
    return column
