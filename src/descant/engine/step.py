"""One step of every method: propose -> forward -> process -> select -> commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from descant.core.records import Hypothesis, Observation, Proposal, Selection
from descant.core.rows import Rows, index_rows, stable_row_order, take_rows
from descant.engine.strategy_group import StrategyGroup, merge_proposals, merge_selections, slice_group

if TYPE_CHECKING:
    from descant.core.interfaces import Model, RowCache

__all__ = ["run_step"]


def run_step(
    model: Model,
    cache: RowCache,
    rows: Rows,
    lanes: Callable[[Rows], Sequence[StrategyGroup]],
    observe: Callable[[Observation], None] | None = None,
    retire: Callable[[Rows, Sequence[tuple[int, Hypothesis]], Tensor], None] | None = None,
) -> tuple[Rows, list[Selection]]:
    """Advance every row: one forward for all, one choice per strategy, one commit.

    `retire` is shown the sequences that ended, each with the fed row it continued, while the cache still has
    these rows, and how much of every fed row goes on [R] (host).
    """
    present = lanes(rows)
    proposal = merge_proposals(rows, present, cache)
    if proposal.parents is not None:
        rows = rows.take(proposal.parents)
        cache.commit(proposal.parents, rows.cached_length)
        present = lanes(rows)

    output = model.forward(rows, proposal, cache)

    chosen: list[tuple[Tensor | None, Selection]] = []
    for lane in present:
        mine, tried, heard = slice_group(rows, proposal, output, lane.index)
        scores = lane.process(mine, tried, heard.logits)
        asked = partial(lane.process_subset, mine, scores)
        selected = lane.strategy.select(mine, tried, heard._replace(logits=scores, process_rows=asked))
        raw = heard.logits if heard.base_logits is None else heard.base_logits
        seen = Observation(mine, raw, scores, heard, selected.recorded_lines)
        if observe is not None:
            observe(seen)
        if lane.traces is not None:
            seen = seen._replace(processor_traces=tuple(lane.traces))
            lane.traces.clear()
        chosen.append((lane.index, lane.observe(seen, tried, selected)))

    selection = _minimise_moves(merge_selections(rows, chosen), len(rows))
    kept = _append_tokens(rows, proposal, selection)
    if retire is not None:
        ended = [
            (row if index is None else int(index[row]), sequence)
            for index, one in chosen
            for row, sequence in one.finished_sequences
        ]
        if ended:
            retire(rows, ended, _kept_lengths(rows, selection.parents, kept))
    cache.commit(selection.parents, kept.cached_length)
    return kept, [one for _, one in chosen]


def _kept_lengths(rows: Rows, parents: Tensor | None, kept: Rows) -> Tensor:
    """How many positions of each fed row the rows that continue it keep [R]; what it had, where none does."""
    if parents is None:
        return kept.cached_length
    return rows.cached_length.scatter(0, parents, kept.cached_length)


def _minimise_moves(selection: Selection, rows: int) -> Selection:
    """The same selection with as few rows moved as can be."""
    if selection.parents is None:
        return selection
    order = stable_row_order(selection.parents, rows)
    if order is None:
        return selection
    return Selection(
        index_rows(selection.tokens, order),
        selection.parents[order],
        None if selection.accepted is None else selection.accepted[order],
        None if selection.slot is None else selection.slot[order],
        {name: take_rows(value, order) for name, value in selection.columns.items()},
        selection.emit_mode if isinstance(selection.emit_mode, bool) else selection.emit_mode[order],
    )


def _append_tokens(rows: Rows, proposal: Proposal, selection: Selection) -> Rows:
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
            kept = kept.append(
                proposal.drafts if parents is None else index_rows(proposal.drafts, parents), length
            )
        else:
            kept = kept.replace(length=length)
    if selection.emit_mode is True:
        return kept.advance(selection.tokens, **fields)
    if selection.emit_mode is False:
        return kept.replace(cached_length=kept.position, **fields)
    cached = kept.position + selection.emit_mode.clamp(max=0)
    length = kept.length + selection.emit_mode.clamp(min=0)
    return kept.append(selection.tokens[:, None], length, cached_length=cached, **fields)
