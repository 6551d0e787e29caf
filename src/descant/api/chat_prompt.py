"""The prompt of a conversation: its system prompt, its tools and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from descant.decoding.grammars.json_schema import CALL_BEGIN, CALL_END
from descant.errors import InputError

Message = Mapping[str, Any]


def user_messages(text: str, system: str | None = None) -> list[Message]:
    """A conversation of one user message, with an optional system prompt."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The model inputs [1, L] of a text, or of a conversation with tools."""
    if isinstance(prompt, str) and not _is_encodable(prompt):
        raise InputError("prompt", "must hold whole characters", prompt, "leave lone surrogates out")
    ids = (
        tokenizer(prompt)["input_ids"]
        if isinstance(prompt, str)
        else _apply_chat_template(tokenizer, prompt, tools)
    )
    if not ids:
        raise InputError("prompt", "must have at least one token", prompt)
    input_ids = torch.tensor([ids])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def require_chat_template(tokenizer: Any, name: str) -> None:
    """Raise InputError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        advice = "use `descant generate` without --chat, or a model tuned for conversations"
        raise InputError("model", "must have a chat template in its tokenizer", name, advice)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _apply_chat_template(
    tokenizer: Any, messages: Sequence[Any], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(
                "messages", 'must hold objects such as {"role": "user", "content": "..."}', message
            )
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            return_dict=True,
        )
    except Exception as error:  # a template is a program that may raise anything
        raise InputError(
            "messages", f"must fit the model's chat template ({error})", list(messages)
        ) from error
    ids: list[int] = encoded["input_ids"]
    return ids


# In the words of Hermes' format, whose tags the calls have.
_TOOL_PROMPT: Final = f"""\
You may call functions to answer the user. These are the functions, each a JSON object:
<tools>
%s
</tools>
To call a function, write a JSON object with its name and arguments between these tags:
{CALL_BEGIN}{{"name": "function", "arguments": {{}}}}{CALL_END}"""


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that shows tools to a model whose chat template does not."""
    return _TOOL_PROMPT % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


@dataclass(frozen=True)
class ChatPrompt:
    """Turns the messages of a conversation into model inputs."""

    tokenizer: Any
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form

    @cached_property
    def template_has_tools(self) -> bool:
        """Whether the chat template shows tools; many ignore them without an error."""
        message = user_messages("?")
        with_tools, without = (encode_prompt(self.tokenizer, message, tools) for tools in (self.tools, ()))
        return bool(with_tools["input_ids"].tolist() != without["input_ids"].tolist())

    @cached_property
    def system_text(self) -> str | None:
        """The system prompt, with the tools if the chat template does not show them."""
        if not self.tools or self.template_has_tools:
            return self.system
        tools = tool_prompt(self.tools)
        return tools if self.system is None else f"{self.system}\n\n{tools}"

    def encode(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The model inputs [1, L] of messages after the system prompt."""
        system = [] if self.system_text is None else [{"role": "system", "content": self.system_text}]
        return encode_prompt(self.tokenizer, [*system, *messages], self.tools)
