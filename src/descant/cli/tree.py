"""`descant tree`: every hypothesis of a trace, on the terminal or as a file."""

from __future__ import annotations

from dataclasses import dataclass

from descant.cli import terminal
from descant.cli.command import Command
from descant.cli.show import File, Request, Step, Svg, opened, paper, put, refuse_same

__all__ = ["Tree"]


@dataclass(frozen=True, kw_only=True)
class Tree(Command):
    """Show the tree of a trace: all that was tried, with scores; what was dropped, and what was best."""

    file: File
    svg: Svg = None
    request: Request = None
    step: Step = None

    def run(self) -> int:
        """Draw it."""
        refuse_same(self.svg, self.file, "svg")
        trace = opened(self.file)
        if self.svg is not None:
            put(trace.svg("tree", request=self.request, step=self.step), self.svg, "svg")
        else:
            terminal.write(trace.text("tree", request=self.request, step=self.step, **paper()) + "\n")
        return 0
