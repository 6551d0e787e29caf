"""Early exit: the first layers of the target itself guess what the last will say."""

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


def check_early_exit(layers: int, facts: ModelTraits) -> None:
    """Raise for a model that cannot be left after so many layers."""
    name = "assistant_early_exit"
    if layers < 1:
        raise ConfigError(name, "must be >= 1", layers)
    if layers >= facts.num_layers:
        must = f"must be below {facts.num_layers}, the layers of the model"
        raise ConfigError(name, must, layers, "lower it")
    reasons = {
        "has an encoder, which is no part of its layers": facts.is_encoder_decoder,
        "has no output embeddings of its own": not facts.has_lm_head,
        "remembers more than keys and values, so its first layers cannot share what is remembered": (
            facts.cache_type == "recurrent"
        ),
        "remembers nothing, so its first layers have nothing to share": facts.cache_type == "none",
        "says by itself what it is fed, which may be all of it again": facts.prepares_own_inputs,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(name, f"has no meaning for a model that {reason}", layers, "leave it out")


class EarlyExit:
    """The target's first layers with its own head, which read and write the target's cache.

    What the target has read they need not read again. What they write lies where the verifying forward
    writes the same positions next. Elhoushi et al. 2024, arXiv 2404.16710.
    """

    is_model_free = False

    def __init__(self, shallow: Model, noise: NoiseSource, vocabulary: int) -> None:
        self.forwards = 0
        self._model = shallow
        self._draft_loop = DraftLoop(noise, vocabulary)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Know which rows began with embeddings, so that their tokens are counted from there on."""
        self._model.add_requests(
            requests, {name: lines for name, lines in inputs.items() if name == "inputs_embeds"}
        )

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget requests that have ended."""
        self._model.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Nothing to follow: the table's cache follows its rows."""

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        """Tokens that may follow each row, at most so many [R] (host); none before the target has read it."""
        place = torch.arange(len(rows)) if aid.row_index is None else aid.row_index
        held = rows.cached_length.clone()

        def ask(grown: Rows, lines: Tensor) -> Tensor:
            part = grown.replace(cached_length=held)
            part = part if len(lines) == len(part) else part.take(lines)
            self.forwards += 1
            heard = self._model.forward(part, Proposal(), row_subset(aid.cache, place[lines]))
            held[lines] = grown.position[lines]
            return heard.logits[:, 0]

        most = limit_to_positions(
            torch.where(held > 0, most, 0), rows.position, self._model.traits.max_positions
        )
        return self._draft_loop.run(rows, most, aid, ask)
