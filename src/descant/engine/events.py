"""What an engine reports: tokens, finished and failed requests, and its own state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from descant.core.records import Hypothesis, Logprobs, Tokens
from descant.errors import DescantError
from descant.kv_cache.cached_row import CachedRow
from descant.kv_cache.prefix_cache import PrefixReport
from descant.trace.records import TraceRecord

__all__ = [
    "AgreedTokens",
    "Event",
    "Failed",
    "Finished",
    "NewToken",
    "Report",
    "RequestEvent",
    "TokenLogprobs",
    "Tokens",
    "TraceRecords",
    "token_logprobs",
]


@dataclass(frozen=True)
class Finished:
    """A request has ended; its sequences, best first or in the order of their slots."""

    request: int
    hypotheses: list[Hypothesis]
    # The keys and values of each sequence without its last token, where the request asks for them.
    past_key_values: tuple[CachedRow, ...] = ()
    # Of each prompt token after the first, where the request asks for them; `processed` is `raw`.
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int | None = None  # prompt tokens that were in a cache when it began; None: unknown


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


class TokenLogprobs(NamedTuple):
    """The log-probabilities of a token before and after the processors, and those of its alternatives."""

    raw: float
    processed: float
    # (token, raw, processed), the most probable tokens of the model itself first.
    top: tuple[tuple[int, float, float], ...]


class NewToken(NamedTuple):
    """A token of a running request; those of beams come as `AgreedTokens` and with its end."""

    request: int
    slot: int  # the index of the sequence in its request
    token: int
    logprobs: TokenLogprobs | None = None  # where its request asks for them


class AgreedTokens(NamedTuple):
    """Further tokens with which every sequence that a running beam search may still return begins."""

    request: int
    tokens: tuple[int, ...]


class TraceRecords(NamedTuple):
    """The records that the last step has added to the trace of a request."""

    request: int
    records: tuple[TraceRecord, ...]


RequestEvent = NewToken | AgreedTokens | TraceRecords | Finished | Failed


def token_logprobs(tokens: Tokens) -> list[TokenLogprobs | None] | None:
    """The log-probabilities of each token of a step; None: no request asks for any."""
    if tokens.num_top is None:
        return None
    assert tokens.raw is not None
    assert tokens.processed is not None
    assert tokens.top is not None
    assert tokens.top_raw is not None
    assert tokens.top_processed is not None
    columns = (tokens.raw, tokens.processed, tokens.top, tokens.top_raw, tokens.top_processed)
    values = zip(tokens.num_top.tolist(), *(one.tolist() for one in columns), strict=True)
    return [
        None
        if count < 0
        else TokenLogprobs(raw, processed, tuple(zip(top[:count], top_raw, top_processed, strict=False)))
        for count, raw, processed, top, top_raw, top_processed in values
    ]
