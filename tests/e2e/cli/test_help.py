"""The help: written without torch, from a table that equals the commands."""

from __future__ import annotations

import inspect
import json
import re
import resource
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from descant.cli.application import COMMAND_GROUPS, COMMANDS, build_app
from descant.cli.command import typer_callback

ALL = {(name,): entry for name, entry in COMMANDS.items()} | {
    (group, name): entry for group, (_, some) in COMMAND_GROUPS.items() for name, entry in some.items()
}
CODE = """
import json, sys
from descant.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules)
    assert not loaded, f'{arguments} load {loaded} for nothing'
"""


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_summary_is_the_first_line_of_the_docstring(path: tuple[str, ...]) -> None:
    entry = ALL[path]
    assert entry.summary == " ".join((inspect.getdoc(entry.load()) or "").split("\n\n")[0].split())


def test_the_help_names_every_command_in_full() -> None:
    for group in ((), *((name,) for name in COMMAND_GROUPS)):
        text = " ".join(CliRunner().invoke(build_app(), [*group, "--help"]).stdout.split())
        for path, entry in ALL.items():
            if path[:-1] == group:
                assert f" {path[-1]} {entry.summary}" in text
    for name, (summary, _) in COMMAND_GROUPS.items():
        assert f" {name} {summary}" in " ".join(CliRunner().invoke(build_app(), ["--help"]).stdout.split())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_the_help_of_a_narrow_terminal_cuts_nothing(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(build_app(), [*path, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    told = "".join(shown.replace("-\n", "-").split())
    app = typer.Typer(add_completion=False)
    app.command()(typer_callback(ALL[path].load()))
    for option in typer.main.get_command(app).params:
        assert all(name in shown for name in option.opts if name.startswith("-"))
        assert "".join((getattr(option, "help", None) or "").split()) in told


def run_lines(*lines: tuple[str, ...]) -> float:
    """Run command lines one after the other in a new process; returns its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", CODE, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_torch_is_not_imported() -> None:
    for arguments in (("--help",), ("--version",)):
        assert run_lines(arguments) < 0.5
    run_lines(*((*path, "--help") for path in ALL), ("recipe", "list"))


def test_a_command_has_its_own_usage_and_errors() -> None:
    shown = CliRunner().invoke(build_app(), ["recipe", "new", "--help"]).stdout
    assert re.search(r"Usage: \S+ recipe new \[OPTIONS\] \{?NAME\}?", shown)
    result = CliRunner().invoke(build_app(), ["recipe", "new", "--nonsense"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: No such option: --nonsense" in result.stderr
    assert "recipe new --help)" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [("--port", "8000000"), ("--port", "-1"), ("--max-waiting", "-1"), ("--traces", "-1"),
     ("--grace-seconds", "-1"), ("--kv-memory", "-1")],
)  # fmt: skip
def test_numbers_out_of_their_bounds_are_refused(option: str, value: str) -> None:
    result = CliRunner().invoke(build_app(), ["serve", "nowhere", option, value])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '{option}'" in result.stderr
