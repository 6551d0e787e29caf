"""Watermark keys: reading, creating and writing them, in files or environment variables.

A key allows anyone to detect, forge and remove the watermark. So errors never show a key; a key is referred
to by its name, or by its fingerprint.
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

from descant.config.field_types import LARGEST_INT
from descant.config.fields import RedactedMap
from descant.config.watermarking_config import (
    SCHEMES,
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    as_watermarking_config,
)
from descant.core.atomic_file import write_bytes
from descant.errors import ConfigError, InputError, Words

KEY_VARIABLE: Final = "DESCANT_WATERMARK_KEY"  # contains JSON
KEY_FILE_VARIABLE: Final = "DESCANT_WATERMARK_KEY_FILE"  # contains the path of a JSON file

_NAME: Final = "name"
_MAX_FILE_BYTES: Final = 2**20
_SYNTHID_DEPTH, _SYNTHID_NGRAM_LEN = 30, 5  # as in the SynthID paper
_SAMPLING_TABLE_SIZE: Final = 2**16  # keys that are equal modulo this give the same round
_MAX_EXACT_INT: Final = 2**53  # larger integers change in JSON readers that use floats


class PublicKeyWarning(UserWarning):
    """The key is published in documentation, so that the watermark proves nothing."""


def read_settings(
    path: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, BaseWatermarkingConfig]:
    """Read watermark settings by name, from a JSON file or, without a path, from the environment.

    The JSON is one object of settings with an optional "name", a list of such objects, or an object that maps
    names to settings. The environment variable `DESCANT_WATERMARK_KEY` contains the JSON,
    `DESCANT_WATERMARK_KEY_FILE` the path of a file.
    """
    if path is not None:
        return _read_file(os.fspath(path), "key")
    variables = [name for name in (KEY_VARIABLE, KEY_FILE_VARIABLE) if environment.get(name)]
    if len(variables) != 1:
        do = f"set {KEY_VARIABLE} to its JSON or {KEY_FILE_VARIABLE} to a file's path"
        got = Words(" and ".join(variables) or "neither a file nor a variable")
        raise InputError("key", "must come from exactly one source", got, do)
    if variables == [KEY_FILE_VARIABLE]:
        return _read_file(environment[KEY_FILE_VARIABLE], KEY_FILE_VARIABLE)
    shown_value = f"other text; use {KEY_FILE_VARIABLE} for a path"
    return _parse_keys(_parse_json(environment[KEY_VARIABLE], KEY_VARIABLE, shown_value), KEY_VARIABLE)


def new_settings(scheme: str, **given: Any) -> BaseWatermarkingConfig:
    """Create settings with a new key from the system's random source; `given` replaces defaults."""
    settings: BaseWatermarkingConfig
    if scheme in ("green", "selfhash"):
        # Even keys would lose the token's upper bits, since only 32 bits of the product seed the list.
        key = 2 * secrets.randbelow(_MAX_EXACT_INT // 2) + 1
        seeding = {"green": ("lefthash", 1), "selfhash": ("selfhash", 4)}[scheme]
        settings = WatermarkingConfig(hashing_key=key, seeding_scheme=seeding[0], context_width=seeding[1])
    elif scheme == "synthid":
        settings = SynthIDTextWatermarkingConfig(
            ngram_len=_SYNTHID_NGRAM_LEN, keys=tuple(_distinct_keys(_SYNTHID_DEPTH))
        )
    elif scheme == "gumbel":
        settings = GumbelWatermarkingConfig(key=secrets.randbelow(LARGEST_INT) + 1)
    else:
        raise InputError("scheme", f"must be one of {', '.join(SCHEMES)}", scheme)
    if secrets_given := sorted(given.keys() & set(RedactedMap.SECRET_KEYS)):
        raise InputError("new_settings", "must not be given a key", secrets_given, "omit it")
    try:
        return replace(settings, **given)
    except TypeError:
        known = ", ".join(name for name in settings.to_dict() if name not in RedactedMap.SECRET_KEYS)
        raise InputError("new_settings", f"accepts only {known} for {scheme}", sorted(given)) from None


def write_settings(
    path: str | os.PathLike[str], settings: BaseWatermarkingConfig, name: str | None = None
) -> None:
    """Write settings to a new file that only its owner can read.

    An existing file is never overwritten: a lost key makes all its watermarks undetectable.
    """
    text = json.dumps({**({} if name is None else {_NAME: name}), **settings.to_dict()}, indent=2) + "\n"
    try:
        write_bytes(path, text.encode("utf-8"), private=True, exclusive=True)
    except OSError as error:
        must = f"must be a file that can be created ({error.strerror})"
        raise InputError("key", must, os.fspath(path), "choose another path") from None


def fingerprint(settings: BaseWatermarkingConfig) -> str:
    """A public name of a key: 8 hex digits.

    2^32 fingerprints cannot identify a key drawn from a much larger range.
    """
    key = [settings.to_dict()[name] for name in RedactedMap.SECRET_KEYS if name in settings.to_dict()]
    text = json.dumps([settings.scheme, *key])
    return hashlib.blake2b(text.encode(), digest_size=4, person=b"descant key").hexdigest()


def warn_if_public(settings: BaseWatermarkingConfig, stacklevel: int = 3) -> None:
    """Warn if the key is published in documentation."""
    if settings.is_public:
        warnings.warn(
            f"the key of this watermark ({settings.scheme}) is public: it is in documentation, and "
            "anyone can detect, forge and remove the watermark; create one with `descant watermark key`",
            PublicKeyWarning,
            stacklevel=stacklevel,
        )


def _distinct_keys(count: int) -> Iterator[int]:
    """Random keys that differ modulo the table size; equal ones would repeat a round."""
    residues: set[int] = set()
    while len(residues) < count:
        key = secrets.randbelow(_MAX_EXACT_INT)
        if key % _SAMPLING_TABLE_SIZE not in residues:
            residues.add(key % _SAMPLING_TABLE_SIZE)
            yield key


def _read_file(path: str, field: str) -> dict[str, BaseWatermarkingConfig]:
    # If the key itself was passed as a path, the error must not show it.
    shown_path = "a value that is not a path" if _looks_like_json(path) else path
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(field, f"must be a file that can be read ({reason})", shown_path) from None
    if len(data) > _MAX_FILE_BYTES:
        raise InputError(field, f"must be a file of at most {_MAX_FILE_BYTES} bytes", shown_path)
    return _parse_keys(_parse_json(text, field, shown_path), field)


def _looks_like_json(text: str) -> bool:
    """Whether a text is JSON or starts like it."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text.lstrip()[:1] in ("{", "[")
    return True


def _parse_json(text: str, field: str, shown_value: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise InputError(field, f"must contain JSON ({reason})", shown_value) from None


def _parse_keys(data: Any, field: str) -> dict[str, BaseWatermarkingConfig]:
    """Parse settings by name from JSON data."""
    expected = "an object of settings, a list of them, or an object of them by name"
    if isinstance(data, dict) and data and all(isinstance(entry, dict) for entry in data.values()):
        entries = [({_NAME: name, **entry}, f"the key {name!r}") for name, entry in data.items()]
    elif isinstance(data, dict):
        entries = [(data, "the key")]
    elif isinstance(data, list) and data and all(isinstance(entry, dict) for entry in data):
        entries = [(entry, f"key {number} of {len(data)}") for number, entry in enumerate(data, 1)]
    else:
        raise InputError(field, f"must contain {expected}", f"{type(data).__name__}, or an empty container")
    keys: dict[str, BaseWatermarkingConfig] = {}
    for entry, label in entries:
        settings = _parse_settings(
            {name: value for name, value in entry.items() if name != _NAME}, field, label
        )
        name = entry.get(_NAME, fingerprint(settings))
        if not isinstance(name, str) or not name:
            raise InputError(field, f'must have text as "{_NAME}" of {label}', type(name).__name__)
        if name in keys:
            raise InputError(field, "must have unique key names", name, f'change its "{_NAME}"')
        keys[name] = settings
    return keys


def _parse_settings(data: dict[str, Any], field: str, where: str) -> BaseWatermarkingConfig:
    """Parse settings from a dict; errors do not show the key."""
    secret_names = [name for name in RedactedMap.SECRET_KEYS if name in data]
    if len(secret_names) != 1:
        must = f"must have one of {', '.join(f'`{name}`' for name in RedactedMap.SECRET_KEYS)} in {where}"
        raise InputError(field, must, sorted(data), "create one with `descant watermark key`")
    try:
        return as_watermarking_config(data)
    except ConfigError:
        [secret] = secret_names
    # Errors in other settings also occur with a placeholder key, and can be shown with that.
    placeholder = [1] if secret == "keys" else 1
    try:
        as_watermarking_config({**data, secret: placeholder})
    except ConfigError as error:
        raise InputError(
            field, f"must contain valid watermark settings in {where} ({error})", sorted(data)
        ) from None
    must = "a non-empty list of integers" if secret == "keys" else "a positive integer"
    shown_value = f"an invalid {type(data[secret]).__name__}"
    raise InputError(field, f"must have {must} below 2^63 as `{secret}` of {where}", shown_value)
