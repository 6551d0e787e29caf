"""Operation: limits, overload, disconnects, an end that loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.http_client import request, stream
from tests.support.server_process import ServerProcess

BODY = {"model": "smol-draft", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
LONG = {**BODY, "max_tokens": 400, "stream": True, "min_new_tokens": 400}
PATH = "/v1/completions"


def test_leaving_a_stream_cancels_its_request(server):
    before = server.metric("descant_engine_cancelled_total")
    events = stream(server.port, PATH, LONG)
    next(events)
    events.close()
    server.wait_for_metric("descant_engine_cancelled_total", before + 1)
    server.wait_for_metric("descant_rows", 0)


def test_leaving_before_an_answer_cancels_its_request(server):
    before = server.metric("descant_engine_cancelled_total")
    body = json.dumps({**LONG, "stream": False}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.5)
    server.wait_for_metric("descant_engine_cancelled_total", before + 1)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b"[" * 100_000, {}, 400, "invalid_json"),
        (b'{"model": NaN}', {}, 400, "invalid_json"),
        (b'{"model": "\xff"}', {}, 400, "invalid_json"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b" " * (5 * 2**20), {}, 413, "body_too_large"),
        ({"model": "smol-draft"}, {}, 400, "missing_required_parameter"),
        ({**BODY, "prompt": []}, {}, 400, "invalid_value"),
        ({**BODY, "prompt": [10**9]}, {}, 400, "invalid_value"),
        ({**BODY, "prompt": "\ud800"}, {}, 400, "invalid_value"),
        ({**BODY, "prompt": ["x"] * 300}, {}, 400, "invalid_value"),
        ({**BODY, "prompt": "word " * 20_000}, {}, 400, "context_length_exceeded"),
        ({**BODY, "prompt": [1.5] * 200_000}, {}, 400, "invalid_value"),
        ({**BODY, "metadata": {"a": {"b": 1}}}, {}, 400, "invalid_value"),
        (b'{"model": ' + b"[" * 500 + b"]" * 500 + b"}", {}, 400, "invalid_json"),
        ({**BODY, "num_return_sequences": -100}, {}, 400, "invalid_value"),
        ({**BODY, "dry_multiplier": 1, "dry_sequence_breakers": ["\ud800"]}, {}, 400, "invalid_value"),
        ({**BODY, "model": "another"}, {}, 404, "model_not_found"),
        (BODY, {"Host": "evil.example"}, 403, "host_not_allowed"),
    ],
)
def test_wrong_requests(server, body, headers, status, code):
    answer = request(server.port, "POST", PATH, body, headers=headers)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)


def test_a_refused_prompt_among_others_leaves_the_engine_alive(server):
    body = {**BODY, "prompt": ["a"] * 32, "num_beams": 300}
    assert request(server.port, "POST", PATH, body).status == 400
    assert request(server.port, "POST", PATH, BODY).status == 200
    assert request(server.port, "GET", "/health").status == 200


def test_paths_and_methods(server):
    assert request(server.port, "GET", "/none").json["error"]["code"] == "not_found"
    assert request(server.port, "GET", PATH).json["error"]["code"] == "method_not_allowed"
    assert request(server.port, "GET", "/health").json == {"status": "ok"}
    assert request(server.port, "GET", "/ready").json == {"status": "ready"}


def test_headers(server):
    answer = request(
        server.port, "POST", PATH, BODY, headers={"X-Request-Id": "mine-1", "Origin": "http://a"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers
    assert (
        request(server.port, "POST", PATH, BODY, headers={"X-Request-Id": "a b"}).headers["x-request-id"]
        != "a b"
    )


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
WHOLE = HEAD + b"Content-Length: 2\r\n\r\n{}"
LIMIT = 64 * 2**10 - len(HEAD) - len(b"X: \r\n\r\n")  # of a header


@pytest.mark.parametrize("size", [2**20, 1000])  # of the pieces that are sent
@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (HEAD + b"X: " + b"a" * LIMIT + b"\r\n\r\n", [b"400"]),
        (HEAD + b"X: " + b"a" * (LIMIT + 1) + b"\r\n\r\n", [b"431"]),
        (HEAD + b"X: " + b"a" * 80_000 + b"\r\nContent-Length: 2\r\n\r\n{}", [b"431"]),
        (HEAD + b"X: a\r\n" * 14_000 + b"Content-Length: 2\r\n\r\n{}", [b"431"]),
        (b"GET /" + b"a" * 80_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", [b"431"]),
        # Where the body has begun, the end of the connection must do.
        (CHUNKED[:-4] + b";" + b"a" * 80_000 + b"\r\n{}\r\n0\r\n\r\n", []),
        (CHUNKED + b"0\r\nX: " + b"a" * 80_000 + b"\r\n\r\n", []),
        (CHUNKED + b"0\r\n" + b"X: a\r\n" * 14_000 + b"\r\n", []),
        (CHUNKED + b"0\r\n\r\n" + HEAD + b"X: " + b"a" * 80_000 + b"\r\n\r\n", None),
    ],
)  # fmt: skip
def test_what_is_no_body_has_a_limit(server, data, statuses, size):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        answer = b""
        try:
            for start in range(0, len(data), size):
                connection.sendall(data[start : start + size])
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass  # closed before all was sent
    found = [line.split()[1] for line in answer.splitlines() if line.startswith(b"HTTP/1.1 ")]
    assert found == statuses if statuses is not None else set(found) <= {b"400", b"431"}


def test_gauges_have_the_names_that_endpoint_pickers_read(server):
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(f"vllm:{name}") == server.metric(f"descant:{name}") == 0


def test_limits_queue_and_root_path(model_folder, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[keys.slow]\nkey = "slow-key-of-the-tests"\nrequests_per_minute = 2\n'
        '[keys.small]\nkey = "small-key-of-the-tests"\ntokens_per_minute = 40\n'
        '[keys.single]\nkey = "single-key-of-the-tests"\nconcurrent_requests = 1\n'
        '[keys.free]\nkey = "free-key-of-the-tests"\n'
    )
    options = ("--api-keys", str(keys), "--max-waiting", "2", "--max-running-rows", "2", "--kv-memory", "0.2")
    cors = ("--root-path", "/llm", "--cors-origin", "https://app.example", "--max-output-tokens", "500")
    with ServerProcess(model_folder, *options, *cors) as server:
        port = server.port

        def send(key, **extra):
            return request(port, "POST", PATH, {**BODY, **extra}, key=f"{key}-key-of-the-tests")

        assert [send("slow").status for _ in range(3)] == [200, 200, 429]
        assert int(send("slow").headers["retry-after"]) in range(1, 31)
        assert [send("small", max_tokens=12).status for _ in range(4)][-1] == 429
        assert send("small", max_tokens=100).status == 400
        assert send("free", max_tokens=501).status == 400
        assert request(port, "POST", f"/llm{PATH}", BODY, key="free-key-of-the-tests").status == 200
        preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        allowed = request(port, "OPTIONS", PATH, headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        _check_overload(send)
        _check_concurrency(port, send)
        assert server.terminate() == 0


def _check_overload(send):
    """More requests than may run and wait: the others get 429 and nothing else happens."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: send("free", max_tokens=40, min_new_tokens=40), range(16)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2
    assert all("retry-after" in answer.headers for answer in answers if answer.status == 429)


def _check_concurrency(port, send):
    events = stream(port, PATH, LONG, key="single-key-of-the-tests")
    next(events)
    assert send("single").json["error"]["code"] == "concurrent_requests"
    events.close()
    end = time.monotonic() + 10
    while send("single").status != 200:
        assert time.monotonic() < end


@pytest.mark.parametrize("delay", [0.0, 0.6])
def test_sigterm_lets_requests_finish(model_folder, delay):
    with ServerProcess(model_folder, "--kv-memory", "0.2") as server:
        body = {**BODY, "max_tokens": 60, "min_new_tokens": 60}
        results = []

        def run(is_streamed):
            try:
                if is_streamed:
                    results.append(list(stream(server.port, PATH, {**body, "stream": True}))[-1] == "[DONE]")
                else:
                    answer = request(server.port, "POST", PATH, body)
                    results.append(answer.status == 200 and answer.json["usage"]["completion_tokens"] == 60)
            except OSError:
                results.append(None)  # it came after the end

        threads = [threading.Thread(target=run, args=(index % 2 == 0,)) for index in range(4)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 20
        while (
            server.metric("descant:num_requests_running") + server.metric("descant:num_requests_waiting") < 4
        ):
            assert time.monotonic() < end
        time.sleep(delay)
        assert server.terminate() == 0
        for thread in threads:
            thread.join(10)
        assert results == [True] * 4
        assert any(entry["event"] == "drain" for entry in server.entries)


def test_sigterm_while_draining_refuses_new_requests(model_folder):
    with ServerProcess(model_folder, "--kv-memory", "0.2") as server:
        events = stream(server.port, PATH, LONG)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 10
        while request(server.port, "GET", "/ready").status != 503:
            assert time.monotonic() < end
        assert request(server.port, "GET", "/health").status == 200
        refused = request(server.port, "POST", PATH, BODY)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert list(events)[-1] == "[DONE]"
        assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("grace", "signals"), [("60", [signal.SIGINT, signal.SIGINT, signal.SIGINT]), ("0.2", [signal.SIGTERM])]
)
def test_a_stream_that_is_not_finished_ends_with_an_error(model_folder, grace, signals):
    options = ("--kv-memory", "0.5", "--grace-seconds", grace)
    with ServerProcess(model_folder, *options) as server:
        events = stream(server.port, PATH, {**LONG, "max_tokens": 2000, "min_new_tokens": 2000})
        next(events)
        for one in signals:
            server.process.send_signal(one)
            time.sleep(0.3)
        *_, last = events
        assert last["error"]["code"] == "shutting_down"
        assert server.process.wait(30) == 0
    assert not server.lines


def test_the_log_is_for_people_where_it_is_asked_for(model_folder):
    command = [sys.executable, "-m", "descant.cli", "serve", model_folder, "--port", "0"]
    master, slave = pty.openpty()  # a terminal
    process = subprocess.Popen(command, stderr=slave, stdout=slave, env={**os.environ, "COLUMNS": "80"})
    os.close(slave)
    text = ""
    try:
        while "Ctrl-C" not in text:
            text += os.read(master, 4096).decode()
        port = int(re.search(r"http://127.0.0.1:(\d+)/v1", text)[1])
        assert request(port, "POST", PATH, {**BODY, "model": "other"}).status == 404
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the end
            while part := os.read(master, 4096).decode():
                text += part
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
    lines = text.replace("\r", "").splitlines()
    first = next(index for index, line in enumerate(lines) if line.endswith("Serving smol-draft"))
    assert lines[first + 2] == f"  Page: http://127.0.0.1:{port}/"
    pattern = r"\d\d:\d\d:\d\d POST /v1/completions 404 \d+\.\d\ds key=anonymous error=model_not_found"
    assert any(re.fullmatch(pattern, line) for line in lines), lines
    assert "{" not in text
