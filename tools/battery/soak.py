"""Many small requests of mixed kinds: the memory of the server does not grow."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.http_client import stream
from tools.battery.byte_fuzz import rss
from tools.battery.client import COMPLETIONS, Client
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import MODEL, NUM_TOKENS, completion, running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(100_000), Size(600)  # requests
NUM_CLIENTS = 8
MEASURED = 20_000  # requests from which on the slope counts
MAX_SLOPE = 1.0  # MB for 10,000 requests
MAX_SMALL_GROWTH = 24.0  # MB; a short run is all warm-up
CHAT = "/v1/chat/completions"
# Few different grammars: they are cached up to 128 MB.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_FILLS = 160  # requests that fill the caches of words
WORDS_OF_A_FILL = 250


def _word(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(LETTERS, k=size))


def _fill(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A text of many long words.

    Each thread of the tokenizers library remembers 10,000 words, and this tokenizer takes all between two
    special tokens for a word: with small requests alone it would take very many to fill them.
    """
    return "/tokenize", {"prompt": "</s>".join(_word(rng, 250) for _ in range(WORDS_OF_A_FILL))}


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A small request of some kind, whose prompt is random."""
    prompt = " ".join(_word(rng, rng.randint(2, 9)) for _ in range(rng.randint(1, 40)))
    seed, short = rng.randrange(2**31), rng.randint(1, 4)
    base = completion(prompt, max_tokens=short, seed=seed)
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": short,
        "seed": seed,
    }
    kinds: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, base),
        (COMPLETIONS, {**base, "temperature": 0, "logprobs": 2}),
        (COMPLETIONS, {**base, "n": 2, "stream": True}),
        (COMPLETIONS, {**base, "num_beams": 2, "do_sample": False}),
        (COMPLETIONS, {**base, "grammar": {"regex": "[a-z]{2}" + "x" * rng.randrange(10)}}),
        (COMPLETIONS, {**base, "prompt": rng.choices(range(3, NUM_TOKENS), k=rng.randint(1, 250))}),
        (COMPLETIONS, {**base, "trace": True}),
        (CHAT, {**chat, "num_beams": 2, "trace": True}),
        (COMPLETIONS, {**base, "top_k": -5}),
        (COMPLETIONS, {**base, "suppress_tokens": list(range(NUM_TOKENS))}),
        (CHAT, chat),
        (CHAT, {**chat, "stream": True}),
        ("/v1/responses", {"model": MODEL, "input": prompt, "max_output_tokens": short, "seed": seed}),
        ("/tokenize", {"prompt": prompt}),
        ("/nowhere", {"a": rng.random()}),
    ]
    return rng.choice(kinds)


def run(size: Size) -> Outcome:
    """Send the requests, and fit a line to the memory of the second half."""
    outcome = Outcome()
    points: list[tuple[int, float]] = []
    # A pool of a size that is soon full, so that what is cached does not count as growth.
    options = ("--kv-memory", "0.001", "--traces", "8")
    with running_server(*options) as server, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        pid = server.process.pid

        def work(seed: int, count: int) -> int:
            rng, client, wrong = random.Random(seed), Client(server.port), 0
            for _ in range(count):
                path, body = _request(rng)
                if body.get("stream") and rng.random() < 0.3:  # and leaves
                    events = stream(server.port, path, body)
                    next(events, None)
                    events.close()  # type: ignore[attr-defined]
                else:
                    wrong += client.send("POST", path, body).status >= 500
            client.close()
            return wrong

        fills = NUM_FILLS if size.count >= MEASURED else 0

        def fill(seed: int) -> None:
            rng, client = random.Random(-seed), Client(server.port)
            for _ in range(fills // NUM_CLIENTS):
                outcome.check(client.send("POST", *_fill(rng)).status == 200, "a text was not encoded")
            client.close()

        list(pool.map(fill, range(1, NUM_CLIENTS + 1)))
        step = max(1, size.count // 50 // NUM_CLIENTS)
        done = wrong = 0
        while done < size.count:
            seeds = range(done, done + NUM_CLIENTS)
            wrong += sum(pool.map(lambda seed: work(seed, step), seeds))
            done += step * NUM_CLIENTS
            server.entries.clear()
            points.append((done, rss(pid) / 2**20))
        outcome.check(not wrong, f"{wrong} answers of 500 and above")
    late = points[len(points) // 2 :]
    slope = 10_000 * _slope(late)
    growth = late[-1][1] - late[0][1]
    outcome.figures = {
        "requests": done,
        "mb_begin": points[0][1],
        "mb_end": points[-1][1],
        "mb_per_10000": slope,
    }
    if size.count >= MEASURED:
        outcome.check(slope < MAX_SLOPE, f"{slope:.2f} MB for 10,000 requests: {points}")
    outcome.check(growth < MAX_SMALL_GROWTH, f"grown by {growth:.1f} MB in the second half: {points}")
    return outcome


def _slope(points: list[tuple[int, float]]) -> float:
    """The slope of the line that fits best."""
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0
