"""Traces of keys, the log, settings, and the document of the API."""

from __future__ import annotations

import io
import json

import pytest

from descant import Tracer
from descant.errors import ConfigError
from descant.serve.application import ROUTES
from descant.serve.http.errors import ApiError
from descant.serve.http.keys import ApiKey
from descant.serve.http.request import RequestState
from descant.serve.http.telemetry import AccessLog
from descant.serve.model.served_model import TraceStore
from descant.serve.routes.service import openapi_document
from descant.serve.settings import ServerSettings

ALICE, BOB = ApiKey("alice", b"1"), ApiKey("bob", b"2")


def finished_tracer() -> Tracer:
    tracer = Tracer()
    tracer.start_run("model", 10)
    return tracer


def test_a_store_holds_the_last_traces_of_each_key():
    store = TraceStore(2, 10_000)
    numbers = [store.add(ALICE, finished_tracer()) for _ in range(3)]
    assert len(store) == 2
    assert store.get(ALICE, numbers[2]).header.model == "model"
    for key, number in ((ALICE, numbers[0]), (BOB, numbers[2]), (ALICE, "none")):
        with pytest.raises(ApiError, match="no such trace"):
            store.get(key, number)


def test_traces_are_off_by_default():
    with pytest.raises(ApiError, match="--traces"):
        TraceStore(0, 10_000).new_tracer(None)
    assert TraceStore(1, 10_000).new_tracer(None).limit == 10_000


def test_the_log_has_one_line_for_a_request():
    stream = io.StringIO()
    log = AccessLog(stream)
    state = RequestState(key=ALICE, status=200, num_prompt_tokens=3, num_new_tokens=4)
    state.finish_reasons.append("stop")
    log.write("POST", "/v1/completions", state, 0.5)
    log.write("GET", "/health", RequestState(status=200), 0.1)
    try:
        raise ValueError("a prompt in a message")
    except ValueError as error:
        log.write("POST", "/x", RequestState(status=500, failure=error, error_code="internal_error"), 0.1)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["key"], first["prompt_tokens"], first["output_tokens"]) == ("alice", 3, 4)
    assert (second["failure"], second["error"]) == ("ValueError", "internal_error")
    assert "a prompt" not in stream.getvalue()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_body_bytes": 0},
        {"max_prompt_tokens": 0},
        {"max_request_seconds": 0},
        {"root_path": "llm"},
        {"root_path": "/llm/"},
    ],
)
def test_settings_are_checked(settings):
    with pytest.raises(ConfigError):
        ServerSettings(model_name="m", **settings)


def test_the_document_is_that_of_the_routes():
    document = openapi_document(ROUTES)
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posts == {route.path for route in ROUTES if route.body is not None}
    assert {"/v1/models", "/health", "/ready", "/metrics"} == set(document["paths"]) - posts
    completion = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "num_beams", "penalty_alpha", "grammar", "trace"} <= set(completion)
    assert json.dumps(document)
    form = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert form == {"multipart/form-data": {"schema": {"$ref": "#/components/schemas/TranscriptionForm"}}}
    fields = document["components"]["schemas"]["TranscriptionForm"]["properties"]
    assert {"file", "model", "language", "timestamp_granularities[]", "num_beams"} <= set(fields)
