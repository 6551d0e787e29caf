"""The log of a server, its metrics for Prometheus, and its spans for OpenTelemetry."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TextIO
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

import descant
from descant.engine.serving.async_engine import AsyncEngine
from descant.engine.serving.metrics import EngineMetrics, Histogram
from descant.errors import ConfigError, EngineClosed, MissingExtra
from descant.serve.http.request import RequestState

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter


_QUIET_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})


class AccessLog:
    """Writes the log to a text stream: as JSON, or for people."""

    def __init__(self, stream: TextIO | None = None, *, is_json: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._format = json.dumps if is_json else _text_line

    def event(self, name: str, **values: Any) -> None:
        """Write an event of the server itself."""
        self._write({"event": name, **values})

    def write(self, method: str, path: str, state: RequestState, seconds: float) -> None:
        """Write what became of a request; probes are left out unless they fail."""
        if path in _QUIET_PATHS and state.status == 200:
            return
        entry: dict[str, Any] = {
            "event": "request",
            "id": state.id,
            "key": None if state.key is None else state.key.name,
            "method": method,
            "path": path,
            "status": state.status,
            "seconds": round(seconds, 4),
        }
        if state.num_prompt_tokens:
            entry |= {"prompt_tokens": state.num_prompt_tokens, "output_tokens": state.num_new_tokens}
        if state.finish_reasons:
            entry["finish"] = state.finish_reasons[:8]
        if state.error_code is not None:
            entry["error"] = state.error_code
        if state.is_disconnected:
            entry["disconnected"] = True
        if state.prompt is not None:
            entry["prompt"] = state.prompt
        if state.failure is not None:
            # Where it happened; the text of an error may quote a prompt.
            frames = traceback.extract_tb(state.failure.__traceback__)[-8:]
            entry["failure"] = type(state.failure).__name__
            entry["frames"] = [f"{frame.name}:{frame.lineno}" for frame in frames]
        self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        self._stream.write(self._format({"time": round(time.time(), 3), **entry}) + "\n")
        self._stream.flush()


def _text_line(entry: dict[str, Any]) -> str:
    """An entry for people; a text with spaces is written as JSON, so that it cannot look like other lines."""
    rest = dict(entry)
    clock, event = time.strftime("%H:%M:%S", time.localtime(rest.pop("time"))), rest.pop("event")
    if event == "ready":
        lines = [f"Serving {_shown(rest['model'])}"]
        for url in rest["urls"]:
            lines += [f"  API:  {url}/v1", *([f"  Page: {url}/"] if rest["page"] else [])]
        return "\n".join([*lines, "Ctrl-C ends it after the requests that run, a second one at once."])
    words = [clock, event]
    if event == "request":
        del rest["id"]
        words = [clock, *(str(rest.pop(name)) for name in ("method", "path", "status"))]
        words.append(f"{rest.pop('seconds'):.2f}s")
    shown = (f"{name}={_shown(value)}" for name, value in rest.items() if value is not None)
    return " ".join([*words, *shown])


def _shown(value: Any) -> str:
    is_plain = isinstance(value, str) and value.isprintable() and " " not in value
    return value if is_plain else json.dumps(value)


_COUNTERS: Final = {
    "requests": "Requests that the engine admitted",
    "finished": "Requests that ended by themselves",
    "failed": "Requests that failed",
    "cancelled": "Requests that were cancelled",
    "refused": "Requests that the engine refused",
    "tokens": "Tokens that were delivered as they were generated",
    "drafts": "Draft tokens that were verified",
    "accepted_drafts": "Draft tokens that were accepted",
    "failed_steps": "Steps of the engine that failed",
}
_HISTOGRAMS: Final = {
    "time_to_first_token": "Seconds from a request's arrival to its first token",
    "time_between_tokens": "Seconds between two tokens of a request",
    "step": "Seconds of a step of the engine",
    "request": "Seconds from a request's arrival to its end",
}


class ServerMetrics:
    """All metrics of one server, in a registry of its own."""

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self, engine: AsyncEngine | None, model_name: str) -> None:
        self._registry = CollectorRegistry()
        if engine is not None:
            self._registry.register(_EngineCollector(engine, model_name))
        self._responses = Counter(
            "descant_http_responses", "Responses", ("path", "status"), registry=self._registry
        )
        self._seconds = PrometheusHistogram(
            "descant_http_request_seconds", "Seconds of requests", ("path",), registry=self._registry
        )
        self._tokens = Counter(
            "descant_http_tokens", "Tokens of requests", ("kind",), registry=self._registry
        )
        self._disconnects = Counter(
            "descant_http_disconnects", "Requests whose client left", registry=self._registry
        )

    def count(self, path: str, state: RequestState, seconds: float) -> None:
        """Count a response; `path` is that of a route, so that there are few different ones."""
        self._responses.labels(path, str(state.status)).inc()
        self._seconds.labels(path).observe(seconds)
        if state.is_disconnected:
            self._disconnects.inc()
        if state.num_prompt_tokens:
            # Not by key: every key may read the metrics. The log has the names.
            self._tokens.labels("prompt").inc(state.num_prompt_tokens)
            self._tokens.labels("output").inc(state.num_new_tokens)

    def render(self) -> bytes:
        """All metrics as text; waits for the engine's current step."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The metrics of an engine, read when they are asked for."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry must not read the engine when this is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        try:
            metrics = self._engine.metrics()
        except EngineClosed:
            return
        yield from self._gauges(metrics)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"descant_engine_{name}", text, value=metrics.counters.get(name, 0))
        for name, text in _HISTOGRAMS.items():
            yield _histogram(f"descant_{name}_seconds", text, metrics.histograms[name])

    def _gauges(self, metrics: EngineMetrics) -> Iterator[Metric]:
        report = metrics.session
        running = report.requests - report.waiting
        limit = self._engine.scheduler_config.num_blocks
        usage = report.blocks / limit if limit else 0.0
        values = {
            "num_requests_running": ("Requests that run", running),
            "num_requests_waiting": ("Requests that wait", report.waiting + metrics.queued_commands),
            "kv_cache_usage_perc": ("Share of the KV pool in use, 1 is all", usage),
        }
        for name, (text, value) in values.items():
            yield _gauge(f"descant:{name}", text, self._model_name, value)
            # vLLM's names, which endpoint pickers of the Gateway API Inference Extension read by default.
            yield _gauge(f"vllm:{name}", text, self._model_name, value)
        yield GaugeMetricFamily("descant_rows", "Rows of the batch", value=report.rows)
        yield GaugeMetricFamily("descant_cache_bytes", "Bytes of the KV cache", value=report.cache_bytes or 0)
        yield CounterMetricFamily("descant_engine_steps", "Steps of the engine", value=report.steps)
        yield CounterMetricFamily("descant_engine_preemptions", "Preemptions", value=report.preemptions)
        prefixes = report.prefixes
        if prefixes is not None:
            hits, misses = prefixes.hits, prefixes.misses
            yield CounterMetricFamily("descant_prefix_hits", "Prompts with a cached prefix", value=hits)
            yield CounterMetricFamily("descant_prefix_misses", "Prompts without one", value=misses)


def _gauge(name: str, text: str, model_name: str, value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=["model_name"])
    gauge.add_metric([model_name], value)
    return gauge


def _histogram(name: str, text: str, values: Histogram) -> HistogramMetricFamily:
    buckets, total = [], 0
    for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=values.total)


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
        for handler in [handler for handler in logger.handlers if isinstance(handler, _ExportLogHandler)]:
            logger.removeHandler(handler)  # of an application before this one
        logger.addHandler(_ExportLogHandler(log))
        exporter = OTLPSpanExporter(_traces_url(endpoint))
        return cls(BatchSpanProcessor(exporter), model_name, exporter)

    def record(
        self, path: str, state: RequestState, headers: Iterable[tuple[bytes, bytes]], seconds: float
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
            self._attributes(path, operation, state),
            start_time=now - int(seconds * _NANOSECONDS),
        )
        if state.status >= 500 or state.failure is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    def _attributes(self, path: str, operation: str, state: RequestState) -> dict[str, Any]:
        """The attributes of a request's span."""
        values: dict[str, Any] = {
            "http.request.method": "POST",
            "http.route": path,
            "http.response.status_code": state.status or None,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "descant",
            "gen_ai.request.model": state.model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.input_tokens": state.num_prompt_tokens or None,
            "gen_ai.response.finish_reasons": state.finish_reasons[:_MAX_FINISH_REASONS] or None,
            "error.type": _error_type(state),
            "descant.request.id": state.id,  # as in the log
        }
        if state.num_prompt_tokens or state.num_new_tokens:
            values["gen_ai.usage.output_tokens"] = state.num_new_tokens
        if state.first_output_at is not None:
            values["gen_ai.response.time_to_first_chunk"] = state.first_output_at - state.began
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
    """The resource of the spans, the server; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    from opentelemetry.sdk.resources import Resource

    found = Resource.create()
    own = {"service.version": descant.__version__}
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        return found.merge(Resource({"service.name": "descant", **own}))
    return Resource(own).merge(found)


def _error_type(state: RequestState) -> str | None:
    """The kind of a request's failure, as one of few names; None: it did not fail."""
    if state.error_code is not None:
        return state.error_code
    if state.is_disconnected:
        return "disconnected"
    if state.failure is not None:
        return type(state.failure).__name__
    return str(state.status) if state.status >= 400 else None
