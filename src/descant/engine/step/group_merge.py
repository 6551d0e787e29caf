"""Proposals and selections of a table's strategy groups, merged and sliced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from descant.core.interfaces import RowCache
from descant.core.records import ForwardOutput, Proposal, Selection
from descant.core.rows import Column, Rows, concat_columns, index_rows, stable_row_order, take_rows
from descant.engine.step.strategy_group import StrategyGroup


def merge_proposals(rows: Rows, groups: Sequence[StrategyGroup], cache: RowCache) -> Proposal:
    """The proposals of all groups as one."""
    parts = [(group.index, group.propose(_group_rows(rows, group.index), cache)) for group in groups]
    if all(part.parents is None and part.drafts is None for _, part in parts):
        return Proposal()
    width = max(part.width for _, part in parts)
    group_parents = [_table_parents(part.parents, index, len(rows)) for index, part in parts]
    counts = [len(parent) for parent in group_parents]
    drafts = [
        rows.tokens.new_zeros(count, width)
        if part.drafts is None
        else torch.nn.functional.pad(part.drafts, (0, width - part.width))
        for (_, part), count in zip(parts, counts, strict=True)
    ]
    num_drafts = torch.cat(
        [
            torch.as_tensor(part.draft_counts()).expand(count)
            for (_, part), count in zip(parts, counts, strict=True)
        ]
    )
    probs = _merge_draft_probs([part for _, part in parts], drafts)
    # Groups are slices of one table, not blocks of it: rows keep their index unless any row forks.
    parents = torch.cat(group_parents)
    order = stable_row_order(parents, len(rows))
    if order is None:
        return Proposal(None, torch.cat(drafts), num_drafts, probs)
    probs = None if probs is None else index_rows(probs, order)
    return Proposal(parents[order], index_rows(torch.cat(drafts), order), num_drafts[order], probs)


def _table_parents(parents: Tensor | None, index: Tensor | None, rows: int) -> Tensor:
    """A group's parents as rows of the table."""
    index = torch.arange(rows) if index is None else index
    return index if parents is None else index[parents]


def _merge_draft_probs(parts: Sequence[Proposal], drafts: Sequence[Tensor]) -> Tensor | None:
    """The draft probabilities of all groups [R, K, V], one-hot for a group without; None: none has any."""
    size = max((part.draft_probs.shape[2] for part in parts if part.draft_probs is not None), default=0)
    if not size:
        return None
    merged = []
    for part, padded in zip(parts, drafts, strict=True):
        probs = part.draft_probs
        if probs is None:
            probs = torch.nn.functional.one_hot(padded, size).float()
        merged.append(torch.nn.functional.pad(probs, (0, 0, 0, padded.shape[1] - probs.shape[1])))
    return torch.cat(merged)


def _group_rows(rows: Rows, index: Tensor | None) -> Rows:
    """The rows of a group; their version lasts as long as the table's."""
    return rows if index is None else rows.take(index).replace(version=(rows.version, int(index[0])))


def slice_group(
    rows: Rows, proposal: Proposal, output: ForwardOutput, index: Tensor
) -> tuple[Rows, Proposal, ForwardOutput]:
    """The rows, drafts and logits of one group."""
    # No wider than the group's own drafts, whatever other groups draft.
    num_drafts = torch.as_tensor(proposal.draft_counts(index))
    width, part = int(num_drafts.max()), Proposal()
    if proposal.drafts is not None and width:
        probs = None if proposal.draft_probs is None else index_rows(proposal.draft_probs[:, :width], index)
        part = Proposal(None, index_rows(proposal.drafts[:, :width], index), num_drafts, probs)
    base = None if output.base_logits is None else index_rows(output.base_logits[:, : width + 1], index)
    logits = index_rows(output.logits[:, : width + 1], index)
    return _group_rows(rows, index), part, ForwardOutput(logits, output.states, base, index)


def merge_selections(
    rows: Rows, groups: Sequence[StrategyGroup], selections: Sequence[Selection]
) -> Selection:
    """The selections of all groups as one; a column that a group does not write follows its rows."""
    pairs = zip(groups, selections, strict=True)
    parents = [_table_parents(pair.parents, group.index, len(rows)) for group, pair in pairs]
    columns: dict[str, Tensor | Column] = {}
    for name in {name for selection in selections for name in selection.columns}:
        parts = [
            selection.columns[name]
            if name in selection.columns
            else take_rows(rows.columns[name], group_parents)
            for selection, group_parents in zip(selections, parents, strict=True)
        ]
        columns[name] = parts[0]
        for part in parts[1:]:
            columns[name] = concat_columns(columns[name], part)
    with_zeros = [
        (selection, torch.zeros_like(index)) for selection, index in zip(selections, parents, strict=True)
    ]
    return Selection(
        torch.cat([selection.tokens for selection in selections]),
        torch.cat(parents),
        torch.cat(
            [zeros if selection.accepted is None else selection.accepted for selection, zeros in with_zeros]
        ),
        torch.cat(
            [
                rows.slot[index] if selection.slot is None else selection.slot
                for selection, index in zip(selections, parents, strict=True)
            ]
        ),
        columns,
        torch.cat([zeros + selection.emit_mode for selection, zeros in with_zeros]),
    )
