"""The typer application: commands, version, and usage errors.

A command's module is imported when the command runs or shows its own help; the help of the program is written
from the docstrings of the commands, without importing any.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
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
    """The place of a command's class in this package, "module:class"."""

    place: str

    @property
    def summary(self) -> str:
        """The first paragraph of the class's docstring, read from the source: its import may load torch."""
        module, name = self.place.split(":")
        *folders, file = module.split(".")
        source = files("descant.cli").joinpath(*folders, f"{file}.py")
        classes = (
            node for node in ast.parse(source.read_text("utf-8")).body if isinstance(node, ast.ClassDef)
        )
        [text] = (ast.get_docstring(node) or "" for node in classes if node.name == name)
        return " ".join(text.partition("\n\n")[0].split())

    def load(self) -> type[Command]:
        """Import the class of the command."""
        module, name = self.place.split(":")
        kind: type[Command] = getattr(importlib.import_module(f"descant.cli.{module}"), name)
        return kind


COMMANDS: Final = {
    "generate": CommandEntry("generate:GenerateCommand"),
    "chat": CommandEntry("chat.command:ChatCommand"),
    "explain": CommandEntry("generate:ExplainCommand"),
    "serve": CommandEntry("serve:ServeCommand"),
    "run": CommandEntry("run:RunCommand"),
    "tree": CommandEntry("show:TreeCommand"),
    "show": CommandEntry("show:ShowTraceCommand"),
    "doctor": CommandEntry("doctor.command:DoctorCommand"),
}

COMMAND_GROUPS: Final = {
    "recipe": (
        "Inspect and trust third-party decoding methods, and create and share your own.",
        {
            "show": CommandEntry("recipe:ShowRecipeCommand"),
            "trust": CommandEntry("recipe:TrustRecipeCommand"),
            "list": CommandEntry("recipe:ListRecipesCommand"),
            "forget": CommandEntry("recipe:ForgetRecipeCommand"),
            "new": CommandEntry("recipe:NewRecipeCommand"),
            "check": CommandEntry("recipe:CheckRecipeCommand"),
            "push": CommandEntry("recipe:PushRecipeCommand"),
        },
    ),
    "watermark": (
        "Detect watermarks in texts, create keys, and train detectors.",
        {
            "detect": CommandEntry("watermark.command:DetectCommand"),
            "key": CommandEntry("watermark.command:KeyCommand"),
            "train": CommandEntry("watermark.command:TrainCommand"),
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
        app.command(self.name, cls=OptionHelpCommand)(typer_callback(self.entry.load()))
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
            formatter.write_dl([(name, _summary(command)) for name, command in self.commands.items()])


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
        app.command(command, cls=deferred)(_no_options)
    return app


def _summary(command: Any) -> str:
    """The line of a command in the help of its group."""
    return command.entry.summary if isinstance(command, DeferredCommand) else str(command.help or "")


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
