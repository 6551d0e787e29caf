"""Random schedules of admission, refusal, step and cancellation: each request is as if it were alone.

Some requests are refused, some fail at a step of their own, and some leave before their first step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from descant import Failed, Finished, GenerationConfig, InputError, Request, RowError, Session
from descant.testing import failing_request, outcomes
from tests.contracts.subjects import requests
from tools.sweep.kinds import representative
from tools.sweep.trial import subject_of

ROUNDS = 12  # for each model
ACTIONS = 30
FIELDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 7, "num_return_sequences": 2},
    {"num_beams": 3},
    {"repetition_penalty": 1.4},
    {"do_sample": True, "seed": 8, "temperature": 1.5},
    {"num_beams": 2, "num_return_sequences": 2},
]
SINK = {"cache_implementation": "sink", "cache_config": {"window_length": 7, "num_sink_tokens": 2}}


@dataclass
class Subject:
    """A model, requests for it, and what each gives alone."""

    model: Any
    given: list[Request]
    alone: list[list[list[int]]]
    refused: list[Request]


@pytest.fixture(scope="module", params=["bart", "t5", "llama", "mamba"])
def subject(request, tiny) -> Subject:
    configs = [GenerationConfig(**one, max_new_tokens=3 + at) for at, one in enumerate(FIELDS)]
    if request.param == "mamba":
        found = subject_of(representative("recurrent"))
        model, prompts = found.model, [one["input_ids"][0].tolist() for one in found.prompts]
        given = [Request(prompts[at % len(prompts)], config) for at, config in enumerate(configs)]
    else:
        one = tiny(request.param)
        if request.param == "llama":
            configs += [config.replace(**SINK) for config in configs[:2]]
            configs.append(configs[0].replace(guidance_scale=1.6))
        model, given = one.model, requests(one, configs, (3, 11, 6, 14, 2, 8), seed=3)
    good = given[0]
    refused = [
        replace(good, generation_config=good.generation_config.replace(stop_strings="a")),
        replace(good, generation_config=good.generation_config.replace(stop_regex="a"), inputs=good.inputs),
        replace(good, logits_processor=[3]),
    ]
    if good.inputs:
        refused.append(replace(good, inputs={}))
    alone = [outcomes(model, [each])[0].tokens for each in given]
    return Subject(model, given, alone, refused)


class Run:
    """One session and the requests in it."""

    def __init__(self, subject: Subject, rng: random.Random) -> None:
        self.subject, self.rng = subject, rng
        self.session = Session(subject.model)
        self.running: dict[int, int | None] = {}  # request -> its place among the given ones; None: it fails
        self.num_ended = 0

    def admit(self) -> None:
        places: list[int | None] = [
            *self.rng.choices(range(len(self.subject.given)), k=self.rng.randint(1, 3))
        ]
        wanted = [self.subject.given[at] for at in places if at is not None]
        if self.rng.random() < 0.2:
            wanted[0], places[0] = failing_request(wanted[0], self.rng.randint(0, 4)), None
        self.running.update(zip(self.session.admit(*wanted), places, strict=True))

    def refuse(self) -> None:
        wanted = [self.rng.choice(self.subject.given), self.rng.choice(self.subject.refused)]
        self.rng.shuffle(wanted)
        with pytest.raises(InputError):
            self.session.admit(*wanted)

    def step(self) -> None:
        for event in self.session.step():
            if not isinstance(event, Finished | Failed):
                continue
            place = self.running.pop(event.request)
            self.num_ended += 1
            if isinstance(event, Failed):
                assert place is None
                assert isinstance(event.error, RowError)
            elif place is not None:
                assert [one.tokens.tolist() for one in event.hypotheses] == self.subject.alone[place], place

    def cancel(self) -> None:
        if self.running:
            number = self.rng.choice(list(self.running))
            self.session.cancel(number)
            del self.running[number]


@pytest.mark.parametrize("number", range(ROUNDS))
def test_each_is_as_if_alone(subject, number):
    rng = random.Random(number)
    run = Run(subject, rng)
    actions: list[Callable[[], None]] = [run.admit, run.refuse, run.cancel, run.step, run.step]
    for _ in range(ACTIONS):
        if len(run.running) > 8:
            run.step()
        rng.choice(actions)()
        assert len(run.session) == len(run.running)
    while run.running:
        run.step()
    assert run.session.rows == 0
    run.admit()
    while run.running:
        run.step()
    assert run.num_ended > 0
    _check_empty(run.session)


def _check_empty(session: Session) -> None:
    """Nothing of any request is left."""
    for table in session._tables:
        assert not table.running.requests
        assert not any(registry.items for registry in table.running.registries.values())
        assert len(table.cache) == 0
    assert len(list(session._tables)) == 1
    model: Any = session.model
    if model.encoder is not None:
        assert not model.encoder._cross_cache._entries
    assert not len(model._request_inputs)
