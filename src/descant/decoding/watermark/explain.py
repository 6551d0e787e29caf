"""Plain-language explanations of detections."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from descant.decoding.watermark.detection import Detection

__all__ = ["VERDICT_TEXTS", "explain_verdict", "format_number", "format_p_value", "summary_items"]

# General meaning of each verdict.
VERDICT_TEXTS: Final = {
    "marked": (
        "Most likely it, or a part of it, was made with this key. That names a key, not the person who used "
        "it."
    ),
    "not marked": (
        "It scores below what even a weak mark of this key reaches: most likely it is not marked with this "
        "key, or the watermark was removed. That does not say that a person wrote it: text of other models "
        "and other keys looks the same."
    ),
    "too short to tell": (
        "What could be scored is too little to tell marked text from unmarked. That speaks for neither."
    ),
}

_MIN_P_VALUE: Final = 1e-15  # smaller values are shown as `< 1e-15`


def summary_items(detection: Detection) -> list[tuple[str, str]]:
    """Return the figures of a detection with their labels."""
    low, high = detection.interval
    items = [
        ("verdict", detection.verdict),
        ("scheme", detection.scheme),
        ("key", detection.key),
        ("scored tokens", f"{detection.scored} of {detection.tokens}"),
        ("score", f"{format_number(detection.score)} (unmarked text: {format_number(detection.expected)})"),
        ("95 % interval", f"{format_number(low)} to {format_number(high)}"),
        ("z", format_number(detection.z, 2)),
        ("p", format_p_value(detection.p_value) + _correction_note(detection)),
    ]
    if detection.span is not None:
        first, last = detection.span
        where = f"tokens {first} to {last - 1}"
        if detection.characters is not None:
            where += f", characters {detection.characters[0]} to {detection.characters[1] - 1}"
        items.append(("passage", where))
    return items


def explain_verdict(detection: Detection) -> str:
    """Explain what the verdict means, and what it does not mean."""
    text = VERDICT_TEXTS[detection.verdict]
    if detection.verdict == "marked":
        odds = _format_odds(detection.p_value)
        return f"A text written without this key would score as high with a chance of {odds}. {text}"
    if detection.verdict == "too short to tell" and detection.needed is not None:
        return f"{text} About {detection.needed} scored tokens would tell."
    return text


def format_number(value: float, decimals: int = 3) -> str:
    """Format a number; `none` if it is not finite."""
    return f"{value:.{decimals}f}" if isfinite(value) else "none"


def format_p_value(p: float) -> str:
    """Format a p-value."""
    if p >= 0.001:
        return f"{p:.3f}"
    return f"{p:.1e}" if p >= _MIN_P_VALUE else "< 1e-15"


def _correction_note(detection: Detection) -> str:
    return "" if detection.tests == 1 else f" (corrected for {detection.tests} tests)"


def _format_odds(p: float) -> str:
    """Format a small probability as odds with two significant digits."""
    if p < _MIN_P_VALUE:
        return "less than 1 in a million billions"
    return f"1 in {float(f'{1 / p:.1e}'):,.0f}"
