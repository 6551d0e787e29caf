"""`python -m bench.regression`: two checkouts in turns."""

from __future__ import annotations

import pytest

from bench import regression


class FixedSide:
    """A side that takes a fixed time and counts its runs."""

    def __init__(self, seconds, tokens=((1, 2),)):
        self.seconds, self.tokens, self.runs = seconds, tokens, 0

    def run(self, model, case, new):
        self.runs += 1
        return {"seconds": self.seconds, "tokens": self.tokens}


def test_the_figure_is_this_side_by_the_other():
    sides = [FixedSide(0.3), FixedSide(0.2)]
    line = regression._compare(sides, "tiny", "greedy-1", 10, 4)
    assert line.split()[:3] == ["tiny", "greedy-1", "1.500"]
    assert line.endswith("same")
    assert [side.runs for side in sides] == [5, 5]  # one of each warms up


def test_other_tokens_are_reported():
    line = regression._compare([FixedSide(1), FixedSide(1, ((1, 3),))], "tiny", "greedy-1", 1, 2)
    assert line.endswith("OTHER TOKENS")


@pytest.mark.parametrize("argv", [["missing"], [], [".", "--repeats", "1"]])
def test_bad_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        regression.main(argv)
    assert "must be" in capsys.readouterr().err
