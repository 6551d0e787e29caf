"""The records of a trace, one line of JSON each.

A trace is a list of records. Numbers are rounded to four decimals, log(0) is null, and default values are
left out. A token's text decodes its bytes, with invalid UTF-8 as lone surrogates, so that
`text.encode("utf-8", "surrogateescape")` returns the bytes.

Tokens are nodes of a tree. Every request has a root, which stands for its prompt; a token that a row appends
is a new node below the row's previous node. Node numbers are unique within a trace.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, get_args, get_origin, get_type_hints

from descant.errors import TraceError

TRACE_FORMAT: Final = "descant-trace"
TRACE_VERSION: Final = 1


class CandidateRecord(NamedTuple):
    """A candidate token with its log-probability before and after the processors."""

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
    """The effect of one processor, or of a model wrapper, at one position."""

    name: str  # its class
    kept: int  # possible tokens after it
    cut: int = 0  # tokens that it removed
    mass: float = 0.0  # probability of the removed tokens before it
    # The likeliest before it, the most shifted, some removed ones; likeliest first.
    moved: tuple[TokenShift, ...] = ()


@dataclass(frozen=True)
class ChoiceRecord:
    """The choice of one token: the model's distribution, and what the processors left of it."""

    entropy: float  # of the model's distribution, in nats
    left: float  # entropy after the processors, in nats
    top: tuple[CandidateRecord, ...] = ()  # likeliest after the processors first; includes every chosen token
    stages: tuple[ProcessorRecord, ...] = ()  # processors with an effect, in order


@dataclass(frozen=True)
class RunRecord:
    """Tokens that a row appended in one step: accepted drafts, then its own choice.

    The first is a child of the row's node, or of the ancestor `back` levels above it; each further one is a
    child of the one before. Token `i` belongs to `looks[i]` of its row. A run with a reason has finished.
    """

    tokens: tuple[int, ...]
    nodes: tuple[int, ...]
    slot: int = 0  # slot of the row that continues it, within its request
    back: int = 0  # tokens taken back first
    score: float | None = None  # beam score; of a finished run with the length penalty
    met: int | None = None  # fulfilled constraint tokens
    reason: str | None = None  # finish reason: "eos", "length", "time", "stop"; None: running


@dataclass(frozen=True)
class RowRecord:
    """One row of the table at the start of a step. Without a run it was dropped."""

    request: int
    at: int  # its node
    slot: int = 0
    looks: tuple[ChoiceRecord, ...] = ()  # choice after the row, and after each accepted draft
    drafts: tuple[int, ...] = ()  # draft tokens
    runs: tuple[RunRecord, ...] = ()  # more than one if it forked


@dataclass(frozen=True)
class ReturnedSequence:
    """A returned sequence."""

    tokens: tuple[int, ...]
    reason: str
    leaf: int  # last node
    score: float | None = None
    unmet: tuple[int, ...] | None = None  # indices of unfulfilled constraints; None: no constraints


@dataclass(frozen=True)
class TraceHeader:
    """The first record: the model and the limits of the trace."""

    kind: ClassVar[str] = "header"
    descant: str  # version of descant that wrote it
    model: str  # class of the model
    vocabulary: int
    top: int  # candidates recorded per choice
    limit: int  # byte limit
    format: str = TRACE_FORMAT
    version: int = TRACE_VERSION


@dataclass(frozen=True)
class RequestRecord:
    """An admitted request."""

    kind: ClassVar[str] = "request"
    request: int
    root: int  # the node that stands for its prompt
    prompt: tuple[int, ...]
    method: str  # description, such as "beam search, 4 beams"
    config: Mapping[str, Any] = field(default_factory=dict)  # explicitly set fields, as JSON values
    stages: tuple[str, ...] = ()  # processor names, in order
    beams: int = 1
    groups: int = 1
    sequences: int = 1  # number of sequences to return
    drafter: str | None = None  # name of the drafter
    demands: int | None = None  # tokens required by its constraints; None: no constraints


@dataclass(frozen=True)
class TokenTexts:
    """Texts of tokens, written before the first record that uses them."""

    kind: ClassVar[str] = "texts"
    texts: Mapping[int, str]
    special: tuple[int, ...] = ()  # special tokens among them


@dataclass(frozen=True)
class StepRecord:
    """One decoding step."""

    kind: ClassVar[str] = "step"
    step: int
    seconds: float  # duration
    rows: tuple[RowRecord, ...] = ()
    cache: int | None = None  # bytes of the KV cache; None: unknown


@dataclass(frozen=True)
class ResultRecord:
    """The result of a request: its sequences, best first, or its error."""

    kind: ClassVar[str] = "result"
    request: int
    sequences: tuple[ReturnedSequence, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class TruncationRecord:
    """From this step on records of the category `what` are left out because of the byte limit.

    "details": candidates other than chosen tokens, and processor effects; "steps": whole steps; "requests":
    requests admitted later; "results": results of requests.
    """

    kind: ClassVar[str] = "cut"
    step: int
    what: str


TraceRecord = TraceHeader | RequestRecord | TokenTexts | StepRecord | ResultRecord | TruncationRecord
_RECORD_TYPES: Final[Mapping[str, type[Any]]] = {
    record_type.kind: record_type
    for record_type in (TraceHeader, RequestRecord, TokenTexts, StepRecord, ResultRecord, TruncationRecord)
}


# ------------------------------------------------------------------------ serialization
def to_json_line(record: TraceRecord) -> str:
    """A record as a line of JSON, in ASCII."""
    return json.dumps(
        {"kind": record.kind, **_nondefault_fields(record)}, separators=(",", ":"), allow_nan=False
    )


def read_records(lines: Iterable[str]) -> Iterator[TraceRecord]:
    """Parse the lines of a trace; an error names the invalid line."""
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line, parse_constant=_reject_constant, parse_float=_parse_finite)
            record: TraceRecord = _parse_record(data)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(
                f"line {number} must be a record, got {' '.join(reason.split())[:200]}"
            ) from None
        if (number == 1) != isinstance(record, TraceHeader):
            raise TraceError(
                f"a trace must begin with its header and have one, got {record.kind!r} in line {number}"
            )
        yield record
    if not number:
        raise TraceError("a trace must begin with its header, got an empty file")


def round_finite(value: float | None) -> float | None:
    """A number rounded to four decimals; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _nondefault_fields(record: Any) -> dict[str, Any]:
    """The fields of a record that differ from their default, as JSON values."""
    return {
        spec.name: _to_json(value)
        for spec in dataclasses.fields(record)
        if (value := getattr(record, spec.name)) != _field_default(spec) or spec.name in ("format", "version")
    }


def _field_default(spec: dataclasses.Field[Any]) -> Any:
    """The default of a field; MISSING, which equals no value, if it has none."""
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def _to_json(value: Any) -> Any:
    """A value as JSON."""
    if isinstance(value, float):
        return round_finite(value)
    if isinstance(value, CandidateRecord) and value.raw == value.processed:
        return [value.token, round_finite(value.raw)]
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}  # JSON already: not rounded
    return _nondefault_fields(value) if dataclasses.is_dataclass(value) else value


def _reject_constant(name: str) -> float:
    raise ValueError(f"the number {name}")


def _parse_finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _reject_constant(text[:40])


# ------------------------------------------------------------------------ parsing
def _checked(value: Any, kinds: type | tuple[type, ...], expected: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{str(value)[:40]!r} for {expected}")
    return value


def _count(value: Any) -> int:
    if not 0 <= _checked(value, int, "a whole number") < 2**53:
        raise ValueError(f"{str(value)[:40]} for a count")
    return int(value)


def _float(value: Any) -> float:
    """A finite number."""
    return float(_checked(value, (int, float), "a number"))


def _log_prob(value: Any) -> float:
    """A log-probability; null is log(0)."""
    return -math.inf if value is None else _float(value)


def _str(value: Any) -> str:
    return str(_checked(value, str, "a text"))


def _object(value: Any) -> dict[str, Any]:
    return dict(_checked(value, dict, "an object"))


def _token_texts(value: Any) -> dict[int, str]:
    return {_count(int(token)): _str(text) for token, text in _object(value).items()}


def _candidate(value: Any) -> CandidateRecord:
    if len(_checked(value, list, "a candidate")) not in (2, 3):
        raise ValueError(f"{str(value)[:40]!r} for a candidate")
    return CandidateRecord(_count(value[0]), _log_prob(value[1]), _log_prob(value[-1]))


def _token_shift(value: Any) -> TokenShift:
    if len(_checked(value, list, "a moved token")) != 3:
        raise ValueError(f"{str(value)[:40]!r} for a moved token")
    return TokenShift(_count(value[0]), _log_prob(value[1]), _log_prob(value[2]))


_PARSERS: dict[Any, Callable[[Any], Any]] = {
    int: _count, float: _float, str: _str, CandidateRecord: _candidate, TokenShift: _token_shift,
    Mapping[str, Any]: _object, Mapping[int, str]: _token_texts,
}  # fmt: skip


def _parser(annotation: Any) -> Callable[[Any], Any]:
    """The parser of a field by its annotation, or of the objects of a record class."""
    if annotation not in _PARSERS:
        arguments = get_args(annotation)
        if dataclasses.is_dataclass(annotation):
            _PARSERS[annotation] = _object_parser(annotation)
        elif get_origin(annotation) is tuple:  # tuple[X, ...]
            item = _parser(arguments[0])
            _PARSERS[annotation] = lambda value: tuple(map(item, _checked(value, list, "a list")))
        else:  # X | None
            given = _parser(arguments[0])
            _PARSERS[annotation] = lambda value: None if value is None else given(value)
    return _PARSERS[annotation]


def _object_parser(record: Any) -> Callable[[Any], Any]:
    """A parser for objects of a record class, with one rule per field and no other fields."""
    hints = get_type_hints(record)
    rules = {spec.name: _parser(hints[spec.name]) for spec in dataclasses.fields(record)}

    def parse(value: Any) -> Any:
        given = _object(value)
        for name in given:
            if name not in rules:
                raise ValueError(f"an unknown field {name[:40]!r}")
        try:
            return record(**{name: rules[name](item) for name, item in given.items()})
        except TypeError as error:  # a required field is missing
            raise ValueError(f"{record.__name__} without {str(error).rpartition(': ')[2]}") from None

    return parse


_RECORD_PARSERS: Final = {name: _parser(record) for name, record in _RECORD_TYPES.items()}


def _parse_record(given: Any) -> Any:
    """A parsed line as a record."""
    named = _object(given)
    kind = named.pop("kind", None)
    if kind not in _RECORD_PARSERS:
        raise ValueError(f"{str(kind)[:40]!r} for a kind of record")
    record = _RECORD_PARSERS[kind](named)
    if kind == TraceHeader.kind:
        if not {"format", "version"} <= named.keys():
            raise ValueError("a header without format and version")
        if record.format != TRACE_FORMAT:
            raise ValueError(f"{record.format[:40]!r} for the format {TRACE_FORMAT!r}")
        if record.version != TRACE_VERSION:
            raise ValueError(f"version {record.version}, and this descant reads version {TRACE_VERSION}")
    return record
