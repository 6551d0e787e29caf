"""The types of generation parameters: one factory for each kind of accepted value."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

from descant.config.fields import FieldType, FieldValueError, FrozenMap, freeze

MAX_STOP_TOKENS: Final = 4_096  # of `stop_token_ids` and `eos_token_id`
MAX_TEXTS: Final = 256  # of `stop_strings` and `dry_sequence_breakers`
MAX_TEXT_BYTES: Final = 4_096  # of all their texts together, in UTF-8
MAX_PHRASES: Final = 2_048  # of `banned_phrases`, which are lists of words more often
MAX_PHRASE_BYTES: Final = 16_384


def texts_problem(texts: tuple[str, ...], most: int = MAX_TEXTS, size: int = MAX_TEXT_BYTES) -> str | None:
    """The bound that texts exceed, as the end of "must be ..."; None: they exceed none."""
    if len(texts) > most:
        return f"at most {most} texts, and these are {len(texts)}"
    given = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if given > size:
        return f"at most {size} bytes of text in all, and these are {given}"
    return None


LARGEST_INT: Final = 2**63 - 1  # of a torch int64
LARGEST_FLOAT: Final = 1e30  # keeps products with logits finite in float32
SMALLEST_FLOAT: Final = 1e-30  # keeps quotients finite in float32


def _to_python_scalar(value: Any) -> Any:
    """A numpy scalar or 0-d tensor as a Python number."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def _as_sequence(value: Any) -> Sequence[Any]:
    """A list, tuple, range, set or 1-D array as a sequence. A string is not accepted."""
    if getattr(value, "ndim", 0) and callable(getattr(value, "tolist", None)):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if not isinstance(value, list | tuple | range):
        raise TypeError
    return value


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def _parse_int(value: Any, low: int = 0) -> int:
    value = _to_python_scalar(value)
    _require(isinstance(value, numbers.Integral) and not isinstance(value, bool))
    number = int(value)
    _require(low <= number)
    if number > LARGEST_INT:
        raise FieldValueError("an int below 2**63")
    return number


def _parse_float(value: Any) -> float:
    value = _to_python_scalar(value)
    _require(isinstance(value, numbers.Real) and not isinstance(value, bool))
    number = float(value)
    _require(math.isfinite(number))
    if abs(number) > LARGEST_FLOAT:
        raise FieldValueError("a number from -1e30 to 1e30")
    return number


def _parse_bool(value: Any) -> bool:
    value = _to_python_scalar(value)
    _require(isinstance(value, bool))
    return bool(value)


def _parse_text(value: Any) -> str:
    _require(isinstance(value, str) and value != "")
    return str(value)


def _parse_items(value: Any, parse: Callable[[Any], Any], empty: bool = False) -> tuple[Any, ...]:
    items = tuple(parse(item) for item in _as_sequence(value))
    _require(empty or bool(items))
    return items


def _parse_ids(value: Any, empty: bool = False, most: int | None = None) -> tuple[int, ...]:
    items = _as_sequence(value)
    if most is not None and len(items) > most:
        raise FieldValueError(f"at most {most} token ids, and these are {len(items)}")
    return _parse_items(items, _parse_int, empty)


def _check_texts(texts: tuple[str, ...], most: int = MAX_TEXTS, size: int = MAX_TEXT_BYTES) -> None:
    if problem := texts_problem(texts, most, size):
        raise FieldValueError(problem)


def flag() -> FieldType:
    """A bool."""
    return FieldType("bool", "True or False", _parse_bool)


def integer(low: int = 0) -> FieldType:
    """An int with a lower bound."""
    return FieldType("int", f"an int >= {low}", lambda value: _parse_int(value, low))


def real(
    low: float = -LARGEST_FLOAT, high: float = LARGEST_FLOAT, open_low: bool = False, open_high: bool = False
) -> FieldType:
    """A finite number between two optional bounds."""

    def parse(value: Any) -> float:
        number = _parse_float(value)
        _require(
            (low < number if open_low else low <= number) and (number < high if open_high else number <= high)
        )
        return number

    bounds = []
    if low > -LARGEST_FLOAT:
        bounds.append(f"{'>' if open_low else '>='} {low:g}")
    if high < LARGEST_FLOAT:
        bounds.append(f"{'<' if open_high else '<='} {high:g}")
    return FieldType("float", " ".join(["a finite number", " and ".join(bounds)]).strip(), parse)


def positive_real(zero: bool = False) -> FieldType:
    """A positive number within the range that keeps float32 logits finite."""

    def parse(value: Any) -> float:
        number = _parse_float(value)
        _require(number >= SMALLEST_FLOAT or (zero and number == 0.0))
        return number

    return FieldType("float", f"{'0 or ' if zero else ''}a number from 1e-30 to 1e30", parse)


def choice(*options: str) -> FieldType:
    """One of the given strings."""

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


def tokens(empty: bool = False, most: int | None = None) -> FieldType:
    """A list of token ids, at most so many."""
    expected = "a list of token ids (ints >= 0)" if empty else "a non-empty list of token ids (ints >= 0)"
    return FieldType("list[int]", expected, lambda value: _parse_ids(value, empty, most))


def token_or_tokens(most: int | None = None) -> FieldType:
    """One token id or a list of them, at most so many."""

    def parse(value: Any) -> int | tuple[int, ...]:
        is_list = isinstance(value, list | tuple | range | set) or getattr(value, "ndim", 0) > 0
        return _parse_ids(value, most=most) if is_list else _parse_int(value)

    return FieldType("int | list[int]", "a token id (an int >= 0) or a non-empty list of them", parse)


def text(size: int) -> FieldType:
    """One text."""

    def parse(value: Any) -> str:
        found = _parse_text(value)
        _check_texts((found,), 1, size)
        return found

    return FieldType("str", "a text that is not empty", parse)


def words() -> FieldType:
    """A list of token sequences."""
    expected = "a non-empty list of non-empty lists of token ids (ints >= 0)"
    return FieldType("list[list[int]]", expected, lambda value: _parse_items(value, _parse_ids))


def words_or_choices() -> FieldType:
    """A list of token sequences, or of lists of alternative sequences."""

    def word(value: Any) -> tuple[Any, ...]:
        parts = _as_sequence(value)
        is_choice = bool(parts) and all(isinstance(part, list | tuple) for part in parts)
        return _parse_items(parts, _parse_ids) if is_choice else _parse_ids(parts)

    expected = "a non-empty list of words, each a list of token ids or a list of such lists to choose from"
    type_name = "list[list[int]] | list[list[list[int]]]"
    return FieldType(type_name, expected, lambda value: _parse_items(value, word))


def strings(most: int = MAX_TEXTS, size: int = MAX_TEXT_BYTES) -> FieldType:
    """One string or a list of strings: at most so many, and so many bytes in all."""

    def parse(value: Any) -> str | tuple[str, ...]:
        if isinstance(value, str):
            _check_texts((value,), most, size)
            return _parse_text(value)
        texts = _parse_items(value, _parse_text)
        _check_texts(texts, most, size)
        return texts

    return FieldType("str | list[str]", "a non-empty string or a non-empty list of them", parse)


def pattern() -> FieldType:
    """A regular expression."""

    def parse(value: Any) -> str:
        try:
            re.compile(_parse_text(value))
        except re.error as error:
            raise FieldValueError(f"a regular expression ({error})") from None
        return str(value)

    return FieldType("str", "a regular expression as a non-empty string", parse)


def names() -> FieldType:
    """A list of distinct names."""

    def parse(value: Any) -> tuple[str, ...]:
        names = _parse_items(value, _parse_text)
        _require(len(set(names)) == len(names))
        return names

    return FieldType("list[str]", "a non-empty list of distinct names", parse)


def function() -> FieldType:
    """A hashable callable. It cannot be saved to a file."""

    def parse(value: Any) -> Any:
        _require(callable(value))
        hash(value)
        return value

    return FieldType("Callable", "a function", parse)


def tokens_or_texts() -> FieldType:
    """A list of token ids and of strings that tokens contain."""

    def parse(value: Any) -> tuple[int | str, ...]:
        items = _parse_items(
            value, lambda item: _parse_text(item) if isinstance(item, str) else _parse_int(item), empty=True
        )
        _check_texts(tuple(item for item in items if isinstance(item, str)))
        return items

    return FieldType("list[int | str]", "a list of token ids (ints >= 0) or non-empty strings", parse)


def token_biases() -> FieldType:
    """A dict of token id to bias; the ids may be strings, as in JSON."""

    def key(value: Any) -> int:
        return _parse_int(int(value) if isinstance(value, str) else value)

    def parse(value: Any) -> FrozenMap:
        _require(isinstance(value, Mapping) and bool(value))
        biases = {key(token): _parse_float(bias) for token, bias in value.items()}
        _require(len(biases) == len(value))
        return FrozenMap(biases)

    return FieldType("dict[int, float]", "a non-empty dict {token id: bias}, each token once", parse)


def layers() -> FieldType:
    """Layers: the name of a range, or indices."""

    def parse(value: Any) -> str | tuple[int, ...]:
        if isinstance(value, str):
            _require(value in ("low", "high"))
            return str(value)
        return _parse_ids(value)

    return FieldType(
        "str | list[int]", '"low", "high" or a non-empty list of layer indices (ints >= 0)', parse
    )


def decay_pair() -> FieldType:
    """A pair of start index and decay factor."""

    def parse(value: Any) -> tuple[int, float]:
        start, factor = _as_sequence(value)
        number = _parse_float(factor)
        _require(number > 0)
        return _parse_int(start), number

    return FieldType("tuple[int, float]", "a pair (start index >= 0, factor > 0)", parse)


def position_token_pairs() -> FieldType:
    """Pairs of position and token. Multilingual Whisper configs have None for an open token."""

    def pair(value: Any) -> tuple[int, int | None]:
        position, forced_token = _as_sequence(value)
        return _parse_int(position), None if forced_token is None else _parse_int(forced_token)

    expected = "a list of pairs [position, token id], ints >= 0"
    return FieldType("list[list[int]]", expected, lambda value: _parse_items(value, pair, empty=True))


def sequence_biases() -> FieldType:
    """Biases of token sequences: a dict with tuple keys, or a list of pairs as in JSON."""

    def key(value: Any) -> tuple[int, ...]:
        if isinstance(value, str):  # transformers writes a tuple key as "(1, 2)"
            value = [int(part) for part in value.strip().strip("()").split(",") if part.strip()]
        return _parse_ids(value)

    def parse(value: Any) -> FrozenMap:
        listed = list(value.items()) if isinstance(value, Mapping) else value
        pairs = _parse_items(listed, _as_sequence)
        biases = {key(sequence): _parse_float(bias) for sequence, bias in pairs}
        _require(len(biases) == len(pairs))
        return FrozenMap(biases)

    expected = (
        "a non-empty dict {(token ids): bias}, or a list of pairs [[token ids], bias], each sequence once"
    )
    return FieldType("dict[tuple[int, ...], float]", expected, parse)


def settings(make: Callable[[Mapping[str, Any]], Any] = FrozenMap, is_secret: bool = False) -> FieldType:
    """A dict of settings, or an object that converts to one; `make` is the class that they read as."""

    def parse(value: Any) -> Any:
        if callable(getattr(value, "to_dict", None)):
            value = value.to_dict()
        elif is_dataclass(value):
            value = {item.name: getattr(value, item.name) for item in fields(value)}
        _require(isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
        made = make(freeze({name: item for name, item in value.items() if not name.startswith("_")}))
        hash(made)  # a config is hashable, so its values must be
        return made

    return FieldType("dict", "a dict with string keys and plain values", parse, is_secret)


def constraint_objects() -> FieldType:
    """A list of hashable constraint objects."""

    def parse(value: Any) -> tuple[Any, ...]:
        constraints = _parse_items(value, lambda constraint: constraint)
        hash(constraints)
        return constraints

    return FieldType("list[Constraint]", "a non-empty list of constraint objects", parse)
