"""The benchmark of allowed sequences runs, checks the outputs, and fails when it is too slow."""

from __future__ import annotations

import pytest
import torch
import transformers

from bench import trie
from bench.models import SUBJECTS

SMALL = ["--beams", "8", "--sequences", "3000", "--length", "3", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A tiny model replaces the real one."""
    monkeypatch.setattr(trie, "_model", lambda name: SUBJECTS["tiny"].model())
    monkeypatch.setattr(trie, "PROMPT", [1, 5, 7])
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


def test_it_prints_both_searches_and_all_outputs_are_legal(capsys):
    assert trie.main([*SMALL, "--most", "1000"]) == 0
    compiled, head, plain, with_trie = capsys.readouterr().out.splitlines()
    assert compiled.startswith("compiled 3,000 sequences")
    assert "legal" in head
    name, seconds, ratio, forwards, fed, legal, count = with_trie.split()
    assert (name, legal, count) == ("trie", "8", "8")
    assert float(seconds) > 0
    assert float(ratio) > 0
    assert plain.split()[0] == "plain"
    assert plain.split()[2] == "1.000"
    assert plain.split()[3:5] == [forwards, fed] == ["4", str(3 + 3 * 8)]


def test_a_ratio_that_is_too_large_fails(capsys):
    assert trie.main([*SMALL, "--most", "0.001"]) == 1


def test_an_output_outside_the_sequences_fails(monkeypatch, capsys):
    original = trie._search
    monkeypatch.setattr(trie, "_search", lambda model, _, beams, new: original(model, None, beams, new))
    assert trie.main([*SMALL, "--most", "1000"]) == 1


def test_what_is_legal():
    sequences = torch.tensor([[3, 4], [3, 5], [6, 4]]).numpy()
    found = torch.tensor([[3, 4, 2], [3, 4, 2], [6, 4, 2], [6, 5, 2], [3, 5, 7], [9, 9, 2]])
    assert trie._count_legal(found, sequences) == 2


def test_a_missing_model_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("DESCANT_MODELS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"python tools/models\.py stories15m"):
        trie.main(SMALL)
