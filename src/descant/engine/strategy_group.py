"""The rows of one strategy in a table, and the processors that run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context
from descant.core.interfaces import Processor, StatefulProcessor, StepObserver, Strategy
from descant.core.records import Observation, ProcessorTrace, Proposal, Selection
from descant.core.rows import Column, Rows, concat_columns, index_rows, take_rows
from descant.decoding.processors import CallableProcessor
from descant.errors import InputError

__all__ = ["StrategyGroup", "as_stateful"]


def as_stateful(processor: Processor) -> StatefulProcessor | None:
    """The processor, if it has a state."""
    return processor if getattr(processor, "state", None) else None  # type: ignore[return-value]


class _PendingState(NamedTuple):
    """A call of a stateful processor, whose state advances once the tokens are chosen."""

    processor: StatefulProcessor
    row_index: Tensor | None  # the group's rows that use it (host); None: all
    context: Context  # with the state of each line
    before: Tensor  # [N * (K + 1), V]
    after: Tensor


@dataclass
class StrategyGroup:
    """The rows of one strategy, and the processors that any of them uses, in order."""

    strategy: Strategy
    index: Tensor | None  # [N] (host); None: the whole table
    processors: Sequence[tuple[Processor, Tensor | None]]  # each with the group's rows that use it; None: all
    observers: Sequence[StepObserver] = ()
    device_params: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by index of the processor
    traces: list[ProcessorTrace] | None = None  # of this step; None: the session does not trace
    errors: dict[int, Exception] | None = None  # of requests whose own code raised; None: errors are raised
    # Of the strategy's state outside its columns; None: it has none.
    checkpoint: Callable[[], Callable[[], None]] | None = field(init=False)
    _pending_states: list[_PendingState] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A group is made whenever the table changes, and `isinstance` of a protocol is slow.
        self.checkpoint = getattr(self.strategy, "checkpoint", None)

    def process(self, rows: Rows, proposal: Proposal, logits: Tensor) -> Tensor:
        """The scores that the strategy reads [R, K + 1, V]."""
        scores = logits.log_softmax(-1) if self.strategy.needs_log_probs else logits
        if self._pending_states:
            self._pending_states.clear()
        if self.traces is not None:
            self.traces.clear()
        if not self.processors or self.strategy.has_groups:
            return scores
        context = Context.from_rows(rows, proposal.drafts, self.device_params.setdefault(-1, {}))
        lines, flat = logits.shape[1], scores.flatten(0, 1)
        for number, (processor, index) in enumerate(self.processors):
            part, before, line_index = context, flat, None
            if index is not None:
                line_index = index if lines == 1 else (index[:, None] * lines + torch.arange(lines)).flatten()
                cache = self.device_params.setdefault(number, {}) if lines == 1 else None
                part, before = context.take(line_index, cache), index_rows(flat, line_index)
            try:
                stateful = as_stateful(processor)
                if stateful is not None:
                    after = self._process_stateful(stateful, index, part, before, proposal)
                else:
                    after = _checked_scores(processor, before, processor.process(part, before))
            except Exception as error:
                self.record_error(rows.request if index is None else rows.request[index], error)
                after = before
            if self.traces is not None:
                self.traces.append(ProcessorTrace(processor, line_index, before, after))
            flat = after if line_index is None else flat.index_copy(0, line_index.to(flat.device), after)
        return flat.view_as(scores)

    def process_draft_logits(self, rows: Rows, logits: Tensor) -> Tensor:
        """The scores of logits [R, V] that follow the rows; no processor state advances."""
        scores = logits.log_softmax(-1) if self.strategy.needs_log_probs else logits
        if not self.processors:
            return scores
        group = StrategyGroup(
            _NoStrategy(),  # type: ignore[arg-type]
            None,
            self.processors,
            device_params=self.device_params,
            errors=self.errors,
        )
        return group.process(rows, Proposal(), scores[:, None])[:, 0]

    def process_subset(
        self, rows: Rows, scores: Tensor, index: Tensor, columns: Mapping[str, Tensor]
    ) -> Tensor:
        """The processed scores [N, V] of the rows `index` (host), with further columns [N, ...]."""
        if not self.processors:
            return index_rows(scores[:, 0], index)
        position = torch.full((len(rows),), -1)  # of each row in `index`
        position[index] = torch.arange(len(index))
        processors = []
        for processor, users in self.processors:
            selected = None if users is None else position[users][position[users] >= 0]
            if selected is None or len(selected):
                processors.append((processor, selected))
        part = rows.take(index)
        part = part.replace(columns={**part.columns, **columns}, version=object())
        traces: list[ProcessorTrace] | None = None if self.traces is None else []
        group = StrategyGroup(_NoStrategy(), None, processors, traces=traces, errors=self.errors)  # type: ignore[arg-type]
        result = group.process(part, Proposal(), index_rows(scores[:, :1], index))
        if self.traces is not None:
            call_index = 1 + max((one.call_index for one in self.traces), default=0)
            for one in traces or ():
                line_index = index if one.line_index is None else index[one.line_index]
                self.traces.append(one._replace(line_index=line_index, call_index=call_index))
        for pending in group._pending_states:
            row_index = index if pending.row_index is None else index[pending.row_index]
            self._pending_states.append(pending._replace(row_index=row_index))
        return result[:, 0]

    def record_error(self, requests: Tensor, error: Exception) -> None:
        """Note the error of the requests [N] (host) whose own code has raised it; raises it if none may."""
        if self.errors is None:
            raise error
        for request in set(requests.tolist()):
            self.errors.setdefault(request, error)

    def observe(self, observation: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the columns of stateful processors and observers updated."""
        if self._pending_states:
            columns = dict(selection.columns)
            for pending in self._pending_states:
                # Two processors may have a column of one name, each for its own rows.
                try:
                    columns |= _advance_states(pending, observation, selection, columns)
                except Exception as error:
                    index, requests = pending.row_index, observation.rows.request
                    self.record_error(requests if index is None else requests[index], error)
            self._pending_states.clear()
            selection = selection._replace(columns=columns)
        if selection.emitted is not None and selection.emitted.finished:
            for processor, _ in self.processors:
                if isinstance(processor, CallableProcessor):
                    processor.record_finished(observation.rows, selection.emitted)
        for observer in self.observers:
            selection = observer.observe(observation, proposal, selection)
        if selection.failed:
            selection = selection._replace(nonfinite=_nonfinite_requests(observation, selection.failed))
        return selection

    def _process_stateful(
        self,
        processor: StatefulProcessor,
        index: Tensor | None,
        context: Context,
        before: Tensor,
        proposal: Proposal,
    ) -> Tensor:
        """The scores of a stateful processor, whose state advances with each draft."""
        width = proposal.width
        if proposal.drafts is None:
            after = _checked_scores(processor, before, processor.process(context, before))
            self._pending_states.append(_PendingState(processor, index, context, before, after))
            return after
        drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
        first = torch.arange(len(drafts)) * (width + 1)  # the line of each row before its drafts
        states = {name: take_rows(context.state_column(name), first) for name in processor.state}
        history = {name: [value] for name, value in states.items()}
        results = []
        for draft in range(width + 1):
            line_context = context.take(first + draft).with_states(states)
            line_scores = index_rows(before, first + draft)
            result = processor.process(line_context, line_scores)
            results.append(_checked_scores(processor, line_scores, result))
            if draft < width:
                states = dict(processor.advance(line_context, line_scores, results[-1], drafts[:, draft]))
                for name, value in states.items():
                    history[name].append(value)
        after = torch.stack(results, 1).flatten(0, 1)
        context = context.with_states(
            {name: _interleave(values, len(drafts)) for name, values in history.items()}
        )
        self._pending_states.append(_PendingState(processor, index, context, before, after))
        return after


def _checked_scores(processor: Processor, before: Tensor, after: object) -> Tensor:
    """What a processor returns, as scores of the dtype it was given; raises if these are no scores."""
    if isinstance(after, Tensor) and after.shape == before.shape and after.is_floating_point():
        return after.to(before.dtype)  # of one dtype whatever rows it processes
    must = f"{type(processor).__name__} must return a floating-point tensor of shape {list(before.shape)}"
    raise InputError("logits_processor", must, after, "return the scores")


class _NoStrategy:
    """In place of a strategy: scores are processed as they are."""

    needs_log_probs = False
    has_groups = False


def _interleave(parts: Sequence[Tensor | Column], rows: int) -> Tensor | Column:
    """K columns of the same rows [R, ...] as one [R * K, ...], all entries of a row side by side."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.stack(tensors, 1).flatten(0, 1)
    column = parts[0]
    for part in parts[1:]:
        column = concat_columns(column, part)
    order = (torch.arange(len(parts)) * rows)[None] + torch.arange(rows)[:, None]
    return take_rows(column, order.flatten())


def _nonfinite_requests(observation: Observation, failed: Sequence[int]) -> list[int]:
    """The failed requests for which the model's own logits were not finite."""
    index = torch.from_numpy(np.isin(observation.rows.request.numpy(), list(failed))).nonzero().squeeze(1)
    best = index_rows(observation.logits[:, 0], index).max(-1).values.cpu()  # NaN where any is
    return sorted(set(observation.rows.request[index[~best.isfinite()]].tolist()))


def _advance_states(
    pending: _PendingState, observation: Observation, selection: Selection, columns: Mapping[str, Any]
) -> dict[str, Tensor | Column]:
    """The state columns of a processor for the new rows; `columns` holds those already updated."""
    rows, lines, count = observation.rows, observation.logits.shape[1], len(selection.tokens)
    parents = torch.arange(count) if selection.parents is None else selection.parents
    old: dict[str, Tensor | Column] = {
        name: columns[name] if name in columns else take_rows(rows.columns[name], parents)
        for name in pending.processor.state
    }
    position = torch.full((len(rows),), -1)  # of each row among those that use the processor
    users = torch.arange(len(rows)) if pending.row_index is None else pending.row_index
    position[users] = torch.arange(len(users))
    index = (position[parents] >= 0).nonzero().squeeze(1)  # the new rows that use it
    if not len(index):
        return old
    line = position[parents[index]] * lines
    if selection.accepted is not None:
        line = line + selection.accepted[index]
    new = pending.processor.advance(
        pending.context.take(line),
        index_rows(pending.before, line),
        index_rows(pending.after, line),
        index_rows(selection.tokens, index),
    )
    return {name: _write_rows(value, index, new[name], count) for name, value in old.items()}


def _write_rows(
    column: Tensor | Column, index: Tensor, values: Tensor | Column, count: int
) -> Tensor | Column:
    """A copy of a column of `count` rows, with the rows `index` (host) replaced by `values`."""
    if isinstance(column, Tensor):
        assert isinstance(values, Tensor)
        return column.index_copy(0, index.to(column.device), values.to(column.dtype))
    source = torch.arange(count)
    source[index] = count + torch.arange(len(index))
    return take_rows(concat_columns(column, values), source)
