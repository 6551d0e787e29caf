"""Segments: what was heard in a window, cut where its timestamps say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Clock", "Piece", "Window", "split"]


class Window(NamedTuple):
    """Which part of the audio is listened to, in frames."""

    start: int
    frames: int  # of audio in it; what the model is shown beyond is silence


@dataclass(frozen=True)
class Clock:
    """What timestamp tokens and frames mean in time."""

    zero: int  # the token for the beginning of a window; later times follow it
    token: float  # seconds from one timestamp to the next
    frame: float  # seconds for each frame
    stride: int  # frames from one timestamp to the next

    def begins(self, window: Window) -> float:
        """When a window begins, in seconds."""
        return window.start * self.token / self.stride


class Piece(NamedTuple):
    """One segment: tokens `first` to `last` (excluded) of its window, spoken from `start` to `end`."""

    first: int
    last: int
    start: float  # seconds from the beginning of the audio
    end: float


def split(tokens: Sequence[int], window: Window, clock: Clock) -> tuple[list[Piece], int]:
    """The segments of a window and how many frames they take (Radford et al. 2022, section 3.8).

    Two timestamps in a row end one segment and begin the next. After the last such pair the speaker was
    cut off, so the next window begins there; unless the window ends on a single timestamp, which says
    that nothing is spoken after it. Without any pair the window is one segment.
    """
    begins = clock.begins(window)
    stamped = [token >= clock.zero for token in tokens]
    pairs = [at for at in range(1, len(tokens)) if stamped[at - 1] and stamped[at]]
    if not pairs:
        return [
            Piece(0, len(tokens), begins, begins + _last(tokens, window, clock) * clock.token)
        ], window.frames

    def time(token: int) -> float:
        return begins + float(token - clock.zero) * clock.token

    whole = stamped[-2:] == [False, True]
    # A window that was cut off keeps both timestamps of its last pair, a sign that more is to come.
    borders = [0, *pairs, len(tokens)] if whole else [0, *pairs[:-1], pairs[-1] + 1]
    pieces = []
    for number, (first, last) in enumerate(pairwise(borders), 1):
        both = not whole and number == len(borders) - 1
        pieces.append(Piece(first, last, time(tokens[first]), time(tokens[last - 2 if both else last - 1])))
    heard = window.frames if whole else (tokens[borders[-1] - 2] - clock.zero) * clock.stride
    # Only a model that breaks the rules of timestamps stands still; it is not asked the same again.
    return pieces, heard if heard > 0 else window.frames


def _last(tokens: Sequence[int], window: Window, clock: Clock) -> int:
    """How many timestamps long a window without pairs is: up to its last timestamp, or all of its audio."""
    stamps = [token for token in tokens if token >= clock.zero]
    if stamps and stamps[-1] != clock.zero:
        return stamps[-1] - clock.zero
    return int(window.frames * clock.frame / clock.token)
