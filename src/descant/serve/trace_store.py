"""Finished traces, bounded in number and size, each for the key that asked for it."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Any, NamedTuple

from descant.serve.api_errors import ApiError
from descant.serve.api_keys import ApiKey
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["TraceStore"]


class _StoredTrace(NamedTuple):
    key: str  # the name of the key it belongs to
    trace: Trace


class TraceStore:
    """The last finished traces."""

    def __init__(self, size: int, max_bytes: int) -> None:
        self._size, self._max_bytes = size, max_bytes
        self._traces: OrderedDict[str, _StoredTrace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def new_tracer(self, tokenizer: Any) -> Tracer:
        """The recorder of a new trace."""
        if not self._size:
            message = "this server records no traces: start it with --traces"
            raise ApiError(400, message, param="trace", code="traces_disabled")
        return Tracer(limit=self._max_bytes, tokenizer=tokenizer)

    def add(self, key: ApiKey, tracer: Tracer) -> str:
        """Keep the trace of a finished request; returns its id."""
        number = secrets.token_urlsafe(18)
        self._traces[number] = _StoredTrace(key.name, tracer.trace)
        while len(self._traces) > self._size:
            self._traces.popitem(last=False)
        return number

    def get(self, key: ApiKey, number: str) -> Trace:
        """A trace of that key; another key's is not found."""
        stored = self._traces.get(number)
        if stored is None or stored.key != key.name:
            raise ApiError(404, "there is no such trace", code="trace_not_found")
        return stored.trace
