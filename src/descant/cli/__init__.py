"""The command `descant`: generate, chat and explain, with every generation parameter as an option.

It needs the extra `cli`; importing this package alone does not.
"""

from __future__ import annotations

import sys

import torch

from descant.errors import MissingExtra

__all__ = ["main"]

EXTRA = "cli"


def main() -> None:
    """The entry point: runs the command line of this process and exits with its code."""
    try:
        from descant.cli.application import build_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.stderr.write(f"error: {MissingExtra(EXTRA, 'the command line')}\n")
        sys.exit(1)
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        if (
            reconfigure is not None
        ):  # pipes are in the locale's encoding otherwise, which may lack the characters
            reconfigure(encoding="utf-8")
    torch.seed()  # a new process draws the same numbers every time otherwise
    build_app()(prog_name="descant")
