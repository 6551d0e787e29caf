"""Many requests with a KV pool for about one: the same tokens as with room for all, and no block left."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from tools.battery.client import Client, answered_tokens, streamed_tokens
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import completion, running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(64), Size(12)  # requests
# A token of the tiny model has 2 layers x 2 heads x 8 numbers x (key and value) x 4 bytes.
TOKEN_BYTES = 256
POOL_TOKENS = 321  # 20 blocks of 16; the largest request needs 18
METHODS = (
    {"temperature": 0}, {"do_sample": True}, {"temperature": 0.7, "top_p": 0.9, "n": 2}, {"num_beams": 3},
    {"temperature": 0, "prompt_lookup_num_tokens": 3}, {"repetition_penalty": 1.3, "do_sample": True},
    {"grammar": {"regex": "[a-z ]{60}"}, "do_sample": True}, {"num_beams": 2, "do_sample": True},
)  # fmt: skip


def run(size: Size) -> Outcome:
    """Run the requests with room, then without."""
    outcome, rng = Outcome(), random.Random(7)
    bodies = [
        completion(
            "".join(rng.choices("abcdefgh ", k=rng.randint(20, 60))),
            max_tokens=rng.randint(30, 60), min_new_tokens=30, seed=number, **METHODS[number % len(METHODS)],
        )
        for number in range(size.count)
    ]  # fmt: skip
    with running_server("--kv-memory", "0.1", "--no-prefix-cache") as server:
        client = Client(server.port)
        expected = [answered_tokens(client.complete(body)) for body in bodies]
    memory = f"{POOL_TOKENS * TOKEN_BYTES / 2**30:.9f}"
    with running_server("--kv-memory", memory, "--no-prefix-cache", "--max-waiting", "1000") as server:

        def answer(number: int) -> object:
            if number % 2:
                return streamed_tokens(server.port, bodies[number])
            found = Client(server.port, timeout=600).complete(bodies[number])
            return answered_tokens(found) if found.status == 200 else found.body[:300]

        with ThreadPoolExecutor(size.count) as pool:
            found = list(pool.map(answer, range(size.count)))
        server.wait_for_metric("descant_rows", 0)
        server.wait_for_metric("descant:kv_cache_usage_perc", 0)
        preemptions = int(server.metric("descant_engine_preemptions_total"))
        failed = [entry for entry in server.entries if "failure" in entry]
    outcome.check(not failed, f"failures in the log: {failed[:2]}")
    outcome.check(preemptions > 0, "no request was preempted")
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        outcome.check(one == two, f"{bodies[number]}: {one} is not {two}")
    equal = sum(one == two for one, two in zip(found, expected, strict=True))
    outcome.figures = {"requests": size.count, "equal": equal, "preemptions": preemptions}
    return outcome
