"""Streams of which half are cut at random moments: the others are as without them, and nothing is left."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

from tests.support.request_cases import METHODS
from tools.battery.client import streamed_tokens
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import completion, plain_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(1000), Size(48)  # streams
NUM_CLIENTS = 24


def bodies(count: int) -> list[dict[str, object]]:
    """Requests with seeds, of many methods."""
    rng = random.Random(3)
    methods = [one for one in METHODS if "force_words_ids" not in one]
    return [
        completion(
            "".join(rng.choices("abcdefgh ", k=rng.randint(4, 60))),
            max_tokens=rng.randint(4, 32), seed=rng.randrange(2**31), **methods[number % len(methods)],
        )
        for number in range(count)
    ]  # fmt: skip


def run(size: Size) -> Outcome:
    """Run the streams undisturbed and cut, and compare."""
    outcome = Outcome()
    requests = bodies(size.count)
    with plain_server() as server:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            expected = list(pool.map(lambda body: streamed_tokens(server.port, body), requests[1::2]))

            def storm(number: int) -> list[list[int]] | None:
                rng = random.Random(number)
                if number % 2:
                    return streamed_tokens(server.port, requests[number])
                # Long enough that most are cut and do not end before.
                last, body = rng.randint(1, 6), {**requests[number], "max_tokens": 48}
                if "grammar" not in body:  # which ends a text with an end token
                    body["ignore_eos"] = True
                return streamed_tokens(server.port, body, is_cut=lambda count: count >= last)

            found = list(pool.map(storm, range(size.count)))
        began = time.monotonic()
        for name in ("descant_rows", "descant:num_requests_running", "descant:kv_cache_usage_perc"):
            server.wait_for_metric(name, 0, timeout=10)
        outcome.figures = {
            "streams": size.count,
            "cut": sum(one is None for one in found),
            "cancelled": int(server.metric("descant_engine_cancelled_total")),
            "equal": sum(one == two for one, two in zip(found[1::2], expected, strict=True)),
            "seconds_until_free": round(time.monotonic() - began, 3),
        }
        for number, (one, two) in enumerate(zip(found[1::2], expected, strict=True)):
            outcome.check(one == two, f"{requests[2 * number + 1]}: {one} is not {two}")
        failed = [entry for entry in server.entries if "failure" in entry]
        outcome.check(not failed, f"failures in the log: {failed[:2]}")
    return outcome
