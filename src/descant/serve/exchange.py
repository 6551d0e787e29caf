"""One HTTP request and its response: who made it, what it used, and how it ended."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from descant.serve.api_errors import ApiError
from descant.serve.api_keys import ApiKey
from descant.serve.limits import RequestLease

__all__ = ["Exchange", "read_body", "read_json"]

_LARGE_BODY: Final = 64 * 2**10
_MAX_NESTING: Final = 128
BODY_SECONDS: Final = 60.0  # for the whole body of a request


@dataclass(eq=False)
class Exchange:
    """What is known of one HTTP request."""

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    began: float = field(default_factory=time.monotonic)
    key: ApiKey | None = None
    lease: RequestLease | None = None
    status: int = 0  # 0: no response has begun
    # Of the request, where an error would have another name for it.
    field_names: Mapping[str, str] = field(default_factory=dict)
    model_name: str | None = None  # that the client used, if it is one of the model's
    first_output_at: float | None = None  # when the first text came, as `began` is counted
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str | None = None
    prompt: Any = None  # only where the server logs prompts
    is_disconnected: bool = False
    failure: Exception | None = None  # an internal error, for the log

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange of an ASGI scope."""
        exchange = scope["state"]["exchange"]
        assert isinstance(exchange, Exchange)
        return exchange

    @property
    def salt(self) -> bytes:
        """The salt that separates its key from others."""
        assert self.key is not None
        return self.key.salt

    def reserve(self, prompt_tokens: int, new_tokens: int) -> None:
        """Count a prompt, and reserve the tokens that it may use."""
        self.num_prompt_tokens += prompt_tokens
        if self.lease is not None:
            self.lease.reserve(prompt_tokens + new_tokens)

    def end(self) -> None:
        """Return what was reserved and not used."""
        if self.lease is not None:
            self.lease.end(self.num_prompt_tokens + self.num_new_tokens)


async def read_json(http: HttpRequest, max_bytes: int) -> Any:
    """The JSON value of a request's body."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps forms of other sites out, which a browser sends without asking the server.
        message = "the body must be JSON with the header `Content-Type: application/json`"
        raise ApiError(415, message, code="unsupported_media_type")
    body = await read_body(http.receive, http.headers.get("content-length"), max_bytes)
    # A large one takes a while, in which other requests go on.
    return _parse(body) if len(body) <= _LARGE_BODY else await asyncio.to_thread(_parse, body)


def _parse(body: bytes) -> Any:
    try:
        value = json.loads(body, parse_constant=_reject_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        shown = str(error) if isinstance(error, json.JSONDecodeError) else "it is not valid"
        raise ApiError(400, f"the body must be JSON: {shown}", code="invalid_json") from None
    _check_nesting(value)
    return value


def _check_nesting(value: Any) -> None:
    """Raise for a body nested so deeply that writing a part of it back would fail."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_NESTING):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return
    raise ApiError(400, f"the body must be nested at most {_MAX_NESTING} levels deep", code="invalid_json")


async def read_body(receive: Receive, length: str | None, max_bytes: int) -> bytes:
    """The bytes of a body, or an error as soon as there are too many."""
    error = ApiError(413, f"the body must have at most {max_bytes} bytes", code="body_too_large")
    if length is not None and length.isdecimal() and int(length) > max_bytes:
        raise error
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_parts(receive, max_bytes, error)
    except TimeoutError:
        raise ApiError(408, "the body has not come in time", code="timeout") from None


async def _read_parts(receive: Receive, max_bytes: int, error: ApiError) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client has disconnected", code="disconnected")
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise error
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")
