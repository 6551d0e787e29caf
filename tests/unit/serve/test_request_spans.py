"""Spans of requests: what they hold and what they leave out, and collectors that do not answer."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import sys
import time
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import State

from descant.errors import ConfigError, MissingExtra
from descant.serve.application import Gateway
from descant.serve.http import telemetry as request_spans
from descant.serve.http.errors import ApiError
from descant.serve.http.request import RequestState
from descant.serve.http.telemetry import AccessLog, RequestSpans, ServerMetrics, check_endpoint
from descant.serve.settings import ServerSettings

CHAT = "/v1/chat/completions"
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> RequestSpans:
    return RequestSpans(SimpleSpanProcessor(exporter), "small")


def finished_exchange() -> RequestState:
    state = RequestState(status=200, model_name="alias", num_prompt_tokens=7, num_new_tokens=5)
    state.finish_reasons += ["stop", "length"]
    state.first_output_at = state.began + 0.25
    return state


def test_a_span_says_what_a_request_used(spans, exporter):
    state = finished_exchange()
    spans.record(CHAT, state, [(b"authorization", b"Bearer secret-key")], 1.5)
    [span] = exporter.get_finished_spans()
    assert (span.name, span.kind, span.parent) == (f"POST {CHAT}", SpanKind.SERVER, None)
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "descant",
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": "small",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.25),
        "descant.request.id": state.id,
    }
    assert span.end_time - span.start_time == 1_500_000_000
    assert abs(span.end_time - time.time_ns()) < 60 * 10**9
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "descant"


def test_the_trace_of_the_client_is_continued(spans, exporter):
    headers = [(b"traceparent", PARENT), (b"tracestate", b"vendor=1")]
    spans.record(CHAT, finished_exchange(), headers, 0.1)
    [span] = exporter.get_finished_spans()
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, SPAN)
    assert span.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("value", [b"", b"00-zz", PARENT + b"\xff", b"00-" + b"0" * 32 + b"-" + b"0" * 16])
def test_a_traceparent_that_is_none_begins_a_trace(spans, exporter, value):
    spans.record(CHAT, finished_exchange(), [(b"traceparent", value)], 0.1)
    [span] = exporter.get_finished_spans()
    assert span.parent is None
    assert span.context.trace_id != TRACE


def test_a_client_may_leave_its_trace_out_and_other_paths_have_none(spans, exporter):
    for path in ("/tokenize", "/metrics", "/v1/models"):
        spans.record(path, finished_exchange(), [], 0.1)
    spans.record(CHAT, finished_exchange(), [(b"traceparent", PARENT[:-1] + b"0")], 0.1)
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("state", "kind", "code"),
    [
        (RequestState(status=401, error_code="invalid_api_key"), "invalid_api_key", StatusCode.UNSET),
        (RequestState(status=200, is_disconnected=True), "disconnected", StatusCode.UNSET),
        (RequestState(status=500, error_code="internal_error"), "internal_error", StatusCode.ERROR),
        (RequestState(status=200, failure=ValueError("a prompt")), "ValueError", StatusCode.ERROR),
        (RequestState(status=415), "415", StatusCode.UNSET),
    ],
)
def test_an_error_has_a_name_and_no_message(spans, exporter, state, kind, code):
    spans.record(CHAT, state, [], 0.1)
    [span] = exporter.get_finished_spans()
    assert (span.attributes["error.type"], span.status.status_code) == (kind, code)
    assert "a prompt" not in span.to_json()
    assert "gen_ai.usage.output_tokens" not in span.attributes


def test_the_service_may_have_another_name(monkeypatch, exporter):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "summaries")
    RequestSpans(SimpleSpanProcessor(exporter), "small").record(CHAT, finished_exchange(), [], 0.1)
    [span] = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == "summaries"
    assert "service.version" in span.resource.attributes


# ------------------------------------------------------------------------ the gateway
def pass_request(spans: RequestSpans | None, method: str, app) -> None:
    state = State()
    state.model, state.is_draining = SimpleNamespace(is_full=False), False
    state.metrics, state.spans = ServerMetrics(None, "small"), spans
    gateway = Gateway(app, state, ServerSettings(model_name="small"), AccessLog(io.StringIO()))
    scope = {"type": "http", "method": method, "path": CHAT, "headers": [(b"traceparent", PARENT)]}

    async def send(_) -> None:
        return

    asyncio.run(gateway(scope, send, send))


async def answer(scope, receive, send) -> None:
    RequestState.of(scope).num_prompt_tokens = 3
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def refuse(scope, receive, send) -> None:
    raise ApiError(404, "there is no such model", code="model_not_found")


@pytest.mark.parametrize(("app", "status"), [(answer, 200), (refuse, 404)])
def test_the_gateway_makes_the_span_when_a_request_has_ended(spans, exporter, app, status):
    pass_request(spans, "POST", app)
    [span] = exporter.get_finished_spans()
    assert span.attributes["http.response.status_code"] == status
    assert span.context.trace_id == TRACE


def test_the_gateway_makes_none_of_other_methods_and_without_an_endpoint(spans, exporter):
    pass_request(spans, "GET", answer)
    pass_request(None, "POST", answer)
    assert exporter.get_finished_spans() == ()


# ------------------------------------------------------------------------ collectors
@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "ftp://host", "http://", "http://host:port"])
def test_an_endpoint_must_be_a_url(endpoint):
    with pytest.raises(ConfigError, match="4318"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.sdk"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, missing):
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == missing:
                raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(MissingExtra, match=r"pip install descant\[otel\]"):
        check_endpoint("http://localhost:4318")


def test_a_collector_that_does_not_answer_costs_neither_requests_nor_the_end():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        spans = RequestSpans.export_to(f"http://127.0.0.1:{port}/", "small", AccessLog(io.StringIO()))
        began = time.monotonic()
        for _ in range(5000):  # more than the queue holds
            spans.record(CHAT, finished_exchange(), [], 0.1)
        assert time.monotonic() - began < 5  # one export alone would wait for ten
        began = time.monotonic()
        spans.close(0.2)
        assert time.monotonic() - began < 2


def test_a_collector_that_cannot_be_reached_is_in_the_log(monkeypatch):
    # Every line: those of other tests, whose exporters end in their own time, must not hide this one's.
    monkeypatch.setattr(request_spans, "_SECONDS_BETWEEN_LOGS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    stream = io.StringIO()
    spans = RequestSpans.export_to(f"http://127.0.0.1:{port}", "small", AccessLog(stream))
    spans.record(CHAT, finished_exchange(), [], 0.1)
    spans.close(0.5)  # tries, and waits a second for the next try
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["event"] for entry in entries if str(port) in entry["message"]] == ["span_export"]


def test_the_log_has_few_lines_of_the_exporter():
    stream = io.StringIO()
    logger = logging.Logger("exporter")
    logger.addHandler(request_spans._ExportLogHandler(AccessLog(stream)))
    for number in range(100):
        logger.warning("failed %s", number)
    [entry] = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (entry["level"], entry["message"]) == ("WARNING", "failed 0")
