"""Random schedules: budgets, requests, arrivals and cancellations, all made from a seed alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from descant.engine.scheduling.ageing_scheduler import AgeingScheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ScheduledRequest
from descant.errors import EngineFull, InputError
from tools.simulate.pool_engine import BrokenInvariant, Job, PoolEngine

__all__ = ["Outcome", "run_schedule"]

FAMILIES = 3
MOST_STEPS = 20_000


@dataclass(frozen=True)
class Outcome:
    """What happened in a schedule."""

    seed: int
    steps: int
    counts: Counter[str]


def run_schedule(seed: int, scheduler: type[AgeingScheduler] = AgeingScheduler) -> Outcome:
    """Run the schedule of a seed to its end; raise `BrokenInvariant` for what must not happen."""
    chance = random.Random(seed)
    requests = random_requests(chance)
    config = random_config(chance, [request for request, _ in requests])
    engine = PoolEngine(config, chance, shares=chance.random() < 0.6)
    engine.scheduler = scheduler(config, engine.lookup if engine.shares else None)
    crowd = random_jobs(chance, requests, config)
    now, steps = 0.0, 0
    try:
        while crowd or engine.live:
            steps += 1
            if steps > MOST_STEPS:
                raise BrokenInvariant(f"{len(engine.live)} requests have not ended after {steps} steps")
            submit(engine, crowd, now, chance)
            engine.step(now)
            interfere(engine, chance)
            now += chance.choice((0.0, 0.05, 0.3))
            if not engine.live and crowd:
                now = max(now, crowd[-1].arrival)
        engine.check_end()
    except BrokenInvariant as error:
        raise BrokenInvariant(f"seed {seed}, step {steps}, {config}: {error}") from error
    return Outcome(seed, steps, Counter(engine.counts))


def submit(engine: PoolEngine, crowd: list[Job], now: float, chance: random.Random) -> None:
    """Queue the jobs whose time has come, one by one or several at once; drop those that are refused."""
    while crowd and crowd[-1].arrival <= now:
        count = min(chance.choice((1, 1, 3)), len(crowd))
        batch = [crowd.pop() for _ in range(count) if crowd[-1].arrival <= now]
        for job in batch:  # the scheduler counts from the time of the call
            job.arrival = now
            job.key = now + engine.config.ageing * job.request.priority
        try:
            engine.add(batch, now)
        except (EngineFull, InputError) as error:
            if any(job.request.number in engine.jobs for job in batch):
                raise BrokenInvariant("a refused batch was kept in part") from error
            engine.count(f"refused: {type(error).__name__}")


def interfere(engine: PoolEngine, chance: random.Random) -> None:
    """Cancel a random job, or drop cached prefixes, now and then."""
    if engine.live and chance.random() < 0.05:
        engine.cancel(chance.choice(engine.live).request.number)
    if chance.random() < 0.2:
        engine.evict()


def random_config(chance: random.Random, requests: Sequence[ScheduledRequest]) -> SchedulerConfig:
    """Limits from so tight that the largest request just fits, or does not, to none."""

    def limit(least: int) -> int:
        return max(1, int(least * chance.choice((0.8, 1, 1, 1.2, 1.5, 3))) + chance.choice((0, 1)))

    loose = SchedulerConfig(block_size=chance.choice((1, 2, 4)))
    blocks = max(
        request.sure_blocks(loose) if chance.random() < 0.5 else request.max_blocks(loose)
        for request in requests
    )
    tokens = max(
        request.tokens_per_step if request.chunkable else request.prompt_tokens for request in requests
    )
    return SchedulerConfig(
        max_running_rows=limit(max(request.rows for request in requests)),
        max_step_tokens=chance.choice((None, limit(tokens), limit(tokens))),
        chunk_tokens=chance.choice((None, 1, 3, 8)),
        num_blocks=chance.choice((None, limit(blocks), limit(blocks), limit(blocks))),
        block_size=loose.block_size,
        max_waiting=chance.choice((None, None, None, 3, 8)),
        ageing=chance.choice((0.0, 0.5, 4.0)),
        preemption=chance.choice(("never", "growth", "priority", "priority")),
        headroom=chance.choice((0.0, 0.01, 0.2)),
    )


def random_requests(chance: random.Random) -> list[tuple[ScheduledRequest, int]]:
    """Requests of every kind, each with the number of its new tokens."""
    fixed = chance.random() < 0.15
    simple = chance.random() < 0.4  # one row each, in chunks, preemptible
    alike = chance.random() < 0.3  # with long prompts, which have much in common
    requests = []
    for number in range(chance.randint(1, 14)):
        prompt_rows = 1 if simple else chance.choice((1, 1, 1, 2))
        rows = prompt_rows if simple else prompt_rows * chance.choice((1, 1, 1, 2, 4))
        drafts = chance.choice((1, 1, 1, 3))
        row_prompt, new_tokens = chance.randint(12 if alike else 1, 16), chance.randint(1, 12)
        request = ScheduledRequest(
            number=number,
            prompt_tokens=row_prompt * prompt_rows,
            max_row_tokens=row_prompt + new_tokens + drafts,
            rows=rows,
            prompt_rows=prompt_rows,
            step_tokens=chance.choice((None, rows)) if drafts == 1 else rows * drafts,
            fixed_blocks=chance.randint(0, 2) if fixed else 0,
            paged=not fixed or chance.random() < 0.5,
            priority=chance.randint(-2, 2),
            deadline=chance.choice((None, None, None, None, chance.uniform(0, 12))),
            chunkable=simple or chance.random() < 0.85,
            preemptible=simple or chance.random() < 0.85,
        )
        requests.append((request, new_tokens))
    return requests


def random_jobs(
    chance: random.Random, requests: Sequence[tuple[ScheduledRequest, int]], config: SchedulerConfig
) -> list[Job]:
    """The jobs of these requests, the last to arrive first."""
    spread = chance.choice((0.0, 1.0, 8.0))
    families = chance.choice((1, FAMILIES))
    jobs = []
    for request, new_tokens in requests:
        job = Job(request, spread * chance.random(), 0.0, new_tokens, rows=request.rows)
        limit = config.max_step_tokens
        again = request.chunkable or limit is None or request.rows * request.max_row_tokens <= limit
        job.preemptible = request.preemptible and config.preemption != "never" and again
        if request.paged and not request.fixed_blocks and request.prompt_rows == 1:
            job.family = chance.randint(-1, families - 1)
            job.family_blocks = (request.prompt_tokens - 1) // config.block_size
        jobs.append(job)
    return sorted(jobs, key=lambda job: (-job.arrival, -job.request.number))
