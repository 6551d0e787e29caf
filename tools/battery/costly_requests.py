"""Requests that cost as much as a request may: others are answered meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.http_client import request
from tests.support.server_process import ServerProcess
from tools.battery.client import COMPLETIONS, Client
from tools.battery.outcome import Outcome, Size
from tools.battery.overload import cpu_seconds
from tools.battery.subject import completion, plain_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(20), Size(4)  # kinds of requests
MAX_CPU_SECONDS = 3.0  # of the server, from a small request to its answer

_ENUMS = {f"p{at}": {"enum": [f"v{at}-{one}" for one in range(200)]} for at in range(300)}
_NESTED = {"type": "array", "items": {"type": "string", "maxLength": 100_000}, "maxItems": 100_000}
COSTLY: tuple[dict[str, Any], ...] = (
    {"grammar": {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"}},
    {"num_beams": 8, "force_words_ids": [[token] for token in range(5, 37)], "max_tokens": 48},
    {"grammar": {"json_schema": {"type": "object", "properties": _ENUMS}}},
    {"prompt": ["a" * 3000] * 8, "max_tokens": 1},
    {"grammar": {"regex": "(a|b)*a(a|b){24}"}, "max_tokens": 64},
    {"grammar": {"regex": "(" + "|".join(f"(a|b){{{n}}}c" for n in range(1, 400)) + ")*"}},
    {"grammar": {"regex": "[^x]*x.{1000}y"}},
    {"grammar": {"json_schema": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"}}},
    {"grammar": {"json_schema": {"type": "array", "items": _NESTED, "minItems": 50_000}}},
    {"grammar": {"choice": [f"{number:09d}" for number in range(4000)]}},
    {"stop": ["z" * 60 + str(number) for number in range(60)]},
    {"num_beams": 64, "max_tokens": 200},
    {"n": 128, "max_tokens": 50, "do_sample": True},
    {"logprobs": 100, "max_tokens": 400, "n": 8},
    {"prompt": "a" * 4000, "max_tokens": 90},
    {"prompt": ["a" * 20] * 256, "max_tokens": 1},
    {"bad_words_ids": [[n % 276, n * 7 % 276, n * 13 % 276] for n in range(4000)]},
    {"prompt": "ab" * 1900, "no_repeat_ngram_size": 2, "max_tokens": 100},
    {"prompt": "ab" * 1900, "dry_multiplier": 0.8, "max_tokens": 100},
    {"prompt": "ab" * 1900, "prompt_lookup_num_tokens": 1000, "max_tokens": 100, "temperature": 0},
)


def run(size: Size) -> Outcome:
    """Send one after the other, with small requests beside it."""
    outcome, worst, answered = Outcome(), 0.0, 0
    with plain_server() as server:
        Client(server.port).complete(completion(max_tokens=2))
        for costly in COSTLY[: size.count]:
            seconds, count = _answer_beside(server, outcome, {**completion(max_tokens=8, seed=1), **costly})
            outcome.check(seconds < MAX_CPU_SECONDS, f"{seconds:.1f} seconds beside {str(costly)[:100]}")
            worst, answered = max(worst, seconds), answered + count
        server.wait_for_metric("descant_rows", 0)
    outcome.figures = {"kinds": size.count, "answered_meanwhile": answered, "cpu_seconds_worst": worst}
    return outcome


def _answer_beside(server: ServerProcess, outcome: Outcome, costly: dict[str, Any]) -> tuple[float, int]:
    """The most processor time that a small request takes beside a costly one, and how many there were."""

    def send() -> None:
        answer = request(server.port, "POST", COMPLETIONS, costly, timeout=600)
        outcome.check(answer.status in (200, 400), f"{answer.status}: {str(costly)[:100]}")

    thread = threading.Thread(target=send)
    thread.start()
    client, worst, count = Client(server.port), 0.0, 0
    while thread.is_alive():
        began = cpu_seconds(server.process.pid)
        answer = client.complete(completion(max_tokens=2, temperature=0))
        outcome.check(answer.status == 200, f"{answer.status} beside {str(costly)[:100]}")
        worst, count = max(worst, cpu_seconds(server.process.pid) - began), count + 1
    client.close()
    return worst, count
