"""The help: written without torch, from a table that equals the commands."""

from __future__ import annotations

import inspect
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
import sys
from descant.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'loaded for nothing'
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


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), *((*path, "--help") for path in ALL if path[0] != "recipe"),
     ("recipe", "check", "--help"), ("recipe", "list")],
    ids=" ".join,
)  # fmt: skip
def test_torch_is_not_imported(arguments: tuple[str, ...]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"descant {' '.join(arguments)}: {seconds:.2f} s of CPU")
    if arguments in (("--help",), ("--version",)):
        assert seconds < 0.5


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
