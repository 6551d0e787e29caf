"""Command-line options for generation parameters, and the parsing of their values.

A field's type decides how it is written: a bool is a flag, nested data are JSON, lists of numbers and names
are separated by commas, and lists of text are repeated options, since text may contain commas. The word
`none` switches a field off, as None does in Python; for a field that takes any text, empty text does.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final

import typer

from descant.config.generation_config import FIELDS, Field
from descant.config.validation import LENGTH_PAIRS
from descant.errors import ConfigError, DescantError, InputError, MissingRequirements

PLAIN_TYPES: Final = frozenset({"bool", "int", "float", "str", "list", "tuple", "dict"})
BOOL_WORDS: Final = {"true": True, "false": False}
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
ESCAPE_PATTERN: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.|$)", re.DOTALL)
NONE_WORD: Final = "none"
STDIO: Final = "-"  # in place of a file: standard input or output
REQUIRED: Final = dataclasses.MISSING  # as the default of an option
# Fields that hold secrets, which process lists and shell histories would reveal.
SECRET_FIELDS: Final = frozenset({"watermarking_config"})
# Fields that return tensors, which text output cannot show.
TENSOR_FIELDS: Final = tuple(
    n for n, field in FIELDS.items() if field.group == "output" and field.type == "bool"
)


def option(text: str, default: Any = None, *names: str, **settings: Any) -> Any:
    """The field of a command that is an option, with its help; a bool is a flag."""
    return dataclasses.field(default=default, metadata={"names": names, "help": text, **settings})


def argument(metavar: str, text: str, default: Any = REQUIRED) -> Any:
    """The field of a command that is an argument, with its help."""
    return dataclasses.field(default=default, metadata={"metavar": metavar, "help": text})


def typer_parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    """The field of a command, made by `option` or `argument`, as a parameter of a typer function."""
    settings = dict(field.metadata)
    if "names" not in settings:
        info = typer.Argument(**settings)
    else:
        names = settings.pop("names")
        if kind is bool:
            names, settings["metavar"] = [option_name(field.name, can_be_off=bool(field.default))], ""
        info = typer.Option(*names, **settings)
    default = inspect.Parameter.empty if field.default is REQUIRED else field.default
    annotation: Any = Annotated[kind, info]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def cli_fields() -> dict[str, Field]:
    """The fields that have an option: supported, no objects, no secrets."""
    return {
        name: field
        for name, field in FIELDS.items()
        if name not in SECRET_FIELDS and set(re.findall(r"[A-Za-z]+", field.type)) <= PLAIN_TYPES
    }


def option_name(field_name: str, *, can_be_off: bool = False) -> str:
    """The option of a field, as typed; with `can_be_off` also the flag that switches it off, for typer."""
    name = field_name.replace("_", "-")
    return f"--{name}/--no-{name}" if can_be_off else f"--{name}"


def option_parameters() -> Iterator[inspect.Parameter]:
    """One keyword parameter per field, for typer."""
    for name, field in cli_fields().items():
        kind: Any = bool if field.type == "bool" else list[str] if _is_list(field) else str
        option = typer.Option(
            option_name(name, can_be_off=kind is bool),
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


# A watermark key has no option for its value, but one for its file.
FILE_OPTIONS: Final = {"watermarking_config": "watermark", "key": "watermark"}
VALUE: Final = r"""\[[^\]]*\]|"[^"]*"|'[^']*'|-?\w+(?:\.\w+)?"""


@dataclass(frozen=True)
class WrittenOption:
    """The typed form of a field: an option, or the placeholder of an argument."""

    name: str
    is_flag: bool = False
    is_parameter: bool = False  # a generation parameter, which texts of errors name

    def with_value(self, value: str) -> str:
        """The option with a value that Python's error names."""
        if self.is_flag and value in ("True", "False"):
            return self.name if value == "True" else f"--no-{self.name.removeprefix('--')}"
        return f"{self.name} {NONE_WORD if value == 'None' else value.strip(chr(34) + chr(39))}"


def error_text(error: Exception, kind: Any) -> str:
    """The message of an error of a command, a dataclass whose fields are its options."""
    if isinstance(error, ConfigError | InputError):
        field = error.field if isinstance(error.field, str) else error.field[0]
        written = _written_options(kind).get(field)
        is_typed = field.isupper() or field.startswith(("-", "/"))  # already what a user types
        name = written.name if written else field if is_typed else f"`{field}`"
        do = f": {with_option_names(error.do, kind)}" if error.do else ""
        return f"{name} {with_option_names(error.must, kind)}, got {error.got}{do}"
    if isinstance(error, MissingRequirements):  # several lines, joined to one
        first, *missing = str(error).splitlines()
        return f"{first} {', '.join(missing)}"
    if isinstance(error, DescantError):
        return with_option_names(str(error), kind)
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def with_option_names(text: str, kind: Any) -> str:
    """A text with `field` and `field=value` written as the options of a command."""
    written_options = _written_options(kind)

    def replace(match: re.Match[str]) -> str:
        field, value = match["field"], match["value"]
        if value is not None:
            return written_options[field].with_value(value)
        # A bare word may be English, such as "seed": only what is marked or has a `_` is a field. Names of
        # other options are keys of data as well, such as `json_schema` of a grammar.
        is_field = written_options[field].is_parameter and (match["tick"] or "_" in field)
        return written_options[field].name if is_field else match[0]

    return _field_pattern(kind).sub(replace, text)


@cache
def _field_pattern(kind: Any) -> re.Pattern[str]:
    """Fields in a text, but not inside a longer name, a path, an option or a call."""
    fields = "|".join(sorted(map(re.escape, _written_options(kind)), key=len, reverse=True))
    return re.compile(
        rf"(?P<tick>`?)(?<![\w./-])(?P<field>{fields})(?![\w/(-]|\.\w)(?:=(?P<value>{VALUE}))?(?P=tick)"
    )


@cache
def _written_options(kind: Any) -> Mapping[str, WrittenOption]:
    """The typed form of each field of a command, and of each generation parameter that it has."""
    found = {}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, field in fields.items():
        if "names" in field.metadata:
            written = (*field.metadata["names"], option_name(name))[0]
            is_flag = field.type == "bool"
            found[name] = found[written[2:].replace("-", "_")] = WrittenOption(written, is_flag)
        elif field.metadata:
            found[name] = WrittenOption(field.metadata["metavar"])
    if "values" in fields:
        for name, parameter in cli_fields().items():
            found[name] = WrittenOption(option_name(name), parameter.type == "bool", is_parameter=True)
        for name, other in FILE_OPTIONS.items():
            if other in found and name not in found:
                found[name] = WrittenOption(found[other].name, is_parameter=name in FIELDS)
    return found
