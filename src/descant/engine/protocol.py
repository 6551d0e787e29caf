"""The interface of an engine: all that `generate`, `stream` and a server need of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, RankGroup
from descant.core.records import Hypothesis, Logprobs, Tokens
from descant.engine.request import Request
from descant.errors import DescantError, RowError, SessionBusy, printable
from descant.kv_cache.prefix_cache import PrefixReport
from descant.kv_cache.row_views import CachedRow
from descant.trace.records import TraceRecord
from descant.trace.trace import Trace

__all__ = [
    "AgreedTokens",
    "Engine",
    "Event",
    "Failed",
    "Finished",
    "NewToken",
    "Report",
    "RequestEvent",
    "TokenLogprobs",
    "Tokens",
    "TraceRecords",
    "is_engine",
    "request_error",
    "single_entry",
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


def request_error(request: int, cause: Exception) -> RowError:
    """The error of a request whose own code, or whose forward, has raised `cause`."""
    if isinstance(cause, RowError):
        return cause
    text = str(cause) if isinstance(cause, DescantError) else printable(cause)
    error = RowError(f"{type(cause).__name__}: {text} (request {request})", request)
    error.__cause__ = cause
    return error


@dataclass(frozen=True)
class Report:
    """The work of an engine so far, and its content now."""

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
    values = zip(tokens.num_top.tolist(), *(column.tolist() for column in columns), strict=True)
    return [
        None
        if count < 0
        else TokenLogprobs(raw, processed, tuple(zip(top[:count], top_raw, top_processed, strict=False)))
        for count, raw, processed, top, top_raw, top_processed in values
    ]


class Engine(Protocol):
    """Runs requests step by step; requests may be admitted and cancelled between any two steps.

    An engine is used by one thread at a time, and not from inside a step: it raises `SessionBusy` otherwise.
    Every admitted request ends in exactly one `Finished` or `Failed` event, unless it is cancelled.
    """

    @property
    def traits(self) -> ModelTraits:
        """The traits of its model, with which prompts are prepared."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its prompts and results."""
        ...

    @property
    def rank_group(self) -> RankGroup | None:
        """The processes that run the same requests; None: there is one."""
        ...

    @property
    def trace(self) -> Trace | None:
        """The recorded steps; None: it does not record."""
        ...

    @property
    def rows(self) -> int:
        """The number of running rows."""
        ...

    @property
    def running(self) -> Iterable[int]:
        """The requests that run and have not ended."""
        ...

    @property
    def num_waiting(self) -> int:
        """The requests that wait for room."""
        ...

    @property
    def beam_requests(self) -> Collection[int]:
        """The running requests whose tokens come only at their end."""
        ...

    def __len__(self) -> int:
        """The number of running requests."""
        ...

    def supports(self, request: Request) -> DescantError | None:
        """The error that `admit` would raise because of the request itself; None: it can be admitted."""
        ...

    def has_grammar(self, request: Request) -> bool:
        """Whether a request has a grammar that is not compiled yet."""
        ...

    def compile_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled; any thread may call it beside a step."""
        ...

    def admit(
        self, *requests: Request, noise_rows: int = 0, numbers: Sequence[int] | None = None
    ) -> list[int]:
        """Add requests, all or none; return their ids.

        `noise_rows` is for calls that share torch's generator: the number of rows that noise is drawn for.
        `numbers` are ids that the caller chooses, for all requests of the engine or for none.
        """
        ...

    def step(self) -> list[Event]:
        """Advance every row by one step; return what happened."""
        ...

    def cancel(self, request: int) -> None:
        """Remove a request and free its rows at once."""
        ...

    def drain(self) -> Iterator[Event]:
        """Step until no request is running."""
        ...

    def common_prefix(self, request: int) -> Tensor:
        """The new tokens with which every sequence that a running request may still return begins (host)."""
        ...

    def report(self) -> Report:
        """Its work so far, and its content."""
        ...


def is_engine(candidate: object) -> TypeGuard[Engine]:
    """Whether an object runs requests itself, as a model does not."""
    # `isinstance` of a protocol is slow, and this runs in every call.
    return hasattr(candidate, "admit") and hasattr(candidate, "step")


Method = TypeVar("Method", bound=Callable[..., Any])


def single_entry(method: Method) -> Method:
    """The method, which raises `SessionBusy` while this or another guarded method of its object runs.

    An attribute of the object, `_busy_thread`, serves as the lock: no call happens between the test, the
    assignment and `try`, so that neither another thread nor an interrupt can come between them and leave the
    object locked.
    """
    name = getattr(method, "__name__", "call")

    @wraps(method)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        if self._busy_thread is not None:
            raise _busy_error(name, self._busy_thread == thread)
        self._busy_thread = thread
        try:
            return method(self, *args, **kwargs)
        finally:
            self._busy_thread = None

    return cast(Method, guarded)


def _busy_error(name: str, is_reentrant: bool) -> SessionBusy:
    if is_reentrant:
        must = f"`{name}` must not be called from inside a step, such as by a processor or an observer"
        return SessionBusy(f"{must}: call it between two steps")
    must = f"`{name}` must not be called while another thread is inside the same session"
    return SessionBusy(f"{must}: use one thread, or a lock around every call")
