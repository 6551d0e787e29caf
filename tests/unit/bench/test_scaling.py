"""The benchmark of growing tables runs, draws, and reports a growth that is not allowed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import transformers

from bench import scaling

SMALL = ["--rows", "1", "4", "--configs", "1", "3", "--config-rows", "4", "--steps", "2", "--repeats", "1"]


@pytest.fixture(autouse=True)
def quiet():
    """The verbosity that the benchmark sets does not stay."""
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


def test_it_prints_both_sweeps_and_draws_them(capsys, tmp_path):
    assert scaling.main([*SMALL, "--limit", "99", "--svg", str(tmp_path / "plot.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines]
    assert first_words == ["rows", "1", "4", "growth", "configs", "1", "3", "growth"]
    plot = ElementTree.parse(tmp_path / "plot.svg")
    assert len(plot.findall(".//{http://www.w3.org/2000/svg}polyline")) == 6  # three parts of both sweeps


def test_a_growth_above_the_limit_fails(capsys):
    assert scaling.main([*SMALL, "--limit", "-99"]) == 1
    assert "growth" in capsys.readouterr().out


def test_the_growth_is_the_exponent_between_the_largest_sizes():
    costs = {size: scaling.Cost(float(size), float(size**2), 1.0) for size in (1, 4, 16)}
    growths = [scaling._growth(costs, part) for part in ("loop", "forward", "admission")]
    assert growths == pytest.approx([1.0, 2.0, 0.0])


def test_one_size_is_refused(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--rows", "4"])
    assert "at least two sizes" in capsys.readouterr().err
