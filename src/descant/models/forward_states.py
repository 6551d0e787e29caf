"""The states of a forward besides its logits: hidden states and attentions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from descant.core.records import Proposal
from descant.models.forward_batches import ForwardBatch

__all__ = ["collect_states"]

_STATE_NAMES = (
    "hidden_states",
    "attentions",
    "decoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
)


def collect_states(output: Any, proposal: Proposal, batch: ForwardBatch) -> Mapping[str, Any]:
    """The states of a model's output, with the rows and lengths they belong to."""
    states: dict[str, Any] = {name: output[name] for name in _STATE_NAMES if output.get(name) is not None}
    index = torch.arange(batch.num_rows) if batch.rows is None else batch.rows
    fed = batch.fed_length if batch.width > 1 else torch.ones_like(batch.cached_length)
    num_drafts = torch.as_tensor(proposal.draft_counts(batch.rows)).expand(len(index))
    return states | {
        "rows": index,
        "fed_length": fed,
        "num_drafts": num_drafts,
        "cached_length": batch.cached_length,
    }
