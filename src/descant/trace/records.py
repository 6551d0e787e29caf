"""The records of a trace: what every step saw and chose, one line of JSON each.

A trace is a list of records. Numbers are rounded to four places; a logarithm of zero is null; what has its
default is left out. Texts are those of a token's bytes, bytes that are no UTF-8 as lone surrogates, so that
nothing is lost: `text.encode("utf-8", "surrogateescape")` are the bytes again.

Tokens are nodes of a tree. Every request has a root, which stands for its prompt; a token that a row takes
is a new node below the one that the row stood on. Nodes are numbered through the whole trace.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from descant.errors import TraceError

__all__ = [
    "TRACE_FORMAT",
    "TRACE_VERSION",
    "CandidateRecord",
    "ChoiceRecord",
    "ProcessorRecord",
    "RequestRecord",
    "ResultRecord",
    "ReturnedSequence",
    "RowRecord",
    "RunRecord",
    "StepRecord",
    "TokenShift",
    "TokenTexts",
    "TraceHeader",
    "TraceRecord",
    "TruncationRecord",
    "read_records",
    "round_finite",
    "to_json_line",
]

TRACE_FORMAT: Final = "descant-trace"
TRACE_VERSION: Final = 1


class CandidateRecord(NamedTuple):
    """A token that could have been taken, with its log-probability before and after the processors."""

    token: int
    raw: float
    processed: float


class TokenShift(NamedTuple):
    """A token before and after one processor, as log-probabilities."""

    token: int
    before: float
    after: float


@dataclass(frozen=True)
class ProcessorRecord:
    """What one processor, or a wrapper around the model, made of what it was given."""

    name: str  # of its class
    kept: int  # tokens that are possible after it
    cut: int = 0  # tokens that it made impossible
    mass: float = 0.0  # the probability, before it, of those
    moved: tuple[
        TokenShift, ...
    ] = ()  # the likeliest before it, the most moved, some it cut; likeliest first


@dataclass(frozen=True)
class ChoiceRecord:
    """The choice at one place: what the model said there, and what was left of it."""

    entropy: float  # of what the model said, in nats
    left: float  # of what was left to choose from
    top: tuple[
        CandidateRecord, ...
    ] = ()  # likeliest after the processors first; all that were taken are there
    stages: tuple[ProcessorRecord, ...] = ()  # that changed anything, in order


@dataclass(frozen=True)
class RunRecord:
    """Tokens that a row took in one step: accepted guesses, and then its own choice.

    The first is a child of the node that the row stood on, or of the one `back` above it; each other is a
    child of the one before. Token `i` was chosen at look `i` of its row. A run with a reason has ended.
    """

    tokens: tuple[int, ...]
    nodes: tuple[int, ...]
    slot: int = 0  # which of its request's rows goes on with it
    back: int = 0  # tokens that were taken back first
    score: float | None = None  # as beams rank it, in the end with its length taken into account
    met: int | None = None  # tokens of its constraints that it has met
    reason: str | None = None  # why it ended: "eos", "length", "time", "stop"; None: it goes on


@dataclass(frozen=True)
class RowRecord:
    """One row of the table as a step fed it. Without a run it was dropped."""

    request: int
    at: int  # the node it stood on
    slot: int = 0
    looks: tuple[ChoiceRecord, ...] = ()  # after the row itself, and after each guess that stood
    drafts: tuple[int, ...] = ()  # what was guessed
    runs: tuple[RunRecord, ...] = ()  # more than one where it forked


@dataclass(frozen=True)
class ReturnedSequence:
    """A sequence as it was returned."""

    tokens: tuple[int, ...]
    reason: str
    leaf: int  # its last node
    score: float | None = None
    unmet: tuple[int, ...] | None = None  # places of the constraints it does not meet; None: it had none


@dataclass(frozen=True)
class TraceHeader:
    """The first record: what was decoded, and how much of it is kept."""

    kind: ClassVar[str] = "header"
    descant: str  # the version that wrote it
    model: str  # its class
    vocabulary: int
    top: int  # candidates kept at each look
    limit: int  # bytes that it may have
    format: str = TRACE_FORMAT
    version: int = TRACE_VERSION


@dataclass(frozen=True)
class RequestRecord:
    """A request as it was admitted."""

    kind: ClassVar[str] = "request"
    request: int
    root: int  # the node that stands for its prompt
    prompt: tuple[int, ...]
    method: str  # in words, such as "beam search, 4 beams"
    config: Mapping[str, Any] = field(default_factory=dict)  # what was set, as far as JSON can say it
    stages: tuple[str, ...] = ()  # names of its processors, in order
    beams: int = 1
    groups: int = 1
    sequences: int = 1  # how many are to be returned
    drafter: str | None = None  # who guesses ahead
    demands: int | None = None  # tokens that its constraints ask for; None: it has none


@dataclass(frozen=True)
class TokenTexts:
    """What tokens stand for, before they are first met."""

    kind: ClassVar[str] = "texts"
    texts: Mapping[int, str]
    special: tuple[int, ...] = ()  # those of them that are names and not text


@dataclass(frozen=True)
class StepRecord:
    """One step of the loop."""

    kind: ClassVar[str] = "step"
    step: int
    seconds: float  # it took
    rows: tuple[RowRecord, ...] = ()
    cache: int | None = None  # bytes that it held then; None: it does not say


@dataclass(frozen=True)
class ResultRecord:
    """A request has ended: its sequences, best first, or the error that ended it."""

    kind: ClassVar[str] = "result"
    request: int
    sequences: tuple[ReturnedSequence, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class TruncationRecord:
    """From this step on the limit left no room for what is named.

    "details" are all candidates but the tokens taken, and what processors did; "steps" are whole steps;
    "requests" are those admitted later; "results" what requests returned.
    """

    kind: ClassVar[str] = "cut"
    step: int
    what: str


TraceRecord = TraceHeader | RequestRecord | TokenTexts | StepRecord | ResultRecord | TruncationRecord
_RECORD_TYPES: Final[Mapping[str, type[Any]]] = {
    one.kind: one
    for one in (TraceHeader, RequestRecord, TokenTexts, StepRecord, ResultRecord, TruncationRecord)
}


# ------------------------------------------------------------------------ to a line and back
def to_json_line(record: TraceRecord) -> str:
    """A record as a line of JSON, in ASCII."""
    return json.dumps(
        {"kind": record.kind, **_nondefault_fields(record)}, separators=(",", ":"), allow_nan=False
    )


def read_records(lines: Iterable[str]) -> Iterator[TraceRecord]:
    """The records of a trace's lines; an error names the line that is none."""
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            given = json.loads(line, parse_constant=_reject_constant, parse_float=_parse_finite)
            record: TraceRecord = _parse_record(given)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            said = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"line {number} must be a record, got {' '.join(said.split())[:200]}") from None
        if (number == 1) != isinstance(record, TraceHeader):
            raise TraceError(
                f"a trace must begin with its header and have one, got {record.kind!r} in line {number}"
            )
        yield record
    if not number:
        raise TraceError("a trace must begin with its header, got an empty file")


def round_finite(value: float | None) -> float | None:
    """A number as it is written; None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _nondefault_fields(record: Any) -> dict[str, Any]:
    """What of a record is not its default."""
    return {
        one.name: _to_json(value)
        for one in dataclasses.fields(record)
        if (value := getattr(record, one.name)) != _field_default(one) or one.name in ("format", "version")
    }


def _field_default(one: dataclasses.Field[Any]) -> Any:
    """What a field is where nothing is said of it; a value that none has, where something must be."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def _to_json(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return round_finite(value)
    if isinstance(value, CandidateRecord) and value.raw == value.processed:
        return [value.token, round_finite(value.raw)]
    if isinstance(value, list | tuple):
        return [_to_json(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}  # JSON already, and not to be rounded
    return _nondefault_fields(value) if dataclasses.is_dataclass(value) else value


def _reject_constant(name: str) -> float:
    raise ValueError(f"the number {name}")


def _parse_finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _reject_constant(text[:40])


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**53) < value < 2**53:
        raise ValueError(f"{str(value)[:40]!r} for a whole number")
    return value


def _count(value: Any) -> int:
    if _int(value) < 0:
        raise ValueError(f"{value!r} for a count")
    return int(value)


def _float(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:40]!r} for a number")
    return float(value)


def _log_prob(value: Any) -> float:
    """A logarithm, of zero where there is none."""
    return -math.inf if value is None else _float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} for a text")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} for an object")
    return value


def _token_texts(value: Any) -> dict[int, str]:
    return {_count(int(token)): _str(text) for token, text in _object(value).items()}


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else parse(value)


def _list_of(parse: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def each(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"{str(value)[:40]!r} for a list")
        return tuple(map(parse, value))

    return each


def _candidate(value: Any) -> CandidateRecord:
    if not isinstance(value, list) or len(value) not in (2, 3):
        raise ValueError(f"{str(value)[:40]!r} for a candidate")
    return CandidateRecord(_count(value[0]), _log_prob(value[1]), _log_prob(value[-1]))


def _token_shift(value: Any) -> TokenShift:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{str(value)[:40]!r} for a moved token")
    return TokenShift(_count(value[0]), _log_prob(value[1]), _log_prob(value[2]))


def _object_parser(kind: type[Any]) -> Callable[[Any], Any]:
    """What reads an object of that kind, every field by its own rule and no others."""
    rules = _FIELD_PARSERS[kind]

    def parse(value: Any) -> Any:
        given = _object(value)
        for name in given:
            if name not in rules:
                raise ValueError(f"an unknown field {name[:40]!r}")
        try:
            return kind(**{name: rules[name](one) for name, one in given.items()})
        except TypeError as error:  # a field without a default is not there
            raise ValueError(f"{kind.__name__} without {str(error).rpartition(': ')[2]}") from None

    return parse


def _version(value: Any) -> int:
    if _int(value) != TRACE_VERSION:
        raise ValueError(f"version {value}, and this descant reads version {TRACE_VERSION}")
    return TRACE_VERSION


def _format(value: Any) -> str:
    if value != TRACE_FORMAT:
        raise ValueError(f"{str(value)[:40]!r} for the format {TRACE_FORMAT!r}")
    return TRACE_FORMAT


_FIELD_PARSERS: dict[type[Any], dict[str, Callable[[Any], Any]]] = {}
_FIELD_PARSERS[ProcessorRecord] = {
    "name": _str,
    "kept": _count,
    "cut": _count,
    "mass": _float,
    "moved": _list_of(_token_shift),
}
_FIELD_PARSERS[ChoiceRecord] = {
    "entropy": _float, "left": _float, "top": _list_of(_candidate), "stages": _list_of(_object_parser(ProcessorRecord)),
}  # fmt: skip
_FIELD_PARSERS[RunRecord] = {
    "tokens": _list_of(_count), "nodes": _list_of(_count), "slot": _count, "back": _count,
    "score": _optional(_float), "met": _optional(_count), "reason": _optional(_str),
}  # fmt: skip
_FIELD_PARSERS[RowRecord] = {
    "request": _count, "at": _count, "slot": _count, "looks": _list_of(_object_parser(ChoiceRecord)),
    "drafts": _list_of(_count), "runs": _list_of(_object_parser(RunRecord)),
}  # fmt: skip
_FIELD_PARSERS[ReturnedSequence] = {
    "tokens": _list_of(_count), "reason": _str, "leaf": _count, "score": _optional(_float),
    "unmet": _optional(_list_of(_count)),
}  # fmt: skip
_FIELD_PARSERS[TraceHeader] = {
    "descant": _str, "model": _str, "vocabulary": _count, "top": _count, "limit": _count,
    "format": _format, "version": _version,
}  # fmt: skip
_FIELD_PARSERS[RequestRecord] = {
    "request": _count, "root": _count, "prompt": _list_of(_count), "method": _str, "config": _object,
    "stages": _list_of(_str), "beams": _count, "groups": _count, "sequences": _count,
    "drafter": _optional(_str), "demands": _optional(_count),
}  # fmt: skip
_FIELD_PARSERS[TokenTexts] = {"texts": _token_texts, "special": _list_of(_count)}
_FIELD_PARSERS[StepRecord] = {
    "step": _count,
    "seconds": _float,
    "rows": _list_of(_object_parser(RowRecord)),
    "cache": _optional(_count),
}
_FIELD_PARSERS[ResultRecord] = {
    "request": _count,
    "sequences": _list_of(_object_parser(ReturnedSequence)),
    "error": _optional(_str),
}
_FIELD_PARSERS[TruncationRecord] = {"step": _count, "what": _str}
_RECORD_PARSERS: Final = {name: _object_parser(kind) for name, kind in _RECORD_TYPES.items()}


def _parse_record(given: Any) -> Any:
    """A line's object as a record."""
    named = dict(_object(given))
    kind = named.pop("kind", None)
    if kind not in _RECORD_PARSERS:
        raise ValueError(f"{str(kind)[:40]!r} for a kind of record")
    if kind == TraceHeader.kind and not {"format", "version"} <= named.keys():
        raise ValueError("a header without format and version")
    return _RECORD_PARSERS[kind](named)
