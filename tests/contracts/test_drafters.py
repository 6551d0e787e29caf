"""Every drafter satisfies the law of drafters, and drafters that break it are found."""

import pytest
import torch

from descant import GenerationConfig
from descant.core.records import Proposal
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.speculative.draft_model import AssistantDrafter, EarlyExit
from descant.decoding.speculative.lookup import PromptLookup, SuffixLookup
from descant.engine.planning.planner import as_model
from descant.engine.session import Request
from descant.kv_cache.stores.dense import DenseStore
from descant.testing import check_drafter
from tests.support import tiny_models


class Told:
    """A scripted drafter, by a function of the rows and a draft position."""

    is_model_free = False

    def __init__(self, say, law=None):
        self.say, self.law = say, law

    def add_requests(self, requests, inputs):
        pass

    def remove_requests(self, requests):
        pass

    def commit(self, parents, lengths):
        pass

    def draft(self, rows, most, aid):
        wide = int(most.max())
        if not wide:
            return Proposal()
        drafts = torch.stack([self.say(rows, place) for place in range(wide)], 1)
        return Proposal(None, drafts, most, None if self.law is None else self.law(drafts))


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow), "mistral"])
def subject(request, tmp_path_factory):
    folder = tiny_models.build(request.param, tmp_path_factory.mktemp(request.param))
    return tiny_models.load(request.param, folder)


def requests_of(subject):
    """Greedy and seeded rows of different length, with processors that look back and that have a state."""
    texts = tiny_models.prompts(subject.arch, (5, 9, 2, 6), 3)
    configs = [
        {},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"do_sample": True, "seed": 5, "temperature": 1.3, "top_p": 0.9},
        {"do_sample": True, "seed": 6, "mirostat_tau": 2.0},
    ]
    made = [GenerationConfig(**one, max_new_tokens=6 + at) for at, one in enumerate(configs)]
    return [Request(text * 2, config) for text, config in zip(texts, made, strict=True)]


def drafters(subject):
    target = as_model(subject.model)
    size = target.traits.vocab_size
    chance = SamplingNoise()

    def assistant():
        chance.num_rows = 2000
        return AssistantDrafter(target, DenseStore(), chance, vocabulary=size)

    def early_exit():
        from descant.models.truncated_model import truncate_model

        chance.num_rows = 2000
        return EarlyExit(as_model(truncate_model(subject.model, 1)), chance, vocabulary=size)

    return {
        "lookup": PromptLookup,
        "suffix": lambda: SuffixLookup(shared=False),
        "shared suffix": lambda: SuffixLookup(shared=True),
        "assistant": assistant,
        "early exit": early_exit,
        "nonsense": lambda: Told(lambda rows, place: (rows.tokens[:, 0] + place) % size),
    }


@pytest.mark.parametrize("name", ["lookup", "suffix", "shared suffix", "assistant", "early exit", "nonsense"])
def test_the_law_holds(subject, name):
    check_drafter(subject.model, drafters(subject)[name], requests_of(subject), sizes=(1, 4))


def flat(drafts, size):
    return torch.full((*drafts.shape, size), 1 / size)


@pytest.mark.ci_cases("mistral")
def test_a_drafter_that_draws_from_its_reported_distribution_passes(subject):
    size = as_model(subject.model).traits.vocab_size
    even = Told(lambda rows, place: torch.randint(size, (len(rows),)), lambda drafts: flat(drafts, size))
    check_drafter(subject.model, lambda: even, requests_of(subject)[:1], sizes=(1,))


@pytest.mark.ci_cases("llama")
def test_a_drafter_that_lies_about_its_law_is_caught(subject):
    size = as_model(subject.model).traits.vocab_size
    skewed = Told(
        lambda rows, place: torch.randint(size // 2, (len(rows),)), lambda drafts: flat(drafts, size)
    )
    with pytest.raises(AssertionError, match="must be sampled from `draft_probs`"):
        check_drafter(subject.model, lambda: skewed, requests_of(subject)[:1], sizes=(1,))


def test_a_drafter_that_tampers_with_the_table_is_caught(subject):
    def tampered(rows, place):
        rows.tokens[:, 0] = 3  # not its own
        return rows.tokens[:, 0]

    with pytest.raises(AssertionError, match="request 0 with up to 1 drafts"):
        check_drafter(subject.model, lambda: Told(tampered), requests_of(subject)[:1], sizes=(1,))
