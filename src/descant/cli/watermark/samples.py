"""Texts for watermark detection: whole files, JSON lines, or standard input."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from descant.errors import InputError, Words

__all__ = ["TextSample", "read_samples"]

STDIO: Final = "-"
JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class TextSample:
    """One text, as text or token ids, with its origin; or the error of its line."""

    file: str
    line: int | None = None  # in a file of lines
    completion_index: int | None = None  # in a line with several completions
    line_id: Any = None  # the line's own "id"
    text: str | None = None
    prompt: str | None = None
    ids: tuple[int, ...] = ()
    prompt_length: int = 0  # number of ids that are the prompt
    error: InputError | None = None

    @property
    def name(self) -> str:
        """The name in a table."""
        parts = ["standard input" if self.file == STDIO else self.file, self.line, self.completion_index]
        return ":".join(str(part) for part in parts if part is not None)

    @property
    def origin(self) -> dict[str, Any]:
        """The origin as JSON values."""
        origin = {
            "file": self.file,
            "line": self.line,
            "completion": self.completion_index,
            "id": self.line_id,
        }
        return {name: value for name, value in origin.items() if value is not None}


def read_samples(file: str, jsonl: bool) -> list[TextSample]:
    """The texts of a file or of standard input: one text, or one per JSON line."""
    text = _read_text(file)
    if not jsonl and Path(file).suffix.lower() not in JSONL_SUFFIXES:
        # Drop the newline that an editor or `echo` adds.
        return [_check_text(TextSample(file, text=text.removesuffix("\n")))]
    samples = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            samples += _line_samples(TextSample(file, number), line)
    return samples


def _read_text(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == STDIO else Path(file).read_bytes()
        # Normalise line ends.
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline=None).read()
    except OSError as error:
        raise InputError("FILE", f"must be a file that can be opened ({error.strerror})", file) from None
    except UnicodeDecodeError as error:
        raise InputError("FILE", f"must be text in UTF-8 ({error.reason})", file) from None


def _line_samples(origin: TextSample, line: str) -> list[TextSample]:
    """The texts of a line: its text or completions; or its error."""
    try:
        data = _parse_object(line)
        origin = replace(origin, line_id=data.get("id"))
        completions = data.get("completions")
        if not isinstance(completions, list):
            return [_parse_sample(origin, data)]
        prompt = {"prompt": data["prompt"]} if isinstance(data.get("prompt"), str) else {}
        return [
            _parse_sample(replace(origin, completion_index=index), {**prompt, **_require_object(part)})
            for index, part in enumerate(completions, 1)
        ]
    except InputError as error:
        return [replace(origin, error=error)]


def _parse_sample(origin: TextSample, data: Mapping[str, Any]) -> TextSample:
    text, ids, prompt = data.get("text"), data.get("ids"), data.get("prompt")
    if (text is None) == (ids is None):
        raise InputError("text", 'must be given, or "ids"', Words("neither" if text is None else "both"))
    if ids is not None:
        if not _is_token_list(ids):
            raise InputError("ids", "must be a list of token ids", ids)
        if prompt is None or (type(prompt) is int and 0 <= prompt <= len(ids)):
            return replace(origin, ids=tuple(ids), prompt_length=prompt or 0)
        if not _is_token_list(prompt):
            requirement = "must be token ids, or how many of the ids are the prompt's,"
            raise InputError("prompt", f'{requirement} where there are "ids"', prompt)
        return replace(origin, ids=(*prompt, *ids), prompt_length=len(prompt))
    if not isinstance(text, str):
        raise InputError("text", "must be text", text)
    if prompt is not None and not isinstance(prompt, str):
        raise InputError("prompt", "must be text, as the text is", prompt)
    sample = _check_text(replace(origin, text=text, prompt=prompt))
    if sample.error is not None:
        raise sample.error
    return sample


def _check_text(sample: TextSample) -> TextSample:
    """The sample, with an error if its text has lone surrogates, which tokenizers do not accept."""
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
