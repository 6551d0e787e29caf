"""SIGKILL at random moments under load: the server is back soon, and clients that send again lose nothing."""

from __future__ import annotations

import queue
import random
import statistics
import threading
import time

from tests.support.server_process import ServerProcess
from tools.battery.client import Client, answered_tokens, streamed_tokens
from tools.battery.disconnect_storm import bodies
from tools.battery.outcome import Outcome, Size
from tools.battery.overload import cpu_seconds
from tools.battery.subject import running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(20), Size(1)  # kills
NUM_CLIENTS = 6
PER_KILL = 15  # requests
MAX_CPU_SECONDS = 10.0


class _Fleet:
    """The requests, and the server that answers them at the moment."""

    def __init__(self, count: int) -> None:
        self.requests = bodies(count)
        self.todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.found: dict[int, list[list[int]] | None] = {}
        self.port = 0
        self.num_again = 0
        for at in range(count):
            self.todo.put(at)

    def work(self) -> None:
        """Answer requests until none is left; one that breaks is sent again."""
        while len(self.found) < len(self.requests):
            try:
                at = self.todo.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                if at % 2:
                    self.found[at] = streamed_tokens(self.port, self.requests[at])
                else:
                    self.found[at] = answered_tokens(Client(self.port).complete(self.requests[at]))
            except (OSError, ValueError, KeyError, RuntimeError):
                self.num_again += 1
                self.todo.put(at)
                time.sleep(0.1)


def run(size: Size) -> Outcome:
    """Kill the server again and again."""
    outcome, rng = Outcome(), random.Random(6)
    fleet = _Fleet(PER_KILL * size.count)
    threads = [threading.Thread(target=fleet.work, daemon=True) for _ in range(NUM_CLIENTS)]
    walls, cpus, kills = [], [], 0
    for life in range(size.count + 1):
        began = time.monotonic()
        with running_server("--kv-memory", "0.05", "--no-prefix-cache") as server:
            walls.append(time.monotonic() - began)
            cpus.append(cpu_seconds(server.process.pid))
            fleet.port = server.port
            if not life:
                for thread in threads:
                    thread.start()
            if life == size.count:
                _wait(threads, 600)
                expected = _undisturbed(server, fleet)
                continue
            _wait_for_progress(fleet, PER_KILL * life + PER_KILL // 2)
            time.sleep(rng.uniform(0, 0.3))
            server.process.kill()
            kills += 1
    wrong = [at for at, tokens in enumerate(expected) if fleet.found.get(at) != tokens]
    outcome.check(not wrong, f"lost or different: {wrong[:10]}")
    worst = max(cpus)
    # The small size runs beside other tests, which take the caches and the clock of the processor.
    limit = MAX_CPU_SECONDS if size.count >= FULL.count else 2 * MAX_CPU_SECONDS
    outcome.check(worst < limit, f"ready only after {worst:.1f} seconds of the processor")
    outcome.figures = {
        "kills": kills,
        "requests": len(fleet.requests),
        "sent_again": fleet.num_again,
        "lost": len(wrong),
        "ready_seconds_median": statistics.median(walls),
        "ready_cpu_seconds_worst": worst,
    }
    return outcome


def _wait_for_progress(fleet: _Fleet, count: int) -> None:
    end = time.monotonic() + 120
    while len(fleet.found) < min(count, len(fleet.requests)) and time.monotonic() < end:
        time.sleep(0.01)


def _wait(threads: list[threading.Thread], seconds: float) -> None:
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _undisturbed(server: ServerProcess, fleet: _Fleet) -> list[list[list[int]]]:
    client = Client(server.port)
    return [answered_tokens(client.complete(body)) for body in fleet.requests]
