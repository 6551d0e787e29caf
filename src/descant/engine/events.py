"""What an engine reports: tokens, finished and failed requests, and its own state."""

from __future__ import annotations

from dataclasses import dataclass

from descant.core.records import Hypothesis, Tokens
from descant.errors import DescantError
from descant.kv_cache.cached_row import CachedRow
from descant.kv_cache.prefix_cache import PrefixReport

__all__ = ["Event", "Failed", "Finished", "Report", "Tokens"]


@dataclass(frozen=True)
class Finished:
    """A request has ended; its sequences, best first or in the order of their slots."""

    request: int
    hypotheses: list[Hypothesis]
    # The keys and values of each sequence without its last token, where the request asks for them.
    past_key_values: tuple[CachedRow, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A request could not continue; the others are unaffected."""

    request: int
    error: DescantError


@dataclass(frozen=True)
class Report:
    """What an engine has done so far, and what it holds now."""

    steps: int
    requests: int  # that have not ended
    rows: int
    cache_bytes: int | None  # None: unknown
    prefixes: PrefixReport | None  # None: it has no prefix cache
    # With a scheduler:
    waiting: int = 0  # requests that wait, preempted ones included
    preemptions: int = 0  # so far
    blocks: int = 0  # of the KV pool that the running requests hold, or may come to hold in the next step


Event = Tokens | Finished | Failed
