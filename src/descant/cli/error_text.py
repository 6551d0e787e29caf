"""Errors as lines of the command line: they name options, where Python's errors name arguments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from descant.cli.options import NONE_WORD, cli_fields, option_name
from descant.config.generation_config import FIELDS
from descant.errors import ConfigError, DescantError, InputError, MissingRequirements

__all__ = ["error_text", "with_option_names"]

# A watermark key has no option for its value, but one for its file.
FILE_OPTIONS: Final = {"watermarking_config": "watermark", "key": "watermark"}
VALUE: Final = r"""\[[^\]]*\]|"[^"]*"|'[^']*'|-?\w+(?:\.\w+)?"""


@dataclass(frozen=True)
class WrittenOption:
    """What is typed for a field: an option, or the placeholder of an argument."""

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
    """What is typed for each field of a command, and for each generation parameter that it has."""
    found = {}
    hints = get_type_hints(kind, include_extras=True)
    for own in dataclasses.fields(kind):
        for info in getattr(hints[own.name], "__metadata__", ()):
            if isinstance(info, ArgumentInfo):
                found[own.name] = WrittenOption(str(info.metavar or own.name.upper()))
            elif isinstance(info, OptionInfo):
                # Inside Annotated, typer keeps the first name that is declared as the default.
                declared = (info.default, *(info.param_decls or ()), option_name(own.name))
                name = next(one for one in declared if isinstance(one, str)).partition("/")[0]
                option = WrittenOption(name, hints[own.name].__origin__ is bool)
                found[own.name] = found[name.removeprefix("--").replace("-", "_")] = option
    if "values" in hints:
        for name, field in cli_fields().items():
            found[name] = WrittenOption(option_name(name), field.type == "bool", is_parameter=True)
        for name, other in FILE_OPTIONS.items():
            if other in found and name not in found:
                found[name] = WrittenOption(found[other].name, is_parameter=name in FIELDS)
    return found
