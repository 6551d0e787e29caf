"""The prompt of a conversation: its system prompt, its tools and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from descant.api.prompt import Message, encode_prompt, user_messages
from descant.decoding.grammars.tool_calls import CALL_BEGIN, CALL_END

__all__ = ["ChatPrompt", "tool_prompt"]

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
