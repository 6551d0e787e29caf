"""`python -m bench.codebooks`: both sides of a call, in turn."""

from __future__ import annotations

from bench import codebooks


def test_a_line_has_both_times_and_their_ratio(capsys) -> None:
    codebooks.main(["--model", "higgs", "--frames", "4", "--repeats", "1", "--prompts", "2"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "ratio"
    assert [line.split()[:2] for line in lines] == [["higgs", "greedy"], ["higgs", "sampling"]]
    for line in lines:
        ours, theirs, ratio = map(float, line.split()[2:])
        assert abs(ours / theirs - ratio) < 0.1 * ratio
