"""The mixed session: requests of every method, admitted and cancelled at random, each as alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from descant import Finished, GenerationConfig, Request, RowError, Session
from descant.testing import Outcome, Schedule, compare, failing_request, outcomes
from tests.contracts.subjects import requests
from tests.support.ci_slices import first

SCHEDULES = 120  # for each of two models
PART = 20


@dataclass(frozen=True)
class Mix:
    """The mixed requests, the output of each alone, and other requests beside them."""

    model: object
    requests: list[Request]
    alone: list[Outcome]
    neighbours: list[Request]


CONFIGS = [
    GenerationConfig(max_new_tokens=14),
    GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.7, seed=3),
    GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.4, top_k=0, seed=4),
    GenerationConfig(max_new_tokens=11, num_beams=4, num_return_sequences=2),
    GenerationConfig(max_new_tokens=8, num_beams=3, do_sample=True, temperature=1.2, seed=5),
]
EXTRA = [
    GenerationConfig(max_new_tokens=5),
    GenerationConfig(max_new_tokens=16, do_sample=True, top_p=0.8, seed=6, num_return_sequences=2),
    GenerationConfig(max_new_tokens=16, num_beams=4, early_stopping=True),
    GenerationConfig(max_new_tokens=16, num_beams=2, repetition_penalty=1.2),
]


@pytest.fixture(scope="module", params=["llama", "t5"])
def mix(request, tiny):
    """The requests on one model; every one of them long enough to be met by the others."""
    one = tiny(request.param)
    wanted = requests(one, CONFIGS, (6, 1, 11, 4, 8), seed=21)
    alone = [outcomes(one.model, [each])[0] for each in wanted]
    assert all(len(found.tokens[0]) >= 4 for found in alone)
    assert [len(found.tokens) for found in alone] == [1, 1, 1, 2, 1]
    return Mix(one.model, wanted, alone, requests(one, EXTRA, (3, 9, 5, 2), seed=22))


@pytest.mark.ci_cases("t5-0")
@pytest.mark.parametrize("part", first(1, SCHEDULES // PART))
def test_every_request_is_as_if_alone(mix, part):
    rng = random.Random(part)
    for number in range(PART):
        extra = rng.sample(mix.neighbours, rng.randint(0, len(mix.neighbours)))
        if extra and rng.random() < 0.3:
            extra[0] = failing_request(extra[0], rng.randint(0, 4))
        whole = [*mix.requests, *extra]
        doomed = [at for at in range(len(mix.requests), len(whole)) if rng.random() < 0.6]
        schedule = Schedule.random(rng, len(whole), doomed, latest=rng.choice((0, 3, 10)))
        found = outcomes(mix.model, whole, schedule)
        for place, expected in enumerate(mix.alone):
            compare(expected, found[place], f"request {place}, part {part}, schedule {number}, {schedule}")
        assert all(
            found[at].cancelled or found[at].hypotheses or found[at].error for at in range(5, len(whole))
        )
        assert all(one.error is None or isinstance(one.error, RowError) for one in found)


def test_one_forward_a_step_for_all_rows(mix):
    """A model with positions takes all running rows at once, and new ones too where rows are packed."""
    session = Session(mix.model)
    shared = session.model.traits.supports_custom_mask
    rng = random.Random(1)
    waiting = [mix.requests[at] for at in rng.sample(range(5), 5)]
    session.admit(waiting.pop())
    met = 0
    while len(session):
        joined = bool(waiting) and rng.random() < 0.5 and session.steps > 0
        if joined:
            session.admit(waiting.pop())
        before, lanes = session.model.forwards, len(session)
        # Rows without positions of their own share a forward where they stand level.
        levels = len({int(one) for one in session._tables.default.rows.cached_length})
        session.step()
        used = session.model.forwards - before
        packed = session.model.can_pack(session._tables.default.cache) and not session.model._output_states
        assert used == (1 + (joined and lanes > 1 and not packed) if shared else levels)
        met = max(met, lanes)
    assert met >= 3
    assert not waiting


def test_rows_leave_in_the_very_step_that_ends_them(mix):
    session = Session(mix.model)
    numbers = session.admit(*mix.requests)
    width = dict(zip(numbers, (1, 1, 1, 4, 3), strict=True))
    assert session.rows == 5  # beams are one row until their first choice
    running = set(numbers)
    while len(session):
        events = session.step()
        running -= {event.request for event in events if isinstance(event, Finished)}
        assert session.rows == sum(width[number] for number in running)
        assert set(session._tables.default.rows.request.tolist()) == running
        assert len(session._tables.default.cache) == session.rows


def test_cancelled_rows_leave_at_once(mix):
    session = Session(mix.model)
    numbers = session.admit(*mix.requests)
    session.step()
    assert session.rows == 10
    session.cancel(numbers[3])
    assert session.rows == 6
    session.cancel(numbers[0])
    assert session.rows == 5
    assert len(session) == 3
    assert torch.equal(session._tables.default.cache.lengths, session._tables.default.rows.cached_length)
    for number in (numbers[1], numbers[2], numbers[4]):
        session.cancel(number)
    assert (session.rows, len(session), session.step()) == (0, 0, [])
