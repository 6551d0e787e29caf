"""Thoughts with a budget before grammars: valid JSON, exact counts, no markers in contents, by all methods.

The names of issues elsewhere say which defect a case would show.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
import transformers

import descant
from descant.testing import check_batch, check_schedule
from tests.support.families import FAMILIES, Family, family_tokenizer

GRAMMAR = {
    "json_schema": {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "is": {"enum": ["</think>", "b"]},
        },
        "required": ["age", "is"],
        "additionalProperties": False,
    }
}
# The markers as special tokens, as added tokens that are text, and spelled in tokens that cross their ends.
SPELLINGS = {
    "special": Family("special", ("<think>", "</think>"), special=("<turn>", "<think>", "</think>")),
    "added": Family("added", ("<think>", "</think>"), special=("<turn>",), added=("<think>", "</think>")),
    "spelled": Family("spelled", ("<think>", "</think>"), special=("<turn>",), template="<think></think>"),
}
MERGES = ("</th", "ink", '>{"', ">{", ">a", "</think>{", "<think>\n", "a</")
METHODS = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 6},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "drafts": {"prompt_lookup_num_tokens": 4, "do_sample": True, "seed": 5},
    "no drafts": {"grammar": {**GRAMMAR, "drafts": False}},
    "guidance": {"guidance_scale": 1.5},
}


@cache
def subject(name):
    """A tokenizer, and a tiny random model of its tokens."""
    family = SPELLINGS.get(name) or next(one for one in FAMILIES if one.name == name)
    tokenizer = family_tokenizer(family, MERGES)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4,
    )  # fmt: skip
    return tokenizer, transformers.LlamaForCausalLM(config).eval()


def generate(name, prompt, **fields):
    tokenizer, model = subject(name)
    fields = {"grammar": GRAMMAR, "max_new_tokens": 120, "eos_token_id": tokenizer.eos_token_id, **fields}
    return descant.generate(model, prompt, tokenizer=tokenizer, **fields)


def ids(name, text):
    return subject(name)[0].encode(text, add_special_tokens=False)


def check(completion, close, budget, message=""):
    """The content is JSON of the schema alone, and the thought within its budget; returns its tokens."""
    value = json.loads(completion.content)
    assert value.keys() == {"age", "is"}
    assert completion.text.endswith(completion.content)
    assert completion.finish_reason == "eos"
    used = completion.num_reasoning_tokens
    assert used <= budget + len(close)
    if message:
        assert message in completion.reasoning or used < budget
    return used


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_thought_ends_at_its_budget_and_the_grammar_begins(name, method):
    """llama.cpp#28182, vllm#55153, mlx-vlm#1299, lmstudio#1783, vllm#12619, QwenLM/Qwen3.8#26."""
    close = ids(name, "</think>")
    for budget in (0, 1, 7):
        found = generate(name, "<turn>a<turn><think>\n", thinking_budget=budget, **METHODS[method])
        used = [check(completion, close, budget) for completion in found]
        assert max(used) == budget + len(close)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_closing_message_comes_before_the_end(name):
    """ollama#17561, lmstudio#1974, opencode#27957."""
    message = " Enough! "
    close = ids(name, message + "</think>")
    [found] = generate(name, "<turn>a<turn><think>\n", thinking_budget=5, thinking_message=message)
    assert check(found, close, 5, message.strip()) == 5 + len(close)
    assert found.reasoning.endswith(message.strip())


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_grammar_begins_at_once_where_the_thought_is_skipped(name):
    """vllm#57714: also where the model could have thought."""
    opening = ids(name, "<think>")
    for prompt, bias, thinks in [
        ("<turn>a<turn><think>\n\n</think>\n\n", 0.0, False),  # by the template
        ("<turn>a<turn>", -100.0, False),  # by the model
        ("<turn>a<turn>", 100.0, True),
        ("What is <think>?", 100.0, True),  # of a text without turns, the last marker counts
        ("a", 100.0, False),
    ]:
        tokens = range(len(subject(name)[0])) if bias < 0 else opening[:1]
        begins = [token for token in tokens if subject(name)[0].decode([token]).startswith("<")]
        biased = dict.fromkeys(begins, bias) if bias else None
        [found] = generate(name, prompt, thinking_budget=6, logit_bias=biased)
        close = ids(name, "</think>")
        assert (check(found, close, 6) > 0) == thinks
    [found] = generate(name, "<turn>a<turn>", thinking_budget=0, logit_bias={opening[0]: 100.0})
    assert (json.loads(found.text).keys(), found.num_reasoning_tokens) == ({"age", "is"}, 0)


@pytest.mark.parametrize("name", ["gemma4", "gpt-oss", "magistral", "deepseek-r1", "command-a", "granite-3"])
def test_the_markers_of_a_family_are_found(name):
    family = next(one for one in FAMILIES if one.name == name)
    opening, end = family.thought
    close = ids(name, end)
    turn = f"{family.special[0]}a{family.special[0]}"
    for method in ("greedy", "sampling", "beams"):
        for completion in generate(name, turn + opening, thinking_budget=4, **METHODS[method]):
            check(completion, close, 4)


def test_a_call_of_a_grammar_follows_the_thought():
    """In the grammar's form, also where the family has another; text of other grammars has no calls."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": GRAMMAR["json_schema"]}}]
    for name, opening in (("added", "<think>"), ("magistral", "[THINK]")):
        grammar = {"tools": tools, "tool_choice": "required"}
        [found] = generate(name, opening, thinking_budget=4, grammar=grammar, max_new_tokens=200)
        [call] = found.tool_calls
        assert (call.name, call.arguments.keys()) == ("f", {"age", "is"})
        assert (found.content, 4 < found.num_reasoning_tokens < 20) == ("", True)
        [found] = generate(
            name, opening, thinking_budget=4, grammar={"choice": ["[TOOL_CALLS]f{}", "<tool_call>"]}
        )
        assert (found.tool_calls, found.content in ("[TOOL_CALLS]f{}", "<tool_call>")) == ((), True)


def test_markers_may_be_given_as_tokens():
    """The text of the tokens counts, in whatever tokens the model writes it."""
    name = "spelled"
    start, end = ids(name, "[["), ids(name, "]]")
    fields = {"thinking_budget": 4, "thinking_start": start, "thinking_end": end}
    [found] = generate(name, "<turn>a<turn>[[", **fields)
    thought, _, answer = found.text.partition("]]")
    assert json.loads(answer).keys() == {"age", "is"}
    assert len(ids(name, thought)) <= 4 + len(end)
    [found] = generate(name, "<turn>a<turn>", thinking_budget=4, thinking_end=end)  # without a start: at once
    assert json.loads(found.text.partition("]]")[2]).keys() == {"age", "is"}


@pytest.mark.parametrize("name", SPELLINGS)
def test_schedules_batches_and_drafts_change_nothing(name):
    tokenizer, model = subject(name)
    prompts = [
        ("<turn>a<turn><think>\n", 5, {"do_sample": True, "seed": 1}),
        ("<turn>b<turn>", 3, {"num_beams": 2}),
        ("<turn>c<turn><think>\n\n</think>\n\n", 4, {}),
        ("<turn>d<turn><think>", 9, {}),
    ]
    requests = []
    for prompt, budget, fields in prompts:
        fields |= {"eos_token_id": tokenizer.eos_token_id, "max_new_tokens": 60, "thinking_budget": budget}
        config = descant.GenerationConfig(grammar={**GRAMMAR, "drafts": False}, **fields)
        requests.append(descant.Request(ids(name, prompt), config, tokenizer=tokenizer))
    check_schedule(model, requests, schedules=4)  # with preemption
    check_batch(model, requests)


@pytest.mark.parametrize("name", SPELLINGS)
def test_drafted_and_plain_rows_have_the_same_tokens(name):
    prompt = "<turn>a<turn><think>\n"
    plain = generate(name, prompt, thinking_budget=6, grammar={**GRAMMAR, "drafts": False})
    for fields in ({}, {"prompt_lookup_num_tokens": 5}):
        assert generate(name, prompt, thinking_budget=6, **fields)[0].token_ids == plain[0].token_ids


def test_a_budget_without_markers_is_refused():
    tokenizer, model = subject("hermes")
    with pytest.raises(descant.ConfigError, match="needs a tokenizer with markers of thoughts"):
        descant.generate(model, "a", tokenizer=tokenizer, thinking_budget=3)
    with pytest.raises(descant.InputError, match="`tokenizer` must be given with `thinking_budget`"):
        descant.generate(model, torch.tensor([[5]]), thinking_budget=3)
    with pytest.raises(descant.InputError, match="`tokenizer` must be given with `thinking_message`"):
        descant.generate(
            model, torch.tensor([[5]]), thinking_budget=3, thinking_end=[1], thinking_message="x"
        )


@pytest.mark.parametrize("method", ["greedy", "sampling", "beams", "drafts"])
def test_the_parts_of_a_stream_are_those_of_the_completion(method):
    tokenizer, model = subject("added")
    fields = {
        "thinking_budget": 7,
        "max_new_tokens": 40,
        "eos_token_id": tokenizer.eos_token_id,
        **METHODS[method],
    }
    prompt = "<turn>a<turn><think>\n"
    whole = descant.generate(model, prompt, tokenizer=tokenizer, **fields)
    events = list(descant.stream(model, prompt, tokenizer=tokenizer, **fields))
    for completion in whole:
        own = [part for event in events if event.sequence == completion.sequence for part in event.parts]
        for region, text in (("reasoning", completion.reasoning), ("content", completion.content)):
            assert "".join(part.text for part in own if part.region == region) == text
        assert all(isinstance(part, descant.ResponsePart) for part in own)
    assert any(completion.reasoning for completion in whole)
