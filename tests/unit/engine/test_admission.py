"""Admission is all or nothing: whatever is raised, and wherever, nothing of a refused request stays."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from dataclasses import replace
from inspect import CO_GENERATOR

import pytest
import torch

from descant import Finished, GenerationConfig, InputError, PrefixCache, Session
from descant.decoding.guidance import ModelWrapper
from descant.engine.tables import running_requests
from descant.kv_cache.stores.dense import DenseStore
from descant.testing import outcomes
from descant.trace.tracer import Tracer
from tests.contracts.subjects import requests


def config(**given):
    return GenerationConfig(**{"max_new_tokens": 5, **given})


def state(session):
    """All that a session holds of its requests, as far as it can be compared."""
    tables = []
    for table in session._tables:
        running = table.running
        tables.append(
            (
                table.key, table.cache_name, id(table.cache), len(table.cache), id(table.rows),
                id(table.model),
                sorted(running.requests), len(running.strategy_order), len(running.strategies),
                {name: dict(one._refcounts) for name, one in running.registries.items()},
                sorted(table.prefix_reuse._prefix_keys), sorted(table.prefix_reuse._chunk_sizes),
                sorted(table._chain.wrappers), running.noise.num_rows,
            )
        )  # fmt: skip
    model = session.model
    inside = []
    if getattr(model, "encoder", None) is not None:
        inside.append(sorted(model.encoder._cross_cache._entries))
    if hasattr(model, "_request_inputs"):
        inside += [sorted(model._request_inputs), sorted(model._prompt_embeds)]
    inside.append(sorted(getattr(model, "opened", ())))
    return (
        tables,
        inside,
        sorted(session._table_of),
        sorted(session._output_states),
        session._tables._is_chosen,
    )


def finished(events):
    """The tokens of the requests that ended, by request."""
    return {
        event.request: [one.tokens.tolist() for one in event.hypotheses]
        for event in events
        if isinstance(event, Finished)
    }


# ------------------------------------------------------------------------ interrupts
@contextmanager
def interrupted(number):
    """Raises KeyboardInterrupt at that call of a function of this package; yields how many there were."""
    calls = [0]

    def watch(frame, event, argument):
        code = frame.f_code  # an error in a generator that is closed would be lost
        if event == "call" and "/descant/" in code.co_filename and not code.co_flags & CO_GENERATOR:
            calls[0] += 1
            if calls[0] == number:
                sys.settrace(None)
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield calls
    finally:
        sys.settrace(before)


def mixed(tiny):
    """Requests that use all that admission registers: wrappers, drafters, processors, stops, caches."""
    fields = [
        {"guidance_scale": 1.5},
        {"do_sample": True, "seed": 3, "repetition_penalty": 1.3, "logprobs": 2},
        {"dola_layers": "low"},
        {"cache_implementation": "sink", "cache_config": {"window_length": 6, "num_sink_tokens": 2}},
        {"suffix_lookup_num_tokens": 3, "stop_token_ids": [5]},
        {"num_beams": 2},
    ]
    if tiny.encoder_decoder:
        fields = [one for one in fields if not one.keys() & {"guidance_scale", "dola_layers", "cache_config"}]
    configs = [GenerationConfig(**one, max_new_tokens=5) for one in fields]
    given = requests(tiny, configs, (9, 4, 7), seed=8)
    first = replace(given[0], logits_processor=[lambda ids, scores: scores], stopping_criteria=[_never])
    return [first, *given[1:]]


def _never(ids, scores):
    return torch.zeros(len(ids), dtype=torch.bool)


def test_an_interrupt_while_a_request_is_registered_leaves_no_references(tiny, monkeypatch):
    one = tiny("llama")
    session = Session(one.model)
    (given,) = requests(one, [GenerationConfig(repetition_penalty=1.3, max_new_tokens=2)], (4,))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running_requests, "_batch_place", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.admit(given)
    assert not next(session.tables).running.processor_chains.items


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_an_interrupt_anywhere_in_admission_leaves_nothing(name, tiny):
    one = tiny(name)
    given = mixed(one)
    alone = [outcomes(one.model, [each])[0].tokens for each in given]
    options = {"trace": Tracer(), "prefix_cache": PrefixCache(block=4)}
    session = Session(one.model, **(options if name == "llama" else {}))
    session.admit(given[1])
    session.step()
    trial = Session(one.model)
    trial.admit(given[1])
    with interrupted(-1) as calls:
        trial.admit(*given)
    total = calls[0]
    assert total > 100
    rng = random.Random(4)
    before = state(session)
    for number in sorted(rng.sample(range(1, total), 40)):
        with pytest.raises(KeyboardInterrupt), interrupted(number):
            session.admit(*given)
        assert state(session) == before, f"call {number} of {total}"
    numbers = session.admit(*given)
    ended = finished(session.drain())
    assert [ended[number] for number in numbers] == alone
    assert ended[0] == alone[1]


# ------------------------------------------------------------------------ wrappers that raise
class Passing(ModelWrapper):
    """A wrapper that changes nothing."""

    def forward(self, rows, proposal, cache):
        return self.inner.forward(rows, proposal, cache)


class Broken(Passing):
    """A wrapper that cannot be made."""

    def __init__(self, inner):
        raise ZeroDivisionError("no wrapper")


class Unwrapping(Passing):
    """A wrapper that cannot wrap a cache."""

    def wrap_cache(self, cache):
        raise ZeroDivisionError("no cache")


class Refusing(Passing):
    """A wrapper that takes no request."""

    def add_requests(self, requests, inputs):
        super().add_requests(requests, inputs)
        raise ZeroDivisionError("no request")


@pytest.mark.parametrize("kind", [Broken, Unwrapping, Refusing])
def test_a_wrapper_that_raises_leaves_the_session_usable(kind, tiny):
    one = tiny("llama")
    guided, plain = requests(one, [config(guidance_scale=1.5), config()], (6, 9))
    alone = [outcomes(one.model, [each])[0].tokens for each in (guided, plain)]
    session = Session(one.model)
    before = state(session)
    # Guidance is put around the model before the recipe's wrapper, which then raises.
    bad = replace(guided, recipe=kind)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            session.admit(bad)
        assert state(session) == before
    numbers = session.admit(guided, plain)
    session.step()
    between = state(session)
    with pytest.raises(ZeroDivisionError):
        session.admit(replace(plain, recipe=kind))
    assert state(session) == between
    numbers += session.admit(guided, plain)
    ended = finished(session.drain())
    assert [ended[number] for number in numbers] == alone * 2


def test_a_trace_says_which_requests_were_refused(tiny, monkeypatch):
    one = tiny("llama")
    tracer = Tracer()
    session = Session(one.model, trace=tracer)
    given = requests(one, [config(), config()], (5, 8))
    with monkeypatch.context() as patch:
        patch.setattr(DenseStore, "extend", _raise_memory_error)
        with pytest.raises(MemoryError):
            session.admit(*given)
    assert [result.error for result in tracer.trace.results.values()] == ["refused", "refused"]
    numbers = session.admit(*given)
    list(session.drain())
    assert [tracer.trace.results[number].error for number in numbers] == [None, None]


def _raise_memory_error(*_):
    raise MemoryError


# ------------------------------------------------------------------------ encoder and decoder
def bad_requests(one):
    """Requests that are refused, each at another point, with what the error names."""
    good = requests(one, [config()], (7,))[0]
    refused = [
        (replace(good, generation_config=config(stop_strings="a")), "tokenizer"),
        (replace(good, prompt=[10_000]), "prompt"),
        (replace(good, logits_processor=[3]), "logits_processor"),
        (replace(good, cache_salt="text"), "cache_salt"),
    ]
    if one.encoder_decoder:
        refused.append((replace(good, inputs={}), "encoder"))
    return refused


@pytest.mark.parametrize("name", ["bart", "t5", "llama"])
def test_a_refused_request_leaves_nothing_behind(name, tiny):
    one = tiny(name)
    good = requests(one, [config(), config(num_beams=2)], (5, 8), seed=1)
    alone = [outcomes(one.model, [each])[0].tokens for each in good]
    session = Session(one.model)
    numbers, ended = [], {}
    for bad, name_of in bad_requests(one):
        before = state(session)
        with pytest.raises(InputError, match=name_of):
            session.admit(good[1], bad)
        assert state(session) == before
        numbers += session.admit(*good)
        ended |= finished(session.step())
    ended |= finished(session.drain())
    assert [ended[number] for number in numbers] == alone * (len(numbers) // 2)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_request_that_is_cancelled_before_its_first_step_leaves_nothing(name, tiny):
    one = tiny(name)
    short, long = requests(one, [config(), config()], (4, 13), seed=2)
    alone = [outcomes(one.model, [each])[0].tokens for each in (short, long)]
    session = Session(one.model)
    first = session.admit(short)[0]
    session.step()
    for _ in range(3):
        session.cancel(session.admit(long)[0])
        session.step()
    second = session.admit(short, long, short)
    session.cancel(second[0])
    session.cancel(second[1])
    ended = finished(session.drain())
    assert [ended[first], ended[second[2]]] == [alone[0]] * 2
    third = session.admit(long)[0]
    assert finished(session.drain())[third] == alone[1]
