"""`/health`, `/ready`, `/metrics`, and finished traces."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from descant.serve.api_errors import ApiError
from descant.serve.exchange import Exchange
from descant.serve.json_response import JsonResponse
from descant.serve.metrics import ServerMetrics
from descant.serve.served_model import ServedModel
from descant.serve.transcriber import Transcriber
from descant.trace.records import to_json_line

__all__ = ["health", "metrics", "ready", "show_trace"]


async def health(http: HttpRequest) -> JsonResponse:
    """Whether the process should live: its engine runs."""
    model: ServedModel | Transcriber = http.app.state.model
    is_healthy = model.is_healthy
    return JsonResponse({"status": "ok" if is_healthy else "failed"}, 200 if is_healthy else 503)


async def ready(http: HttpRequest) -> JsonResponse:
    """Whether requests should be sent here: it is healthy and not shutting down."""
    model: ServedModel | Transcriber = http.app.state.model
    is_ready = model.is_healthy and not http.app.state.is_draining
    return JsonResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def metrics(http: HttpRequest) -> Response:
    """Counters, gauges and histograms for Prometheus."""
    source: ServerMetrics = http.app.state.metrics
    return Response(await asyncio.to_thread(source.render), media_type=source.content_type)


async def show_trace(http: HttpRequest) -> Response:
    """A finished trace: as a page, or with `.jsonl` as its records."""
    model: ServedModel = http.app.state.model
    key = Exchange.of(http.scope).key
    assert key is not None
    name: str = http.path_params["name"]
    number, _, kind = name.partition(".")
    if kind not in ("", "jsonl"):
        raise ApiError(404, "there is no such trace", code="trace_not_found")
    trace = model.traces.get(key, number)
    if kind == "jsonl":
        lines = "".join(f"{to_json_line(record)}\n" for record in trace.records)
        return Response(lines, media_type="application/jsonl")
    page = await asyncio.to_thread(trace.html)
    return HTMLResponse(page)
