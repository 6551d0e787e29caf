"""The HTTP server around the application: uvicorn, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import uvicorn

from descant.serve.access_log import AccessLog
from descant.serve.application import ServerApplication
from descant.serve.http_protocol import limited_protocol
from descant.serve.served_model import ServedModel

__all__ = ["HttpServer", "ListenAddress"]

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
        options: dict[str, Any] = {name: value for name, value in vars(address).items() if value is not None}
        super().__init__(
            uvicorn.Config(
                application,
                root_path=settings.root_path,
                http=limited_protocol(settings.max_receive_seconds),
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
        previous = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
        try:
            yield
        finally:
            for one, handler in previous.items():
                signal.signal(one, handler)

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            settings = self._application.model.settings
            addresses = [sock.getsockname() for server in self.servers for sock in server.sockets]
            scheme = "https" if self.config.is_ssl else "http"
            urls = [f"{scheme}://{_host_and_port(one)}{settings.root_path}" for one in addresses]
            page = settings.page and isinstance(self._application.model, ServedModel)
            self._log.event("ready", model=settings.model_name, urls=urls, page=page, addresses=addresses)


def _host_and_port(address: Any) -> str:
    """An address as part of a URL that this machine can open."""
    if isinstance(address, str):  # a Unix socket
        return f"unix:{address}"
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
