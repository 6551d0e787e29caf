"""Thoughts and answers of a served model, by OpenAI's own client."""

from __future__ import annotations

import json

import openai
import pytest

from tests.support import pretrained
from tests.support.server_process import ServerProcess

NAME = "minimind2-small"
# As templates of models that think: the prompt opens the thought, or has an empty one.
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}"""
MESSAGES = [{"role": "user", "content": "Who are you?"}]
BUDGET = {"thinking_budget": 6, "thinking_message": " Enough."}
TEXT = {**BUDGET, "min_tokens": 24}  # the model would end with its thought
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "is": {"enum": ["</think>"]}},
    "required": ["age", "is"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "register", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = "--kv-memory", "0.5", "--chat-template", str(template)
    with ServerProcess(str(pretrained.folder(NAME)), *options) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            yield client


def chat(client, extra=BUDGET, **fields):
    fields = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 60, **fields}
    return client.chat.completions.create(**fields, extra_body=extra)


def test_a_chat_has_its_thought_beside_its_content(client):
    answer = chat(client, TEXT)
    message = answer.choices[0].message
    assert message.reasoning_content == message.reasoning
    assert message.reasoning_content.endswith("Enough.")
    assert "think>" not in message.content
    assert "Enough." not in message.content
    tokenizer = pretrained.tokenizer(NAME)
    close = tokenizer.encode(" Enough.</think>", add_special_tokens=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6 + len(close)
    hidden = chat(client, {**TEXT, "include_reasoning": False}).choices[0].message
    assert (hidden.content, getattr(hidden, "reasoning_content", None)) == (message.content, None)
    joined = chat(client, {**TEXT, "separate_reasoning": False}).choices[0].message.content
    assert joined.index(message.reasoning_content) < joined.index("</think>") < joined.index(message.content)


@pytest.mark.parametrize("fields", [{}, {"response_format": FORMAT}, {"n": 2, "temperature": 1, "seed": 3}])
def test_a_stream_has_the_deltas_of_each_region(client, fields):
    whole = chat(client, **fields)
    found = [{"reasoning": "", "content": ""} for _ in whole.choices]
    usage = None
    for chunk in chat(client, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert (getattr(choice.delta, "reasoning", None) is None) or not choice.delta.content
            found[choice.index]["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            found[choice.index]["content"] += choice.delta.content or ""
    expected = [
        {"reasoning": choice.message.reasoning, "content": choice.message.content} for choice in whole.choices
    ]
    assert found == expected
    assert usage.completion_tokens_details == whole.usage.completion_tokens_details
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_format_and_tools_follow_the_thought(client):
    message = chat(client, response_format=FORMAT).choices[0].message
    assert json.loads(message.content).keys() == {"age", "is"}
    assert message.reasoning
    message = chat(client, tools=[TOOL], tool_choice="required", max_tokens=120).choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"age", "is"}
    assert message.reasoning
    assert message.content is None


def test_a_skipped_thought_is_no_thought(client):
    """`enable_thinking` is a variable of the template, whose empty thought is part of the prompt."""
    answer = chat(client, {"enable_thinking": False}, response_format=FORMAT)
    assert json.loads(answer.choices[0].message.content).keys() == {"age", "is"}
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert getattr(answer.choices[0].message, "reasoning", None) is None
    with pytest.raises(openai.BadRequestError, match="`reasoning_effort` has no effect"):
        chat(client, {}, reasoning_effort="low")


def test_responses_have_reasoning_items_and_events(client):
    given = {"model": NAME, "temperature": 0, "max_output_tokens": 40, "extra_body": TEXT}
    whole = client.responses.create(input="Who are you?", **given)
    thought, message = whole.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content[0].text.endswith("Enough.")
    told = chat(client, TEXT, max_tokens=40).choices[0].message
    assert (thought.content[0].text, whole.output_text) == (told.reasoning, told.content)
    close = pretrained.tokenizer(NAME).encode(" Enough.</think>", add_special_tokens=False)
    assert whole.usage.output_tokens_details.reasoning_tokens == 6 + len(close)

    events = list(client.responses.create(input="Who are you?", stream=True, **given))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.content_part.done", "response.output_item.done", "response.output_text.delta",
        "response.output_text.done", f"response.{whole.status}",
    ]  # fmt: skip
    for kind, text in [("reasoning_text", thought.content[0].text), ("output_text", whole.output_text)]:
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(deltas) == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.content for item in events[-1].response.output] == [item.content for item in whole.output]

    # The next turn has the thought of the last, as the template shows it.
    asked = [{"role": "user", "content": "Who are you?"}, *whole.output, {"role": "user", "content": "Why?"}]
    second = client.responses.create(input=asked, **given)
    without = client.responses.create(input=[asked[0], *asked[2:]], **given)
    assert second.usage.input_tokens > without.usage.input_tokens
    assert [item.type for item in second.output] == ["reasoning", "message"]


def test_a_call_is_an_item_behind_the_thought(client):
    tool = {"type": "function", **TOOL["function"]}
    given = {"model": NAME, "temperature": 0, "max_output_tokens": 120, "extra_body": BUDGET}
    first = client.responses.create(input="Hi", tools=[tool], tool_choice="required", **given)
    thought, call = first.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert json.loads(call.arguments).keys() == {"age", "is"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = client.responses.create(
        input=[{"role": "user", "content": "Hi"}, thought, call, result], **given
    )
    assert [item.type for item in second.output] == ["reasoning", "message"]


def begins(text):
    """The tokens that begin with a text."""
    tokenizer = pretrained.tokenizer(NAME)
    return [token for token in range(len(tokenizer)) if tokenizer.decode([token]).startswith(text)]


def test_tools_and_a_format_in_one_request(client):
    """vllm#16313: the answer is a call, or has the format."""
    fields = {"tools": [TOOL], "response_format": FORMAT, "max_tokens": 160}
    for banned, is_call in (("{", True), ("<", False)):
        bias = {str(token): -100 for token in begins(banned)[:200]}
        answer = chat(client, {"enable_thinking": False, "logit_bias": bias}, **fields).choices[0].message
        assert bool(answer.tool_calls) == is_call
        found = answer.tool_calls[0].function.arguments if is_call else answer.content
        assert json.loads(found).keys() == {"age", "is"}


def test_the_allowed_tools_are_those_that_are_called(client):
    other = {
        "type": "function",
        "function": {"name": "other", "parameters": {}},
    }
    fields = {"tools": [TOOL, other], "max_tokens": 160}
    choice = {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]}
    extra = {"enable_thinking": False, "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}
    [call] = chat(client, extra, **fields).choices[0].message.tool_calls
    assert call.function.name == "other"
    choice["tools"][0]["function"]["name"] = "third"
    with pytest.raises(
        openai.BadRequestError, match="`allowed_tools` must name some of the `tools`, got `third`"
    ):
        chat(client, extra, **fields)
