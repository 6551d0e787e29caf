"""The application: its commands, its version, and how it reports a line that cannot be read."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import descant
from descant.cli import terminal
from descant.cli.chat import Chat
from descant.cli.command import USAGE, callback
from descant.cli.explain import Explain
from descant.cli.generate import Generate
from descant.cli.recipe import Check, Forget, List, New, Push, Trust
from descant.cli.recipe import Show as ShowRecipe
from descant.cli.show import Show
from descant.cli.train import Train
from descant.cli.tree import Tree
from descant.cli.watermark import Detect, Key

__all__ = ["application"]

COMMANDS = {"generate": Generate, "chat": Chat, "explain": Explain}  # every generation parameter is an option
VIEWERS = {"tree": Tree, "show": Show}
GROUPS = {
    "recipe": (
        "Look at other people's methods of decoding, trust them, and make and share your own.",
        {
            "show": ShowRecipe,
            "trust": Trust,
            "list": List,
            "forget": Forget,
            "new": New,
            "check": Check,
            "push": Push,
        },
    ),
    "watermark": (
        "Look for watermarks in texts, make keys, and train detectors.",
        {"detect": Detect, "key": Key, "train": Train},
    ),
}


class Group(TyperGroup):
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
                terminal.blame(f"{show()} (see {path} --help)")
            code = USAGE
        sys.exit(code or 0)


def application() -> typer.Typer:
    """The command line as typer sees it."""
    app = typer.Typer(
        cls=Group, name="descant", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
    app.callback(help=descant.__doc__)(_root)
    for name, kind in (COMMANDS | VIEWERS).items():
        app.command(name, no_args_is_help=False)(callback(kind))
    for group, (about, commands) in GROUPS.items():
        below = typer.Typer(name=group, help=about, no_args_is_help=True, pretty_exceptions_enable=False)
        for name, kind in commands.items():
            below.command(name, no_args_is_help=False)(callback(kind))
        app.add_typer(below)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        terminal.write(f"descant {descant.__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Show the version.", metavar=""),
    ] = False,
) -> None:
    """Nothing by itself: every command has its own options."""
