"""One step of every method: propose -> forward -> process -> select -> commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import Model, RowCache
from descant.core.records import ForwardOutput, Hypothesis, Observation, Proposal, Selection
from descant.core.request_fault import RequestFault
from descant.core.rows import Rows, index_rows, stable_row_order, take_rows
from descant.engine.group_merge import merge_proposals, merge_selections, slice_group
from descant.engine.step_faults import Probe, StepFault, check_selection, drop_requests, forward_or_fault
from descant.engine.strategy_group import StrategyGroup

__all__ = ["Observe", "StepHooks", "run_step"]

Observe = Callable[[Observation], None]
Capture = Callable[[Rows, Sequence[tuple[int, Hypothesis]], Tensor], None]


class StepHooks(NamedTuple):
    """What follows a step besides its strategies.

    `capture` gets the sequences that ended, each with the fed row it continued, before the cache drops these
    rows, and how much of every fed row remains [R] (host).
    """

    observe: Observe | None = None
    capture: Capture | None = None
    errors: dict[int, Exception] | None = None  # of requests whose own code raised; None: errors are raised
    probe: Probe | None = None  # feeds the rows of one request alone, to find which one breaks a forward


def run_step(
    model: Model,
    cache: RowCache,
    rows: Rows,
    strategy_groups: Callable[[Rows], Sequence[StrategyGroup]],
    hooks: StepHooks = StepHooks(),  # noqa: B008 - immutable
) -> tuple[Rows, list[Selection]]:
    """Advance every row: one forward for all, one selection per strategy, one commit.

    Requests in `hooks.errors` at the end leave the table. Whatever is raised, the step has not happened.
    """
    groups = strategy_groups(rows)
    proposal = merge_proposals(rows, groups, cache)
    if proposal.parents is None:
        return _run_groups(model, cache, rows, proposal, groups, hooks)
    forked = rows.take(proposal.parents)
    cache.commit(proposal.parents, forked.cached_length)
    try:
        return _run_groups(model, cache, forked, proposal, strategy_groups(forked), hooks)
    except BaseException:
        # The first fork of a row has its index, so the others are dropped without a move.
        cache.commit(torch.arange(len(rows)), rows.cached_length)
        raise


def _run_groups(
    model: Model,
    cache: RowCache,
    rows: Rows,
    proposal: Proposal,
    groups: Sequence[StrategyGroup],
    hooks: StepHooks,
) -> tuple[Rows, list[Selection]]:
    """Forward, selection and commit of rows that are in the cache as they are proposed."""
    if hooks.probe is None:
        output = model.forward(rows, proposal, cache)
    else:
        output = forward_or_fault(model, hooks.probe, rows, proposal, cache)
    restore = [group.checkpoint() for group in groups if group.checkpoint is not None]
    try:
        chosen = [
            (group.index, _select(group, *slice_group(rows, proposal, output, group.index), hooks))
            for group in groups
        ]
        selection = merge_selections(rows, chosen)
        if selection.parents is not None:
            selection = _minimise_moves(selection, selection.parents, len(rows))
        next_rows = _append_tokens(rows, proposal, selection)
        if hooks.capture is not None:
            ended = [
                (row if index is None else int(index[row]), sequence)
                for index, one in chosen
                for row, sequence in one.finished_sequences
            ]
            if ended:
                hooks.capture(rows, ended, _kept_lengths(rows, selection.parents, next_rows))
        cache.commit(selection.parents, next_rows.cached_length)
    except BaseException:
        for function in restore:
            function()
        raise
    return next_rows, [one for _, one in chosen]


def _select(
    group: StrategyGroup, rows: Rows, proposal: Proposal, output: ForwardOutput, hooks: StepHooks
) -> Selection:
    """Process the logits of a group, let its strategy select, and show both to its observers."""
    scores = group.process(rows, proposal, output.logits)
    raw = output.logits if output.base_logits is None else output.base_logits
    observe = hooks.observe
    preview = getattr(observe, "preview", None)
    if preview is not None and proposal.parents is None and proposal.drafts is None:
        preview(Observation(rows, raw, scores, output))
    process_rows = partial(group.process_subset, rows, scores)
    processed = ForwardOutput(scores, output.states, output.base_logits, output.row_index, process_rows)
    selection = None
    try:
        selection = group.strategy.select(rows, proposal, processed)
        check_selection(selection, rows)
    except RequestFault as fault:
        if hooks.errors is None:
            raise fault.cause from None
        raise StepFault({fault.request: fault.cause}) from fault
    except Exception as error:
        selection = None
        group.record_error(rows.request, error)
    if hooks.errors:
        selection = drop_requests(selection, rows, hooks.errors)
    assert selection is not None  # else there is an error
    observation = Observation(rows, raw, scores, output, selection.recorded_lines)
    if observe is not None:
        observe(observation)
    if group.traces is not None:
        observation = observation._replace(processor_traces=tuple(group.traces))
        group.traces.clear()
    selection = group.observe(observation, proposal, selection)
    # The state of a processor advances in `observe`, and may fail there.
    return drop_requests(selection, rows, hooks.errors) if hooks.errors else selection


def _kept_lengths(rows: Rows, parents: Tensor | None, next_rows: Rows) -> Tensor:
    """How many positions of each fed row its children keep [R]; all that are cached, if it has none."""
    if parents is None:
        return next_rows.cached_length
    return rows.cached_length.scatter(0, parents, next_rows.cached_length)


def _minimise_moves(selection: Selection, parents: Tensor, rows: int) -> Selection:
    """The same selection of the rows `parents`, ordered so that as few rows as possible move."""
    order = stable_row_order(parents, rows)
    if order is None:
        return selection
    index = order.numpy()  # torch takes several times as long to index a short column
    return Selection(
        index_rows(selection.tokens, order),
        torch.from_numpy(parents.numpy()[index]),
        None if selection.accepted is None else selection.accepted[order],
        None if selection.slot is None else torch.from_numpy(selection.slot.numpy()[index]),
        {name: take_rows(value, order) for name, value in selection.columns.items()},
        selection.emit_mode if isinstance(selection.emit_mode, bool) else selection.emit_mode[order],
    )


def _append_tokens(rows: Rows, proposal: Proposal, selection: Selection) -> Rows:
    """The kept rows with their accepted drafts and next token; all but that token is cached."""
    parents = selection.parents
    next_rows = rows if parents is None else rows.take(parents, selection.columns)
    fields: dict[str, Any] = {}
    if selection.slot is not None:
        fields["slot"] = selection.slot
    if selection.columns:  # some may be new
        fields["columns"] = {**next_rows.columns, **selection.columns}
    if selection.accepted is not None:
        length = next_rows.length + selection.accepted
        if proposal.drafts is not None:
            drafts = proposal.drafts if parents is None else index_rows(proposal.drafts, parents)
            next_rows = next_rows.append(drafts, length)
        else:
            next_rows = next_rows.replace(length=length)
    if selection.emit_mode is True:
        return next_rows.advance(selection.tokens, **fields)
    if selection.emit_mode is False:
        return next_rows.replace(cached_length=next_rows.position, **fields)
    cached = next_rows.position + selection.emit_mode.clamp(max=0)
    length = next_rows.length + selection.emit_mode.clamp(min=0)
    return next_rows.append(selection.tokens[:, None], length, cached_length=cached, **fields)
