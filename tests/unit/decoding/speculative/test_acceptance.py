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


def timed(pace, times):
    for positions, seconds in times.items():
        for _ in range(2):
            pace.record_forward(positions, seconds)
    return pace


def test_what_a_step_takes_is_measured_before_anything_is_drafted():
    pace = DraftLengthController()
    assert pace.choose_length(np.array([0.9]), ints(5), is_model_free=True, use_timings=True) == 0
    assert pace.choose_length(np.array([0.9]), ints(5), is_model_free=True, use_timings=False) > 0
    timed(pace, {1: 1.0})
    assert pace.choose_length(np.array([0.9]), ints(5), is_model_free=True, use_timings=True) == 5
    # Of nearly as many rows is good enough.
    assert (
        timed(DraftLengthController(), {15: 1.0}).choose_length(
            np.full(16, 0.9), np.full(16, 2), is_model_free=True, use_timings=True
        )
        > 0
    )
    assert (
        timed(DraftLengthController(), {8: 1.0}).choose_length(
            np.full(16, 0.9), np.full(16, 2), is_model_free=True, use_timings=True
        )
        == 0
    )


@pytest.mark.parametrize(("rate", "expected"), [(0.95, 5), (0.6, 2), (0.03, 0)])
def test_as_many_are_tried_as_pay(rate, expected):
    # Three lines cost what one does, four to six nearly twice that: so does a product in steps of three.
    times = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.8, 5: 1.85, 6: 1.9}
    assert (
        timed(DraftLengthController(), times).choose_length(
            np.array([rate]), ints(5), is_model_free=True, use_timings=True
        )
        == expected
    )


@pytest.mark.parametrize(("rows", "expected"), [(1, [0, 2, 6, 14, 30, 62]), (16, [0, 4, 20])])
def test_many_rows_probe_a_draft_model_less_often(rows, expected):
    pace = timed(DraftLengthController(), {rows: 1.0, 2 * rows: 1.5})
    pace.record_draft(1, 0.5)
    rates, most = np.full(rows, 0.01), np.full(rows, 4)
    lengths = [pace.choose_length(rates, most, is_model_free=False, use_timings=True) for _ in range(64)]
    assert np.flatnonzero([np.max(length) for length in lengths]).tolist() == expected


@pytest.mark.parametrize(("rate", "probing"), [(0.01, [2, 3, 4, 5]), (0.35, list(range(16)))])
def test_a_part_of_many_rows_probes_a_draft_model_until_it_is_promising(rate, probing):
    pace = timed(DraftLengthController(), {16: 1.0, 32: 1.5})
    pace.record_draft(1, 0.5)
    most = np.full(16, 4)
    most[:2] = 0  # rows that may not draft
    length = pace.choose_length(np.full(16, rate), most, is_model_free=False, use_timings=True)
    assert np.flatnonzero(np.broadcast_to(length, 16)).tolist() == probing


def test_rows_that_tried_nothing_share_the_rate_of_the_others():
    stats = AcceptanceStats.new().cat(AcceptanceStats.new()).cat(AcceptanceStats.new())
    prior = float(stats.acceptance_rate[0])
    assert stats.shared_acceptance_rate.tolist() == [prior] * 3
    stats = stats.after_step(ints(0, 1, 2), ints(1, 1, 0), ints(1, 0, 0))
    first, second, untried = stats.shared_acceptance_rate.tolist()
    assert first > prior > second
    assert untried == pytest.approx((first + second) / 2)


# The times of SmolLM2-135M on one core, relative to a step of sixteen rows.
SIXTEEN_ROWS = {16: 1.0, 32: 1.27, 48: 1.5, 64: 1.8, 80: 2.09, 176: 3.75}


@pytest.mark.parametrize(("rate", "pays"), [(0.96, True), (0.6, True), (0.3, False), (0.05, False)])
def test_sixteen_rows_draft_only_where_more_than_a_third_is_accepted(rate, pays):
    pace, most = timed(DraftLengthController(), SIXTEEN_ROWS), np.full(16, 10)
    length = pace.choose_length(np.full(16, rate), most, is_model_free=True, use_timings=True)
    assert (length > 0) == pays


def test_sixteen_rows_stop_drafting_and_begin_again():
    pace, tally, most = timed(DraftLengthController(), SIXTEEN_ROWS), many(16), np.full(16, 10)

    def step(is_right):
        nonlocal tally
        length = pace.choose_length(tally.acceptance_rate, most, is_model_free=True, use_timings=True)
        pace.record_forward(16 * (length + 1), 1 + 0.0172 * 16 * length, length)
        tally = tally.after_step(np.arange(16), np.full(16, length), np.full(16, length * is_right))
        tally = tally.after_untried(np.full(16, is_right), np.full(16, length == 0))
        return length

    assert sum(step(False) > 0 for _ in range(40)) <= 4
    lengths = [step(True) for _ in range(20)]
    assert max(lengths[:12]) > 0
    assert lengths[-1] > 2
    assert [step(False) for _ in range(20)][-5:] == [0] * 5


def test_a_wider_step_that_takes_less_is_preferred():
    times = {4: 1.0, 8: 1.6, 12: 1.9, 16: 1.3}
    pace = timed(DraftLengthController(), times)
    assert pace.choose_length(np.full(4, 0.5), np.full(4, 3), is_model_free=True, use_timings=True) == 3
    assert pace.choose_length(np.full(4, 0.5), np.full(4, 2), is_model_free=True, use_timings=True) == 0


def test_a_width_is_given_a_second_chance_and_no_third():
    pace = timed(DraftLengthController(), {1: 1.0})
    pace.record_forward(2, 9.0)  # whatever had to be prepared
    assert pace.choose_length(np.array([0.5]), ints(1), is_model_free=True, use_timings=True) == 1
    pace.record_forward(2, 9.0)
    assert pace.choose_length(np.array([0.5]), ints(1), is_model_free=True, use_timings=True) == 0
    for _ in range(5):
        pace.record_forward(2, 1.0)
    assert pace.choose_length(np.array([0.5]), ints(1), is_model_free=True, use_timings=True) == 1


def test_what_a_network_takes_for_a_draft_counts():
    rate, most = np.array([0.6]), ints(4)
    dear, fair = (
        timed(DraftLengthController(), {1: 1.0, 2: 1.1}),
        timed(DraftLengthController(), {1: 1.0, 2: 1.1}),
    )
    dear.record_draft(2, 1.8)
    fair.record_draft(2, 0.1)
    assert fair.choose_length(rate, most, is_model_free=False, use_timings=True) >= 2
    assert [dear.choose_length(rate, most, is_model_free=False, use_timings=True) for _ in range(2)] == [
        1,
        0,
    ]  # a trial, then none


def test_a_drafter_that_is_never_accepted_runs_less_and_less():
    pace = timed(DraftLengthController(), {1: 1.0, 2: 1.1})
    pace.record_draft(1, 0.5)
    asked = [
        pace.choose_length(np.array([0.01]), ints(4), is_model_free=False, use_timings=True)
        for _ in range(1000)
    ]
    assert set(asked) == {0, 1}
    assert sum(asked) < 25
    assert sum(asked[500:]) >= 7
    assert pace.choose_length(np.array([0.99]), ints(4), is_model_free=False, use_timings=True) == 4


def test_what_a_step_takes_without_drafts_is_measured_again_now_and_then():
    pace = timed(DraftLengthController(), {1: 1.0, 2: 1.05})
    widths = []
    for _ in range(200):
        widths.append(pace.choose_length(np.array([0.9]), ints(1), is_model_free=True, use_timings=True))
        pace.record_forward(1 + widths[-1], 1.0, widths[-1])
    assert set(widths) == {0, 1}
    assert 3 <= widths.count(0) <= 5


def test_without_a_clock_the_same_is_always_tried():
    rate, most = np.array([0.8, 0.3]), ints(6, 2)
    first = DraftLengthController()
    second = timed(DraftLengthController(), {2: 1.0, 4: 50.0, 6: 50.0})
    widths = [one.choose_length(rate, most, is_model_free=True, use_timings=False) for one in (first, second)]
    assert widths[0] == widths[1] > 0
