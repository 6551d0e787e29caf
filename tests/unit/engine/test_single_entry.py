"""A session is used by one caller at a time: calls from inside a step and from other threads are refused."""

from __future__ import annotations

import re
import threading

import pytest

from descant import Failed, Finished, GenerationConfig, Request, Session, SessionBusy
from descant.testing import outcomes
from tests.support.markov_model import Chain

CALLS = {
    "admit": lambda session: session.admit(Request([3], GenerationConfig(max_new_tokens=2))),
    "step": lambda session: session.step(),
    "cancel": lambda session: session.cancel(0),
    "drain": lambda session: list(session.drain()),
}
PLACES = ("processor", "criterion", "observer")


def config(**given):
    return GenerationConfig(**{"max_new_tokens": 5, **given})


@pytest.fixture
def model():
    return Chain.chance(11, 3, spread=2.0)


def interfering(model, place, act, seen):
    """A session, and a request that calls `act` from the middle of each of its steps."""
    box = []

    def call():
        if box:
            seen.append((len(box[0]), box[0].rows))  # reading is allowed
            box[0].report()
            act(box[0])

    def process(ids, scores):
        call()
        return scores

    def stop(ids, scores):
        call()
        return ids[:, 0] < 0

    session = Session(model, observe=(lambda _: call()) if place == "observer" else None)
    box.append(session)
    request = Request(
        [1],
        config(),
        logits_processor=[process] if place == "processor" else (),
        stopping_criteria=[stop] if place == "criterion" else (),
    )
    return session, request, box


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_inside_a_step_is_refused_and_harms_nothing(model, place, name):
    alone = outcomes(model, [Request([1], config()), Request([2, 4], config(num_beams=2))])
    seen = []
    session, request, box = interfering(model, place, CALLS[name], seen)
    numbers = session.admit(request, Request([2, 4], config(num_beams=2)))
    refused = r"must not be called from inside a step.*between two steps"
    if place == "observer":  # it belongs to the session and not to a request, so the step is not made
        for _ in range(2):
            with pytest.raises(SessionBusy, match=refused):
                session.step()
        box.clear()  # it no longer interferes
    else:
        failure = next(event for event in session.step() if isinstance(event, Failed))
        assert failure.request == numbers.pop(0)
        alone.pop(0)
        assert isinstance(failure.error.__cause__, SessionBusy)
        assert re.search(refused, str(failure.error))
    assert set(seen) == {(2, 2)}
    ended = {event.request: event for event in session.drain() if isinstance(event, Finished)}
    for number, expected in zip(numbers, alone, strict=True):
        assert ended[number].hypotheses[0].tokens.tolist() == expected.tokens[0]
    assert model.opened == set()


@pytest.mark.parametrize("name", CALLS)
def test_a_processor_may_catch_the_error_and_go_on(model, name):
    alone = outcomes(model, [Request([1], config())])[0]

    def tried(session):
        with pytest.raises(SessionBusy):
            CALLS[name](session)

    seen = []
    session, request, _ = interfering(model, "processor", tried, seen)
    session.admit(request)
    ended = [event for event in session.drain() if isinstance(event, Finished)]
    assert [one.hypotheses[0].tokens.tolist() for one in ended] == alone.tokens
    assert len(seen) == 5


@pytest.mark.parametrize("name", ["admit", "step", "cancel"])
def test_a_second_thread_is_refused_while_the_first_is_inside(model, name):
    inside, leave = threading.Event(), threading.Event()

    def wait(ids, scores):
        inside.set()
        assert leave.wait(10)
        return scores

    session = Session(model)
    session.admit(Request([1], config(), logits_processor=[wait]))
    events = []
    thread = threading.Thread(target=lambda: events.extend(session.step()))
    thread.start()
    try:
        assert inside.wait(10)
        assert (len(session), session.rows) == (1, 1)
        with pytest.raises(SessionBusy, match="while another thread is inside"):
            CALLS[name](session)
    finally:
        leave.set()
        thread.join(10)
    assert len(events) == 1
    events += list(session.drain())
    expected = outcomes(model, [Request([1], config())])[0].tokens[0]
    assert events[-1].hypotheses[0].tokens.tolist() == expected
