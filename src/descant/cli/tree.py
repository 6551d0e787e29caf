"""`descant tree`: draw the tree of a trace on the terminal or to a file."""

from __future__ import annotations

from dataclasses import dataclass

from descant.cli import terminal
from descant.cli.command import Command
from descant.cli.show import (
    RequestOption,
    StepOption,
    SvgOption,
    TraceFileArgument,
    load_trace,
    reject_overwrite,
    terminal_options,
    write_output,
)

__all__ = ["TreeCommand"]


@dataclass(frozen=True, kw_only=True)
class TreeCommand(Command):
    """Show the tree of a trace: all hypotheses with scores, dropped and returned ones."""

    file: TraceFileArgument
    svg: SvgOption = None
    request: RequestOption = None
    step: StepOption = None

    def run(self) -> int:
        """Draw the tree."""
        reject_overwrite(self.svg, self.file, "svg")
        trace = load_trace(self.file)
        if self.svg is not None:
            write_output(trace.svg("tree", request=self.request, step=self.step), self.svg, "svg")
        else:
            terminal.write(
                trace.text("tree", request=self.request, step=self.step, **terminal_options()) + "\n"
            )
        return 0
