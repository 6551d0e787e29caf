"""Keys: every route is closed but the probes, and a key sees nothing of another."""

from __future__ import annotations

import base64
import json

import pytest

from descant.serve.application import OPEN_PATHS, ROUTES
from tests.e2e.serve.conftest import KEYS
from tests.support.http_client import request, stream

ALICE, BOB = KEYS["alice"], KEYS["bob"]
# Other wrong headers are in tests/unit/serve/test_api_keys.py.
STATES = {
    "none": None,
    "wrong": "Bearer wrong-key-of-the-tests",
    "basic": "Basic " + base64.b64encode(b"alice:wrong-key-of-the-tests").decode(),
}
PATHS = sorted({route.path.replace("{name:path}", "x").replace("{name}", "x") for route in ROUTES})
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")


@pytest.mark.parametrize("path", [*PATHS, "/none", "/v1/chat/completions/", "//v1/models", "/docs"])
def test_only_probes_are_open(keyed_server, path):
    for method in METHODS:
        for name, header in STATES.items():
            headers = {} if header is None else {"Authorization": header}
            body = {} if method in ("POST", "PUT", "PATCH") else None
            answer = request(keyed_server.port, method, path, body, headers=headers)
            if path in OPEN_PATHS:
                assert answer.status in (200, 405), (method, name)
            else:
                assert answer.status == 401, (method, name)
                assert method == "HEAD" or answer.json["error"]["code"] == "invalid_api_key"


def test_the_right_key_opens_every_route(keyed_server):
    basic = "Basic " + base64.b64encode(f"me:{BOB}".encode()).decode()
    for path in PATHS:
        for header in (f"Bearer {ALICE}", basic):
            answer = request(keyed_server.port, "GET", path, headers={"Authorization": header})
            assert answer.status in (200, 404, 405), path


def test_a_trace_is_private_to_its_key(keyed_server):
    body = {"model": "smol-draft", "prompt": "Once", "max_tokens": 4, "num_beams": 2, "trace": True}
    made = request(keyed_server.port, "POST", "/v1/completions", body, key=ALICE).json
    path = f"/traces/{made['trace_id']}"
    assert b"<html" in request(keyed_server.port, "GET", path, key=ALICE).body
    lines = request(keyed_server.port, "GET", f"{path}.jsonl", key=ALICE).body.decode().splitlines()
    assert json.loads(lines[0])
    assert request(keyed_server.port, "GET", path, key=BOB).status == 404
    assert request(keyed_server.port, "GET", "/traces/unknown", key=ALICE).status == 404


def test_traces_grow_in_a_stream(keyed_server):
    body = {"model": "smol-draft", "prompt": "Once", "max_tokens": 5, "num_beams": 3, "trace": True}
    events = list(stream(keyed_server.port, "/v1/completions", {**body, "stream": True}, key=ALICE))
    records = [event["trace"] for event in events[:-1] if "trace" in event]
    assert len(records) >= 5
    assert events[-2]["trace_id"]
    answer = request(keyed_server.port, "GET", f"/traces/{events[-2]['trace_id']}.jsonl", key=ALICE)
    whole = [json.loads(line) for line in answer.body.decode().splitlines()]
    assert [record for piece in records for record in piece] == whole


def test_the_log_has_neither_keys_nor_prompts(keyed_server):
    secret = "the quick brown secret"
    body = {"model": "smol-draft", "prompt": secret, "max_tokens": 2}
    assert request(keyed_server.port, "POST", "/v1/completions", body, key=ALICE).status == 200
    bad = {**body, "num_beams": -1}
    assert request(keyed_server.port, "POST", "/v1/completions", bad, key=ALICE).status == 400
    text = json.dumps(keyed_server.entries) + "".join(keyed_server.lines)
    assert '"alice"' in text
    for hidden in (secret, ALICE, BOB):
        assert hidden not in text


def test_prefixes_are_shared_within_a_key_only(keyed_server):
    prompt = "one two three four five six seven eight nine ten " * 10
    body = {"model": "smol-draft", "prompt": prompt, "max_tokens": 1}

    def hits(key, **extra):
        before = keyed_server.metric("descant_prefix_hits_total", ALICE)
        assert request(keyed_server.port, "POST", "/v1/completions", {**body, **extra}, key=key).status == 200
        return keyed_server.metric("descant_prefix_hits_total", ALICE) - before

    assert [hits(ALICE), hits(ALICE), hits(BOB), hits(BOB)] == [0, 1, 0, 1]
    assert [hits(BOB, cache_salt="x"), hits(BOB, cache_salt="x"), hits(BOB)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("path", "body", "details"),
    [
        ("/v1/completions", {"max_tokens": 1}, "prompt_tokens_details"),
        ("/v1/completions", {"max_tokens": 2, "num_beams": 2}, "prompt_tokens_details"),
        ("/v1/chat/completions", {"max_tokens": 1}, "prompt_tokens_details"),
        ("/v1/responses", {"max_output_tokens": 1}, "input_tokens_details"),
    ],
)
def test_the_usage_says_how_much_was_cached(keyed_server, path, body, details):
    text = f"eleven {path} {len(body)} twelve thirteen " * 12
    prompt = {"completions": "prompt", "responses": "input"}.get(path[4:])
    given = {prompt: text} if prompt else {"messages": [{"role": "user", "content": text}]}

    def cached(key):
        sent = {"model": "smol-draft", **given, **body}
        answer = request(keyed_server.port, "POST", path, sent, key=key).json["usage"]
        return answer[details]["cached_tokens"], answer.get("prompt_tokens", answer.get("input_tokens"))

    first, second, other = cached(ALICE), cached(ALICE), cached(BOB)
    assert first[0] == other[0] == 0
    assert second[0] == (second[1] - 1) // 32 * 32 > 0
    if path == "/v1/completions":
        sent = {"model": "smol-draft", **given, **body, "stream": True}
        sent |= {"stream_options": {"include_usage": True}}
        *_, last, _ = stream(keyed_server.port, path, sent, key=ALICE)
        assert last["usage"][details] == {"cached_tokens": second[0]}
