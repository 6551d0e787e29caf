"""A lane: the rows of one strategy in a table, their processors, and several lanes' words as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context
from descant.core.records import DraftContext, ForwardOutput, Observation, ProcessorTrace, Proposal, Selection
from descant.core.rows import Column, Rows, concat_padded, index_rows, stable_row_order, take_rows

if TYPE_CHECKING:
    from descant.core.interfaces import Processor, RowCache, StatefulProcessor, StepObserver, Strategy

__all__ = ["StrategyGroup", "as_stateful", "merge_proposals", "merge_selections", "slice_group"]


def as_stateful(processor: Processor) -> StatefulProcessor | None:
    """The processor, if it has a state."""
    return processor if getattr(processor, "state", None) else None  # type: ignore[return-value]


class _PendingState(NamedTuple):
    """What a processor with a state was given and made of it, until the choice is known."""

    processor: StatefulProcessor
    row_index: Tensor | None  # the lane's rows that use it (host); None: all
    context: Context  # in the state of each line
    before: Tensor  # [N * (K + 1), V]
    after: Tensor


@dataclass
class StrategyGroup:
    """The rows of one strategy, and the processors that any of them uses, in order."""

    strategy: Strategy
    index: Tensor | None  # [N] (host); None: the whole table
    processors: Sequence[tuple[Processor, Tensor | None]]  # each with the lane's rows that use it; None: all
    observers: Sequence[StepObserver] = ()
    device_params: dict[int, dict[str, Tensor]] = field(
        default_factory=dict
    )  # parameters on the device, by stage
    traces: list[ProcessorTrace] | None = None  # what each processor did in this step; None: nobody traces
    _pending_states: list[_PendingState] = field(default_factory=list)

    def process(self, rows: Rows, proposal: Proposal, logits: Tensor) -> Tensor:
        """The logits as the strategy reads them [R, K + 1, V]."""
        scores = logits.log_softmax(-1) if self.strategy.needs_log_probs else logits
        self._pending_states.clear()
        if self.traces is not None:
            self.traces.clear()
        if not self.processors or getattr(self.strategy, "has_groups", False):
            return scores
        context = Context.from_rows(rows, proposal.drafts, self.device_params.setdefault(-1, {}))
        lines, flat = logits.shape[1], scores.flatten(0, 1)
        for number, (processor, index) in enumerate(self.processors):
            part, before, place = context, flat, None
            if index is not None:
                place = index if lines == 1 else (index[:, None] * lines + torch.arange(lines)).flatten()
                cache = self.device_params.setdefault(number, {}) if lines == 1 else None
                part, before = context.take(place, cache), index_rows(flat, place)
            keeps = as_stateful(processor)
            if keeps is not None:
                after = self._process_stateful(keeps, index, part, before, proposal)
            else:
                after = processor.process(part, before)
            if self.traces is not None:
                self.traces.append(ProcessorTrace(processor, place, before, after))
            flat = after if place is None else flat.index_copy(0, place.to(flat.device), after)
        return flat.view_as(scores)

    def process_draft_logits(self, rows: Rows, logits: Tensor) -> Tensor:
        """What the processors make of logits [R, V] that follow the rows, of which nothing is remembered."""
        scores = logits.log_softmax(-1) if self.strategy.needs_log_probs else logits
        if not self.processors:
            return scores
        lane = StrategyGroup(_NoStrategy(), None, self.processors, device_params=self.device_params)  # type: ignore[arg-type]
        return lane.process(rows, Proposal(), scores[:, None])[:, 0]

    def process_subset(
        self, rows: Rows, scores: Tensor, index: Tensor, columns: Mapping[str, Tensor]
    ) -> Tensor:
        """The processed scores [N, V] of the rows `index` (host), which have further columns [N, ...]."""
        if not self.processors:
            return index_rows(scores[:, 0], index)
        place = torch.full((len(rows),), -1)
        place[index] = torch.arange(len(index))
        stages = []
        for processor, users in self.processors:
            mine = None if users is None else place[users][place[users] >= 0]
            if mine is None or len(mine):
                stages.append((processor, mine))
        part = rows.take(index)
        part = part.replace(columns={**part.columns, **columns}, version=object())
        watch: list[ProcessorTrace] | None = None if self.traces is None else []
        lane = StrategyGroup(_NoStrategy(), None, stages, traces=watch)  # type: ignore[arg-type]
        answer = lane.process(part, Proposal(), index_rows(scores[:, :1], index))
        if self.traces is not None:
            turn = 1 + max((one.call_index for one in self.traces), default=0)
            for one in watch or ():
                mine = index if one.line_index is None else index[one.line_index]
                self.traces.append(one._replace(line_index=mine, call_index=turn))
        for kept in lane._pending_states:
            self._pending_states.append(
                kept._replace(row_index=index if kept.row_index is None else index[kept.row_index])
            )
        return answer[:, 0]

    def observe(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the columns of processors and followers brought up to it."""
        if self._pending_states:
            columns = dict(selection.columns)
            for kept in self._pending_states:
                # Two processors may keep a column of one name, each for its own rows.
                columns |= _advance_states(kept, seen, selection, columns)
            self._pending_states.clear()
            selection = selection._replace(columns=columns)
        for follower in self.observers:
            selection = follower.observe(seen, proposal, selection)
        if selection.failed:
            selection = selection._replace(nonfinite=_nonfinite_requests(seen, selection.failed))
        return selection

    def _process_stateful(
        self,
        processor: StatefulProcessor,
        index: Tensor | None,
        context: Context,
        before: Tensor,
        proposal: Proposal,
    ) -> Tensor:
        """The answer of a processor with a state, which each draft brings forward."""
        width = proposal.width
        if proposal.drafts is None:
            after = processor.process(context, before)
            self._pending_states.append(_PendingState(processor, index, context, before, after))
            return after
        drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
        count = len(drafts)
        first = torch.arange(count) * (width + 1)
        answers, states = [], {name: context.state(name)[:: width + 1, 0] for name in processor.state}
        trail = {name: [value] for name, value in states.items()}
        for place in range(width + 1):
            here, given = context.take(first + place).with_states(states), index_rows(before, first + place)
            answers.append(processor.process(here, given))
            if place < width:
                states = processor.advance(here, given, answers[-1], drafts[:, place])
                for name, value in states.items():
                    trail[name].append(value)
        after = torch.stack(answers, 1).flatten(0, 1)
        context = context.with_states(
            {name: torch.stack(values, 1).flatten() for name, values in trail.items()}
        )
        self._pending_states.append(_PendingState(processor, index, context, before, after))
        return after


class _NoStrategy:
    """In the place of a strategy: scores are processed as they are."""

    needs_log_probs = False


def _nonfinite_requests(seen: Observation, failed: Sequence[int]) -> list[int]:
    """The requests among those that failed of which the model itself said nothing that can be chosen from."""
    mine = torch.from_numpy(np.isin(seen.rows.request.numpy(), list(failed))).nonzero().squeeze(1)
    best = index_rows(seen.logits[:, 0], mine).max(-1).values.cpu()  # NaN where any is
    return sorted(set(seen.rows.request[mine[~best.isfinite()]].tolist()))


def _advance_states(
    kept: _PendingState, seen: Observation, selection: Selection, done: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state columns of a processor for the new rows, `done` holding what others have made of them."""
    rows, lines, count = seen.rows, seen.logits.shape[1], len(selection.tokens)
    parents = torch.arange(count) if selection.parents is None else selection.parents
    old: dict[str, Tensor] = {
        name: done[name] if name in done else index_rows(rows.column(name), parents)
        for name in kept.processor.state
    }
    place = torch.full((len(rows),), -1)
    users = torch.arange(len(rows)) if kept.row_index is None else kept.row_index
    place[users] = torch.arange(len(users))
    mine = (place[parents] >= 0).nonzero().squeeze(1)  # the new rows that use it
    line = place[parents[mine]] * lines
    if selection.accepted is not None:
        line = line + selection.accepted[mine]
    if not len(mine):
        return old
    new = kept.processor.advance(
        kept.context.take(line),
        index_rows(kept.before, line),
        index_rows(kept.after, line),
        index_rows(selection.tokens, mine),
    )
    at = mine.to(selection.tokens.device)
    return {name: value.index_copy(0, at, new[name].to(value.dtype)) for name, value in old.items()}


# ------------------------------------------------------------------------ several strategies in one table
def merge_proposals(rows: Rows, lanes: Sequence[StrategyGroup], cache: RowCache) -> Proposal:
    """All lanes' proposals as one."""
    if len(lanes) == 1:
        return lanes[0].strategy.propose(rows, DraftContext(lanes[0].process_draft_logits, cache))
    parts = [
        (
            lane.index,
            lane.strategy.propose(
                _group_rows(rows, lane.index), DraftContext(lane.process_draft_logits, cache, lane.index)
            ),
        )
        for lane in lanes
    ]
    if all(part.parents is None and part.drafts is None for _, part in parts):
        return Proposal()
    width = max(part.width for _, part in parts)
    parents = torch.cat([_table_parents(part.parents, index, len(rows)) for index, part in parts])
    counts = [len(_table_parents(part.parents, index, len(rows))) for index, part in parts]
    drafts = [_pad_drafts(part, count, width, rows) for (_, part), count in zip(parts, counts, strict=True)]
    n = [
        torch.as_tensor(part.draft_counts()).expand(count)
        for (_, part), count in zip(parts, counts, strict=True)
    ]
    laws = _merge_draft_probs([part for _, part in parts], drafts)
    # Lanes are slices of one table, not blocks of it: rows keep their places unless somebody forks.
    order = stable_row_order(parents, len(rows))
    if order is None:
        return Proposal(None, torch.cat(drafts), torch.cat(n), laws)
    probs = None if laws is None else index_rows(laws, order)
    return Proposal(parents[order], index_rows(torch.cat(drafts), order), torch.cat(n)[order], probs)


def _table_parents(parents: Tensor | None, index: Tensor | None, rows: int) -> Tensor:
    """A lane's parents as rows of the table."""
    index = torch.arange(rows) if index is None else index
    return index if parents is None else index[parents]


def _pad_drafts(part: Proposal, count: int, width: int, rows: Rows) -> Tensor:
    """A lane's drafts, as wide as the widest lane's [R, K]."""
    if part.drafts is None:
        return rows.tokens.new_zeros(count, width)
    return torch.nn.functional.pad(part.drafts, (0, width - part.width))


def _merge_draft_probs(parts: Sequence[Proposal], drafts: Sequence[Tensor]) -> Tensor | None:
    """The drafters' laws one below the other, certainty spelt out where another lane has a law [R, K, V]."""
    size = max((part.draft_probs.shape[2] for part in parts if part.draft_probs is not None), default=0)
    if not size:
        return None
    laws = []
    for part, padded in zip(parts, drafts, strict=True):
        law = (
            torch.nn.functional.one_hot(padded, size).float()
            if part.draft_probs is None
            else part.draft_probs
        )
        laws.append(torch.nn.functional.pad(law, (0, 0, 0, padded.shape[1] - law.shape[1])))
    return torch.cat(laws)


def _group_rows(rows: Rows, index: Tensor | None) -> Rows:
    """The rows of a lane, named after the table and the lane: what is compiled for it lasts as long."""
    return rows if index is None else rows.take(index).replace(version=(rows.version, int(index[0])))


def slice_group(
    rows: Rows, proposal: Proposal, output: ForwardOutput, index: Tensor | None
) -> tuple[Rows, Proposal, ForwardOutput]:
    """What one lane sees of a step."""
    if index is None:
        return rows, proposal, output
    # No wider than the lane's own drafts, whatever others try.
    n = torch.as_tensor(proposal.draft_counts(index))
    wide, tried = int(n.max()), Proposal()
    if proposal.drafts is not None and wide:
        probs = None if proposal.draft_probs is None else index_rows(proposal.draft_probs[:, :wide], index)
        tried = Proposal(None, index_rows(proposal.drafts[:, :wide], index), n, probs)
    plain = None if output.base_logits is None else index_rows(output.base_logits[:, : wide + 1], index)
    heard = ForwardOutput(index_rows(output.logits[:, : wide + 1], index), output.states, plain, index)
    return _group_rows(rows, index), tried, heard


def merge_selections(rows: Rows, chosen: Sequence[tuple[Tensor | None, Selection]]) -> Selection:
    """The lanes' selections as one; a column that a lane does not write follows its row."""
    if len(chosen) == 1:
        return chosen[0][1]
    ones = [one for _, one in chosen]
    parents = [_table_parents(one.parents, index, len(rows)) for index, one in chosen]
    columns: dict[str, Tensor | Column] = {}
    for name in {name for one in ones for name in one.columns}:
        parts = [
            one.columns[name] if name in one.columns else take_rows(rows.columns[name], whence)
            for one, whence in zip(ones, parents, strict=True)
        ]
        columns[name] = parts[0]
        for part in parts[1:]:
            columns[name] = _concat_columns(columns[name], part)
    both = [(one, torch.zeros_like(whence)) for one, whence in zip(ones, parents, strict=True)]
    return Selection(
        torch.cat([one.tokens for one in ones]),
        torch.cat(parents),
        torch.cat([zero if one.accepted is None else one.accepted for one, zero in both]),
        torch.cat([_selected_slots(one, rows, at) for one, at in zip(ones, parents, strict=True)]),
        columns,
        torch.cat([zero + one.emit_mode for one, zero in both]),
    )


def _selected_slots(selection: Selection, rows: Rows, parents: Tensor) -> Tensor:
    return rows.slot[parents] if selection.slot is None else selection.slot


def _concat_columns(first: Tensor | Column, second: Tensor | Column) -> Tensor | Column:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return concat_padded(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        raise TypeError("a column is a tensor in one lane and Python state in another")
    return first.cat(second)
