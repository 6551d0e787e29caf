"""The benchmark of processor chains runs, and both sides give the same scores."""

import pytest

from bench import chain


def test_it_prints_a_line_for_each_processor_and_one_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert chain.main(["--rows", "3", "--vocabulary", "500", "--repeats", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*chain.KINDS, "chain"]
    assert {line.split()[-1] for line in lines} == {"same"}
    assert all(float(line.split()[3]) > 0 for line in lines)
    assert "ratio" in head
