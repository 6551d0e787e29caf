"""Prints detections: one as a list of figures with a sentence, several as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from descant.cli import terminal
from descant.cli.bayes_scorer import Posterior
from descant.cli.samples import TextSample
from descant.core.atomic_file import write_text
from descant.decoding.watermark.detection import Detection
from descant.decoding.watermark.explain import (
    VERDICT_TEXTS,
    explain_verdict,
    format_number,
    format_p_value,
    summary_items,
)
from descant.decoding.watermark.html_report import render_report
from descant.errors import InputError

__all__ = ["SampleDetection", "print_detections", "write_page"]

VERDICT_STYLES: Final = {"marked": "green", "not marked": "", "too short to tell": "yellow"}
COLUMNS: Final = ("text", "verdict", "scheme", "key", "scored", "score", "95 % interval", "z", "p")
OPTIONAL_COLUMNS: Final = ("passage", "bayes")
RIGHT_ALIGNED: Final = frozenset({"scored", "score", "z", "p"})
TABLE_WIDTH, PROSE_WIDTH = 200, 80  # width of a table that is not on a terminal, and of sentences


@dataclass(frozen=True)
class SampleDetection:
    """A text and its detection."""

    sample: TextSample
    detection: Detection
    posterior: Posterior | None = None

    def named_figures(self) -> list[tuple[str, str]]:
        """The figures with their names."""
        bayes = [] if self.posterior is None else [("bayes", str(self.posterior))]
        # Names of files and keys come from elsewhere.
        named = [("text", self.sample.name), *summary_items(self.detection), *bayes]
        return [(name, terminal.escape_control(value)) for name, value in named]


def print_detections(answers: Sequence[SampleDetection]) -> None:
    """Write detections to standard output."""
    console = Console(highlight=False, markup=False)
    is_plain = not console.is_terminal
    if is_plain:
        console = Console(highlight=False, markup=False, width=TABLE_WIDTH)
    with console.capture() as captured:
        console.print(_figures_table(answers[0]) if len(answers) == 1 else _detections_table(answers))
        for sentence in _verdict_notes(answers):
            console.print()
            console.print(textwrap.fill(sentence, min(console.width, PROSE_WIDTH)))
    # The last cell of a line is padded too: strip it.
    terminal.write("\n".join(line.rstrip() if is_plain else line for line in captured.get().split("\n")))


def _verdict_notes(answers: Sequence[SampleDetection]) -> list[str]:
    """The meaning of the verdicts."""
    if len(answers) == 1:
        return [explain_verdict(answers[0].detection)]
    verdicts = {one.detection.verdict for one in answers}
    alpha, count = answers[0].detection.alpha, len(answers)
    return [
        *(f"{verdict}: {meaning}" for verdict, meaning in VERDICT_TEXTS.items() if verdict in verdicts),
        f"At --alpha {alpha:g}, {count * alpha:.2g} of {count} unmarked texts are called marked on average.",
    ]


def _figures_table(answer: SampleDetection) -> Table:
    grid = Table.grid(padding=(0, 3, 0, 0))
    for name, value in answer.named_figures():
        style = VERDICT_STYLES[answer.detection.verdict] if name == "verdict" else ""
        grid.add_row(Text(name, style="dim"), Text(value, style=style))
    return grid


def _detections_table(answers: Sequence[SampleDetection]) -> Table:
    figures = [dict(answer.named_figures()) for answer in answers]
    extra_columns = [name for name in OPTIONAL_COLUMNS if any(name in detection for detection in figures)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in (*COLUMNS, *extra_columns):
        table.add_column(column, justify="right" if column in RIGHT_ALIGNED else "left", overflow="fold")
    for answer, named in zip(answers, figures, strict=True):
        detection = answer.detection
        # Shorter than in the list of one text.
        short = {
            "scored": f"{detection.scored}/{detection.tokens}",
            "score": format_number(detection.score),
            "p": format_p_value(detection.p_value),
        }
        cells = [{**named, **short}.get(column, "") for column in (*COLUMNS, *extra_columns)]
        styles = [
            VERDICT_STYLES[detection.verdict] if column == "verdict" else ""
            for column in (*COLUMNS, *extra_columns)
        ]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return table


def write_page(target: Path, answers: Sequence[SampleDetection], tokenizer: Any) -> None:
    """Write the HTML report of `--html`."""
    detections = [one.detection for one in answers]
    # Without offsets the position of a token in the text is unknown: show the token alone.
    texts = [
        one.sample.text
        if one.sample.text is not None and one.detection.offsets is not None
        else [tokenizer.decode([token]) for token in one.detection.ids]
        for one in answers
    ]
    try:
        write_text(target, render_report(detections, texts, [one.sample.name for one in answers]))
    except OSError as error:
        raise InputError(
            "html", f"must be a file that can be written ({error.strerror})", str(target)
        ) from None
