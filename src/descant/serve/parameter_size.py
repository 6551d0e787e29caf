"""Bounds on the values of parameters, beyond which checking them costs too much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from descant.serve.api_errors import ApiError

__all__ = ["check_size"]

_MAX_VALUES: Final = 4096  # in lists and objects of any depth
_MAX_TEXTS: Final = 64  # each is matched against the whole vocabulary
_MAX_TEXT_CHARS: Final = 1024
_MAX_FORCED_WORDS: Final = 32  # the time of a step grows with the square of their number
# Of a watermark: every step computes something for each key, and remembers that many contexts.
_WATERMARK_LIMITS: Final = {"keys": 64, "context_history_size": 65_536, "ngram_len": 64, "depth": 64}


def check_size(name: str, value: Any) -> None:
    """Raise for very many values, very long texts, or texts that are no Unicode; grammars have own limits."""
    if name == "grammar":
        return
    texts, count, pending = 0, 0, [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            pending += [*one.keys(), *one.values()] if name != "logit_bias" else one.values()
        elif isinstance(one, list | tuple):
            pending += one
        else:
            count += 1
            texts += isinstance(one, str)
            if isinstance(one, str):
                _check_text(name, one)
        if count + len(pending) > _MAX_VALUES or (texts > _MAX_TEXTS and name != "sequence_bias"):
            limit = _MAX_TEXTS if texts > _MAX_TEXTS else _MAX_VALUES
            raise _size_error(name, f"must have at most {limit} values")
    if name == "force_words_ids" and isinstance(value, list) and len(value) > _MAX_FORCED_WORDS:
        raise _size_error(name, f"must have at most {_MAX_FORCED_WORDS} items")
    if name == "watermarking_config" and isinstance(value, Mapping):
        _check_watermark(name, value)


def _check_text(name: str, text: str) -> None:
    if len(text) > _MAX_TEXT_CHARS:
        raise _size_error(name, f"must have texts of at most {_MAX_TEXT_CHARS} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _size_error(name, "must hold whole characters, without lone surrogates") from None


def _check_watermark(name: str, settings: Mapping[str, Any]) -> None:
    for part, limit in _WATERMARK_LIMITS.items():
        value = settings.get(part)
        size = len(value) if isinstance(value, list) else value
        if isinstance(size, int) and size > limit:
            raise _size_error(name, f"must have at most {limit} as `{part}`")


def _size_error(name: str, must: str) -> ApiError:
    return ApiError(400, f"`{name}` {must}", param=name, code="invalid_value")
