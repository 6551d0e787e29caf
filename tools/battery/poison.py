"""Requests that fail in the engine beside healthy ones: only they fail, with 400."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools.battery.client import Client, answered_tokens
from tools.battery.disconnect_storm import bodies
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import NUM_TOKENS, completion, plain_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(200), Size(16)  # requests that fail
BATCH = 8
LETTERS = [[token] for token in range(3, NUM_TOKENS)]
POISONS: tuple[dict[str, Any], ...] = (
    {"suppress_tokens": list(range(NUM_TOKENS))},
    {"bad_words_ids": [*LETTERS, [0], [1]], "eos_token_id": None, "min_new_tokens": 4},
    {"grammar": {"choice": ["abc"]}, "bad_words_ids": LETTERS, "min_new_tokens": 3},
    {"grammar": {"regex": "[0-9]{4}"}, "suppress_tokens": list(range(3, NUM_TOKENS))},
    {"grammar": {"regex": "("}},
    {"grammar": {"json_schema": {"$ref": "#/nowhere"}}},
    {"grammar": {"json_schema": {"type": "string", "pattern": "("}}},
    {"logit_bias": {str(token): -1e300 for token in range(NUM_TOKENS)}, "do_sample": True},
    {"num_beams": 4, "suppress_tokens": list(range(NUM_TOKENS))},
    {"num_beams": 2, "force_words_ids": [[5]], "suppress_tokens": list(range(NUM_TOKENS))},
    {"stop_regex": "(a+)+$("},
    {"prompt_lookup_num_tokens": 3, "suppress_tokens": list(range(NUM_TOKENS)), "temperature": 0},
    {"guidance_scale": 2.0, "suppress_tokens": list(range(NUM_TOKENS))},
    {"n": 4, "do_sample": True, "begin_suppress_tokens": list(range(NUM_TOKENS))},
)


def run(size: Size) -> Outcome:
    """Send them in batches, each with one that fails."""
    outcome, rng = Outcome(), random.Random(4)
    healthy = bodies(BATCH - 1)
    statuses: Counter[int] = Counter()
    with (
        plain_server() as server,
        ThreadPoolExecutor(BATCH) as pool,
    ):
        expected = [answered_tokens(Client(server.port).complete(body)) for body in healthy]
        clients = [Client(server.port) for _ in range(BATCH)]
        for number in range(size.count):
            poison = completion(max_tokens=6, seed=number, **POISONS[number % len(POISONS)])
            mixed = [*healthy, poison]
            order = rng.sample(range(BATCH), BATCH)
            jobs = {at: pool.submit(clients[at].complete, mixed[at]) for at in order}
            answers = [jobs[at].result() for at in range(BATCH)]
            for at, answer in enumerate(answers[:-1]):
                is_right = answer.status == 200 and answered_tokens(answer) == expected[at]
                outcome.check(
                    is_right, f"beside {poison}: {healthy[at]} {answer.status} {answer.body[:200]!r}"
                )
            statuses[answers[-1].status] += 1
            outcome.check(
                answers[-1].status == 400, f"{poison}: {answers[-1].status} {answers[-1].body[:200]!r}"
            )
        server.wait_for_metric("descant_rows", 0)
        server.wait_for_metric("descant:kv_cache_usage_perc", 0)
        failed = [entry for entry in server.entries if "failure" in entry]
        outcome.check(not failed, f"failures in the log: {failed[:2]}")
        outcome.figures = {
            "failing": size.count,
            "healthy": size.count * (BATCH - 1),
            "statuses": dict(statuses),
            "failed_steps": int(server.metric("descant_engine_failed_steps_total")),
        }
    return outcome
