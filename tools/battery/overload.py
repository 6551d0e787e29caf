"""Ten times as many requests as the server can answer: it refuses with 429, and answers as many as before."""

from __future__ import annotations

import threading
import time
from collections import Counter

from tests.support.server_process import ServerProcess
from tools.battery.client import Client
from tools.battery.outcome import Outcome, Size
from tools.battery.subject import completion, running_server

__all__ = ["FULL", "SMALL", "run"]

FULL, SMALL = Size(10, 300.0), Size(10, 6.0)  # clients for each row that can run, and seconds
ROWS = 4
BODY = completion("the old sea", max_tokens=128, min_new_tokens=128, temperature=0)


def run(size: Size) -> Outcome:
    """Measure the capacity, then overload it, in turns so that the machine is the same for both."""
    outcome = Outcome()
    options = ("--max-running-rows", str(ROWS), "--max-waiting", str(ROWS), "--kv-memory", "0.05")
    with running_server(*options) as server:
        Client(server.port).complete(BODY)
        rounds = max(2, int(size.seconds // 30))
        capacity: Counter[int] = Counter()
        load: Counter[int] = Counter()
        for _ in range(rounds):
            seconds = size.seconds / rounds
            measured = _measure(server, outcome, 2 * ROWS, seconds / 2)
            # So many clients that as many requests as the rate says are sent, though some of them wait.
            rate = size.count * measured[200] / (seconds / 2)
            capacity += measured
            load += _measure(server, outcome, size.count * ROWS, seconds, size.count * ROWS / rate)
        # Answers for each second of the processor that the server had: other programs take the rest.
        before, under = capacity[200] / (capacity[0] / 1e6), load[200] / (load[0] / 1e6)
        outcome.figures = {
            "times_capacity": size.count,
            "answered": load[200],
            "refused": load[429],
            "answers_per_cpu_second_before": before,
            "under_load": under,
            "goodput": under / before,
        }
        # A short run beside other programs measures roughly.
        least = 0.9 if size.seconds >= 60 else 0.75
        outcome.check(under >= least * before, f"the goodput is {under / before:.3f} of the capacity")
        outcome.check(load[429] > 0, "nothing was refused")
        wrong = {status: count for status, count in load.items() if status not in (0, 200, 429)}
        outcome.check(not wrong, f"other statuses: {wrong}")
        server.wait_for_metric("descant_rows", 0)
    return outcome


def _measure(
    server: ServerProcess, outcome: Outcome, num_clients: int, seconds: float, pause: float = 0.0
) -> Counter[int]:
    """The answers by status that so many clients get; under 0, the microseconds that the server used.

    Each client sends its requests at least `pause` seconds apart.
    """
    counts: list[Counter[int]] = [Counter() for _ in range(num_clients)]
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        client = Client(server.port)
        time.sleep(pause * number / num_clients)
        while (began := time.monotonic()) < end:
            answer = client.complete(BODY)
            counts[number][answer.status] += 1
            if answer.status == 429:
                outcome.check(answer.headers.get("retry-after", "").isdecimal(), "429 without Retry-After")
            time.sleep(max(0.0, began + pause - time.monotonic()))
        client.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_clients)]
    began = cpu_seconds(server.process.pid)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(counts, Counter[int]())
    total[0] = int(1e6 * (cpu_seconds(server.process.pid) - began))
    return total


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
