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

from descant.config.generation_config import FIELDS, LATER, Field
from descant.config.validation import LENGTHS
from descant.errors import ConfigError

__all__ = ["flags", "offered", "overlaid", "parameters", "read", "refuse_tensors", "values_of"]

PLAIN: Final = frozenset({"bool", "int", "float", "str", "list", "tuple", "dict"})
TRUTHS: Final = {"true": True, "false": False}
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.|$)", re.DOTALL)
OFF: Final = "none"
# Fields that hold secrets, which process lists and shell histories would tell.
SECRET: Final = frozenset({"watermarking_config"})
# Fields that return tensors, for which text has no place.
TENSORS: Final = tuple(n for n, field in FIELDS.items() if field.group == "output" and field.type == "bool")


def offered() -> dict[str, Field]:
    """The fields that a command line says: none of a later version, no objects, and no secrets."""
    return {
        name: field
        for name, field in FIELDS.items()
        if name not in {*LATER, *SECRET} and set(re.findall(r"[A-Za-z]+", field.type)) <= PLAIN
    }


def flags(field: Field) -> tuple[str, ...]:
    """How a field is written on the command line."""
    name = "--" + field.name.replace("_", "-")
    return (f"{name}/--no-{name[2:]}",) if field.type == "bool" else (name,)


def parameters() -> Iterator[inspect.Parameter]:
    """One keyword parameter for each offered field, as typer reads them."""
    for name, field in offered().items():
        kind: Any = bool if field.type == "bool" else list[str] if _repeats(field) else str
        option = typer.Option(
            *flags(field),
            help=escape(_help(field)),
            rich_help_panel=field.group.capitalize(),
            metavar="" if kind is bool else _shape(field),
            show_default=False,
        )
        annotation: Any = Annotated[kind | None, option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What GenerationConfig takes, from what the options were given; an option not given is left out."""
    values = {}
    for name, raw in given.items():
        if raw is None or raw == []:
            continue
        if isinstance(raw, bool):
            values[name] = raw
        else:
            values[name] = read(FIELDS[name], [raw] if isinstance(raw, str) else list(raw))
    return values


def read(field: Field, texts: Sequence[str]) -> Any:
    """A field's value in Python, from the texts that were given for it; None switches it off.

    What cannot be read is returned as it is: the config refuses it, and says what it must be.
    """
    inner, outer = _words(field)
    if texts == ["" if _text(field) or (outer == ["str"] and not inner) else OFF]:
        return [] if _text(field) and not outer else None
    if _nested(field):
        return _json(field, texts[-1])
    if not _repeats(field):
        return _converted(texts[-1], outer)
    if _text(field):
        items = [_unescaped(field, text) for text in texts]
    elif len(texts) == 1 and texts[0].startswith("["):
        return _json(field, texts[0])
    else:
        items = [part.strip() for text in texts for part in text.split(",") if text]
    if len(items) != 1:
        return [_converted(item, inner) for item in items]
    value = _converted(items[0], inner)
    if type(value).__name__ in inner:
        return value if type(value).__name__ in outer else [value]
    return _converted(items[0], outer)


def overlaid(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Values with further ones above them: a length below does not beat its other form above."""
    beaten = {new for new, total in LENGTHS if total in own and new not in own}
    return {**{name: value for name, value in values.items() if name not in beaten}, **own}


def refuse_tensors(values: Mapping[str, Any]) -> None:
    """Raise for values that ask for tensors where text is written."""
    for name in TENSORS:
        if values.get(name):
            do = "leave it out; `logprobs` with --output writes probabilities"
            raise ConfigError(name, "has no use where text is written", values[name], do)


def _words(field: Field) -> tuple[list[str], list[str]]:
    """The types inside a field's lists, and those that it takes without a list."""
    inner = [word for part in re.findall(r"list\[([^]]*)\]", field.type) for word in part.split(" | ")]
    outer = re.sub(r"list\[[^]]*\]", "", field.type)
    return inner, [word for word in outer.split(" | ") if word.strip()]


def _nested(field: Field) -> bool:
    return bool(re.search(r"dict|tuple|list\[list", field.type))


def _repeats(field: Field) -> bool:
    return "list[" in field.type and not _nested(field)


def _text(field: Field) -> bool:
    """Whether a field lists any text, in which a comma is a comma, and not numbers or names."""
    return "str" in _words(field)[0] and field.type != "list[str]"


def _converted(text: str, words: Sequence[str]) -> Any:
    """The text as the first of these types that it can be; itself where it is none of them."""
    if "bool" in words and text.lower() in TRUTHS:
        return TRUTHS[text.lower()]
    for word, kind in (("int", int), ("float", float)):
        if word in words:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _json(field: Field, text: str) -> Any:
    try:
        return None if text == OFF else json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(field.name, "must be JSON", text, f"write {field.kind.must} as JSON") from None


def _unescaped(field: Field, text: str) -> str:
    """The text with its escapes read, which a shell leaves alone."""

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code not in ESCAPES and len(code) != 5:
            do = "write \\\\ for a backslash"
            raise ConfigError(field.name, "must hold no escape but \\n, \\t, \\r, \\uXXXX, \\\\", text, do)
        return ESCAPES.get(code) or chr(int(code[1:], 16))

    return ESCAPE.sub(one, text)


def _shape(field: Field) -> str:
    """What stands for the value in the help."""
    if _nested(field):
        return "JSON"
    inner, outer = _words(field)
    words = dict.fromkeys((*outer, *inner))
    return "|".join({"bool": "true|false", "str": "TEXT"}.get(word, word.upper()) for word in words)


def _help(field: Field) -> str:
    more = []
    if _nested(field):
        more.append(f"JSON of {field.kind.must}")
    elif _repeats(field):
        more.append("may be repeated" if _text(field) else "several with commas")
    if field.default not in (None, False):
        more.append(f"default: {field.default!r}")
    return field.about + (f" ({'; '.join(more)})" if more else "")
