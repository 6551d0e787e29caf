"""One step of every method: propose -> forward -> process -> select -> commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from descant.core.records import Hypothesis, Observation, Proposal, Selection
from descant.core.rows import Rows, pick, settle, taken
from descant.engine.strategy_group import Lane, joined, narrow, proposed

if TYPE_CHECKING:
    from descant.core.interfaces import Cache, Model

__all__ = ["step"]


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
    proposal = proposed(rows, present, cache)
    if proposal.parents is not None:
        rows = rows.take(proposal.parents)
        cache.commit(proposal.parents, rows.cached)
        present = lanes(rows)

    output = model.forward(rows, proposal, cache)

    chosen: list[tuple[Tensor | None, Selection]] = []
    for lane in present:
        mine, tried, heard = narrow(rows, proposal, output, lane.index)
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

    selection = _settled(joined(rows, chosen), len(rows))
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
        {name: taken(value, order) for name, value in selection.columns.items()},
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
