"""Lines of text for a terminal, cut to its width, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.terminal_cells import cell_width, clip_pieces, wrap_pieces

__all__ = ["NUM_GROUP_COLOURS", "StyledText", "TerminalCanvas"]

StyledText = tuple[str, str]  # text, and style names separated by spaces

NUM_GROUP_COLOURS: Final = 8
_GROUP_COLOURS: Final = (33, 166, 35, 134, 168, 142, 38, 137)
_SHADE_COLOURS: Final = (230, 222, 215, 208)  # darker for less likely tokens; their text is black
_ANSI_STYLES: Final = {
    "bold": "1",
    "dim": "2",
    "under": "4",
    "gone": "9",
    "accent": "38;5;33",
    "good": "38;5;35",
    "bad": "38;5;167",
    "warm": "38;5;172",
    **{f"g{at}": f"38;5;{colour}" for at, colour in enumerate(_GROUP_COLOURS)},
    **{f"shade{at}": f"38;5;16;48;5;{colour}" for at, colour in enumerate(_SHADE_COLOURS, 1)},
}


@dataclass(frozen=True)
class TerminalCanvas:
    """Width of a terminal, and whether it has colours."""

    width: int = 80
    colour: bool = False

    def format_line(self, *spans: StyledText) -> str:
        """A line, cut to the width."""
        cells_left, line = max(self.width, 0), ""
        for letters, style in spans:
            clipped = clip_pieces(escape_invisible(letters), cells_left)
            line += self._apply_style(join_pieces(clipped), style)
            cells_left -= cell_width(join_pieces(clipped))
            if clipped and clipped[-1] == ("…", True) and clipped != escape_invisible(letters):
                break
        return line if self.colour else line.rstrip(" ")

    def format_lines(self, rows: Iterable[Iterable[StyledText]]) -> str:
        """Several lines."""
        return "".join(self.format_line(*row) + "\n" for row in rows)

    def wrap_text(self, text: str, style: str = "dim") -> list[list[StyledText]]:
        """A text wrapped to the width."""
        return [
            [(join_pieces(row), style)] for row in wrap_pieces(escape_invisible(text), max(self.width, 1))
        ]

    def _apply_style(self, letters: str, style: str) -> str:
        codes = ";".join(_ANSI_STYLES[name] for name in style.split() if name in _ANSI_STYLES)
        return f"\x1b[{codes}m{letters}\x1b[0m" if codes and self.colour and letters else letters
