"""One step of every method: propose -> forward -> process -> select -> commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import Model, PromptChunk, RowCache
from descant.core.records import ForwardOutput, Hypothesis, Observation, Proposal, RequestFault, Selection
from descant.core.rows import Rows, index_rows, stable_row_order, take_rows
from descant.engine.step.group_merge import merge_proposals, merge_selections, slice_group
from descant.engine.step.next_forward import NextForward
from descant.engine.step.strategy_group import StrategyGroup
from descant.errors import InputError
from descant.kv_cache.row_views import row_subset

Observe = Callable[[Observation], None]
Capture = Callable[[Rows, Sequence[tuple[int, Hypothesis]], Tensor], None]
Probe = Callable[[Rows, Proposal, RowCache], object]


class StepHooks(NamedTuple):
    """Followers of a step besides its strategies.

    `capture` gets the sequences that ended, each with the fed row it continued, before the cache drops these
    rows, and how much of every fed row remains [R] (host).
    """

    observe: Observe | None = None
    capture: Capture | None = None
    probe: Probe | None = None  # feeds the rows of one request alone, to find which one breaks a forward
    chunks: Sequence[PromptChunk] = ()  # that the forward of a `PackingModel` feeds beside the rows
    next_forward: NextForward | None = None  # launched in this step, or in the one before; None: neither


def run_step(
    model: Model,
    cache: RowCache,
    rows: Rows,
    strategy_groups: Callable[[Rows], Sequence[StrategyGroup]],
    hooks: StepHooks = StepHooks(),  # noqa: B008 - immutable
) -> tuple[Rows, list[Selection]]:
    """Advance every row: one forward for all, one selection per strategy, one commit.

    Whatever is raised, the step has not happened; `RequestFault` names the requests that cannot take part.
    """
    groups, fed, following = strategy_groups(rows), rows, hooks.next_forward
    proposal = groups[0].propose(rows, cache) if len(groups) == 1 else merge_proposals(rows, groups, cache)
    launched = None if following is None else following.take(rows, proposal, cache)
    if proposal.parents is not None:
        fed = rows.take(proposal.parents)
        cache.commit(proposal.parents, fed.cached_length)
    restore, selections, observations = list[Callable[[], None]](), list[Selection](), list[Observation]()
    try:
        if proposal.parents is not None:
            groups = strategy_groups(fed)
        try:
            chunks: Mapping[str, Any] = {"chunks": hooks.chunks} if hooks.chunks else {}
            output = model.forward(fed, proposal, cache, **chunks) if launched is None else launched
            if following is not None and len(groups) == 1:
                output = output._replace(launch_next=partial(following.launch, model, cache, fed))
                restore.append(partial(following.drop, cache, fed))
            if hooks.probe is not None:
                check_logits(output, fed, proposal)
        except Exception:
            if hooks.probe is None:
                raise
            output = retry_forward(model, hooks.probe, fed, proposal, cache)
        for group in groups:
            if group.checkpoint is not None:
                restore.append(group.checkpoint())
            step = fed, proposal, output
            step = step if group.index is None else slice_group(*step, group.index)
            selection, observation = group.select(*step, getattr(hooks.observe, "preview", None))
            selections.append(selection)
            observations.append(observation)
        selection = selections[0] if len(groups) == 1 else merge_selections(fed, groups, selections)
        if selection.parents is not None and len(selection.parents) > 0:
            selection = _minimise_moves(selection, selection.parents, len(fed))
        if hooks.observe is not None:
            for observation in observations:
                hooks.observe(observation)
        next_rows = _append_tokens(fed, proposal, selection, None if following is None else following.rows)
        lengths = next_rows.cached_length if following is None else following.settle(selection, next_rows)
        if hooks.capture is not None:
            _capture_ended(hooks.capture, fed, groups, selections, (selection.parents, lengths))
        cache.commit(selection.parents, lengths)
    except BaseException:
        for function in restore:
            function()
        if proposal.parents is not None:
            # The first fork of a row has its index, so the others are dropped without a move.
            cache.commit(torch.arange(len(rows)), rows.cached_length)
        raise
    return next_rows, selections


def _capture_ended(
    capture: Capture,
    rows: Rows,
    groups: Sequence[StrategyGroup],
    selections: Sequence[Selection],
    remaining: tuple[Tensor | None, Tensor],
) -> None:
    """Capture the sequences that end; `remaining` are the fed row of each new row, and what it holds."""
    ended = [
        (row if group.index is None else int(group.index[row]), sequence)
        for group, selection in zip(groups, selections, strict=True)
        for row, sequence in selection.finished_sequences
    ]
    if not ended:
        return
    parents, lengths = remaining  # all that are cached of a row without children
    if parents is not None:
        lengths = rows.cached_length.scatter(0, parents, lengths)
    capture(rows, ended, lengths)


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


def _append_tokens(rows: Rows, proposal: Proposal, selection: Selection, fed_next: Rows | None) -> Rows:
    """The kept rows with their accepted drafts and next token; all but that token is cached.

    `fed_next` are the rows with that token, if their next forward is launched already.
    """
    parents, before = selection.parents, rows if fed_next is None else fed_next
    next_rows = before if parents is None else before.take(parents, selection.columns)
    fields: dict[str, Any] = {}
    if selection.slot is not None:
        fields["slot"] = selection.slot
    if selection.columns:  # some may be new
        fields["columns"] = {**next_rows.columns, **selection.columns}
    if fed_next is not None:
        return next_rows.replace(**fields)
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


# ------------------------------------------------------------------------ forwards that raise
def forward_or_fault(
    model: Model, probe: Probe, rows: Rows, proposal: Proposal, cache: RowCache, **chunks: Any
) -> ForwardOutput:
    """The output of a forward; raises `RequestFault` for the requests that break it."""
    try:
        return check_logits(model.forward(rows, proposal, cache, **chunks), rows, proposal)
    except Exception:
        return retry_forward(model, probe, rows, proposal, cache)


def retry_forward(
    model: Model, probe: Probe, rows: Rows, proposal: Proposal, cache: RowCache
) -> ForwardOutput:
    """The output of a forward that has raised: a fault that does not come back is none.

    A forward writes only slots that no commit has accepted, so it can be repeated. `probe` feeds the rows of
    one request alone.
    """
    try:
        return check_logits(model.forward(rows, proposal, cache), rows, proposal)
    except Exception as error:
        raise RequestFault(_find_culprits(probe, rows, proposal, cache, error)) from error


def check_logits(output: ForwardOutput, rows: Rows, proposal: Proposal) -> ForwardOutput:
    """The output of a forward; raises if its logits do not have the shape that the proposal asks for."""
    lines = 1 if proposal.drafts is None else proposal.drafts.shape[1] + 1
    if output.logits.shape[:-1] != (rows.length.shape[0], lines):
        must = f"of a forward must have the shape [{len(rows)}, {lines}, V]"
        raise InputError("logits", must, output.logits)
    return output


def _find_culprits(
    probe: Probe, rows: Rows, proposal: Proposal, cache: RowCache, error: Exception
) -> dict[int, Exception]:
    """The requests whose forward raises by itself, each with its error; else the youngest request."""
    requests = sorted(set(rows.request.tolist()))
    culprits: dict[int, Exception] = {}
    for request in requests if len(requests) > 1 else ():
        index = (rows.request == request).nonzero().squeeze(1)
        try:
            probe(rows.take(index), proposal.take(index), row_subset(cache, index))
        except Exception as own:
            culprits[request] = own
    # If only the whole batch fails, for want of memory for one, it gets smaller until it does not.
    return culprits or {requests[-1]: error}
