"""Lines of text for a terminal: never too wide, and nothing in them that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.terminal_cells import cell_width, clip_pieces, wrap_pieces

__all__ = ["NUM_GROUP_COLOURS", "StyledText", "TerminalCanvas"]

StyledText = tuple[str, str]  # letters, and names of styles with spaces between them

NUM_GROUP_COLOURS: Final = 8
_GROUP_COLOURS: Final = (33, 166, 35, 134, 168, 142, 38, 137)  # of groups
_SHADE_COLOURS: Final = (230, 222, 215, 208)  # the less likely the deeper; letters on them are black
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
    """How wide lines may be, and whether they may have colours."""

    width: int = 80
    colour: bool = False

    def format_line(self, *spans: StyledText) -> str:
        """A line of letters, cut to the width."""
        room, said = max(self.width, 0), ""
        for letters, style in spans:
            safe = clip_pieces(escape_invisible(letters), room)
            said += self._apply_style(join_pieces(safe), style)
            room -= cell_width(join_pieces(safe))
            if safe and safe[-1] == ("…", True) and safe != escape_invisible(letters):
                break
        return said if self.colour else said.rstrip(" ")

    def format_lines(self, rows: Iterable[Iterable[StyledText]]) -> str:
        """Many of them."""
        return "".join(self.format_line(*row) + "\n" for row in rows)

    def wrap_text(self, said: str, style: str = "dim") -> list[list[StyledText]]:
        """A sentence, on as many lines as it needs."""
        return [
            [(join_pieces(row), style)] for row in wrap_pieces(escape_invisible(said), max(self.width, 1))
        ]

    def _apply_style(self, letters: str, style: str) -> str:
        codes = ";".join(_ANSI_STYLES[name] for name in style.split() if name in _ANSI_STYLES)
        return f"\x1b[{codes}m{letters}\x1b[0m" if codes and self.colour and letters else letters
