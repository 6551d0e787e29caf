"""Lines of text for a terminal: never too wide, and nothing in them that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from descant.tokenization.display import plain, shown
from descant.trace.pictures.terminal_cells import cells, clipped, wrapped

__all__ = ["GROUPS", "Paper", "Span"]

Span = tuple[str, str]  # letters, and names of styles with spaces between them

GROUPS: Final = 8
_COLOURS: Final = (33, 166, 35, 134, 168, 142, 38, 137)  # of groups
_SHADES: Final = (230, 222, 215, 208)  # the less likely the deeper; letters on them are black
_STYLES: Final = {
    "bold": "1",
    "dim": "2",
    "under": "4",
    "gone": "9",
    "accent": "38;5;33",
    "good": "38;5;35",
    "bad": "38;5;167",
    "warm": "38;5;172",
    **{f"g{at}": f"38;5;{colour}" for at, colour in enumerate(_COLOURS)},
    **{f"shade{at}": f"38;5;16;48;5;{colour}" for at, colour in enumerate(_SHADES, 1)},
}


@dataclass(frozen=True)
class Paper:
    """How wide lines may be, and whether they may have colours."""

    width: int = 80
    colour: bool = False

    def line(self, *spans: Span) -> str:
        """A line of letters, cut to the width."""
        room, said = max(self.width, 0), ""
        for letters, style in spans:
            safe = clipped(shown(letters), room)
            said += self._painted(plain(safe), style)
            room -= cells(plain(safe))
            if safe and safe[-1] == ("…", True) and safe != shown(letters):
                break
        return said if self.colour else said.rstrip(" ")

    def lines(self, rows: Iterable[Iterable[Span]]) -> str:
        """Many of them."""
        return "".join(self.line(*row) + "\n" for row in rows)

    def told(self, said: str, style: str = "dim") -> list[list[Span]]:
        """A sentence, on as many lines as it needs."""
        return [[(plain(row), style)] for row in wrapped(shown(said), max(self.width, 1))]

    def _painted(self, letters: str, style: str) -> str:
        codes = ";".join(_STYLES[name] for name in style.split() if name in _STYLES)
        return f"\x1b[{codes}m{letters}\x1b[0m" if codes and self.colour and letters else letters
