"""The interface of vLLM's V2 runner, driven by hand: that runner needs Triton, its records do not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.states import RequestState

from descant import Failed, Finished, GenerationConfig, Request, Session
from descant.engine.request import MERGED
from descant.engine.vllm.logits_processor import DescantLogitsProcessor
from descant.engine.vllm.request_config import to_sampling_params
from tests.support.markov_model import Chain
from tests.support.sampling_configs import sampling_config
from tests.vllm.engines import STATEFUL, merged

VOCAB, EOS, SLOTS = 61, 3, 6


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch):
    """Machines without a GPU have none, whatever vLLM takes them for."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


class ModelConfig:
    """What the plug-in reads of a model."""

    def get_vocab_size(self):
        return VOCAB

    def try_get_generation_config(self):
        return {}


class Config:
    """What the plug-in reads of an engine's settings."""

    speculative_config = None
    model_config = ModelConfig()


class Job:
    """A request of the runner."""

    def __init__(self, name, prompt, params):
        self.name, self.prompt, self.params = name, list(prompt), params
        self.output, self.computed = [], 0

    def is_done(self):
        ends = self.params.stop_token_ids
        return len(self.output) >= self.params.max_tokens or bool(self.output and self.output[-1] in ends)


class Runner:
    """Runs requests on a Markov chain as the V2 runner does: slots, shuffled rows, chunks, preemption."""

    def __init__(self, model, rng, chunk=3):
        self.model, self.rng, self.chunk = model, rng, chunk
        device = torch.device("cpu")
        self.states = RequestState(SLOTS, 128, 64, 0, VOCAB, device)
        self.plugin = DescantLogitsProcessor(Config(), LogitsProcRequestState.from_request_state(self.states))
        self.preemptions = self.partial = 0
        self.moved = set()  # requests that have had more than one slot
        self.slot_of = {}

    def run(self, jobs):
        waiting, running = list(jobs), []
        while waiting or running:
            while waiting and len(running) < SLOTS - 1:
                running.append(waiting.pop(0))
                self.add(running[-1])
            step = self.rng.sample(running, self.rng.randint(1, len(running)))
            self.step(step)
            for job in [job for job in running if job.is_done()]:
                self.states.remove_request(job.name)
                running.remove(job)
            if running and self.rng.random() < 0.3:
                job = running.pop(self.rng.randrange(len(running)))
                self.states.remove_request(job.name)
                self.preemptions += 1
                waiting.insert(self.rng.randint(0, min(1, len(waiting))), job)
        return [job.output for job in jobs]

    def add(self, job):
        tokens = job.prompt + job.output
        self.rng.shuffle(self.states.free_indices)
        self.states.add_request(job.name, len(job.prompt), tokens, 0, job.params.max_tokens)
        slot = self.states.req_id_to_index[job.name]
        if self.slot_of.setdefault(job.name, slot) != slot and job.output:
            self.moved.add(job.name)
        job.computed = 0
        self.plugin.add_request(slot, job.params)
        # The kernel that writes these is Triton's.
        self.states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.states.all_token_ids.clear_staged_writes()
        self.plugin.apply_staged_writes()

    def step(self, jobs):
        lengths, logits = [], []
        for job in jobs:
            tokens = job.prompt + job.output
            job.computed = min(len(tokens), job.computed + self.chunk)
            lengths.append(job.computed)
            logits.append(self.model.after(job.computed, tokens[job.computed - 1]))
        slots = [self.states.req_id_to_index[job.name] for job in jobs]
        scores = self.plugin.apply(torch.stack(logits), context(slots, lengths))
        for job, slot, row in zip(jobs, slots, scores, strict=True):
            if job.computed < len(job.prompt) + len(job.output):
                self.partial += 1
                continue
            token = int(row.argmax())
            self.states.all_token_ids.gpu[slot, job.computed] = token
            job.output.append(token)


def context(slots, lengths):
    mapping = torch.tensor(slots)
    position = torch.tensor(lengths) - 1
    zeros = torch.zeros_like(mapping)
    return LogitsContext(mapping, mapping, mapping.numpy(), zeros, zeros, position, np.array(lengths))


def jobs(seed, count, model):
    """Requests with chains that have states, of random configs, and without fields, and their tokens."""
    rng = random.Random(seed)
    made, expected = [], []
    while len(made) < count:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        if len(made) % 4 == 3:
            params = SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=[EOS])
            tokens = greedy(model, prompt, params)
        else:
            config = config_of(rng, len(made))
            tokens = session(model, prompt, config)
            params = to_sampling_params(config, len(prompt))
        if tokens is not None:
            made.append(Job(str(len(made)), prompt, params))
            expected.append(tokens)
    return made, expected


def config_of(rng, number) -> GenerationConfig:
    if number % 2:
        return merged(**sampling_config(rng, VOCAB, EOS))
    fields = STATEFUL[number // 2 % len(STATEFUL)]
    return merged(**fields, do_sample=True, seed=rng.randrange(2**31), max_new_tokens=16, eos_token_id=EOS)


def session(model, prompt, config):
    run = Session(model)
    run.admit(Request(prompt, config, _call=MERGED))
    for event in run.drain():
        if isinstance(event, Failed):
            return None
        if isinstance(event, Finished):
            return event.hypotheses[0].tokens.tolist()
    return None


def greedy(model, prompt, params):
    job = Job("", prompt, params)
    while not job.is_done():
        tokens = job.prompt + job.output
        job.output.append(int(model.after(len(tokens), tokens[-1]).argmax()))
    return job.output


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_of_a_session(seed):
    """Slots are reused, rows come in any order, prompts in parts, and requests come back in other slots."""
    model = Chain.chance(VOCAB, seed, spread=2.0)
    made, expected = jobs(seed, 20, model)
    runner = Runner(model, random.Random(seed))
    assert runner.run(made) == expected
    assert runner.preemptions >= 8
    assert runner.partial >= 20
    assert len(runner.moved) >= 3


def test_a_slot_is_free_of_the_request_before():
    """A request without fields in a slot that had one with them keeps its logits."""
    model = Chain.chance(VOCAB, 1, spread=2.0)
    runner = Runner(model, random.Random(0))
    params = to_sampling_params(merged(do_sample=True, mirostat_tau=3.0, seed=1, max_new_tokens=4), 2)
    runner.add(Job("a", [1, 2], params))
    slot = runner.states.req_id_to_index["a"]
    logits = model.after(2, 2)[None]
    assert runner.plugin.apply(logits.clone(), context([slot], [2])).isfinite().sum() == 1
    assert not runner.plugin.add_request(slot, SamplingParams(max_tokens=4))
    assert torch.equal(runner.plugin.apply(logits.clone(), context([slot], [2])), logits)


def test_rows_of_drafts_are_refused():
    runner = Runner(Chain.chance(VOCAB, 1), random.Random(0))
    with pytest.raises(ValueError, match="one row a request"):
        runner.plugin.apply(torch.zeros(2, VOCAB), context([0], [2]))


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_of_vllm_are_refused(engines, monkeypatch, name):
    """The V2 runner would apply them to the logits before the plug-in applies them again."""
    params = SamplingParams(max_tokens=4, **{name: 1.5}, extra_args={"descant": {"top_h": 0.5}})
    processor = engines().llm_engine.input_processor
    processor.validate_logits_processors_params(params)
    monkeypatch.setattr(type(processor.vllm_config), "use_v2_model_runner", True)
    with pytest.raises(VLLMValidationError, match=f"`{name}`"):
        processor.validate_logits_processors_params(params)
