"""A prompt: text or a conversation, as the token ids that a model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from descant.errors import InputError

__all__ = ["Message", "encode_prompt", "require_chat_template", "user_messages"]

Message = Mapping[str, Any]


def user_messages(text: str, system: str | None = None) -> list[Message]:
    """A conversation that begins with what the user says."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Message]) -> dict[str, Any]:
    """A model's inputs [1, L] for text, or for a conversation whose next turn is the model's."""
    if isinstance(prompt, str) and not _is_encodable(prompt):
        raise InputError("prompt", "must hold whole characters", prompt, "leave lone surrogates out")
    ids = (
        tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else _apply_chat_template(tokenizer, prompt)
    )
    if not ids:
        raise InputError("prompt", "must have at least one token", prompt)
    given = torch.tensor([ids])
    return {"input_ids": given, "attention_mask": torch.ones_like(given)}


def require_chat_template(tokenizer: Any, name: str) -> None:
    """Raise for a tokenizer that does not know how a conversation is written."""
    if not getattr(tokenizer, "chat_template", None):
        do = "use `descant generate` without --chat, or a model tuned for conversations"
        raise InputError("model", "must have a chat template in its tokenizer", name, do)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _apply_chat_template(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(
                "messages", 'must hold objects such as {"role": "user", "content": "..."}', message
            )
    try:
        made = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template is a program of the model's maker, and refuses in its own ways
        raise InputError(
            "messages", f"must fit the model's chat template ({error})", list(messages)
        ) from error
    ids: list[int] = made["input_ids"]
    return ids
