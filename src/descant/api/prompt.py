"""Prompts, text or conversations, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from descant.errors import InputError

__all__ = ["Message", "encode_prompt", "require_chat_template", "user_messages"]

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
