"""API keys, and the limits of each: requests and tokens a minute, and requests at once."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from descant.errors import ConfigError, InputError, file_errors
from descant.serve.http.errors import ApiError

MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """The limits of one key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs
    concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(name, "must be an integer >= 1", value, "leave it out for no limit")


class _TokenBucket:
    """The allowance of a limit, which refills evenly to its size within a minute."""

    def __init__(self, limits: KeyLimits, name: str, now: float) -> None:
        self.name, self.size = name, getattr(limits, name)
        self.level, self.updated = float(self.size), now

    def require(self, amount: float, now: float) -> None:
        """Raise with the time to wait unless it holds that much, or all that it can hold."""
        self.level = min(self.size, self.level + (now - self.updated) * self.size / MINUTE)
        self.updated = now
        missing = min(amount, self.size) - self.level
        if missing > 0:
            raise _limit_error(self.name, self.size, missing * MINUTE / self.size)


class RateLimiter:
    """The usage of one key against its limits; used by one event loop."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._requests, self._tokens = (
            None if getattr(limits, name) is None else _TokenBucket(limits, name, clock())
            for name in ("requests_per_minute", "tokens_per_minute")
        )
        self.num_running = 0

    def begin(self) -> RequestLease:
        """Count a request, or raise with the time after which it may be tried again."""
        limit = self.limits.concurrent_requests
        if limit is not None and self.num_running >= limit:
            raise _limit_error("concurrent_requests", limit, 1.0)
        now = self._clock()
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                # Tokens are known later: what matters here is that the allowance is not used up.
                bucket.require(1.0, now)
        if self._requests is not None:
            self._requests.level -= 1.0
        self.num_running += 1
        return RequestLease(self)

    def take_tokens(self, count: int) -> None:
        """Use tokens of the allowance, or raise if it does not have that many yet."""
        if self._tokens is None:
            return
        if count < 0:
            raise ValueError(f"a request must reserve at least 0 tokens, got {count}")
        if count > self._tokens.size:
            limit = self._tokens.size
            message = f"a request may have at most {limit} tokens with this key, this one has {count}"
            raise ApiError(400, message, param="max_tokens", code="tokens_per_minute")
        self._tokens.require(count, self._clock())
        self._tokens.level -= count

    def return_tokens(self, count: int) -> None:
        """Give back tokens that a request reserved and did not use."""
        if self._tokens is not None:
            self._tokens.level = min(self._tokens.size, self._tokens.level + count)


class RequestLease:
    """A running request of a key: its tokens are reserved at the start and settled at the end."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._num_reserved = 0
        self._is_ended = False

    def reserve(self, tokens: int) -> None:
        """Reserve the most tokens that the request may use."""
        self._limiter.take_tokens(tokens)
        self._num_reserved += tokens

    def end(self, used_tokens: int) -> None:
        """Return what was not used; further calls do nothing."""
        if not self._is_ended:
            self._is_ended = True
            self._limiter.num_running -= 1
            self._limiter.return_tokens(max(0, self._num_reserved - used_tokens))


def _limit_error(name: str, limit: int, wait: float) -> ApiError:
    message = f"this key has a limit of {limit} {name.replace('_', ' ')}: try again later"
    return ApiError(429, message, code=name, retry_after=wait)


ENVIRONMENT_VARIABLE: Final = "DESCANT_API_KEYS"
MIN_KEY_CHARS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LIMITS: Final = tuple(limit.name for limit in fields(KeyLimits))


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
    with file_errors("api_keys", path, "read"):
        text = path.read_bytes()
    try:
        data = tomllib.loads(text.decode())
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
    own = {limit: table.get(limit, getattr(limits, limit)) for limit in _LIMITS}
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
