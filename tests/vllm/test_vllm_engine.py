"""`descant.VLLM`: generate, stream, sessions' events, errors and ends on vLLM's engine."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

import descant
from descant import (
    ConfigError,
    Failed,
    Finished,
    GenerationConfig,
    InputError,
    Request,
    RowError,
    SessionBusy,
)
from descant.engine.vllm.request_failures import FAILURES
from tests.support import pretrained
from tests.vllm.engines import MODEL


@pytest.fixture(scope="module")
def engine():
    folder = str(pretrained.folder(MODEL))
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    engine = descant.VLLM(folder, dtype="float32", enforce_eager=True, **sizes)
    yield engine
    assert (len(engine), engine.rows, engine.llm.has_unfinished_requests(), FAILURES) == (0, 0, False, {})


@pytest.fixture
def prompts(target):
    return {"input_ids": torch.tensor([target.tokens("Once upon a time"), target.tokens("The sea was so")])}


CALLS = {
    "greedy": {},
    "samples": {"do_sample": True, "seed": [3, 4], "num_return_sequences": 2},
    "chain": {"do_sample": True, "seed": 5, "min_p": 0.05, "dry_multiplier": 0.8, "mirostat_tau": 3.0},
    "stop strings": {"stop_strings": ["a", "e"], "max_new_tokens": 40},
    "stop regex": {"stop_regex": "[a-z]{4}", "max_new_tokens": 40},
    "no end": {"eos_token_id": None},
    "length": {"max_length": 12, "min_length": 6},
    "grammar": {"grammar": {"choice": ["a red house", "a blue ship"]}},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_tokens_of_a_session(name, engine, target, prompts):
    given = {"max_new_tokens": 10, **CALLS[name], "tokenizer": pretrained.tokenizer(MODEL)}
    if "max_length" in given:
        del given["max_new_tokens"]
    expected = descant.generate(target.model, **prompts, **given)
    assert descant.generate(None, **prompts, **given, engine=engine).equal(expected)


def test_a_stream_has_the_same_text(engine, target):
    tokenizer = pretrained.tokenizer(MODEL)
    given = {"do_sample": True, "seed": 1, "max_new_tokens": 12}
    expected = descant.stream(target.model, "Once", tokenizer, **given)
    found = descant.stream(None, "Once", tokenizer, **given, engine=engine)
    assert "".join(event.text for event in found) == "".join(event.text for event in expected)


def test_reasons_and_results(engine, target):
    ids = target.tokens("Once upon a time")
    first = int(descant.generate(None, torch.tensor([ids]), max_new_tokens=1, engine=engine)[0, -1])
    configs = [
        GenerationConfig(max_new_tokens=3, eos_token_id=None),
        GenerationConfig(max_new_tokens=3, eos_token_id=first),
        GenerationConfig(max_new_tokens=3, stop_token_ids=[first]),
        GenerationConfig(max_new_tokens=100, eos_token_id=None, max_time=1e-6),
    ]
    numbers = engine.admit(*(Request(ids, config) for config in configs))
    ended = {event.request: event for event in engine.drain() if isinstance(event, Finished)}
    reasons = [ended[number].hypotheses[0].reason for number in numbers]
    assert reasons == ["length", "eos", "stop", "time"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("num_beams", {"num_beams": 2}),
        ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
        ("dola_layers", {"dola_layers": "low"}),
        ("output_scores", {"output_scores": True, "return_dict_in_generate": True}),
        ("logits_processor", {"logits_processor": [lambda _, scores: scores]}),
        ("stopping_criteria", {"stopping_criteria": [lambda *_: False]}),
        ("max_new_tokens", {"max_new_tokens": 500}),
        ("suppress_tokens", {"suppress_tokens": [10**6]}),
    ],
)
def test_what_it_cannot_run_is_refused(name, given, engine, prompts):
    with pytest.raises((ConfigError, InputError), match=f"`{name}`"):
        descant.generate(None, **prompts, **given, engine=engine)
    assert len(engine) == 0


def test_a_request_that_vllm_refuses_leaves_nothing(engine, monkeypatch):
    monkeypatch.setattr(engine, "_params", lambda _, config=None: _long_params(config))
    with pytest.raises(InputError, match="must be one that vLLM takes"):
        engine.admit(Request([1, 2], GenerationConfig(max_new_tokens=2)))
    assert len(engine) == 0


def _long_params(_):
    from vllm import SamplingParams

    return SamplingParams(max_tokens=4, prompt_logprobs=10**4)


def test_a_request_without_a_token_fails_alone(engine, target):
    vocab = target.vocab
    dead = GenerationConfig(max_new_tokens=4, suppress_tokens=list(range(1, vocab)), bad_words_ids=[[0]])
    alive = GenerationConfig(max_new_tokens=4, eos_token_id=None)
    first, second = engine.admit(Request([5, 6], dead), Request([5, 6], alive))
    ended = {event.request: event for event in engine.drain() if isinstance(event, Finished | Failed)}
    assert isinstance(ended[first].error, RowError)
    assert "suppress_tokens" in str(ended[first].error)
    assert len(ended[second].hypotheses[0].tokens) == 4


def test_cancelled_and_late_requests(engine):
    config = GenerationConfig(max_new_tokens=60, eos_token_id=None)
    first, second = engine.admit(Request([5], config), Request([6], config, deadline=0.02))
    events = engine.step()  # on a busy machine the deadline passes in this step
    engine.cancel(first)
    time.sleep(0.03)
    [event] = [event for event in [*events, *engine.drain()] if isinstance(event, Failed)]
    assert event.request == second
    assert isinstance(event.error, descant.DeadlineExceeded)


def test_one_call_at_a_time(engine, prompts):
    with descant.stream(None, **prompts, max_new_tokens=9, engine=engine) as stream:
        next(stream)
        with pytest.raises(SessionBusy):
            descant.generate(None, **prompts, engine=engine)
    assert len(engine) == 0


def test_an_async_engine_on_vllm_with_a_fallback(engine, target):
    async def run():
        both = descant.FallbackEngine(engine, descant.Session(target.model))
        configs = [
            GenerationConfig(max_new_tokens=6),
            GenerationConfig(max_new_tokens=6, num_beams=3),
            GenerationConfig(max_new_tokens=6, do_sample=True, seed=3, logprobs=1),
        ]
        ids = target.tokens("Once upon a time")
        async with descant.AsyncEngine(both) as many:
            found = await asyncio.gather(*(many.generate(Request(ids, one)) for one in configs))
        assert both.report().requests == 0
        assert found[2].hypotheses[0].logprobs is not None
        return ids, configs, [one.hypotheses[0].tokens.tolist() for one in found]

    ids, configs, found = asyncio.run(run())
    for config, tokens in zip(configs, found, strict=True):
        expected = descant.generate(target.model, torch.tensor([ids]), config.replace(logprobs=None))
        assert tokens == expected[0, len(ids) :].tolist()


def test_random_requests_differ(engine):
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=1.5, top_k=0, eos_token_id=None)
    engine.admit(*(Request([5], config) for _ in range(3)))
    ended = [event for event in engine.drain() if isinstance(event, Finished)]
    assert len({tuple(one.hypotheses[0].tokens.tolist()) for one in ended}) == 3
