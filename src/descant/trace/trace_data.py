"""The data of a trace: its records, and what is derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, Self

from descant.core.atomic_file import write_text
from descant.errors import TraceError
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

__all__ = ["MAX_TRACE_BYTES", "TraceData"]

MAX_TRACE_BYTES: Final = 256_000_000  # largest file that `load` reads


class TraceData:
    """The records of a run in order, the header first."""

    def __init__(self, records: Iterable[TraceRecord]) -> None:
        self.records = tuple(records)
        if not self.records or not isinstance(self.records[0], TraceHeader):
            raise TraceError("a trace must begin with its header")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace from a file; raises TraceError if the file is not a valid trace."""
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
            raise TraceError(f"{path} must be a trace: JSON lines in ASCII") from None
        return cls(read_records(text.splitlines()))

    def save(self, path: str | Path) -> Path:
        """Write the trace to a file, one record per line, whole or not at all."""
        write_text(path, "".join(to_json_line(one) + "\n" for one in self.records))
        return Path(path)

    # -------------------------------------------------------------------- contents
    @property
    def header(self) -> TraceHeader:
        """The header: model, version, limits."""
        first = self.records[0]
        assert isinstance(first, TraceHeader)
        return first

    @cached_property
    def requests(self) -> Mapping[int, RequestRecord]:
        """Requests by id, in order of admission."""
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
        """Results by request; a request that has not ended is absent."""
        return {one.request: one for one in self.records if isinstance(one, ResultRecord)}

    @cached_property
    def truncations(self) -> Sequence[TruncationRecord]:
        """What was left out because of the byte limit."""
        return tuple(one for one in self.records if isinstance(one, TruncationRecord))

    @cached_property
    def texts(self) -> Mapping[int, str]:
        """Text of each token, invalid UTF-8 bytes as lone surrogates; {} without a tokenizer."""
        return {
            token: text
            for one in self.records
            if isinstance(one, TokenTexts)
            for token, text in one.texts.items()
        }

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Special tokens: their text is a name."""
        return frozenset(
            token for one in self.records if isinstance(one, TokenTexts) for token in one.special
        )

    @cached_property
    def tree(self) -> Tree:
        """Every token of every hypothesis, as a tree."""
        return Tree(self.records)

    def replay(self) -> Iterator[StepState]:
        """Replay the run without the model: after every step its running rows, finished rows and results."""
        return replay_steps(self.records)
