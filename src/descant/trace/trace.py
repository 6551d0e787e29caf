"""A trace: all that a run has told, which can be saved, replayed without the model, and drawn."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from descant.errors import InputError, TraceError
from descant.trace.pictures.page import render_page
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg import render_svg
from descant.trace.pictures.terminal import TerminalCanvas, render_terminal
from descant.trace.records import (
    RequestRecord,
    ResultRecord,
    StepRecord,
    TokenTexts,
    TraceHeader,
    TraceRecord,
    TruncationRecord,
    read_records,
    to_json_line,
)
from descant.trace.replay import StepState, replay_steps
from descant.trace.tree import Tree

__all__ = ["MAX_TRACE_BYTES", "Trace"]

MAX_TRACE_BYTES: Final = 256_000_000  # bytes of a file that is read


class Trace:
    """The records of a run in their order, the header first, and what they come to."""

    def __init__(self, records: Iterable[TraceRecord]) -> None:
        self.records = tuple(records)
        if not self.records or not isinstance(self.records[0], TraceHeader):
            raise TraceError("a trace must begin with its header")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The trace in a file; a TraceError says what is wrong with one that cannot be read."""
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_TRACE_BYTES + 1)
        except OSError as error:
            raise TraceError(f"{path} must be a file that can be read, got {error.strerror}") from None
        if len(data) > MAX_TRACE_BYTES:
            raise TraceError(f"{path} must have at most {MAX_TRACE_BYTES} bytes, got more")
        try:
            text = data.decode("ascii")
        except UnicodeDecodeError:
            raise TraceError(f"{path} must be a trace, which is all ASCII") from None
        return cls(read_records(text.splitlines()))

    def save(self, path: str | Path) -> Path:
        """Write it to a file, one record a line."""
        Path(path).write_text("".join(to_json_line(one) + "\n" for one in self.records), encoding="ascii")
        return Path(path)

    # -------------------------------------------------------------------- what it holds
    @property
    def header(self) -> TraceHeader:
        """What was decoded, and how much of it is kept."""
        first = self.records[0]
        assert isinstance(first, TraceHeader)
        return first

    @cached_property
    def requests(self) -> Mapping[int, RequestRecord]:
        """What was asked for, by request, in the order of admission."""
        return {one.request: one for one in self.records if isinstance(one, RequestRecord)}

    @cached_property
    def steps(self) -> Sequence[StepRecord]:
        """The steps in order."""
        return tuple(one for one in self.records if isinstance(one, StepRecord))

    def steps_of(self, request: int) -> list[StepRecord]:
        """The steps in which a request had rows."""
        return [one for one in self.steps if any(row.request == request for row in one.rows)]

    @cached_property
    def results(self) -> Mapping[int, ResultRecord]:
        """How requests ended, by request; one that did not is not there."""
        return {one.request: one for one in self.records if isinstance(one, ResultRecord)}

    @cached_property
    def truncations(self) -> Sequence[TruncationRecord]:
        """What the limit left no room for."""
        return tuple(one for one in self.records if isinstance(one, TruncationRecord))

    @cached_property
    def texts(self) -> Mapping[int, str]:
        """What each token stands for, bytes that are no UTF-8 as lone surrogates; {} without a tokenizer."""
        return {
            token: text
            for one in self.records
            if isinstance(one, TokenTexts)
            for token, text in one.texts.items()
        }

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The tokens whose texts are names."""
        return frozenset(
            token for one in self.records if isinstance(one, TokenTexts) for token in one.special
        )

    @cached_property
    def tree(self) -> Tree:
        """Every token that any row ever took, and what became of it."""
        return Tree(self.records)

    def replay(self) -> Iterator[StepState]:
        """Go through it again, without the model: after every step the rows as they stood.

        Each moment has the rows that go on, those that the step ended, and what requests then returned.
        """
        return replay_steps(self.records)

    # -------------------------------------------------------------------- pictures
    def html(self, beside: Trace | None = None, title: str | None = None) -> str:
        """All pictures as one page that needs nothing else, of this run or of two side by side."""
        return render_page(self, beside, title)

    def svg(self, picture: str = "tree", *, beside: Trace | None = None, **where: Any) -> str:
        """One picture as SVG: "tree", "text", "processors", "speculation" or "beside".

        `request`, `sequence` and `step` say of what: the first, the best and the last unless told.
        """
        return render_svg(self, picture, _parse_selection(where).resolve(self), beside)

    def text(
        self,
        picture: str = "tree",
        *,
        beside: Trace | None = None,
        width: int = 80,
        colour: bool = False,
        **where: Any,
    ) -> str:
        """The same as lines of text, to be printed; with `colour` for a terminal that has colours."""
        lines = render_terminal(
            self, picture, _parse_selection(where).resolve(self), beside, TerminalCanvas(width, colour)
        )
        return lines.removesuffix("\n")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that a notebook's styles and its own leave each other alone."""
        source = html.escape(self.html(), quote=True)
        return (
            f'<iframe title="Trace of a run" sandbox="allow-scripts" srcdoc="{source}" '
            'style="width:100%;height:640px;border:0"></iframe>'
        )


def _parse_selection(given: Mapping[str, Any]) -> TraceSelection:
    """Of what a picture is to be, by the names that there are."""
    for name, value in given.items():
        if name not in ("request", "sequence", "step"):
            raise InputError(name, "must be one of `request`, `sequence` and `step`", value, "leave it out")
        if type(value) is not int and not (value is None and name != "sequence"):
            raise InputError(name, "must be an int", value)
    return TraceSelection(**given)
