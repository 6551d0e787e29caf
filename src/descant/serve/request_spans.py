"""Spans of requests for OpenTelemetry: their times and what they used, without prompts, texts and keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import descant
from descant.errors import ConfigError, MissingExtra
from descant.serve.access_log import AccessLog
from descant.serve.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["RequestSpans", "check_endpoint"]

# The operation of each endpoint that generates, by the conventions for generative AI where they have a name.
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/audio/transcriptions": "transcription",
}
_TRACES_PATH: Final = "/v1/traces"
_MAX_FINISH_REASONS: Final = 128
_FLUSH_SECONDS: Final = 5.0
_SECONDS_BETWEEN_LOGS: Final = 60.0
_NANOSECONDS: Final = 10**9


class RequestSpans:
    """Makes one span of each request that generates, when it has ended."""

    def __init__(
        self, processor: SpanProcessor, model_name: str, exporter: SpanExporter | None = None
    ) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not the global provider: other libraries of the process export nothing here.
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("descant.serve", descant.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name, self._exporter = model_name, exporter

    @classmethod
    def export_to(cls, endpoint: str, model_name: str, log: AccessLog) -> RequestSpans:
        """Spans that a thread sends to a collector in batches; those it cannot send are dropped."""
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logger = logging.getLogger("opentelemetry")
        for handler in [one for one in logger.handlers if isinstance(one, _ExportLogHandler)]:
            logger.removeHandler(handler)  # of an application before this one
        logger.addHandler(_ExportLogHandler(log))
        exporter = OTLPSpanExporter(_traces_url(endpoint))
        return cls(BatchSpanProcessor(exporter), model_name, exporter)

    def record(
        self, path: str, exchange: Exchange, headers: Iterable[tuple[bytes, bytes]], seconds: float
    ) -> None:
        """Make the span of a POST request that has ended; those of other paths have none."""
        operation = _OPERATIONS.get(path)
        if operation is None:
            return
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.time_ns()
        names = (b"traceparent", b"tracestate")
        given = {name.decode(): value.decode("latin-1") for name, value in headers if name in names}
        span = self._tracer.start_span(
            f"POST {path}",
            self._propagator.extract(given, Context()),
            SpanKind.SERVER,
            self._attributes(path, operation, exchange),
            start_time=now - int(seconds * _NANOSECONDS),
        )
        if exchange.status >= 500 or exchange.failure is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    def _attributes(self, path: str, operation: str, exchange: Exchange) -> dict[str, Any]:
        """What a span says of a request."""
        values: dict[str, Any] = {
            "http.request.method": "POST",
            "http.route": path,
            "http.response.status_code": exchange.status or None,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "descant",
            "gen_ai.request.model": exchange.model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.input_tokens": exchange.num_prompt_tokens or None,
            "gen_ai.response.finish_reasons": exchange.finish_reasons[:_MAX_FINISH_REASONS] or None,
            "error.type": _error_type(exchange),
            "descant.request.id": exchange.id,  # as in the log
        }
        if exchange.num_prompt_tokens or exchange.num_new_tokens:
            values["gen_ai.usage.output_tokens"] = exchange.num_new_tokens
        if exchange.first_output_at is not None:
            values["gen_ai.response.time_to_first_chunk"] = exchange.first_output_at - exchange.began
        return {name: value for name, value in values.items() if value is not None}

    def close(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Send what is left, for that many seconds at most."""
        # A thread that does not keep the process: a collector that never answers must not, either.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive() and self._exporter is not None:
            self._exporter.shutdown()  # it tries no further


class _ExportLogHandler(logging.Handler):
    """Writes what the exporter reports to the server's log, one line a minute at most."""

    def __init__(self, log: AccessLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._last: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless one was written a short time ago."""
        now = time.monotonic()
        if self._last is None or now - self._last >= _SECONDS_BETWEEN_LOGS:
            self._last = now
            self._log.event("span_export", level=record.levelname, message=record.getMessage()[:500])


def check_endpoint(endpoint: str) -> None:
    """Raise unless the packages are there and a collector can have this address."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            is_installed = find_spec(package) is not None
        except ModuleNotFoundError:  # of a package above it
            is_installed = False
        if not is_installed:
            raise MissingExtra("otel", "`otlp_endpoint`")
    try:
        url = urlsplit(endpoint)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        is_address = is_address and not (url.query or url.fragment)
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError("otlp_endpoint", "must be the URL of a collector, as http://HOST:4318", endpoint)


def _traces_url(endpoint: str) -> str:
    """The URL that spans are sent to: the collector's with the path of spans."""
    base = endpoint.rstrip("/")
    return base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH


def _resource() -> Resource:
    """What the spans say of the server; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    from opentelemetry.sdk.resources import Resource

    found = Resource.create()
    own = {"service.version": descant.__version__}
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        return found.merge(Resource({"service.name": "descant", **own}))
    return Resource(own).merge(found)


def _error_type(exchange: Exchange) -> str | None:
    """How a request failed, as one of few names; None: it did not."""
    if exchange.error_code is not None:
        return exchange.error_code
    if exchange.is_disconnected:
        return "disconnected"
    if exchange.failure is not None:
        return type(exchange.failure).__name__
    return str(exchange.status) if exchange.status >= 400 else None
