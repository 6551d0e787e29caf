"""Limits by key, on a clock of the test's own."""

from __future__ import annotations

import pytest

from descant.errors import ConfigError
from descant.serve.http.errors import ApiError
from descant.serve.http.keys import KeyLimits, RateLimiter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limiter(clock: Clock, **limits: int) -> RateLimiter:
    return RateLimiter(KeyLimits(**limits), clock)


def test_requests_per_minute_refill_evenly():
    clock = Clock()
    limited = limiter(clock, requests_per_minute=6)
    for _ in range(6):
        limited.begin().end(0)
    with pytest.raises(ApiError) as caught:
        limited.begin()
    assert caught.value.status == 429
    assert caught.value.headers["retry-after"] == "10"
    clock.now = 9.9
    with pytest.raises(ApiError):
        limited.begin()
    clock.now = 10.0
    limited.begin()


def test_concurrent_requests_count_until_their_end():
    limited = limiter(Clock(), concurrent_requests=2)
    first, _ = limited.begin(), limited.begin()
    with pytest.raises(ApiError, match="concurrent requests"):
        limited.begin()
    first.end(0)
    first.end(0)
    limited.begin()
    assert limited.num_running == 2


def test_tokens_are_reserved_and_the_rest_returned():
    clock = Clock()
    limited = limiter(clock, tokens_per_minute=100)
    lease = limited.begin()
    lease.reserve(80)
    other = limited.begin()
    with pytest.raises(ApiError) as caught:
        other.reserve(30)
    assert caught.value.headers["retry-after"] == "6"
    lease.end(10)
    other.reserve(90)
    clock.now = 60.0
    limited.begin().reserve(100)


def test_a_request_above_the_whole_allowance_is_refused_for_good():
    lease = limiter(Clock(), tokens_per_minute=100).begin()
    with pytest.raises(ApiError) as caught:
        lease.reserve(101)
    assert caught.value.status == 400


def test_returned_tokens_never_exceed_the_allowance():
    clock = Clock()
    limited = limiter(clock, tokens_per_minute=100)
    lease = limited.begin()
    lease.reserve(50)
    clock.now = 60.0
    limited.begin().reserve(1)
    lease.end(0)
    with pytest.raises(ApiError):
        limited.begin().reserve(100 + 1)


def test_a_reservation_is_never_negative():
    with pytest.raises(ValueError, match="at least 0"):
        limiter(Clock(), tokens_per_minute=100).begin().reserve(-1)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_limits_are_positive_integers(value):
    with pytest.raises(ConfigError, match="`requests_per_minute` must be an integer >= 1"):
        KeyLimits(requests_per_minute=value)
