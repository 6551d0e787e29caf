"""The options are the table of parameters: none missing, none more, and each means what Python's means."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from descant import ConfigError, GenerationConfig
from descant.cli import options
from descant.cli.application import COMMANDS, build_app
from descant.cli.command import ConfigCommand, typer_callback
from descant.config.generation_config import FIELDS, GROUPS
from tests.support.config_cases import CASES

# Not on a command line: a function and objects; and a key, which other users would see.
UNSAYABLE = {"prefix_allowed_tokens_fn", "constraints", "watermarking_config"}
OFFERED = FIELDS.keys() - UNSAYABLE
GENERATION_COMMANDS = [name for name, entry in COMMANDS.items() if issubclass(entry.load(), ConfigCommand)]
VALUES = [(name, value) for name in FIELDS if name in OFFERED for value in CASES[name][0]]


@dataclass(frozen=True, kw_only=True)
class Probe(ConfigCommand):
    """A command that keeps what it was given."""

    seen = []  # type: ignore[var-annotated] # noqa: RUF012

    def run(self) -> int:
        self.seen.append(self.values)
        return 0


def probe() -> Any:
    app = typer.Typer()
    app.command()(typer_callback(Probe))
    return get_command(app)


PROBE = probe()


def parsed(*arguments: str) -> dict[str, Any]:
    """The values that a command gets from a command line."""
    Probe.seen.clear()
    assert PROBE.main(args=list(arguments), prog_name="probe", standalone_mode=False) == 0
    return Probe.seen[0]


def plain(value: Any) -> Any:
    """A value of Python, numpy or torch in JSON's types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {json.dumps(key) if not isinstance(key, str) else key: item for key, item in value.items()}
    return list(value) if isinstance(value, tuple | range | set) else value


def command_line_of(name: str, value: Any) -> list[str]:
    """A field's value as a user writes it."""
    flag, kind, value = "--" + name.replace("_", "-"), FIELDS[name].type, plain(value)
    if kind == "bool":
        return [flag if value else f"--no-{flag[2:]}"]
    if kind == "dict[tuple[int, ...], float]" and isinstance(value, dict):
        value = [[json.loads(key.replace("(", "[").replace(",)", ")").replace(")", "]")), bias]
                 for key, bias in value.items()]  # fmt: skip
    if "dict" in kind or "tuple" in kind or "list[list" in kind:
        return [flag, json.dumps(value)]
    if value == []:
        return [flag, ""]
    texts = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if kind in ("str | list[str]", "list[int | str]"):
        return [part for text in texts for part in (flag, text.replace("\\", "\\\\").replace("\n", "\\n"))]
    if isinstance(value, list) and len(value) == 1:
        return [flag, json.dumps(value)]
    return [flag, ",".join(texts).lower() if isinstance(value, bool) else ",".join(texts)]


@pytest.mark.parametrize("name", GENERATION_COMMANDS)
def test_every_command_offers_every_field(name: str) -> None:
    found = {one.name: one for one in get_command(build_app()).commands[name].load().params}
    own = COMMANDS[name].load().__dataclass_fields__.keys() - {"values"}
    assert found.keys() - own - {"help"} == OFFERED
    assert not own & FIELDS.keys()
    for field in OFFERED:
        assert found[field].rich_help_panel.lower() == FIELDS[field].group
    written = [flag for one in found.values() for flag in (*one.opts, *one.secondary_opts)]
    assert len(written) == len(set(written))


def test_the_help_equals_the_table() -> None:
    result = CliRunner().invoke(
        build_app(), ["explain", "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}
    )
    text = " ".join(result.output.split())
    assert [name for name in OFFERED if " ".join(FIELDS[name].doc.split()) not in text] == []
    shown = {field.group for name, field in FIELDS.items() if name in OFFERED}
    assert [
        group for group in GROUPS if (f"\n{group.capitalize()}:\n" in result.output) != (group in shown)
    ] == []


@pytest.mark.parametrize(
    ("name", "value"), VALUES, ids=[f"{name}-{at}" for at, (name, _) in enumerate(VALUES)]
)
def test_an_option_is_the_same_config_as_the_call(name: str, value: Any) -> None:
    values = parsed(*command_line_of(name, value))
    assert values.keys() == {name}
    ours, theirs = GenerationConfig(**values), GenerationConfig(**{name: value})
    assert (ours, ours.given) == (theirs, theirs.given)


def test_all_at_once() -> None:
    first = {name: CASES[name][0][-1] for name in OFFERED}
    values = parsed(*(text for name, value in first.items() for text in command_line_of(name, value)))
    assert {name: FIELDS[name].parse(value) for name, value in values.items()} == {
        name: FIELDS[name].parse(value) for name, value in first.items()
    }


def test_nothing_given_is_nothing() -> None:
    assert parsed() == {}


@pytest.mark.parametrize("name", sorted(name for name in OFFERED if FIELDS[name].type != "bool"))
def test_none_switches_off(name: str) -> None:
    texts = ("str", "str | list[str]", "list[int | str]")
    text = "" if FIELDS[name].type in texts else "none"
    off = [] if FIELDS[name].type == "list[int | str]" else None
    assert parsed("--" + name.replace("_", "-"), text) == {name: off}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("--stop-strings", "END", "--stop-strings", r"\n\n"), {"stop_strings": ["END", "\n\n"]}),
        (("--stop-strings", "a,b"), {"stop_strings": "a,b"}),
        (("--stop-strings", r"\u00e9\\n"), {"stop_strings": "é\\n"}),
        (("--stop-strings", "[1]"), {"stop_strings": "[1]"}),
        (("--eos-token-id", "2"), {"eos_token_id": 2}),
        (("--eos-token-id", "2, 3"), {"eos_token_id": [2, 3]}),
        (("--eos-token-id", "2", "--eos-token-id", "3"), {"eos_token_id": [2, 3]}),
        (("--eos-token-id", "[2]"), {"eos_token_id": [2]}),
        (("--suppress-tokens", "7"), {"suppress_tokens": [7]}),
        (("--suppress-tokens", ""), {"suppress_tokens": []}),
        (("--sequence-bias", "[[[1, 2], -1.0]]"), {"sequence_bias": [[[1, 2], -1.0]]}),
        (("--logit-bias", '{"5": -1.0}'), {"logit_bias": {"5": -1.0}}),
        (("--early-stopping", "true"), {"early_stopping": True}),
        (("--early-stopping", "never"), {"early_stopping": "never"}),
        (("--no-do-sample",), {"do_sample": False}),
        (("--length-penalty", "-1.5"), {"length_penalty": -1.5}),
        (("--processor-order", "top_k,temperature"), {"processor_order": ["top_k", "temperature"]}),
        (("--stop-regex", r"\d+\n"), {"stop_regex": r"\d+\n"}),
        (("--dry-sequence-breakers", ",", "--dry-sequence-breakers", "13"),
         {"dry_sequence_breakers": [",", 13]}),
        (("--top-k", "5", "--top-k", "7"), {"top_k": 7}),
    ],
)  # fmt: skip
def test_how_it_is_written(line: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert parsed(*line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--num-beams", "four"), "--num-beams must be an int >= 1, got 'four'"),
        (("--num-beams", "0"), "--num-beams must be an int >= 1, got 0"),
        (("--num-beams", ""), "--num-beams must be an int >= 1, got ''"),
        (("--top-p", "1.5", "--do-sample"), "--top-p must be a finite number >= 0 and <= 1, got 1.5"),
        (("--early-stopping", "maybe"), "--early-stopping must be True, False or \"never\", got 'maybe'"),
        (("--eos-token-id", "2,x"), "--eos-token-id must be a token id (an int >= 0) or a non-empty list"),
        (("--sequence-bias", "[[1"), "--sequence-bias must be JSON, got '[[1'"),
        (("--sequence-bias", "[]"), "--sequence-bias must be a non-empty dict"),
        (("--stop-strings", r"\end"), "--stop-strings must hold no escape but"),
        (("--top-k", "5"), "--top-k has no use while --do-sample is False, got 5"),
        (("--min-new-tokens", "5", "--max-new-tokens", "3"), "--min-new-tokens must be <= --max-new-tokens"),
        (("--watermarking-config", "{}"), "No such option: --watermarking-config"),
        (("--num-beam", "4"), "No such option: --num-beam"),
        (("--do-sample=yes",), "--do-sample"),
    ],
)
def test_an_error_is_reported_in_one_line(line: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(build_app(), ["explain", *line])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert isinstance(result.exception, SystemExit)


def test_what_cannot_be_read_is_left_to_the_config() -> None:
    with pytest.raises(ConfigError, match="`top_k` must be an int >= 0, got 'x'"):
        GenerationConfig(**options.parse_options({"top_k": "x"}))
