"""The tables of a session: which requests share a cache, and what becomes of it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import descant
from descant import (
    ConfigError,
    Finished,
    GenerationConfig,
    InputError,
    PrefixCache,
    Request,
    Session,
    Tokens,
)
from descant.decoding.speculative.lookup import PromptLookup
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from descant.kv_cache.stores.sink_window import SinkStore
from descant.testing import outcomes
from descant.trace.tracer import Tracer

SINK = {"cache_implementation": "sink", "cache_config": {"window_length": 6, "num_sink_tokens": 2}}
WIDE = {"cache_implementation": "sink", "cache_config": {"window_length": 8, "num_sink_tokens": 2}}
PROMPT = list(range(5, 17))


def request(**fields):
    options = {name: fields.pop(name) for name in ("past_key_values", "logits_processor") if name in fields}
    return Request(PROMPT, GenerationConfig(max_new_tokens=6, eos_token_id=None, **fields), **options)


def kinds(session):
    return [type(table.cache) for table in session._tables]


@pytest.fixture
def llama(tiny):
    return tiny("llama").model


def test_requests_share_a_table_by_name_and_settings(llama):
    session = Session(llama)
    first, second, third, plain = session.admit(request(**SINK), request(**WIDE), request(**SINK), request())
    of = session._table_of
    assert of[first] is of[third]
    assert len({id(of[one]) for one in (first, second, plain)}) == 3
    assert of[plain] is session._tables.default
    assert sorted(len(table) for table in session._tables) == [1, 1, 2]
    assert session.rows == len(session) == 4
    (late,) = session.admit(request(**WIDE))
    assert of[late] is of[second]


def test_a_lossless_name_shares_the_default_cache(llama):
    session = Session(llama)
    session.admit(request(cache_implementation="paged"), request())
    assert kinds(session) == [PagedStore]
    session.admit(request(cache_implementation="dynamic"))
    assert kinds(session) == [PagedStore, DenseStore]


def test_a_cache_given_to_the_session_is_that_of_requests_that_name_none(llama):
    session = Session(llama, cache=PagedStore())
    numbers = session.admit(request(), request(**SINK), request(cache_implementation="paged"))
    assert [type(session._table_of[one].cache) for one in numbers] == [PagedStore, SinkStore, PagedStore]
    assert kinds(session) == [PagedStore, SinkStore]


def test_without_a_cache_none_can_be_named(llama):
    with pytest.raises(ConfigError, match="`cache_implementation` must not be given with `use_cache=False`"):
        descant.generate(llama, torch.tensor([PROMPT]), use_cache=False, max_new_tokens=2, **SINK)


def test_a_table_goes_with_its_last_request_and_its_memory_too(llama):
    session = Session(llama)
    plain = session.admit(request())
    session.step()
    before = session.report().cache_bytes
    numbers = session.admit(request(**SINK), request(**SINK))
    session.step()
    cache = weakref.ref(session._table_of[numbers[0]].cache)
    assert session.report().cache_bytes > before
    assert session.report().cache_bytes == sum(table.cache.nbytes for table in session._tables)
    session.cancel(numbers[0])
    assert cache() is not None
    session.cancel(numbers[1])
    gc.collect()
    assert cache() is None
    assert kinds(session) == [DenseStore]
    number = session.admit(request(**SINK))[0]
    list(session.drain())
    assert kinds(session) == [DenseStore]
    assert [*plain, number] == [0, 3]


def test_a_longer_request_gets_a_static_cache_that_it_fits_into(llama):
    session = Session(llama)
    config = GenerationConfig(max_new_tokens=3, cache_implementation="static")
    first = session.admit(Request(PROMPT, config))[0]
    second = session.admit(Request(PROMPT, config.replace(max_new_tokens=20)))[0]
    third = session.admit(Request(PROMPT, config))[0]
    of = session._table_of
    assert of[first] is of[third]
    assert (of[first].cache.capacity, of[second].cache.capacity) == (15, 32)
    assert sum(isinstance(event, Finished) for event in session.drain()) == 3


def test_a_lossy_past_is_not_catching(llama):
    session = Session(llama)
    session.admit(replace(request(**SINK), return_past_key_values=True))
    [ended] = [event for event in session.drain() if isinstance(event, Finished)]
    [past] = ended.past_key_values
    assert isinstance(past.store, SinkStore)
    text = [*PROMPT, *ended.hypotheses[0].tokens.tolist(), 7, 8]
    config = GenerationConfig(max_new_tokens=6, eos_token_id=None)
    given = [Request(text, config, past_key_values=past), Request(text, config), request()]
    alone = [outcomes(llama, [one])[0].tokens for one in given]
    assert [one.tokens for one in outcomes(llama, given)] == alone
    assert [one.tokens for one in outcomes(llama, given[::-1])] == alone[::-1]


def test_what_is_admitted_says_what_is_supported(llama):
    session = Session(llama)
    session.admit(request())
    assert session.supports(request(**SINK)) is None
    assert isinstance(session.supports(request(cache_implementation="sliding_window")), ConfigError)
    assert isinstance(session.supports(request(cache_implementation="mamba")), ConfigError)
    assert kinds(session) == [DenseStore]
    fixed = {"cache_implementation": "static", "cache_config": {"max_cache_len": 4}}
    assert isinstance(session.supports(request(**fixed)), ConfigError)


def test_a_step_is_one_step_of_a_trace_whatever_the_caches(llama):
    session = Session(llama, trace=Tracer())
    session.admit(request(**SINK), request())
    list(session.drain())
    assert session.steps == 6
    steps = session.trace.steps
    assert [sorted(row.request for row in step.rows) for step in steps] == [[0, 1]] * 6


def test_a_beam_search_on_a_table_of_its_own_has_a_common_prefix(llama):
    session = Session(llama)
    session.admit(request())
    number = session.admit(request(num_beams=2, **SINK))[0]
    found = None
    while len(session):
        found = session.common_prefix(number) if number in session._table_of else found
        session.step()
    assert found is not None


def test_prefixes_are_reused_on_lossless_tables_only(llama):
    session = Session(llama, prefix_cache=PrefixCache(block=4))
    for fields in ({}, SINK, {"cache_implementation": "paged"}):
        session.admit(request(**fields))
        list(session.drain())
    assert (session.report().prefixes.hits, session.report().prefixes.misses) == (1, 1)


def test_events_of_a_table_are_not_lost_where_another_one_raises(llama):
    fails = [True, True]

    def failing(ids, scores):
        if fails and fails.pop():
            raise KeyboardInterrupt  # an Exception would end its request
        return scores

    session = Session(llama, trace=Tracer())
    plain = session.admit(request())[0]
    other = session.admit(request(logits_processor=[failing], **SINK))[0]
    tokens = {plain: [], other: []}
    ended = {}
    while len(session):
        try:
            events = session.step()
        except KeyboardInterrupt:
            continue
        for event in events:
            if isinstance(event, Tokens):
                for number, token in zip(event.request.tolist(), event.token.tolist(), strict=True):
                    tokens[number].append(token)
            else:
                ended[event.request] = event.hypotheses[0].tokens.tolist()
    alone = [outcomes(llama, [one])[0].tokens[0] for one in (request(), request(**SINK))]
    assert [ended[plain], ended[other]] == alone
    assert [tokens[plain], tokens[other]] == alone
    assert len(session.trace.steps) == session.steps == 8


def test_a_users_drafter_drafts_for_one_table(llama):
    """It follows the rows of its table, and cannot follow those of two."""
    drafter = PromptLookup()
    session = Session(llama)
    plain = replace(request(), assistant_model=drafter)
    named = replace(request(**SINK), assistant_model=drafter)
    number = session.admit(plain, plain)[0]
    with pytest.raises(InputError, match="`assistant_model` must not be a drafter that drafts for requests"):
        session.admit(named)
    session.cancel(number)
    list(session.drain())
    session.admit(named)
    with pytest.raises(InputError, match="use a drafter for each cache"):
        session.admit(named, plain)
    assert len(session) == 1
