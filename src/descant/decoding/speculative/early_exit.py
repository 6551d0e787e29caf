"""Early exit: the target's first layers draft, all its layers verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import Model, ModelTraits, NoiseSource
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows
from descant.decoding.speculative.draft_loop import DraftLoop, limit_to_positions
from descant.errors import ConfigError
from descant.kv_cache.row_subset import row_subset

__all__ = ["EarlyExit", "check_early_exit"]


def check_early_exit(layers: int, traits: ModelTraits) -> None:
    """Raise if the model does not support an exit after this many layers."""
    name = "assistant_early_exit"
    if layers < 1:
        raise ConfigError(name, "must be >= 1", layers)
    if layers >= traits.num_layers:
        must = f"must be below the model's {traits.num_layers} layers"
        raise ConfigError(name, must, layers, "lower it")
    reasons = {
        "has an encoder": traits.is_encoder_decoder,
        "has no LM head": not traits.has_lm_head,
        "has recurrent state, which its first layers cannot share": traits.cache_type == "recurrent",
        "has no KV cache to share with its first layers": traits.cache_type == "none",
        "prepares its own inputs": traits.prepares_own_inputs,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(name, f"is not supported for a model that {reason}", layers, "remove it")


class EarlyExit:
    """The target's first layers with its own LM head, reading and writing the target's cache.

    They reuse the target's cached positions. What they write is overwritten by the verifying forward at the
    same positions. Elhoushi et al. 2024, arXiv 2404.16710.
    """

    is_model_free = False

    def __init__(self, truncated_model: Model, noise: NoiseSource, vocabulary: int) -> None:
        self.forwards = 0
        self._model = truncated_model
        self._draft_loop = DraftLoop(noise, vocabulary)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Pass on `inputs_embeds`, so that positions count from the end, and what is beside every token."""
        traits = self._model.traits
        known = traits.input_names if traits.has_aligned_inputs else {"inputs_embeds"}
        self._model.add_requests(requests, {name: values for name, values in inputs.items() if name in known})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self._model.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Nothing to do: the target's cache follows the rows."""

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """Draft up to `max_drafts` [R] (host) tokens after each row; none before its prefill."""
        cache_rows = torch.arange(len(rows)) if context.row_index is None else context.row_index
        cached = rows.cached_length.clone()

        def next_logits(grown: Rows, index: Tensor) -> Tensor:
            fed_rows = grown.replace(cached_length=cached)
            fed_rows = fed_rows if len(index) == len(fed_rows) else fed_rows.take(index)
            self.forwards += 1
            output = self._model.forward(fed_rows, Proposal(), row_subset(context.cache, cache_rows[index]))
            cached[index] = grown.position[index]
            return output.logits[:, 0]

        max_drafts = limit_to_positions(
            torch.where(cached > 0, max_drafts, 0), rows.position, self._model.traits.max_positions
        )
        return self._draft_loop.run(rows, max_drafts, context, next_logits)
