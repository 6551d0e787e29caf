"""The generation config of a body."""

from __future__ import annotations

import pytest

from descant import GenerationConfig
from descant.errors import ConfigError
from descant.serve.bodies import ChatBody, CompletionBody, parse_body
from descant.serve.http.errors import ApiError
from descant.serve.model.served_model import RequestParameters
from descant.serve.settings import ServerSettings

MODEL = GenerationConfig(eos_token_id=2)


def read(body, prompt_tokens=5, *, implied=None, model=MODEL, max_positions=100, limits=(), **settings):
    reader = RequestParameters(ServerSettings(model_name="m", **settings), model, max_positions)
    kind = ChatBody if "messages" in body else CompletionBody
    body = parse_body(kind, {"model": "m", **body})
    parameters = reader.read(body, implied or {}, is_chat=kind is ChatBody, **dict(limits))
    return parameters.config(prompt_tokens), parameters.num_choices


def completion(**fields):
    return {"prompt": "x", **fields}


def chat(**fields):
    return {"messages": [{"role": "user", "content": "x"}], **fields}


@pytest.mark.parametrize(
    ("fields", "do_sample"),
    [
        ({}, True),
        ({"temperature": 0.5}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, False),
        ({"top_k": -1}, True),
        ({"do_sample": False}, False),
        ({"num_beams": 3}, False),
        ({"num_beams": 3, "do_sample": True}, True),
        ({"penalty_alpha": 0.6, "top_k": 4}, False),
    ],
)
def test_a_request_samples_unless_it_says_otherwise(fields, do_sample):
    assert bool(read(completion(**fields))[0].do_sample) is do_sample


def test_the_defaults_of_server_and_model_come_before_that_of_the_api():
    assert read(completion(), model=GenerationConfig(do_sample=False))[0].do_sample is False
    own = GenerationConfig(num_beams=2, max_new_tokens=7)
    config, _ = read(completion(), generation_config=own)
    assert (config.num_beams, config.do_sample, config.max_new_tokens) == (2, False, 7)
    assert read(completion(num_beams=1), generation_config=own)[0].num_beams == 1


def test_lengths():
    assert read(completion())[0].max_new_tokens == 16
    assert read(completion(), 95)[0].max_new_tokens == 5
    assert read(chat())[0].max_new_tokens == 95
    assert read(chat(), max_output_tokens=10)[0].max_new_tokens == 10
    assert read(chat(max_tokens=3, max_completion_tokens=4))[0].max_new_tokens == 4
    assert read(completion(max_length=20))[0].max_length == 20
    for fields, settings in (
        ({"max_tokens": 96}, {}),
        ({"max_tokens": 11}, {"max_output_tokens": 10}),
        ({}, {"max_prompt_tokens": 4}),
    ):
        with pytest.raises(ApiError) as caught:
            read(completion(**fields), **settings)
        assert caught.value.status == 400


def test_a_default_length_fits_the_pool_and_the_key():
    assert read(chat(), limits={"pool_tokens": 96})[0].max_new_tokens == 96 - 5 - 64
    assert read(chat(n=2), limits={"key_tokens": 45})[0].max_new_tokens == 20
    assert read(chat(), limits={"pool_tokens": 8})[0].max_new_tokens == 1
    assert read(chat(max_tokens=90), limits={"pool_tokens": 8})[0].max_new_tokens == 90


def test_names_of_vllm():
    config, _ = read(completion(min_tokens=3, guided_choice=["a", "b"], max_tokens=5))
    assert config.min_new_tokens == 3
    assert config.grammar.kind == "choice"
    with pytest.raises(ApiError, match="only one of the `guided_`"):
        read(completion(guided_regex="a", guided_choice=["a"]))


def test_a_seed_of_minus_one_is_none():
    assert read(completion(seed=-1))[0].seed is None
    assert read(completion(seed=0))[0].seed == 0
    with pytest.raises(ConfigError, match="seed"):
        read(completion(seed=-2))


@pytest.mark.parametrize(
    ("fields", "beams", "choices"),
    [
        ({"n": 3}, 3, 3),
        ({"n": 2, "best_of": 4}, 4, 2),
        ({"best_of": 4, "temperature": 0, "length_penalty": 0.5}, 4, 1),
        ({}, 1, 1),
        ({"temperature": 0, "top_p": 1.0}, 1, 1),
    ],
)
def test_a_beam_search_in_the_words_of_vllm(fields, beams, choices):
    for body in (completion, chat):
        config, num_choices = read(body(use_beam_search=True, **fields))
        assert (config.num_beams, num_choices, config.do_sample) == (beams, choices, False)
        assert config.num_return_sequences == choices
    if "temperature" not in fields:
        assert read(completion(use_beam_search=True, do_sample=True, **fields))[0].do_sample is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 3}, "`best_of` must equal `n` without `use_beam_search`"),
        ({"use_beam_search": True, "best_of": 2, "n": 3}, "`best_of` must be >= `n`, got 2 and 3"),
        ({"use_beam_search": True, "num_beams": 4}, "together with `use_beam_search`"),
        ({"use_beam_search": True, "best_of": 65}, "`num_beams` must be at most 64, got 65"),
        ({"truncate_prompt_tokens": 0}, "must be -1 or >= 1"),
        ({"structured_outputs": {}}, "exactly one of json, regex"),
        ({"truncate_prompt_tokens": -2}, "greater than or equal to -1"),
    ],
)
def test_what_contradicts_the_words_of_vllm_is_refused(fields, message):
    with pytest.raises(ApiError, match=message):
        read(completion(**fields))
    assert read(completion(best_of=2, n=2, use_beam_search=False))[1] == 2


@pytest.mark.parametrize(
    ("fields", "settings", "kept"),
    [
        (completion(truncate_prompt_tokens=3), {}, 3),
        (completion(truncate_prompt_tokens=500), {}, 200),
        (completion(truncate_prompt_tokens=-1), {}, 84),  # 16 follow
        (completion(truncate_prompt_tokens=-1, max_tokens=30), {}, 70),
        (completion(truncate_prompt_tokens=-1, max_tokens=100), {}, 1),
        (completion(truncate_prompt_tokens=-1, max_length=50), {}, 49),
        (completion(truncate_prompt_tokens=-1, max_tokens=30), {"max_prompt_tokens": 20}, 20),
        (completion(truncate_prompt_tokens=-1), {"max_positions": None}, 200),
        (chat(truncate_prompt_tokens=-1), {}, 99),
        (chat(truncate_prompt_tokens=-1, max_completion_tokens=40), {}, 60),
        (completion(), {}, 200),
    ],
)
def test_the_last_tokens_of_a_prompt_are_kept(fields, settings, kept):
    positions = settings.pop("max_positions", 100)
    reader = RequestParameters(ServerSettings(model_name="m", **settings), MODEL, positions)
    kind = ChatBody if "messages" in fields else CompletionBody
    body = parse_body(kind, {"model": "m", **fields})
    parameters = reader.read(body, {}, is_chat=kind is ChatBody)
    prompt = parameters.truncate(list(range(200)), body.truncate_prompt_tokens)
    assert prompt == list(range(200))[-kept:]
    if -1 in fields.values() and kept > 1:
        assert parameters.config(kept)  # it fits


def test_nothing_is_stored():
    for value in (False, None):
        assert parse_body(ChatBody, {"model": "m", **chat(store=value)}).store is False
    with pytest.raises(ApiError, match="store"):
        parse_body(ChatBody, {"model": "m", **chat(store=True)})


def test_prompts_of_one_length_share_a_config():
    reader = RequestParameters(ServerSettings(model_name="m"), MODEL, 100)
    parameters = reader.read(parse_body(CompletionBody, {"model": "m", **completion()}), {}, is_chat=False)
    assert parameters.config(5) is parameters.config(6)
    assert parameters.config(95).max_new_tokens == 5


def test_choices():
    assert read(completion(n=3))[1] == 3
    config, choices = read(completion(n=3, temperature=0))
    assert (choices, config.num_return_sequences) == (3, 1)
    assert read(completion(n=2, num_beams=4))[1] == 2
    with pytest.raises(ConfigError, match="num_return_sequences"):
        read(completion(n=5, num_beams=4))
    for count in (0, -5, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="num_return_sequences"):
            read(completion(num_return_sequences=count, temperature=0))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 200}, "n"),
        ({"logit_bias": {str(token): 1 for token in range(5000)}}, "logit_bias"),
        ({"bad_words_ids": [[1] * 100] * 100}, "bad_words_ids"),
        ({"banned_phrases": ["\ud800"]}, "banned_phrases"),
        ({"watermarking_config": {"ngram_len": 5, "keys": list(range(65))}}, "watermarking_config"),
        ({"y" * 2_000_000: 1}, "y" * 77 + "..."),
        ({"num_beams": 65}, "num_beams"),
        ({"stop": "x", "stop_strings": "y"}, "stop_strings"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_new_tokens"),
        ({"bad_words_ids": [[1]] * 5000}, "bad_words_ids"),
        ({"banned_phrases": ["x"] * 65}, "banned_phrases"),
        ({"banned_phrases": ["x" * 2000]}, "banned_phrases"),
        ({"compile_config": {}}, "compile_config"),
        ({"prefix_allowed_tokens_fn": 1}, "prefix_allowed_tokens_fn"),
        ({"generation_kwargs": {}}, "generation_kwargs"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"stop_regex": "(a*)*b"}, "stop_regex"),
        ({"num_return_sequences": 2, "n": 2}, "num_return_sequences"),
        ({"x" * 500: 1}, "x" * 77 + "..."),
    ],
)
def test_refused_fields_are_named(fields, param):
    with pytest.raises(ApiError) as caught:
        read(completion(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_stands_for_a_field_must_not_meet_the_field():
    with pytest.raises(ApiError, match="`grammar` must not be given twice"):
        read(completion(grammar={"json": True}), implied={"grammar": {"json": True}})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"n": 0},
        {"n": True},
        {"max_tokens": -1},
        {"stop": 3},
        {"stop": ["x"] * 65},
        {"stop": "x" * 2000},
        {"stream": "yes"},
        {"logit_bias": [1]},
        {"metadata": "x"},
        {"service_tier": "fast"},
        {"prompt": {"a": 1}},
        {"prompt": [1.5]},
        {"prompt": ["a", 1]},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"other": 1}},
    ],
)
def test_bodies_of_other_types_are_refused(fields):
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, {"model": "m", **completion(**fields)})
    assert caught.value.status == 400


def test_null_is_not_given():
    config, _ = read(completion(temperature=None, num_beams=None, stop=None, n=None))
    assert config.do_sample is True
