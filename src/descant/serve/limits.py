"""Limits by API key: requests and tokens a minute, and requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from descant.errors import ConfigError
from descant.serve.api_errors import ApiError

__all__ = ["KeyLimits", "RateLimiter", "RequestLease"]

MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """What one key may use; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs
    concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(one.name, "must be an integer >= 1", value, "leave it out for no limit")


class _TokenBucket:
    """An allowance that refills evenly to its size within a minute."""

    def __init__(self, size: int, now: float) -> None:
        self.size, self.level, self.updated = size, float(size), now

    def refill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self.updated) * self.size / MINUTE)
        self.updated = now

    def wait_for(self, amount: float) -> float:
        """The seconds until it holds that much; 0: it does."""
        return max(0.0, (min(amount, self.size) - self.level) * MINUTE / self.size)


class RateLimiter:
    """The usage of one key against its limits; used by one event loop."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        now = clock()
        sizes = (limits.requests_per_minute, limits.tokens_per_minute)
        self._requests, self._tokens = (None if size is None else _TokenBucket(size, now) for size in sizes)
        self.num_running = 0

    def begin(self) -> RequestLease:
        """Count a request, or raise with the time after which it may be tried again."""
        limit = self.limits.concurrent_requests
        if limit is not None and self.num_running >= limit:
            raise _limit_error("concurrent_requests", limit, 1.0)
        now = self._clock()
        for name, bucket in (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens)):
            if bucket is None:
                continue
            bucket.refill(now)
            # Tokens are known later: what matters here is that the allowance is not used up.
            if wait := bucket.wait_for(1.0):
                raise _limit_error(name, bucket.size, wait)
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
        self._tokens.refill(self._clock())
        if wait := self._tokens.wait_for(count):
            raise _limit_error("tokens_per_minute", self._tokens.size, wait)
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
