"""Errors at the command line name what is typed: options and placeholders, never Python's arguments."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import descant
from descant.cli.application import COMMANDS, build_app
from descant.cli.chat.command import ChatCommand
from descant.cli.generate import GenerateCommand
from descant.cli.options import cli_fields, error_text, option_name, with_option_names
from descant.cli.watermark.command import DetectCommand, TrainCommand
from descant.errors import ConfigError, DescantError, InputError, UntrustedRecipe
from tests.support.config_cases import CASES

SOURCES = sorted(Path(descant.__file__).parent.rglob("*.py"))
ERRORS = ("ConfigError", "InputError", "NotInThisVersion")


def text_of(node: ast.expr) -> str | None:
    """A text in the source, with 3 in place of what an f-string computes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "3" for part in node.values)
    return None


def texts_of_errors() -> list[str]:
    """What every error about a field says that it must be, and what to do."""
    found = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                found |= {text_of(one) for one in node.args[1:2] + node.args[3:4]}
    return sorted(text for text in found if text)


@pytest.mark.parametrize("name", cli_fields())
def test_an_error_about_a_field_names_its_option(name: str) -> None:
    error = ConfigError(name, f"has no use while `{name}` is None", f"`{name}`", f"set {name}=None or not")
    option = option_name(name)
    assert error_text(error, GenerateCommand) == (
        f"{option} has no use while {option} is None, got '`{name}`': set {option} none or not"
    )


@pytest.mark.parametrize("name", sorted(cli_fields().keys() & CASES.keys()))
def test_a_wrong_value_is_an_error_about_the_option(name: str) -> None:
    [wrong, *_] = [one for one in CASES[name][1] if isinstance(one, str | int | float)] or [None]
    if cli_fields()[name].type == "bool" or wrong is None:
        pytest.skip("every text on a command line is a value of it")
    result = CliRunner().invoke(build_app(), ["explain", f"{option_name(name)}={wrong}"])
    if result.exit_code == 2:
        assert option_name(name) in result.stderr
        assert f"`{name}`" not in result.stderr


def test_no_text_of_an_error_keeps_a_field() -> None:
    texts = texts_of_errors()
    assert len(texts) > 300
    fields = "|".join(cli_fields())
    marked = re.compile(rf"`({fields})`|\b({fields})=")
    assert [text for text in texts if marked.search(with_option_names(text, GenerateCommand))] == []
    assert any(marked.search(text) for text in texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set do_sample=True or leave it out", "set --do-sample or leave it out"),
        ("use do_sample=False", "use --no-do-sample"),
        ("set num_beams=4. Then", "set --num-beams 4. Then"),
        ('`cache_implementation="static"` and', "--cache-implementation static and"),
        ("set stop_strings=['a', 'b']", "set --stop-strings ['a', 'b']"),
        ("raise max_new_tokens, or", "raise --max-new-tokens, or"),
        ("set trust_remote_code=True", "set --trust-remote-code"),
        ("without `recipe` or `model`", "without `recipe` or `model`"),
        ("a `watermarking_config`", "a --watermark"),
        ("the temperature and the seed", "the temperature and the seed"),
        ("the file models/top_k.json", "the file models/top_k.json"),
        ("--top-k and top_k_of and x.top_k", "--top-k and top_k_of and x.top_k"),
        ("`constraints` and `input_ids`", "`constraints` and `input_ids`"),
    ],
)
def test_how_fields_are_written(text: str, expected: str) -> None:
    assert with_option_names(text, GenerateCommand) == expected


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (InputError("tool_choice", "must not be so", 1), ChatCommand, "--tool-choice must not be so, got 1"),
        (InputError("key", "must be one", 1), TrainCommand, "--key must be one, got 1"),
        (InputError("model", "must be one", "x"), DetectCommand, "--model must be one, got 'x'"),
        (InputError("model", "must be one", "x"), GenerateCommand, "MODEL must be one, got 'x'"),
        (InputError("REF", "must be one", "x"), GenerateCommand, "REF must be one, got 'x'"),
        (InputError("input_ids", "must be one", "x"), GenerateCommand, "`input_ids` must be one, got 'x'"),
        (ConfigError(("top_k", "top_p"), "must not", "do_sample=True"), GenerateCommand,
         "--top-k must not, got 'do_sample=True'"),
        (UntrustedRecipe("x", "needs trust_remote_code=True"), GenerateCommand,
         "recipe `x`: needs --trust-remote-code"),
        (DescantError("lower `num_beams`"), GenerateCommand, "lower --num-beams"),
        (ValueError("lower `num_beams`"), GenerateCommand, "ValueError: lower `num_beams`"),
    ],
)  # fmt: skip
def test_errors_of_each_kind(error: Exception, kind: Any, expected: str) -> None:
    assert error_text(error, kind) == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_gives_each_default_once(name: str) -> None:
    shown = CliRunner().invoke(build_app(), [name, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    twice = [line for line in shown.stdout.splitlines() if len(re.findall(r"[(\[]default:?", line)) > 1]
    assert twice == []
