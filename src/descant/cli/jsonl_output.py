"""Rows of `descant generate --output`, and the continuation of a file that an interrupted run left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TextIO

from descant.cli import terminal
from descant.cli.jsonl_lines import RUN_KEY, InputLine, echo_line, parse_line
from descant.config.generation_config import GenerationConfig
from descant.config.grammar_spec import GrammarSpec
from descant.core.atomic_file import lock_file
from descant.decoding.watermark.schemes import as_watermarking_config
from descant.decoding.watermark.schemes.keys import fingerprint as key_fingerprint
from descant.errors import DescantError, InputError
from descant.models.fingerprint import fingerprint as model_fingerprint
from descant.recipes.recipe import Recipe

__all__ = ["JsonlFile", "JsonlStream", "RunDigest", "open_jsonl_file", "other_run_error"]

_DIGEST_BYTES: Final = 8
_WATERMARK: Final = "watermarking_config"
_GRAMMAR: Final = "grammar"


class RunDigest:
    """Digests of lines with everything that decides their results: the model, the options, the recipe.

    A watermark key is represented by its fingerprint, which does not identify it.
    """

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        parts = {
            "model": model_fingerprint(model),
            "defaults": _plain_value(GenerationConfig.from_transformers(model.generation_config)),
            "template": str(getattr(tokenizer, "chat_template", None)),
            **{name: _plain_value(value) for name, value in settings.items()},
        }
        self._prefix = json.dumps(parts, sort_keys=True, default=repr).encode()

    def of_line(self, line: InputLine) -> str:
        """The digest of one line."""
        try:
            data: Any = dict(parse_line(line.data))
        except DescantError:
            content = line.data
        else:
            public = {**echo_line(data), _WATERMARK: _plain_watermark(data.get(_WATERMARK))}
            if _GRAMMAR in public:
                public[_GRAMMAR] = _plain_grammar(public[_GRAMMAR])
            content = json.dumps(public, sort_keys=True).encode()
        digest = hashlib.blake2b(self._prefix, digest_size=_DIGEST_BYTES, person=b"descant run")
        digest.update(content)
        return digest.hexdigest()


@dataclass(frozen=True)
class FinishedRow:
    """A row that an earlier run has written."""

    run: str
    failed: bool


class JsonlStream:
    """Rows written to a pipe or a terminal."""

    finished: tuple[FinishedRow, ...] = ()
    has_digests = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()

    def start(self) -> None:
        """Nothing: a stream cannot be continued."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a row; on a terminal hidden characters are escaped, which JSON allows."""
        line = _format_line(record)
        self._stream.write(terminal.escape_json(line) if self.is_terminal else line)

    def flush(self) -> None:
        """Hand the rows to the system."""
        self._stream.flush()


class JsonlFile:
    """Rows of a file with digests of what they were made from; `finished` are those of an earlier run."""

    has_digests = True
    is_terminal = False

    def __init__(self, file: BinaryIO, path: str, overwrite: bool) -> None:
        self._file, self._end = file, 0
        rows = []
        if not overwrite:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # the writer was killed within this row
                rows.append(_parse_row(line, number, path))
                self._end += len(line)
        self.finished = tuple(rows)

    def start(self) -> None:
        """Go to the end of the finished rows; an incomplete last row is removed."""
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a row."""
        self._file.write(_format_line(record).encode())

    def flush(self) -> None:
        """Hand the rows to the system: they outlive this process."""
        self._file.flush()


@contextlib.contextmanager
def open_jsonl_file(path: str, overwrite: bool) -> Iterator[JsonlFile | JsonlStream]:
    """The output file of a run; a device or a pipe is a stream."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            with open(path, "w", encoding="utf-8", newline="\n") as stream:
                yield JsonlStream(stream)
            return
    except OSError as error:
        raise InputError("output", f"must be a file that can be opened ({error.strerror})", path) from None
    with os.fdopen(descriptor, "r+b") as file:
        if lock_file(descriptor) is False:
            raise InputError("output", "must not be in use by another run", path, "wait for its end")
        output = JsonlFile(file, path, overwrite)
        yield output
        output.flush()
        os.fsync(descriptor)


def other_run_error(number: int, got: str) -> InputError:
    """The error for an output file that this run cannot continue."""
    must = f"must be new, or hold results of the same lines, model and options ({got} in line {number})"
    return InputError("output", must, "another file", "give --overwrite to start anew, or another file")


def _parse_row(line: bytes, number: int, path: str) -> FinishedRow:
    try:
        data = parse_line(line)
    except DescantError:
        data = {}
    if not isinstance(data.get(RUN_KEY), str):
        must = (
            f"must be new, or a file that `descant generate --output` wrote (line {number} is no row of it)"
        )
        raise InputError("output", must, path, "give --overwrite to start anew, or another file")
    return FinishedRow(data[RUN_KEY], "error" in data)


def _format_line(record: Mapping[str, Any]) -> str:
    """A record as a line, ASCII-escaped only if it cannot be encoded."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def _plain_value(value: Any) -> Any:
    """A setting as JSON values."""
    if isinstance(value, GenerationConfig):
        return _plain_value({name: getattr(value, name) for name in sorted(value.given)})
    if isinstance(value, Recipe):
        contents = None if value.contents is None else value.contents.digest
        return [value.name, value.kind, contents, _plain_value(dict(value.arguments))]
    if hasattr(value, "named_parameters"):
        return model_fingerprint(value)
    if isinstance(value, Mapping):
        plain = {_WATERMARK: _plain_watermark, _GRAMMAR: _plain_grammar}
        return {str(name): plain.get(name, _plain_value)(one) for name, one in value.items()}
    return value if isinstance(value, str | int | float | None) else repr(value)


def _plain_grammar(grammar: Any) -> str:
    """A grammar as text: the order of a schema's properties decides the results."""
    return grammar.text if isinstance(grammar, GrammarSpec) else json.dumps(grammar, default=repr)


def _plain_watermark(settings: Any) -> Any:
    """Watermark settings with the fingerprint of their key."""
    if settings is None:
        return None
    try:
        parsed = as_watermarking_config(settings)
    except (DescantError, TypeError, ValueError):
        return type(settings).__name__
    return [repr(parsed), key_fingerprint(parsed)]
