"""Prompts given as text or messages in place of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.api.prompt import encode_prompt
from descant.errors import InputError

__all__ = ["encode_texts", "is_text", "with_texts"]


def is_text(inputs: Any) -> bool:
    """Whether prompts are a text, messages, or a list of texts or of lists of messages."""
    return isinstance(inputs, str) or (isinstance(inputs, list | tuple) and len(inputs) > 0)


def encode_texts(name: str, inputs: Any, tokenizer: Any) -> dict[str, Tensor]:
    """The texts or messages of argument `name` as ids and mask [B, L], padded on the right."""
    prompts = [inputs] if isinstance(inputs, str) or _is_conversation(inputs) else list(inputs)
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_conversation(prompt):
            must = "must hold only texts, or only lists of messages, when it is a list"
            raise InputError(name, must, prompt, "pass token ids as a tensor")
        if tokenizer is None:
            do = "pass the model's tokenizer"
            raise InputError("tokenizer", f"must be given when `{name}` is text", None, do)
        if not isinstance(prompt, str) and not getattr(tokenizer, "chat_template", None):
            must = "must have a chat template when prompts are messages"
            raise InputError("tokenizer", must, type(tokenizer).__name__, "pass texts")
    rows = [_encode(name, prompt, tokenizer) for prompt in prompts]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def with_texts(inputs: Any, tokenizer: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs, with texts or messages encoded."""
    encoded = encode_texts("inputs", inputs, tokenizer)
    for name in encoded:
        if others.get(name) is not None:
            raise InputError(name, "must not be given with texts as `inputs`", others[name])
    return {**others, **encoded}


def _is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _encode(name: str, prompt: str | Sequence[Any], tokenizer: Any) -> Tensor:
    """The token ids of one prompt [L]."""
    if isinstance(prompt, str) and not len(tokenizer(prompt)["input_ids"]):
        raise InputError(name, "must hold texts of at least one token", prompt)
    ids: Tensor = encode_prompt(tokenizer, prompt)["input_ids"][0]
    return ids
