"""Number formats of the pictures."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_nats", "format_percent", "format_score", "pluralize", "probability"]

_MIN_SHOWN_PROBABILITY = 0.0005  # smaller ones are shown as "< 0.1 %"


def probability(log: float | None) -> float:
    """The probability of a log-probability; 0 for None."""
    return 0.0 if log is None else math.exp(min(log, 0.0))


def format_percent(log: float | None) -> str:
    """A log-probability as a percentage, such as "12.3 %"."""
    if log is None:
        return "not kept"
    if log == -math.inf:
        return "0 %"
    value = probability(log)
    return "< 0.1 %" if value < _MIN_SHOWN_PROBABILITY else f"{100 * value:.1f} %"


def format_score(score: float | None) -> str:
    """A beam score or log-probability."""
    if score is None:
        return ""
    if math.isinf(score):
        return "−∞" if score < 0 else "∞"
    text = f"{abs(score):.2f}"
    return text if score >= 0 or not float(text) else f"−{text}"


def format_nats(entropy: float) -> str:
    """An entropy."""
    return f"{entropy:.2f} nats"


def pluralize(count: int, noun: str, many: str = "") -> str:
    """A count with its noun: "1 token", "2 tokens"."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


def format_bytes(size: int) -> str:
    """A size in the unit that leaves one to three digits."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
