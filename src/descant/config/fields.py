"""What a generation parameter is made of: its kind (what it accepts), its declaration, its storage.

A kind turns what the user wrote into one frozen, hashable form (sequences become tuples, mappings
become `FrozenMap`) or raises a `ConfigError` that names the field, the value and the fix.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from descant.errors import ConfigError

__all__ = ["Field", "FieldType", "FrozenMap", "NoOffValue", "RedactedMap", "field", "freeze", "thaw"]

LARGEST_INT: Final = 2**63 - 1  # what a torch int64 holds
LARGEST_FLOAT: Final = 1e30  # products with logits must stay finite in float32
SMALLEST_FLOAT: Final = 1e-30  # and so must quotients


class FrozenMap(Mapping[Any, Any]):
    """A read-only, hashable mapping; compares equal to a dict of the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Any, Any] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class RedactedMap(FrozenMap):
    """One that does not show what must not be read in a log."""

    __slots__ = ()

    SECRET_KEYS: Final = ("hashing_key", "keys", "key")  # of watermarks

    def __repr__(self) -> str:
        return repr({name: "(hidden)" if name in self.SECRET_KEYS else value for name, value in self.items()})


class NoOffValue:
    """The mark of a field without an off value: None there means "not given"."""


def freeze(value: Any) -> Any:
    """Plain data in its hashable form; keys become the strings that JSON would make of them."""
    if isinstance(value, list | tuple):
        return tuple([freeze(item) for item in value])
    if isinstance(value, Mapping):
        names = {key: key if isinstance(key, str) else json.dumps(key) for key in value}
        return FrozenMap({names[key]: freeze(item) for key, item in value.items()})
    return value


def thaw(value: Any) -> Any:
    """The inverse of `freeze`, in the types that JSON knows."""
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class FieldType:
    """What a field accepts: `text` for people, `parse` from what was written to what is kept.

    `parse` returns the kept value or raises, it does not matter what: the sentence that the user
    sees is built from `must`.
    """

    type_name: str
    expected: str
    parse: Callable[[Any], Any]


@dataclass(slots=True)
class Field:
    """One declared parameter: its name, kind, default, group and meaning; also its descriptor."""

    kind: FieldType
    default: Any
    group: str
    doc: str
    off: Any
    name: str = ""
    unsupported: bool = False

    @property
    def type(self) -> str:
        """The accepted type as text, for tables and command lines."""
        return self.kind.type_name

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, owner: Any) -> Any:
        return self if config is None else config._values.get(self.name, self.default)

    def parse(self, value: Any) -> Any:
        """The kept form of a value that is not None."""
        try:
            return self.kind.parse(value)
        except _SpecificError as wanted:
            raise ConfigError(self.name, f"must be {wanted}", value) from None
        except Exception:  # foreign arrays and objects fail in their own ways; all mean "not of this kind"
            raise ConfigError(self.name, f"must be {self.kind.expected}", value) from None


def field(*, default: Any, kind: FieldType, group: str, doc: str, off: Any = None) -> Any:
    """A field of a config class. `off` is what None means in code; by default, the default itself."""
    return Field(kind, default, group, doc, default if off is None else off)


def _to_python_scalar(value: Any) -> Any:
    """A numpy scalar or a 0-d tensor as the Python number it holds."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def _as_sequence(value: Any) -> Sequence[Any]:
    """A list, tuple, set or 1-D array as a sequence; text is not one."""
    if getattr(value, "ndim", 0) and callable(getattr(value, "tolist", None)):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if not isinstance(value, list | tuple | range):
        raise TypeError
    return value


class _SpecificError(ValueError):
    """A failure that says more exactly than its kind what the value must be."""


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _parse_int(value: Any, low: int = 0) -> int:
    value = _to_python_scalar(value)
    _require(isinstance(value, numbers.Integral) and not isinstance(value, bool))
    number = int(value)
    _require(low <= number)
    if number > LARGEST_INT:
        raise _SpecificError("an int below 2**63")
    return number


def _parse_float(value: Any) -> float:
    value = _to_python_scalar(value)
    _require(isinstance(value, numbers.Real) and not isinstance(value, bool))
    number = float(value)
    _require(math.isfinite(number))
    if abs(number) > LARGEST_FLOAT:
        raise _SpecificError("a number from -1e30 to 1e30")
    return number


def _parse_bool(value: Any) -> bool:
    value = _to_python_scalar(value)
    _require(isinstance(value, bool))
    return bool(value)


def _parse_text(value: Any) -> str:
    _require(isinstance(value, str) and value != "")
    return str(value)


def _parse_ids(value: Any, empty: bool = False) -> tuple[int, ...]:
    ids = tuple(_parse_int(item) for item in _as_sequence(value))
    _require(empty or bool(ids))
    return ids


def flag() -> FieldType:
    """A bool."""
    return FieldType("bool", "True or False", _parse_bool)


def integer(low: int = 0) -> FieldType:
    """An int from a lower bound on."""
    return FieldType("int", f"an int >= {low}", lambda value: _parse_int(value, low))


def real(
    low: float = -LARGEST_FLOAT, high: float = LARGEST_FLOAT, open_low: bool = False, open_high: bool = False
) -> FieldType:
    """A finite number between two bounds, either of which may be left out."""

    def parse(value: Any) -> float:
        number = _parse_float(value)
        _require(
            (low < number if open_low else low <= number) and (number < high if open_high else number <= high)
        )
        return number

    wants = []
    if low > -LARGEST_FLOAT:
        wants.append(f"{'>' if open_low else '>='} {low:g}")
    if high < LARGEST_FLOAT:
        wants.append(f"{'<' if open_high else '<='} {high:g}")
    return FieldType("float", " ".join(["a finite number", " and ".join(wants)]).strip(), parse)


def positive_real(zero: bool = False) -> FieldType:
    """A positive number, neither so large nor so small that float32 logits would overflow."""

    def parse(value: Any) -> float:
        number = _parse_float(value)
        _require(number >= SMALLEST_FLOAT or (zero and number == 0.0))
        return number

    return FieldType("float", f"{'0 or ' if zero else ''}a number from 1e-30 to 1e30", parse)


def choice(*options: str) -> FieldType:
    """One of some strings."""

    def parse(value: Any) -> str:
        _require(isinstance(value, str) and value in options)
        return str(value)

    return FieldType("str", "one of " + ", ".join(f'"{option}"' for option in options), parse)


def early_stopping_mode() -> FieldType:
    """The three values of `early_stopping`."""
    return FieldType(
        "bool | str", 'True, False or "never"', lambda v: "never" if v == "never" else _parse_bool(v)
    )


def token() -> FieldType:
    """One token id."""
    return FieldType("int", "a token id (an int >= 0)", _parse_int)


def tokens(empty: bool = False) -> FieldType:
    """Several token ids."""
    what = "a list of token ids (ints >= 0)" if empty else "a non-empty list of token ids (ints >= 0)"
    return FieldType("list[int]", what, lambda value: _parse_ids(value, empty))


def token_or_tokens() -> FieldType:
    """One token id, or several."""

    def parse(value: Any) -> int | tuple[int, ...]:
        several = isinstance(value, list | tuple | range | set) or getattr(value, "ndim", 0) > 0
        return _parse_ids(value) if several else _parse_int(value)

    return FieldType("int | list[int]", "a token id (an int >= 0) or a non-empty list of them", parse)


def words() -> FieldType:
    """Several token sequences."""

    def parse(value: Any) -> tuple[tuple[int, ...], ...]:
        found = tuple(_parse_ids(word) for word in _as_sequence(value))
        _require(bool(found))
        return found

    return FieldType("list[list[int]]", "a non-empty list of non-empty lists of token ids (ints >= 0)", parse)


def words_or_choices() -> FieldType:
    """Several token sequences, or sets of alternative ones."""

    def word(value: Any) -> tuple[Any, ...]:
        parts = _as_sequence(value)
        if parts and all(isinstance(part, list | tuple) for part in parts):
            return tuple(_parse_ids(part) for part in parts)
        return _parse_ids(parts)

    def parse(value: Any) -> tuple[Any, ...]:
        found = tuple(word(item) for item in _as_sequence(value))
        _require(bool(found))
        return found

    must = "a non-empty list of words, each a list of token ids or a list of such lists to choose from"
    return FieldType("list[list[int]] | list[list[list[int]]]", must, parse)


def strings() -> FieldType:
    """One string, or several."""

    def parse(value: Any) -> str | tuple[str, ...]:
        if isinstance(value, str):
            return _parse_text(value)
        found = tuple(_parse_text(item) for item in _as_sequence(value))
        _require(bool(found))
        return found

    return FieldType("str | list[str]", "a non-empty string or a non-empty list of them", parse)


def pattern() -> FieldType:
    """A regular expression."""

    def parse(value: Any) -> str:
        try:
            re.compile(_parse_text(value))
        except re.error as error:
            raise _SpecificError(f"a regular expression ({error})") from None
        return str(value)

    return FieldType("str", "a regular expression as a non-empty string", parse)


def names() -> FieldType:
    """Several different names."""

    def parse(value: Any) -> tuple[str, ...]:
        found = tuple(_parse_text(item) for item in _as_sequence(value))
        _require(bool(found) and len(set(found)) == len(found))
        return found

    return FieldType("list[str]", "a non-empty list of different names", parse)


def function() -> FieldType:
    """Something to call; it cannot be written to a file."""

    def parse(value: Any) -> Any:
        _require(callable(value))
        hash(value)
        return value

    return FieldType("Callable", "a function", parse)


def tokens_or_texts() -> FieldType:
    """Several token ids, or texts that tokens contain."""

    def parse(value: Any) -> tuple[int | str, ...]:
        return tuple(
            _parse_text(item) if isinstance(item, str) else _parse_int(item) for item in _as_sequence(value)
        )

    return FieldType("list[int | str]", "a list of token ids (ints >= 0) or non-empty strings", parse)


def token_biases() -> FieldType:
    """A bias for each of some tokens: a dict whose keys are ids, or the strings that JSON makes of them."""

    def key(value: Any) -> int:
        return _parse_int(int(value) if isinstance(value, str) else value)

    def parse(value: Any) -> FrozenMap:
        _require(isinstance(value, Mapping) and bool(value))
        found = {key(token): _parse_float(bias) for token, bias in value.items()}
        _require(len(found) == len(value))
        return FrozenMap(found)

    return FieldType("dict[int, float]", "a non-empty dict {token id: bias}, each token once", parse)


def layers() -> FieldType:
    """Which layers: a name for a range, or indices."""

    def parse(value: Any) -> str | tuple[int, ...]:
        if isinstance(value, str):
            _require(value in ("low", "high"))
            return str(value)
        return _parse_ids(value)

    return FieldType(
        "str | list[int]", '"low", "high" or a non-empty list of layer indices (ints >= 0)', parse
    )


def decay_pair() -> FieldType:
    """Where a decay begins, and its factor."""

    def parse(value: Any) -> tuple[int, float]:
        start, factor = _as_sequence(value)
        number = _parse_float(factor)
        _require(number > 0)
        return _parse_int(start), number

    return FieldType("tuple[int, float]", "a pair (start index >= 0, factor > 0)", parse)


def position_token_pairs() -> FieldType:
    """Pairs of position and token; multilingual speech models leave a token open as None."""

    def parse(value: Any) -> tuple[tuple[int, int | None], ...]:
        pairs = []
        for item in _as_sequence(value):
            position, forced_token = _as_sequence(item)
            pairs.append((_parse_int(position), None if forced_token is None else _parse_int(forced_token)))
        return tuple(pairs)

    return FieldType("list[list[int]]", "a list of pairs [position, token id], ints >= 0", parse)


def sequence_biases() -> FieldType:
    """A bias for each token sequence: a dict with tuple keys, or the list of pairs that JSON can hold."""

    def key(value: Any) -> tuple[int, ...]:
        if isinstance(value, str):  # what transformers writes for a tuple key: "(1, 2)"
            value = [int(part) for part in value.strip().strip("()").split(",") if part.strip()]
        return _parse_ids(value)

    def parse(value: Any) -> FrozenMap:
        pairs = (
            list(value.items())
            if isinstance(value, Mapping)
            else [tuple(_as_sequence(pair)) for pair in _as_sequence(value)]
        )
        found = {key(sequence): _parse_float(bias) for sequence, bias in pairs}
        _require(bool(found) and len(found) == len(pairs))
        return FrozenMap(found)

    must = "a non-empty dict {(token ids): bias}, or a list of pairs [[token ids], bias], each sequence once"
    return FieldType("dict[tuple[int, ...], float]", must, parse)


def settings(kept: type[FrozenMap] = FrozenMap) -> FieldType:
    """A dict of settings, or an object that can say itself as one (`to_dict`, a dataclass)."""

    def parse(value: Any) -> FrozenMap:
        if callable(getattr(value, "to_dict", None)):
            value = value.to_dict()
        elif is_dataclass(value):
            value = {item.name: getattr(value, item.name) for item in fields(value)}
        _require(isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
        frozen = freeze({name: item for name, item in value.items() if not name.startswith("_")})
        hash(frozen)  # a config is hashable by value, so its parts must be
        assert isinstance(frozen, FrozenMap)
        return kept(frozen)

    return FieldType("dict", "a dict with string keys and plain values", parse)


def constraint_objects() -> FieldType:
    """Several objects that only their method understands."""

    def parse(value: Any) -> tuple[Any, ...]:
        found = tuple(_as_sequence(value))
        _require(bool(found))
        hash(found)
        return found

    return FieldType("list[Constraint]", "a non-empty list of constraint objects", parse)
