"""The format of a model's responses: the markers of its thought and of its tool calls, by family."""

from __future__ import annotations

import contextlib
import json
import math
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from descant.tokenization.token_bytes import TokenBytes


class ToolCall(NamedTuple):
    """A call in generated text."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ThoughtMarkers:
    """The texts around a thought."""

    open: tuple[str, ...]
    close: tuple[str, ...]
    reopens: bool = False  # whether a further thought may follow in the answer


@dataclass(frozen=True)
class CallSyntax:
    """The texts around a call, and the form of what they enclose."""

    open: tuple[str, ...]
    close: tuple[str, ...]  # without any, a call ends at the next one or with the text
    # Groups `name` and `arguments` of a body; None: JSON with both.
    body: str | None = None
    # Groups `key` and `value` of each argument; None: the arguments are JSON.
    argument: str | None = None
    ignored: tuple[str, ...] = ()  # texts around calls that say nothing
    inner: tuple[str, ...] = ()  # special tokens of a body
    is_relaxed: bool = False  # whether keys have no quotes, and strings the token `<|"|>`

    def calls(self, body: str) -> list[ToolCall] | None:
        """The calls of a body; None: it is cut off or has another form."""
        try:
            found = [self._read(match) for match in self._matches(body)]
        except (KeyError, RecursionError, TypeError, ValueError):
            return None
        return found or None

    def _matches(self, body: str) -> Iterator[Any]:
        if self.body is not None and (match := re.fullmatch(self.body, body.strip(), re.DOTALL)):
            yield match
            return
        value = _read_json(body)
        yield from value if isinstance(value, list) else [value]

    def _read(self, found: Any) -> ToolCall:
        """A call of a match of `body`, or of a JSON object."""
        if isinstance(found, re.Match):
            name, text = found["name"].strip(), found["arguments"]
            if self.argument is not None:
                pairs = re.finditer(self.argument, text, re.DOTALL)
                return ToolCall(name, {pair["key"]: pair["value"] for pair in pairs})
            arguments = _read_json(_quoted(text) if self.is_relaxed else text or "{}")
        elif not isinstance(found, dict):
            raise TypeError
        else:
            name = found["name"] if "name" in found else found["tool_name"]
            arguments = found.get("arguments", found.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError
        return ToolCall(name, arguments)


def _read_json(text: str) -> Any:
    return json.loads(text, parse_float=_finite_number, parse_constant=_finite_number)


def _finite_number(text: str) -> float:
    """A number of a call; one that no float holds would become infinite, which is no JSON."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _quoted(text: str) -> str:
    """Relaxed JSON with quotes around its keys and strings."""
    parts = text.split('<|"|>')  # every second part is a string
    parts[0::2] = [re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part) for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


@dataclass(frozen=True)
class ResponseSyntax:
    """How the text of a response is divided into thought, calls and content."""

    thought: ThoughtMarkers | None = None
    calls: CallSyntax | None = None
    ignored: tuple[str, ...] = ()  # texts outside of the thought and the calls that say nothing

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> ResponseSyntax | None:
        """The format of a tokenizer's model: of its `response_template`, or else by its family; None: plain.

        A family is known by the markers in its chat template and its added tokens.
        """
        key = id(tokenizer)
        cached = _by_tokenizer.get(key)
        source = getattr(tokenizer, "response_template", None), getattr(tokenizer, "chat_template", None)
        if cached is not None and cached[0]() is tokenizer and cached[1] == source:
            return cached[2]
        found = _template_format(source[0]) if source[0] else _family_format(tokenizer, source[1])
        with contextlib.suppress(TypeError):  # an object without weak references is not cached
            _by_tokenizer[key] = weakref.ref(tokenizer, lambda _: _by_tokenizer.pop(key, None)), source, found
        return found

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that divide."""
        thought = () if self.thought is None else (*self.thought.open, *self.thought.close)
        syntax = self.calls or CallSyntax((), ())
        return (*thought, *syntax.open, *syntax.close, *syntax.ignored, *syntax.inner, *self.ignored)

    def opening_region(self, tokenizer: Any, prompt: Sequence[int]) -> str:
        """Where a response begins: in a thought that the prompt opens, behind one, or undecided: "start".

        Only the last turn counts: what follows the last special token that is no marker of a thought.
        """
        if self.thought is None:
            return "start"
        data = turn_bytes(tokenizer, prompt, (*self.thought.open, *self.thought.close))
        # A template may leave out what opens a thought.
        opened = max((_end_of_last(data, marker) for marker in self.thought.open), default=0)
        closed = max((_end_of_last(data, marker) for marker in self.thought.close), default=0)
        if opened > closed:
            return "reasoning"
        return "content" if closed > 0 else "start"


_by_tokenizer: dict[int, tuple[weakref.ref[Any], tuple[Any, Any], ResponseSyntax | None]] = {}


def turn_bytes(tokenizer: Any, prompt: Sequence[int], markers: Sequence[str]) -> bytes:
    """The bytes of a prompt behind its last special token that is in none of the markers."""
    vocabulary = TokenBytes.from_tokenizer(tokenizer)
    pieces: list[bytes] = []
    for token in reversed(prompt):
        data = vocabulary.bytes[token] if 0 <= token < vocabulary.size else b""
        if token in vocabulary.special_ids and not is_in_markers(data, markers):
            break
        pieces.append(data)
    return b"".join(reversed(pieces))


def is_in_markers(data: bytes, markers: Sequence[str]) -> bool:
    """Whether a token is part of a marker."""
    return bool(data) and any(data in marker.encode() for marker in markers)


def _end_of_last(data: bytes, marker: str) -> int:
    """The position behind the last marker in a text; 0: it has none."""
    position = data.rfind(marker.encode())
    return 0 if position < 0 else position + len(marker.encode())


# ------------------------------------------------------------------------ families
def _think(name: str) -> ThoughtMarkers:
    return ThoughtMarkers((f"<{name}>",), (f"</{name}>",))


# The thoughts of families; the first whose opening marker a tokenizer knows is its own.
_THOUGHTS: Final = (
    ThoughtMarkers(("<|channel|>analysis<|message|>",), ("<|end|>",), reopens=True),  # gpt-oss
    ThoughtMarkers(("<|channel>thought\n",), ("<channel|>",), reopens=True),  # Gemma 4
    ThoughtMarkers(("[THINK]",), ("[/THINK]",)),  # Magistral
    ThoughtMarkers(("◁think▷",), ("◁/think▷",)),  # Kimi
    ThoughtMarkers(("<|START_THINKING|>",), ("<|END_THINKING|>",)),  # Command A
    ThoughtMarkers(("<seed:think>",), ("</seed:think>",)),  # Seed-OSS
    _think("thought"),  # EXAONE Deep
    _think("think"),  # Qwen, DeepSeek, GLM, MiniMax, Nemotron, OLMo, SmolLM3 and others
    ThoughtMarkers(("Here is my thought process:",), ("Here is my response:",)),  # Granite 3
)
_TAGGED: Final = r"\s*<function=(?P<name>[^>\n]+)>(?P<arguments>.*?)</function>\s*"
_TAGGED_ARGUMENT: Final = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
HERMES: Final = CallSyntax(("<tool_call>",), ("</tool_call>",))
# The calls of families, each with the texts of which a tokenizer must know one.
_CALLS: Final[tuple[tuple[tuple[str, ...], CallSyntax], ...]] = (
    (
        ("<|constrain|>",),  # gpt-oss
        CallSyntax(
            ("<|channel|>commentary to=", "<|start|>assistant to="),
            ("<|call|>",),
            body=r"(?:functions\.)?(?P<name>[^\s<]+).*?<\|message\|>(?P<arguments>.*)",
            ignored=(
                "<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>",
                "<|end|>", "<|return|>",
            ),
        ),
    ),
    (
        ("<|tool_call>",),  # Gemma 4
        CallSyntax(
            ("<|tool_call>",), ("<tool_call|>",), body=r"call:(?P<name>[\w.-]+)(?P<arguments>\{.*\})",
            inner=('<|"|>',),
            is_relaxed=True,
        ),
    ),
    (
        ("<｜tool▁calls▁begin｜>",),  # DeepSeek V3, R1 and V3.1
        CallSyntax(
            ("<｜tool▁call▁begin｜>",),
            ("<｜tool▁call▁end｜>",),
            body=r"(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+)(?:\n```json\n|<｜tool▁sep｜>)"
            r"(?P<arguments>.*?)(?:\n```)?",
            ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=("<｜tool▁sep｜>",),
        ),
    ),
    (
        ("<|tool_calls_section_begin|>",),  # Kimi K2
        CallSyntax(
            ("<|tool_call_begin|>",),
            ("<|tool_call_end|>",),
            body=r"(?:functions\.)?(?P<name>[^:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)",
            ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            inner=("<|tool_call_argument_begin|>",),
        ),
    ),
    (
        ("[TOOL_CALLS]",),  # Mistral
        CallSyntax(
            ("[TOOL_CALLS]",), (),
            body=r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?P<arguments>\{.*\})",
            inner=("[ARGS]", "[CALL_ID]"),
        ),
    ),
    (
        ("<minimax:tool_call>",),  # MiniMax M2
        CallSyntax(
            ('<invoke name="',), ("</invoke>",), body=r'(?P<name>[^"]+)">(?P<arguments>.*)',
            argument=r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>',
            ignored=("<minimax:tool_call>", "</minimax:tool_call>"),
        ),
    ),
    (
        ("<arg_key>",),  # GLM 4.5
        CallSyntax(
            ("<tool_call>",), ("</tool_call>",), body=r"(?P<name>[^\s<]+)\s*(?P<arguments>.*)",
            argument=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
    ),
    (
        ("<seed:tool_call>",),  # Seed-OSS
        CallSyntax(("<seed:tool_call>",), ("</seed:tool_call>",), body=_TAGGED, argument=_TAGGED_ARGUMENT),
    ),
    (
        ("<function=",),  # Qwen3-Coder, Qwen3.5
        CallSyntax(("<tool_call>",), ("</tool_call>",), body=_TAGGED, argument=_TAGGED_ARGUMENT),
    ),
    (
        ("<|START_ACTION|>",),  # Command A
        CallSyntax(
            ("<|START_ACTION|>",), ("<|END_ACTION|>",), ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
        ),
    ),
    (("<|/tool_call|>",), CallSyntax(("<|tool_call|>",), ("<|/tool_call|>",))),  # Phi 4 mini
    (("<|tool_call|>",), CallSyntax(("<|tool_call|>",), ())),  # Granite 3
    (("<tool_call>",), HERMES),  # Qwen, SmolLM, Granite 4 and others
    (("<|python_tag|>",), CallSyntax(("<|python_tag|>",), ())),  # Llama 3
)  # fmt: skip


def _family_format(tokenizer: Any, template: Any) -> ResponseSyntax | None:
    texts = list(template.values()) if isinstance(template, Mapping) else [template or ""]
    added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()

    def is_known(marker: str) -> bool:
        """Whether a tokenizer knows a text, or the special token with which it begins."""
        head = re.match(r"<\|[^|>]*\|?>", marker)
        return any(marker in text for text in texts) or (marker if head is None else head[0]) in added

    thought = next((one for one in _THOUGHTS if is_known(one.open[0])), None)
    calls = next((syntax for evidence, syntax in _CALLS if any(map(is_known, evidence))), None)
    return None if thought is None and calls is None else ResponseSyntax(thought, calls)


# ------------------------------------------------------------------------ templates
def _template_format(template: Mapping[str, Any]) -> ResponseSyntax:
    """The format of a tokenizer's `response_template`, whose patterns count by the text that they contain."""
    fields: Mapping[str, Any] = template.get("fields", {})
    thought = next(
        (fields[name] for name in ("reasoning_content", "thinking", "reasoning") if name in fields), None
    )
    calls, content = fields.get("tool_calls"), fields.get("content", {})
    return ResponseSyntax(
        None
        if thought is None or not _markers(thought, "close")  # its end could not be told
        else ThoughtMarkers(_markers(thought, "open"), _markers(thought, "close"), reopens=True),
        None if calls is None else _template_calls(calls),
        _markers(content, "open") + _markers(content, "close"),
    )


def _markers(field: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The texts that open or close a field."""
    given = field.get(name)
    if given is not None:
        return (given,) if isinstance(given, str) else tuple(given)
    pattern = field.get(f"{name}_pattern")
    return () if pattern is None else tuple(_literals(pattern))


def _literals(pattern: str) -> Iterator[str]:
    """The longest text in each option of a pattern that is only text."""
    options = re.search(r"\(\?:((?:[^()\\]|\\.)*\|(?:[^()\\]|\\.)*)\)", pattern)
    for option in re.split(r"(?<!\\)\|", options[1]) if options else [pattern]:
        runs = re.split(r"\\[sSwWdDbB][*+?]*|\((?:[^()\\]|\\.)*\)[*+?]*|\[[^\]]*\][*+?]*|\.[*+?]*", option)
        yield max((re.sub(r"\\(.)", r"\1", run) for run in runs), key=len)


def _template_calls(field: Mapping[str, Any]) -> CallSyntax:
    open_markers, close = _markers(field, "open"), _markers(field, "close")
    pattern = field.get("open_pattern")
    options = field.get("content_args", {})
    # What a pattern has behind its text, as the name of a function, is part of the body.
    rest = None if pattern is None else _rest_of_pattern(pattern, open_markers[0])
    body = None if not rest else rf"\s*{rest}(?P<arguments>.*)"
    return CallSyntax(
        open_markers, close, body=body, argument=options.get("tag_pattern"),
        is_relaxed=bool(options.get("unquoted_keys")),
    )  # fmt: skip


def _rest_of_pattern(pattern: str, text: str) -> str:
    escaped = re.escape(text)
    for form in (text, escaped, escaped.replace("\\_", "_").replace("\\-", "-")):
        if form in pattern:
            return pattern.partition(form)[2].removeprefix(r"\s*")
    return ""
