"""Tokens on vLLM are those of a session: random configs, fields of text, several sequences."""

from __future__ import annotations

import json

import pytest
from vllm import SamplingParams

from descant.engine.vllm.request_config import to_sampling_params
from tests.vllm.engines import (
    Case,
    merged,
    random_cases,
    runnable,
    session_tokens,
    text_cases,
    vllm_tokens,
)


@pytest.mark.parametrize("seed", range(13))
def test_random_configs(engines, target, seed):
    """13 batches of 16 are more than 200 configs."""
    cases, expected = runnable(target, random_cases(seed, 16, target))
    assert len(cases) >= 14
    assert vllm_tokens(engines(), cases) == expected


def test_fields_of_text(engines, target):
    cases = text_cases(target)
    expected = session_tokens(target, cases)
    assert vllm_tokens(engines(), cases) == expected
    texts = [target.tokenizer.decode(one[0], skip_special_tokens=True) for one in expected]
    assert texts[0] in ("red", "blue", "green")
    assert json.loads(texts[3]).keys() == {"name", "age"}
    assert expected[4] != expected[5]


def test_fields_as_json_text(engines, target):
    """The fields of a request as JSON text are the same as a dict."""
    cases = text_cases(target)[:3]
    params = [to_sampling_params(config, len(prompt)) for prompt, config in cases]
    for one in params:
        one.extra_args["descant"] = json.dumps(one.extra_args["descant"])
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in cases]
    outputs = engines().generate(prompts, params, use_tqdm=False)
    assert [[list(one.outputs[0].token_ids)] for one in outputs] == session_tokens(target, cases)


def test_several_sequences(engines, target):
    config = merged(do_sample=True, seed=11, max_new_tokens=12, num_return_sequences=4, mirostat_tau=4.0)
    case = Case([5, 6, 7], config)
    [expected] = session_tokens(target, [case])
    assert vllm_tokens(engines(), [case]) == [expected]
    assert len({tuple(tokens) for tokens in expected}) == 4


def test_parameters_of_vllm_count_as_fields(engines, target):
    """What a request gives as vLLM's own parameters need not be given again."""
    own = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    fields = {"dry_multiplier": 0.8}
    params = SamplingParams(
        **own, seed=3, max_tokens=12, ignore_eos=True, detokenize=False, extra_args={"descant": fields}
    )
    [output] = engines().generate([{"prompt_token_ids": [5, 6, 7]}], [params], use_tqdm=False)
    case = Case([5, 6, 7], merged(**own, **fields, do_sample=True, seed=3, max_new_tokens=12))
    assert [list(output.outputs[0].token_ids)] == session_tokens(target, [case])[0]
