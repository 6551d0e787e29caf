"""Acceptance statistics and the next draft length."""

import numpy as np
import pytest
import torch

from descant.decoding.speculative.acceptance import AcceptanceStats, DraftLengthController


def many(count):
    return AcceptanceStats.new().take(torch.zeros(count, dtype=torch.long))


def ints(*values):
    return np.array(values)


def test_drafts_are_counted_by_row_and_place():
    tally = many(3).after_step(ints(0, 1, 2), ints(3, 0, 1), ints(2, 0, 1))
    tally = tally.after_step(ints(0, 1, 2), ints(1, 2, 0), ints(0, 2, 0))
    assert tally.num_drafted.tolist() == [[2, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert tally.num_accepted.tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0]]
    report = tally.report(0)
    assert (report.drafted, report.accepted, report.forwards, report.saved_forwards) == (
        (2, 1, 1),
        (1, 1, 0),
        2,
        2,
    )
    assert report.acceptance_rate == pytest.approx(0.5)
    assert tally.report(1).drafted == (1, 1)
    assert many(1).report(0) == ((), (), 0)
    assert many(1).report(0).acceptance_rate == 0


def test_a_tally_follows_its_row():
    tally = many(2).after_step(ints(0, 1), ints(1, 3), ints(1, 0))
    moved = tally.take(torch.tensor([1, 1, 0]))
    assert moved.num_drafted.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert moved.draft_row.tolist() == [1, 1, 0]
    both = moved.cat(AcceptanceStats.new())
    assert both.draft_row.tolist() == [1, 1, 0, -1]
    assert both.num_drafted.tolist()[-1] == [0, 0, 0]
    assert AcceptanceStats.new().cat(moved).num_accepted.shape == (4, 3)


def test_a_rate_is_a_decaying_average():
    tally = many(2)
    for _ in range(20):
        tally = tally.after_step(ints(0, 1), ints(4, 4), ints(4, 0))
    assert tally.acceptance_rate[0] > 0.98
    assert tally.acceptance_rate[1] < 0.05
    for _ in range(6):
        tally = tally.after_step(ints(0, 1), ints(4, 4), ints(0, 4))
    assert tally.acceptance_rate[0] < tally.acceptance_rate[1]
    still = tally.after_step(ints(0, 1), ints(0, 0), ints(0, 0))
    assert still.acceptance_rate.tolist() == tally.acceptance_rate.tolist()


def test_an_unused_draft_is_scored_all_the_same():
    tally = many(3)
    heard = tally.after_untried(np.array([True, False, True]), np.array([True, True, False]))
    assert heard.acceptance_rate[0] > tally.acceptance_rate[0] > heard.acceptance_rate[1]
    assert heard.acceptance_rate[2] == tally.acceptance_rate[2]
    assert not heard.num_drafted.any()


def timed(times):
    """A controller that has seen forwards of so many positions take so long."""
    pace = DraftLengthController()
    for positions, seconds in times.items():
        for _ in range(2):
            pace.record_forward(positions, seconds)
    return pace


def chosen(pace, rates, most, free=True, use_timings=True):
    """The draft length for rows of these acceptance rates, of which each may have so many drafts."""
    rates = np.atleast_1d(rates)
    most = np.broadcast_to(most, rates.shape)
    return pace.choose_length(rates, most, is_model_free=free, use_timings=use_timings)


def test_what_a_step_takes_is_measured_before_anything_is_drafted():
    assert chosen(DraftLengthController(), 0.9, 5) == 0
    assert chosen(DraftLengthController(), 0.9, 5, use_timings=False) > 0
    assert chosen(timed({1: 1.0}), 0.9, 5) == 5
    # Of nearly as many rows is good enough.
    assert chosen(timed({15: 1.0}), np.full(16, 0.9), 2) > 0
    assert chosen(timed({8: 1.0}), np.full(16, 0.9), 2) == 0


# Three lines cost what one does, four to six nearly twice that: so does a product in steps of three.
STEPS_OF_THREE = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.8, 5: 1.85, 6: 1.9}
# The times of SmolLM2-135M on one core, relative to a step of sixteen rows.
SIXTEEN_ROWS = {16: 1.0, 32: 1.27, 48: 1.5, 64: 1.8, 80: 2.09, 176: 3.75}
WIDER_IS_FASTER = {4: 1.0, 8: 1.6, 12: 1.9, 16: 1.3}


@pytest.mark.parametrize(
    ("times", "rates", "most", "expected"),
    [
        (STEPS_OF_THREE, 0.95, 5, range(5, 6)),
        (STEPS_OF_THREE, 0.6, 5, range(2, 3)),
        (STEPS_OF_THREE, 0.03, 5, range(1)),
        (SIXTEEN_ROWS, np.full(16, 0.96), 10, range(1, 11)),
        (SIXTEEN_ROWS, np.full(16, 0.6), 10, range(1, 11)),
        (SIXTEEN_ROWS, np.full(16, 0.3), 10, range(1)),
        (SIXTEEN_ROWS, np.full(16, 0.05), 10, range(1)),
        (WIDER_IS_FASTER, np.full(4, 0.5), 3, range(3, 4)),
        (WIDER_IS_FASTER, np.full(4, 0.5), 2, range(1)),
    ],
)
def test_as_many_are_tried_as_pay(times, rates, most, expected):
    assert chosen(timed(times), rates, most) in expected


@pytest.mark.parametrize(("rows", "expected"), [(1, [0, 2, 6, 14, 30, 62]), (16, [0, 4, 20])])
def test_many_rows_probe_a_draft_model_less_often(rows, expected):
    pace = timed({rows: 1.0, 2 * rows: 1.5})
    pace.record_draft(1, 0.5)
    lengths = [chosen(pace, np.full(rows, 0.01), 4, free=False) for _ in range(64)]
    assert np.flatnonzero([np.max(length) for length in lengths]).tolist() == expected


@pytest.mark.parametrize(("rate", "probing"), [(0.01, [2, 3, 4, 5]), (0.35, list(range(16)))])
def test_a_part_of_many_rows_probes_a_draft_model_until_it_is_promising(rate, probing):
    pace = timed({16: 1.0, 32: 1.5})
    pace.record_draft(1, 0.5)
    most = np.full(16, 4)
    most[:2] = 0  # rows that may not draft
    length = chosen(pace, np.full(16, rate), most, free=False)
    assert np.flatnonzero(np.broadcast_to(length, 16)).tolist() == probing


def test_rows_that_tried_nothing_share_the_rate_of_the_others():
    stats = AcceptanceStats.new().cat(AcceptanceStats.new()).cat(AcceptanceStats.new())
    prior = float(stats.acceptance_rate[0])
    assert stats.shared_acceptance_rate.tolist() == [prior] * 3
    stats = stats.after_step(ints(0, 1, 2), ints(1, 1, 0), ints(1, 0, 0))
    first, second, untried = stats.shared_acceptance_rate.tolist()
    assert first > prior > second
    assert untried == pytest.approx((first + second) / 2)


def test_sixteen_rows_stop_drafting_and_begin_again():
    pace, tally = timed(SIXTEEN_ROWS), many(16)

    def step(is_right):
        nonlocal tally
        length = chosen(pace, tally.acceptance_rate, 10)
        pace.record_forward(16 * (length + 1), 1 + 0.0172 * 16 * length, length)
        tally = tally.after_step(np.arange(16), np.full(16, length), np.full(16, length * is_right))
        tally = tally.after_untried(np.full(16, is_right), np.full(16, length == 0))
        return length

    assert sum(step(False) > 0 for _ in range(40)) <= 4
    lengths = [step(True) for _ in range(20)]
    assert max(lengths[:12]) > 0
    assert lengths[-1] > 2
    assert [step(False) for _ in range(20)][-5:] == [0] * 5


def test_a_width_is_given_a_second_chance_and_no_third():
    pace = timed({1: 1.0})
    pace.record_forward(2, 9.0)  # whatever had to be prepared
    assert chosen(pace, 0.5, 1) == 1
    pace.record_forward(2, 9.0)
    assert chosen(pace, 0.5, 1) == 0
    for _ in range(5):
        pace.record_forward(2, 1.0)
    assert chosen(pace, 0.5, 1) == 1


def test_what_a_network_takes_for_a_draft_counts():
    dear, fair = timed({1: 1.0, 2: 1.1}), timed({1: 1.0, 2: 1.1})
    dear.record_draft(2, 1.8)
    fair.record_draft(2, 0.1)
    assert chosen(fair, 0.6, 4, free=False) >= 2
    assert [chosen(dear, 0.6, 4, free=False) for _ in range(2)] == [1, 0]  # a trial, then none


def test_a_drafter_that_is_never_accepted_runs_less_and_less():
    pace = timed({1: 1.0, 2: 1.1})
    pace.record_draft(1, 0.5)
    asked = [chosen(pace, 0.01, 4, free=False) for _ in range(1000)]
    assert set(asked) == {0, 1}
    assert sum(asked) < 25
    assert sum(asked[500:]) >= 7
    assert chosen(pace, 0.99, 4, free=False) == 4


def test_what_a_step_takes_without_drafts_is_measured_again_now_and_then():
    pace = timed({1: 1.0, 2: 1.05})
    widths = []
    for _ in range(200):
        widths.append(chosen(pace, 0.9, 1))
        pace.record_forward(1 + widths[-1], 1.0, widths[-1])
    assert set(widths) == {0, 1}
    assert 3 <= widths.count(0) <= 5


def test_without_a_clock_the_same_is_always_tried():
    paces = DraftLengthController(), timed({2: 1.0, 4: 50.0, 6: 50.0})
    widths = [chosen(pace, [0.8, 0.3], [6, 2], use_timings=False) for pace in paces]
    assert widths[0] == widths[1] > 0
