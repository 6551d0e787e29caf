"""A lane: the rows of one strategy in a table, their processors, and several lanes' words as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context
from descant.core.records import Aid, Observation, Output, Proposal, Selection, Watched
from descant.core.rows import Column, Rows, join, pick, settle, taken

if TYPE_CHECKING:
    from descant.core.interfaces import Cache, Follower, Processor, Stateful, Strategy

__all__ = ["Lane", "joined", "narrow", "proposed", "stateful"]


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


# ------------------------------------------------------------------------ several strategies in one table
def proposed(rows: Rows, lanes: Sequence[Lane], cache: Cache) -> Proposal:
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


def narrow(
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


def joined(rows: Rows, chosen: Sequence[tuple[Tensor | None, Selection]]) -> Selection:
    """The lanes' selections as one; a column that a lane does not write follows its row."""
    if len(chosen) == 1:
        return chosen[0][1]
    ones = [one for _, one in chosen]
    parents = [_parents(one.parents, index, len(rows)) for index, one in chosen]
    columns: dict[str, Tensor | Column] = {}
    for name in {name for one in ones for name in one.columns}:
        parts = [
            one.columns[name] if name in one.columns else taken(rows.columns[name], whence)
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


def _stacked(first: Tensor | Column, second: Tensor | Column) -> Tensor | Column:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return join(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        raise TypeError("a column is a tensor in one lane and Python state in another")
    return first.cat(second)
