"""`python -m bench.memory`: the peak of each side, in a process of its own."""

from __future__ import annotations

import sys

import pytest

from bench import memory
from bench.implementations import OURS, THEIRS


def test_a_line_has_both_peaks_and_their_ratio(monkeypatch, capsys):
    peaks = {OURS: iter((90e6, 110e6, 100e6)), THEIRS: iter((80e6, 85e6, 75e6))}
    monkeypatch.setattr(memory, "_run_process", lambda model, case, side: next(peaks[side]))
    assert memory.main(["--case", "equal-16-64", "--repeats", "3"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split() == ["thin", "equal-16-64", "100.0", "80.0", "1.25"]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are counted by Linux")
@pytest.mark.parametrize("side", [OURS, THEIRS])
def test_a_peak_is_that_of_the_whole_run(side):
    """Measured in a process of its own: in this one, the allocator keeps what other tests have freed."""
    held = 16 * 63 * 2 * 6 * 3 * 64 * 4  # rows, slots, keys and values, layers, heads, size, bytes
    peak = memory._run_process("thin", "equal-16-64", side)
    assert 0.5 * held < peak < 8 * held
