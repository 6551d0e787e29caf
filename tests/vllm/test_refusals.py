"""Requests that the plug-in cannot apply are refused in vLLM's front end, by the name of what is wrong."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from descant import ConfigError, GenerationConfig
from descant.engine.vllm import logits_processor
from descant.engine.vllm.field_support import FIELD_SUPPORT
from descant.engine.vllm.request_config import to_sampling_params
from tests.support.config_cases import CASES

# Values other than the default, where the first of the accepted ones is the default or needs other fields.
VALUES = {
    "constraint_gap": 3,
    "num_beams": 2,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "early_stopping": True,
    "length_penalty": 2.0,
    "diversity_penalty": 0.5,
    "use_cache": False,
    "logprobs": 2,
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "return_legacy_cache": False,
}
# What the field of a function or of objects would need is not in JSON.
NO_JSON = {"constraints", "prefix_allowed_tokens_fn"}


def value_of(name):
    return VALUES.get(name, CASES[name][0][0])


def params_with(fields, **others):
    return SamplingParams(**{"max_tokens": 4, **others}, extra_args={"descant": fields})


def fields_by(kind):
    return sorted(name for name, support in FIELD_SUPPORT.items() if support.by == kind)


@pytest.mark.parametrize("name", [name for name in fields_by("refused") if name not in NO_JSON])
def test_refused_fields(raises_for, name):
    assert f"`{name}`" in raises_for(params_with({name: value_of(name)}))


@pytest.mark.parametrize("name", fields_by("refused"))
def test_refused_fields_of_a_config(name):
    config = GenerationConfig.from_dict({name: value_of(name)})
    with pytest.raises(ConfigError) as caught:
        to_sampling_params(config, 3)
    assert f"`{name}`" in str(caught.value)


@pytest.mark.parametrize("name", fields_by("engine"))
def test_fields_of_the_engine(raises_for, name):
    """`descant.VLLM` applies them, a request to vLLM itself cannot have them."""
    message = raises_for(params_with({name: value_of(name)}))
    assert f"`{name}`" in message
    assert "descant.VLLM" in message


@pytest.mark.parametrize(("name", "nearest"), [("top_hh", "top_h"), ("mirostat_taw", "mirostat_tau")])
def test_unknown_names(raises_for, name, nearest):
    message = raises_for(params_with({name: 0.5}))
    assert f"`{name}`" in message
    assert nearest in message


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("logit_bias", {"logit_bias": {5: 1.0}}),
        ("bad_words", {"bad_words": ["the"]}),
        ("allowed_token_ids", {"allowed_token_ids": [5, 6]}),
        ("min_tokens", {"min_tokens": 2}),
        ("structured_outputs", {"structured_outputs": StructuredOutputsParams(choice=["a"])}),
        ("thinking_token_budget", {"thinking_token_budget": 4}),
        (
            "repetition_detection",
            {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)},
        ),
    ],
)
def test_parameters_of_vllm_in_conflict(raises_for, name, others):
    assert f"`{name}`" in raises_for(params_with({"top_h": 0.5}, **others))


@pytest.mark.parametrize(
    ("name", "fields", "others"),
    [
        ("temperature", {"temperature": 0.9}, {"temperature": 0.8}),
        ("top_k", {"top_k": 5}, {"top_k": 4}),
        ("top_p", {"top_p": 0.5}, {"top_p": 0.9}),
        ("repetition_penalty", {"repetition_penalty": 1.1}, {"repetition_penalty": 1.2}),
        ("num_return_sequences", {"num_return_sequences": 3}, {"n": 2, "temperature": 1.0}),
        ("max_new_tokens", {"max_new_tokens": 9}, {}),
        ("max_length", {"max_length": 9}, {}),
        ("eos_token_id", {"eos_token_id": 5}, {}),
        ("stop_token_ids", {"stop_token_ids": [5]}, {}),
    ],
)
def test_what_is_said_twice(raises_for, name, fields, others):
    assert f"`{name}`" in raises_for(params_with(fields, **others))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [10**6]),
        ("bad_words_ids", [[3, 10**6]]),
        ("sequence_bias", [[[10**6], 1.0]]),
        ("logit_bias", {"1000000": 1.0}),
        ("forced_bos_token_id", 10**6),
    ],
)
def test_ids_beyond_the_vocabulary(raises_for, name, value):
    assert f"`{name}`" in raises_for(params_with({name: value}))


@pytest.mark.parametrize("given", ["{", "[1]", 5, ["top_h"]])
def test_what_is_no_dict(raises_for, given):
    assert "`descant`" in raises_for(params_with(given))


@pytest.mark.parametrize(
    "grammar", [{"regex": "(a"}, {"json_schema": {"type": "no such type"}}, {"json_schema": {"pattern": "["}}]
)
def test_a_grammar_that_does_not_compile(raises_for, engines, grammar):
    """It is refused before it reaches a worker, and the engine goes on."""
    message = raises_for(params_with({"grammar": grammar}))
    assert message.startswith("`grammar`")
    [output] = engines().generate(
        [{"prompt_token_ids": [1, 2]}], [params_with({"top_k": 5}, temperature=1.0)], use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 4


def test_none_of_several_requests_stays_behind(raises_for, engines):
    """The requests before the refused one in a call are gone as well."""
    params = [params_with({"top_k": 5}, temperature=1.0), params_with({"num_beams": 2})]
    with pytest.raises(Exception, match="num_beams"):
        engines().generate([{"prompt_token_ids": [1]}] * 2, params, use_tqdm=False)
    assert not engines().llm_engine.has_unfinished_requests()


def test_a_plug_in_that_is_left_out(raises_for, engines, monkeypatch):
    """Without the checks vLLM would ignore fields where it drafts tokens."""
    engines()
    monkeypatch.setattr(logits_processor, "is_registered", lambda: False)
    assert "VLLM_PLUGINS" in raises_for(params_with({"top_h": 0.5}))
