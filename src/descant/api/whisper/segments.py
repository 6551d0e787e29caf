"""Segments: what was heard in a window, cut where its timestamps say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["AudioWindow", "SegmentSpan", "TimestampScale", "split_segments"]


class AudioWindow(NamedTuple):
    """Which part of the audio is listened to, in frames."""

    start: int
    frames: int  # of audio in it; what the model is shown beyond is silence


@dataclass(frozen=True)
class TimestampScale:
    """What timestamp tokens and frames mean in time."""

    first_timestamp_id: int  # the token for the beginning of a window; later times follow it
    seconds_per_timestamp: float  # seconds from one timestamp to the next
    seconds_per_frame: float  # seconds for each frame
    frames_per_timestamp: int  # frames from one timestamp to the next

    def start_time(self, window: AudioWindow) -> float:
        """When a window begins, in seconds."""
        return window.start * self.seconds_per_timestamp / self.frames_per_timestamp


class SegmentSpan(NamedTuple):
    """One segment: tokens `first` to `last` (excluded) of its window, spoken from `start` to `end`."""

    token_start: int
    token_end: int
    start: float  # seconds from the beginning of the audio
    end: float


def split_segments(
    tokens: Sequence[int], window: AudioWindow, clock: TimestampScale
) -> tuple[list[SegmentSpan], int]:
    """The segments of a window and how many frames they take (Radford et al. 2022, section 3.8).

    Two timestamps in a row end one segment and begin the next. After the last such pair the speaker was
    cut off, so the next window begins there; unless the window ends on a single timestamp, which says
    that nothing is spoken after it. Without any pair the window is one segment.
    """
    begins = clock.start_time(window)
    stamped = [token >= clock.first_timestamp_id for token in tokens]
    pairs = [at for at in range(1, len(tokens)) if stamped[at - 1] and stamped[at]]
    if not pairs:
        return [
            SegmentSpan(
                0,
                len(tokens),
                begins,
                begins + _last_timestamp(tokens, window, clock) * clock.seconds_per_timestamp,
            )
        ], window.frames

    def time(token: int) -> float:
        return begins + float(token - clock.first_timestamp_id) * clock.seconds_per_timestamp

    whole = stamped[-2:] == [False, True]
    # A window that was cut off keeps both timestamps of its last pair, a sign that more is to come.
    borders = [0, *pairs, len(tokens)] if whole else [0, *pairs[:-1], pairs[-1] + 1]
    pieces = []
    for number, (first, last) in enumerate(pairwise(borders), 1):
        both = not whole and number == len(borders) - 1
        pieces.append(
            SegmentSpan(first, last, time(tokens[first]), time(tokens[last - 2 if both else last - 1]))
        )
    heard = (
        window.frames
        if whole
        else (tokens[borders[-1] - 2] - clock.first_timestamp_id) * clock.frames_per_timestamp
    )
    # Only a model that breaks the rules of timestamps stands still; it is not asked the same again.
    return pieces, heard if heard > 0 else window.frames


def _last_timestamp(tokens: Sequence[int], window: AudioWindow, clock: TimestampScale) -> int:
    """How many timestamps long a window without pairs is: up to its last timestamp, or all of its audio."""
    stamps = [token for token in tokens if token >= clock.first_timestamp_id]
    if stamps and stamps[-1] != clock.first_timestamp_id:
        return stamps[-1] - clock.first_timestamp_id
    return int(window.frames * clock.seconds_per_frame / clock.seconds_per_timestamp)
