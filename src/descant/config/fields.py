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

__all__ = ["Discreet", "Field", "FrozenMap", "Kind", "Unset", "declare", "freeze", "thaw"]

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


class Discreet(FrozenMap):
    """One that does not show what must not be read in a log."""

    __slots__ = ()

    SECRET: Final = ("hashing_key", "keys", "key")  # of watermarks

    def __repr__(self) -> str:
        return repr({name: "(hidden)" if name in self.SECRET else value for name, value in self.items()})


class Unset:
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
class Kind:
    """What a field accepts: `text` for people, `parse` from what was written to what is kept.

    `parse` returns the kept value or raises, it does not matter what: the sentence that the user
    sees is built from `must`.
    """

    text: str
    must: str
    parse: Callable[[Any], Any]


@dataclass(slots=True)
class Field:
    """One declared parameter: its name, kind, default, group and meaning; also its descriptor."""

    kind: Kind
    default: Any
    group: str
    about: str
    off: Any
    name: str = ""
    later: bool = False

    @property
    def type(self) -> str:
        """The accepted type as text, for tables and command lines."""
        return self.kind.text

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, owner: Any) -> Any:
        return self if config is None else config._values.get(self.name, self.default)

    def parse(self, value: Any) -> Any:
        """The kept form of a value that is not None."""
        try:
            return self.kind.parse(value)
        except _Narrow as wanted:
            raise ConfigError(self.name, f"must be {wanted}", value) from None
        except Exception:  # foreign arrays and objects fail in their own ways; all mean "not of this kind"
            raise ConfigError(self.name, f"must be {self.kind.must}", value) from None


def declare(*, default: Any, kind: Kind, group: str, about: str, off: Any = None) -> Any:
    """A field of a config class. `off` is what None means in code; by default, the default itself."""
    return Field(kind, default, group, about, default if off is None else off)


def _plain(value: Any) -> Any:
    """A numpy scalar or a 0-d tensor as the Python number it holds."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def _items(value: Any) -> Sequence[Any]:
    """A list, tuple, set or 1-D array as a sequence; text is not one."""
    if getattr(value, "ndim", 0) and callable(getattr(value, "tolist", None)):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if not isinstance(value, list | tuple | range):
        raise TypeError
    return value


class _Narrow(ValueError):
    """A failure that says more exactly than its kind what the value must be."""


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _int(value: Any, low: int = 0) -> int:
    value = _plain(value)
    _require(isinstance(value, numbers.Integral) and not isinstance(value, bool))
    number = int(value)
    _require(low <= number)
    if number > LARGEST_INT:
        raise _Narrow("an int below 2**63")
    return number


def _float(value: Any) -> float:
    value = _plain(value)
    _require(isinstance(value, numbers.Real) and not isinstance(value, bool))
    number = float(value)
    _require(math.isfinite(number))
    if abs(number) > LARGEST_FLOAT:
        raise _Narrow("a number from -1e30 to 1e30")
    return number


def _bool(value: Any) -> bool:
    value = _plain(value)
    _require(isinstance(value, bool))
    return bool(value)


def _text(value: Any) -> str:
    _require(isinstance(value, str) and value != "")
    return str(value)


def _ids(value: Any, empty: bool = False) -> tuple[int, ...]:
    ids = tuple(_int(item) for item in _items(value))
    _require(empty or bool(ids))
    return ids


def flag() -> Kind:
    """A bool."""
    return Kind("bool", "True or False", _bool)


def integer(low: int = 0) -> Kind:
    """An int from a lower bound on."""
    return Kind("int", f"an int >= {low}", lambda value: _int(value, low))


def real(
    low: float = -LARGEST_FLOAT, high: float = LARGEST_FLOAT, open_low: bool = False, open_high: bool = False
) -> Kind:
    """A finite number between two bounds, either of which may be left out."""

    def parse(value: Any) -> float:
        number = _float(value)
        _require(
            (low < number if open_low else low <= number) and (number < high if open_high else number <= high)
        )
        return number

    wants = []
    if low > -LARGEST_FLOAT:
        wants.append(f"{'>' if open_low else '>='} {low:g}")
    if high < LARGEST_FLOAT:
        wants.append(f"{'<' if open_high else '<='} {high:g}")
    return Kind("float", " ".join(["a finite number", " and ".join(wants)]).strip(), parse)


def scale(zero: bool = False) -> Kind:
    """A positive number, neither so large nor so small that float32 logits would overflow."""

    def parse(value: Any) -> float:
        number = _float(value)
        _require(number >= SMALLEST_FLOAT or (zero and number == 0.0))
        return number

    return Kind("float", f"{'0 or ' if zero else ''}a number from 1e-30 to 1e30", parse)


def choice(*options: str) -> Kind:
    """One of some strings."""

    def parse(value: Any) -> str:
        _require(isinstance(value, str) and value in options)
        return str(value)

    return Kind("str", "one of " + ", ".join(f'"{option}"' for option in options), parse)


def stopping() -> Kind:
    """The three values of `early_stopping`."""
    return Kind("bool | str", 'True, False or "never"', lambda v: "never" if v == "never" else _bool(v))


def token() -> Kind:
    """One token id."""
    return Kind("int", "a token id (an int >= 0)", _int)


def tokens(empty: bool = False) -> Kind:
    """Several token ids."""
    what = "a list of token ids (ints >= 0)" if empty else "a non-empty list of token ids (ints >= 0)"
    return Kind("list[int]", what, lambda value: _ids(value, empty))


def token_or_tokens() -> Kind:
    """One token id, or several."""

    def parse(value: Any) -> int | tuple[int, ...]:
        several = isinstance(value, list | tuple | range | set) or getattr(value, "ndim", 0) > 0
        return _ids(value) if several else _int(value)

    return Kind("int | list[int]", "a token id (an int >= 0) or a non-empty list of them", parse)


def words() -> Kind:
    """Several token sequences."""

    def parse(value: Any) -> tuple[tuple[int, ...], ...]:
        found = tuple(_ids(word) for word in _items(value))
        _require(bool(found))
        return found

    return Kind("list[list[int]]", "a non-empty list of non-empty lists of token ids (ints >= 0)", parse)


def words_or_choices() -> Kind:
    """Several token sequences, or sets of alternative ones."""

    def word(value: Any) -> tuple[Any, ...]:
        parts = _items(value)
        if parts and all(isinstance(part, list | tuple) for part in parts):
            return tuple(_ids(part) for part in parts)
        return _ids(parts)

    def parse(value: Any) -> tuple[Any, ...]:
        found = tuple(word(item) for item in _items(value))
        _require(bool(found))
        return found

    must = "a non-empty list of words, each a list of token ids or a list of such lists to choose from"
    return Kind("list[list[int]] | list[list[list[int]]]", must, parse)


def strings() -> Kind:
    """One string, or several."""

    def parse(value: Any) -> str | tuple[str, ...]:
        if isinstance(value, str):
            return _text(value)
        found = tuple(_text(item) for item in _items(value))
        _require(bool(found))
        return found

    return Kind("str | list[str]", "a non-empty string or a non-empty list of them", parse)


def pattern() -> Kind:
    """A regular expression."""

    def parse(value: Any) -> str:
        try:
            re.compile(_text(value))
        except re.error as error:
            raise _Narrow(f"a regular expression ({error})") from None
        return str(value)

    return Kind("str", "a regular expression as a non-empty string", parse)


def names() -> Kind:
    """Several different names."""

    def parse(value: Any) -> tuple[str, ...]:
        found = tuple(_text(item) for item in _items(value))
        _require(bool(found) and len(set(found)) == len(found))
        return found

    return Kind("list[str]", "a non-empty list of different names", parse)


def function() -> Kind:
    """Something to call; it cannot be written to a file."""

    def parse(value: Any) -> Any:
        _require(callable(value))
        hash(value)
        return value

    return Kind("Callable", "a function", parse)


def tokens_or_texts() -> Kind:
    """Several token ids, or texts that tokens contain."""

    def parse(value: Any) -> tuple[int | str, ...]:
        return tuple(_text(item) if isinstance(item, str) else _int(item) for item in _items(value))

    return Kind("list[int | str]", "a list of token ids (ints >= 0) or non-empty strings", parse)


def token_biases() -> Kind:
    """A bias for each of some tokens: a dict whose keys are ids, or the strings that JSON makes of them."""

    def key(value: Any) -> int:
        return _int(int(value) if isinstance(value, str) else value)

    def parse(value: Any) -> FrozenMap:
        _require(isinstance(value, Mapping) and bool(value))
        found = {key(token): _float(bias) for token, bias in value.items()}
        _require(len(found) == len(value))
        return FrozenMap(found)

    return Kind("dict[int, float]", "a non-empty dict {token id: bias}, each token once", parse)


def layers() -> Kind:
    """Which layers: a name for a range, or indices."""

    def parse(value: Any) -> str | tuple[int, ...]:
        if isinstance(value, str):
            _require(value in ("low", "high"))
            return str(value)
        return _ids(value)

    return Kind("str | list[int]", '"low", "high" or a non-empty list of layer indices (ints >= 0)', parse)


def decay() -> Kind:
    """Where a decay begins, and its factor."""

    def parse(value: Any) -> tuple[int, float]:
        start, factor = _items(value)
        number = _float(factor)
        _require(number > 0)
        return _int(start), number

    return Kind("tuple[int, float]", "a pair (start index >= 0, factor > 0)", parse)


def forced() -> Kind:
    """Pairs of position and token; multilingual speech models leave a token open as None."""

    def parse(value: Any) -> tuple[tuple[int, int | None], ...]:
        pairs = []
        for item in _items(value):
            position, forced_token = _items(item)
            pairs.append((_int(position), None if forced_token is None else _int(forced_token)))
        return tuple(pairs)

    return Kind("list[list[int]]", "a list of pairs [position, token id], ints >= 0", parse)


def biases() -> Kind:
    """A bias for each token sequence: a dict with tuple keys, or the list of pairs that JSON can hold."""

    def key(value: Any) -> tuple[int, ...]:
        if isinstance(value, str):  # what transformers writes for a tuple key: "(1, 2)"
            value = [int(part) for part in value.strip().strip("()").split(",") if part.strip()]
        return _ids(value)

    def parse(value: Any) -> FrozenMap:
        pairs = (
            list(value.items())
            if isinstance(value, Mapping)
            else [tuple(_items(pair)) for pair in _items(value)]
        )
        found = {key(sequence): _float(bias) for sequence, bias in pairs}
        _require(bool(found) and len(found) == len(pairs))
        return FrozenMap(found)

    must = "a non-empty dict {(token ids): bias}, or a list of pairs [[token ids], bias], each sequence once"
    return Kind("dict[tuple[int, ...], float]", must, parse)


def settings(kept: type[FrozenMap] = FrozenMap) -> Kind:
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

    return Kind("dict", "a dict with string keys and plain values", parse)


def objects() -> Kind:
    """Several objects that only their method understands."""

    def parse(value: Any) -> tuple[Any, ...]:
        found = tuple(_items(value))
        _require(bool(found))
        hash(found)
        return found

    return Kind("list[Constraint]", "a non-empty list of constraint objects", parse)
