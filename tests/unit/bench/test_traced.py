"""The benchmark of tracing runs, and reports whether its limits are met."""

from __future__ import annotations

import pytest

from bench import traced


@pytest.mark.parametrize(("most", "passed"), [(1000.0, True), (0.0, False)])
def test_it_runs_and_checks_its_limits(tiny, capsys, most, passed):
    status = traced.main(
        [
            "--model",
            str(tiny("llama").folder),
            "--new",
            "4",
            "--repeats",
            "1",
            "--long",
            "6",
            "--most",
            str(most),
        ]
    )
    output = capsys.readouterr().out
    assert (status == 0) == passed
    assert "6 steps:" in output
    assert ("all limits are met" in output) == passed
