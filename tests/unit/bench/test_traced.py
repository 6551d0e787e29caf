"""The benchmark of tracing runs, says what it is for, and holds its bars or says so."""

from __future__ import annotations

import pytest

from bench import traced


@pytest.mark.parametrize(("most", "held"), [(1000.0, True), (0.0, False)])
def test_it_runs_and_judges(tiny, capsys, most, held):
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
    said = capsys.readouterr().out
    assert (status == 0) == held
    assert "6 steps:" in said
    assert ("the bars hold" in said) == held
