"""API keys: who may use the server, and how much."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from descant.errors import ConfigError, InputError
from descant.serve.api_errors import ApiError
from descant.serve.limits import KeyLimits, RateLimiter

__all__ = ["ENVIRONMENT_VARIABLE", "ApiKey", "KeyRing"]

ENVIRONMENT_VARIABLE: Final = "DESCANT_API_KEYS"
MIN_KEY_CHARS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LIMITS: Final = tuple(one.name for one in fields(KeyLimits))


@dataclass(eq=False)
class ApiKey:
    """A key of the server; the key itself is not kept, only its digest."""

    name: str  # in logs and metrics
    digest: bytes
    limits: KeyLimits = field(default_factory=KeyLimits)

    def __post_init__(self) -> None:
        self.limiter = RateLimiter(self.limits)

    @property
    def salt(self) -> bytes:
        """Its salt of the prefix cache: other keys share nothing with it."""
        return hashlib.sha256(b"prefix cache\0" + self.digest).digest()


class KeyRing:
    """All keys of a server; without any, every request is that of one anonymous user."""

    def __init__(self, keys: Sequence[ApiKey] = (), anonymous_limits: KeyLimits | None = None) -> None:
        names = [key.name for key in keys]
        for name in names:
            if names.count(name) > 1 or not _NAME.fullmatch(name):
                must = "must have different names of letters, digits, `_`, `.` and `-`"
                raise ConfigError("api_keys", must, name)
        if len({key.digest for key in keys}) < len(keys):
            raise ConfigError("api_keys", "must be different from each other", names)
        self.keys = tuple(keys)
        self._anonymous = ApiKey("anonymous", b"", anonymous_limits or KeyLimits())

    def __bool__(self) -> bool:
        return bool(self.keys)

    @classmethod
    def load(cls, path: str | Path | None = None, limits: KeyLimits | None = None) -> KeyRing:
        """The keys of a TOML file and of the environment; `limits` hold for keys without their own."""
        limits = limits or KeyLimits()
        keys = [] if path is None else _read_file(Path(path), limits)
        return cls([*keys, *_read_environment(limits)], limits)

    def authenticate(self, authorization: str | None) -> ApiKey:
        """The key of an `Authorization` header: a bearer token, or the password of Basic."""
        if not self.keys:
            return self._anonymous
        given = _digest(_credential(authorization))
        found = None
        for key in self.keys:  # all of them, so that the time does not depend on which one it is
            if hmac.compare_digest(key.digest, given):
                found = key
        if found is None:
            message = "an API key is needed: send the header `Authorization: Bearer KEY`"
            if authorization:
                message = "this API key is not known"
            raise ApiError(401, message, code="invalid_api_key")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _credential(authorization: str | None) -> str:
    scheme, _, value = (authorization or "").partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value
    if scheme.lower() == "basic":  # what browsers send for the page
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:  # no base 64, or no UTF-8
            return ""
    return ""


def _read_file(path: Path, limits: KeyLimits) -> list[ApiKey]:
    """The keys of a file: a table `[keys.NAME]` for each, with `key` or `sha256`, and limits."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        must = f"must be a file that can be read ({error.strerror})"
        raise InputError("api_keys", must, str(path)) from None
    except ValueError as error:
        # The error of the parser may quote a key.
        line = re.search(r"line \d+", str(error))
        where = f" ({line[0]})" if line else ""
        raise InputError("api_keys", f"must be a TOML file{where}", str(path)) from None
    tables = data.get("keys")
    if not isinstance(tables, Mapping) or not tables or len(data) > 1:
        do = 'write [keys.NAME] and below it key = "..."'
        raise InputError("api_keys", "must have a table `keys` and no other", sorted(data), do)
    return [_parse_key(name, table, limits) for name, table in tables.items()]


def _parse_key(name: str, table: Any, limits: KeyLimits) -> ApiKey:
    where = f"[keys.{name}]"
    if not isinstance(table, Mapping):
        raise InputError("api_keys", f"must have a table {where}", type(table).__name__)
    unknown = sorted(set(table) - {"key", "sha256", *_LIMITS})
    if unknown:
        raise InputError("api_keys", f"must have only `key`, `sha256` and limits in {where}", unknown)
    if ("key" in table) == ("sha256" in table):
        raise InputError("api_keys", f"must have either `key` or `sha256` in {where}", sorted(table))
    own = {one: table.get(one, getattr(limits, one)) for one in _LIMITS}
    return ApiKey(name, _parse_digest(where, table), KeyLimits(**own))


def _parse_digest(where: str, table: Mapping[str, Any]) -> bytes:
    if "key" in table:
        return _digest(_check_key(where, table["key"]))
    try:
        digest = bytes.fromhex(table["sha256"])
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 32:
        must = f"must have 64 hexadecimal digits as `sha256` in {where}"
        raise InputError("api_keys", must, "another value")
    return digest


def _check_key(where: str, key: Any) -> str:
    if not isinstance(key, str) or len(key) < MIN_KEY_CHARS or not key.isascii() or " " in key:
        must = f"must be at least {MIN_KEY_CHARS} ASCII characters without spaces, in {where}"
        do = "make one with `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        raise InputError("api_keys", must, "another value", do)
    return key


def _read_environment(limits: KeyLimits) -> list[ApiKey]:
    """The keys of the environment variable, `NAME=KEY` separated by commas."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    keys = []
    for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, equals, key = part.partition("=")
        if not equals:
            name, key = f"key-{number}", part
        keys.append(ApiKey(name, _digest(_check_key(ENVIRONMENT_VARIABLE, key)), limits))
    return keys
