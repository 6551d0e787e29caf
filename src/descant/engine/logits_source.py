"""What stands in for a model, its cache and its stop conditions where another engine has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from descant.core.interfaces import Array, ModelTraits, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.decoding.stopping.checker import StopChecker

__all__ = ["NO_CACHE", "LogitsSource", "NoStops", "logits_traits"]


class NoStops(StopChecker):
    """Ends no row."""

    def finish_reasons(
        self,
        rows: Rows,  # noqa: ARG002
        parents: Tensor | None,  # noqa: ARG002
        tokens: Tensor,  # noqa: ARG002
    ) -> Sequence[tuple[str, Array]]:
        """No reason for any row."""
        return []


def logits_traits(vocab_size: int, context_length: int | None) -> ModelTraits:
    """The traits of a decoder that another engine runs."""
    return ModelTraits(
        is_encoder_decoder=False,
        supports_position_ids=True,
        supports_logits_to_keep=True,
        supports_inputs_embeds=False,
        vocab_size=vocab_size,
        num_layers=1,
        attn_implementation="sdpa",
        sliding_windows={},
        max_positions=None,
        context_length=context_length,
    )


class LogitsSource:
    """In place of a model: its forward returns the logits of the batch."""

    network = None
    rank_group = None

    def __init__(self, traits: ModelTraits, device: torch.device) -> None:
        self.traits, self.device = traits, device
        self.logits: Tensor | None = None  # [N, 1, V]

    def new_cache(self) -> RowCache:
        """The other engine has the cache."""
        return NO_CACHE

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Nothing is fed."""

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Nothing is fed."""

    def set_output_states(self, states: Sequence[str]) -> None:
        """There are logits only."""

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:  # noqa: ARG002
        """The logits of the batch."""
        assert self.logits is not None
        return ForwardOutput(self.logits)


class EmptyCache:
    """In place of a cache: the other engine has it."""

    max_rewind: int | None = None
    capacity: int | None = None

    def __len__(self) -> int:
        return 0

    def extend(self, rows: int) -> None:
        """Nothing is stored."""

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """Nothing is stored."""


NO_CACHE: Final[RowCache] = EmptyCache()
