"""The session: admission, events, failures, cancellation, and requests that share it without noticing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from descant import (
    ConfigError,
    Failed,
    Finished,
    GenerationConfig,
    InputError,
    MirostatLogitsWarper,
    Request,
    RowError,
    SchedulerConfig,
    Session,
    Tokens,
)
from descant.engine.request import CallPlace
from descant.testing import failing_request, outcomes
from tests.support.markov_model import Chain


@pytest.fixture
def model():
    return Chain.chance(11, 3, spread=2.0)


def config(**given):
    return GenerationConfig(**{"max_new_tokens": 5, **given})


def test_events_tell_every_token_and_every_end(model):
    session = Session(model)
    first, second = session.admit(Request([1], config()), Request([2, 3], config(max_new_tokens=2)))
    assert (len(session), session.rows, session.steps) == (2, 2, 0)
    streamed, ended = {first: [], second: []}, {}
    for number in range(5):
        for event in session.step():
            if isinstance(event, Tokens):
                for request, slot, token in zip(
                    event.request.tolist(), event.slot.tolist(), event.token.tolist(), strict=True
                ):
                    assert slot == 0
                    streamed[request].append(token)
            else:
                ended[event.request] = (number, event.hypotheses[0])
    assert {request: at for request, (at, _) in ended.items()} == {first: 4, second: 1}
    assert all(ended[request][1].tokens.tolist() == streamed[request] for request in ended)
    assert all(ended[request][1].reason == "length" for request in ended)
    assert (len(session), session.rows, session.steps, session.step()) == (0, 0, 5, [])
    assert model.opened == set()


def test_numbers_are_never_used_twice(model):
    session = Session(model)
    seen = []
    for _ in range(4):
        seen += session.admit(Request([1], config(max_new_tokens=1)), Request([2], config()))
        session.step()
    assert seen == list(range(8))
    assert session.admit() == []


def test_a_beam_request_gives_as_many_sequences_as_asked(model):
    for wanted in (1, 2, 3):
        found = outcomes(model, [Request([1], config(num_beams=3, num_return_sequences=wanted))])[0]
        assert len(found.hypotheses) == wanted
        scores = [one.score for one in found.hypotheses]
        assert scores == sorted(scores, reverse=True)


def test_sampling_fans_out_after_one_prefill(model):
    session = Session(model)
    session.admit(Request([1, 2, 3], config(do_sample=True, seed=1, num_return_sequences=4)))
    assert session.rows == 1
    event = session.step()[0]
    assert session.rows == 4
    assert event.slot.tolist() == [0, 1, 2, 3]
    assert model.fed == [1]


def test_rows_without_a_seed_get_their_own_luck(model):
    given = [Request([1], config(do_sample=True, max_new_tokens=12)) for _ in range(4)]
    torch.manual_seed(0)
    first = [one.tokens for one in outcomes(model, given)]
    assert len({str(one) for one in first}) == 4
    torch.manual_seed(0)
    assert first == [one.tokens for one in outcomes(model, given)]


def test_a_failure_names_the_request_and_the_fields(model):
    session = Session(model)
    bad = Request([1], config(suppress_tokens=[3], begin_suppress_tokens=[t for t in range(11) if t != 3]))
    numbers = session.admit(Request([1], config()), bad)
    events = session.step()
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request for event in failed] == [numbers[1]]
    assert isinstance(failed[0].error, RowError)
    assert failed[0].error.request == numbers[1]
    assert "`suppress_tokens`" in str(failed[0].error)
    assert "`begin_suppress_tokens`" in str(failed[0].error)
    assert (len(session), session.rows) == (1, 1)


@pytest.mark.parametrize("method", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 1}])
@pytest.mark.parametrize("seam", ["logits_processor", "stopping_criteria"])
def test_the_functions_of_others_run_once_in_the_step_in_which_one_raises(model, seam, method):
    widths, is_processor = [], seam == "logits_processor"

    def counting(ids, scores):
        widths.append(ids.shape[1])
        return scores if is_processor else False

    def raising(ids, scores):
        if ids.shape[1] == 3:
            raise ValueError("broken")
        return scores if is_processor else False

    given = Request([1], config(), **{seam: [counting]})
    other = Request([1], config(**method), **{seam: [raising]})
    found = outcomes(model, [given, other])
    assert "broken" in str(found[1].error)
    assert widths == list(range(1, 6) if is_processor else range(2, 7))
    assert found[0].tokens == outcomes(model, [given])[0].tokens


def test_a_processor_draws_as_it_does_alone_where_another_raises(model):
    def noisy():
        generator = torch.Generator().manual_seed(5)
        draw = [lambda ids, scores: scores + 3 * torch.randn(scores.shape, generator=generator)]
        return Request([1], config(), logits_processor=draw)

    def raising(ids, scores):
        return scores if ids.shape[1] < 3 else 1 / 0

    found = outcomes(model, [noisy(), Request([1], config(), logits_processor=[raising])])
    assert "division" in str(found[1].error)
    assert found[0].tokens == outcomes(model, [noisy()])[0].tokens


def test_cancel_frees_the_rows_at_once(model):
    session = Session(model)
    numbers = session.admit(
        *(Request([at], config(num_beams=width)) for at, width in ((1, 1), (2, 3), (3, 1)))
    )
    session.step()
    assert session.rows == 5
    session.cancel(numbers[1])
    assert (session.rows, len(session)) == (2, 2)
    assert model.opened == {numbers[0], numbers[2]}
    with pytest.raises(InputError, match="`request` must be a running request"):
        session.cancel(numbers[1])
    with pytest.raises(InputError, match="`request`"):
        session.cancel(99)


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        (Request([], config()), InputError, "prompt"),
        (Request([1, 99], config()), InputError, "prompt"),
        (Request([-1], config()), InputError, "prompt"),
        (Request([1.5], config()), InputError, "prompt"),
        (Request([[1, 2], [3, 4]], config()), InputError, "prompt"),
        (Request("text", config()), InputError, "prompt"),
        (Request([1], config(suppress_tokens=[50])), ConfigError, "suppress_tokens"),
        (Request([1], config(), logits_processor=[3]), InputError, "logits_processor"),
        (Request([1], config(), stopping_criteria=[3]), InputError, "stopping_criteria"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_request_that_cannot_be_leaves_no_trace(model, bad, error, name):
    session = Session(model)
    session.admit(Request([1], config()))
    with pytest.raises(error, match=f"`{name}`"):
        session.admit(Request([2], config()), bad)
    assert (len(session), session.rows, model.opened) == (1, 1, {0})
    events = list(session.drain())
    assert sum(isinstance(event, Finished) for event in events) == 1


def test_a_deadline_ends_the_row_with_what_it_has(model):
    session = Session(model)
    session.admit(Request([1], config(max_new_tokens=50, max_time=0.05)), Request([1], config()))
    session.step()
    time.sleep(0.06)
    ended = [event for event in session.step() if isinstance(event, Finished)]
    assert [(event.request, event.hypotheses[0].reason) for event in ended] == [(0, "time")]
    assert len(ended[0].hypotheses[0].tokens) == 2


@pytest.mark.parametrize(
    "method", [{"num_beams": 2}, {"do_sample": True, "seed": 2, "num_return_sequences": 9}]
)
def test_nothing_is_kept_of_requests_that_left(model, method):
    asked = config(eos_token_id=4, max_new_tokens=9, **method)
    session = Session(model)
    for leave in (session.cancel, lambda _: list(session.drain())):
        number = session.admit(Request([1], asked))[0]
        session.step()
        session.step()
        leave(number)
    session.admit(failing_request(Request([1], asked), 1))
    list(session.drain())
    held = [vars(strategy) for strategy in session._tables.default.running.strategy_order]
    assert not any(len(one.get("_requests", ())) or len(one.get("_done", ())) for one in held)
    assert not any(shelf.items for shelf in session._tables.default.running.registries.values())
    assert not session._tables.default.running.adapted_processors


# ------------------------------------------------------------------- users' own functions
def raised(ids, scores):
    return scores.index_fill(1, torch.tensor([7]), 100.0)


def lowered(ids, scores):
    return scores.masked_fill(scores > 50, -50.0)


def test_users_processors_run_in_the_order_of_their_request(model):
    """In any batch, in any order, and after any earlier requests."""
    orders = [(lowered,), (raised, lowered), (lowered, raised), (raised,)]
    given = [Request([1], config(), logits_processor=order) for order in orders]
    alone = [outcomes(model, [one])[0].tokens for one in given]
    assert alone[2] == alone[3] == [[7] * 5]
    assert 7 not in alone[1][0][:1]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        found = outcomes(model, [given[at] for at in order])
        assert [one.tokens for one in found] == [alone[at] for at in order]


def test_a_processor_listed_twice_runs_twice(model):
    calls = []

    def counted(ids, scores):
        calls.append(len(ids))
        return scores

    outcomes(model, [Request([1], config(max_new_tokens=1), logits_processor=(counted, counted))])
    assert calls == [1, 1]


def test_a_users_function_sees_only_the_rows_of_those_who_gave_it(model):
    seen = []

    def looking(ids, scores):
        seen.append(ids.tolist())
        return scores

    given = [
        Request([1], config(max_new_tokens=1, pad_token_id=9), logits_processor=[looking]),
        Request([1, 2, 3, 4], config(max_new_tokens=1)),
        Request([5, 6, 8], config(max_new_tokens=1, pad_token_id=10), logits_processor=[looking]),
        Request([5], config(max_new_tokens=1, pad_token_id=10), logits_processor=[looking]),
    ]
    outcomes(model, given)
    # It may read the width, so each row is shown as wide as it would be alone.
    assert seen == [[[1], [5]], [[5, 6, 8]]]
    seen.clear()
    outcomes(
        model, [replace(one, _call=CallPlace(padded_width=3)) for one in given]
    )  # prompts of one padded call
    assert seen == [[[9, 9, 1], [5, 6, 8], [10, 10, 5]]]


def test_a_criterion_ends_only_the_rows_of_those_who_gave_it(model):
    def never_seven(ids, scores):
        return ids[:, -1] != 7

    def one_verdict(ids, scores):
        return True

    given = [
        Request([1], config(), stopping_criteria=[never_seven]),
        Request([1], config()),
        Request([1], config(num_beams=2), stopping_criteria=[one_verdict]),
    ]
    found = outcomes(model, given)
    assert found[0].reasons == ["stop"]
    assert found[1].reasons == ["length"]
    assert found[2].reasons == ["stop"]
    assert [len(one.tokens[0]) for one in found] == [1, 5, 1]


@pytest.mark.parametrize("answer", [None, 1, "yes", torch.tensor([1, 0]), torch.zeros(7, dtype=torch.bool)])
def test_a_criterion_must_answer_bools(model, answer):
    session = Session(model)
    session.admit(Request([1], config(), stopping_criteria=[lambda ids, scores: answer]))
    error = only_failure(session).error
    assert isinstance(error.__cause__, InputError)
    assert "`stopping_criteria` must return" in str(error)


@pytest.mark.parametrize("answer", [None, 1.0, torch.zeros(1), torch.zeros(3, 11)])
def test_a_processor_must_answer_scores(model, answer):
    session = Session(model)
    session.admit(Request([1], config(), logits_processor=[lambda ids, scores: answer]))
    error = only_failure(session).error
    assert isinstance(error.__cause__, InputError)
    assert "`logits_processor` must return" in str(error)


def only_failure(session):
    """The only event of the next step, with which the session is empty."""
    [event] = session.step()
    assert isinstance(event, Failed)
    assert len(session) == session.rows == 0
    return event


def test_any_number_of_users_functions_may_run_at_once(model):
    session = Session(model)
    numbers = session.admit(
        *(
            Request([1], config(), logits_processor=[lambda ids, scores, at=at: only(scores, at % 5)])
            for at in range(80)
        )
    )
    done = {event.request: event for event in session.drain() if isinstance(event, Finished)}
    for at, number in enumerate(numbers):
        assert set(done[number].hypotheses[0].tokens.tolist()) == {at % 5}


def only(scores, token):
    return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)


@pytest.mark.parametrize("scheduler", [None, SchedulerConfig()])
def test_two_processors_may_not_keep_the_same_state(model, scheduler):
    asked = config(do_sample=True, seed=1, mirostat_tau=2.0)
    with pytest.raises(InputError, match=r"`logits_processor` must not hold a second .* `mirostat_mu`"):
        Session(model, scheduler=scheduler).admit(
            Request([1], asked, logits_processor=[MirostatLogitsWarper(3.0)])
        )


@pytest.mark.parametrize("scheduler", [None, SchedulerConfig()])
def test_who_is_refused_has_not_moved_torchs_generator(model, scheduler):
    before, session = torch.get_rng_state(), Session(model, scheduler=scheduler)
    refused = Request([1], config(do_sample=True, stop_strings="a", xtc_probability=0.5))
    with pytest.raises(InputError, match="`tokenizer` must be given with `stop_strings`"):
        session.admit(refused)
    assert isinstance(session.supports(refused), InputError)
    assert torch.equal(before, torch.get_rng_state())


def test_an_error_of_a_step_that_has_not_happened_ends_no_request(model):
    failures = iter([True])

    def fails_once(ids, scores):
        if next(failures, False):
            raise ValueError("not ready")
        return scores

    interrupts = iter([True])

    def interrupted(observation):
        if next(interrupts, False):
            raise KeyboardInterrupt

    session = Session(model, observe=interrupted)
    session.admit(Request([1], config(), logits_processor=[fails_once]))
    with pytest.raises(KeyboardInterrupt):
        session.step()
    alone = Session(model)
    alone.admit(Request([1], config()))
    [expected] = [event for event in alone.drain() if isinstance(event, Finished)]
    [finished] = [event for event in session.drain() if isinstance(event, Finished)]
    assert finished.hypotheses[0].tokens.tolist() == expected.hypotheses[0].tokens.tolist()
