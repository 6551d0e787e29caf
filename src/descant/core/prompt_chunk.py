"""Chunks of prompts that are fed beside the rows of a step (Agrawal et al. 2023, SARATHI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from descant.core.cache_interfaces import RowCache
from descant.core.rows import Rows

__all__ = ["PackingModel", "PromptChunk"]


@dataclass(eq=False)
class PromptChunk:
    """The next tokens of a prompt, of which no logits are needed."""

    rows: Rows  # their pending tokens are fed
    cache: RowCache  # of these rows, in this order
    is_fed: bool = False


@runtime_checkable
class PackingModel(Protocol):
    """A model whose forwards can feed chunks of prompts beside the rows they are called for."""

    def can_pack(self, cache: RowCache) -> bool:
        """Whether rows of different length in this cache share a forward without padding."""
        ...

    def piggyback(self, chunks: Sequence[PromptChunk]) -> None:
        """Feed these chunks in the next packed forward, in place of those given before.

        A chunk that was fed says so. If that forward raises, none is.
        """
        ...
