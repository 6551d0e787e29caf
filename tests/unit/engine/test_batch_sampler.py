"""The sampler without a model: the tokens of a session, whatever another engine does with its batch."""

from __future__ import annotations

import random

import pytest
import torch

from descant import ConfigError, Failed, Finished, GenerationConfig, InputError, Request, RowError, Session
from descant.engine.request import MERGED
from descant.engine.vllm.batch_sampler import BatchSampler
from tests.support import json_tokenizer
from tests.support.markov_model import Chain
from tests.support.sampling_configs import FIELD_VALUES, sampling_config

VOCAB, EOS = 29, 3


def merged(**given):
    return GenerationConfig.merge({}, GenerationConfig(**given), None)


def session_tokens(model, prompt, config):
    """What a session returns, with the order of its sequences."""
    session = Session(model)
    session.admit(Request(prompt, config, _call=MERGED))
    for event in session.drain():
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            return [one.tokens.tolist() for one in event.hypotheses]
    return None


class OtherEngine:
    """Runs requests on a model in batches of random rows, and discards some of the tokens."""

    def __init__(self, model, sampler, rng):
        self.model, self.sampler, self.rng = model, sampler, rng
        self.lines = {}  # number -> (prompt, new tokens, config)

    def add(self, prompt, config, slot=0):
        number = self.sampler.add(Request(prompt, config), slot=slot)
        self.lines[number] = (list(prompt), [], config)
        return number

    def step(self):
        running = [number for number in self.lines if not self.ended(number)]
        numbers = self.rng.sample(running, self.rng.randint(1, len(running)))
        logits = []
        for number in numbers:
            tokens = self.lines[number][0] + self.lines[number][1]
            logits.append(self.model.after(len(tokens), tokens[-1]))
        counts = [len(self.lines[number][1]) for number in numbers]
        tokens = self.sampler.choose(numbers, counts, torch.stack(logits))
        for number, token in zip(numbers, tokens.tolist(), strict=True):
            if self.rng.random() < 0.8:
                self.lines[number][1].append(token)

    def ended(self, number):
        _, new, config = self.lines[number]
        ends = [config.eos_token_id, *(config.stop_token_ids or ())]
        return len(new) >= config.max_new_tokens or (new and new[-1] in ends)

    def run(self):
        while not all(map(self.ended, self.lines)):
            self.step()
        return {number: new for number, (_, new, _) in self.lines.items()}


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_a_session(seed):
    rng = random.Random(seed)
    model = Chain.chance(VOCAB, seed, spread=2.0)
    engine = OtherEngine(model, BatchSampler(VOCAB), rng)
    expected = {}
    for _ in range(8):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        config = merged(**sampling_config(rng, VOCAB, EOS))
        try:
            [tokens] = session_tokens(model, prompt, config)
        except RowError:  # such a config leaves no token
            continue
        expected[engine.add(prompt, config)] = tokens
    assert len(expected) > 3
    assert engine.run() == expected


def test_the_random_configs_use_every_field():
    rng = random.Random(0)
    used = {name for _ in range(300) for name in sampling_config(rng, VOCAB, EOS)}
    assert used >= FIELD_VALUES.keys()


def test_sequences_of_one_request_differ_by_their_slot():
    model = Chain.chance(VOCAB, 5, spread=1.0)
    config = merged(do_sample=True, seed=7, max_new_tokens=6, num_return_sequences=3)
    engine = OtherEngine(model, BatchSampler(VOCAB), random.Random(1))
    numbers = [engine.add([1, 2], config, slot) for slot in range(3)]
    found = engine.run()
    assert [found[number] for number in numbers] == session_tokens(model, [1, 2], config)
    assert len({tuple(tokens) for tokens in found.values()}) == 3


def test_a_request_may_join_with_tokens():
    model = Chain.chance(VOCAB, 5, spread=1.0)
    config = merged(do_sample=True, seed=7, max_new_tokens=6, repetition_penalty=1.4)
    [expected] = session_tokens(model, [1, 2], config)
    sampler = BatchSampler(VOCAB)
    tokens = [1, 2, *expected[:3]]
    number = sampler.add(Request([1, 2], config), expected[:3])
    for count in range(3, 6):
        assert sampler.new_tokens(number) == expected[:count]
        logits = model.after(len(tokens), tokens[-1])[None]
        tokens += sampler.choose([number], [count], logits).tolist()
    assert tokens[2:] == sampler.new_tokens(number) == expected
    sampler.choose([sampler.add(Request([5], config))], [0], logits)
    assert sampler.new_tokens(number) == expected  # of a request that is not in the last batch


@pytest.mark.parametrize("place", range(5))
def test_a_request_without_a_token_fails_alone(place):
    """The others have their own tokens, wherever in the batch it is."""
    sampler, other = BatchSampler(VOCAB), BatchSampler(VOCAB)
    config = merged(do_sample=True, seed=1, max_new_tokens=4, eos_token_id=EOS)
    numbers = [sampler.add(Request([row], config)) for row in range(5)]
    alone = [other.add(Request([row], config)) for row in range(5)]
    dead, alive = numbers[place], [row for row in range(5) if row != place]
    for step in range(3):
        logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(step))
        logits[place] = float("nan")
        tokens = sampler.choose(numbers, [step] * 5, logits)
        expected = other.choose([alone[row] for row in alive], [step] * 4, logits[alive])
        assert tokens[alive].tolist() == expected.tolist()
        assert tokens[place] == EOS
        assert [sampler.new_tokens(numbers[row])[-1] for row in alive] == expected.tolist()
    assert sampler.errors.keys() == {dead}
    assert isinstance(sampler.errors[dead], RowError)
    sampler.remove(dead)
    assert not sampler.errors
    assert len(sampler) == 4


def test_a_processor_that_raises_fails_its_request_alone():
    widths, sampler = [], BatchSampler(VOCAB)

    def counting(ids, scores):
        widths.append(ids.shape[1])
        return scores

    def raising(ids, scores):
        return scores if ids.shape[1] < 2 else 1 / 0

    config = merged(max_new_tokens=4, eos_token_id=EOS)
    given = [raising, counting, raising]
    numbers = [sampler.add(Request([5], config, logits_processor=[one])) for one in given]
    for step in range(3):
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(step))
        tokens = sampler.choose(numbers, [step] * 3, logits)
        assert tokens.tolist() == [EOS if step and at != 1 else int(logits[at].argmax()) for at in range(3)]
    assert widths == [1, 2, 3]
    assert sampler.errors.keys() == {numbers[0], numbers[2]}
    assert all("division" in str(error) for error in sampler.errors.values())


def test_a_grammar_is_applied():
    tokenizer = json_tokenizer.tokenizer()
    size = len(tokenizer)
    sampler = BatchSampler(size, tokenizer=tokenizer)
    config = merged(
        grammar={"choice": ["true", "false"]}, eos_token_id=tokenizer.eos_token_id, max_new_tokens=9
    )
    number, tokens = sampler.add(Request([1], config)), []
    while not tokens or tokens[-1] != tokenizer.eos_token_id:
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(len(tokens)))
        tokens += sampler.choose([number], [len(tokens)], logits).tolist()
    assert tokenizer.decode(tokens[:-1]) in ("true", "false")


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("num_beams", {"num_beams": 2}),
        ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
        ("dola_layers", {"dola_layers": "low"}),
        ("guidance_scale", {"guidance_scale": 1.5}),
        ("banned_phrases", {"banned_phrases": ["a"]}),
        ("token_healing", {"token_healing": True}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
        ("suffix_lookup_num_tokens", {"suffix_lookup_num_tokens": 3}),
    ],
)
def test_what_needs_the_loop_is_refused_by_name(field, given):
    with pytest.raises(ConfigError) as caught:
        BatchSampler(VOCAB).plan(merged(**given))
    assert f"`{field}`" in str(caught.value)


def test_counts_that_do_not_follow_are_refused():
    sampler = BatchSampler(VOCAB)
    number = sampler.add(Request([1], merged(max_new_tokens=4)))
    sampler.choose([number], [0], torch.randn(1, VOCAB))
    with pytest.raises(InputError, match="num_new"):
        sampler.choose([number], [2], torch.randn(1, VOCAB))
    with pytest.raises(InputError, match="numbers"):
        sampler.choose([number, 99], [1, 0], torch.randn(2, VOCAB))
