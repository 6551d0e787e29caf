"""Detections on the terminal: one as its figures and a sentence, several as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from descant.cli import terminal
from descant.cli.bayes_output import Posterior
from descant.cli.samples import Sample
from descant.decoding.watermark.detection import Detection
from descant.decoding.watermark.explain import GENERALLY, chance, facts, meaning, number

__all__ = ["Answer", "show"]

STYLES: Final = {"marked": "green", "not marked": "", "too short to tell": "yellow"}
COLUMNS: Final = ("text", "verdict", "scheme", "key", "scored", "score", "95 % interval", "z", "p")
RARE: Final = ("passage", "bayes")  # columns that only some questions have
RIGHT: Final = frozenset({"scored", "score", "z", "p"})
WIDE, PROSE = 200, 80  # of a table where nobody's terminal limits it, and of sentences


@dataclass(frozen=True)
class Answer:
    """A text and what is said of it."""

    sample: Sample
    detection: Detection
    posterior: Posterior | None = None

    def facts(self) -> list[tuple[str, str]]:
        """The figures, each with its name."""
        bayes = [] if self.posterior is None else [("bayes", str(self.posterior))]
        return [("text", self.sample.name), *facts(self.detection), *bayes]


def show(answers: Sequence[Answer]) -> None:
    """Write what was found to standard output."""
    console = Console(highlight=False, markup=False)
    plain = not console.is_terminal
    if plain:
        console = Console(highlight=False, markup=False, width=WIDE)
    with console.capture() as made:
        console.print(_figures(answers[0]) if len(answers) == 1 else _table(answers))
        for sentence in _sentences(answers):
            console.print()
            console.print(textwrap.fill(sentence, min(console.width, PROSE)))
    # Cells are padded to the width of their columns, the last of a line as well.
    terminal.write("\n".join(line.rstrip() if plain else line for line in made.get().split("\n")))


def _sentences(answers: Sequence[Answer]) -> list[str]:
    """What the verdicts mean."""
    if len(answers) == 1:
        return [meaning(answers[0].detection)]
    seen = {one.detection.verdict for one in answers}
    alpha, count = answers[0].detection.alpha, len(answers)
    return [
        *(f"{verdict}: {told}" for verdict, told in GENERALLY.items() if verdict in seen),
        f"At --alpha {alpha:g}, {count * alpha:.2g} of {count} unmarked texts are called marked on average.",
    ]


def _figures(answer: Answer) -> Table:
    grid = Table.grid(padding=(0, 3, 0, 0))
    for name, value in answer.facts():
        style = STYLES[answer.detection.verdict] if name == "verdict" else ""
        grid.add_row(Text(name, style="dim"), Text(value, style=style))
    return grid


def _table(answers: Sequence[Answer]) -> Table:
    told = [dict(answer.facts()) for answer in answers]
    rare = [name for name in RARE if any(name in one for one in told)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in (*COLUMNS, *rare):
        table.add_column(column, justify="right" if column in RIGHT else "left", overflow="fold")
    for answer, known in zip(answers, told, strict=True):
        one = answer.detection
        # Shorter than where one text has a line for each.
        short = {
            "scored": f"{one.scored}/{one.tokens}",
            "score": number(one.score),
            "p": chance(one.p_value),
        }
        cells = [{**known, **short}.get(column, "") for column in (*COLUMNS, *rare)]
        styles = [STYLES[one.verdict] if column == "verdict" else "" for column in (*COLUMNS, *rare)]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return table
