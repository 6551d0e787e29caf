"""Where a window is cut: by hand, after the rules of the paper."""

from __future__ import annotations

import pytest

from descant.api.whisper.windows import AudioWindow, TimestampScale, split_segments

CLOCK = TimestampScale(
    first_timestamp_id=100, seconds_per_timestamp=0.02, seconds_per_frame=0.01, frames_per_timestamp=2
)
WINDOW = AudioWindow(start=400, frames=3000)  # begins at 4 s


def times(tokens, window=WINDOW):
    pieces, advance = split_segments(tokens, window, CLOCK)
    return [
        (one.token_start, one.token_end, round(one.start, 6), round(one.end, 6)) for one in pieces
    ], advance


def test_two_timestamps_in_a_row_end_a_segment_and_begin_the_next():
    # |0.0 a b 0.2|0.2 c 0.4| and the single timestamp at the end: silence after it
    tokens = [100, 1, 2, 110, 110, 3, 120]
    assert times(tokens) == ([(0, 4, 4.0, 4.2), (4, 7, 4.2, 4.4)], 3000)


def test_after_the_last_pair_the_speaker_was_cut_off():
    # What follows the pair is not kept, and the next window begins at its time: 10 stamps of 2 frames.
    tokens = [100, 1, 2, 110, 112, 3, 4]
    assert times(tokens) == ([(0, 5, 4.0, 4.2)], 20)


def test_a_pair_at_the_end_goes_on_there():
    tokens = [100, 1, 105, 105, 2, 130, 130]
    assert times(tokens) == ([(0, 3, 4.0, 4.1), (3, 7, 4.1, 4.6)], 60)


def test_a_window_without_pairs_is_one_segment():
    assert times([100, 1, 2, 3]) == ([(0, 4, 4.0, 34.0)], 3000)
    assert times([1, 2, 3]) == ([(0, 3, 4.0, 34.0)], 3000)


def test_its_last_timestamp_ends_it():
    assert times([100, 1, 2, 125]) == ([(0, 4, 4.0, 4.5)], 3000)


def test_the_last_window_is_as_long_as_its_audio():
    assert times([100, 1], AudioWindow(400, 77)) == ([(0, 2, 4.0, 4.76)], 77)


def test_no_tokens_give_one_empty_segment():
    assert times([]) == ([(0, 0, 4.0, 34.0)], 3000)


@pytest.mark.parametrize("tokens", [[100, 100, 1], [1, 100, 100]])
def test_invalid_timestamps_advance_by_a_whole_window(tokens):
    assert split_segments(tokens, WINDOW, CLOCK)[1] == 3000
