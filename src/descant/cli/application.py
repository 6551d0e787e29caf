"""The typer application: commands, version, and usage errors."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import descant
from descant.cli import terminal
from descant.cli.chat import ChatCommand
from descant.cli.command import USAGE, typer_callback
from descant.cli.doctor.command import DoctorCommand
from descant.cli.explain import ExplainCommand
from descant.cli.generate import GenerateCommand
from descant.cli.recipe import (
    CheckRecipeCommand,
    ForgetRecipeCommand,
    ListRecipesCommand,
    NewRecipeCommand,
    PushRecipeCommand,
    TrustRecipeCommand,
)
from descant.cli.recipe import ShowRecipeCommand as ShowRecipe
from descant.cli.run import RunCommand
from descant.cli.serve import ServeCommand
from descant.cli.show import ShowTraceCommand
from descant.cli.train import TrainCommand
from descant.cli.tree import TreeCommand
from descant.cli.watermark import DetectCommand, KeyCommand

__all__ = ["build_app"]

GENERATION_COMMANDS = {
    "generate": GenerateCommand,
    "chat": ChatCommand,
    "explain": ExplainCommand,
    "serve": ServeCommand,
    "run": RunCommand,
}  # with every generation parameter as an option
TRACE_COMMANDS = {"tree": TreeCommand, "show": ShowTraceCommand}
MACHINE_COMMANDS = {"doctor": DoctorCommand}
COMMAND_GROUPS = {
    "recipe": (
        "Inspect and trust third-party decoding methods, and create and share your own.",
        {
            "show": ShowRecipe,
            "trust": TrustRecipeCommand,
            "list": ListRecipesCommand,
            "forget": ForgetRecipeCommand,
            "new": NewRecipeCommand,
            "check": CheckRecipeCommand,
            "push": PushRecipeCommand,
        },
    ),
    "watermark": (
        "Detect watermarks in texts, create keys, and train detectors.",
        {"detect": DetectCommand, "key": KeyCommand, "train": TrainCommand},
    ),
}


class CommandGroup(TyperGroup):
    """A command group that prints usage errors as one line."""

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
            if format_message():  # empty if there were no arguments and the help was shown
                terminal.print_error(f"{format_message()} (see {path} --help)")
            code = USAGE
        sys.exit(code or 0)


def build_app() -> typer.Typer:
    """Build the typer application."""
    app = typer.Typer(
        cls=CommandGroup,
        name="descant",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(help=descant.__doc__)(_root)
    for name, command in (GENERATION_COMMANDS | TRACE_COMMANDS | MACHINE_COMMANDS).items():
        app.command(name, no_args_is_help=False)(typer_callback(command))
    for group, (description, commands) in COMMAND_GROUPS.items():
        group_app = typer.Typer(
            name=group, help=description, no_args_is_help=True, pretty_exceptions_enable=False
        )
        for name, command in commands.items():
            group_app.command(name, no_args_is_help=False)(typer_callback(command))
        app.add_typer(group_app)
    return app


def _print_version(requested: bool) -> None:
    if requested:
        terminal.write(f"descant {descant.__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Show the version.",
            metavar="",
        ),
    ] = False,
) -> None:
    """Only options of the program itself."""
