"""The same requests on vLLM with the plug-in and in a session."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from vllm import LLM
from vllm.v1.core.sched.scheduler import Scheduler

from descant import Failed, Finished, GenerationConfig, Request, Session
from descant.engine.request import MERGED
from descant.engine.vllm.request_config import to_sampling_params
from tests.support import pretrained
from tests.support.sampling_configs import sampling_config

__all__ = [
    "MODEL",
    "STATEFUL",
    "Case",
    "Engines",
    "ScheduleCounts",
    "merged",
    "random_cases",
    "runnable",
    "session_tokens",
    "stateful_cases",
    "text_cases",
    "vllm_tokens",
]

MODEL = "smol-draft"
# Chains whose states the tokens of a request do not restore, and watermarks.
STATEFUL: tuple[dict[str, Any], ...] = (
    {"mirostat_tau": 3.0, "mirostat_eta": 0.3},
    {"adaptive_p_target": 0.3, "adaptive_p_decay": 0.8},
    {"watermarking_config": {"ngram_len": 3, "keys": [90210, 31337, 27182], "context_history_size": 16}},
    {"watermarking_config": {"key": 271828182845, "context_width": 2}},
    {"mirostat_tau": 2.0, "repetition_penalty": 1.3, "dry_multiplier": 0.8, "no_repeat_ngram_size": 3},
)
_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
}


class Case(NamedTuple):
    """A request: the ids of its prompt, and its merged config."""

    prompt: list[int]
    config: GenerationConfig


class Engines:
    """Engines of vLLM by their settings."""

    def __init__(self, set_num_threads: Callable[[int], None]) -> None:
        self._set_num_threads = set_num_threads
        self._started: dict[str, LLM] = {}

    def __call__(self, model: str = MODEL, **settings: Any) -> LLM:
        key = f"{model} {sorted(settings.items())}"
        if key not in self._started:
            self._started[key] = LLM(str(pretrained.folder(model)), **{**_SETTINGS, **settings})
            self._set_num_threads(1)  # vLLM's drafters have raised it
        return self._started[key]


class ScheduleCounts:
    """Counts preemptions and steps with a part of a prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.preemptions = self.partial_prompts = 0
        preempt, schedule = Scheduler._preempt_request, Scheduler.schedule

        def counted_preempt(scheduler: Scheduler, *args: Any, **options: Any) -> None:
            self.preemptions += 1
            preempt(scheduler, *args, **options)

        def counted_schedule(scheduler: Scheduler, *args: Any, **options: Any) -> Any:
            output = schedule(scheduler, *args, **options)
            scheduled = [scheduler.requests[name] for name in output.num_scheduled_tokens]
            self.partial_prompts += sum(request.is_prefill_chunk for request in scheduled)
            return output

        monkeypatch.setattr(Scheduler, "_preempt_request", counted_preempt)
        monkeypatch.setattr(Scheduler, "schedule", counted_schedule)


def merged(**given: Any) -> GenerationConfig:
    """A config as a session gets it, without that of a model."""
    return GenerationConfig.merge({}, GenerationConfig(**given), None)


def random_cases(seed: int, count: int, target: pretrained.Pretrained) -> list[Case]:
    """Requests with random prompts and configs."""
    rng = random.Random(seed)
    return [
        Case(
            [rng.randrange(target.vocab) for _ in range(rng.randint(1, 20))],
            merged(**sampling_config(rng, target.vocab, _first_eos(target))),
        )
        for _ in range(count)
    ]


def stateful_cases(
    seed: int, count: int, target: pretrained.Pretrained, prompt_length: tuple[int, int] = (20, 60)
) -> list[Case]:
    """Requests with chains that have states, half of them with a prompt of the one before."""
    rng = random.Random(seed)
    cases: list[Case] = []
    for number in range(count):
        prompt = [rng.randrange(target.vocab) for _ in range(rng.randint(*prompt_length))]
        if number % 2:
            prompt = cases[-1].prompt
        config = merged(
            **STATEFUL[number % len(STATEFUL)],
            do_sample=True,
            temperature=rng.choice((0.8, 1.2)),
            seed=rng.randrange(2**31),
            max_new_tokens=40,
            eos_token_id=_first_eos(target),
        )
        cases.append(Case(prompt, config))
    return cases


def text_cases(target: pretrained.Pretrained) -> list[Case]:
    """Fields that need the tokenizer."""
    prompt = target.tokens("The colour of the sky is")
    eos = target.tokenizer.eos_token_id
    # A breaker that greedy search would repeat.
    [first] = session_tokens(target, [Case(prompt, merged(max_new_tokens=1, eos_token_id=eos))])
    breaker = target.tokenizer.decode((first or [[]])[0])
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"enum": [3, 41]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    fields: tuple[dict[str, Any], ...] = (
        {"grammar": {"choice": ["red", "blue", "green"]}},
        {"grammar": {"choice": ["red", "blue", "green"]}, "do_sample": True, "temperature": 2.0},
        {"grammar": {"regex": "[A-Z][a-z]{2,8}( [0-9]{2})?"}, "do_sample": True},
        {"grammar": {"json_schema": schema}, "do_sample": True, "top_p": 0.9},
        {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": ["\n", breaker]},
        {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    )
    return [
        Case(prompt, merged(**one, seed=number, max_new_tokens=30, eos_token_id=eos))
        for number, one in enumerate(fields)
    ]


def _first_eos(target: pretrained.Pretrained) -> int:
    return target.eos if isinstance(target.eos, int) else target.eos[0]


def session_tokens(target: pretrained.Pretrained, cases: Sequence[Case]) -> list[list[list[int]] | None]:
    """The tokens of every sequence of each request in a session; None: it failed."""
    session = Session(target.model)
    numbers = []
    for prompt, config in cases:
        request = Request(prompt, config, tokenizer=target.tokenizer, _call=MERGED)
        numbers += session.admit(request)
    found: dict[int, list[list[int]] | None] = {}
    for event in session.drain():
        if isinstance(event, Finished):
            found[event.request] = [one.tokens.tolist() for one in event.hypotheses]
        elif isinstance(event, Failed):
            found[event.request] = None
    return [found[number] for number in numbers]


def runnable(
    target: pretrained.Pretrained, cases: Sequence[Case]
) -> tuple[list[Case], list[list[list[int]]]]:
    """The cases that leave a token at every step, and their tokens in a session."""
    pairs = zip(cases, session_tokens(target, cases), strict=True)
    kept = [(case, tokens) for case, tokens in pairs if tokens is not None]
    return [case for case, _ in kept], [tokens for _, tokens in kept]


def vllm_tokens(llm: LLM, cases: Sequence[Case]) -> list[list[list[int]]]:
    """The tokens of every sequence of each request on vLLM."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in cases]
    params = [to_sampling_params(config, len(prompt), detokenize=False) for prompt, config in cases]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]
