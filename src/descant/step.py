"""One step of every method: propose -> forward -> process -> select -> commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.context import Context, Params, params_of
from descant.rows import Column, Rows, join, pick

if TYPE_CHECKING:
    from descant.ports import Cache, Follower, Model, Processor, Stateful, Strategy

__all__ = [
    "Aid",
    "Context",
    "Hypothesis",
    "Lane",
    "Logprobs",
    "Observation",
    "Output",
    "Params",
    "Proposal",
    "Selection",
    "Speculation",
    "Tokens",
    "Told",
    "Watched",
    "params_of",
    "settle",
    "stateful",
    "step",
]


# ------------------------------------------------------------------------ the records of a step
# Named tuples: as immutable as frozen dataclasses, and several times cheaper to make, every step.
class Proposal(NamedTuple):
    """Rows to feed: row `i` forks row `parents[i]` and tries `drafts[i, :n[i]]` after its pending tokens.

    Nothing given is the commonest proposal: every row as it is, nothing tried.
    """

    parents: Tensor | None = None  # [R] (host); None: every row as it is
    drafts: Tensor | None = None  # [R, K]; None: nothing is tried
    n: Tensor | None = None  # [R] (host); None: all of them
    probs: Tensor | None = None  # [R, K, V] the drafter's own law; None: certain

    @property
    def width(self) -> int:
        """How many tokens are tried at the most."""
        return 0 if self.drafts is None else self.drafts.shape[1]

    def tried(self, index: Tensor | None = None) -> Tensor | int:
        """How many tokens each row tries [R] (host), of the rows `index`; 0 when none does."""
        if self.drafts is None:
            return 0
        n = torch.full((len(self.drafts),), self.width) if self.n is None else self.n
        return n if index is None else n[index]


class Aid(NamedTuple):
    """What a step offers to whoever guesses ahead."""

    # The scores [R, V] that the lane's processors make of logits [R, V] that follow its rows, which may
    # have further tokens by then.
    process: Callable[[Rows, Tensor], Tensor]
    cache: Cache  # the table's
    place: Tensor | None = None  # [R] (host) where the lane's rows lie in the table; None: they are the table


class Output(NamedTuple):
    """What the model says: `logits[:, j]` predicts what follows draft `j - 1`, slot 0 what follows the row.

    `states` holds whatever else was asked for (hidden states, attentions), one entry a forward, with
    the fed rows and where each row's positions lie in it.
    """

    logits: Tensor  # [R, K + 1, V], float32
    states: Sequence[Mapping[str, Any]] = ()
    plain: Tensor | None = None  # [R, K + 1, V] what the network itself says, where `logits` are not that
    place: Tensor | None = None  # [R] (host) which fed row of the table each is; None: the first the first
    # The processed scores [N, V] of some rows [N] with further columns, for a strategy that asks by itself.
    process: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None


class Tokens(NamedTuple):
    """New tokens of a step, one for each of several rows: columns on the host, not one object a token."""

    request: Tensor  # [N]
    slot: Tensor  # [N] which of the request's sequences
    token: Tensor  # [N]
    row: Tensor | None = None  # [N] the fed row that each follows; None: the first the first, and so on
    raw: Tensor | None = None  # [N] log-probabilities before the processors, where a row asks for them
    processed: Tensor | None = None  # [N] and after them
    ended: Mapping[int, Hypothesis] = MappingProxyType({})  # by place: the sequences that these tokens end
    held: bool = False  # chosen in an earlier step: each is its row's last token already
    place: Tensor | None = None  # [N] which new token of its row each is; None: the one after its row
    tried: Tensor | None = None  # [N] how many guesses its row tried in this step
    guessed: Tensor | None = None  # [N] whether it was guessed


class Speculation(NamedTuple):
    """What became of a sequence's guesses: how many were tried and stood at each place of a run."""

    tried: tuple[int, ...]
    accepted: tuple[int, ...]
    forwards: int  # steps of the model, the prompt's among them

    @property
    def saved(self) -> int:
        """How many forwards it would have taken more without them."""
        return sum(self.accepted)

    @property
    def rate(self) -> float:
        """The share of the guesses that stood; 0 where there was none."""
        return self.saved / max(sum(self.tried), 1)


@dataclass(frozen=True)
class Logprobs:
    """The log-probability of each token of a sequence before and after the processors, and the likeliest.

    `top` holds the `n` tokens that the model itself found likeliest at each place, best first.
    """

    raw: Tensor  # [T] (host)
    processed: Tensor  # [T]
    top: Tensor  # [T, n] tokens
    top_raw: Tensor  # [T, n]
    top_processed: Tensor  # [T, n]


@dataclass
class Hypothesis:
    """One returned sequence: its new tokens, why it ended, and its score where the method has one."""

    tokens: Tensor  # [T] (host)
    reason: str  # "eos", "length", "time", "stop"
    score: float | None = None
    beams: tuple[int, ...] | None = None  # which slot of its request each token was chosen from
    logprobs: Logprobs | None = None  # where its request asks for them
    unmet: tuple[int, ...] | None = None  # places of the constraints it does not meet; None: it had none
    met: int | None = None  # steps of its constraints that it has met; None: it had none
    speculation: Speculation | None = None  # of its guesses; None: nothing guessed


class Told(NamedTuple):
    """Which lines of a step count for the record, where not every fed row is one of them."""

    rows: Tensor  # [N] (host) the fed row that each is of
    slot: Tensor  # [N] (host) which of its request's lines it is
    scores: Tensor | None = None  # [N, V] processed; None: as the lane processed them
    at: Tensor | None = None  # [N] (host) after which of the row's drafts; None: after the row itself


class Selection(NamedTuple):
    """Rows to keep: new row `i` continues fed row `parents[i]`, keeps `accepted[i]` drafts, then `tokens[i]`.

    `slot` and `columns` are aligned to the new rows. Where `accepted` is below 0 the row takes back so many
    of its own last tokens. `emits` is False (0) where no token is chosen yet, and -1 where in addition the
    row's last token is to be fed again.
    """

    tokens: Tensor  # [R']
    parents: Tensor | None = None  # [R'] (host); None: every row as it is
    accepted: Tensor | None = None  # [R'] (host); None: no draft
    slot: Tensor | None = None  # [R'] (host); None: the parent's
    columns: Mapping[str, Tensor | Column] = MappingProxyType({})
    emits: bool | Tensor = True  # or [R'] of 1, 0 and -1 (host)
    emitted: Tokens | None = None
    finished: Sequence[int] = ()  # requests that have ended
    failed: Sequence[int] = ()  # requests with a row that has no token to choose
    hopeless: Sequence[int] = ()  # those of them that the model itself left none
    host: Tensor | None = None  # [R'] `tokens` on the host
    retired: Sequence[tuple[int, Hypothesis]] = ()  # sequences that ended, each with the fed row it continued
    told: Told | None = None  # None: every fed row is a line of the record


class Watched(NamedTuple):
    """What one processor was given and made of it, for who traces."""

    processor: Processor
    place: Tensor | None  # [N] (host) which lines of the lane, row by row, K + 1 each; None: all
    before: Tensor  # [N, V]
    after: Tensor
    turn: int = 0  # which call of a strategy that asks by itself; 0: of the lane


class Observation(NamedTuple):
    """What a step looked like to one lane: for scores, traces and pictures."""

    rows: Rows
    logits: Tensor  # [R, K + 1, V] raw
    scores: Tensor  # [R, K + 1, V] processed
    output: Output
    told: Told | None = None
    watched: Sequence[Watched] = ()  # for followers alone, and only where somebody traces


# ------------------------------------------------------------------------ the loop
def stateful(processor: Processor) -> Stateful | None:
    """The processor, if it has a state."""
    return processor if getattr(processor, "state", None) else None  # type: ignore[return-value]


class _Remembered(NamedTuple):
    """What a processor with a state was given and made of it, until the choice is known."""

    processor: Stateful
    users: Tensor | None  # the lane's rows that use it (host); None: all
    context: Context  # in the state of each line
    before: Tensor  # [N * (K + 1), V]
    after: Tensor


@dataclass
class Lane:
    """The rows of one strategy, and the processors that any of them uses, in order."""

    strategy: Strategy
    index: Tensor | None  # [N] (host); None: the whole table
    stages: Sequence[tuple[Processor, Tensor | None]]  # each with the lane's rows that use it; None: all
    followers: Sequence[Follower] = ()
    uploaded: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # parameters on the device, by stage
    watch: list[Watched] | None = None  # what each processor did in this step; None: nobody traces
    _remembered: list[_Remembered] = field(default_factory=list)

    def process(self, rows: Rows, proposal: Proposal, logits: Tensor) -> Tensor:
        """The logits as the strategy reads them [R, K + 1, V]."""
        scores = logits.log_softmax(-1) if self.strategy.normalised else logits
        self._remembered.clear()
        if self.watch is not None:
            self.watch.clear()
        if not self.stages or getattr(self.strategy, "grouped", False):
            return scores
        context = Context.of(rows, proposal.drafts, self.uploaded.setdefault(-1, {}))
        lines, flat = logits.shape[1], scores.flatten(0, 1)
        for number, (processor, index) in enumerate(self.stages):
            part, before, place = context, flat, None
            if index is not None:
                place = index if lines == 1 else (index[:, None] * lines + torch.arange(lines)).flatten()
                cache = self.uploaded.setdefault(number, {}) if lines == 1 else None
                part, before = context.take(place, cache), pick(flat, place)
            keeps = stateful(processor)
            if keeps is not None:
                after = self._processed(keeps, index, part, before, proposal)
            else:
                after = processor.process(part, before)
            if self.watch is not None:
                self.watch.append(Watched(processor, place, before, after))
            flat = after if place is None else flat.index_copy(0, place.to(flat.device), after)
        return flat.view_as(scores)

    def shaped(self, rows: Rows, logits: Tensor) -> Tensor:
        """What the processors make of logits [R, V] that follow the rows, of which nothing is remembered."""
        scores = logits.log_softmax(-1) if self.strategy.normalised else logits
        if not self.stages:
            return scores
        lane = Lane(_Processed(), None, self.stages, uploaded=self.uploaded)  # type: ignore[arg-type]
        return lane.process(rows, Proposal(), scores[:, None])[:, 0]

    def some(self, rows: Rows, scores: Tensor, index: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The processed scores [N, V] of the rows `index` (host), which have further columns [N, ...]."""
        if not self.stages:
            return pick(scores[:, 0], index)
        place = torch.full((len(rows),), -1)
        place[index] = torch.arange(len(index))
        stages = []
        for processor, users in self.stages:
            mine = None if users is None else place[users][place[users] >= 0]
            if mine is None or len(mine):
                stages.append((processor, mine))
        part = rows.take(index)
        part = part.changed(columns={**part.columns, **columns}, version=object())
        watch: list[Watched] | None = None if self.watch is None else []
        lane = Lane(_Processed(), None, stages, watch=watch)  # type: ignore[arg-type]
        answer = lane.process(part, Proposal(), pick(scores[:, :1], index))
        if self.watch is not None:
            turn = 1 + max((one.turn for one in self.watch), default=0)
            for one in watch or ():
                mine = index if one.place is None else index[one.place]
                self.watch.append(one._replace(place=mine, turn=turn))
        for kept in lane._remembered:
            self._remembered.append(kept._replace(users=index if kept.users is None else index[kept.users]))
        return answer[:, 0]

    def follow(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the columns of processors and followers brought up to it."""
        if self._remembered:
            columns = dict(selection.columns)
            for kept in self._remembered:
                # Two processors may keep a column of one name, each for its own rows.
                columns |= _advanced(kept, seen, selection, columns)
            self._remembered.clear()
            selection = selection._replace(columns=columns)
        for follower in self.followers:
            selection = follower.follow(seen, proposal, selection)
        if selection.failed:
            selection = selection._replace(hopeless=_hopeless(seen, selection.failed))
        return selection

    def _processed(
        self, processor: Stateful, index: Tensor | None, context: Context, before: Tensor, proposal: Proposal
    ) -> Tensor:
        """The answer of a processor with a state, which each draft brings forward."""
        width = proposal.width
        if proposal.drafts is None:
            after = processor.process(context, before)
            self._remembered.append(_Remembered(processor, index, context, before, after))
            return after
        drafts = proposal.drafts if index is None else pick(proposal.drafts, index)
        count = len(drafts)
        first = torch.arange(count) * (width + 1)
        answers, states = [], {name: context.state(name)[:: width + 1, 0] for name in processor.state}
        trail = {name: [value] for name, value in states.items()}
        for place in range(width + 1):
            here, given = context.take(first + place).after(states), pick(before, first + place)
            answers.append(processor.process(here, given))
            if place < width:
                states = processor.advance(here, given, answers[-1], drafts[:, place])
                for name, value in states.items():
                    trail[name].append(value)
        after = torch.stack(answers, 1).flatten(0, 1)
        context = context.after({name: torch.stack(values, 1).flatten() for name, values in trail.items()})
        self._remembered.append(_Remembered(processor, index, context, before, after))
        return after


class _Processed:
    """In the place of a strategy: scores are processed as they are."""

    normalised = False


def _hopeless(seen: Observation, failed: Sequence[int]) -> list[int]:
    """The requests among those that failed of which the model itself said nothing that can be chosen from."""
    mine = torch.from_numpy(np.isin(seen.rows.request.numpy(), list(failed))).nonzero().squeeze(1)
    best = pick(seen.logits[:, 0], mine).max(-1).values.cpu()  # NaN where any is
    return sorted(set(seen.rows.request[mine[~best.isfinite()]].tolist()))


def _advanced(
    kept: _Remembered, seen: Observation, selection: Selection, done: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state columns of a processor for the new rows, `done` holding what others have made of them."""
    rows, lines, count = seen.rows, seen.logits.shape[1], len(selection.tokens)
    parents = torch.arange(count) if selection.parents is None else selection.parents
    old: dict[str, Tensor] = {
        name: done[name] if name in done else pick(rows.column(name), parents)
        for name in kept.processor.state
    }
    place = torch.full((len(rows),), -1)
    users = torch.arange(len(rows)) if kept.users is None else kept.users
    place[users] = torch.arange(len(users))
    mine = (place[parents] >= 0).nonzero().squeeze(1)  # the new rows that use it
    line = place[parents[mine]] * lines
    if selection.accepted is not None:
        line = line + selection.accepted[mine]
    if not len(mine):
        return old
    new = kept.processor.advance(
        kept.context.take(line), pick(kept.before, line), pick(kept.after, line), pick(selection.tokens, mine)
    )
    at = mine.to(selection.tokens.device)
    return {name: value.index_copy(0, at, new[name].to(value.dtype)) for name, value in old.items()}


def step(
    model: Model,
    cache: Cache,
    rows: Rows,
    lanes: Callable[[Rows], Sequence[Lane]],
    observe: Callable[[Observation], None] | None = None,
    retire: Callable[[Rows, Sequence[tuple[int, Hypothesis]], Tensor], None] | None = None,
) -> tuple[Rows, list[Selection]]:
    """Advance every row: one forward for all, one choice per strategy, one commit.

    `retire` is shown the sequences that ended, each with the fed row it continued, while the cache still has
    these rows, and how much of every fed row goes on [R] (host).
    """
    present = lanes(rows)
    proposal = _proposed(rows, present, cache)
    if proposal.parents is not None:
        rows = rows.take(proposal.parents)
        cache.commit(proposal.parents, rows.cached)
        present = lanes(rows)

    output = model.forward(rows, proposal, cache)

    chosen: list[tuple[Tensor | None, Selection]] = []
    for lane in present:
        mine, tried, heard = _narrow(rows, proposal, output, lane.index)
        scores = lane.process(mine, tried, heard.logits)
        asked = partial(lane.some, mine, scores)
        selected = lane.strategy.select(mine, tried, heard._replace(logits=scores, process=asked))
        raw = heard.logits if heard.plain is None else heard.plain
        seen = Observation(mine, raw, scores, heard, selected.told)
        if observe is not None:
            observe(seen)
        if lane.watch is not None:
            seen = seen._replace(watched=tuple(lane.watch))
            lane.watch.clear()
        chosen.append((lane.index, lane.follow(seen, tried, selected)))

    selection = _settled(_joined(rows, chosen), len(rows))
    kept = _extended(rows, proposal, selection)
    if retire is not None:
        ended = [
            (row if index is None else int(index[row]), sequence)
            for index, one in chosen
            for row, sequence in one.retired
        ]
        if ended:
            retire(rows, ended, _going(rows, selection.parents, kept))
    cache.commit(selection.parents, kept.cached)
    return kept, [one for _, one in chosen]


def _going(rows: Rows, parents: Tensor | None, kept: Rows) -> Tensor:
    """How many positions of each fed row the rows that continue it keep [R]; what it had, where none does."""
    if parents is None:
        return kept.cached
    return rows.cached.scatter(0, parents, kept.cached)


def settle(parents: Tensor, rows: int) -> Tensor | None:
    """An order of the new rows that leaves each surviving row where its first child can keep it.

    A table has no order of its own, so only rows that were forked, or that fill a hole, need to move:
    None when the given order does so already.
    """
    given = parents.numpy()
    count = len(given)
    if count == rows and (given == np.arange(rows)).all():
        return None
    place = np.full(max(count, rows), -1)
    first = np.unique(given, return_index=True)[1]
    stays = first[given[first] < count]
    place[given[stays]] = stays
    rest = np.setdiff1d(np.arange(count), stays, assume_unique=True)
    place[np.flatnonzero(place[:count] < 0)] = rest
    return torch.from_numpy(place[:count])


def _settled(selection: Selection, rows: int) -> Selection:
    """The same selection with as few rows moved as can be."""
    if selection.parents is None:
        return selection
    order = settle(selection.parents, rows)
    if order is None:
        return selection
    return Selection(
        pick(selection.tokens, order),
        selection.parents[order],
        None if selection.accepted is None else selection.accepted[order],
        None if selection.slot is None else selection.slot[order],
        {name: _taken(value, order) for name, value in selection.columns.items()},
        selection.emits if isinstance(selection.emits, bool) else selection.emits[order],
    )


def _extended(rows: Rows, proposal: Proposal, selection: Selection) -> Rows:
    """The kept rows with their accepted drafts and next token decided; all but that token is cached."""
    parents = selection.parents
    kept = rows if parents is None else rows.take(parents)
    fields: dict[str, Any] = {}
    if selection.slot is not None:
        fields["slot"] = selection.slot
    if selection.columns:
        fields["columns"] = {**kept.columns, **selection.columns}
    if selection.accepted is not None:
        length = kept.length + selection.accepted
        if proposal.drafts is not None:
            kept = kept.append(proposal.drafts if parents is None else pick(proposal.drafts, parents), length)
        else:
            kept = kept.changed(length=length)
    if selection.emits is True:
        return kept.advance(selection.tokens, **fields)
    if selection.emits is False:
        return kept.changed(cached=kept.position, **fields)
    cached = kept.position + selection.emits.clamp(max=0)
    length = kept.length + selection.emits.clamp(min=0)
    return kept.append(selection.tokens[:, None], length, cached=cached, **fields)


# ------------------------------------------------------------------------ several strategies in one table
def _proposed(rows: Rows, lanes: Sequence[Lane], cache: Cache) -> Proposal:
    """All lanes' proposals as one."""
    if len(lanes) == 1:
        return lanes[0].strategy.propose(rows, Aid(lanes[0].shaped, cache))
    parts = [
        (lane.index, lane.strategy.propose(_lane_rows(rows, lane.index), Aid(lane.shaped, cache, lane.index)))
        for lane in lanes
    ]
    if all(part.parents is None and part.drafts is None for _, part in parts):
        return Proposal()
    width = max(part.width for _, part in parts)
    parents = torch.cat([_parents(part.parents, index, len(rows)) for index, part in parts])
    counts = [len(_parents(part.parents, index, len(rows))) for index, part in parts]
    drafts = [_drafts(part, count, width, rows) for (_, part), count in zip(parts, counts, strict=True)]
    n = [torch.as_tensor(part.tried()).expand(count) for (_, part), count in zip(parts, counts, strict=True)]
    laws = _laws([part for _, part in parts], drafts)
    # Lanes are slices of one table, not blocks of it: rows keep their places unless somebody forks.
    order = settle(parents, len(rows))
    if order is None:
        return Proposal(None, torch.cat(drafts), torch.cat(n), laws)
    probs = None if laws is None else pick(laws, order)
    return Proposal(parents[order], pick(torch.cat(drafts), order), torch.cat(n)[order], probs)


def _parents(parents: Tensor | None, index: Tensor | None, rows: int) -> Tensor:
    """A lane's parents as rows of the table."""
    index = torch.arange(rows) if index is None else index
    return index if parents is None else index[parents]


def _drafts(part: Proposal, count: int, width: int, rows: Rows) -> Tensor:
    """A lane's drafts, as wide as the widest lane's [R, K]."""
    if part.drafts is None:
        return rows.tokens.new_zeros(count, width)
    return torch.nn.functional.pad(part.drafts, (0, width - part.width))


def _laws(parts: Sequence[Proposal], drafts: Sequence[Tensor]) -> Tensor | None:
    """The drafters' laws one below the other, certainty spelt out where another lane has a law [R, K, V]."""
    size = max((part.probs.shape[2] for part in parts if part.probs is not None), default=0)
    if not size:
        return None
    laws = []
    for part, padded in zip(parts, drafts, strict=True):
        law = torch.nn.functional.one_hot(padded, size).float() if part.probs is None else part.probs
        laws.append(torch.nn.functional.pad(law, (0, 0, 0, padded.shape[1] - law.shape[1])))
    return torch.cat(laws)


def _lane_rows(rows: Rows, index: Tensor | None) -> Rows:
    """The rows of a lane, named after the table and the lane: what is compiled for it lasts as long."""
    return rows if index is None else rows.take(index).changed(version=(rows.version, int(index[0])))


def _narrow(
    rows: Rows, proposal: Proposal, output: Output, index: Tensor | None
) -> tuple[Rows, Proposal, Output]:
    """What one lane sees of a step."""
    if index is None:
        return rows, proposal, output
    # No wider than the lane's own drafts, whatever others try.
    n = torch.as_tensor(proposal.tried(index))
    wide, tried = int(n.max()), Proposal()
    if proposal.drafts is not None and wide:
        probs = None if proposal.probs is None else pick(proposal.probs[:, :wide], index)
        tried = Proposal(None, pick(proposal.drafts[:, :wide], index), n, probs)
    plain = None if output.plain is None else pick(output.plain[:, : wide + 1], index)
    heard = Output(pick(output.logits[:, : wide + 1], index), output.states, plain, index)
    return _lane_rows(rows, index), tried, heard


def _joined(rows: Rows, chosen: Sequence[tuple[Tensor | None, Selection]]) -> Selection:
    """The lanes' selections as one; a column that a lane does not write follows its row."""
    if len(chosen) == 1:
        return chosen[0][1]
    ones = [one for _, one in chosen]
    parents = [_parents(one.parents, index, len(rows)) for index, one in chosen]
    columns: dict[str, Tensor | Column] = {}
    for name in {name for one in ones for name in one.columns}:
        parts = [
            one.columns[name] if name in one.columns else _taken(rows.columns[name], whence)
            for one, whence in zip(ones, parents, strict=True)
        ]
        columns[name] = parts[0]
        for part in parts[1:]:
            columns[name] = _stacked(columns[name], part)
    both = [(one, torch.zeros_like(whence)) for one, whence in zip(ones, parents, strict=True)]
    return Selection(
        torch.cat([one.tokens for one in ones]),
        torch.cat(parents),
        torch.cat([zero if one.accepted is None else one.accepted for one, zero in both]),
        torch.cat([_slots(one, rows, at) for one, at in zip(ones, parents, strict=True)]),
        columns,
        torch.cat([zero + one.emits for one, zero in both]),
    )


def _slots(selection: Selection, rows: Rows, parents: Tensor) -> Tensor:
    return rows.slot[parents] if selection.slot is None else selection.slot


def _taken(column: Tensor | Column, parents: Tensor) -> Tensor | Column:
    return pick(column, parents) if isinstance(column, Tensor) else column.take(parents)


def _stacked(first: Tensor | Column, second: Tensor | Column) -> Tensor | Column:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return join(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        raise TypeError("a column is a tensor in one lane and Python state in another")
    return first.cat(second)
