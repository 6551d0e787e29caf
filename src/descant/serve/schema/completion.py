"""The bodies of `/v1/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from descant.serve.api_errors import ApiError
from descant.serve.schema.chat import ChatMessage, Tool
from descant.serve.schema.common import Body, GenerationBody, Items

__all__ = ["CompletionBody", "DetokenizeBody", "TokenizeBody"]


class CompletionBody(GenerationBody):
    """Prompts to continue: texts, or token ids."""

    model_config = ConfigDict(extra="allow")

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(union_mode="left_to_right")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=100)
    suffix: Literal[""] = ""
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def parameters(self) -> dict[str, Any]:
        """The generation parameters of the declared fields, by their names in `GenerationConfig`."""
        values = super().parameters()
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
        if self.echo and self.max_tokens == 0:
            values["max_new_tokens"] = 1  # the least that a request generates; it is not returned
        return values


class TokenizeBody(Body):
    """A text or a conversation, whose tokens are returned."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "either `prompt` or `messages` must be given", param="prompt")
        form, others = ("messages", {"add_special_tokens"})
        if self.prompt is not None:
            form, others = "prompt", {"tools", "add_generation_prompt", "chat_template_kwargs"}
        for name in sorted(others & self.model_fields_set):
            raise ApiError(400, f"`{name}` has no use with `{form}`: leave it out", param=name)
        return self


class DetokenizeBody(Body):
    """Tokens whose text is returned."""

    model: str | None = None
    tokens: Items[int]
