"""Per row: 32 rows, each with a config of its own, are 32 calls."""

from __future__ import annotations

import random

import pytest
import torch

from descant import ConfigError, GenerationConfig, InputError, Request, Session, generate
from descant.testing import Schedule, check_admission, compare, outcomes
from tests.support.tiny_models import pad, prompts

ROWS = 32


def shaped(rng, vocabulary, eos):
    """A random config of what may differ by row."""
    draws = rng.random() < 0.6
    fields = {"max_new_tokens": rng.randint(1, 14), "eos_token_id": eos}
    if rng.random() < 0.3:
        fields |= {"num_beams": rng.randint(2, 4)}
        fields |= rng.choice(({}, {"early_stopping": True}, {"length_penalty": rng.uniform(-1, 2)}))
    elif draws and rng.random() < 0.3:
        fields |= {"num_return_sequences": rng.randint(2, 3)}
    if draws:
        fields |= {"do_sample": True, "seed": rng.randrange(2**40)}
        samplers = {
            "temperature": rng.uniform(0.5, 3), "top_k": rng.randint(2, 60), "top_p": rng.uniform(0.3, 1),
            "min_p": rng.uniform(0, 0.3), "typical_p": rng.uniform(0.3, 1), "epsilon_cutoff": 0.01,
            "eta_cutoff": 0.01, "top_h": rng.uniform(0.3, 1), "top_n_sigma": rng.uniform(0.5, 2),
            "p_less": True, "xtc_probability": rng.random(), "mirostat_tau": rng.uniform(1, 4),
            "adaptive_p_target": rng.random(), "dynamic_temperature_range": rng.uniform(0.1, 0.5),
        }  # fmt: skip
        fields |= {name: samplers[name] for name in rng.sample(sorted(samplers), rng.randint(0, 4))}
    token = lambda: rng.randrange(4, vocabulary)  # noqa: E731
    rules = {
        "repetition_penalty": rng.uniform(0.8, 2), "presence_penalty": rng.uniform(-1, 2),
        "frequency_penalty": rng.uniform(-1, 2), "dry_multiplier": rng.uniform(0.2, 2),
        "no_repeat_ngram_size": rng.randint(1, 3), "logit_bias": {token(): rng.uniform(-5, 5)},
        "sequence_bias": {(token(), token()): 4.0, (token(),): -3.0},
        "bad_words_ids": [[token()], [token(), token()]],
        "encoder_repetition_penalty": rng.uniform(0.5, 2), "encoder_no_repeat_ngram_size": 2,
        "min_new_tokens": 1, "suppress_tokens": [token(), token()], "begin_suppress_tokens": [token()],
        "exponential_decay_length_penalty": (2, 1.3), "renormalize_logits": True, "stop_token_ids": [token()],
        "processor_order": ["top_k", "temperature"], "logprobs": rng.randint(0, 3),
    }  # fmt: skip
    fields |= {name: rules[name] for name in rng.sample(sorted(rules), rng.randint(0, 4))}
    return GenerationConfig(**fields)


def requests_for(tiny, seed):
    rng = random.Random(seed)
    configs = [shaped(rng, tiny.arch.vocab, tiny.arch.eos) for _ in range(ROWS)]
    return configs, prompts(tiny.arch, [rng.randint(1, 9) for _ in range(ROWS)], seed)


def requests(tiny, seed):
    configs, texts = requests_for(tiny, seed)
    if tiny.encoder_decoder:
        texts = [([tiny.arch.start], {"input_ids": torch.tensor(text)}) for text in texts]
    else:
        texts = [(text, {}) for text in texts]
    return [Request(text, config, given) for (text, given), config in zip(texts, configs, strict=True)]


@pytest.fixture(scope="module", params=["llama", "gpt2", "t5"])
def batch(request, tiny):
    """32 requests on a model, and what becomes of each alone."""
    subject = tiny(request.param)
    given = requests(subject, 5)
    return subject, given, [outcomes(subject.model, [one])[0] for one in given]


@pytest.mark.ci_cases("t5-permuted", "llama-as given")
@pytest.mark.parametrize("order", ["as given", "permuted", "regrouped"])
def test_a_batch_of_different_rows_is_as_many_calls(batch, order):
    subject, given, alone = batch
    rng = random.Random(order)
    places = list(range(ROWS)) if order == "as given" else rng.sample(range(ROWS), ROWS)
    groups = [places] if order != "regrouped" else [places[:3], places[3:17], places[17:18], places[18:]]
    for group in groups:
        found = outcomes(subject.model, [given[at] for at in group], Schedule.at_once(range(len(group))))
        for at, one in zip(group, found, strict=True):
            compare(alone[at], one, f"row {at}, {order}: {given[at].generation_config!r}")


@pytest.mark.ci_cases("llama")
def test_a_row_may_come_at_any_time(batch):
    subject, given, _ = batch
    check_admission(subject.model, [one for one in given if not one.generation_config.logprobs][:12], 3)


def test_they_differ_in_more_than_their_prompts(batch):
    """The law would also hold for ignored configs."""
    _, given, alone = batch
    assert len({str(one.tokens) for one in alone}) > ROWS * 0.8
    assert len({type(one.generation_config.num_beams) for one in given}) == 1
    chains = {one.generation_config.given - {"max_new_tokens", "seed", "eos_token_id"} for one in given}
    assert len(chains) > ROWS * 0.7


@pytest.mark.ci_cases("llama")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_one_call_of_generate_with_a_list_of_configs(tiny, name):
    """Token for token, with the requested log-probabilities."""
    subject = tiny(name)
    configs, texts = requests_for(subject, 8)
    configs = [
        config.replace(return_dict_in_generate=True, pad_token_id=subject.arch.pad) for config in configs
    ]
    ids, mask = pad(texts, subject.arch.pad, "right" if subject.encoder_decoder else "left")
    whole = generate(subject.model, ids, configs, attention_mask=mask)
    new = [one.num_return_sequences for one in configs]
    lines = whole.sequences.split(new)
    logprobs = iter(whole.logprobs)
    for text, config, found in zip(texts, configs, lines, strict=True):
        alone = generate(subject.model, torch.tensor([text]), config)
        width = 1 if subject.encoder_decoder else len(text)
        start = 1 if subject.encoder_decoder else ids.shape[1]
        mine = alone.sequences[:, width:]
        assert torch.equal(found[:, start : start + mine.shape[1]], mine), config
        assert (found[:, start + mine.shape[1] :] == subject.arch.pad).all()
        for line in range(config.num_return_sequences):
            row_logprobs = next(logprobs)
            assert (row_logprobs is None) == (config.logprobs is None)
            if row_logprobs is not None:
                assert torch.allclose(row_logprobs.raw, alone.logprobs[line].raw, atol=1e-4)
                assert torch.allclose(row_logprobs.processed, alone.logprobs[line].processed, atol=1e-4)
                assert row_logprobs.top.shape == (len(row_logprobs.raw), config.logprobs)


def test_a_seed_for_each_prompt(tiny):
    subject = tiny("llama")
    ids = torch.tensor(prompts(subject.arch, [5], 0) * 4)
    asked = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12}
    found = generate(subject.model, ids, seed=[7, 8, 7, 9], **asked)
    for line, seed in enumerate([7, 8, 7, 9]):
        alone = generate(subject.model, ids[:1], seed=seed, **asked)[0]
        assert torch.equal(found[line][: len(alone)], alone)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    with pytest.raises(InputError, match="`seed` must be one for each of the 4 prompts"):
        generate(subject.model, ids, seed=[7, 8], **asked)
    with pytest.raises(ConfigError, match="`seed` must be a list of 2 ints, one per prompt"):
        generate(subject.model, ids[:2], [GenerationConfig(), GenerationConfig()], seed=[7, 8, 9], **asked)


def test_what_concerns_the_call_must_be_the_same(tiny):
    subject = tiny("llama")
    ids = torch.tensor(prompts(subject.arch, [5, 5], 0))
    configs = [GenerationConfig(return_dict_in_generate=True, output_scores=at == 1) for at in range(2)]
    with pytest.raises(ConfigError, match="`output_scores` must be the same for every prompt of a call"):
        generate(subject.model, ids, configs)
    with pytest.raises(InputError, match="must hold a config for each prompt"):
        generate(subject.model, ids, [])


def test_rows_that_do_not_use_a_processor_pay_nothing(tiny):
    """A processor is called with the rows that enable it."""
    subject = tiny("llama")
    seen = []

    def spy(ids, scores):
        seen.append(len(ids))
        return scores

    session = Session(subject.model)
    texts = prompts(subject.arch, [4] * 6, 0)
    plain = GenerationConfig(max_new_tokens=3, min_new_tokens=3)
    session.admit(
        *(
            Request(text, plain, logits_processor=[spy] if at in (1, 4) else ())
            for at, text in enumerate(texts)
        )
    )
    list(session.drain())
    assert seen == [2, 2, 2]
