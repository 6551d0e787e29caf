"""The report of `descant doctor` as text, Markdown and JSON, without paths and names of users."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import descant

__all__ = [
    "FAILED",
    "PASSED",
    "SKIPPED",
    "CheckRow",
    "DoctorReport",
    "Fact",
    "FastPathRow",
    "ShareRow",
    "SpeedRow",
    "one_line",
]

FORMAT: Final = 1  # of the JSON file; a changed meaning of a field has another number
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
HIDDEN: Final = {"hidden": True}  # only in the JSON file
# An absolute path of two names or more, of any system, or one below a home folder.
_PATH: Final = re.compile(
    r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?|(?<!\w)~[/\\][\w.@+-]+"
)
_REPLACED_PATH: Final = "<path>"


@dataclass(frozen=True)
class Fact:
    """A property of the machine or of a model."""

    name: str
    value: str


@dataclass(frozen=True)
class FastPathRow:
    """A fast path of a model on this device."""

    model: str
    path: str
    state: str  # on or off
    detail: str
    switch: str


@dataclass(frozen=True)
class CheckRow:
    """The result of a check: passed, failed with the message, or skipped with the reason."""

    model: str
    check: str
    status: str
    detail: str = ""
    seconds: float = field(default=0.0, metadata=HIDDEN)


@dataclass(frozen=True)
class ShareRow:
    """The share of new tokens that are those of transformers in half precision."""

    model: str
    check: str
    dtype: str
    share: float | None  # None: it could not run
    detail: str = ""


@dataclass(frozen=True)
class SpeedRow:
    """The time of an implementation in a case."""

    model: str
    case: str
    implementation: str
    ms_per_token: float | None  # of all rows together; None: it did not run
    speedup: float | None  # transformers' time / this time
    tokens: str  # "same" as transformers, "other", or empty
    repeats: int = 0
    detail: str = ""


@dataclass
class DoctorReport:
    """What the doctor has found; a section that was skipped is empty."""

    clock: str = ""  # what the times of `bench` are
    models: list[Fact] = field(default_factory=list)
    machine: list[Fact] = field(default_factory=list)
    fast_paths: list[FastPathRow] = field(default_factory=list)
    laws: list[CheckRow] = field(default_factory=list)
    parity: list[CheckRow] = field(default_factory=list)
    half: list[ShareRow] = field(default_factory=list)
    bench: list[SpeedRow] = field(default_factory=list)
    private: list[str] = field(default_factory=list)  # texts that are replaced, as the model's folder

    @property
    def num_failed(self) -> int:
        """The number of failed laws and parity checks."""
        return sum(row.status == FAILED for row in (*self.laws, *self.parity))

    def text(self) -> str:
        """The report as aligned tables."""
        parts = [f"{title}\n{_text_table(rows)}" for title, rows in self._sections() if rows]
        return self._scrub("\n\n".join([*parts, self._verdict()])) + "\n"

    def markdown(self) -> str:
        """The report as Markdown."""
        parts = [f"## {title}\n\n{_markdown_table(rows)}" for title, rows in self._sections() if rows]
        head = f"# descant doctor, descant {descant.__version__}"
        return self._scrub("\n\n".join([head, *parts, self._verdict()])) + "\n"

    def json(self) -> str:
        """The report as a JSON object."""
        found = {
            "format": FORMAT,
            "descant": descant.__version__,
            "failed": self.num_failed,
            "clock": self.clock,
            **{name: {row.name: row.value for row in getattr(self, name)} for name in ("models", "machine")},
            **{
                name: [dataclasses.asdict(row) for row in getattr(self, name)]
                for name in ("fast_paths", "laws", "parity", "half", "bench")
            },
        }
        return json.dumps(self._scrub_values(found), indent=2) + "\n"

    def _sections(self) -> list[tuple[str, Sequence[Any]]]:
        return [
            ("machine", self.machine),
            ("models", self.models),
            ("fast paths", self.fast_paths),
            ("laws", self.laws),
            ("parity with transformers", self.parity),
            ("half precision, share of equal tokens", self.half),
            (f"bench, {self.clock}", self.bench),
        ]

    def _verdict(self) -> str:
        checks = [row.status for row in (*self.laws, *self.parity)]
        counts = ", ".join(f"{checks.count(status)} {status}" for status in (PASSED, FAILED, SKIPPED))
        return f"checks: {counts}"

    def _scrub_values(self, value: Any) -> Any:
        """A JSON value with every text scrubbed."""
        if isinstance(value, str):
            return self._scrub(value)
        if isinstance(value, dict):
            return {name: self._scrub_values(one) for name, one in value.items()}
        return [self._scrub_values(one) for one in value] if isinstance(value, list) else value

    def _scrub(self, text: str) -> str:
        """A text without the private ones and without paths, which name users and machines."""
        for private in sorted({*self.private, str(Path.home())}, key=len, reverse=True):
            if len(private) > 1:
                text = text.replace(private, _REPLACED_PATH)
        return _PATH.sub(_REPLACED_PATH, text)


def one_line(message: object, limit: int = 400) -> str:
    """A message as one line of at most `limit` characters."""
    text = " ".join(str(message).split())
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def _cells(rows: Sequence[Any]) -> list[list[str]]:
    """The headings and the shown fields of records, without columns that are empty in all of them."""
    shown = [one for one in dataclasses.fields(rows[0]) if not one.metadata.get("hidden")]
    columns = [
        [one.name.replace("_", " "), *(_cell(getattr(row, one.name)) for row in rows)] for one in shown
    ]
    return [list(line) for line in zip(*(column for column in columns if any(column[1:])), strict=True)]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else one_line(value)


def _text_table(rows: Sequence[Any]) -> str:
    lines = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = lines[1:] if isinstance(rows[0], Fact) else lines
    return "\n".join(f"  {_joined(line, widths)}".rstrip() for line in lines)


def _joined(line: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))


def _markdown_table(rows: Sequence[Any]) -> str:
    head, *lines = [[cell.replace("|", "\\|") for cell in line] for line in _cells(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
