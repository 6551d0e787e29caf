"""The chat template of a tokenizer: conversations as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from descant.serve.api_errors import ApiError
from descant.serve.template_process import TemplateError, TemplateProcesses, UnreadVariable

__all__ = ["ChatTemplate"]

# Arguments of `apply_chat_template` itself, which template variables must not replace.
_RESERVED: Final = frozenset(
    {
        "chat_template",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
        "continue_final_message",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
    }
)


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
                raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
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
            raise ApiError(400, message, param="messages", code="invalid_value") from None

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
        name: [str(one) for one in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokens.items()
    }
