"""The rows of one strategy in a table, and the processors that run on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context, row_params
from descant.core.interfaces import (
    NO_DRAFTS,
    Array,
    DraftContext,
    Processor,
    RowCache,
    StatefulProcessor,
    StepObserver,
    Strategy,
    StrategyDefaults,
)
from descant.core.records import (
    ForwardOutput,
    Observation,
    ProcessorTrace,
    Proposal,
    RequestFault,
    Selection,
    Tokens,
)
from descant.core.rows import Column, Rows, concat_columns, index_rows, on_device, take_rows
from descant.decoding.processors.base import CallableProcessor
from descant.errors import InputError, format_value

Preview = Callable[[Observation], None]
ProcessorRows = tuple[Processor, Tensor | None]  # with the group's rows that use it (host); None: all


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
    """The rows of one strategy, and the processors that any of them uses, in order.

    An error of a strategy is raised as a `RequestFault` of its requests. Those of processors and criteria are
    noted in `errors`, and the step goes on without their requests: no other user code runs twice.
    """

    strategy: Strategy
    index: Tensor | None  # [N] (host); None: the whole table
    processors: Sequence[ProcessorRows]
    observers: Sequence[StepObserver] = ()
    device_params: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by index of the processor
    traces: list[ProcessorTrace] | None = None  # of this step; None: the session does not trace
    errors: dict[int, Exception] | None = None  # by request; None: errors of processors are raised
    # Of the strategy's state outside its columns; None: it has none.
    checkpoint: Callable[[], Callable[[], None]] | None = field(init=False)
    _proposes: bool = field(init=False)
    _is_processed: bool = field(init=False)  # else there are none, or the strategy runs them itself
    _pending_states: list[_PendingState] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A group is made whenever the table changes, and `isinstance` of a protocol is slow.
        self.checkpoint = getattr(self.strategy, "checkpoint", None)
        # Most strategies draft nothing, and keep what the defaults propose.
        propose = getattr(self.strategy, "propose", None)
        self._proposes = getattr(propose, "__func__", None) is not StrategyDefaults.propose
        self._is_processed = len(self.processors) > 0 and not self.strategy.has_groups

    def propose(self, rows: Rows, cache: RowCache) -> Proposal:
        """The proposal of the group's strategy for its rows."""
        if not self._proposes:
            return NO_DRAFTS
        try:
            proposal = self.strategy.propose(rows, DraftContext(self.process_draft_logits, cache, self.index))
            if proposal.drafts is not None or proposal.parents is not None:
                check_proposal(proposal, rows)
        except RequestFault:
            raise
        except Exception as error:
            raise RequestFault(dict.fromkeys(rows.request.tolist(), error)) from error
        return proposal

    def select(
        self, rows: Rows, proposal: Proposal, output: ForwardOutput, preview: Preview | None = None
    ) -> tuple[Selection, Observation]:
        """The selection of the strategy by the processed logits, and what is observed of it."""
        scores = self.process(rows, proposal, output.logits)
        raw = output.logits if output.base_logits is None else output.base_logits
        if preview is not None and proposal.parents is None and proposal.drafts is None:
            preview(Observation(rows, raw, scores, output))
        process_rows = partial(self.process_subset, rows, scores)
        processed = output._replace(logits=scores, process_rows=process_rows)
        try:
            selection = self.strategy.select(rows, proposal, processed)
            if selection.parents is not None or selection.tokens.shape != rows.length.shape:
                check_selection(selection, rows)
        except RequestFault:
            raise
        except Exception as error:
            raise RequestFault(dict.fromkeys(rows.request.tolist(), error)) from error
        observation = observed = Observation(rows, raw, scores, output, selection.recorded_lines)
        if self._pending_states:
            selection = self._advance_states(observation, selection)
        if self.errors:
            selection = drop_requests(selection, rows, self.errors)
        emitted = selection.emitted
        if emitted is not None and emitted.finished:
            for processor, _ in self.processors:
                if isinstance(processor, CallableProcessor):
                    processor.record_finished(rows, emitted)
        if self.traces is not None:
            observed = observation._replace(processor_traces=tuple(self.traces))
            self.traces.clear()
        for observer in self.observers:
            selection = observer.observe(observed, proposal, selection)
        if selection.failed:
            selection = selection._replace(nonfinite=_nonfinite_requests(observation, selection.failed))
        return selection, observation

    # -------------------------------------------------------------------- processors
    def process(self, rows: Rows, proposal: Proposal, logits: Tensor) -> Tensor:
        """The scores that the strategy reads [R, K + 1, V]."""
        scores = logits.log_softmax(-1) if self.strategy.needs_log_probs else logits
        self._pending_states.clear()
        if self.traces is not None:
            self.traces.clear()
        if not self._is_processed:
            return scores
        return self._run(self.processors, rows, proposal.drafts, scores, self.device_params)

    def process_draft_logits(self, rows: Rows, logits: Tensor) -> Tensor:
        """The scores of logits [R, V] that follow the rows; no processor state advances."""
        scores = logits.log_softmax(-1) if self.strategy.needs_log_probs else logits
        if not self.processors:
            return scores
        return self._run(self.processors, rows, None, scores[:, None], self.device_params)[:, 0]

    def process_subset(
        self, rows: Rows, scores: Tensor, index: Tensor, columns: Mapping[str, Tensor]
    ) -> Tensor:
        """The processed scores [N, V] of the rows `index` (host), with further columns [N, ...]."""
        if not self.processors:
            return index_rows(scores[:, 0], index)
        position = torch.full((len(rows),), -1)  # of each row in `index`
        position[index] = torch.arange(len(index))
        processors: list[ProcessorRows] = []
        for processor, users in self.processors:
            selected = None if users is None else position[users][position[users] >= 0]
            if selected is None or len(selected):
                processors.append((processor, selected))
        part = rows.take(index)
        part = part.replace(columns={**part.columns, **columns}, version=object())
        pending, self._pending_states = self._pending_states, []
        traces, self.traces = self.traces, None if self.traces is None else []
        result = self._run(processors, part, None, index_rows(scores[:, :1], index), {})
        if traces is not None:
            call_index = 1 + max((trace.call_index for trace in traces), default=0)
            for trace in self.traces or ():
                line_index = index if trace.line_index is None else index[trace.line_index]
                traces.append(trace._replace(line_index=line_index, call_index=call_index))
        for state in self._pending_states:
            row_index = index if state.row_index is None else index[state.row_index]
            pending.append(state._replace(row_index=row_index))
        self._pending_states, self.traces = pending, traces
        return result[:, 0]

    def _run(
        self,
        processors: Sequence[ProcessorRows],
        rows: Rows,
        drafts: Tensor | None,
        scores: Tensor,
        device_params: dict[int, dict[str, Tensor]],
    ) -> Tensor:
        """The scores [R, K + 1, V] after these processors, whose states are pending then."""
        context = Context.from_rows(rows, drafts, device_params.setdefault(-1, {}))
        lines, flat = scores.shape[1], scores.flatten(0, 1)
        for number, (processor, index) in enumerate(processors):
            part, before, line_index = context, flat, None
            if index is not None:
                line_index = index if lines == 1 else (index[:, None] * lines + torch.arange(lines)).flatten()
                cache = device_params.setdefault(number, {}) if lines == 1 else None
                part, before = context.take(line_index, cache), index_rows(flat, line_index)
            try:
                if getattr(processor, "state", None):
                    stateful: Any = processor
                    after = self._process_stateful(stateful, index, part, before, drafts)
                else:
                    after = processor.process(part, before)
                    given = before.dtype, before.shape
                    if type(after) is not Tensor or (after.dtype, after.shape) != given:
                        after = _checked_scores(processor, before, after)
            except Exception as error:
                self._note_error(rows.request if index is None else rows.request[index], error)
                after = before
            if self.traces is not None:
                self.traces.append(ProcessorTrace(processor, line_index, before, after))
            flat = (
                after if line_index is None else flat.index_copy(0, on_device(line_index, flat.device), after)
            )
        return flat.view_as(scores)

    def _process_stateful(
        self,
        processor: StatefulProcessor,
        index: Tensor | None,
        context: Context,
        before: Tensor,
        drafts: Tensor | None,
    ) -> Tensor:
        """The scores of a stateful processor, whose state advances with each draft."""
        if drafts is None:
            after = _checked_scores(processor, before, processor.process(context, before))
            self._pending_states.append(_PendingState(processor, index, context, before, after))
            return after
        drafts, width = drafts if index is None else index_rows(drafts, index), drafts.shape[1]
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

    def _advance_states(self, observation: Observation, selection: Selection) -> Selection:
        """The selection with the state of each stateful processor after its tokens."""
        columns = dict(selection.columns)
        for pending in self._pending_states:
            # Two processors may have a column of one name, each for its own rows.
            try:
                columns |= _advance_states(pending, observation, selection, columns)
            except Exception as error:
                index, requests = pending.row_index, observation.rows.request
                self._note_error(requests if index is None else requests[index], error)
        self._pending_states.clear()
        return selection._replace(columns=columns)

    def _note_error(self, requests: Tensor, error: Exception) -> None:
        """Note the error of the requests [N] (host) whose own code has raised it; raises it if none may."""
        if self.errors is None:
            raise error
        for request in requests.tolist():
            self.errors.setdefault(request, error)


def _checked_scores(processor: Processor, before: Tensor, after: object) -> Tensor:
    """The result of a processor, as scores of the dtype it was given; raises if these are no scores."""
    if isinstance(after, Tensor) and after.shape == before.shape and after.is_floating_point():
        return after.to(before.dtype)  # of one dtype whatever rows it processes
    must = f"{type(processor).__name__} must return a floating-point tensor of shape {list(before.shape)}"
    raise InputError("logits_processor", must, after, "return the scores")


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
        return column.index_copy(0, on_device(index, column.device), values.to(column.dtype))
    source = torch.arange(count)
    source[index] = count + torch.arange(len(index))
    return take_rows(concat_columns(column, values), source)


# ------------------------------------------------------------------------ what a strategy returns
def check_proposal(proposal: Proposal, rows: Rows) -> None:
    """Raise for a proposal that does not fit the rows."""
    parents, drafts, counts, num_rows = proposal.parents, proposal.drafts, proposal.num_drafts, len(rows)
    if parents is not None:
        values, num_rows = parents.numpy(), len(parents)
        if not set(range(len(rows))) == set(values.tolist()):
            raise InputError("parents", f"of a proposal must hold every row (0 to {len(rows) - 1})", parents)
    if drafts is None:
        return
    if drafts.ndim != 2 or len(drafts) != num_rows or drafts.is_floating_point():
        raise InputError("drafts", f"must be token ids [{num_rows}, K]", drafts)
    if counts is not None and (
        len(counts) != num_rows or not 0 <= counts.numpy().min() <= counts.numpy().max() <= drafts.shape[1]
    ):
        raise InputError("num_drafts", f"must be from 0 to {drafts.shape[1]} for {num_rows} rows", counts)


def check_selection(selection: Selection, rows: Rows) -> None:
    """Raise for a selection that does not fit the fed rows, or has more rows of a request than planned."""
    tokens, parents, num_rows = selection.tokens, selection.parents, len(rows)
    if parents is None and tokens.shape == (num_rows,):
        return
    if tokens.ndim != 1:
        raise InputError("tokens", "of a selection must be a tensor [R']", tokens)
    if parents is None:
        raise InputError("tokens", f"of a selection must have one entry per row ({num_rows})", tokens)
    values = parents.numpy()
    if len(values) != len(tokens) or (len(values) and not 0 <= values.min() <= values.max() < num_rows):
        must = f"of a selection must hold a fed row (0 to {num_rows - 1}) for each of {len(tokens)} tokens"
        raise InputError("parents", must, format_value(parents))
    limits = row_params(rows).values.get("max_rows")
    if isinstance(limits, Tensor):  # a recipe chooses
        counts = Counter(rows.request[parents].tolist())
        for request, limit in zip(rows.request.tolist(), limits.tolist(), strict=True):
            if 0 <= limit < counts[request]:
                must = f"must be the most rows that the strategy has for a request, it is {limit}"
                do = 'have its `params` return it, as `{"max_rows": 4}`'
                raise RequestFault({request: InputError("max_rows", must, counts[request], do)})


def drop_requests(selection: Selection, rows: Rows, dropped: Collection[int]) -> Selection:
    """A selection of the fed rows without these requests."""
    parents = torch.arange(len(rows)) if selection.parents is None else selection.parents
    index = _remaining(rows.request[parents], dropped)
    fields: dict[str, Any] = {
        name: [request for request in getattr(selection, name) if request not in dropped]
        for name in ("finished", "failed")
    }
    for name in ("tokens", "accepted", "slot", "emit_mode", "host_tokens"):
        value = getattr(selection, name)
        if isinstance(value, Tensor):
            fields[name] = index_rows(value, index)
    ended = [entry for entry in selection.finished_sequences if int(rows.request[entry[0]]) not in dropped]
    return selection._replace(
        parents=parents[index],
        columns={name: take_rows(value, index) for name, value in selection.columns.items()},
        emitted=drop_tokens(selection.emitted, dropped),
        finished_sequences=ended,
        **fields,
    )


def drop_tokens(emitted: Tokens | None, dropped: Collection[int]) -> Tokens | None:
    """The emitted tokens without those of these requests; None: none is left."""
    if emitted is None or not dropped:
        return emitted
    index = _remaining(emitted.request, dropped)
    if len(index) == len(emitted.request):
        return emitted
    if not len(index):
        return None
    columns: dict[str, Any] = {"row": index}
    for name, value in emitted._asdict().items():
        if isinstance(value, Tensor):
            columns[name] = value[index]
    new_index = {old: new for new, old in enumerate(index.tolist())}
    finished = {new_index[old]: each for old, each in emitted.finished.items() if old in new_index}
    return emitted._replace(finished=finished, **columns)


def _remaining(requests: Tensor, dropped: Collection[int]) -> Tensor:
    """The indices of the entries [N] (host) that belong to other requests."""
    is_dropped: Array = np.isin(requests.numpy(), list(dropped))
    return torch.from_numpy(np.flatnonzero(~is_dropped))
