"""Prompts of requests as token ids: texts, ids, and conversations through the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from descant.api.chat_prompt import tool_prompt
from descant.serve.api_errors import ApiError
from descant.serve.chat_template import ChatTemplate
from descant.serve.schema.chat import ChatMessage, MessageToolCall, Tool

__all__ = ["PromptEncoder", "PromptRoom", "too_long_error"]

_PIECE_CHARS: Final = 16 * 2**10  # of a long text that is encoded at once to see how long it is
_MAX_CHARS: Final = 4  # of a token, on average, up to which a text is encoded without looking
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "probe_7391", "description": "A probe.", "parameters": {"type": "object"}},
}


class PromptRoom(NamedTuple):
    """How much of a prompt is used."""

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
    for name in ("name", "tool_call_id", "reasoning_content"):
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
        message = "the `arguments` of a tool call must be a JSON object as text"
        raise ApiError(400, message, param="messages", code="invalid_value")
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
        raise ApiError(400, message, param="continue_final_message", code="invalid_value")
    return text[: position + len(last)]


def too_long_error(limit: int, num_tokens: int | None = None) -> ApiError:
    """The error of a prompt of too many tokens; None: it was not encoded to its end."""
    got = "more" if num_tokens is None else num_tokens
    message = f"the prompt must have at most {limit} tokens, it has {got}: shorten it"
    return ApiError(400, message, param="prompt", code="context_length_exceeded")


def _prompt_error(message: str) -> ApiError:
    return ApiError(400, message, param="prompt", code="invalid_value")
