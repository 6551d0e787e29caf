"""Keys: a watermark's settings kept out of the program, in a file or the environment, and made anew.

Whoever has a key can find the mark, forge it and wash it out. So no error here shows one, and a key goes by
its name, or by its fingerprint where it has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from descant.config.fields import LARGEST_INT, RedactedMap
from descant.decoding.watermark.schemes.config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    as_watermarking_config,
)
from descant.errors import ConfigError, InputError

__all__ = [
    "KEY_FILE_VARIABLE",
    "KEY_VARIABLE",
    "SCHEMES",
    "PublicKeyWarning",
    "fingerprint",
    "new_settings",
    "read_settings",
    "warn_if_public",
    "write_settings",
]

KEY_VARIABLE: Final = "DESCANT_WATERMARK_KEY"  # holds the JSON itself
KEY_FILE_VARIABLE: Final = "DESCANT_WATERMARK_KEY_FILE"  # holds the path of a file with it
SCHEMES: Final = ("green", "selfhash", "synthid", "gumbel")

_NAME: Final = "name"
_MAX_FILE_BYTES: Final = 2**20  # bytes of a file of keys
_OWNER_ONLY: Final = 0o600
_SYNTHID_DEPTH, _SYNTHID_NGRAM_LEN = 30, 5  # of the SynthID paper
_SAMPLING_TABLE_SIZE: Final = 2**16  # keys that agree in these bits make the same round of a tournament
_MAX_EXACT_INT: Final = 2**53  # above it programs that read JSON numbers as floats would change a key


class PublicKeyWarning(UserWarning):
    """The key stands in a documentation, so that a mark with it proves nothing."""


def read_settings(
    path: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, BaseWatermarkingConfig]:
    """Watermarks by name, from a JSON file, or from the environment where no file is given.

    The JSON is one object of settings, which may have a "name", or a list of such objects, or an object of
    them by name. In the environment it is the value of `DESCANT_WATERMARK_KEY`, or the file that
    `DESCANT_WATERMARK_KEY_FILE` names.
    """
    if path is not None:
        return _read_file(os.fspath(path), "key")
    given = [name for name in (KEY_VARIABLE, KEY_FILE_VARIABLE) if environment.get(name)]
    if len(given) != 1:
        do = f"set {KEY_VARIABLE} to its JSON or {KEY_FILE_VARIABLE} to a file's path"
        got = " and ".join(given) or "neither a file nor a variable"
        raise InputError("key", "must come from one place", got, do)
    if given == [KEY_FILE_VARIABLE]:
        return _read_file(environment[KEY_FILE_VARIABLE], KEY_FILE_VARIABLE)
    told = f"other text: a path goes into {KEY_FILE_VARIABLE}"
    return _parse_keys(_parse_json(environment[KEY_VARIABLE], KEY_VARIABLE, told), KEY_VARIABLE)


def new_settings(scheme: str, **given: Any) -> BaseWatermarkingConfig:
    """Settings with a new key from the system's source of chance; what is given replaces a default."""
    made: BaseWatermarkingConfig
    if scheme in ("green", "selfhash"):
        # Even keys would lose the token's upper bits, for only 32 bits of the product seed the list.
        key = 2 * secrets.randbelow(_MAX_EXACT_INT // 2) + 1
        width = {"green": ("lefthash", 1), "selfhash": ("selfhash", 4)}[scheme]
        made = WatermarkingConfig(hashing_key=key, seeding_scheme=width[0], context_width=width[1])
    elif scheme == "synthid":
        made = SynthIDTextWatermarkingConfig(
            ngram_len=_SYNTHID_NGRAM_LEN, keys=tuple(_distinct_keys(_SYNTHID_DEPTH))
        )
    elif scheme == "gumbel":
        made = GumbelWatermarkingConfig(key=secrets.randbelow(LARGEST_INT) + 1)
    else:
        raise InputError("scheme", f"must be one of {', '.join(SCHEMES)}", scheme)
    if kept := sorted(given.keys() & set(RedactedMap.SECRET_KEYS)):
        raise InputError("new_settings", "makes the key itself", kept, "leave it out")
    try:
        return replace(made, **given)
    except TypeError:
        known = ", ".join(name for name in made.to_dict() if name not in RedactedMap.SECRET_KEYS)
        raise InputError("new_settings", f"takes only {known} for {scheme}", sorted(given)) from None


def write_settings(
    path: str | os.PathLike[str], settings: BaseWatermarkingConfig, name: str | None = None
) -> None:
    """Write settings to a new file that only its owner can read.

    A file that exists is left alone: a key that is overwritten is lost, and with it all marks made by it.
    """
    text = json.dumps({**({} if name is None else {_NAME: name}), **settings.to_dict()}, indent=2) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    except OSError as error:
        must = f"must be a file that can be made ({error.strerror})"
        raise InputError("key", must, os.fspath(path), "name another") from None
    with open(file, "w", encoding="utf-8") as target:
        target.write(text)


def fingerprint(settings: BaseWatermarkingConfig) -> str:
    """A name for a key that does not tell it: 8 hex digits.

    It is one for 2^32 keys, so a key that is drawn of more than that cannot be found from it.
    """
    key = [settings.to_dict()[name] for name in RedactedMap.SECRET_KEYS if name in settings.to_dict()]
    text = json.dumps([settings.scheme, *key])
    return hashlib.blake2b(text.encode(), digest_size=4, person=b"descant key").hexdigest()


def warn_if_public(settings: BaseWatermarkingConfig, stacklevel: int = 3) -> None:
    """Warn of a key that stands in a documentation."""
    if settings.is_public:
        warnings.warn(
            f"the key of this watermark ({settings.scheme}) is public: it stands in a documentation, and "
            "anybody can find, forge and remove the mark; make one with `descant watermark key`",
            PublicKeyWarning,
            stacklevel=stacklevel,
        )


def _distinct_keys(count: int) -> Iterator[int]:
    """Random keys that differ where it matters: two alike would run the same round twice."""
    seen: set[int] = set()
    while len(seen) < count:
        key = secrets.randbelow(_MAX_EXACT_INT)
        if key % _SAMPLING_TABLE_SIZE not in seen:
            seen.add(key % _SAMPLING_TABLE_SIZE)
            yield key


def _read_file(path: str, field: str) -> dict[str, BaseWatermarkingConfig]:
    # Where somebody gave the key itself for its path, the error must not show it.
    told = "something that is no path" if _looks_like_json(path) else path
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(field, f"must be a file that can be read ({why})", told) from None
    if len(data) > _MAX_FILE_BYTES:
        raise InputError(field, f"must be a file of at most {_MAX_FILE_BYTES} bytes", told)
    return _parse_keys(_parse_json(text, field, told), field)


def _looks_like_json(text: str) -> bool:
    """Whether a text is JSON or begins like it."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text.lstrip()[:1] in ("{", "[")
    return True


def _parse_json(text: str, field: str, told: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", "it is nested too deep")
        raise InputError(field, f"must hold JSON ({why})", told) from None


def _parse_keys(data: Any, field: str) -> dict[str, BaseWatermarkingConfig]:
    """The settings in JSON data, by name."""
    one = "an object of settings, a list of them, or an object of them by name"
    if isinstance(data, dict) and data and all(isinstance(part, dict) for part in data.values()):
        entries = [({_NAME: name, **part}, f"the key {name!r}") for name, part in data.items()]
    elif isinstance(data, dict):
        entries = [(data, "the key")]
    elif isinstance(data, list) and data and all(isinstance(part, dict) for part in data):
        entries = [(part, f"key {place} of {len(data)}") for place, part in enumerate(data, 1)]
    else:
        raise InputError(field, f"must hold {one}", f"a {type(data).__name__}, or an empty one")
    found: dict[str, BaseWatermarkingConfig] = {}
    for part, where in entries:
        settings = _parse_settings(
            {name: value for name, value in part.items() if name != _NAME}, field, where
        )
        name = part.get(_NAME, fingerprint(settings))
        if not isinstance(name, str) or not name:
            raise InputError(field, f'must have text as "{_NAME}" of {where}', type(name).__name__)
        if name in found:
            raise InputError(field, "must give each key a name of its own", name, f'change its "{_NAME}"')
        found[name] = settings
    return found


def _parse_settings(data: dict[str, Any], field: str, where: str) -> BaseWatermarkingConfig:
    """Settings of a dict; an error says what is wrong, but not what the key is."""
    held = [name for name in RedactedMap.SECRET_KEYS if name in data]
    if len(held) != 1:
        must = f"must have one of {', '.join(f'`{name}`' for name in RedactedMap.SECRET_KEYS)} in {where}"
        raise InputError(field, must, sorted(data), "make one with `descant watermark key`")
    try:
        return as_watermarking_config(data)
    except ConfigError:
        [secret] = held
    # Whatever is wrong besides the key is wrong with another one, too, and can be said with that.
    harmless = [1] if secret == "keys" else 1
    try:
        as_watermarking_config({**data, secret: harmless})
    except ConfigError as error:
        raise InputError(
            field, f"must hold settings of a watermark in {where} ({error})", sorted(data)
        ) from None
    must = "a non-empty list of integers" if secret == "keys" else "a positive integer"
    raise InputError(field, f"must have {must} below 2^63 as `{secret}` of {where}", _redact(data[secret]))


def _redact(value: Any) -> str:
    """A secret value as an error may show it."""
    return f"{type(value).__name__} that is none"
