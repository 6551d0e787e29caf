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
    "FORMAT",
    "VERSION",
    "Asked",
    "Candidate",
    "Cut",
    "Header",
    "Look",
    "Moved",
    "Record",
    "Result",
    "Row",
    "Run",
    "Said",
    "Stage",
    "Step",
    "Texts",
    "line_of",
    "read",
    "rounded",
]

FORMAT: Final = "descant-trace"
VERSION: Final = 1


class Candidate(NamedTuple):
    """A token that could have been taken, with its log-probability before and after the processors."""

    token: int
    raw: float
    processed: float


class Moved(NamedTuple):
    """A token before and after one processor, as log-probabilities."""

    token: int
    before: float
    after: float


@dataclass(frozen=True)
class Stage:
    """What one processor, or a wrapper around the model, made of what it was given."""

    name: str  # of its class
    kept: int  # tokens that are possible after it
    cut: int = 0  # tokens that it made impossible
    mass: float = 0.0  # the probability, before it, of those
    moved: tuple[Moved, ...] = ()  # the likeliest before it, the most moved, some it cut; likeliest first


@dataclass(frozen=True)
class Look:
    """The choice at one place: what the model said there, and what was left of it."""

    entropy: float  # of what the model said, in nats
    left: float  # of what was left to choose from
    top: tuple[Candidate, ...] = ()  # likeliest after the processors first; all that were taken are there
    stages: tuple[Stage, ...] = ()  # that changed anything, in order


@dataclass(frozen=True)
class Run:
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
class Row:
    """One row of the table as a step fed it. Without a run it was dropped."""

    request: int
    at: int  # the node it stood on
    slot: int = 0
    looks: tuple[Look, ...] = ()  # after the row itself, and after each guess that stood
    drafts: tuple[int, ...] = ()  # what was guessed
    runs: tuple[Run, ...] = ()  # more than one where it forked


@dataclass(frozen=True)
class Said:
    """A sequence as it was returned."""

    tokens: tuple[int, ...]
    reason: str
    leaf: int  # its last node
    score: float | None = None
    unmet: tuple[int, ...] | None = None  # places of the constraints it does not meet; None: it had none


@dataclass(frozen=True)
class Header:
    """The first record: what was decoded, and how much of it is kept."""

    kind: ClassVar[str] = "header"
    descant: str  # the version that wrote it
    model: str  # its class
    vocabulary: int
    top: int  # candidates kept at each look
    limit: int  # bytes that it may have
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True)
class Asked:
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
class Texts:
    """What tokens stand for, before they are first met."""

    kind: ClassVar[str] = "texts"
    texts: Mapping[int, str]
    special: tuple[int, ...] = ()  # those of them that are names and not text


@dataclass(frozen=True)
class Step:
    """One step of the loop."""

    kind: ClassVar[str] = "step"
    step: int
    seconds: float  # it took
    rows: tuple[Row, ...] = ()
    cache: int | None = None  # bytes that it held then; None: it does not say


@dataclass(frozen=True)
class Result:
    """A request has ended: its sequences, best first, or the error that ended it."""

    kind: ClassVar[str] = "result"
    request: int
    sequences: tuple[Said, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Cut:
    """From this step on the limit left no room for what is named.

    "details" are all candidates but the tokens taken, and what processors did; "steps" are whole steps;
    "requests" are those admitted later; "results" what requests returned.
    """

    kind: ClassVar[str] = "cut"
    step: int
    what: str


Record = Header | Asked | Texts | Step | Result | Cut
_KINDS: Final[Mapping[str, type[Any]]] = {one.kind: one for one in (Header, Asked, Texts, Step, Result, Cut)}


# ------------------------------------------------------------------------ to a line and back
def line_of(record: Record) -> str:
    """A record as a line of JSON, in ASCII."""
    return json.dumps({"kind": record.kind, **_fields(record)}, separators=(",", ":"), allow_nan=False)


def read(lines: Iterable[str]) -> Iterator[Record]:
    """The records of a trace's lines; an error names the line that is none."""
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            given = json.loads(line, parse_constant=_not_a_number, parse_float=_finite)
            record: Record = _record(given)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            said = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"line {number} must be a record, got {' '.join(said.split())[:200]}") from None
        if (number == 1) != isinstance(record, Header):
            raise TraceError(
                f"a trace must begin with its header and have one, got {record.kind!r} in line {number}"
            )
        yield record
    if not number:
        raise TraceError("a trace must begin with its header, got an empty file")


def rounded(value: float | None) -> float | None:
    """A number as it is written; None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _fields(record: Any) -> dict[str, Any]:
    """What of a record is not its default."""
    return {
        one.name: _written(value)
        for one in dataclasses.fields(record)
        if (value := getattr(record, one.name)) != _default(one) or one.name in ("format", "version")
    }


def _default(one: dataclasses.Field[Any]) -> Any:
    """What a field is where nothing is said of it; a value that none has, where something must be."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def _written(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, Candidate) and value.raw == value.processed:
        return [value.token, rounded(value.raw)]
    if isinstance(value, list | tuple):
        return [_written(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}  # JSON already, and not to be rounded
    return _fields(value) if dataclasses.is_dataclass(value) else value


def _not_a_number(name: str) -> float:
    raise ValueError(f"the number {name}")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _not_a_number(text[:40])


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


def _log(value: Any) -> float:
    """A logarithm, of zero where there is none."""
    return -math.inf if value is None else _float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} for a text")
    return value


def _config(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} for an object")
    return value


def _texts(value: Any) -> dict[int, str]:
    return {_count(int(token)): _str(text) for token, text in _config(value).items()}


def _or_none(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else parse(value)


def _many(parse: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def each(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"{str(value)[:40]!r} for a list")
        return tuple(map(parse, value))

    return each


def _candidate(value: Any) -> Candidate:
    if not isinstance(value, list) or len(value) not in (2, 3):
        raise ValueError(f"{str(value)[:40]!r} for a candidate")
    return Candidate(_count(value[0]), _log(value[1]), _log(value[-1]))


def _moved(value: Any) -> Moved:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{str(value)[:40]!r} for a moved token")
    return Moved(_count(value[0]), _log(value[1]), _log(value[2]))


def _made(kind: type[Any]) -> Callable[[Any], Any]:
    """What reads an object of that kind, every field by its own rule and no others."""
    rules = _RULES[kind]

    def parse(value: Any) -> Any:
        given = _config(value)
        for name in given:
            if name not in rules:
                raise ValueError(f"an unknown field {name[:40]!r}")
        try:
            return kind(**{name: rules[name](one) for name, one in given.items()})
        except TypeError as error:  # a field without a default is not there
            raise ValueError(f"{kind.__name__} without {str(error).rpartition(': ')[2]}") from None

    return parse


def _version(value: Any) -> int:
    if _int(value) != VERSION:
        raise ValueError(f"version {value}, and this descant reads version {VERSION}")
    return VERSION


def _format(value: Any) -> str:
    if value != FORMAT:
        raise ValueError(f"{str(value)[:40]!r} for the format {FORMAT!r}")
    return FORMAT


_RULES: dict[type[Any], dict[str, Callable[[Any], Any]]] = {}
_RULES[Stage] = {"name": _str, "kept": _count, "cut": _count, "mass": _float, "moved": _many(_moved)}
_RULES[Look] = {
    "entropy": _float, "left": _float, "top": _many(_candidate), "stages": _many(_made(Stage)),
}  # fmt: skip
_RULES[Run] = {
    "tokens": _many(_count), "nodes": _many(_count), "slot": _count, "back": _count,
    "score": _or_none(_float), "met": _or_none(_count), "reason": _or_none(_str),
}  # fmt: skip
_RULES[Row] = {
    "request": _count, "at": _count, "slot": _count, "looks": _many(_made(Look)),
    "drafts": _many(_count), "runs": _many(_made(Run)),
}  # fmt: skip
_RULES[Said] = {
    "tokens": _many(_count), "reason": _str, "leaf": _count, "score": _or_none(_float),
    "unmet": _or_none(_many(_count)),
}  # fmt: skip
_RULES[Header] = {
    "descant": _str, "model": _str, "vocabulary": _count, "top": _count, "limit": _count,
    "format": _format, "version": _version,
}  # fmt: skip
_RULES[Asked] = {
    "request": _count, "root": _count, "prompt": _many(_count), "method": _str, "config": _config,
    "stages": _many(_str), "beams": _count, "groups": _count, "sequences": _count,
    "drafter": _or_none(_str), "demands": _or_none(_count),
}  # fmt: skip
_RULES[Texts] = {"texts": _texts, "special": _many(_count)}
_RULES[Step] = {"step": _count, "seconds": _float, "rows": _many(_made(Row)), "cache": _or_none(_count)}
_RULES[Result] = {"request": _count, "sequences": _many(_made(Said)), "error": _or_none(_str)}
_RULES[Cut] = {"step": _count, "what": _str}
_READERS: Final = {name: _made(kind) for name, kind in _KINDS.items()}


def _record(given: Any) -> Any:
    """A line's object as a record."""
    named = dict(_config(given))
    kind = named.pop("kind", None)
    if kind not in _READERS:
        raise ValueError(f"{str(kind)[:40]!r} for a kind of record")
    if kind == Header.kind and not {"format", "version"} <= named.keys():
        raise ValueError("a header without format and version")
    return _READERS[kind](named)
