"""Conversations as JSON files: messages, system prompt and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from descant.cli.chat.conversation import Conversation
from descant.cli.options import SECRET_FIELDS, cli_fields
from descant.core.atomic_file import write_bytes
from descant.errors import InputError

__all__ = ["load_transcript", "save_transcript"]

_VERSION: Final = 1
_ROLES: Final = ("system", "user", "assistant", "tool")
_MAX_BYTES: Final = 64 * 2**20


def save_transcript(conversation: Conversation, path: Path, *, overwrite: bool = False) -> None:
    """Write a conversation to a new file that only its owner can read; a watermark key is left out."""
    data = {
        "version": _VERSION,
        "model": str(getattr(conversation.model, "name_or_path", "")),
        "system": conversation.prompt.system,
        "settings": {name: value for name, value in conversation.values.items() if name not in SECRET_FIELDS},
        "messages": [dict(message) for message in conversation.messages],
    }
    text = json.dumps(data, indent=2, ensure_ascii=False, default=_plain) + "\n"
    try:
        write_bytes(path, text.encode("utf-8", "backslashreplace"), private=True, exclusive=not overwrite)
    except FileExistsError:
        do = "give another name, or /save --overwrite FILE"
        raise InputError("FILE", "must be new", str(path), do) from None
    except OSError as error:
        raise InputError(
            "FILE", f"must be a file that can be written ({error.strerror})", str(path)
        ) from None


def load_transcript(conversation: Conversation, path: Path) -> None:
    """Continue the conversation of a file with its system prompt and settings; an error changes nothing."""
    data = _read(path)
    messages, settings, system = data.get("messages"), data.get("settings", {}), data.get("system")
    if not isinstance(messages, list) or not all(_is_message(one) for one in messages):
        raise _format_error(path, 'its "messages" are objects with "role" and "content"')
    if not isinstance(settings, dict) or not settings.keys() <= cli_fields().keys():
        raise _format_error(path, 'its "settings" are generation parameters')
    if not (system is None or isinstance(system, str)):
        raise _format_error(path, 'its "system" is text or null')
    secrets = {name: value for name, value in conversation.values.items() if name in SECRET_FIELDS}
    conversation.replace_values({**settings, **secrets})
    conversation.set_system(system)
    conversation.replace_messages(messages)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError("FILE", f"must be a file that can be opened ({error.strerror})", str(path)) from None
    if len(content) > _MAX_BYTES:
        raise InputError("FILE", f"must have at most {_MAX_BYTES} bytes", str(path))
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise _format_error(path, f'it is a JSON object of "version" {_VERSION}')
    return data


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in _ROLES
        and all(isinstance(value, str) for value in message.values())
        and "content" in message
    )


def _plain(value: object) -> object:
    """A mapping as JSON's object."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _format_error(path: Path, reason: str) -> InputError:
    return InputError("FILE", f"must be written by /save: {reason}", str(path))
