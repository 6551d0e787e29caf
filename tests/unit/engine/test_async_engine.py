"""An engine for many callers: threads, tasks, cancellation, a full queue, draining, closing, failed steps."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time

import numpy as np
import pytest

from descant import (
    AsyncEngine,
    DeadlineExceeded,
    EngineClosed,
    EngineFull,
    Failed,
    Finished,
    GenerationConfig,
    InputError,
    NewToken,
    Request,
    RowError,
    SchedulerConfig,
    Session,
)
from descant.testing import outcomes
from tests.support.markov_model import Chain


def config(**given):
    return GenerationConfig(**{"max_new_tokens": 6, **given})


def requests(count, seed=0):
    rng = random.Random(seed)
    kinds = (
        {},
        {"do_sample": True, "seed": 3},
        {"num_beams": 2},
        {"do_sample": True, "seed": 4, "num_return_sequences": 2},
    )
    return [
        Request([rng.randrange(1, 11) for _ in range(rng.randint(1, 6))], config(**kinds[at % 4]))
        for at in range(count)
    ]


@pytest.fixture
def model():
    return Chain.chance(11, 3, spread=2.0)


def alone(model, given):
    return [outcomes(model, [one])[0].tokens for one in given]


def tokens_of(finished):
    return [one.tokens.tolist() for one in finished.hypotheses]


def test_tasks_share_one_engine(model):
    given = requests(12)

    async def main():
        async with AsyncEngine(model) as engine:
            return await asyncio.gather(*(engine.generate(one) for one in given))

    assert [tokens_of(one) for one in asyncio.run(main())] == alone(model, given)


def test_a_stream_has_each_token_and_then_the_end(model):
    async def main():
        async with AsyncEngine(model) as engine:
            return [event async for event in engine.stream(Request([1, 2], config()))]

    *tokens, last = asyncio.run(main())
    assert isinstance(last, Finished)
    assert all(isinstance(event, NewToken) for event in tokens)
    assert [event.token for event in tokens] == tokens_of(last)[0]


def test_the_events_of_a_step_wake_a_loop_once(model):
    calls = []

    async def count(engine, given):
        return len([event async for event in engine.stream(given)])

    async def main():
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given: (calls.append(given[0].__name__), wake(*given))[1]
        async with AsyncEngine(model) as engine:
            given = Request([1, 2], config(max_new_tokens=50))
            num_events = sum(await asyncio.gather(*(count(engine, given) for _ in range(8))))
            return num_events, (await asyncio.to_thread(engine.metrics)).session.steps

    num_events, steps = asyncio.run(main())
    assert num_events == 8 * 51
    assert calls.count("_put_all") <= steps < num_events / 2


def test_a_closed_loop_cancels_its_requests(model):
    with AsyncEngine(model) as engine:
        loop = asyncio.new_event_loop()
        events = engine.stream(Request([1], config(max_new_tokens=100_000)))
        assert isinstance(loop.run_until_complete(anext(events)), NewToken)
        loop.close()
        deadline = time.monotonic() + 30
        while engine.metrics().session.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.metrics().counters["cancelled"] == 1


def test_threads_share_one_engine(model):
    given, found = requests(16), {}
    with AsyncEngine(model, scheduler=SchedulerConfig(max_running_rows=4)) as engine:

        def call(index):
            found[index] = tokens_of(engine.submit(given[index]).result())

        threads = [threading.Thread(target=call, args=(index,)) for index in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        metrics = engine.metrics()
    assert [found[index] for index in range(len(given))] == alone(model, given)
    assert metrics.counters["requests"] == metrics.counters["finished"] == 16
    assert (metrics.session.requests, metrics.session.rows, metrics.session.waiting) == (0, 0, 0)
    assert metrics.histograms["request"].count == 16
    assert metrics.histograms["time_to_first_token"].count > 0


def test_a_cancelled_task_frees_its_request_before_the_next_step(model):
    async def main():
        async with AsyncEngine(model) as engine:
            task = asyncio.create_task(engine.generate(Request([1], config(max_new_tokens=100_000))))
            other = asyncio.create_task(engine.generate(Request([2], config())))
            finished = await other
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            metrics = await asyncio.to_thread(engine.metrics)
            return finished, metrics

    finished, metrics = asyncio.run(main())
    assert tokens_of(finished) == alone(model, [Request([2], config())])[0]
    assert (metrics.session.requests, metrics.session.rows) == (0, 0)
    assert metrics.counters["cancelled"] == 1


def test_a_task_that_is_cancelled_before_its_request_is_admitted_leaves_the_engine_alive(model):
    async def run():
        release = threading.Event()
        engine._send(release.wait)  # the engine's thread is busy, so the admission waits
        task = asyncio.create_task(engine.generate(requests(1)[0]))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        release.set()
        return await engine.generate(requests(1)[0])

    with AsyncEngine(model) as engine:
        assert len(asyncio.run(run()).hypotheses) == 1
        assert engine.is_healthy
        assert engine.metrics().counters["requests"] == 1


def test_a_loop_that_is_left_cancels_its_request(model):
    with AsyncEngine(model) as engine:
        events = iter(engine.submit(Request([1], config(max_new_tokens=100_000))))
        assert isinstance(next(events), NewToken)
        events.close()
        assert engine.metrics().session.requests == 0


def test_a_full_queue_refuses(model):
    scheduler = SchedulerConfig(max_running_rows=1, max_waiting=2)
    with AsyncEngine(model, scheduler=scheduler) as engine:
        handles, long = [], Request([1], config(max_new_tokens=50_000))

        def submit_many():
            for _ in range(10):
                handles.append(engine.submit(long))  # noqa: PERF401 - it raises on the way

        with pytest.raises(EngineFull):
            submit_many()
        for handle in handles:
            handle.cancel()
        assert engine.submit(Request([1], config())).result()


def test_a_wrong_request_is_refused_where_it_was_made(model):
    with AsyncEngine(model) as engine:
        with pytest.raises(InputError):
            engine.submit(Request([99], config()))
        assert engine.metrics().counters["refused"] == 1
        assert engine.submit(Request([1], config())).result()


def test_a_grammar_that_cannot_be_compiled_counts_as_refused(model):
    given = Request([1], config(grammar={"regex": "a"}))  # there is no tokenizer

    async def main():
        async with AsyncEngine(model) as engine:
            with pytest.raises(InputError, match="tokenizer"):
                await engine.generate(given)
            with pytest.raises(InputError, match="tokenizer"):
                await asyncio.to_thread(engine.submit, given)
            return await asyncio.to_thread(engine.metrics)

    counters = asyncio.run(main()).counters
    assert (counters["refused"], counters["requests"]) == (2, 0)


def test_a_deadline_ends_a_request_that_waits(model):
    with AsyncEngine(model, scheduler=SchedulerConfig(max_running_rows=1)) as engine:
        long = engine.submit(Request([1], config(max_new_tokens=100_000)))
        late = engine.submit(Request([2], config(), deadline=0.05))
        with pytest.raises(DeadlineExceeded):
            late.result()
        long.cancel()


def test_the_code_of_one_request_fails_that_request(model):
    def broken(ids, scores):
        raise ZeroDivisionError("no")

    with AsyncEngine(model) as engine:
        good = engine.submit(Request([1], config()))
        with pytest.raises(RowError, match="ZeroDivisionError"):
            engine.submit(Request([1], config(), logits_processor=[broken])).result()
        assert tokens_of(good.result()) == alone(model, [Request([1], config())])[0]
        assert engine.is_healthy


def test_draining_ends_what_runs_and_accepts_no_more(model):
    engine = AsyncEngine(model)
    handles = [engine.submit(one) for one in requests(5)]
    engine.drain()
    assert engine.metrics().counters["finished"] == 5
    with pytest.raises(EngineClosed):
        engine.submit(Request([1], config()))
    assert [tokens_of(one.result()) for one in handles] == alone(model, requests(5))
    engine.close()
    assert not engine.is_healthy


def test_closing_fails_what_runs(model):
    engine = AsyncEngine(model)
    handle = engine.submit(Request([1], config(max_new_tokens=100_000)))
    engine.close()
    with pytest.raises(RowError, match="EngineClosed"):
        handle.result()
    with pytest.raises(EngineClosed):
        engine.submit(Request([1], config()))


def test_steps_that_keep_failing_fail_the_requests(model, monkeypatch):
    with AsyncEngine(model) as engine:
        monkeypatch.setattr(Session, "step", lambda self: 1 / 0)
        handle = engine.submit(Request([1], config()))
        with pytest.raises(RowError, match="ZeroDivisionError"):
            handle.result()
        monkeypatch.undo()
        assert engine.submit(Request([1], config())).result()
        assert engine.metrics().counters["failed_steps"] == 3


def test_an_engine_whose_thread_breaks_leaves_no_caller_waiting(model, monkeypatch):
    def broken(self, number):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(Session, "common_prefix", broken)
    engine = AsyncEngine(model)
    other = engine.submit(Request([1], config(max_new_tokens=100_000)))
    beams = engine.submit(Request([1], config(num_beams=2, max_new_tokens=50)))
    for handle in (beams, other):
        with pytest.raises(RowError, match="ZeroDivisionError"):
            handle.result()
    assert not engine.is_healthy
    with pytest.raises(EngineClosed):
        engine.submit(Request([1], config()))
    engine.close()


def hammer(model, streams, threads, seed=0):
    """Streams from many threads, half of them cut at random; the metrics at the end."""
    scheduler = SchedulerConfig(max_running_rows=16, num_blocks=64, block_size=4)
    with AsyncEngine(model, scheduler=scheduler) as engine:
        errors = []

        def call(first):
            rng = random.Random(seed + first)
            try:
                for at in range(first, streams, threads):
                    given = requests(4, at)[at % 4]
                    handle, cut = engine.submit(given), rng.randint(0, 4) if at % 2 else None
                    for count, event in enumerate(handle):
                        if count == cut:
                            break
                        assert not isinstance(event, Failed), event.error
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=call, args=(first,)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(600)
        assert not any(worker.is_alive() for worker in workers)
        assert errors == []
        return engine.metrics()


def check_hammered(metrics, streams):
    report = metrics.session
    assert (report.requests, report.rows, report.waiting, report.blocks) == (0, 0, 0, 0)
    assert metrics.counters["finished"] + metrics.counters["cancelled"] == streams
    assert metrics.counters["cancelled"] > streams // 8


def test_streams_from_threads_half_of_them_cut(model):
    check_hammered(hammer(model, 60, 10), 60)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_memory_does_not_grow_over_20000_requests(model):
    """The slope of the resident memory is below 1 MB for 10,000 requests, once the first have ended."""
    sizes = []
    scheduler = SchedulerConfig(max_running_rows=32, num_blocks=128, block_size=4)
    with AsyncEngine(model, scheduler=scheduler) as engine:
        for batch in range(26):
            handles = [engine.submit(one) for one in requests(1000, seed=batch)]
            for handle in handles:
                handle.result()
            gc.collect()
            sizes.append(resident_bytes())
    counted = np.array(sizes[6:], dtype=float)
    slope = np.polyfit(np.arange(len(counted)), counted, 1)[0] * 10
    print(f"{slope / 1e6:.2f} MB for 10,000 requests")
    assert slope < 1e6


def test_a_full_queue_is_known_without_a_request(model):
    scheduler = SchedulerConfig(max_running_rows=1, max_waiting=1)
    with AsyncEngine(model, scheduler=scheduler) as engine:
        assert not engine.is_full
        long = [engine.submit(Request([1], config(max_new_tokens=100_000))) for _ in range(1)]
        end = time.monotonic() + 20
        while engine.metrics().session.rows < 1:
            assert time.monotonic() < end
        long.append(engine.submit(Request([2], config(max_new_tokens=100_000))))
        while not engine.is_full:
            assert time.monotonic() < end
        for one in long:
            one.cancel()
        while engine.is_full:
            assert time.monotonic() < end
