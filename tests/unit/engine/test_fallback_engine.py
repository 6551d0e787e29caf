"""Two engines as one, and engines in the place of a model."""

from __future__ import annotations

import asyncio

import pytest
import torch

import descant
from descant import (
    AsyncEngine,
    ConfigError,
    Failed,
    FallbackEngine,
    Finished,
    GenerationConfig,
    InputError,
    MissingExtra,
    Request,
    SchedulerConfig,
    Session,
    SessionBusy,
    Tokens,
    Tracer,
)
from tests.support.markov_model import Chain

VOCAB = 13


@pytest.fixture
def model():
    return Chain.chance(VOCAB, 2, spread=2.0)


class GreedyOnly(Session):
    """A session that refuses beams."""

    def supports(self, request):
        if request.generation_config.num_beams > 1:
            return ConfigError("num_beams", "must be 1 here", request.generation_config.num_beams)
        return super().supports(request)

    def admit(self, *requests, **options):
        for request in requests:
            error = self.supports(request)
            if error is not None:
                raise error
        return super().admit(*requests, **options)


@pytest.fixture
def engine(model):
    return FallbackEngine(GreedyOnly(model), Session(model))


def config(**given):
    return GenerationConfig(max_new_tokens=6, **given)


def alone(model, request):
    session = Session(model)
    session.admit(request)
    return {event.request: event for event in session.drain() if isinstance(event, Finished)}[0]


def test_each_request_runs_where_it_can(model, engine):
    requests = [
        Request([1, 2], config()),
        Request([3], config(num_beams=3)),
        Request([4], config(do_sample=True, seed=5)),
        Request([5], config(num_beams=2, num_return_sequences=2)),
    ]
    numbers = engine.admit(*requests)
    first, second = engine._engines
    assert (len(engine), len(first), len(second)) == (4, 2, 2)
    assert sorted(engine.running) == numbers
    assert engine.beam_requests == {numbers[1], numbers[3]}
    assert engine.common_prefix(numbers[0]).tolist() == []
    ended = {event.request: event for event in engine.drain() if isinstance(event, Finished)}
    for number, request in zip(numbers, requests, strict=True):
        expected = [one.tokens.tolist() for one in alone(model, request).hypotheses]
        assert [one.tokens.tolist() for one in ended[number].hypotheses] == expected
    assert (len(engine), engine.rows, engine.num_waiting, engine._owners) == (0, 0, 0, {})
    assert engine.report().steps == first.steps + second.steps


def test_requests_are_admitted_all_or_none(engine):
    with pytest.raises(ConfigError, match="suppress_tokens"):
        engine.admit(Request([1], config()), Request([1], config(num_beams=2, suppress_tokens=[99])))
    assert len(engine) == 0
    assert engine.supports(Request([1], config(suppress_tokens=[99]))) is not None
    [number] = engine.admit(Request([1], config(num_beams=2)))
    engine.cancel(number)
    assert len(engine) == 0
    with pytest.raises(InputError, match="request"):
        engine.cancel(number)


def test_models_must_match(model):
    with pytest.raises(InputError, match="second"):
        FallbackEngine(Session(model), Session(Chain.chance(VOCAB + 1, 2)))


def test_calls_take_an_engine_in_place_of_a_model(model, engine):
    prompt = torch.tensor([[1, 2], [3, 4]])
    for given in ({}, {"num_beams": 2}, {"do_sample": True, "seed": [3, 4], "num_return_sequences": 2}):
        expected = descant.generate(model, prompt, max_new_tokens=5, **given)
        assert descant.generate(None, prompt, max_new_tokens=5, **given, engine=engine).equal(expected)
    streamed = [[], []]
    for event in descant.stream(None, prompt, max_new_tokens=5, engine=engine):
        streamed[event.row] += event.token_ids
    assert streamed == descant.generate(model, prompt, max_new_tokens=5)[:, 2:].tolist()
    assert len(engine) == 0


def test_calls_refuse_what_an_engine_cannot_take(model, engine):
    prompt = torch.tensor([[1, 2]])
    for name, given in {
        "trace": {"trace": True},
        "scheduler": {"scheduler": SchedulerConfig()},
        "past_key_values": {"past_key_values": object()},
    }.items():
        with pytest.raises((InputError, TypeError), match=name):
            descant.generate(None, prompt, engine=engine, **given)
    with pytest.raises(InputError, match="`model` must be None"):
        descant.generate(model, prompt, engine=engine)
    with pytest.raises(InputError, match="`engine` must be an engine"):
        descant.generate(None, prompt, engine="auto")


def test_an_async_engine_runs_another_engine(model, engine):
    async def run():
        async with AsyncEngine(engine) as many:
            requests = [Request([1], config()), Request([2], config(num_beams=2))]
            found = await asyncio.gather(*(many.generate(request) for request in requests))
            assert many.traits.vocab_size == VOCAB
            assert many.metrics().counters["finished"] == 2
            with pytest.raises(InputError, match="prompt_logprobs"):
                await many.generate(Request([1, 2], config(), prompt_logprobs=1))
            with pytest.raises(InputError, match="trace"):
                await many.generate(requests[0], Tracer())
            return [one.hypotheses[0].tokens.tolist() for one in found]

    found = asyncio.run(run())
    expected = [Request([1], config()), Request([2], config(num_beams=2))]
    assert found == [alone(model, one).hypotheses[0].tokens.tolist() for one in expected]
    with pytest.raises(InputError, match="scheduler"):
        AsyncEngine(engine, scheduler=SchedulerConfig())


def test_a_failed_request_is_told(engine):
    bans = [token for token in range(VOCAB) if token != 3]
    engine.admit(Request([1], config(suppress_tokens=bans, bad_words_ids=[[3]])))
    [event] = [event for event in engine.drain() if isinstance(event, Failed)]
    assert "suppress_tokens" in str(event.error)
    assert engine._owners == {}


def test_an_engine_in_use_refuses_a_call(model, engine):
    prompt = torch.tensor([[1, 2]])
    with descant.stream(None, prompt, max_new_tokens=5, engine=engine) as stream:
        next(stream)
        with pytest.raises(SessionBusy, match="must be idle"):
            descant.generate(None, prompt, max_new_tokens=5, engine=engine)
    assert descant.generate(None, prompt, max_new_tokens=5, engine=engine).shape == (1, 7)


def test_a_call_that_fails_leaves_no_request(model, engine):
    def fail(ids, scores):
        raise OSError("disk")

    prompt = torch.tensor([[1, 2], [3, 4]])
    with pytest.raises(OSError, match="disk"):
        descant.generate(None, prompt, max_new_tokens=5, engine=engine, logits_processor=[fail])
    assert len(engine) == 0


def test_events_outlive_an_error_of_the_other_engine(model, engine, monkeypatch):
    numbers = engine.admit(Request([1], config()), Request([2], config(num_beams=2)))
    monkeypatch.setattr(engine._engines[1], "step", lambda: 1 / 0)
    for _ in range(9):
        with pytest.raises(ZeroDivisionError):
            engine.step()
    monkeypatch.undo()
    events = list(engine.drain())
    assert sum(len(one.request) for one in events if isinstance(one, Tokens)) >= 6
    assert {one.request for one in events if isinstance(one, Finished)} == set(numbers)


def test_vllm_says_which_extra_it_needs():
    with pytest.raises(MissingExtra, match=r"pip install descant\[vllm\]"):
        descant.VLLM("models/smollm2")
