"""What every HTTP request passes: keys, limits, errors in one form, logs, metrics and spans."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import MutableMapping
from typing import Any, Final

from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from descant.errors import EngineFull
from descant.serve.http.errors import ApiError, api_error, in_words_of
from descant.serve.http.request import ClientDisconnected, RequestState
from descant.serve.http.telemetry import AccessLog
from descant.serve.settings import ServerSettings

__all__ = ["Gateway"]

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
_GENERATION_PREFIX: Final = "/v1/"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Gateway:
    """The outermost ASGI application: lets a request through, and sees to the end of it."""

    def __init__(self, app: ASGIApp, state: State, settings: ServerSettings, log: AccessLog) -> None:
        self._app, self._shared, self._settings, self._log = app, state, settings, log
        self.num_active = 0  # requests other than those of probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # websockets are closed by the server when nothing is sent
        root = scope.get("root_path", "")
        if root and scope["path"].startswith(f"{root}{root}/"):
            # The server puts the root before every path, and a proxy may have left it there.
            scope["path"] = scope["path"][len(root) :]
        state = RequestState()
        scope.setdefault("state", {})["request"] = state
        is_probe = _path(scope) in OPEN_PATHS
        self.num_active += not is_probe
        try:
            await self._handle(state, scope, receive, send)
        finally:
            self.num_active -= not is_probe
            state.end()
            self._record(state, scope)

    async def _handle(self, state: RequestState, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.status = message["status"]
                headers = list(message.get("headers", ()))
                headers += [*_SECURITY_HEADERS, (b"x-request-id", _request_id(state, scope))]
                message = {**message, "headers": headers}
            await send(message)

        try:
            self._check(state, scope)
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnected:
            state.is_disconnected = True
            state.status = state.status or 499
        except HTTPException as error:
            await self._send_error(state, _routing_error(error), send_with_headers)
        except Exception as error:
            failure = in_words_of(api_error(error), state.field_names)
            if failure.status >= 500 and failure.code == "internal_error":
                state.failure = error
            await self._send_error(state, failure, send_with_headers)
        except asyncio.CancelledError:
            state.is_disconnected = True
            raise

    def _check(self, state: RequestState, scope: Scope) -> None:
        """Raise unless the request may pass."""
        path, headers = _path(scope), dict(scope["headers"])
        self._check_host(headers)
        if path in OPEN_PATHS:
            return
        authorization = headers.get(b"authorization")
        state.key = self._settings.keys.authenticate(
            None if authorization is None else authorization.decode("latin-1")
        )
        if scope["method"] == "POST":
            if self._shared.is_draining:
                raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1.0)
            if self.num_active > self._settings.max_connections:
                raise ApiError(429, "too many requests at once", code="too_many_requests", retry_after=1.0)
            if path.startswith(_GENERATION_PREFIX) and self._shared.model.is_full:
                # Before anything is read or parsed: refusing must cost little.
                raise api_error(EngineFull(0, 0))
            state.lease = state.key.limiter.begin()

    def _check_host(self, headers: MutableMapping[bytes, bytes]) -> None:
        """Raise for the name of another site, whose page would read this server's answers (DNS rebinding)."""
        allowed = self._settings.allowed_hosts
        if not allowed:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = re.sub(r":\d+$", "", host)
        if name not in allowed:
            message = "this name of the server is not allowed: start it with --allowed-host"
            raise ApiError(403, message, code="host_not_allowed")

    async def _send_error(self, state: RequestState, error: ApiError, send: Send) -> None:
        state.error_code = error.code
        if state.status:  # the response has begun: nothing but the end of the connection can tell
            return
        body = error.encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        with contextlib.suppress(OSError):  # the client may be gone
            await send({"type": "http.response.start", "status": error.status, "headers": encoded})
            await send({"type": "http.response.body", "body": body})

    def _record(self, state: RequestState, scope: Scope) -> None:
        seconds = time.monotonic() - state.began
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._shared.metrics.count(path, state, seconds)
        self._log.write(scope["method"], path, state, seconds)
        if self._shared.spans is not None and scope["method"] == "POST":
            self._shared.spans.record(_path(scope), state, scope["headers"], seconds)


def _path(scope: Scope) -> str:
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(root) else path)


def _request_id(state: RequestState, scope: Scope) -> bytes:
    """The client's own id of the request, or ours."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else state.id.encode()


def _routing_error(error: HTTPException) -> ApiError:
    """The error of a path or a method that does not exist."""
    messages: dict[int, Any] = {
        404: ("there is no such path", "not_found"),
        405: ("this path has no such method", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), "invalid_request"))
    return ApiError(error.status_code, message, code=code)
