"""Beam search and beam sampling: several rows a request, and the best of what they can become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import params_of
from descant.core.interfaces import Array, Noise, Peers, Stop
from descant.core.records import Aid, Hypothesis, Output, Proposal, Selection, Told
from descant.core.rows import Rows, pick
from descant.decoding.strategies.beams.finished_pool import Pools, Terms, running

__all__ = ["CUTS", "Beam", "Candidates", "Shape", "Team"]

NOTHING = Proposal()
CUTS = ("length", "time")  # what ends a row whatever its token


class Shape(NamedTuple):
    """What requests must have in common to share a beam search."""

    width: int  # beams a request
    groups: int = 1  # teams into which they are divided
    candidates: int = 2  # continuations looked at, a beam
    draws: bool = False  # by chance instead of by rank

    @property
    def team(self) -> int:
        """Beams a team."""
        return self.width // self.groups


@dataclass
class Candidates:
    """The continuations looked at in one step, on the host, best (or first drawn) first [B, K]."""

    sums: Array  # summed log-probabilities
    rows: Tensor  # the row each continues
    slots: Tensor  # the same as the slot of its request
    tokens: Tensor
    ends: Array  # bool
    reasons: Sequence[tuple[str, Array]]

    def reason(self, line: int, place: int) -> str:
        """Why that candidate ends."""
        flat = line * self.sums.shape[1] + place
        return next(name for name, which in self.reasons if which[flat])

    def by(self, *names: str) -> Array:
        """Which of them end for one of these reasons [B, K]."""
        found = np.zeros(self.sums.size, dtype=bool)
        for name, which in self.reasons:
            if name in names:
                found |= which
        return found.reshape(self.sums.shape)


class Team(NamedTuple):
    """The requests of a step that stand on equally many rows, as one of their teams sees them."""

    group: int
    rows: Tensor  # [B, N]
    requests: Array  # [B]
    lines: Array  # [B] of their pools
    terms: Terms


class Beam:
    """`width` beams a request, after a prefill of one row; hypotheses that end go to the request's pools.

    A candidate's score is the sum of its processed log-probabilities; a finished one is divided by its
    number of new tokens to the power of `length_penalty`. Each request is judged by its own pools alone,
    so that no neighbour can end it. Sampling (`draws`) takes the candidates by chance instead of by rank.

    With several groups (Vijayakumar et al. 2018, arXiv 1610.02424) each is a search of its own, with a
    pool of its own; they choose one after the other, and what a group has chosen in this step is a rival
    to those after it, whose processors make that costlier. A group that has ended is nobody's rival.
    """

    normalised = True
    columns: Mapping[str, Tensor] = {
        "score": torch.zeros(1),  # the sum of the row's log-probabilities
        "trail": torch.full(
            (1, 32), -1, dtype=torch.int32
        ),  # the slot each of its new tokens was chosen from
    }

    def __init__(self, shape: Shape, noise: Noise, stop: Stop, peers: Peers | None = None) -> None:
        self._shape = shape
        self._noise = noise
        self._stop = stop
        self._peers = peers
        self._known: object = None  # the version of a table all of whose requests have a pool
        self._pools = Pools(shape.team)

    @property
    def grouped(self) -> bool:
        """Whether it has rows processed by itself, group by group."""
        return self._shape.groups > 1

    def propose(self, rows: Rows, aid: Aid) -> Proposal:  # noqa: ARG002
        """Nothing is guessed ahead."""
        return NOTHING

    def select(self, rows: Rows, proposal: Proposal, output: Output) -> Selection:  # noqa: ARG002
        """The best continuations of every request; requests that cannot improve leave."""
        shape = self._shape
        if rows.version != self._known:
            self._known = rows.version
            every = np.unique(rows.request.numpy())[:, None] * shape.groups + np.arange(shape.groups)
            self._pools.admit(every.flatten())
        if not self.grouped:
            teams = self._teams(rows, 0, np.arange(len(rows)))
            parts = [self._advanced(rows, output.logits[:, 0], team) for team in teams]
            return parts[0] if len(parts) == 1 else self._together(parts)
        return self._in_turn(rows, output)

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's pools, best first."""
        found = self.standing(request)
        self.drop(request)
        return found

    def drop(self, request: int) -> None:
        """Forget a request."""
        for group in range(self._shape.groups):
            self._pools.drop(request * self._shape.groups + group)

    def standing(self, request: int) -> list[Hypothesis]:
        """The request's pools so far, best first."""
        keys = range(request * self._shape.groups, (request + 1) * self._shape.groups)
        found: list[Hypothesis] = [entry for key in keys for entry in self._pools.of(key)]
        return sorted(found, key=lambda one: -(one.score or 0.0)) if self.grouped else found

    # -------------------------------------------------------------------- groups
    def _in_turn(self, rows: Rows, output: Output) -> Selection:
        """Every group's choice, each knowing what those before it have chosen."""
        shape, parts, shown = self._shape, [], []
        fresh = (rows.length == rows.prompt).numpy()
        requests = np.unique(rows.request.numpy())
        rivals = np.full((len(requests), shape.width), -1)
        assert output.process is not None
        for group in range(shape.groups):
            mine = np.flatnonzero(fresh | (rows.slot.numpy() // shape.team == group))
            if not len(mine):
                continue
            place = np.searchsorted(requests, rows.request.numpy()[mine])
            against = torch.from_numpy(rivals[place]).to(rows.tokens.device)
            scores = output.process(torch.from_numpy(mine), {"rivals": against})
            shown.append(_shown(rows, mine, fresh, group * shape.team, shape.team, scores))
            whole = scores.new_full((len(rows), scores.shape[1]), -torch.inf)
            whole[torch.from_numpy(mine).to(scores.device)] = scores
            for team in self._teams(rows, group, mine):
                part, tokens = self._judged(rows, whole, team)
                parts.append(part)
                first = group * shape.team
                rivals[np.searchsorted(requests, team.requests), first : first + tokens.shape[1]] = tokens
        return self._united(rows, parts)._replace(told=_told(shown))

    def _united(self, rows: Rows, parts: Sequence[Selection]) -> Selection:
        """The groups' selections as one: a request ends with its last group."""
        whole = self._together(parts)
        assert whole.parents is not None
        goes = set(rows.request[whole.parents].tolist())
        over = [request for request in dict.fromkeys((*whole.finished, *whole.failed)) if request not in goes]
        empty = [request for request in over if not self.standing(request)]
        return whole._replace(finished=[one for one in over if one not in empty], failed=empty)

    # -------------------------------------------------------------------- one team
    def _teams(self, rows: Rows, group: int, mine: Array) -> list[Team]:
        """The requests that have the rows `mine` in a group, by how many those are."""
        request, slot = rows.request.numpy()[mine], rows.slot.numpy()[mine]
        order = mine[np.lexsort((slot, request))]
        requests, counts = np.unique(request, return_counts=True)
        teams = []
        # Requests at their first choice stand on one row, all others on as many as the team has.
        for count in np.unique(counts):
            index = torch.from_numpy(order[np.repeat(counts == count, counts)].reshape(-1, count))
            whose = requests[counts == count]
            lines = self._pools.lines(whose * self._shape.groups + group)
            teams.append(Team(group, index, whose, lines, _terms(rows, index[:, 0].numpy())))
        return teams

    def _advanced(self, rows: Rows, scores: Tensor, team: Team) -> Selection:
        """One step of a team, whose scores are `scores` [R, V]."""
        found = self._candidates(rows, scores, team)
        best = running(found.sums, found.ends, self._shape.width)
        alive = np.take_along_axis(np.where(found.ends, -np.inf, found.sums), best, 1)
        retired = self._collect(rows, team, found, found.ends)
        going = self._pools.improvable(team.lines, team.terms, alive[:, 0]) & ~found.ends.all(1)
        return self._kept(rows, team, found, best, alive, going, retired)

    def _judged(self, rows: Rows, scores: Tensor, team: Team) -> tuple[Selection, Array]:
        """The same by the rules of groups, and the tokens chosen [B, W], -1 where there are fewer.

        What its token ends is judged first, what is cut off by its length or time last.
        """
        found = self._candidates(rows, scores, team)
        cut = found.by(*CUTS)
        final = found.ends & ~(cut & ~found.by("eos", "stop"))
        best = running(found.sums, final, self._shape.team)
        alive = np.take_along_axis(np.where(final, -np.inf, found.sums), best, 1)
        retired = self._collect(rows, team, found, final)
        going = self._pools.improvable(team.lines, team.terms, found.sums[:, 0])
        if cut.any():
            still = np.zeros_like(cut)
            np.put_along_axis(still, best, alive > -np.inf, 1)
            retired += self._collect(rows, team, found, still & cut & going[:, None], every=True)
            going &= ~cut.all(1)
        tokens = np.where(alive > -np.inf, np.take_along_axis(found.tokens.numpy(), best, 1), -1)
        return self._kept(rows, team, found, best, alive, going, retired), tokens

    def _kept(  # noqa: PLR0913 - a step's whole outcome
        self,
        rows: Rows,
        team: Team,
        found: Candidates,
        best: Array,
        alive: Array,
        going: Array,
        retired: list[tuple[int, Hypothesis]],
    ) -> Selection:
        """The candidates `best` [B, W] of sums `alive` as rows, of the requests that go on."""
        going = going & (alive[:, 0] > -np.inf)
        # A request whose every continuation is impossible ends with what it has, or fails with nothing.
        possible = (found.sums.max(1) > -np.inf) | self._holds(team)
        kept = (alive > -np.inf) & going[:, None]
        line, slot = np.nonzero(kept)
        place = best[line, slot]
        parents, whence = (torch.from_numpy(part.numpy()[line, place]) for part in (found.rows, found.slots))
        tokens = torch.from_numpy(found.tokens.numpy()[line, place])
        return Selection(
            tokens.to(rows.tokens.device, non_blocking=True),
            parents,
            slot=torch.from_numpy(slot + team.group * self._shape.team),
            columns={
                "score": torch.from_numpy(alive[kept].astype(np.float32)),
                "trail": _trails(rows, parents, whence),
            },
            finished=team.requests[possible & ~going].tolist(),
            failed=team.requests[~possible].tolist(),
            host=tokens,
            retired=retired,
        )

    def _holds(self, team: Team) -> Array:
        """Which requests have something to return already [B]."""
        return ~self._pools.empty(team.lines)

    def _candidates(self, rows: Rows, scores: Tensor, team: Team) -> Candidates:
        """The likeliest continuations of every request, or as many drawn without replacement."""
        index, shape = team.rows, self._shape
        batch, beams = index.shape
        vocabulary = scores.shape[1]
        flat = index.flatten()
        so_far = rows.column("score")[flat].to(scores.device, non_blocking=True)
        lines = scores if torch.equal(flat, torch.arange(len(scores))) else pick(scores, flat)
        total = (lines + so_far[:, None]).view(batch, beams * vocabulary)
        count = min(shape.candidates * shape.team, total.shape[1])
        if shape.draws:
            # Noise for all `width` beams also while there is one, so that the stream does not depend on it.
            leader = rows.take(index[:, 0]).changed(slot=torch.zeros(batch, dtype=torch.long))
            noise = self._noise.draw(leader, shape.width * vocabulary)[:, : total.shape[1]]
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
        # All groups begin on the row of the prompt, each on its own first slot.
        slots = rows.slot[parents] if beams > 1 else rows.slot[parents].clamp(min=team.group * shape.team)
        return Candidates(sums, parents, slots, tokens, ends, reasons)

    def _collect(
        self, rows: Rows, team: Team, found: Candidates, ready: Array, every: bool = False
    ) -> list[tuple[int, Hypothesis]]:
        """Put the candidates that are ready, of the first of them or of all, where they are good enough."""
        wide = found.sums.shape[1] if every else self._shape.team
        ready = ready[:, :wide]
        if not ready.any():
            return []
        closed = self._pools.full(team.lines) & (team.terms.early == 1)
        ready = ready & ~closed[:, None]
        shares = np.where(ready, team.terms.shares(found.sums[:, :wide]), -np.inf)

        def made(enters: Sequence[tuple[int, int, float]]) -> list[tuple[int, Hypothesis]]:
            return [
                self._hypothesis(rows, found, line, place, score, written)
                for (line, place, score), written in zip(enters, _written(rows, found, enters), strict=True)
            ]

        return self._offered(team, shares, made)

    def _offered(self, team: Team, shares: Array, made: Any) -> list[tuple[int, Hypothesis]]:
        """Offer sequences to the pools; those that enter, each with the row it continued."""
        entered: list[tuple[int, Hypothesis]] = []

        def make(enters: Sequence[tuple[int, int, float]]) -> list[Hypothesis]:
            entered.extend(made(enters))
            return [one for _, one in entered]

        self._pools.offer(team.lines, shares, make)
        return entered

    def _hypothesis(
        self, rows: Rows, found: Candidates, line: int, place: int, score: float, written: Tensor
    ) -> tuple[int, Hypothesis]:
        """A candidate as a sequence that has ended, with the row it continued."""
        row = int(found.rows[line, place])
        start, stop = int(rows.prompt[row]), int(rows.length[row])
        trail = rows.column("trail")[row, : stop - start].tolist()
        tokens = torch.cat((written[start:stop], found.tokens[line, place : place + 1]))
        return row, Hypothesis(
            tokens, found.reason(line, place), score, (*trail, int(found.slots[line, place]))
        )

    def _together(self, parts: Sequence[Selection]) -> Selection:
        """The selections of several teams as one."""
        return Selection(
            torch.cat([part.tokens for part in parts]),
            torch.cat([_tensor(part.parents) for part in parts]),
            slot=torch.cat([_tensor(part.slot) for part in parts]),
            columns={
                name: torch.cat([_widest(part.columns[name], name, parts) for part in parts])
                for name in self.columns
            },
            finished=[request for part in parts for request in part.finished],
            failed=[request for part in parts for request in part.failed],
            host=torch.cat([_tensor(part.host) for part in parts]),
            retired=[one for part in parts for one in part.retired],
        )


def _terms(rows: Rows, lead: Array) -> Terms:
    """How the candidates of the requests are judged whose first rows are `lead` [B]."""
    params = params_of(rows)
    prompt = rows.prompt.numpy()[lead]
    return Terms(
        rows.length.numpy()[lead] + 1 - prompt,
        params["limit"].numpy()[lead] - prompt,
        params["early_stopping"].numpy()[lead],
        params["length_penalty"].numpy()[lead],
    )


def _written(rows: Rows, found: Candidates, enters: Sequence[tuple[int, int, float]]) -> Tensor:
    """The tokens of the rows that candidates continue [N, C] (host)."""
    parents = torch.tensor([int(found.rows[line, place]) for line, place, _ in enters])
    return pick(rows.tokens, parents).cpu()


def _shown(rows: Rows, mine: Array, fresh: Array, first: int, team: int, scores: Tensor) -> Told:
    """A group's lines of the record: at the first choice one row stands for all of them."""
    copies = np.where(fresh[mine], team, 1)
    line = np.arange(len(mine)).repeat(copies)
    place = np.arange(len(line)) - (np.cumsum(copies) - copies)[line]
    slot = np.where(fresh[mine][line], first + place, rows.slot.numpy()[mine][line])
    whose = torch.from_numpy(line)
    return Told(torch.from_numpy(mine)[whose], torch.from_numpy(slot), pick(scores, whose))


def _told(parts: Sequence[Told]) -> Told:
    """Several groups' lines as one."""
    scores = [part.scores for part in parts if part.scores is not None]
    return Told(
        torch.cat([part.rows for part in parts]), torch.cat([part.slot for part in parts]), torch.cat(scores)
    )


def _trails(rows: Rows, parents: Tensor, slots: Tensor) -> Tensor:
    """The trails of the new rows: their parents', and the slot that they come from [R', C]."""
    trail = rows.column("trail")[parents]
    at = (rows.length - rows.prompt)[parents]
    need = int(at.max()) + 1 if len(at) else 0
    if need > trail.shape[1]:
        trail = torch.nn.functional.pad(trail, (0, need), value=-1)
    return trail.scatter_(1, at[:, None], slots[:, None].to(trail.dtype))


def _widest(column: object, name: str, parts: Sequence[Selection]) -> Tensor:
    """A part's column, as wide as the widest part's."""
    mine = _tensor(column)
    wide = max(_tensor(part.columns[name]).shape[-1] for part in parts) if mine.ndim > 1 else 0
    return torch.nn.functional.pad(mine, (0, wide - mine.shape[-1]), value=-1) if mine.ndim > 1 else mine


def _tensor(column: object) -> Tensor:
    assert isinstance(column, Tensor)
    return column
