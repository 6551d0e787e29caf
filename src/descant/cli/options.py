"""Command-line options for generation parameters, and the parsing of their values.

A field's type decides how it is written: a bool is a flag, nested data are JSON, lists of numbers and names
are separated by commas, and lists of text are repeated options, since text may contain commas. The word
`none` switches a field off, as None does in Python; for a field that takes any text, empty text does.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from descant.config.generation_config import FIELDS, UNSUPPORTED, Field
from descant.config.validation import LENGTH_PAIRS
from descant.errors import ConfigError

__all__ = [
    "NONE_WORD",
    "cli_fields",
    "option_name",
    "option_names",
    "option_parameters",
    "override_values",
    "parse_options",
    "parse_value",
    "reject_tensor_fields",
]

PLAIN_TYPES: Final = frozenset({"bool", "int", "float", "str", "list", "tuple", "dict"})
BOOL_WORDS: Final = {"true": True, "false": False}
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
ESCAPE_PATTERN: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.|$)", re.DOTALL)
NONE_WORD: Final = "none"
# Fields that hold secrets, which process lists and shell histories would reveal.
SECRET_FIELDS: Final = frozenset({"watermarking_config"})
# Fields that return tensors, which text output cannot show.
TENSOR_FIELDS: Final = tuple(
    n for n, field in FIELDS.items() if field.group == "output" and field.type == "bool"
)


def cli_fields() -> dict[str, Field]:
    """The fields that have an option: supported, no objects, no secrets."""
    return {
        name: field
        for name, field in FIELDS.items()
        if name not in {*UNSUPPORTED, *SECRET_FIELDS}
        and set(re.findall(r"[A-Za-z]+", field.type)) <= PLAIN_TYPES
    }


def option_name(field_name: str) -> str:
    """The option of a field, as typed."""
    return "--" + field_name.replace("_", "-")


def option_names(field: Field) -> tuple[str, ...]:
    """The option of a field, as typer declares it."""
    name = option_name(field.name)
    return (f"{name}/--no-{name[2:]}",) if field.type == "bool" else (name,)


def option_parameters() -> Iterator[inspect.Parameter]:
    """One keyword parameter per field, for typer."""
    for name, field in cli_fields().items():
        kind: Any = bool if field.type == "bool" else list[str] if _is_list(field) else str
        option = typer.Option(
            *option_names(field),
            help=_help_text(field),
            rich_help_panel=field.group.capitalize(),
            metavar="" if kind is bool else _metavar(field),
            show_default=False,
        )
        annotation: Any = Annotated[kind | None, option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def parse_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the given options, for GenerationConfig."""
    values = {}
    for name, raw in arguments.items():
        if raw is None or raw == []:
            continue
        if isinstance(raw, bool):
            values[name] = raw
        else:
            values[name] = parse_value(FIELDS[name], [raw] if isinstance(raw, str) else list(raw))
    return values


def parse_value(field: Field, texts: Sequence[str]) -> Any:
    """Parse the value of a field from its texts; None switches it off.

    A text that cannot be parsed is returned unchanged: the config then raises with what it must be.
    """
    inner, outer = _field_types(field)
    if texts == ["" if _is_text_list(field) or (outer == ["str"] and not inner) else NONE_WORD]:
        return [] if _is_text_list(field) and not outer else None
    if _is_nested(field):
        return _parse_json(field, texts[-1])
    if not _is_list(field):
        return _convert(texts[-1], outer)
    if _is_text_list(field):
        items = [_unescape(field, text) for text in texts]
    elif len(texts) == 1 and texts[0].startswith("["):
        return _parse_json(field, texts[0])
    else:
        items = [part.strip() for text in texts for part in text.split(",") if text]
    if len(items) != 1:
        return [_convert(item, inner) for item in items]
    value = _convert(items[0], inner)
    if type(value).__name__ in inner:
        return value if type(value).__name__ in outer else [value]
    return _convert(items[0], outer)


def override_values(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Values with overrides; a total length overrides a number of new tokens, too."""
    overridden = {new for new, total in LENGTH_PAIRS if total in overrides and new not in overrides}
    return {**{name: value for name, value in values.items() if name not in overridden}, **overrides}


def reject_tensor_fields(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for fields that return tensors."""
    for name in TENSOR_FIELDS:
        if values.get(name):
            advice = "leave it out; `logprobs` with --output writes probabilities"
            raise ConfigError(name, "has no use where text is written", values[name], advice)


def _field_types(field: Field) -> tuple[list[str], list[str]]:
    """The types within a field's lists, and the types without a list."""
    inner = [word for part in re.findall(r"list\[([^]]*)\]", field.type) for word in part.split(" | ")]
    outer = re.sub(r"list\[[^]]*\]", "", field.type)
    return inner, [word for word in outer.split(" | ") if word.strip()]


def _is_nested(field: Field) -> bool:
    return bool(re.search(r"dict|tuple|list\[list", field.type))


def _is_list(field: Field) -> bool:
    return "list[" in field.type and not _is_nested(field)


def _is_text_list(field: Field) -> bool:
    """Whether a field lists arbitrary text, which may contain commas."""
    return "str" in _field_types(field)[0] and field.type != "list[str]"


def _convert(text: str, words: Sequence[str]) -> Any:
    """Convert a text to the first type that fits; returns the text itself if none does."""
    if "bool" in words and text.lower() in BOOL_WORDS:
        return BOOL_WORDS[text.lower()]
    for word, kind in (("int", int), ("float", float)):
        if word in words:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _parse_json(field: Field, text: str) -> Any:
    try:
        return None if text == NONE_WORD else json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(field.name, "must be JSON", text, f"write {field.kind.expected} as JSON") from None


def _unescape(field: Field, text: str) -> str:
    """Replace backslash escapes."""

    def replace(match: re.Match[str]) -> str:
        code = match[1]
        if code not in ESCAPES and len(code) != 5:
            advice = "write \\\\ for a backslash"
            raise ConfigError(
                field.name, "must hold no escape but \\n, \\t, \\r, \\uXXXX, \\\\", text, advice
            )
        return ESCAPES.get(code) or chr(int(code[1:], 16))

    return ESCAPE_PATTERN.sub(replace, text)


def _metavar(field: Field) -> str:
    """The placeholder of the value in the help."""
    if _is_nested(field):
        return "JSON"
    inner, outer = _field_types(field)
    words = dict.fromkeys((*outer, *inner))
    return "|".join({"bool": "true|false", "str": "TEXT"}.get(word, word.upper()) for word in words)


def _help_text(field: Field) -> str:
    notes = []
    if _is_nested(field):
        notes.append(f"JSON of {field.kind.expected}")
    elif _is_list(field):
        notes.append("may be repeated" if _is_text_list(field) else "several with commas")
    if field.default not in (None, False):
        notes.append(f"default: {field.default!r}")
    return field.doc + (f" ({'; '.join(notes)})" if notes else "")
