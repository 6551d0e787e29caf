"""Sampling among the few tokens that filters leave: the token that the noise of all tokens chooses."""

from __future__ import annotations

import pytest

from descant import Finished, GenerationConfig, Request, Session
from descant.core.sampling_noise import SamplingNoise
from tests.support.markov_model import Chain

VOCAB = 400


@pytest.mark.parametrize("top_k", [1, 5, 49, 400])
def test_the_tokens_are_the_same(top_k, monkeypatch):
    model = Chain.chance(VOCAB, 1, spread=2.0)

    def run():
        session = Session(model)
        for seed in range(7):
            given = {"do_sample": True, "seed": seed, "top_k": top_k if seed % 3 else 3, "max_new_tokens": 12}
            session.admit(Request([seed], GenerationConfig(**given)))
        ended = [event for event in session.drain() if isinstance(event, Finished)]
        return {one.request: one.hypotheses[0].tokens.tolist() for one in ended}

    calls = []
    draw_at = SamplingNoise.draw_at
    monkeypatch.setattr(SamplingNoise, "draw_at", lambda *args: calls.append(1) or draw_at(*args))
    found = run()
    assert bool(calls) == (top_k < 400)
    monkeypatch.setattr(SamplingNoise, "draw_at", lambda *_: None)
    assert found == run()


def test_a_row_of_nothing_fails_alone():
    model = Chain.chance(VOCAB, 1, spread=2.0)
    model.logits[:, 5] = float("nan")
    session = Session(model)
    config = GenerationConfig(do_sample=True, seed=1, top_k=3, max_new_tokens=2)
    numbers = session.admit(*(Request([first], config) for first in (4, 5, 6)))
    ended = {event.request: event for event in session.drain() if not hasattr(event, "token")}
    assert [isinstance(ended[number], Finished) for number in numbers] == [True, False, True]
