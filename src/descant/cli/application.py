"""The typer application: commands, version, and usage errors.

A command's module is imported when the command runs or shows its own help; the help of the program is written
from the table of commands, without importing any.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer
from typer.core import TyperCommand, TyperGroup

import descant
from descant.cli import terminal
from descant.cli.terminal import USAGE

if TYPE_CHECKING:
    from descant.cli.command import Command


@dataclass(frozen=True)
class CommandEntry:
    """The place of a command's class in this package, "module:class", and the first line of its help."""

    place: str
    summary: str

    def load(self) -> type[Command]:
        """Import the class of the command."""
        module, name = self.place.split(":")
        kind: type[Command] = getattr(importlib.import_module(f"descant.cli.{module}"), name)
        return kind


COMMANDS: Final = {
    "generate": CommandEntry(
        "generate:GenerateCommand",
        "Continue a prompt and stream the text; or, with --input and --output, many prompts.",
    ),
    "chat": CommandEntry(
        "chat.command:ChatCommand", "Talk to a model: each line is a turn, and /help lists commands."
    ),
    "explain": CommandEntry(
        "generate:ExplainCommand",
        "Show what would run and why: strategy, processors in order, stops, and the source of every value.",
    ),
    "serve": CommandEntry(
        "serve:ServeCommand",
        "Serve a model over HTTP with OpenAI's API; every generation parameter is a field of a request.",
    ),
    "run": CommandEntry(
        "run:RunCommand", "Run every row of a source through a model, and write the results in shards."
    ),
    "eval": CommandEntry(
        "evaluate:EvaluateCommand", "Run lm-eval's benchmarks on a model, with any method of Descant."
    ),
    "tree": CommandEntry(
        "show:TreeCommand", "Show the tree of a trace: all hypotheses with scores, dropped and returned ones."
    ),
    "show": CommandEntry(
        "show:ShowTraceCommand",
        "Show a trace: the text with the probability of every token, and further pictures.",
    ),
    "doctor": CommandEntry(
        "doctor.command:DoctorCommand",
        "Check this machine and write one report: versions, fast paths, laws, parity with transformers, "
        "times.",
    ),
}

COMMAND_GROUPS: Final = {
    "recipe": (
        "Inspect and trust third-party decoding methods, and create and share your own.",
        {
            "show": CommandEntry(
                "recipe:ShowRecipeCommand",
                "Show a recipe: its files and their hash, its requirements and README, and whether it is "
                "trusted.",
            ),
            "trust": CommandEntry(
                "recipe:TrustRecipeCommand",
                "Trust the current version of a recipe, also if it has changed: pin its hash and commit.",
            ),
            "list": CommandEntry("recipe:ListRecipesCommand", "List installed and trusted recipes."),
            "forget": CommandEntry(
                "recipe:ForgetRecipeCommand",
                "Remove the trust in a recipe: the next use with --trust-remote-code pins its version then.",
            ),
            "new": CommandEntry(
                "recipe:NewRecipeCommand", "Create a folder with a working recipe: code, README and tests."
            ),
            "check": CommandEntry(
                "recipe:CheckRecipeCommand",
                "Run the contract tests of descant.testing for a recipe, then its own tests.",
            ),
            "push": CommandEntry(
                "recipe:PushRecipeCommand",
                "Share a recipe: push its folder to a repository on the Hub, which is created if needed.",
            ),
        },
    ),
    "watermark": (
        "Detect watermarks in texts, create keys, and train detectors.",
        {
            "detect": CommandEntry(
                "watermark.command:DetectCommand",
                "Detect watermarks in texts: marked, not marked, or too short to tell.",
            ),
            "key": CommandEntry(
                "watermark.command:KeyCommand",
                "Create a new key, for `descant generate --watermark FILE` and `descant watermark detect "
                "--key FILE`.",
            ),
            "train": CommandEntry(
                "watermark.command:TrainCommand",
                "Train a Bayesian detector for a SynthID key, which detects shorter texts than the mean "
                "score.",
            ),
        },
    ),
}


class OptionHelpCommand(TyperCommand):
    """A command whose help lists its options by panel and cuts none, however narrow the terminal is."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options of each panel."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                title = getattr(parameter, "rich_help_panel", None) or "Options"
                panels.setdefault("Arguments" if is_argument else title, []).append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class DeferredCommand(TyperCommand):
    """A command whose class is imported when its arguments are parsed."""

    entry: ClassVar[CommandEntry]

    def load(self) -> Any:
        """The command with its options."""
        from descant.cli.command import typer_callback

        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        kind = self.entry.load()
        command = app.command(self.name, cls=OptionHelpCommand, context_settings=dict(kind.context_settings))
        command(typer_callback(kind))
        return typer.main.get_command(app)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """The context of the command with its options, whose arguments are parsed here."""
        return self.load().make_context(*args, **extra)


class CommandGroup(TyperGroup):
    """A command group that lists its commands in full, and prints usage errors as one line."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line and exit with its code."""
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except Exception as error:
            format_message = getattr(error, "format_message", None)  # usage errors of any version of click
            if format_message is None:
                raise
            context = getattr(error, "ctx", None)
            path = "descant" if context is None else context.command_path
            if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
                terminal.write(f"{format_message()}\n")
            else:
                terminal.print_error(f"{format_message()} (see {path} --help)")
            code = USAGE
        sys.exit(code or 0)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - a method of click
        """Write each command with the whole of its line, which click would cut at the width."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])


def build_app() -> typer.Typer:
    """Build the typer application."""
    app = _group_app("descant", (descant.__doc__ or "").partition("\n")[0], COMMANDS)
    app.callback()(_root)
    for name, (summary, commands) in COMMAND_GROUPS.items():
        app.add_typer(_group_app(name, summary, commands))
    return app


def _group_app(name: str, summary: str, commands: Mapping[str, CommandEntry]) -> typer.Typer:
    # Without markup the help is plain text: rich's panels take longer to import than all that is shown here.
    app = typer.Typer(
        cls=CommandGroup,
        name=name,
        help=summary,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for command, entry in commands.items():
        deferred = type(entry.place.partition(":")[2], (DeferredCommand,), {"entry": entry})
        app.command(command, cls=deferred, help=entry.summary)(_no_options)
    return app


def _no_options() -> None:
    """In place of a command's own callback, which has its options."""


def _print_version(requested: bool) -> None:
    if requested:
        terminal.write(f"descant {descant.__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the version.", metavar=""
        ),
    ] = False,
) -> None:
    """Only options of the program itself."""
