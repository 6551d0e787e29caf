"""Prompts of requests as token ids, and the processes that render chat templates."""

from __future__ import annotations

import contextlib
import json
import queue
import select
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from descant.api.chat_prompt import tool_prompt
from descant.serve.bodies import ChatMessage, MessageToolCall, Tool
from descant.serve.http.errors import ApiError, invalid_value
from descant.serve.model import template_worker

NUM_PROCESSES: Final = 2
_HEAD: Final = 8


class TemplateError(Exception):
    """A template that cannot be rendered; the text says why."""


class UnreadVariable(Exception):
    """A variable that the template does not read; the text is its name."""


class _ProcessEnded(Exception):
    """The process has ended or takes too long."""


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """The most that one text may cost."""

    cpu_seconds: float = 0.5
    wall_seconds: float = 20.0  # on a machine with much else to do, processor time comes slowly
    max_memory: int = 512 * 2**20  # of the address space of a process
    max_message: int = 64 * 2**20  # bytes of the messages and their variables
    max_chars: int = 16 * 2**20  # of the text


class _TemplateProcess:
    """One process; starts with its first text."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, body: bytes) -> dict[str, Any]:
        """The answer to a message; raises if the process ends instead."""
        limits = self._limits
        try:
            process = self._process or self._start()
            answer = _exchange(process, body, limits.wall_seconds, 8 * limits.max_chars)
        except _ProcessEnded:
            self.close()
            raise
        found: dict[str, Any] = json.loads(answer)
        if found.get("is_spent"):
            self.close()
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", template_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/" if sys.platform != "win32" else None,
            env={},  # the keys of the server are in its own
            start_new_session=True,  # Ctrl-C is for the server, which ends its requests first
        )
        self._process = process
        limits = self._limits
        options = {
            "path": [folder for folder in sys.path if folder],
            "cpu_seconds": limits.cpu_seconds,
            "max_memory": limits.max_memory,
            "max_message": limits.max_message,
            "max_chars": limits.max_chars,
        }
        _exchange(process, json.dumps(options).encode(), 60.0, 2**20)
        return process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()


def _exchange(process: subprocess.Popen[bytes], body: bytes, seconds: float, max_bytes: int) -> bytes:
    """Send a message and wait for the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    end = time.monotonic() + seconds
    try:
        # The process reads a whole message before it does anything, so this does not wait for a template.
        rest = memoryview(len(body).to_bytes(_HEAD, "big") + body)
        while rest:
            rest = rest[process.stdin.write(rest) or 0 :]
        size = int.from_bytes(_read(process.stdout, _HEAD, end), "big")
        if size > max_bytes:
            raise _ProcessEnded
        return _read(process.stdout, size, end)
    except (OSError, ValueError):  # a closed file is a ValueError
        raise _ProcessEnded from None


def _read(stream: Any, size: int, end: float) -> bytes:
    parts = []
    while size:
        if not select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
            raise _ProcessEnded
        part = stream.read(min(size, 2**20))
        if not part:
            raise _ProcessEnded
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class TemplateProcesses:
    """A few processes, which threads share."""

    def __init__(self, count: int = NUM_PROCESSES, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._all = [_TemplateProcess(self._limits) for _ in range(count)]
        self._idle: queue.LifoQueue[_TemplateProcess] = queue.LifoQueue()
        for process in self._all:
            self._idle.put(process)

    def render(self, template: str, variables: dict[str, Any], needed: Collection[str] = ()) -> str:
        """The text of a template; raises where it has none, costs too much, or does not read all `needed`."""
        try:
            body = json.dumps({"template": template, "variables": variables}).encode()
        except RecursionError:
            raise TemplateError("the messages are nested too deeply") from None
        if len(body) > self._limits.max_message:
            raise TemplateError("the messages are too long")
        process = self._idle.get()
        try:
            found = process.render(body)
        except _ProcessEnded:
            raise TemplateError("it takes too long, or too much memory") from None
        finally:
            self._idle.put(process)
        if "text" not in found:
            raise TemplateError(found["error"])
        for name in needed:
            if name in found["unread"]:
                raise UnreadVariable(name)
        return str(found["text"])

    def close(self) -> None:
        """End all processes, also those that render."""
        for process in self._all:
            process.close()


# Arguments of `apply_chat_template` itself, which template variables must not replace.
_RESERVED: Final = frozenset((
    "chat_template", "conversation", "conversations", "messages", "tools", "documents", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "processor_kwargs", "continue_final_message", "add_generation_prompt", "bos_token",
    "eos_token", "pad_token", "unk_token",
))  # fmt: skip


@dataclass(frozen=True)
class ChatTemplate:
    """A template of the model or of the server's operator, rendered in processes of its own."""

    tokenizer: Any
    source: str | None = None  # None: the tokenizer's own
    processes: TemplateProcesses = field(default_factory=TemplateProcesses)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, source: str | None = None) -> ChatTemplate | None:
        """The template of a tokenizer, or `source` in its place; None: there is none."""
        if source is None and not getattr(tokenizer, "chat_template", None):
            return None
        return cls(tokenizer, source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        refuse_unread: bool = False,
    ) -> str:
        """The text of a conversation, as the tokenizer's `apply_chat_template` has it.

        `refuse_unread`: raise for variables that the template does not read.
        """
        given = dict(variables or {})
        for name in given:
            if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
                message = f"`chat_template_kwargs` must not set {name[:80]!r}"
                raise invalid_value("chat_template_kwargs", message)
        values = {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **_special_tokens(self.tokenizer),
            **given,
        }
        try:
            return self.processes.render(
                self._template(tools is not None), values, list(given) * refuse_unread
            )
        except UnreadVariable as error:
            name = str(error)
            message = f"`{name}` has no effect: the model's chat template does not read it. Leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter") from None
        except TemplateError as error:
            message = f"the messages must fit the model's chat template: {error}"
            raise invalid_value("messages", message) from None

    def _template(self, has_tools: bool) -> str:
        """The template; a tokenizer may have one of its own for tools."""
        found = self.source or self.tokenizer.chat_template
        if isinstance(found, str):
            return found
        names = ("tool_use", "default") if has_tools else ("default",)
        template = next((found[name] for name in names if name in found), None)
        if template is None:
            raise TemplateError("it has no default")
        return str(template)

    def close(self) -> None:
        """End its processes."""
        self.processes.close()


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """The special tokens by their names, as texts."""
    tokens = getattr(tokenizer, "special_tokens_map", {})
    return {
        name: [str(text) for text in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokens.items()
    }


_PIECE_CHARS: Final = 16 * 2**10  # of a long text that is encoded at once to see how long it is
_MAX_CHARS: Final = 4  # of a token, on average, up to which a text is encoded without looking
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "probe_7391", "description": "A probe.", "parameters": {"type": "object"}},
}


class PromptRoom(NamedTuple):
    """The part of a prompt that is used."""

    limit: int | None = None  # tokens beyond which it is refused; None: there is no limit
    kept: int | None = None  # its last tokens, whatever its length; None: it is not cut

    def check(self, num_tokens: int) -> None:
        """Raise for a prompt of too many tokens."""
        if self.kept is None and self.limit is not None and num_tokens > self.limit:
            raise too_long_error(self.limit, num_tokens)


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts with a tokenizer and its chat template."""

    tokenizer: Any
    vocab_size: int
    template: ChatTemplate | None

    def text(
        self, text: str, room: PromptRoom | None = None, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The tokens of a text; one without `room` is refused before it is encoded whole."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _prompt_error("the prompt must hold whole characters, without lone surrogates") from None
        if room is not None and room.kept is not None:
            text = self._end_of(text, room.kept)
        elif room is not None and room.limit is not None:
            self._check_length(text, room.limit)
        ids = self._encode(text, add_special_tokens)
        if not ids:
            raise _prompt_error("the prompt must have at least one token")
        if room is not None:
            room.check(len(ids))
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self.tokenizer(
            text, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def _sure_tokens(self, piece: str) -> int:
        """Tokens that a text has at least where this is a piece of it: its cuts may divide tokens."""
        return len(self._encode(piece, False)) // 2

    def _check_length(self, text: str, limit: int) -> None:
        """Raise for a long text once some of its pieces have more than `limit` tokens."""
        if len(text) <= max(_PIECE_CHARS, _MAX_CHARS * limit):
            return
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            count += self._sure_tokens(text[start : start + _PIECE_CHARS])
            if count > limit:
                raise too_long_error(limit)

    def _end_of(self, text: str, num_tokens: int) -> str:
        """The end of a text that has its last tokens, and so many before them that the cut changes none."""
        start, count = len(text), 0
        while start > 0 and count <= num_tokens:
            end, start = start, max(0, start - _PIECE_CHARS)
            count += self._sure_tokens(text[start:end])
        return text[start:]

    def ids(self, ids: Sequence[int], room: PromptRoom | None = None) -> list[int]:
        """Token ids, checked."""
        if room is not None:
            room.check(len(ids))
        if not ids:
            raise _prompt_error("the prompt must have at least one token")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise _prompt_error(f"the prompt's tokens must be from 0 to {self.vocab_size - 1}")
        return list(ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def chat_text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation with tools as a text that has its special tokens."""
        if self.template is None:
            message = "this model has no chat template: use /v1/completions"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        plain = [_plain_message(message) for message in messages]
        functions = [tool.model_dump(exclude_none=True) for tool in tools]
        if functions and not self._template_has_tools:
            plain = _with_tool_prompt(plain, functions)
        text = self.template.render(
            plain,
            functions or None,
            variables=variables,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            refuse_unread=True,
        )
        if continue_final_message:
            text = _cut_after_final_message(text, plain)
        return text

    @cached_property
    def _template_has_tools(self) -> bool:
        """Whether the chat template shows tools; many ignore them without an error."""
        assert self.template is not None
        messages = [{"role": "user", "content": "?"}]
        try:
            return "probe_7391" in self.template.render(messages, [_PROBE_TOOL])
        except ApiError:
            return False


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates expect it."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: MessageToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _parse_arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _parse_arguments(text: str) -> Any:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid_value("messages", "the `arguments` of a tool call must be a JSON object as text")
    return arguments


def _with_tool_prompt(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with the tools in their system prompt."""
    text = tool_prompt(tools)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text up to the end of the last message, which the model continues."""
    last = str(messages[-1]["content"]).strip()
    position = text.rfind(last) if last else -1
    if position < 0:
        message = "`continue_final_message` needs a last message that the chat template writes as it is"
        raise invalid_value("continue_final_message", message)
    return text[: position + len(last)]


def too_long_error(limit: int, num_tokens: int | None = None) -> ApiError:
    """The error of a prompt of too many tokens; None: it was not encoded to its end."""
    got = "more" if num_tokens is None else num_tokens
    message = f"the prompt must have at most {limit} tokens, it has {got}: shorten it"
    return ApiError(400, message, param="prompt", code="context_length_exceeded")


def _prompt_error(message: str) -> ApiError:
    return invalid_value("prompt", message)
