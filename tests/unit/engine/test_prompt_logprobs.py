"""The log-probabilities of prompts: those of one plain forward, whatever runs beside them."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
import transformers

from descant import (
    AsyncEngine,
    DeadlineExceeded,
    EngineFull,
    Finished,
    GenerationConfig,
    InputError,
    PrefixCache,
    Request,
    SchedulerConfig,
    Session,
    Tracer,
)
from tests.support.markov_model import Chain
from tests.support.tiny_models import prompts

LENGTHS = (1, 2, 5, 63, 64, 65, 90, 7)


def expected(model, ids, count):
    """By transformers: the log-probability of each token after the first, and the best ones."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return own, *logprobs.topk(count)


def check(model, ids, found, count):
    own, top_raw, top = expected(model, ids, count)
    assert found.raw.shape == found.processed.shape == (len(ids) - 1,)
    assert torch.equal(found.raw, found.processed)
    assert torch.allclose(found.raw, own, atol=1e-4)
    assert found.top.shape == (len(ids) - 1, count)
    assert torch.allclose(found.top_raw, top_raw, atol=1e-4)
    assert torch.equal(found.top_raw, found.top_processed)
    assert (found.top != top).sum() <= 0.02 * top.numel()  # near ties may be exchanged


def generate_all(engine, given):
    handles = [engine.submit(one) for one in given]
    return [handle.result() for handle in handles]


def tokens_of(finished):
    return [one.tokens.tolist() for one in finished.hypotheses]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gpt-neox"])
def test_they_equal_one_plain_forward(tiny, name):
    """Of prompts of every length beside each other and beside requests without."""
    subject = tiny(name)
    texts = prompts(subject.arch, LENGTHS, 3)
    config = GenerationConfig(max_new_tokens=3)
    given = [Request(ids, config, prompt_logprobs=at % 4) for at, ids in enumerate(texts)]
    with AsyncEngine(subject.model) as engine:
        found = generate_all(engine, [*given, *(Request(ids, config) for ids in texts)])
    for at, (ids, one) in enumerate(zip(texts, found, strict=False)):
        check(subject.model, ids, one.prompt_logprobs, at % 4)
        assert found[at + len(texts)].prompt_logprobs is None
        assert tokens_of(one) == tokens_of(found[at + len(texts)])


@pytest.mark.parametrize("kind", ["Mamba", "Rwkv", "Bloom"])
def test_they_equal_one_plain_forward_of_other_kinds(kind):
    """A state that is continued token by token, and positions by a bias."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    extra = {"Mamba": {"state_size": 4}, "Rwkv": {"attention_hidden_size": 32}, "Bloom": {"n_head": 4}}[kind]
    made = getattr(transformers, f"{kind}Config")(**sizes, **extra, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    texts = [torch.randint(5, 97, (size,)).tolist() for size in (2, 70, 90)]
    config = GenerationConfig(max_new_tokens=3)
    with AsyncEngine(model) as engine:
        found = generate_all(engine, [Request(ids, config, prompt_logprobs=2) for ids in texts])
    for ids, one in zip(texts, found, strict=True):
        check(model, ids, one.prompt_logprobs, 2)


def test_the_other_fields_of_a_request_hold_as_always(tiny):
    subject = tiny("llama")
    texts = prompts(subject.arch, [30, 40, 20, 50], 4)
    fields = (
        {"do_sample": True, "seed": 3, "logprobs": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"guidance_scale": 1.5, "repetition_penalty": 1.3},
    )
    configs = [GenerationConfig(max_new_tokens=6, **one) for one in fields]
    with AsyncEngine(subject.model) as engine:
        plain = generate_all(engine, [Request(*one) for one in zip(texts, configs, strict=True)])
        scored = generate_all(
            engine, [Request(ids, one, prompt_logprobs=1) for ids, one in zip(texts, configs, strict=True)]
        )
    for ids, one, other in zip(texts, plain, scored, strict=True):
        assert tokens_of(one) == tokens_of(other)
        check(subject.model, ids, other.prompt_logprobs, 1)


def test_a_prefix_cache_and_a_pool_change_nothing(tiny):
    subject = tiny("llama")
    (ids,) = prompts(subject.arch, [80], 5)
    given = Request(ids, GenerationConfig(max_new_tokens=4), prompt_logprobs=2)
    scheduler = SchedulerConfig(num_blocks=64, block_size=4)
    with AsyncEngine(subject.model, scheduler=scheduler, prefix_cache=PrefixCache(block=4)) as engine:
        for one in [engine.submit(given).result() for _ in range(3)]:
            check(subject.model, ids, one.prompt_logprobs, 2)


def test_a_trace_has_them_too(tiny):
    subject = tiny("llama")
    (ids,) = prompts(subject.arch, [70], 6)

    async def main():
        async with AsyncEngine(subject.model) as engine:
            given = Request(ids, GenerationConfig(max_new_tokens=4), prompt_logprobs=2)
            return await engine.generate(given, trace=Tracer())

    check(subject.model, ids, asyncio.run(main()).prompt_logprobs, 2)


def test_what_cannot_be_scored_is_refused(tiny):
    config = GenerationConfig(max_new_tokens=2)
    with AsyncEngine(tiny("t5").model) as engine, pytest.raises(InputError, match="encoder-decoder"):
        engine.submit(Request([0], config, {"input_ids": torch.tensor([5, 6])}, prompt_logprobs=1))
    subject = tiny("llama")
    with AsyncEngine(subject.model) as engine:
        for count in (-1, 98, True, 1.0):
            with pytest.raises(InputError, match="prompt_logprobs"):
                engine.submit(Request([5, 6], config, prompt_logprobs=count))
        with pytest.raises(InputError, match="inputs_embeds"):
            engine.submit(Request([], config, {"inputs_embeds": torch.zeros(3, 32)}, prompt_logprobs=1))
        with pytest.raises(InputError, match="prompt"):
            engine.submit(Request([5, 99], config, prompt_logprobs=1))
        assert engine.metrics().counters["refused"] == 6
        assert engine.metrics().counters["requests"] == 0
    with pytest.raises(InputError, match="AsyncEngine"):
        Session(subject.model).admit(Request([5, 6], config, prompt_logprobs=1))


@pytest.fixture
def chain():
    return Chain.chance(11, 3, spread=2.0)


def long_prompt(**fields):
    return Request([1, 2, 3, 4, 5] * 2000, GenerationConfig(max_new_tokens=3), prompt_logprobs=0, **fields)


def test_cancelling_frees_a_prompt_that_is_scored(chain):
    with AsyncEngine(chain) as engine:
        handles = [engine.submit(long_prompt()) for _ in range(6)]  # more than are scored at once
        for handle in handles:
            handle.cancel()
        metrics = engine.metrics()
        assert (metrics.session.requests, metrics.session.rows) == (0, 0)
        assert metrics.counters["cancelled"] == 6
        assert engine._runner._scores._strategy._requests == {}
        given = Request([1, 2, 3], GenerationConfig(max_new_tokens=3), prompt_logprobs=1)
        assert engine.submit(given).result().prompt_logprobs.raw.shape == (2,)


def test_a_deadline_counts_from_the_arrival(chain):
    with AsyncEngine(chain) as engine:
        with pytest.raises(DeadlineExceeded):
            engine.submit(long_prompt(deadline=0.02)).result()
        assert engine._runner._scores._strategy._requests == {}


def test_a_full_queue_refuses_a_prompt_and_delays_a_scored_one(chain):
    scheduler = SchedulerConfig(max_running_rows=1, max_waiting=1)
    config = GenerationConfig(max_new_tokens=100_000)
    with AsyncEngine(chain, scheduler=scheduler) as engine:
        scored = engine.submit(Request([1, 2], GenerationConfig(max_new_tokens=3), prompt_logprobs=0))
        blocking, deadline = [], time.monotonic() + 30
        while len(blocking) < 2 and time.monotonic() < deadline:
            try:
                blocking.append(engine.submit(Request([1], config)))
            except EngineFull:
                time.sleep(0.01)
        with pytest.raises(EngineFull):
            engine.submit(long_prompt())
        for handle in blocking:
            handle.cancel()
        assert isinstance(scored.result(), Finished)


def test_draining_waits_for_a_prompt_that_is_scored(chain):
    with AsyncEngine(chain) as engine:
        given = Request([1, 2, 3] * 100, GenerationConfig(max_new_tokens=3), prompt_logprobs=1)
        handle = engine.submit(given)
        engine.drain()
        assert handle.result().prompt_logprobs.raw.shape == (299,)
