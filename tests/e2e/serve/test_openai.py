"""OpenAI's own client, unchanged, against a real server."""

from __future__ import annotations

import json
import re

import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.http_client import request

NAME = "smol-draft"
MESSAGES = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "register", "parameters": SCHEMA}}


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client, **options):
    return client.chat.completions.create(model=NAME, messages=MESSAGES, **options)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_log_probabilities_of_a_chat(client):
    answer = chat(client, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 6
    assert answer.choices[0].finish_reason == "length"
    for entry in entries:
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (one.logprob for one in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes).decode(errors="ignore") in entry.token


def test_sampled_choices_are_several_and_greedy_ones_equal(client):
    sampled = chat(client, max_completion_tokens=6, n=3, seed=4, temperature=1.3, user="somebody")
    assert [choice.index for choice in sampled.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in sampled.choices}) > 1
    greedy = chat(client, max_completion_tokens=6, n=3, temperature=0)
    assert len({choice.message.content for choice in greedy.choices}) == 1
    assert greedy.usage.completion_tokens == 18


def test_a_stream_is_the_answer_piece_by_piece(client):
    options = {
        "max_tokens": 8,
        "seed": 4,
        "stop": ["zzz"],
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -100},
    }
    chat(client, **options)  # both find the prompt in the prefix cache, whatever test runs before this one
    whole = chat(client, **options)
    parts = list(chat(client, **options, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage == whole.usage
    assert parts[-1].choices == []
    chunks = [part.choices[0] for part in parts[:-1]]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].delta.role == "assistant"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert len(chunks) > 2


def test_streamed_log_probabilities_are_those_of_the_answer(client):
    options = {"max_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = chat(client, **options)
    streamed = {0: [], 1: []}
    for part in chat(client, **options, stream=True):
        for choice in part.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in whole.choices:
        assert streamed[choice.index] == choice.logprobs.content


def test_beams_stream_what_is_certain(client):
    options = {"max_tokens": 12, "n": 2, "extra_body": {"num_beams": 4, "length_penalty": 0.8}}
    whole = chat(client, **options)
    texts = ["", ""]
    for part in chat(client, **options, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(client):
    free = chat(client, max_tokens=12, temperature=0).choices[0].message.content
    stop = free[3:6]
    answer = chat(client, max_tokens=12, temperature=0, stop=stop).choices[0]
    assert answer.message.content == free[: free.index(stop)]
    assert answer.finish_reason == "stop"


def test_structured_answers_parse(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = chat(client, max_tokens=60, temperature=0, response_format=form)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
    parsed = client.chat.completions.parse(
        model=NAME, messages=MESSAGES, max_tokens=60, temperature=0, response_format=Person
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_tool_calls_whole_and_streamed(client):
    named = {"type": "function", "function": {"name": "register"}}
    answer = chat(client, max_tokens=80, temperature=0, tools=[TOOL], tool_choice=named).choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert Person.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(
        model=NAME, messages=MESSAGES, max_tokens=80, temperature=0, tools=[TOOL], tool_choice="required"
    ) as stream:
        final = stream.get_final_completion().choices[0]
    [streamed] = final.message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    conversation = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    again = client.chat.completions.create(model=NAME, messages=conversation, tools=[TOOL], max_tokens=4)
    assert again.usage.prompt_tokens > 20


def test_free_text_with_tools_allowed(client):
    answer = chat(client, max_tokens=4, temperature=0, tools=[TOOL]).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls is None


def test_completions_of_texts_and_ids(client, server):
    options = {"model": NAME, "max_tokens": 4, "temperature": 0}
    texts = client.completions.create(prompt=["Once", "Two and"], **options, logprobs=2).choices
    assert [choice.index for choice in texts] == [0, 1]
    for choice in texts:
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.text_offset[0] == 0
        assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    ids = openai.OpenAI(base_url=server.url, api_key="none")
    tokens = ids.post("/tokenize", body={"prompt": "Two and"}, cast_to=object)["tokens"]
    again = client.completions.create(prompt=tokens, **options).choices[0]
    assert again.text == texts[1].text
    assert ids.post("/detokenize", body={"tokens": tokens}, cast_to=object)["prompt"] == "Two and"


def test_an_echo_has_the_prompt_and_its_log_probabilities(client):
    options = {"model": NAME, "prompt": "Once upon a time", "temperature": 0, "echo": True}
    answer = client.completions.create(max_tokens=3, logprobs=1, **options).choices[0]
    assert answer.text.startswith("Once upon a time")
    assert answer.logprobs.token_logprobs[0] is None
    assert "".join(answer.logprobs.tokens) == answer.text
    scored = client.completions.create(max_tokens=0, logprobs=1, **options)
    assert scored.choices[0].text == "Once upon a time"
    assert scored.usage.completion_tokens == 0
    first = scored.choices[0].logprobs.token_logprobs
    assert first == pytest.approx(answer.logprobs.token_logprobs[: len(first)], abs=1e-4)


def test_responses_whole_streamed_and_parsed(client):
    grammar = {"grammar": {"choice": ["hello there", "good bye"]}}
    options = {"model": NAME, "input": "Say hello.", "temperature": 0, "extra_body": grammar}
    whole = client.responses.create(**options)
    assert whole.status == "completed"
    assert whole.output_text in grammar["grammar"]["choice"]
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    cut = client.responses.create(model=NAME, input="x", max_output_tokens=3, instructions="Be short.")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parsed = client.responses.parse(
        model=NAME, input="x", max_output_tokens=60, temperature=0, text_format=Person
    )
    assert isinstance(parsed.output_parsed, Person)


def test_responses_call_tools(client):
    tool = {"type": "function", "name": "register", "parameters": SCHEMA, "strict": True}
    options = {"model": NAME, "tools": [tool], "max_output_tokens": 80, "temperature": 0}
    asked = [{"role": "user", "content": "Go."}]
    [call] = client.responses.create(input=asked, tool_choice="required", **options).output
    assert Person.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    again = client.responses.create(input=[*asked, call.model_dump(exclude_none=True), result], **options)
    assert again.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_beam": 4}, "did you mean `num_beams`"),
        ({"top_k": -5}, "`top_k` must be an int >= 0"),
        ({"num_beams": 0}, "`num_beams` must be an int >= 1"),
        ({"output_scores": True}, "must not be set by a request"),
        ({"max_tokens": 10**9}, "context has"),
        ({"trace": "yes"}, "trace"),
        ({"priority": -1}, "`priority` must be >= 0"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "must not set"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"tool_choice": "required"}, "without `tools`"),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structural_tag` is not supported",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of json, regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "only one of"),
        ({"reasoning_effort": "low"}, "`reasoning_effort` has no effect"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "`enable_thinking` has no effect"),
        ({"top_logprobs": 2}, "`top_logprobs` has no use without `logprobs`"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "`add_generation_prompt` must"),
        ({"max_completion_tokens": 10**9}, "lower `max_completion_tokens`"),
        ({"min_tokens": 9, "max_tokens": 3}, "`min_tokens`"),
    ],
)
def test_what_is_wrong_is_named(client, extra, message):
    with pytest.raises(openai.BadRequestError, match=message.replace("(", r"\(")) as caught:
        chat(client, extra_body={"max_tokens": 2, **extra})
    assert caught.value.body["type"] == "invalid_request_error"


def test_every_method_is_a_field(client):
    for extra in (
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"guidance_scale": 1.5, "negative_prompt": "Be rude."},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 2, "force_words_ids": [[20]]},
        {"min_p": 0.1, "dry_multiplier": 0.8, "mirostat_tau": 3.0},
        {"prompt_lookup_num_tokens": 4},
        {"prompt_lookup_num_tokens": 10**9},  # a row drafts no more than it has room for
        {"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0}},
        {"cache_implementation": "h2o", "cache_config": {"budget": 16}},
    ):
        answer = chat(client, max_tokens=4, extra_body=extra, temperature=None)
        assert answer.usage.completion_tokens >= 1, extra


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TEXT = {"type": "text", "text": "What is this?"}


def messages(*parts, role="user"):
    return {"messages": [{"role": "user", "content": "x"}, {"role": role, "content": list(parts)}]}


def items(*found):
    return {"input": [{"role": "user", "content": "x"}, *found]}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, messages(TEXT, IMAGE), "messages.1.content.1.type", "no images.*got image_url"),
        (CHAT, messages({"type": "input_audio"}), "messages.1.content.0.type", "got input_audio"),
        (CHAT, messages({"type": "file"}, role="tool"), "messages.1.content.0.type", "got file"),
        (CHAT, messages("x"), "messages.1.content.0", "valid dictionary"),
        (CHAT, {"messages": [{"role": "user", "prefix": True}]}, "messages.0.prefix", "is not supported"),
        (RESPONSES, items(messages(IMAGE)["messages"][1]), "input.1.content.0.type", "got image_url"),
        (RESPONSES, items({"type": "item_reference", "id": "a"}), "input.1", "function_call_output"),
        (RESPONSES, items({"type": "function_call", "name": "f"}), "input.1.call_id", "required"),
        (RESPONSES, {"input": "x", "reasoning": {"effort": "low"}}, "reasoning", "no effect"),
        (RESPONSES, {"input": "x", "reasoning": {"summary": "auto"}}, "reasoning.summary", "None"),
        (RESPONSES, {"input": "x", "text": {"verbosity": "low"}}, "text", "no effect"),
        (RESPONSES, {"input": "x", "trace": True}, "trace", "False"),
        (RESPONSES, {"input": "x", "return_token_ids": True}, "return_token_ids", "False"),
        (RESPONSES, {"input": "x", "max_output_tokens": 10**9}, "max_output_tokens", "lower `max_ou"),
        (RESPONSES, {"input": "word " * 30_000}, "input", "the prompt must have at most"),
        (CHAT, messages({**TEXT, "text": "word " * 30_000}), "messages", "the prompt must have at most"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools", "no use with `prompt`"),
        ("/tokenize", {**messages(TEXT), "add_special_tokens": True}, "add_special_tokens", "no use"),
        ("/tokenize", {"prompt": "word " * 400_000}, "prompt", "at most 65536 tokens, it has more"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_named(server, path, body, param, message):
    answer = request(server.port, "POST", path, {"model": NAME, **body})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert re.search(message, error["message"]), error


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"json": json.dumps(SCHEMA)}, r"\{.*\}"),
        ({"json_object": True, "regex": None}, r"\{.*"),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
    ],
)
def test_structured_outputs_in_the_form_of_vllm(client, form, pattern):
    answer = chat(client, max_tokens=40, temperature=0, extra_body={"structured_outputs": form})
    assert re.fullmatch(pattern, answer.choices[0].message.content, re.DOTALL)
