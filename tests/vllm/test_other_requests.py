"""Requests without Descant's fields, and vLLM's own features, are as they are without the plug-in."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from descant.engine.vllm.request_config import to_sampling_params
from tests.vllm.engines import random_cases, runnable

WORDS = ["yes", "perhaps"]


def plain_params():
    """Parameters of vLLM's own features, each with a seed of its own."""
    return [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=12),
        SamplingParams(temperature=1.0, top_k=20, min_p=0.05, seed=2, max_tokens=12, min_tokens=4),
        SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4, seed=3, max_tokens=12),
        SamplingParams(temperature=0.0, logit_bias={77: 50.0}, max_tokens=6),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=6),
        SamplingParams(
            temperature=0.7, seed=4, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=WORDS)
        ),
    ]


@pytest.fixture(scope="module")
def alone(engines):
    """The requests without fields in a batch of their own."""
    return run(engines(), plain_prompts(), plain_params())


def plain_prompts():
    return [[40 + number, 3, 5] for number in range(len(plain_params()))]


def run(llm, prompts, params):
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def test_requests_of_both_kinds(engines, target, alone):
    """Each gets the tokens that it gets among its own kind, in either order."""
    cases, expected = runnable(target, random_cases(77, 8, target))
    own_prompts = [case.prompt for case in cases]
    own = [to_sampling_params(config, len(prompt)) for prompt, config in cases]
    for order in (1, -1):
        prompts, params = [*own_prompts, *plain_prompts()], [*own, *plain_params()]
        found = run(engines(), prompts[::order], params[::order])[::order]
        assert found[: len(cases)] == [tokens[0] for tokens in expected]
        assert found[len(cases) :] == alone


def test_structured_outputs_without_fields(alone, target):
    assert target.tokenizer.decode(alone[-1], skip_special_tokens=True) in WORDS
    assert alone[4] == [77] * 6


def test_structured_outputs_beside_fields_are_refused(raises_for):
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=WORDS), extra_args={"descant": {"top_h": 0.5}}
    )
    message = raises_for(params)
    assert "structured_outputs" in message
    assert "`grammar`" in message
