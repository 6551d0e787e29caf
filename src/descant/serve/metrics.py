"""Metrics for Prometheus: those of the engine, and of the HTTP requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

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

from descant.engine.async_engine import AsyncEngine
from descant.engine.metrics import EngineMetrics, Histogram
from descant.errors import EngineClosed
from descant.serve.exchange import Exchange

__all__ = ["ServerMetrics"]

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

    def count(self, path: str, exchange: Exchange, seconds: float) -> None:
        """Count a response; `path` is that of a route, so that there are few different ones."""
        self._responses.labels(path, str(exchange.status)).inc()
        self._seconds.labels(path).observe(seconds)
        if exchange.is_disconnected:
            self._disconnects.inc()
        if exchange.num_prompt_tokens:
            # Not by key: every key may read the metrics. The log has the names.
            self._tokens.labels("prompt").inc(exchange.num_prompt_tokens)
            self._tokens.labels("output").inc(exchange.num_new_tokens)

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
