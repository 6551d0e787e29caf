"""The parts of responses of many families in every split, against transformers where it has a template."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.tokenization.regions import RegionReader, ResponseReader
from descant.tokenization.response_syntax import HERMES, ResponseSyntax, ThoughtMarkers
from tests.support.families import FAMILIES, Family, family_tokenizer

TEMPLATES = {name: template for names, template in _RESPONSE_TEMPLATE_FALLBACKS.items() for name in names}
THOUGHT = "First: 2 < 3, so\n\nthe 🦙 “wins”."
ANSWER = "It is 3 > 2 😀.\n\nDone </b> <thin"


def corpus(family: Family):
    """Raw outputs with their thought, content and calls."""
    thought, close = ("", "") if family.thought is None else family.thought
    calls = [family.calls]
    opened = f"{thought}\n{THOUGHT}\n{close}\n\n" if family.thought else ""
    told = THOUGHT if family.thought else ""
    wrapped = f"{family.before}{family.call}{family.after}"
    yield "plain", f"{family.answer}{ANSWER}", "", ANSWER, []
    if family.thought:
        yield "thought", f"{opened}{family.answer}{ANSWER}", told, ANSWER, []
        yield "empty thought", f"{thought}{close}{family.answer}{ANSWER}", "", ANSWER, []
        yield "cut thought", f"{thought}{THOUGHT}", THOUGHT, "", []
        yield "cut marker", f"{thought}{THOUGHT}{close[:-1]}", f"{THOUGHT}{close[:-1]}".strip(), "", []
        yield "marker in the thought", f"{thought}a {thought[:4]} b{close}c", f"a {thought[:4]} b", "c", []
    if family.call:
        yield "call", f"{opened}{wrapped}", told, "", calls
        several = f"{family.before}{family.call}{family.between}{family.call}{family.after}"
        yield "parallel calls", f"{opened}{several}", told, "", calls * 2
        if family.before or family.thought is None or family.name in ("qwen3", "qwen3.5", "glm-4.5"):
            yield "content and call", f"{opened}I look.\n{wrapped}", told, "I look.", calls


CASES = [
    pytest.param(family, raw, reasoning, content, calls, id=f"{family.name}-{kind}")
    for family in FAMILIES
    for kind, raw, reasoning, content, calls in corpus(family)
]


def message(parts):
    texts = {
        name: "".join(part.text for part in parts if part.region == name) for name in ("reasoning", "content")
    }
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for part in parts for call in part.calls]
    return texts["reasoning"], texts["content"], calls


def read(reader, pieces):
    parts = [part for piece in pieces for part in reader.put(piece)]
    return [*parts, *reader.end()]


def splits(items, rng, pairs=True):
    """The whole, each item alone, every split into two, and random ones."""
    yield [items]
    yield [items[index : index + 1] for index in range(len(items))]
    for at in range(1, len(items)) if pairs else ():
        yield [items[:at], items[at:]]
    for _ in range(8):
        cuts = sorted(rng.sample(range(len(items) + 1), min(len(items), rng.randint(1, 8))))
        yield [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@pytest.mark.parametrize(("family", "raw", "reasoning", "content", "calls"), CASES)
def test_every_split_gives_the_parts_of_the_whole(family, raw, reasoning, content, calls):
    rng = random.Random(raw)
    tokenizer = family_tokenizer(family, ("</th", "ink", "<to", "on", ' "'))
    form = ResponseSyntax.of_tokenizer(tokenizer)
    expected = (reasoning, content, calls)
    assert message(read(RegionReader(form), [raw])) == expected
    for pieces in splits(raw, rng):
        assert message(read(RegionReader(form), pieces)) == expected
    ids = tokenizer.encode(raw, add_special_tokens=False)
    for pieces in splits(ids, rng, pairs=family.name in ("qwen3", "gemma4")):
        reader = ResponseReader(form, [], IncrementalDetokenizer(tokenizer, skip_special_tokens=True))
        assert message(read(reader, pieces)) == expected


@pytest.mark.parametrize(
    ("name", "model_type"), [("qwen3", "qwen3"), ("qwen3.5", "qwen3_5"), ("gemma4", "gemma4")]
)
def test_a_response_template_is_read_as_transformers_reads_it(name, model_type):
    family = next(family for family in FAMILIES if family.name == name)
    tokenizer = family_tokenizer(family)
    tokenizer.response_template = TEMPLATES[model_type]
    form = ResponseSyntax.of_tokenizer(tokenizer)
    for _, raw, reasoning, content, calls in corpus(family):
        found = tokenizer.parse_response(raw, prefix="")
        functions = [call["function"] for call in found.get("tool_calls", ())]
        theirs = found.get("reasoning_content", ""), found.get("content", ""), functions
        assert message(read(RegionReader(form), [raw])) == theirs == (reasoning, content, calls)


PROMPTS = [  # the text of a prompt, and where its response begins
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "start"),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", "reasoning"),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nI know", "reasoning"),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "content"),
    ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "start"),
    ("<|im_start|>assistant\n<think>a</think>b<|im_end|>\n<|im_start|>assistant\n", "start"),
    ("Think first. <think>\n", "reasoning"),
]


@pytest.mark.parametrize(("prompt", "region"), PROMPTS)
def test_the_last_turn_of_a_prompt_says_where_its_response_begins(prompt, region):
    family = next(family for family in FAMILIES if family.name == "qwen3")
    tokenizer = family_tokenizer(family)
    form = ResponseSyntax.of_tokenizer(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert form.opening_region(tokenizer, ids) == region
    reader = ResponseReader(form, ids, IncrementalDetokenizer(tokenizer, prompt_ids=ids))
    answer = tokenizer.encode("so</think>it is", add_special_tokens=False)
    found = message(read(reader, [answer]))[:2]
    assert found == (("so", "it is") if region == "reasoning" else ("", "so</think>it is"))
    assert reader.num_reasoning_tokens == (3 if region == "reasoning" else 0)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "{}", "<tool", "_call>", "\n", " ", "a", "é"]
    + [f'<tool_call>\n{{"name": "f", "arguments": {{"x": {number}}}}}\n</tool_call>' for number in range(2)]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8), st.data())
def test_any_split_of_any_text_gives_the_same_parts(pieces, data):
    text, start, split = "".join(pieces), 0, []
    while start < len(text):
        size = data.draw(st.integers(1, 9))
        split.append(text[start : start + size])
        start += size
    syntax = ResponseSyntax(ThoughtMarkers(("<think>",), ("</think>",)), HERMES)
    assert message(read(RegionReader(syntax), split)) == message(read(RegionReader(syntax), [text]))


def test_a_call_that_is_cut_off_or_has_another_form_is_content():
    family = next(family for family in FAMILIES if family.name == "qwen3")
    form = ResponseSyntax.of_tokenizer(family_tokenizer(family))
    for end in range(len("<tool_call>\n"), len(family.call)):
        assert message(read(RegionReader(form), [family.call[:end]])) == ("", family.call[:end].rstrip(), [])
    bodies = '{"name": 3}', "[1]", "3", "", '{"name": "a", "arguments": {"b": 1e999}}', '{"arguments": {}}'
    odd = "".join(f"<tool_call>{body}</tool_call> " for body in bodies).rstrip()
    assert message(read(RegionReader(form), list(odd))) == ("", odd, [])


def test_a_tokenizer_without_markers_has_no_format():
    assert ResponseSyntax.of_tokenizer(family_tokenizer(Family("plain", None))) is None
