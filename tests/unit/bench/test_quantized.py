"""The benchmark of quantised caches runs, and its columns are correct."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

from bench import quantized
from bench.models import SUBJECTS

SMALL = ["--prompt", "24", "--fed", "20", "--long", "64", "--residual", "8"]


class CharTokenizer:
    """A minimal tokenizer for the benchmark: one token per character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(one) % 900 for one in text[:60]]}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model replaces every model."""
    model = SUBJECTS["tiny"].model()
    monkeypatch.setattr(quantized, "load_model", lambda folder: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: CharTokenizer())
    level = transformers.logging.get_verbosity()
    yield model
    transformers.logging.set_verbosity(level)


def printed_rows(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, list[str]]:
    """The table that main() prints: the cells of each cache."""
    assert quantized.main([*SMALL, *options]) == 0
    about, head, *lines = capsys.readouterr().out.splitlines()
    assert "a prompt of 24 tokens and 20 more" in about
    assert head.split()[0] == "cache"
    width = quantized._COLUMNS[0][1]
    return {line[:width].strip(): line[width:].split() for line in lines}


def test_it_prints_a_line_for_each_cache(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed_rows(capsys, "--way", "quanto 4", "--way", "quanto 2, keys -1")
    assert list(found) == ["dense", "quanto 4", "quanto 2, keys -1"]
    factors = [float(cells[1]) for cells in found.values()]
    assert factors[0] == 1.0
    assert 1.5 < factors[1] < factors[2]
    assert found["dense"][3] == "+0.00%"
    assert found["quanto 2, keys -1"][2] != found["dense"][2]


@pytest.mark.parametrize("step", ["1", "7"])
def test_the_perplexity_of_the_dense_cache_is_that_of_one_forward(
    small: Any, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    found = printed_rows(capsys, "--way", "quanto 4", "--step", step)
    ids = torch.tensor(CharTokenizer()(quantized.TEXT)["input_ids"][:44])
    with torch.no_grad():
        logits = small(input_ids=ids[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[23:43], ids[24:44])
    assert float(found["dense"][2]) == pytest.approx(float(loss.exp()), rel=1e-3)


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)
    assert quantized.main([*SMALL, "--way", "hqq 4"]) == 0
    assert "hqq 4: a quantized cache with the backend 'hqq' needs the extra" in capsys.readouterr().out


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(SystemExit, match="lower --prompt or --fed"):
        quantized.main(["--prompt", "60"])
