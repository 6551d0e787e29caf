"""Spans of a real server, read by a collector of our own on a loopback port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.support.http_client import request, stream
from tests.support.server_process import ServerProcess

KEY = "key-of-the-span-tests"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a question that no collector may see"


class Collector(ThreadingHTTPServer):
    """Holds what is sent to it: paths, and bodies as protobuf."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, bytes]] = []

    def spans(self) -> list[tuple[Any, dict[str, Any]]]:
        """All spans with their attributes."""
        found = []
        for _, data in self.received:
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        values = {one.key: _plain(one.value) for one in span.attributes}
                        found.append((span, values))
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


def _plain(value: AnyValue) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_collector_gets_a_span_of_each_request(model_folder, collector):
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    body = {"model": "smol-draft", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 6}
    with ServerProcess(
        model_folder,
        *("--kv-memory", "0.5", "--otlp-endpoint", endpoint),
        env={"DESCANT_API_KEYS": f"alice={KEY}", "NO_PROXY": "127.0.0.1"},
    ) as server:
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = request(server.port, "POST", "/v1/chat/completions", body, key=KEY, headers=sent)
        usage = answer.json["usage"]
        texts = {"model": "smol-draft", "prompt": SECRET, "max_tokens": 4, "stream": True}
        assert list(stream(server.port, "/v1/completions", texts, key=KEY))[-1] == "[DONE]"
        assert (
            request(server.port, "POST", "/v1/completions", {**texts, "model": SECRET}, key=KEY).status == 404
        )
        assert request(server.port, "POST", "/v1/completions", texts).status == 401
        assert request(server.port, "GET", "/v1/models", key=KEY).status == 200
        # The end sends what the timer has not sent yet.
        assert server.terminate() == 0
        request_ids = [entry["id"] for entry in server.entries if entry["event"] == "request"]

    assert {path for path, _ in collector.received} == {"/v1/traces"}
    (chat, used), (_, streamed), (_, unknown), (_, refused) = collector.spans()
    assert (chat.name, chat.trace_id.hex(), chat.parent_span_id.hex()) == (
        "POST /v1/chat/completions",
        TRACE,
        PARENT,
    )
    assert used["gen_ai.request.model"] == "smol-draft"
    assert used["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert used["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert used["gen_ai.response.finish_reasons"] == [answer.json["choices"][0]["finish_reason"]]
    assert used["http.response.status_code"] == 200
    assert streamed["gen_ai.operation.name"] == "text_completion"
    seconds = (chat.end_time_unix_nano - chat.start_time_unix_nano) / 1e9
    assert 0 < used["gen_ai.response.time_to_first_chunk"] <= seconds
    assert (unknown["http.response.status_code"], unknown["error.type"]) == (404, "model_not_found")
    assert refused["http.response.status_code"] == 401
    assert [used["descant.request.id"], streamed["descant.request.id"]] == request_ids[:2]
    everything = b"".join(data for _, data in collector.received)
    for hidden in (SECRET, KEY, "alice", answer.json["choices"][0]["message"]["content"]):
        assert hidden.encode() not in everything
