"""generate() and stream() with a scheduler: more prompts than rows or blocks, and the same tokens."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import descant
from descant import ConfigError, EngineFull, InputError, SchedulerConfig
from descant.engine.scheduling.scheduled_requests import ScheduledRequests
from tests.support.tiny_models import pad, prompts

NEW = 9
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"min_new_tokens": NEW},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}
POOLS = {"greedy": 13, "sampling": 19, "beams": 25}  # blocks, little more than the largest prompt needs


def batch(tiny: Any, count: int = 6) -> dict[str, torch.Tensor]:
    """Prompts of different lengths."""
    rows = prompts(tiny.arch, [(5, 9, 1, 6, 12, 3)[at % 6] for at in range(count)], seed=100)
    ids, mask = pad(rows, tiny.pad, "right" if tiny.encoder_decoder else "left")
    return {"input_ids": ids, "attention_mask": mask}


def tight(**given: Any) -> SchedulerConfig:
    """A pool that two of the requests outgrow, with prompts in chunks."""
    return SchedulerConfig(**{"num_blocks": 30, "block_size": 2, "chunk_tokens": 4, "headroom": 0.0, **given})


@pytest.fixture
def preempted(monkeypatch):
    """The requests that are preempted."""
    numbers, preempt = [], ScheduledRequests._preempt

    def counting(self, number):
        numbers.append(number)
        preempt(self, number)

    monkeypatch.setattr(ScheduledRequests, "_preempt", counting)
    return numbers


def test_more_prompts_than_rows(tiny):
    one, widest = tiny("llama"), []

    def counting(ids, scores):
        widest.append(len(ids))
        return scores

    given = {**batch(one, 23), "max_new_tokens": 4}
    expected = descant.generate(one.model, **given)
    limited = SchedulerConfig(max_running_rows=4)
    found = descant.generate(one.model, **given, logits_processor=[counting], scheduler=limited)
    assert torch.equal(found, expected)
    assert max(widest) <= 4


@pytest.mark.parametrize("method", METHODS)
def test_a_small_pool(tiny, preempted, method):
    one = tiny("llama")
    given = {**batch(one), "max_new_tokens": NEW, **METHODS[method]}
    expected = descant.generate(one.model, **given)
    assert not preempted
    assert torch.equal(
        descant.generate(one.model, **given, scheduler=tight(num_blocks=POOLS[method])), expected
    )
    assert preempted


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_of_a_small_pool(tiny, method):
    one = tiny("llama")
    given = {**batch(one), "max_new_tokens": NEW, **METHODS[method]}
    tokens = []
    for scheduler in (None, tight(num_blocks=POOLS[method])):
        found = defaultdict(list)
        stream = descant.stream(one.model, **given, scheduler=scheduler)
        for event in stream:
            found[event.row, event.sequence] += event.token_ids
        tokens.append(dict(found))
    assert tokens[0] == tokens[1]
    assert stream.session.report().preemptions > 0
    assert stream.session.report().blocks == 0


@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_other_models(tiny, name):
    one = tiny(name)
    given = {**batch(one), "max_new_tokens": 5, "num_beams": 2}
    expected = descant.generate(one.model, **given)
    assert torch.equal(descant.generate(one.model, **given, scheduler=tight(max_running_rows=4)), expected)


def test_a_call_without_a_cache(tiny):
    one = tiny("llama")
    given = {**batch(one), "max_new_tokens": 5, "use_cache": False}
    expected = descant.generate(one.model, **given)
    assert torch.equal(descant.generate(one.model, **given, scheduler=tight()), expected)


def test_sampling_without_a_seed_depends_on_the_prompts_alone(tiny):
    """Each prompt has a seed of its own by torch's generator, whatever the order in which they join."""
    one = tiny("llama")
    given = {**batch(one), "max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
    found = []
    for scheduler in (SchedulerConfig(), tight(), SchedulerConfig(max_running_rows=2, chunk_tokens=1)):
        torch.manual_seed(5)
        found.append(descant.generate(one.model, **given, scheduler=scheduler))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], descant.generate(one.model, **given, scheduler=SchedulerConfig()))


def test_a_greedy_call_leaves_the_generator_alone(tiny):
    one = tiny("llama")
    state = torch.get_rng_state()
    descant.generate(one.model, **batch(one), max_new_tokens=2, scheduler=SchedulerConfig())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("method", METHODS)
def test_scores_and_log_probabilities(tiny, method):
    one = tiny("llama")
    given = {**batch(one), "max_new_tokens": NEW, **METHODS[method], "return_dict_in_generate": True}
    given |= {"output_scores": True, "output_logits": True, "logprobs": 2}
    expected = descant.generate(one.model, **given)
    found = descant.generate(one.model, **given, scheduler=tight(num_blocks=POOLS[method]))
    for name in ("scores", "logits"):
        assert len(found[name]) == len(expected[name])
        for ours, theirs in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        torch.testing.assert_close(ours.processed, theirs.processed, atol=1e-4, rtol=1e-4)


def test_a_streamer_gets_the_same_columns(tiny):
    class Recorder:
        def __init__(self):
            self.columns = []

        def put(self, value):
            self.columns.append(value.tolist())

        def end(self):
            self.columns.append(None)

    one, recorders = tiny("llama"), []
    for scheduler in (None, tight()):
        recorders.append(Recorder())
        descant.generate(
            one.model, **batch(one), max_new_tokens=4, streamer=recorders[-1], scheduler=scheduler
        )
    assert recorders[0].columns == recorders[1].columns


def test_a_stream_that_is_closed_frees_what_runs_and_what_waits(tiny):
    one = tiny("llama")
    stream = descant.stream(one.model, **batch(one), max_new_tokens=NEW, scheduler=tight(max_running_rows=2))
    next(stream)
    assert stream.session.report().waiting > 0
    stream.close()
    report = stream.session.report()
    assert (report.requests, report.rows, report.waiting, report.blocks) == (0, 0, 0, 0)


def test_the_users_cache_is_written(tiny):
    one = tiny("llama")
    caches = []
    for scheduler in (None, SchedulerConfig(max_running_rows=1)):
        output = descant.generate(
            one.model,
            **batch(one),
            max_new_tokens=4,
            return_dict_in_generate=True,
            use_cache=True,
            scheduler=scheduler,
        )
        caches.append(output.past_key_values)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_what_a_user_raises_is_raised(tiny):
    one = tiny("llama")

    def broken(ids, scores):
        raise ZeroDivisionError("in a user's processor")

    given = {**batch(one), "max_new_tokens": 3, "logits_processor": [broken], "scheduler": tight()}
    with pytest.raises(ZeroDivisionError):
        descant.generate(one.model, **given)
    with pytest.raises(ZeroDivisionError):
        list(descant.stream(one.model, **given))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"scheduler": 5}, InputError, "must be a descant.SchedulerConfig"),
        ({"scheduler": SchedulerConfig(num_blocks=3, block_size=4)}, InputError, "must fit a KV pool of 3"),
        ({"scheduler": SchedulerConfig(max_running_rows=1), "num_beams": 2}, InputError, "max_running_rows"),
        ({"scheduler": SchedulerConfig(max_waiting=5)}, EngineFull, "5"),
        (
            {"scheduler": tight(), "return_dict_in_generate": True, "output_hidden_states": True},
            InputError,
            "must be None with `output_hidden_states`",
        ),
        (
            {"scheduler": tight(), "return_dict_in_generate": True, "use_cache": True},
            InputError,
            "must have no `num_blocks`",
        ),
        (
            {"scheduler": tight(), "recipe": lambda model, **given: None},
            InputError,
            "must be None with a recipe that is a function",
        ),
    ],
)
def test_what_a_call_cannot_have_is_refused(tiny, given, error, match):
    one = tiny("llama")
    with pytest.raises((error, ConfigError), match=match):
        descant.generate(one.model, **batch(one), max_new_tokens=NEW, **given)
