"""Segments: the tokens of a window, split at timestamp tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["AudioWindow", "SegmentSpan", "TimestampScale", "split_segments"]


class AudioWindow(NamedTuple):
    """A part of the audio, in frames."""

    start: int
    frames: int  # of audio; the rest of the encoder's input is silence


@dataclass(frozen=True)
class TimestampScale:
    """Conversion of timestamp tokens and frames into seconds."""

    first_timestamp_id: int  # the token for the start of a window; later times have higher ids
    seconds_per_timestamp: float
    seconds_per_frame: float
    frames_per_timestamp: int

    def start_time(self, window: AudioWindow) -> float:
        """The start of a window in seconds."""
        return window.start * self.seconds_per_timestamp / self.frames_per_timestamp


class SegmentSpan(NamedTuple):
    """One segment: tokens `token_start` to `token_end` (exclusive) of a window, from `start` to `end`."""

    token_start: int
    token_end: int
    start: float  # seconds from the start of the audio
    end: float


def split_segments(
    tokens: Sequence[int], window: AudioWindow, scale: TimestampScale
) -> tuple[list[SegmentSpan], int]:
    """The segments of a window and their number of frames (Radford et al. 2022, section 3.8).

    Two adjacent timestamps end one segment and start the next. The segment after the last such pair is
    incomplete, so the next window starts there, unless the window ends with a single timestamp, which means
    that no speech follows. Without a pair the window is one segment.
    """
    window_start = scale.start_time(window)
    is_timestamp = [token >= scale.first_timestamp_id for token in tokens]
    pairs = [index for index in range(1, len(tokens)) if is_timestamp[index - 1] and is_timestamp[index]]
    if not pairs:
        duration = _last_timestamp(tokens, window, scale) * scale.seconds_per_timestamp
        return [SegmentSpan(0, len(tokens), window_start, window_start + duration)], window.frames

    def time(token: int) -> float:
        return window_start + float(token - scale.first_timestamp_id) * scale.seconds_per_timestamp

    is_complete = is_timestamp[-2:] == [False, True]
    # The last segment of an incomplete window keeps both timestamps of its pair.
    borders = [0, *pairs, len(tokens)] if is_complete else [0, *pairs[:-1], pairs[-1] + 1]
    spans = []
    for number, (first, last) in enumerate(pairwise(borders), 1):
        ends_in_pair = not is_complete and number == len(borders) - 1
        end_token = tokens[last - 2 if ends_in_pair else last - 1]
        spans.append(SegmentSpan(first, last, time(tokens[first]), time(end_token)))
    if is_complete:
        return spans, window.frames
    frames = (tokens[borders[-1] - 2] - scale.first_timestamp_id) * scale.frames_per_timestamp
    # Timestamps that violate the rules may give 0 frames; the whole window is consumed then.
    return spans, frames if frames > 0 else window.frames


def _last_timestamp(tokens: Sequence[int], window: AudioWindow, scale: TimestampScale) -> int:
    """The length of a window without pairs, in timestamps: up to its last timestamp, or all of its audio."""
    timestamps = [token for token in tokens if token >= scale.first_timestamp_id]
    if timestamps and timestamps[-1] != scale.first_timestamp_id:
        return timestamps[-1] - scale.first_timestamp_id
    return int(window.frames * scale.seconds_per_frame / scale.seconds_per_timestamp)
