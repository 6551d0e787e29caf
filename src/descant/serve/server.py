"""The HTTP server: uvicorn with limited connections, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from descant.serve.application import ServerApplication
from descant.serve.http.errors import ApiError
from descant.serve.http.telemetry import AccessLog
from descant.serve.model.served_model import ServedModel

MAX_HEAD_BYTES: Final = 64 * 2**10  # between two parts of bodies: a head, the frame of a chunk, trailers
_PIECE_BYTES: Final = 4 * 2**10  # that the parser gets at once
_REFUSED_SECONDS: Final = 2.0  # in which a refused client may send on, so that it reads the error
# Not a logger of the process: what clients send wrong must not fill the log, and errors must be seen.
_LOGGER: Final = logging.Logger("descant.serve.http", logging.ERROR)
# Nor is the end of the server an error of the requests that it cancels.
_LOGGER.addFilter(lambda record: not isinstance((record.exc_info or (None, None))[1], asyncio.CancelledError))


class LimitedProtocol(HttpToolsProtocol):
    """A connection of uvicorn that does not wait for ever."""

    receive_seconds = 60.0  # from the first byte of a request to its last; for a new connection, to its first
    send_seconds = 60.0  # that a client may take until it reads on

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _LOGGER
        self._head_bytes = 0  # since the last head or part of a body was complete
        self._is_refused = False
        self._timers: dict[str, asyncio.TimerHandle] = {}  # until the client must have sent, or read on
        self._answered: RequestResponseCycle | None = None  # the request that is answered at the moment

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._start_receive_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all timers, and the request that is answered."""
        self._stop_timer("receive")
        self._stop_timer("send")
        # uvicorn tells only the last request, which is another one if the client has sent several at once.
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data, unless too much of it belongs to no body."""
        rest = memoryview(data)
        # In pieces: the parser tells what it has found, and not where.
        while rest and not (self._is_refused or self.transport.is_closing()):
            size = min(_PIECE_BYTES, MAX_HEAD_BYTES - self._head_bytes)
            piece, rest = rest[:size], rest[size:]
            self._head_bytes += len(piece)
            super().data_received(bytes(piece))
            if self._head_bytes == MAX_HEAD_BYTES:  # and more must come
                self._refuse(ApiError(431, f"the headers must have at most {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a request."""
        super().on_message_begin()
        if "receive" not in self._timers:
            self._start_receive_timer()

    def on_headers_complete(self) -> None:
        """Go on with the body, which has a limit of its own."""
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A whole request has come."""
        self._stop_timer("receive")
        self._head_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if "send" not in self._timers:
            self._timers["send"] = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._stop_timer("send")
        super().resume_writing()

    def _start_receive_timer(self) -> None:
        self._timers["receive"] = self.loop.call_later(self.receive_seconds, self._end_receiving)

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _end_receiving(self) -> None:
        """Close the connection, unless the rest of a request only waits for the answer to the one before."""
        cycle: RequestResponseCycle | None = self.cycle
        is_answering = cycle is not None and not cycle.response_complete and not cycle.more_body
        if self.pipeline or is_answering:
            self._start_receive_timer()
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send an error and close the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:  # else the bytes would be part of another answer
            body = error.encode()
            head = (
                f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
            )
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            # Closed at once, what the client still sends would reset the connection before it reads this.
            self.loop.call_later(_REFUSED_SECONDS, self.transport.close)
        else:
            self.transport.close()


_CLOSE_SECONDS: Final = 5.0  # for the step that runs when requests are ended
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class ListenAddress:
    """Where a server listens, and its certificate."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket in place of host and port
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None


class HttpServer(uvicorn.Server):
    """A server that SIGTERM and SIGINT drain: requests finish within `grace_seconds`, and the code is 0.

    A second signal ends it at once.
    """

    def __init__(
        self,
        application: ServerApplication,
        address: ListenAddress,
        log: AccessLog,
        *,
        grace_seconds: float = 60.0,
    ) -> None:
        settings = application.model.settings
        limits = {"receive_seconds": settings.max_receive_seconds}
        options: dict[str, Any] = {name: value for name, value in vars(address).items() if value is not None}
        super().__init__(
            uvicorn.Config(
                application,
                root_path=settings.root_path,
                http=type("LimitedProtocol", (LimitedProtocol,), limits),
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=5,
                timeout_keep_alive=30,
                backlog=2048,
                **options,
            )
        )
        self._application, self._log, self._grace_seconds = application, log, grace_seconds
        self._num_signals = 0
        self._drain_began: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin to drain, or end at once with the second signal."""
        self._num_signals += 1
        self._application.start_draining()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: no request is left, or the time is over."""
        if self._num_signals:
            if self._drain_began is None:
                self._drain_began = time.monotonic()
                self._log.event("drain", active=self._application.num_active)
            is_late = time.monotonic() - self._drain_began > self._grace_seconds
            if self._num_signals > 1 or is_late:
                # First, so that every stream ends with an error event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await asyncio.to_thread(self._application.model.close)
                self.force_exit = self._num_signals > 1
                self.should_exit = True
            elif not self._application.num_active:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Close connections and end the application."""
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then cancels the application, which prints a traceback
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it serves; they are not raised again, so that the exit code is 0."""
        previous = {kind: signal.signal(kind, self.handle_exit) for kind in _SIGNALS}
        try:
            yield
        finally:
            for kind, handler in previous.items():
                signal.signal(kind, handler)

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            settings = self._application.model.settings
            addresses = [sock.getsockname() for server in self.servers for sock in server.sockets]
            scheme = "https" if self.config.is_ssl else "http"
            urls = [f"{scheme}://{_host_and_port(address)}{settings.root_path}" for address in addresses]
            page = settings.page and isinstance(self._application.model, ServedModel)
            self._log.event("ready", model=settings.model_name, urls=urls, page=page, addresses=addresses)


def _host_and_port(address: Any) -> str:
    """An address as part of a URL that this machine can open."""
    if isinstance(address, str):  # a Unix socket
        return f"unix:{address}"
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
