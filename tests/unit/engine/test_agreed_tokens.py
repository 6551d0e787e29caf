"""Beam searches stream the tokens that all their sequences begin with."""

from __future__ import annotations

import asyncio
import random

import pytest

from descant import AgreedTokens, AsyncEngine, Finished, GenerationConfig, NewToken, Request, SchedulerConfig
from tests.contracts.methods import mixed
from tests.support.markov_model import Chain
from tests.unit.engine.test_streamed_logprobs import streams


def beams(count, **fields):
    """Beam searches of all kinds, of prompts that differ."""
    rng = random.Random(5)
    kinds = (
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 4, "early_stopping": True, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True, "seed": 6},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.3},
    )
    return [
        Request(
            [rng.randrange(1, 11) for _ in range(rng.randint(1, 5))],
            GenerationConfig(max_new_tokens=24, **kinds[at % len(kinds)], **fields),
        )
        for at in range(count)
    ]


def check(events):
    """The agreed tokens begin every returned sequence; returns how many there are."""
    *first, last = events
    assert isinstance(last, Finished)
    agreed = [token for event in first if isinstance(event, AgreedTokens) for token in event.tokens]
    assert all(event.tokens for event in first if isinstance(event, AgreedTokens))
    for sequence in last.hypotheses:
        assert sequence.tokens.tolist()[: len(agreed)] == agreed
    return len(agreed)


def test_they_begin_every_returned_sequence():
    model = Chain.chance(11, 3, spread=3.0)
    given = beams(20)
    counts = [check(events) for events in streams(model, given)]
    assert sum(count > 0 for count in counts) > len(counts) / 2


def test_they_begin_every_sequence_in_a_small_pool():
    model = Chain.chance(11, 3, spread=3.0)
    scheduler = SchedulerConfig(num_blocks=40, block_size=4, max_running_rows=8)
    for events in streams(model, beams(12), scheduler=scheduler):
        check(events)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_every_method_has_either_kind_of_event(tiny, name):
    given = mixed(tiny(name))
    for one, events in zip(given, streams(tiny(name).model, given), strict=True):
        check(events)
        kind = NewToken if one.generation_config.num_beams > 1 else AgreedTokens
        assert not any(isinstance(event, kind) for event in events)


def test_a_result_ignores_them_and_generate_does_not_ask(monkeypatch):
    from descant import Session

    model = Chain.chance(11, 3, spread=3.0)
    (given,) = beams(1)
    asked = []
    original = Session.common_prefix
    monkeypatch.setattr(
        Session, "common_prefix", lambda self, number: asked.append(number) or original(self, number)
    )

    async def main():
        async with AsyncEngine(model) as engine:
            return await engine.generate(given)

    whole = asyncio.run(main()).hypotheses[0].tokens.tolist()
    assert asked == []
    with AsyncEngine(model) as engine:
        assert engine.submit(given).result().hypotheses[0].tokens.tolist() == whole
        assert asked
