"""Constrained beam search: beams are led towards texts that hold what they must."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import params_of
from descant.core.interfaces import Array, Noise, Peers, Stop
from descant.core.records import Hypothesis, Output, Proposal, Selection
from descant.core.rows import Rows, pick
from descant.decoding.constraints import ConstraintListState
from descant.decoding.strategies.beams.beam import CUTS, Beam, Candidates, Shape, Team
from descant.decoding.strategies.beams.finished_pool import banked, running
from descant.errors import InputError

__all__ = ["Constrained", "Entry", "dealt", "leading"]


class Entry(NamedTuple):
    """One continuation that may be kept."""

    row: int
    token: int
    sum: float
    state: ConstraintListState  # of the constraints after it
    reason: str | None  # why it is cut off


class Constrained(Beam):
    """A beam search whose results meet their request's constraints, or say which they do not.

    Beside the likeliest continuations there are those that go on with a constraint; beams are dealt out
    by how much of the constraints each has met (Post and Vilar 2018, arXiv 1804.06609). Only new tokens
    count. A text that ends before it has met all of them is kept in reserve, and returned after those
    that have where these are too few.
    """

    columns: Mapping[str, Tensor] = {
        **Beam.columns,
        "met": torch.zeros(1, dtype=torch.long),  # steps of its constraints that the row has met
    }

    def __init__(self, shape: Shape, noise: Noise, stop: Stop, peers: Peers | None = None) -> None:
        super().__init__(shape, noise, stop, peers)
        self._states: dict[int, dict[int, ConstraintListState]] = {}  # by request and slot
        self._next: dict[int, dict[int, ConstraintListState]] = {}  # the same after this step
        self._after: dict[tuple[int, int], ConstraintListState] = {}  # by row and token, in this step
        self._reserve: dict[int, list[Hypothesis]] = {}  # what was cut off
        self._rest: dict[int, list[Hypothesis]] = {}  # what ended by itself

    def select(self, rows: Rows, proposal: Proposal, output: Output) -> Selection:
        """The continuations that are kept of every request."""
        self._after, self._next = {}, {request: {} for request in set(rows.request.tolist())}
        selection = super().select(rows, proposal, output)
        self._states |= self._next
        for request in (*selection.finished, *selection.failed):
            self._states.pop(request, None)
        return selection

    def drop(self, request: int) -> None:
        """Forget a request."""
        super().drop(request)
        for kept in (self._states, self._reserve, self._rest):
            kept.pop(request, None)

    def standing(self, request: int) -> list[Hypothesis]:
        """The request's pools so far, best first, and after them what does not meet all constraints."""
        found = super().standing(request)
        for some in (self._reserve, self._rest):
            found += sorted(
                some.get(request, ()), key=lambda one: (len(one.unmet or ()), -(one.score or 0.0))
            )
        return found

    def _holds(self, team: Team) -> Array:
        return np.array([bool(self.standing(request)) for request in team.requests.tolist()])

    def _advanced(self, rows: Rows, scores: Tensor, team: Team) -> Selection:
        return self._judged(rows, scores, team)[0]

    def _judged(self, rows: Rows, scores: Tensor, team: Team) -> tuple[Selection, Array]:
        """One step of a team, and the tokens chosen [B, W]."""
        found = self._candidates(rows, scores, team)
        final = found.by("eos", "stop")
        best = running(found.sums, final, self._shape.team)
        entries = self._likely(rows, found, final, best)
        led = self._led(rows, scores, team, entries)
        chosen = [dealt(some, more, self._shape.team) for some, more in zip(entries, led, strict=True)]
        self._rescue(rows, scores, team, chosen)
        retired = self._ended(rows, team, found, final)
        going = self._pools.improvable(team.lines, team.terms, found.sums[:, 0])
        kept = self._laid_out(rows, found, chosen)
        cut = kept.by(*CUTS)
        if cut.any():
            retired += self._ended(rows, team, kept, cut & going[:, None], cut=True)
            going &= ~cut.any(1)
        place = np.broadcast_to(np.arange(kept.sums.shape[1]), kept.sums.shape)
        for line in np.flatnonzero(going).tolist():
            states = self._next[int(team.requests[line])]
            for slot, entry in enumerate(chosen[line]):
                states[slot + team.group * self._shape.team] = entry.state
        tokens = np.where(kept.sums > -np.inf, kept.tokens.numpy(), -1)
        return self._noted(rows, self._kept(rows, team, kept, place, kept.sums, going, retired)), tokens

    def _noted(self, rows: Rows, kept: Selection) -> Selection:
        """The same, with what each row has met."""
        assert kept.parents is not None
        assert kept.slot is not None
        whose = zip(rows.request[kept.parents].tolist(), kept.slot.tolist(), strict=True)
        met = torch.tensor([self._next[request][slot].met for request, slot in whose], dtype=torch.long)
        return kept._replace(columns={**kept.columns, "met": met})

    # -------------------------------------------------------------------- what may be kept
    def _state(self, rows: Rows, row: int) -> ConstraintListState:
        """The constraints as a row has met them."""
        request, slot = int(rows.request[row]), int(rows.slot[row])
        if rows.length[row] == rows.prompt[row]:
            demands = params_of(rows).values["demands"]
            assert not isinstance(demands, Tensor)
            first: ConstraintListState = demands[row]
            return first.copy(stateful=False)
        return self._states[request][slot]

    def _read(self, rows: Rows, row: int, token: int) -> ConstraintListState:
        """The constraints as a row has met them with one more token."""
        known = self._after.get((row, token))
        if known is None:
            known = self._after[row, token] = self._state(rows, row).copy()
            known.add(token)
        return known

    def _likely(self, rows: Rows, found: Candidates, final: Array, best: Array) -> list[list[Entry]]:
        """The candidates that beams would keep without constraints, by request."""
        entries = []
        for line, places in enumerate(best.tolist()):
            some = []
            for place in places:
                score = float(found.sums[line, place])
                if final[line, place] or score == -np.inf:
                    continue
                row, token = int(found.rows[line, place]), int(found.tokens[line, place])
                reason = found.reason(line, place) if found.ends[line, place] else None
                some.append(Entry(row, token, score, self._read(rows, row, token), reason))
            entries.append(some)
        return entries

    def _led(
        self, rows: Rows, scores: Tensor, team: Team, entries: Sequence[Sequence[Entry]]
    ) -> list[list[Entry]]:
        """The continuations that go on with a constraint, besides those at hand, by request."""
        pairs: list[tuple[int, int, int]] = []
        led: list[list[Entry]] = [[] for _ in entries]
        waiting: list[tuple[int, int]] = []  # rows in the gap after a constraint, which no token leads on
        for line, some in enumerate(entries):
            seen = {(entry.row, entry.token) for entry in some}
            states = {row: self._state(rows, row) for row in team.rows[line].tolist()}
            pairs += [(line, *pair) for pair in leading(states, seen, scores.shape[1])]
            held = {entry.row for entry in some}
            waiting += [
                (line, row)
                for row, state in states.items()
                if row not in held and not state.completed and state.advance() is None
            ]
        for line, entry in zip((line for line, *_ in pairs), self._entered(rows, scores, pairs), strict=True):
            led[line] += [] if entry is None else [entry]
        for line, entry in self._likeliest(rows, scores, waiting):
            led[line].append(entry)
        return led

    def _entered(
        self, rows: Rows, scores: Tensor, pairs: Sequence[tuple[int, int, int]]
    ) -> list[Entry | None]:
        """Continuations given as line, row and token; None where one is impossible or ends by itself."""
        if not pairs:
            return []
        _, whence, tokens = torch.tensor(pairs).T
        device = scores.device
        sums = scores[whence.to(device), tokens.to(device)] + rows.column("score")[whence].to(device)
        bits = sums.contiguous().view(torch.int32).long()
        bits = (bits if self._peers is None else self._peers.word(bits)).cpu()
        values = bits.to(torch.int32).view(torch.float32).tolist()
        reasons = self._stop.ended(rows, whence, tokens)
        entries: list[Entry | None] = []
        for at, (_, row, token) in enumerate(pairs):
            why = [name for name, which in reasons if which[at]]
            able = values[at] > -np.inf and all(name in CUTS for name in why)
            state = self._read(rows, row, token) if able else None
            entries.append(
                None if state is None else Entry(row, token, values[at], state, why[0] if why else None)
            )
        return entries

    def _likeliest(
        self, rows: Rows, scores: Tensor, wanted: Sequence[tuple[int, int]]
    ) -> list[tuple[int, Entry]]:
        """The likeliest continuation that does not end, of rows given as line and row."""
        if not wanted:
            return []
        index = torch.tensor([row for _, row in wanted])
        top = pick(scores, index).topk(min(self._shape.candidates, scores.shape[1])).indices
        top = (top if self._peers is None else self._peers.word(top)).cpu()
        pairs = [
            (line, row, token)
            for (line, row), some in zip(wanted, top.tolist(), strict=True)
            for token in some
        ]
        found: dict[tuple[int, int], Entry] = {}
        for (line, row, _), entry in zip(pairs, self._entered(rows, scores, pairs), strict=True):
            if entry is not None:
                found.setdefault((line, row), entry)
        return [(line, entry) for (line, _), entry in found.items()]

    def _rescue(self, rows: Rows, scores: Tensor, team: Team, chosen: list[list[Entry]]) -> None:
        """Keep a text that has met everything where none else has and there is no time to begin again."""
        left = team.terms.most - team.terms.new
        wanted = []
        for line in np.flatnonzero(self._pools.empty(team.lines)).tolist():
            states = {row: self._state(rows, row) for row in team.rows[line].tolist()}
            late = left[line] < next(iter(states.values())).copy(stateful=False).least
            if late and chosen[line] and not any(entry.state.completed for entry in chosen[line]):
                wanted += [(line, row) for row, state in states.items() if state.completed]
        best: dict[int, Entry] = {}
        for line, entry in self._likeliest(rows, scores, wanted):
            if line not in best or entry.sum > best[line].sum:
                best[line] = entry
        for line, entry in best.items():
            chosen[line][-1 if len(chosen[line]) == self._shape.team else len(chosen[line]) :] = [entry]

    def _laid_out(self, rows: Rows, found: Candidates, chosen: Sequence[Sequence[Entry]]) -> Candidates:
        """The entries as candidates [B, W], of sum -inf where there are fewer."""
        shape = (len(chosen), self._shape.team)
        sums = np.full(shape, -np.inf, dtype=found.sums.dtype)
        whence, tokens = found.rows[:, :1].repeat(1, shape[1]), torch.zeros(shape, dtype=torch.long)
        cut = {name: np.zeros(shape, dtype=bool) for name in CUTS}
        for line, some in enumerate(chosen):
            for place, entry in enumerate(some):
                sums[line, place], whence[line, place], tokens[line, place] = (
                    entry.sum,
                    entry.row,
                    entry.token,
                )
                if entry.reason is not None:
                    cut[entry.reason][line, place] = True
        ends = np.logical_or.reduce(list(cut.values()))
        reasons = [(name, which.flatten()) for name, which in cut.items() if which.any()]
        slots = rows.slot[whence]
        first = found.slots[:, :1].expand_as(slots)
        slots = torch.where(rows.length[whence] == rows.prompt[whence], first, slots)
        return Candidates(sums, whence, slots, tokens, ends, reasons)

    # -------------------------------------------------------------------- what ends
    def _ended(
        self, rows: Rows, team: Team, found: Candidates, ready: Array, cut: bool = False
    ) -> list[tuple[int, Hypothesis]]:
        """Offer what has ended and meets all constraints to the pools; put the rest in reserve."""
        wide = found.sums.shape[1] if cut else self._shape.team
        met = np.zeros_like(ready)
        retired = []
        shares = team.terms.shares(found.sums)
        for line, place in np.argwhere(ready[:, :wide] & (found.sums[:, :wide] > -np.inf)).tolist():
            row, token = int(found.rows[line, place]), int(found.tokens[line, place])
            if self._read(rows, row, token).completed:
                met[line, place] = True
                continue
            written = rows.tokens[row].cpu()
            one = self._hypothesis(rows, found, line, place, float(shares[line, place]), written)
            retired.append(one)
            some = (self._reserve if cut else self._rest).setdefault(int(team.requests[line]), [])
            some.append(one[1])
            some.sort(key=lambda other: (len(other.unmet or ()), -(other.score or 0.0)))
            del some[self._shape.width :]
        return retired + self._collect(rows, team, found, met, every=cut)

    def _hypothesis(
        self, rows: Rows, found: Candidates, line: int, place: int, score: float, written: Tensor
    ) -> tuple[int, Hypothesis]:
        """A candidate as a sequence that has ended, with the row it continued."""
        row, one = super()._hypothesis(rows, found, line, place, score, written)
        state = self._read(rows, row, int(found.tokens[line, place]))
        one.unmet, one.met = state.unmet, state.met
        return row, one


def leading(
    states: Mapping[int, ConstraintListState], seen: Collection[tuple[int, int]], vocabulary: int
) -> list[tuple[int, int]]:
    """The rows and tokens that go on with a constraint, but those seen, by what each row has met."""
    pairs = []
    for row, state in states.items():
        for token in () if state.completed else state.advance() or ():
            if not 0 <= token < vocabulary:
                must = f"must advance by tokens below {vocabulary}, the vocabulary"
                raise InputError("constraints", must, token)
            if (row, token) not in seen:
                pairs.append((row, token))
    return pairs


def dealt(likely: list[Entry], led: list[Entry], width: int) -> list[Entry]:
    """`width` of the likeliest continuations and of those that are led, the best of every bank first."""
    if not led:
        return likely
    both = likely + led
    banks = np.array([entry.state.get_bank() for entry in both])
    sums = np.array([entry.sum for entry in both])
    return [both[place] for place in banked(banks, sums, width)]
