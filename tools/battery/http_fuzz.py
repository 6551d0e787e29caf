"""Random bodies by /openapi.json, right and wrong ones: nothing fails, and answers tell nothing."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.contracts import configs
from tests.support.http_client import Answer, request
from tests.support.server_process import ServerProcess
from tools.battery.client import Client
from tools.battery.json_values import SchemaValues
from tools.battery.outcome import Outcome, Size
from tools.battery.overload import cpu_seconds
from tools.battery.subject import MODEL, model_folder, running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(2000), Size(50)  # requests to each endpoint
KEY = "key-of-the-battery-0123456789"
# Where the program that reads OpenAPI documents is; without it, only the values of this folder are sent.
SCHEMATHESIS = "DESCANT_SCHEMATHESIS"


def run(size: Size) -> Outcome:
    """Send the requests."""
    outcome = Outcome()
    options = (
        "--kv-memory",
        "0.05",
        "--max-output-tokens",
        "8",
        "--traces",
        "4",
        "--max-request-seconds",
        "60",
    )
    with running_server(*options, env={"DESCANT_API_KEYS": f"fuzz={KEY}"}) as server:
        document = request(server.port, "GET", "/openapi.json", key=KEY).json
        statuses: Counter[int] = Counter()
        for path, methods in document["paths"].items():
            statuses.update(_fuzz_path(server, outcome, document, path, methods, size.count))
        _send_long_names(server, outcome)
        if os.environ.get(SCHEMATHESIS):
            outcome.figures["schemathesis"] = _run_schemathesis(server, outcome, size.count)
        _check_server(server, outcome)
        outcome.figures |= {"requests": sum(statuses.values()), "statuses": dict(sorted(statuses.items()))}
    return outcome


def _fuzz_path(
    server: ServerProcess, outcome: Outcome, document: Any, path: str, methods: Any, count: int
) -> Counter[int]:
    statuses: Counter[int] = Counter()
    client = Client(server.port, KEY)
    if "post" not in methods:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            answer = client.send(method, path)
            statuses[answer.status] += 1
            check_answer(outcome, f"{method} {path}", answer)
        return statuses
    schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
    values = SchemaValues(document, 1, _known_values())
    rng = random.Random(path)
    for number in range(count):
        body = values.body(schema, is_wrong=number % 2 == 1)
        if isinstance(body, dict) and rng.random() < 0.9:
            body = _limited(body, rng)
        answer = client.send("POST", path, body)
        statuses[answer.status] += 1
        check_answer(outcome, f"POST {path} {json.dumps(body)}", answer)
    client.close()
    return statuses


def _send_long_names(server: ServerProcess, outcome: Outcome) -> None:
    """Names of a million characters, whose errors are short and come soon."""
    name, client = "x" * 1_000_000, Client(server.port, KEY)
    message = {"role": "user", "content": "a"}
    bodies = (
        {"model": MODEL, "messages": [message], name: 1},
        {"model": name, "messages": [message]},
        {"model": MODEL, "messages": [message], "logit_bias": {name: 1}},
        {"model": MODEL, "messages": [message], "grammar": {name: 1}},
        {"model": MODEL, "messages": [message], "stop": [name]},
    )
    for body in bodies:
        began = cpu_seconds(server.process.pid)
        answer = client.send("POST", "/v1/chat/completions", body)
        seconds = cpu_seconds(server.process.pid) - began
        outcome.check(400 <= answer.status < 500, f"{answer.status}: {str(body)[:200]}")
        outcome.check(len(answer.body) < 5000, f"{len(answer.body)} bytes: {str(body)[:200]}")
        outcome.check(seconds < 1.0, f"{seconds:.1f} seconds: {str(body)[:200]}")


def _limited(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A body that reaches the engine: the name of the model, and few tokens."""
    body = dict(body)
    if "model" in body:
        body["model"] = MODEL
    if "prompt" in body or "messages" in body or "input" in body:
        for name in (
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "max_new_tokens",
            "max_length",
        ):
            if name in body and isinstance(body[name], int):
                body[name] = rng.randint(1, 8)
    return body


def _known_values() -> dict[str, list[Any]]:
    """Values of the generation parameters, those that JSON has."""
    known: dict[str, list[Any]] = {}
    for name, values in configs.GOOD.items():
        plain = []
        for value in values:
            try:
                plain.append(json.loads(json.dumps(value)))
            except (TypeError, ValueError):
                continue
        if plain:
            known[name] = plain
    return known


def check_answer(outcome: Outcome, what: str, answer: Answer) -> None:
    """Check what no answer may have."""
    body = answer.body.decode("utf-8", "replace")
    outcome.check(answer.status < 500, f"{answer.status}: {what}")
    outcome.check('"internal_error"' not in body, f"an internal error: {what}")
    outcome.check("Traceback" not in body and 'File "' not in body, f"a traceback: {what}")
    outcome.check(KEY not in body + str(answer.headers), f"a key: {what}")
    for secret in _machine_paths():
        # What the client has sent may come back.
        outcome.check(secret not in body or secret in what, f"{secret} in the answer: {what} {body[:300]}")
    if answer.status >= 400 and answer.body:
        is_error = bool(re.match(r'\s*\{"error"', body)) and isinstance(json.loads(body)["error"], dict)
        outcome.check(is_error, f"another form of an error: {what} {body[:200]}")


def _machine_paths() -> tuple[str, ...]:
    return (str(model_folder()), str(Path(__file__).resolve().parents[2]), "site-packages", str(Path.home()))


def _check_server(server: ServerProcess, outcome: Outcome) -> None:
    """The server is as it was: no failure in its log, nothing left in its batch."""
    failed = [entry for entry in server.entries if "failure" in entry]
    outcome.check(not failed, f"{len(failed)} failures in the log, such as {failed[:2]}")
    outcome.check(not server.lines, f"lines in the log that are no JSON: {server.lines[:5]}")
    outcome.check(request(server.port, "GET", "/ready").status == 200, "the server is not ready")
    server.wait_for_metric("descant_rows", 0, key=KEY)


def _run_schemathesis(server: ServerProcess, outcome: Outcome, count: int) -> str:
    """Run schemathesis on the document; returns its last line."""
    command = [
        os.environ[SCHEMATHESIS],
        "run",
        f"{server.url}/openapi.json",
        "-H",
        f"Authorization: Bearer {KEY}",
    ]
    options = ["--max-examples", str(count), "--checks", "not_a_server_error", "--phases", "examples,fuzzing"]
    with tempfile.TemporaryDirectory() as folder:  # where it leaves what it has found
        found = subprocess.run(
            [*command, *options, "--mode", "all", "--no-color", "--seed", "1"],
            capture_output=True, text=True, check=False, cwd=folder,
        )  # fmt: skip
    outcome.check(found.returncode == 0, f"schemathesis: {found.stdout[-3000:]}")
    lines = [line.strip(" =") for line in found.stdout.splitlines() if line.strip(" =")]
    return "; ".join(lines[-4:])[:300]
