"""Outcomes of requests in a session, and the contract that they do not depend on other requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import RowCache
from descant.core.records import Hypothesis, Observation
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Failed, Finished, Request, Session, Tokens
from descant.errors import DescantError, InputError, RowError


@dataclass(frozen=True)
class Schedule:
    """The requests, by index, that are admitted and cancelled before each step.

    Requests of one step are admitted in the given order, in one call or one by one (`admit_together`).
    """

    admissions: Mapping[int, Sequence[int]]
    cancellations: Mapping[int, Sequence[int]] = field(default_factory=dict)
    admit_together: bool = True

    @classmethod
    def at_once(cls, order: Sequence[int]) -> Schedule:
        """All requests before the first step, in this order."""
        return cls({0: list(order)})

    @classmethod
    def random(
        cls, rng: random.Random, requests: int, cancelled: Sequence[int] = (), latest: int = 8
    ) -> Schedule:
        """A random schedule of `requests` requests; those in `cancelled` are cancelled some steps later."""
        order = list(range(requests))
        rng.shuffle(order)
        admissions: dict[int, list[int]] = {}
        cancels: dict[int, list[int]] = {}
        for index in order:
            step = rng.randint(0, latest)
            admissions.setdefault(step, []).append(index)
            if index in cancelled:
                cancels.setdefault(step + rng.randint(0, latest), []).append(index)
        return cls(admissions, cancels, rng.random() < 0.5)

    @property
    def last_step(self) -> int:
        """The last step with an admission or cancellation."""
        return max((*self.admissions, *self.cancellations), default=0)


class _BlockAllProcessor:
    """A callable processor that masks every token after `steps` calls."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        self._steps_left -= 1
        return scores if self._steps_left >= 0 else torch.full_like(scores, -torch.inf)


def failing_request(request: Request, steps: int) -> Request:
    """The request, changed to fail after `steps` steps: every score is -inf then."""
    processors: tuple[Any, ...] = (*request.logits_processor, _BlockAllProcessor(steps))
    return replace(request, logits_processor=processors)


TOLERANCE = 1e-4


@dataclass
class Outcome:
    """The outcome of a request: its sequences or error, streamed tokens and logits."""

    hypotheses: list[Hypothesis] = field(default_factory=list)
    error: DescantError | None = None
    cancelled: bool = False
    streamed_tokens: dict[int, list[int]] = field(default_factory=dict)  # slot -> tokens in order
    logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # tokens so far -> [V]

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of every sequence."""
        return [hypothesis.tokens.tolist() for hypothesis in self.hypotheses]

    @property
    def reasons(self) -> list[str]:
        """The finish reason of every sequence."""
        return [hypothesis.reason for hypothesis in self.hypotheses]


class _ScheduledRun:
    """One session driven by a schedule."""

    def __init__(
        self,
        model: Any,
        requests: Sequence[Request],
        cache: RowCache | None,
        scheduler: SchedulerConfig | None,
    ) -> None:
        self._requests = requests
        self._session = Session(model, observe=self._record_logits, cache=cache, scheduler=scheduler)
        self._outcomes = [Outcome() for _ in requests]
        self._index_by_request: dict[int, int] = {}  # request id -> index in the list
        self._request_by_index: dict[int, int] = {}

    def _record_logits(self, observation: Observation) -> None:
        rows = observation.rows
        for row in range(len(rows)):
            outcome = self._outcomes[self._index_by_request[int(rows.request[row])]]
            prefix = rows.tokens[row, : int(rows.length[row])].tolist()
            outcome.logits[tuple(prefix)] = observation.logits[row, 0].cpu().clone()

    def run(self, schedule: Schedule) -> list[Outcome]:
        """The outcome of every request."""
        step = 0
        while step <= schedule.last_step or len(self._session):
            self._admit(schedule.admissions.get(step, ()), schedule.admit_together)
            for index in schedule.cancellations.get(step, ()):
                self._cancel(index)
            for event in self._session.step():
                self._handle_event(event)
            step += 1
        left = (self._session.rows, self._session.report().blocks)
        if any(left):
            raise AssertionError(f"{left} (rows, blocks) are left after every request has ended")
        return self._outcomes

    def _admit(self, indices: Sequence[int], together: bool) -> None:
        for group in [indices] if together else [[index] for index in indices]:
            numbers = self._session.admit(*(self._requests[index] for index in group))
            for number, index in zip(numbers, group, strict=True):
                self._index_by_request[number], self._request_by_index[index] = index, number

    def _cancel(self, index: int) -> None:
        outcome = self._outcomes[index]
        if outcome.hypotheses or outcome.error is not None:
            return  # already finished
        outcome.cancelled = True
        self._session.cancel(self._request_by_index[index])

    def _handle_event(self, event: object) -> None:
        if isinstance(event, Tokens):
            for request, slot, token in torch.stack((event.request, event.slot, event.token), 1).tolist():
                self._outcomes[self._index_by_request[request]].streamed_tokens.setdefault(slot, []).append(
                    token
                )
        elif isinstance(event, Finished):
            self._outcomes[self._index_by_request[event.request]].hypotheses = event.hypotheses
        elif isinstance(event, Failed):
            self._outcomes[self._index_by_request[event.request]].error = event.error


def outcomes(
    model: Any,
    requests: Sequence[Request],
    schedule: Schedule | None = None,
    cache: RowCache | None = None,
    scheduler: SchedulerConfig | None = None,
) -> list[Outcome]:
    """Run the requests in one session, all at once or by a schedule; returns their outcomes."""
    run = _ScheduledRun(model, requests, cache, scheduler)
    return run.run(schedule or Schedule.at_once(range(len(requests))))


def compare(alone: Outcome, other: Outcome, where: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless two outcomes have the same tokens and finish reasons, and close scores."""
    if type(alone.error) is not type(other.error):
        raise AssertionError(f"{where}: ended with {_describe_end(other)}, not {_describe_end(alone)}")
    if alone.tokens != other.tokens:
        raise AssertionError(f"{where}: other tokens\n  alone {alone.tokens}\n  there {other.tokens}")
    if alone.reasons != other.reasons:
        raise AssertionError(f"{where}: ended by {other.reasons}, alone by {alone.reasons}")
    if alone.streamed_tokens != other.streamed_tokens:
        raise AssertionError(
            f"{where}: streamed\n  alone {alone.streamed_tokens}\n  there {other.streamed_tokens}"
        )
    for rank, (expected, found) in enumerate(zip(alone.hypotheses, other.hypotheses, strict=True)):
        first, second = (0.0 if score is None else score for score in (expected.score, found.score))
        # Both scores may be -inf, if only an impossible token was left.
        near = first == second or abs(first - second) <= tolerance
        if (expected.score is None) is not (found.score is None) or not near:
            raise AssertionError(f"{where}: sequence {rank} scores {found.score}, alone {expected.score}")
        if expected.unmet_constraints != found.unmet_constraints:
            unmet = f"{found.unmet_constraints}, alone {expected.unmet_constraints}"
            raise AssertionError(f"{where}: sequence {rank} does not meet {unmet}")
        if expected.beam_indices != found.beam_indices:
            raise AssertionError(
                f"{where}: sequence {rank} came by beams {found.beam_indices}, alone {expected.beam_indices}"
            )
    _compare_logits(alone.logits, other.logits, where, tolerance)


def _compare_logits(
    alone: Mapping[tuple[int, ...], Tensor],
    other: Mapping[tuple[int, ...], Tensor],
    where: str,
    tolerance: float,
) -> None:
    if alone.keys() != other.keys():
        unmatched = sorted(alone.keys() ^ other.keys(), key=len)[0]
        side = "alone" if unmatched in alone else "there"
        raise AssertionError(f"{where}: a row had the tokens {list(unmatched)} only {side}")
    for prefix, logits in alone.items():
        if not torch.allclose(logits, other[prefix], rtol=0.0, atol=tolerance, equal_nan=True):
            difference = (logits - other[prefix]).abs().max()
            raise AssertionError(
                f"{where}: logits after {list(prefix)} differ by {difference:.3g}, more than {tolerance}"
            )


def _describe_end(outcome: Outcome) -> str:
    return "sequences" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"


def check_schedule(
    model: Any, requests: Sequence[Request], schedules: int = 10, seed: int = 0, tolerance: float = TOLERANCE
) -> None:
    """A request has the same result under any schedule as alone.

    Every schedule has random budgets for rows, tokens and blocks, as small as the largest request allows,
    random chunks of prompts, priorities, steps of admission, and one request that is cancelled.
    """
    alone = [outcomes(model, [request])[0] for request in requests]
    rng = random.Random(seed)
    for number in range(schedules):
        config = _random_config(rng, model, requests)
        given = [
            replace(request, priority=rng.randint(-2, 2)) for request in (*requests, rng.choice(requests))
        ]
        schedule = Schedule.random(rng, len(given), cancelled=[len(given) - 1])
        actual = outcomes(model, given, schedule, scheduler=config)
        for index, expected in enumerate(alone):
            compare(expected, actual[index], f"request {index} in schedule {number}, {config}", tolerance)


def _random_config(rng: random.Random, model: Any, requests: Sequence[Request]) -> SchedulerConfig:
    """Budgets under which each of the requests can run."""
    block_size = rng.choice((1, 4, 16))
    sized = SchedulerConfig(block_size=block_size)
    demands = [Session(model, scheduler=sized).demand(request) for request in requests]
    rows = max(demand.rows for demand in demands)
    tokens = max(max(demand.tokens_per_step, demand.prompt_tokens) for demand in demands)
    blocks = max(demand.max_blocks(sized) for demand in demands)
    return SchedulerConfig(
        block_size=block_size,
        max_running_rows=rows + rng.choice((0, 2, 8, 100)),
        max_step_tokens=rng.choice((None, tokens, 2 * tokens)),
        chunk_tokens=rng.choice((None, 1, 3, 8)),
        num_blocks=rng.choice((None, blocks, blocks + blocks // 2, 3 * blocks)),
        ageing=rng.choice((0.0, 1.0)),
        preemption=rng.choice(("never", "growth", "priority")),
        headroom=rng.choice((0.0, 0.1)),
    )


def check_batch(model: Any, requests: Sequence[Request], tolerance: float = TOLERANCE) -> None:
    """A batch of N equals N batches of 1, and permuting it permutes the results.

    Tokens, finish reasons and streams must be equal, scores and logits within the tolerance. Requests that
    sample need a seed.
    """
    alone = run_alone(model, requests)
    count = len(requests)
    orders = {
        "as given": list(range(count)),
        "reversed": list(range(count))[::-1],
        "rotated": [*range(1, count), 0],
        "shuffled": random.Random(count).sample(range(count), count),
    }
    for name, order in orders.items():
        actual = outcomes(model, requests, Schedule.at_once(order))
        for index in range(count):
            compare(alone[index], actual[index], f"request {index} in a batch of {count}, {name}", tolerance)


def check_admission(
    model: Any, requests: Sequence[Request], schedules: int = 10, seed: int = 0, tolerance: float = TOLERANCE
) -> None:
    """A result does not depend on the step of admission, nor on requests that end, fail or are cancelled.

    Every schedule admits the requests at random steps together with three more: one that ends after few
    tokens, one that fails, and one that is cancelled.
    """
    alone = run_alone(model, requests)
    rng = random.Random(seed)
    for number in range(schedules):
        short, failing, cancelled = (rng.choice(requests) for _ in range(3))
        short_config = short.generation_config.replace(
            max_new_tokens=rng.randint(1, 3), min_new_tokens=None, min_length=0
        )
        neighbours = [
            replace(short, generation_config=short_config),
            failing_request(failing, rng.randint(0, 3)),
            cancelled,
        ]
        all_requests = [*requests, *neighbours]
        schedule = Schedule.random(rng, len(all_requests), cancelled=[len(all_requests) - 1])
        actual = outcomes(model, all_requests, schedule)
        for index, expected in enumerate(alone):
            compare(expected, actual[index], f"request {index} in schedule {number}, {schedule}", tolerance)
        _check_failed(actual[len(requests) + 1], f"a neighbour without choice in schedule {number}")


def check_seed(
    model: Any, requests: Sequence[Request], schedules: int = 5, tolerance: float = TOLERANCE
) -> None:
    """A seeded request does not depend on other requests, order, admission time or torch's generator.

    It also does not change torch's generator, and another seed gives other tokens. At least one request must
    sample, with enough tokens that two seeds are unlikely to agree.
    """
    sampled = [request for request in requests if request.generation_config.do_sample]
    if not sampled:
        raise InputError(
            "requests", "must hold at least one that samples", len(requests), "set do_sample and a seed"
        )
    state = torch.get_rng_state()
    try:
        torch.manual_seed(1)
        alone = run_alone(model, requests)
        torch.manual_seed(2)
        before = torch.get_rng_state()
        for index, pair in enumerate(zip(alone, run_alone(model, requests), strict=True)):
            compare(*pair, f"request {index} under another seed of torch", tolerance)
        if not torch.equal(before, torch.get_rng_state()):
            raise AssertionError("seeded requests must not use torch's generator")
    finally:
        torch.set_rng_state(state)
    rng = random.Random(len(requests))
    for number in range(schedules):
        schedule = Schedule.random(rng, len(requests))
        for index, actual in enumerate(outcomes(model, requests, schedule)):
            compare(alone[index], actual, f"request {index} in schedule {number}, {schedule}", tolerance)
    _check_seed_matters(model, sampled)


def _check_seed_matters(model: Any, sampled: Sequence[Request]) -> None:
    """Eight seeds must not all give the same tokens."""
    for request in sampled:
        config = request.generation_config
        first = int(config.seed or 0)
        tries = [replace(request, generation_config=config.replace(seed=first + step)) for step in range(8)]
        if len({str(outcome.tokens) for outcome in outcomes(model, tries)}) == 1:
            raise AssertionError(f"seeds {first} to {first + 7} all gave the same tokens: is the seed read?")


def _check_failed(outcome: Outcome, label: str) -> None:
    """The request must have failed with a RowError, unless it finished before."""
    if not outcome.hypotheses and not isinstance(outcome.error, RowError):
        raise AssertionError(f"{label} ended with {outcome.error!r}, not with a RowError")


def run_alone(model: Any, requests: Sequence[Request]) -> list[Outcome]:
    """The outcome of every request in a separate session."""
    for index, request in enumerate(requests):
        config = request.generation_config
        if config.do_sample and config.seed is None:
            raise InputError("requests", f"must be seeded where they sample, number {index} is not", config)
    return [outcomes(model, [request])[0] for request in requests]
