"""What a detection says, in words that a reader who knows no statistics can hold on to."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from descant.decoding.watermark.detection import Detection

__all__ = ["GENERALLY", "chance", "facts", "meaning", "number"]

# What each verdict means of any text.
GENERALLY: Final = {
    "marked": (
        "Most likely it, or a part of it, was made with this key. That names a key, not the person who used "
        "it."
    ),
    "not marked": (
        "It scores below what even a weak mark of this key reaches: most likely it is not marked with this "
        "key, or the mark was washed out. That does not say that a person wrote it: text of other models and "
        "other keys looks the same."
    ),
    "too short to tell": (
        "What could be scored is too little to tell marked text from unmarked. That speaks for neither."
    ),
}

_SURE: Final = 1e-15  # below it the chance is no longer a number that means anything


def facts(detection: Detection) -> list[tuple[str, str]]:
    """The figures of a detection, each with its name."""
    low, high = detection.interval
    found = [
        ("verdict", detection.verdict),
        ("scheme", detection.scheme),
        ("key", detection.key),
        ("scored tokens", f"{detection.scored} of {detection.tokens}"),
        ("score", f"{number(detection.score)} (unmarked text: {number(detection.expected)})"),
        ("95 % interval", f"{number(low)} to {number(high)}"),
        ("z", number(detection.z, 2)),
        ("p", chance(detection.p_value) + _paid(detection)),
    ]
    if detection.span is not None:
        first, last = detection.span
        where = f"tokens {first} to {last - 1}"
        if detection.characters is not None:
            where += f", characters {detection.characters[0]} to {detection.characters[1] - 1}"
        found.append(("passage", where))
    return found


def meaning(detection: Detection) -> str:
    """What the verdict on a text means, and what it does not."""
    told = GENERALLY[detection.verdict]
    if detection.verdict == "marked":
        chance = _odds(detection.p_value)
        return f"A text written without this key would score as high with a chance of {chance}. {told}"
    if detection.verdict == "too short to tell" and detection.needed is not None:
        return f"{told} About {detection.needed} scored tokens would tell."
    return told


def number(value: float, places: int = 3) -> str:
    """A figure, short; what there is too little text for is `none`."""
    return f"{value:.{places}f}" if isfinite(value) else "none"


def chance(p: float) -> str:
    """A p-value, short."""
    if p >= 0.001:
        return f"{p:.3f}"
    return f"{p:.1e}" if p >= _SURE else "< 1e-15"


def _paid(detection: Detection) -> str:
    return "" if detection.tests == 1 else f" (corrected for {detection.tests} tests)"


def _odds(p: float) -> str:
    """A small probability as people say it: two leading digits, which is more than it is worth."""
    if p < _SURE:
        return "less than 1 in a million billions"
    return f"1 in {float(f'{1 / p:.1e}'):,.0f}"
