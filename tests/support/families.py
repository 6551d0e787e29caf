"""Families of chat models: tokenizers with their special tokens, and raw outputs in their formats.

The formats are those of the families' published chat templates. The templates themselves are not to be had
here, but for the three whose `response_template` transformers has (`qwen3`, `qwen3.5`, `gemma4`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CALL = {"name": "get_weather", "arguments": {"city": "Zürich 🏔", "days": 3, "tags": ["a", {"b": None}]}}
TEXT_CALL = {"name": "get_weather", "arguments": {"city": "Zürich 🏔", "note": "a <b> c"}}


@dataclass(frozen=True)
class Family:
    """The markers of a family: a text with each, in which the words stand for themselves."""

    name: str
    thought: tuple[str, str] | None
    call: str = ""  # a call of `CALL`, or of `TEXT_CALL` where arguments are texts
    special: tuple[str, ...] = ()  # special tokens
    added: tuple[str, ...] = ()  # added tokens that are text
    template: str = ""  # what its chat template has of it
    is_typed: bool = True  # whether arguments keep their types
    between: str = "\n"
    before: str = ""  # around the calls
    after: str = ""
    answer: str = ""  # the marker before the content

    @property
    def calls(self) -> dict[str, Any]:
        return CALL if self.is_typed else TEXT_CALL


_JSON = '{"name": "get_weather", "arguments": {"city": "Zürich 🏔", "days": 3, "tags": ["a", {"b": null}]}}'
_ARGUMENTS = '{"city": "Zürich 🏔", "days": 3, "tags": ["a", {"b": null}]}'
_TAGS = (
    "<function=get_weather>\n<parameter=city>\nZürich 🏔\n</parameter>\n"
    "<parameter=note>\na <b> c\n</parameter>\n</function>"
)
_THINK = ("<think>", "</think>")

FAMILIES = (
    Family(
        "qwen3", _THINK, f"<tool_call>\n{_JSON}\n</tool_call>", ("<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    Family(
        "qwen3.5", _THINK, f"<tool_call>\n{_TAGS}\n</tool_call>", ("<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"), "<tool_call><function=", is_typed=False,
    ),
    Family(
        "gemma4", ("<|channel>thought\n", "<channel|>"),
        '<|tool_call>call:get_weather{city:<|"|>Zürich 🏔<|"|>,days:3,tags:[<|"|>a<|"|>,{b:null}]}'
        "<tool_call|>",
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Family(
        "gpt-oss", ("<|channel|>analysis<|message|>", "<|end|>"),
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{_ARGUMENTS}<|call|>",
        ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
        between="", answer="<|start|>assistant<|channel|>final<|message|>",
    ),
    Family(
        "deepseek-r1", _THINK,
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>",
        (
            "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
        ),
        ("<think>", "</think>"), before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
    ),
    Family(
        "deepseek-v3.1", _THINK,
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>",
        (
            "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
        ),
        ("<think>", "</think>"), between="", before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
    ),
    Family(
        "kimi-k2", _THINK,
        f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>",
        (
            "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        ("<think>", "</think>"), between="", before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    Family("kimi-vl", ("◁think▷", "◁/think▷"), added=("◁think▷", "◁/think▷")),
    Family(
        "magistral", ("[THINK]", "[/THINK]"), f"[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}",
        ("[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"), between="",
    ),
    Family(
        "mistral-v3", None, f"[TOOL_CALLS][{_JSON}]", ("[INST]", "[/INST]", "[TOOL_CALLS]"), between="",
    ),
    Family(
        "minimax-m2", _THINK,
        '<invoke name="get_weather">\n<parameter name="city">Zürich 🏔</parameter>\n'
        '<parameter name="note">a <b> c</parameter>\n</invoke>',
        ("]~b]", "[e~["), ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        is_typed=False, before="<minimax:tool_call>\n", after="\n</minimax:tool_call>",
    ),
    Family(
        "glm-4.5", _THINK,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 🏔</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>a <b> c</arg_value>\n</tool_call>",
        ("<|user|>", "<|assistant|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"), is_typed=False,
    ),
    Family(
        "seed-oss", ("<seed:think>", "</seed:think>"), f"<seed:tool_call>\n{_TAGS}\n</seed:tool_call>",
        ("<seed:bos>",), ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        is_typed=False,
    ),
    Family(
        "command-a", ("<|START_THINKING|>", "<|END_THINKING|>"),
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_weather", '
        f'"parameters": {_ARGUMENTS}}}\n]<|END_ACTION|>',
        (
            "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>",
            "<|START_RESPONSE|>", "<|END_RESPONSE|>",
        ),
        answer="<|START_RESPONSE|>",
    ),
    Family(
        "granite-3", ("Here is my thought process:", "Here is my response:"), f"<|tool_call|>[{_JSON}]",
        ("<|start_of_role|>", "<|tool_call|>"), template="Here is my thought process:",
    ),
    Family("phi-4-mini", None, f"<|tool_call|>[{_JSON}]<|/tool_call|>", ("<|tool_call|>", "<|/tool_call|>")),
    Family(
        "llama-3.1", None, f"<|python_tag|>{_JSON.replace('arguments', 'parameters')}",
        ("<|start_header_id|>", "<|python_tag|>"), between="",
    ),
    Family("exaone-deep", ("<thought>", "</thought>"), template="<thought>\n"),
    Family(
        "hermes", None, f"<tool_call>\n{_JSON}\n</tool_call>", ("<|im_start|>", "<|im_end|>"),
        template="<tool_call>",
    ),
)  # fmt: skip


def family_tokenizer(family: Family, merges: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and the family's tokens, with `merges` as further tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    pairs = []
    for word in (merge.replace(" ", "Ġ").replace("\n", "Ċ") for merge in merges):
        for size in range(2, len(word) + 1):
            if word[:size] not in vocab:
                vocab[word[:size]] = len(vocab)
                pairs.append((word[: size - 1], word[size - 1]))
    backend = Tokenizer(models.BPE(vocab, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", *family.special)])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = family.template or None
    return tokenizer
