"""Tokens never depend on the schedule: every method under random budgets, chunks, orders and preemptions."""

from __future__ import annotations

import random

import pytest

from descant import Failed, Finished, GenerationConfig, Request, Session
from descant.engine.scheduling.config import SchedulerConfig
from descant.testing import check_schedule, outcomes
from tests.contracts.methods import METHODS, methods, of_method
from tests.contracts.methods import mixed as mixed_methods
from tests.contracts.subjects import METHODS as PLAIN
from tests.contracts.subjects import mixed, requests
from tools.sweep.kinds import representative
from tools.sweep.trial import subject_of

DRAFTS = {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
@pytest.mark.parametrize("method", [*PLAIN, *METHODS])
def test_a_method_under_any_schedule(tiny, name, method):
    if method in PLAIN:
        least = PLAIN[method].get("min_length", 0)  # which counts one token of bart's prompt
        configs = [GenerationConfig(**PLAIN[method], max_new_tokens=max(new, least)) for new in (5, 10, 9)]
        given = requests(tiny(name), configs, (9, 4, 5))
    else:
        given = of_method(tiny(name), method, 3, new=5)
    check_schedule(tiny(name).model, given, schedules=3, seed=len(method))


@pytest.mark.parametrize("method", ["guided", "guided-beams", "guided-contrastive", "dola", "dola-beams"])
def test_a_guided_method_under_any_schedule(tiny, method):
    assert method in methods(tiny("llama"))
    check_schedule(tiny("llama").model, of_method(tiny("llama"), method, 3, new=5), schedules=3)


def test_drafts_under_any_schedule(tiny):
    one = tiny("llama")
    configs = [GenerationConfig(**DRAFTS, max_new_tokens=new) for new in (3, 8, 6)]
    given = [
        *requests(one, configs, (9, 3, 12)),
        Request([5, 6, 7, 5, 6], GenerationConfig(max_new_tokens=6), assistant_model=one.model),
    ]
    check_schedule(one.model, given, schedules=6)


def test_a_recurrent_model_under_any_schedule():
    found = subject_of(representative("recurrent"))
    texts = [one["input_ids"][0].tolist() for one in found.prompts]
    configs = [
        GenerationConfig(max_new_tokens=6),
        GenerationConfig(max_new_tokens=4, do_sample=True, seed=3, num_return_sequences=2),
        GenerationConfig(max_new_tokens=5, num_beams=3),
    ]
    given = [Request(texts[at % len(texts)], config) for at, config in enumerate(configs)]
    check_schedule(found.model, given, schedules=5)


def run(session, given):
    """The last event of each request, which all are admitted at once."""
    numbers = [session.admit(one)[0] for one in given]
    ended = {event.request: event for event in session.drain() if isinstance(event, Finished | Failed)}
    return [ended[number] for number in numbers]


def test_a_pool_that_holds_the_largest_request_alone(tiny):
    """64 requests of all methods; the smallest pool that admits each of them."""
    one = tiny("llama")
    pool = [*mixed(one), *mixed_methods(one)]
    given = [pool[at % len(pool)] for at in range(64)]
    config = SchedulerConfig(block_size=4)
    largest = max(Session(one.model, scheduler=config).demand(each).max_blocks(config) for each in given)
    session = Session(one.model, scheduler=SchedulerConfig(block_size=4, num_blocks=largest, chunk_tokens=16))
    alone = {id(each): outcomes(one.model, [each])[0] for each in pool}
    for each, event in zip(given, run(session, given), strict=True):
        assert isinstance(event, Finished), event
        assert [found.tokens.tolist() for found in event.hypotheses] == alone[id(each)].tokens
    report = session.report()
    assert (report.blocks, report.rows, report.requests, report.waiting) == (0, 0, 0, 0)
    assert report.preemptions > 0
    print(f"{report.preemptions} preemptions, {report.steps} steps, {largest} blocks")


@pytest.mark.slow
def test_200_random_batches_under_random_budgets(tiny):
    one = tiny("llama")
    pool = [*mixed(one), *mixed_methods(one)]
    for seed in range(200):
        rng = random.Random(seed)
        check_schedule(
            one.model, [rng.choice(pool) for _ in range(rng.randint(1, 64))], schedules=1, seed=seed
        )
