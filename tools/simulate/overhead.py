"""What the scheduler itself costs: CPU time of a step and memory of a waiting request."""

from __future__ import annotations

import time
import tracemalloc

from descant.engine.scheduling.ageing_scheduler import AgeingScheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import RequestUsage, ScheduledRequest, StepReport

__all__ = ["bytes_per_waiting", "seconds_per_step"]

BLOCK = 16


def request(number: int) -> ScheduledRequest:
    """A prompt of 400 tokens with an answer of 100."""
    return ScheduledRequest(number=number, prompt_tokens=400, max_row_tokens=500)


def seconds_per_step(running: int, waiting: int, steps: int = 400) -> float:
    """CPU seconds of `schedule` and `finish_step`, with `running` requests that decode and a full queue.

    In each step a hundredth of the requests end and as many are admitted, and a sixteenth need a block.
    """
    config = SchedulerConfig(max_running_rows=running, num_blocks=64 * running, max_step_tokens=1 << 20)
    one = AgeingScheduler(config)
    one.add(*(request(number) for number in range(running + waiting)), now=0.0)
    one.schedule(0.0)
    one.finish_step(StepReport())
    spent, number = 0.0, running + waiting
    for step in range(steps):
        began = time.process_time()
        plan = one.schedule(float(step))
        spent += time.process_time() - began
        leaving = max(running // 100, 1)
        ended = plan.decode[:leaving]
        grown = plan.decode[leaving::BLOCK]
        report = StepReport({number: RequestUsage(26, 1) for number in grown}, {}, ended)
        began = time.process_time()
        one.finish_step(report)
        spent += time.process_time() - began
        one.add(*(request(number + index) for index in range(len(ended))), now=float(step))
        number += len(ended)
    return spent / steps


def bytes_per_waiting(count: int = 20_000) -> float:
    """The memory of a waiting request."""
    one = AgeingScheduler(SchedulerConfig())
    tracemalloc.start()
    one.add(*(request(number) for number in range(count)), now=0.0)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / count
