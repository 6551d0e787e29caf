"""The mixed session: one forward a step for all rows, which leave in the step that ends them."""

from __future__ import annotations

import random

import pytest
import torch

from descant import Finished, GenerationConfig, Session
from tests.contracts.subjects import requests

CONFIGS = [
    GenerationConfig(max_new_tokens=14),
    GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.7, seed=3),
    GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.4, top_k=0, seed=4),
    GenerationConfig(max_new_tokens=11, num_beams=4, num_return_sequences=2),
    GenerationConfig(max_new_tokens=8, num_beams=3, do_sample=True, temperature=1.2, seed=5),
]


@pytest.fixture(scope="module", params=["llama", "t5"])
def mix(request, tiny):
    """A model, and a request of each config."""
    one = tiny(request.param)
    return one.model, requests(one, CONFIGS, (6, 1, 11, 4, 8), seed=21)


def test_one_forward_a_step_for_all_rows(mix):
    """A model with positions takes all running rows at once, and new ones too where rows are packed."""
    model, given = mix
    session = Session(model)
    shared = session.model.traits.supports_custom_mask
    rng = random.Random(1)
    waiting = [given[at] for at in rng.sample(range(5), 5)]
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
    model, given = mix
    session = Session(model)
    numbers = session.admit(*given)
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
    model, given = mix
    session = Session(model)
    numbers = session.admit(*given)
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
