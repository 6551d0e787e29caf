"""The application: its commands, its version, and how it reports a line that cannot be read."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import descant
from descant.cli import terminal
from descant.cli.chat import ChatCommand
from descant.cli.command import USAGE, typer_callback
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
from descant.cli.show import ShowTraceCommand
from descant.cli.train import TrainCommand
from descant.cli.tree import TreeCommand
from descant.cli.watermark import DetectCommand, KeyCommand

__all__ = ["build_app"]

GENERATION_COMMANDS = {
    "generate": GenerateCommand,
    "chat": ChatCommand,
    "explain": ExplainCommand,
}  # every generation parameter is an option
TRACE_COMMANDS = {"tree": TreeCommand, "show": ShowTraceCommand}
COMMAND_GROUPS = {
    "recipe": (
        "Look at other people's methods of decoding, trust them, and make and share your own.",
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
        "Look for watermarks in texts, make keys, and train detectors.",
        {"detect": DetectCommand, "key": KeyCommand, "train": TrainCommand},
    ),
}


class CommandGroup(TyperGroup):
    """The commands, whose usage errors are one line like all others."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line and exit with its code."""
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except Exception as error:
            show = getattr(error, "format_message", None)  # of every usage error, whichever click is below
            if show is None:
                raise
            context = getattr(error, "ctx", None)
            path = "descant" if context is None else context.command_path
            if show():  # nothing where the line was empty and the help has been shown
                terminal.print_error(f"{show()} (see {path} --help)")
            code = USAGE
        sys.exit(code or 0)


def build_app() -> typer.Typer:
    """The command line as typer sees it."""
    app = typer.Typer(
        cls=CommandGroup,
        name="descant",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(help=descant.__doc__)(_root)
    for name, kind in (GENERATION_COMMANDS | TRACE_COMMANDS).items():
        app.command(name, no_args_is_help=False)(typer_callback(kind))
    for group, (about, commands) in COMMAND_GROUPS.items():
        below = typer.Typer(name=group, help=about, no_args_is_help=True, pretty_exceptions_enable=False)
        for name, kind in commands.items():
            below.command(name, no_args_is_help=False)(typer_callback(kind))
        app.add_typer(below)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        terminal.write(f"descant {descant.__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="ShowTraceCommand the version.",
            metavar="",
        ),
    ] = False,
) -> None:
    """Nothing by itself: every command has its own options."""
