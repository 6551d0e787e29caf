"""Command-line options made from the table of generation parameters, and the way back from text to values.

A field's type says how it is written: a bool is a flag, nested data are JSON, lists of numbers and names are
joined with commas, and lists of text are repeated options, for in text a comma is a comma. The word `none`
switches a field off, as None does in Python; where a field takes any text, empty text does.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from descant.config.generation_config import FIELDS, UNSUPPORTED, Field
from descant.config.validation import LENGTH_PAIRS
from descant.errors import ConfigError

__all__ = [
    "cli_fields",
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
# Fields that hold secrets, which process lists and shell histories would tell.
SECRET_FIELDS: Final = frozenset({"watermarking_config"})
# Fields that return tensors, for which text has no place.
TENSOR_FIELDS: Final = tuple(
    n for n, field in FIELDS.items() if field.group == "output" and field.type == "bool"
)


def cli_fields() -> dict[str, Field]:
    """The fields that a command line says: none of a later version, no objects, and no secrets."""
    return {
        name: field
        for name, field in FIELDS.items()
        if name not in {*UNSUPPORTED, *SECRET_FIELDS}
        and set(re.findall(r"[A-Za-z]+", field.type)) <= PLAIN_TYPES
    }


def option_names(field: Field) -> tuple[str, ...]:
    """How a field is written on the command line."""
    name = "--" + field.name.replace("_", "-")
    return (f"{name}/--no-{name[2:]}",) if field.type == "bool" else (name,)


def option_parameters() -> Iterator[inspect.Parameter]:
    """One keyword parameter for each offered field, as typer reads them."""
    for name, field in cli_fields().items():
        kind: Any = bool if field.type == "bool" else list[str] if _is_list(field) else str
        option = typer.Option(
            *option_names(field),
            help=escape(_help_text(field)),
            rich_help_panel=field.group.capitalize(),
            metavar="" if kind is bool else _metavar(field),
            show_default=False,
        )
        annotation: Any = Annotated[kind | None, option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def parse_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What GenerationConfig takes, from what the options were given; an option not given is left out."""
    values = {}
    for name, raw in given.items():
        if raw is None or raw == []:
            continue
        if isinstance(raw, bool):
            values[name] = raw
        else:
            values[name] = parse_value(FIELDS[name], [raw] if isinstance(raw, str) else list(raw))
    return values


def parse_value(field: Field, texts: Sequence[str]) -> Any:
    """A field's value in Python, from the texts that were given for it; None switches it off.

    What cannot be read is returned as it is: the config refuses it, and says what it must be.
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


def override_values(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Values with further ones above them: a length below does not beat its other form above."""
    beaten = {new for new, total in LENGTH_PAIRS if total in own and new not in own}
    return {**{name: value for name, value in values.items() if name not in beaten}, **own}


def reject_tensor_fields(values: Mapping[str, Any]) -> None:
    """Raise for values that ask for tensors where text is written."""
    for name in TENSOR_FIELDS:
        if values.get(name):
            do = "leave it out; `logprobs` with --output writes probabilities"
            raise ConfigError(name, "has no use where text is written", values[name], do)


def _field_types(field: Field) -> tuple[list[str], list[str]]:
    """The types inside a field's lists, and those that it takes without a list."""
    inner = [word for part in re.findall(r"list\[([^]]*)\]", field.type) for word in part.split(" | ")]
    outer = re.sub(r"list\[[^]]*\]", "", field.type)
    return inner, [word for word in outer.split(" | ") if word.strip()]


def _is_nested(field: Field) -> bool:
    return bool(re.search(r"dict|tuple|list\[list", field.type))


def _is_list(field: Field) -> bool:
    return "list[" in field.type and not _is_nested(field)


def _is_text_list(field: Field) -> bool:
    """Whether a field lists any text, in which a comma is a comma, and not numbers or names."""
    return "str" in _field_types(field)[0] and field.type != "list[str]"


def _convert(text: str, words: Sequence[str]) -> Any:
    """The text as the first of these types that it can be; itself where it is none of them."""
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
    """The text with its escapes read, which a shell leaves alone."""

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code not in ESCAPES and len(code) != 5:
            do = "write \\\\ for a backslash"
            raise ConfigError(field.name, "must hold no escape but \\n, \\t, \\r, \\uXXXX, \\\\", text, do)
        return ESCAPES.get(code) or chr(int(code[1:], 16))

    return ESCAPE_PATTERN.sub(one, text)


def _metavar(field: Field) -> str:
    """What stands for the value in the help."""
    if _is_nested(field):
        return "JSON"
    inner, outer = _field_types(field)
    words = dict.fromkeys((*outer, *inner))
    return "|".join({"bool": "true|false", "str": "TEXT"}.get(word, word.upper()) for word in words)


def _help_text(field: Field) -> str:
    more = []
    if _is_nested(field):
        more.append(f"JSON of {field.kind.expected}")
    elif _is_list(field):
        more.append("may be repeated" if _is_text_list(field) else "several with commas")
    if field.default not in (None, False):
        more.append(f"default: {field.default!r}")
    return field.doc + (f" ({'; '.join(more)})" if more else "")
