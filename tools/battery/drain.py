"""SIGTERM at random moments while requests run: all that have begun finish, and the exit code is 0."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter

from tools.battery.client import Client, answered_tokens, streamed_tokens
from tools.battery.disconnect_storm import bodies
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import completion, running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(50), Size(1)  # signals
NUM_CLIENTS = 6
WARM = completion(max_tokens=2, temperature=0)


def run(size: Size) -> Outcome:
    """End one server after the other."""
    outcome, rng, ended = Outcome(), random.Random(5), Counter[str]()
    requests = bodies(40)
    expected: list[list[list[int]]] = []
    for number in range(size.count):
        with running_server("--kv-memory", "0.05") as server:
            client = Client(server.port)
            if not expected:
                expected = [answered_tokens(client.complete(body)) for body in requests]
            client.complete(WARM)
            client.close()
            results: list[str] = []
            threads = [
                threading.Thread(
                    target=_work, args=(server.port, requests, expected, 97 * number + at, results)
                )
                for at in range(NUM_CLIENTS)
            ]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0.0, 1.5))
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(90)
            for thread in threads:
                thread.join(30)
            ended.update(results)
            outcome.check(code == 0, f"the exit code is {code}: {server.lines[-5:]}")
            outcome.check(not server.lines, f"lines in the log that are no JSON: {server.lines[:5]}")
            failed = [entry for entry in server.entries if "failure" in entry]
            outcome.check(not failed, f"failures in the log: {failed[:2]}")
    outcome.check(not ended["lost"] and not ended["different"], f"{dict(ended)}")
    outcome.figures = {"signals": size.count, "requests": dict(ended)}
    return outcome


def _work(
    port: int,
    requests: list[dict[str, object]],
    expected: list[list[list[int]]],
    seed: int,
    results: list[str],
) -> None:
    """Send requests until the server refuses; each is whole, refused, or never began."""
    rng = random.Random(seed)
    client = Client(port)
    while True:
        at = rng.randrange(len(requests))
        try:
            if rng.random() < 0.5:
                answer = client.complete(requests[at])
                if answer.status == 503:
                    results.append("refused")
                    return
                found = answered_tokens(answer)
            else:
                found = streamed_tokens(port, requests[at]) or []
        except RuntimeError as error:
            results.append("refused" if str(error).startswith("503") else "lost")
            return
        except ConnectionRefusedError:
            results.append("too late")
            return
        except (OSError, ValueError) as error:
            # The end of a connection before any byte of the answer: the request came after the last.
            results.append("too late" if _is_unanswered(error) else "lost")
            return
        results.append("whole" if found == expected[at] else "different")


def _is_unanswered(error: Exception) -> bool:
    return isinstance(error, ConnectionResetError | BrokenPipeError)  # also RemoteDisconnected
