"""Traced requests of an engine: the records of each step, and everything else as for others."""

from __future__ import annotations

import asyncio

import pytest

from descant import (
    AsyncEngine,
    EngineClosed,
    EngineFull,
    Failed,
    Finished,
    GenerationConfig,
    NewToken,
    Request,
    RowError,
    Session,
    Tracer,
    TraceRecords,
)
from descant.models.model_adapter import as_model
from descant.testing import outcomes
from descant.trace.records import RequestRecord, ResultRecord, StepRecord, TraceHeader
from tests.support.markov_model import Chain

KINDS = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.fixture
def model():
    return Chain.chance(11, 3, spread=2.0)


def config(**fields):
    return GenerationConfig(**{"max_new_tokens": 6, **fields})


async def collect(engine, given, trace):
    return [event async for event in engine.stream(given, trace=trace)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_has_the_records_of_each_step(model, kind):
    given, tracer = Request([1, 2, 1], config(**KINDS[kind])), Tracer()

    async def main():
        async with AsyncEngine(model) as engine:
            others = [engine.generate(Request([2], config())) for _ in range(3)]
            events, *_ = await asyncio.gather(collect(engine, given, tracer), *others)
            return events

    *events, last = asyncio.run(main())
    assert isinstance(last, Finished)
    assert [one.tokens.tolist() for one in last.hypotheses] == outcomes(model, [given])[0].tokens
    parts = [event.records for event in events if isinstance(event, TraceRecords)]
    records = [record for part in parts for record in part]
    assert records == list(tracer.trace.records)
    kinds = [type(record) for record in records]
    assert kinds[:2] == [TraceHeader, RequestRecord]
    assert kinds[-1] is ResultRecord
    assert all(sum(isinstance(record, StepRecord) for record in part) == 1 for part in parts)
    assert {event.request for event in events} == {last.request}
    tokens = [event.token for event in events if isinstance(event, NewToken)]
    assert tokens == ([] if kind == "beams" else last.hypotheses[0].tokens.tolist())


def test_generate_records_a_trace(model):
    tracer = Tracer()

    async def main():
        async with AsyncEngine(model) as engine:
            finished = await engine.generate(Request([1], config()), trace=tracer)
            return finished, await asyncio.to_thread(engine.metrics)

    finished, metrics = asyncio.run(main())
    assert tracer.trace.results
    assert finished.hypotheses[0].tokens.tolist() == outcomes(model, [Request([1], config())])[0].tokens[0]
    assert metrics.counters["requests"] == metrics.counters["finished"] == 1
    assert metrics.histograms["request"].count == 1
    assert metrics.session.requests == 0


def test_at_most_max_traced_run_at_once(model):
    async def main():
        long = Request([1], config(max_new_tokens=100_000))
        async with AsyncEngine(model, max_traced=2) as engine:
            streams = [engine.stream(long, trace=Tracer(limit=4096)) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            metrics = await asyncio.to_thread(engine.metrics)
            assert metrics.session.requests == 2
            with pytest.raises(EngineFull, match="max_traced=2 requests may run, and 2 do"):
                await engine.generate(long, trace=Tracer())
            await streams[0].aclose()
            assert await engine.generate(Request([1], config()), trace=Tracer())
            await streams[1].aclose()
            metrics = await asyncio.to_thread(engine.metrics)
            assert (metrics.session.requests, metrics.session.rows) == (0, 0)
            assert (metrics.counters["cancelled"], metrics.counters["refused"]) == (2, 1)
            assert len(engine._runner._places) == 1

    asyncio.run(main())


def test_a_used_tracer_is_refused_and_takes_no_place(model):
    async def main():
        tracer = Tracer()
        async with AsyncEngine(model, max_traced=1) as engine:
            await engine.generate(Request([1], config()), trace=tracer)
            with pytest.raises(ValueError, match="new Tracer"):
                await engine.generate(Request([1], config()), trace=tracer)
            assert await engine.generate(Request([1], config()), trace=Tracer())

    asyncio.run(main())


def test_the_code_of_a_traced_request_fails_it_alone(model):
    def broken(ids, scores):
        raise ZeroDivisionError("no")

    async def main():
        async with AsyncEngine(model) as engine:
            other = asyncio.create_task(engine.generate(Request([2], config())))
            events = await collect(engine, Request([1], config(), logits_processor=[broken]), Tracer())
            assert engine.is_healthy
            return events, await other

    events, other = asyncio.run(main())
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, RowError)
    assert [record.error for record in events[-2].records if isinstance(record, ResultRecord)] != [None]
    assert isinstance(other, Finished)


def test_steps_of_a_traced_session_that_keep_failing_fail_it_alone(model, monkeypatch):
    original = Session.step

    def fail(self):
        return 1 / 0 if self.trace is not None else original(self)

    async def main():
        async with AsyncEngine(model) as engine:
            monkeypatch.setattr(Session, "step", fail)
            other = asyncio.create_task(engine.generate(Request([2], config(max_new_tokens=40))))
            events = await collect(engine, Request([1], config()), Tracer())
            assert isinstance(await other, Finished)
            assert isinstance(await engine.generate(Request([1], config())), Finished)
            assert len(engine._runner._places) == 1
            return events

    events = asyncio.run(main())
    assert isinstance(events[-1], Failed)


def test_sessions_that_share_a_model_each_have_the_states_they_need(tiny):
    """An object with the model's interface is not wrapped again for the session of a traced request."""
    subject = tiny("llama")
    shared = as_model(subject.model)
    given = Request([5, 6, 7], config(penalty_alpha=0.6, top_k=3, max_new_tokens=30))
    plain = Request([8, 9], config(max_new_tokens=2))

    async def main():
        async with AsyncEngine(shared) as engine:
            traced = asyncio.create_task(engine.generate(given, trace=Tracer()))
            for _ in range(6):
                short = Request([5], config(penalty_alpha=0.6, top_k=3, max_new_tokens=2))
                await asyncio.gather(engine.generate(short), engine.generate(plain))
                await engine.generate(plain)
            return await traced

    found = asyncio.run(main()).hypotheses[0].tokens.tolist()
    assert found == outcomes(subject.model, [given])[0].tokens[0]


def test_draining_ends_and_closing_fails_them(model):
    async def main(ends):
        engine, tracer = AsyncEngine(model), Tracer()
        given = Request([1], config(max_new_tokens=20 if ends == "drain" else 100_000))
        stream = engine.stream(given, trace=tracer)
        await anext(stream)
        await asyncio.to_thread(getattr(engine, ends))
        events = [event async for event in stream]
        with pytest.raises(EngineClosed):
            await engine.generate(given)
        await asyncio.to_thread(engine.close)
        return events[-1]

    assert isinstance(asyncio.run(main("drain")), Finished)
    last = asyncio.run(main("close"))
    assert isinstance(last, Failed)
    assert "EngineClosed" in str(last.error)
