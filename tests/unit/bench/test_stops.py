"""The benchmark of stop strings runs, and its columns are correct."""

import copy
import time
from typing import Any

import pytest
import transformers

from bench import stops
from descant.tokenization.stop_strings import StopStringMatcher
from tests.support import wordpiece


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small tokenizer replaces that of every model."""
    tokenizer = wordpiece.tokenizer()
    monkeypatch.setattr(stops, "_folder", lambda name: name)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    level = transformers.logging.get_verbosity()
    yield tokenizer
    transformers.logging.set_verbosity(level)


def test_it_prints_a_line_for_each_set_of_strings(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        stops.main(["--model", "smollm2", "--strings", "short", "--strings", "usual", "--repeats", "1"]) == 0
    )
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["smollm2", "short"], ["smollm2", "usual"]]
    for line in lines:
        _, _, cold, warm, theirs, ratio, *rest = line.split()
        assert 0 < float(warm) <= float(theirs) * 1000
        assert float(cold) > 0
        assert float(ratio) > 0
        assert len(rest) == 1 + 2 * len(stops.BATCHES)
    assert "cold ms" in head


def test_a_copy_of_a_tokenizer_is_cold(small: Any) -> None:
    table = StopStringMatcher.from_tokenizer(small, "stop")
    assert StopStringMatcher.from_tokenizer(small, "stop") is table
    assert StopStringMatcher.from_tokenizer(copy.copy(small), "stop") is not table


def test_times_are_medians_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    assert stops._median(3, lambda: None) == 3.0


def test_a_missing_model_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("DESCANT_MODELS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"python tools/models\.py smollm2"):
        stops.main(["--model", "smollm2"])
