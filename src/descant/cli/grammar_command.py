"""Options that restrict the generated text: a JSON schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from descant.cli.command import DecodingCommand
from descant.errors import InputError

__all__ = ["GrammarCommand", "read_json", "read_text"]


@dataclass(frozen=True, kw_only=True)
class GrammarCommand(DecodingCommand):
    """Options of a command whose text may have to match a grammar."""

    json_schema: Annotated[
        str | None,
        typer.Option("--json-schema", metavar="FILE", help="The text is JSON that matches this schema."),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option("--regex", metavar="TEXT", help="The whole text matches this regular expression."),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option("--choice", metavar="TEXT", help="The text is one of these; may be repeated."),
    ] = None
    grammar_file: Annotated[
        str | None,
        typer.Option("--grammar-file", metavar="FILE", help="The text matches this grammar: EBNF or Lark."),
    ] = None

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The generation parameters, with the grammar of these options."""
        values, grammars = super().parameters, self._grammars()
        if values.get("grammar") is not None:
            grammars["--grammar"] = values["grammar"]
        if len(grammars) > 1:
            raise InputError("grammar", "must be given once", " and ".join(grammars), "give one of them")
        return {**values, "grammar": next(iter(grammars.values()))} if grammars else values

    def _grammars(self) -> dict[str, Mapping[str, Any]]:
        """The grammar of each option that is given."""
        grammars: dict[str, Mapping[str, Any]] = {}
        if self.json_schema is not None:
            grammars["--json-schema"] = {"json_schema": read_json("json_schema", self.json_schema)}
        if self.regex is not None:
            grammars["--regex"] = {"regex": self.regex}
        if self.choice:
            grammars["--choice"] = {"choice": self.choice}
        if self.grammar_file is not None:
            grammars["--grammar-file"] = {"grammar": read_text("grammar_file", self.grammar_file)}
        return grammars


def read_text(name: str, path: str) -> str:
    """The text of an option's file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(name, f"must be a file that can be opened ({error.strerror})", path) from None
    except UnicodeDecodeError:
        raise InputError(name, "must be a file of UTF-8 text", path) from None


def read_json(name: str, path: str) -> Any:
    """The data of an option's JSON file."""
    text = read_text(name, path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(name, f"must be a file of JSON ({error})", path) from None
