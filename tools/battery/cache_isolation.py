"""Whether the time to the first token tells one key what another key has sent."""

from __future__ import annotations

import random
import time

from tools.battery.client import Client
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import completion, running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(2000), Size(60)  # pairs of measurements
PROMPT_CHARS = 1500
KEYS = {"alice": "key-of-alice-0123456789", "bob": "key-of-bob-0123456789ab"}


def run(size: Size) -> Outcome:
    """Measure prompts that Alice has sent and prompts that nobody has sent, as Bob and as Alice."""
    outcome, rng = Outcome(), random.Random(8)
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    known_to_bob, new_to_bob, known_to_alice, new_to_alice = [], [], [], []
    with running_server("--kv-memory", "0.05", env={"DESCANT_API_KEYS": keys}) as server:
        alice, bob = (Client(server.port, KEYS[name]) for name in ("alice", "bob"))
        for _ in range(10):
            _seconds(bob, _prompt(rng))
        for _ in range(size.count):
            sent, unsent = _prompt(rng), _prompt(rng)
            new_to_alice.append(_seconds(alice, sent))
            pairs = [(known_to_bob, sent), (new_to_bob, unsent)]
            rng.shuffle(pairs)
            for times, prompt in pairs:
                times.append(_seconds(bob, prompt))
            known_to_alice.append(_seconds(alice, sent))
        hits = server.metric("descant_prefix_hits_total", KEYS["bob"])
    others, own = auc(known_to_bob, new_to_bob), auc(known_to_alice, new_to_alice)
    margin = 0.05 if size.count >= 1000 else 0.05 + 1.5 / size.count**0.5
    outcome.check(abs(others - 0.5) <= margin, f"Bob knows what Alice has sent: the AUC is {others:.3f}")
    outcome.check(own > 0.75, f"Alice has no use of her own prefixes: the AUC is {own:.3f}")
    outcome.check(hits == size.count, f"{hits} prefixes were found, not {size.count}")
    outcome.figures = {"pairs": size.count, "auc_of_another_key": others, "auc_of_the_same_key": own}
    return outcome


def _prompt(rng: random.Random) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT_CHARS))


def _seconds(client: Client, prompt: str) -> float:
    """The time until an answer of one token."""
    began = time.perf_counter()
    answer = client.complete(completion(prompt, max_tokens=1, temperature=0))
    if answer.status != 200:
        raise RuntimeError(str(answer))
    return time.perf_counter() - began


def auc(low: list[float], high: list[float]) -> float:
    """The chance that one of `low` is below one of `high`: how well a threshold tells them apart."""
    ranks = sorted([(value, 0) for value in low] + [(value, 1) for value in high])
    seen = total = 0
    for _, is_high in ranks:
        if is_high:
            total += seen
        else:
            seen += 1
    return total / (len(low) * len(high))
