"""Tokens, positions and masks of one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, VisibleSlots
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows
from descant.models.forward_batches import ForwardBatch

__all__ = [
    "attention_mask",
    "fed_tokens",
    "full_tokens",
    "logit_positions",
    "needs_no_mask",
    "padded_embeds",
    "row_logits",
]


def fed_tokens(rows: Rows, proposal: Proposal, batch: ForwardBatch) -> Tensor:
    """The pending tokens and drafts of each row [N, T]; the content after a row's last one is arbitrary."""
    index, width = batch.rows, batch.width
    tokens = rows.tokens if index is None else index_rows(rows.tokens, index)
    device = tokens.device
    start = batch.cached_length - (rows.offset if index is None else rows.offset[index])
    columns = start.to(device)[:, None]
    if width != 1:
        columns = columns + torch.arange(width, device=device)
    fed = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
    if proposal.drafts is None:
        return fed
    drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
    num_pending = batch.fed_length - proposal.draft_counts(index)
    draft_index = torch.arange(width, device=device) - num_pending.to(device)[:, None]
    return torch.where(draft_index >= 0, drafts.gather(1, draft_index.clamp(0, drafts.shape[1] - 1)), fed)


def full_tokens(rows: Rows, proposal: Proposal, batch: ForwardBatch) -> Tensor:
    """All tokens of rows with their drafts [N, L], aligned at the right; 0 for positions without a token."""
    index, length = batch.rows, batch.read_length
    tokens = rows.tokens if index is None else index_rows(rows.tokens, index)
    if batch.start is not None and proposal.drafts is None and not rows.offset.any():
        return tokens[:, :length]
    offsets = rows.offset if index is None else rows.offset[index]
    num_tokens = rows.length if index is None else rows.length[index]
    num_drafts = torch.as_tensor(proposal.draft_counts(index))
    known = torch.cat((tokens, tokens.new_zeros(len(tokens), proposal.width)), 1)
    if proposal.drafts is not None:
        drafts = proposal.drafts if index is None else index_rows(proposal.drafts, index)
        columns = num_tokens[:, None] + torch.arange(proposal.width)
        known = known.scatter(1, columns.to(known.device), drafts)
    padding = length - (offsets + num_tokens + num_drafts)
    source = torch.arange(length) - (padding + offsets)[:, None]
    aligned = known.gather(1, source.clamp(min=0).to(known.device))
    return aligned.masked_fill((source < 0).to(known.device), 0)


def attention_mask(
    positions: Tensor,
    read_length: int,
    visible: Mapping[str, VisibleSlots],
    traits: ModelTraits,
    dtype: torch.dtype | None,
) -> Tensor | dict[str, Tensor]:
    """The slots that each fed position [N, T] attends to [N, 1, T, S], by layer type if there are several.

    The mask is additive in `dtype`, which eager attention needs; None: it is bool.
    """
    device, width = positions.device, positions.shape[1]
    masks = {}
    for layer_type, window in traits.sliding_windows.items():
        own_slots, num_slots = positions, read_length  # by default slot `p` holds position `p`
        if (slots := visible.get(layer_type)) is not None:
            past = slots.past_lengths.to(device, non_blocking=True)
            own_slots, num_slots = past[:, None] + torch.arange(width, device=device), slots.num_slots
        all_slots = torch.arange(num_slots, device=device)
        mask = all_slots <= own_slots[..., None]  # [N, T, S]
        if window is not None:
            mask = mask & (all_slots > own_slots[..., None] - window)
        if dtype is not None:
            additive = torch.zeros(mask.shape, dtype=dtype, device=device)
            mask = additive.masked_fill(~mask, torch.finfo(dtype).min)
        masks[layer_type] = mask[:, None]
    return next(iter(masks.values())) if len(masks) == 1 else masks


def needs_no_mask(visible: Mapping[str, VisibleSlots], width: int) -> bool:
    """Whether all rows have equally many visible slots, none of them stale."""
    return all(
        slots.num_slots == int(slots.past_lengths[0]) + width
        and bool((slots.past_lengths == slots.past_lengths[0]).all())
        for slots in visible.values()
    )


def row_logits(logits: Tensor, index: Tensor) -> Tensor:
    """The logits of each row at the positions `index` [N, K + 1] (host)."""
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits[rows, index.to(logits.device)]


def logit_positions(
    proposal: Proposal, batch: ForwardBatch, traits: ModelTraits, device: torch.device, is_multi_device: bool
) -> tuple[int | Tensor | list[int] | None, Tensor | None]:
    """The `logits_to_keep` argument, and the index of each row's logits among those [N, K + 1]."""
    last = batch.fed_length - proposal.draft_counts(batch.rows) - 1
    positions = (last[:, None] + torch.arange(proposal.width + 1)).clamp(max=batch.width - 1)
    if not traits.supports_logits_to_keep:
        return None, positions
    if bool((last == last[0]).all()) and int(last[0]) + proposal.width + 1 == batch.width:
        return proposal.width + 1, None
    distinct, index = torch.unique(positions, return_inverse=True)
    # The index must be on the device of the last layer or on the host; accelerate moves tensor arguments.
    return distinct.tolist() if is_multi_device else distinct.to(device), index


def padded_embeds(
    prompts: Sequence[Tensor | None], tokens: Tensor, batch: ForwardBatch, embed: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The prompt embeddings of rows, right-padded [N, T, D], with embedded tokens for rows that have none.

    None if no row has any.
    """
    if all(prompt is None for prompt in prompts):
        return None
    embeds = [
        embed(tokens[row, : int(batch.fed_length[row])]) if prompt is None else prompt
        for row, prompt in enumerate(prompts)
    ]
    return torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
