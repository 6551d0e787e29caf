"""Tokens are those of a session with preemption, chunks, shared prefixes and asynchronous scheduling."""

from __future__ import annotations

import contextlib

import pytest
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from descant.engine.vllm.logits_processor import DescantLogitsProcessor
from tests.vllm.engines import (
    Case,
    merged,
    random_cases,
    runnable,
    session_tokens,
    stateful_cases,
    text_cases,
    vllm_tokens,
)

# Five blocks of 32 tokens: one for vLLM itself, and as many as one request may need.
FEW_BLOCKS = {"num_gpu_blocks_override": 6, "block_size": 32}
SMALL_CHUNKS = {"max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def expected(target):
    """Requests with states and of random configs, and their tokens in a session."""
    cases = [*stateful_cases(1, 12, target), *random_cases(31, 4, target)]
    return runnable(target, cases)


class NoEvent:
    """In place of what orders work on a GPU."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_: None


@pytest.fixture
def asynchronous(monkeypatch):
    """Let vLLM schedule asynchronously on CPUs, where it always switches that off."""
    update = CpuPlatform.check_and_update_config.__func__

    def kept(cls, config):
        wanted = config.scheduler_config.async_scheduling
        update(cls, config)
        config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(kept))
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoEvent)
    monkeypatch.setattr(torch, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    seen = set()
    apply = DescantLogitsProcessor.apply

    def watched(self, logits, ctx=None):
        seen.update(entry.output[-1] for entry in self._entries.values() if entry.output)
        return apply(self, logits, ctx)

    monkeypatch.setattr(DescantLogitsProcessor, "apply", watched)
    return seen  # the last tokens in the lists that the plug-in gets


def test_preemption(engines, expected, schedule_counts):
    cases, tokens = expected
    llm = engines(**FEW_BLOCKS, enable_prefix_caching=False)
    assert vllm_tokens(llm, cases) == tokens
    assert schedule_counts.preemptions >= 6


def test_preemption_with_chunks_and_shared_prefixes(engines, expected, schedule_counts):
    cases, tokens = expected
    assert vllm_tokens(engines(**FEW_BLOCKS, **SMALL_CHUNKS), cases) == tokens
    assert schedule_counts.preemptions >= 6
    assert schedule_counts.partial_prompts >= 10


def test_chunks_without_a_prefix_cache(engines, expected, schedule_counts):
    cases, tokens = expected
    assert vllm_tokens(engines(**SMALL_CHUNKS, enable_prefix_caching=False), cases) == tokens
    assert schedule_counts.partial_prompts >= 10


def test_shared_prefixes(engines, expected):
    """The second run finds the prompts of the first in the cache."""
    cases, tokens = expected
    llm = engines()
    assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    for _ in range(2):
        assert vllm_tokens(llm, cases) == tokens


@pytest.mark.parametrize("settings", [{}, {**FEW_BLOCKS, **SMALL_CHUNKS}], ids=["plain", "preempted"])
def test_asynchronous_scheduling(engines, expected, schedule_counts, asynchronous, settings):
    cases, tokens = expected
    llm = engines(**settings, async_scheduling=True)
    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler, AsyncScheduler)
    assert vllm_tokens(llm, cases) == tokens
    assert -1 in asynchronous  # the plug-in is asked before vLLM has the tokens
    assert not settings or (schedule_counts.preemptions >= 6 and schedule_counts.partial_prompts >= 10)


def test_grammars_with_asynchronous_scheduling(engines, target, asynchronous, caplog):
    """A request runs for one step after its end, which is no error."""
    cases = text_cases(target)
    assert vllm_tokens(engines(async_scheduling=True), cases) == session_tokens(target, cases)
    assert -1 in asynchronous
    assert not [record for record in caplog.records if record.name.startswith("descant")]


def test_an_end_token_that_ends_nothing(engines, target, schedule_counts):
    """With `ignore_eos` a preempted request goes on after the model's end token."""
    eos = target.tokenizer.eos_token_id
    cases = [
        Case(
            [9 + number] * 30,
            merged(do_sample=True, mirostat_tau=4.0, seed=number, max_new_tokens=60, logit_bias={eos: 20.0}),
        )
        for number in range(8)
    ]
    cases, tokens = runnable(target, cases)
    assert sum(one[0].count(eos) for one in tokens) > 40
    assert vllm_tokens(engines(**FEW_BLOCKS, **SMALL_CHUNKS), cases) == tokens
    assert schedule_counts.preemptions >= 4
