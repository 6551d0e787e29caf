"""The log-probabilities of streamed tokens equal those of the finished sequences, for every method."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from descant import AsyncEngine, Finished, GenerationConfig, NewToken, Request, TokenLogprobs
from tests.contracts.methods import mixed
from tests.contracts.speculation import few_words, near, texts
from tests.support.markov_model import Chain


def asked(given, count):
    """The request with `logprobs=count`; None: without."""
    return replace(given, generation_config=given.generation_config.replace(logprobs=count))


def streams(model, given, **engine):
    """The events of requests that run together."""

    async def events(running, one):
        return [event async for event in running.stream(one)]

    async def main():
        async with AsyncEngine(model, **engine) as running:
            return await asyncio.gather(*(events(running, one) for one in given))

    return asyncio.run(main())


def check(events, count):
    """The streamed values are those of the end; returns the number of compared tokens."""
    *_, last = events
    assert isinstance(last, Finished), last
    tokens = [event for event in events if isinstance(event, NewToken)]
    if count is None:
        assert all(event.logprobs is None for event in tokens)
        assert all(one.logprobs is None for one in last.hypotheses)
        return 0
    for slot, sequence in enumerate(last.hypotheses):
        own = [event for event in tokens if event.slot == slot]
        if not own:
            continue  # beams
        assert [event.token for event in own] == sequence.tokens.tolist()
        whole = sequence.logprobs
        for at, event in enumerate(own):
            parts = (whole.top[at], whole.top_raw[at], whole.top_processed[at])
            top = zip(*(part.tolist() for part in parts), strict=True)
            assert event.logprobs == TokenLogprobs(
                float(whole.raw[at]), float(whole.processed[at]), tuple(top)
            )
            assert len(event.logprobs.top) == count
    return len(tokens)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_every_method_streams_those_of_its_end(tiny, name):
    counts = [2, None, 0, 5]
    given = mixed(tiny(name))
    asking = [asked(one, counts[at % 4]) for at, one in enumerate(given)]
    compared = [check(events, counts[at % 4]) for at, events in enumerate(streams(tiny(name).model, asking))]
    assert sum(1 for count in compared if count) > 8


@pytest.mark.parametrize("method", ["greedy", "sampled", "fanned"])
@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_accepted_drafts_stream_those_of_the_end(tiny, method, drafts):
    subject = tiny("llama")
    fields = {
        "greedy": {},
        "sampled": {"do_sample": True, "seed": 3},
        "fanned": {"do_sample": True, "seed": 4, "num_return_sequences": 2},
    }[method]
    drafter = {"prompt_lookup_num_tokens": 3} if drafts == "lookup" else {"num_assistant_tokens": 4}
    assistant = near(subject.model, 0.98) if drafts == "assistant" else None
    counts = [3, None, 1, 0]
    given = [
        Request(
            prompt,
            GenerationConfig(max_new_tokens=12, logprobs=count, **fields, **drafter, **few_words(subject)),
            assistant_model=assistant,
        )
        for prompt, count in zip(texts(subject), counts, strict=True)
    ]
    found = streams(subject.model, given)
    assert all(check(events, count) or count is None for events, count in zip(found, counts, strict=True))
    speculation = [one.speculation for events in found for one in events[-1].hypotheses]
    assert sum(one.saved_forwards for one in speculation) > 0


def test_requests_without_logprobs_are_not_computed(monkeypatch):
    """Beside one that has them: the rows of the others are not among those of `log_softmax`."""
    from descant.engine.step import logprobs

    sizes = []
    original = logprobs._StepLogprobs.__init__

    def count(self, observation, num_top, top):
        original(self, observation, num_top, top)
        sizes.append((len(observation.rows), len(self.raw)))

    monkeypatch.setattr(logprobs._StepLogprobs, "__init__", count)
    model = Chain.chance(11, 3, spread=2.0)
    plain = GenerationConfig(max_new_tokens=30)
    given = [Request([1], plain), Request([2], plain.replace(logprobs=2)), Request([3], plain)]
    for events, number in zip(streams(model, given), (None, 2, None), strict=True):
        check(events, number)
    assert {own for _, own in sizes} == {1}
    assert max(rows for rows, _ in sizes) == 3
