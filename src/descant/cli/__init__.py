"""The command line `descant`, with every generation parameter as an option.

It needs the extra `cli`; importing this package does not.
"""

from __future__ import annotations

import signal
import sys

from descant.cli.terminal import INTERRUPTED
from descant.errors import MissingExtra

__all__ = ["main"]

EXTRA = "cli"


def main() -> None:
    """Entry point: run the command line of this process, and exit with its code.

    Interrupts show no traceback: a command ends at the first one, and another one while it ends is final.
    """
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run() -> None:
    try:
        from descant.cli.application import build_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.stderr.write(f"error: {MissingExtra(EXTRA, 'the command line')}\n")
        sys.exit(1)
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        # Pipes use the locale's encoding by default, which may lack characters.
        if reconfigure is not None:
            reconfigure(encoding="utf-8")
    build_app()(prog_name="descant")
