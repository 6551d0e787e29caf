"""Texts to look for a mark in: whole files, lines of JSON, or what a pipe brings."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from descant.errors import InputError

__all__ = ["TextSample", "read_samples"]

STDIO: Final = "-"
JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")  # files that are lines of JSON by their names


@dataclass(frozen=True)
class TextSample:
    """One text, as text or as token ids, and where it is from; or what is wrong with it."""

    file: str
    line: int | None = None  # of a file of lines
    completion_index: int | None = None  # of several completions in a line
    line_id: Any = None  # the line's own "id"
    text: str | None = None
    prompt: str | None = None  # of a text
    ids: tuple[int, ...] = ()
    prompt_length: int = 0  # how many of the ids are the prompt's
    error: InputError | None = None

    @property
    def name(self) -> str:
        """How a table calls it."""
        parts = ["standard input" if self.file == STDIO else self.file, self.line, self.completion_index]
        return ":".join(str(part) for part in parts if part is not None)

    @property
    def origin(self) -> dict[str, Any]:
        """What JSON says of it."""
        told = {"file": self.file, "line": self.line, "completion": self.completion_index, "id": self.line_id}
        return {name: value for name, value in told.items() if value is not None}


def read_samples(file: str, jsonl: bool) -> list[TextSample]:
    """The texts of a file or of standard input, which is one text unless it is lines of JSON."""
    whole = _read_text(file)
    if not jsonl and Path(file).suffix.lower() not in JSONL_SUFFIXES:
        # What an editor or `echo` adds at the end is no part of the text.
        return [_check_text(TextSample(file, text=whole.removesuffix("\n")))]
    found = []
    for number, line in enumerate(whole.split("\n"), 1):
        if line.strip():
            found += _line_samples(TextSample(file, number), line)
    return found


def _read_text(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == STDIO else Path(file).read_bytes()
        # With the line ends of all systems, which a model has but one of.
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline=None).read()
    except OSError as error:
        raise InputError("FILE", f"must be a file that can be opened ({error.strerror})", file) from None
    except UnicodeDecodeError as error:
        raise InputError("FILE", f"must be text in UTF-8 ({error.reason})", file) from None


def _line_samples(where: TextSample, line: str) -> list[TextSample]:
    """The texts of a line: its own, or those of its completions; or its error."""
    try:
        data = _parse_object(line)
        where = replace(where, line_id=data.get("id"))
        written = data.get("completions")
        if not isinstance(written, list):
            return [_parse_sample(where, data)]
        prompt = {"prompt": data["prompt"]} if isinstance(data.get("prompt"), str) else {}
        return [
            _parse_sample(replace(where, completion_index=place), {**prompt, **_require_object(part)})
            for place, part in enumerate(written, 1)
        ]
    except InputError as error:
        return [replace(where, error=error)]


def _parse_sample(where: TextSample, data: Mapping[str, Any]) -> TextSample:
    text, ids, prompt = data.get("text"), data.get("ids"), data.get("prompt")
    if (text is None) == (ids is None):
        raise InputError("text", 'must be given, or "ids"', "neither" if text is None else "both")
    if ids is not None:
        if not _is_token_list(ids):
            raise InputError("ids", "must be a list of token ids", ids)
        if prompt is None or (type(prompt) is int and 0 <= prompt <= len(ids)):
            return replace(where, ids=tuple(ids), prompt_length=prompt or 0)
        if not _is_token_list(prompt):
            must = "must be token ids, or how many of the ids are the prompt's,"
            raise InputError("prompt", f'{must} where there are "ids"', prompt)
        return replace(where, ids=(*prompt, *ids), prompt_length=len(prompt))
    if not isinstance(text, str):
        raise InputError("text", "must be text", text)
    if prompt is not None and not isinstance(prompt, str):
        raise InputError("prompt", "must be text, as the text is", prompt)
    sample = _check_text(replace(where, text=text, prompt=prompt))
    if sample.error is not None:
        raise sample.error
    return sample


def _check_text(sample: TextSample) -> TextSample:
    """The sample, wrong where its text has half a character, which no tokenizer takes."""
    try:
        f"{sample.text}{sample.prompt}".encode()
    except UnicodeEncodeError:
        error = InputError("text", "must hold whole characters", sample.text, "leave lone surrogates out")
        return replace(sample, error=error)
    return sample


def _parse_object(line: str) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("FILE", f"must hold a JSON object in each line ({error})", line) from None
    return _require_object(data)


def _require_object(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise InputError("FILE", "must hold a JSON object in each line", data)
    return data


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
