"""Each benchmark runs on a tiny model: its lines, its missed limits, and what makes it fail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench import beams, chain, codebooks, compiled, marks, quantized, reuse, scaling, stops, traced, trie
from bench.detection.edits import edit_text
from bench.detection.store import Store
from bench.models import SUBJECTS
from tests.support import wordpiece

BEAMS = "--prompt 128 --new 6 --beams 3 --sequences 3"
COMPILED = "--model tiny --new 4 --prompt 5 --prompts 3 --backend eager"
MARKS = "--new 2 --steps 3 --text 4 --repeats 1 --batch 2"
QUANTIZED = "--prompt 24 --fed 20 --long 64 --residual 8"
SCALING = "--rows 1 4 --configs 1 3 --config-rows 4 --steps 2 --repeats 1"
TRIE = "--beams 8 --sequences 3000 --length 3 --repeats 1"
REUSE = "--model TINY --prefix 96 --batch 2 --repeats 1"
TRACED = "--model TINY --new 4 --repeats 1 --long 6"
# A command, and a text with the number of its lines; without a text it fails.
COMMANDS: tuple[tuple[Any, str, str, int], ...] = (
    (beams, f"{BEAMS} --faster 0 --larger 9", "same tokens: True", 2),
    (beams, f"{BEAMS} --only beams --faster 1000 --larger 9", "", 0),
    (beams, f"{BEAMS} --only beams --faster 0 --larger 0.1", "", 0),
    (chain, "--rows 3 --vocabulary 500 --repeats 1", "  same", len(chain.KINDS) + 1),
    (codebooks, "--model higgs --frames 4 --repeats 1 --prompts 2", "higgs ", 2),
    (compiled, f"{COMPILED} --rows 1 --rows 2", "same", 2),
    (marks, f"{MARKS} --share 99 --faster 0", "  same", 4),
    (marks, f"{MARKS} --mark lefthash --share -1 --faster 0", "", 0),
    (marks, f"{MARKS} --mark lefthash --share 99 --faster 1e9", "", 0),
    (quantized, f"{QUANTIZED} --way quanto=4", "quanto 4", 1),
    (reuse, REUSE, "same", 6),
    (reuse, f"{REUSE} --bar 1e9", "", 0),
    (scaling, f"{SCALING} --limit 99", "growth", 2),
    (scaling, f"{SCALING} --limit -99", "", 0),
    (stops, "--model smollm2 --strings short --strings usual --repeats 1", "smollm2", 2),
    (traced, f"{TRACED} --most 1000", "all limits are met", 1),
    (traced, f"{TRACED} --most 0", "", 0),
    (trie, f"{TRIE} --most 1000", "legal", 1),
    (trie, f"{TRIE} --most 0.001", "", 0),
)


class CharTokenizer:
    """A minimal tokenizer: one token per character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(one) % 900 for one in text[:60]]}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model replaces every model, and small tokenizers every tokenizer."""
    model = SUBJECTS["tiny"].model()
    for module, name in ((marks, "load_model"), (quantized, "load_model"), (trie, "_model")):
        monkeypatch.setattr(module, name, lambda _: model)
    monkeypatch.setattr(compiled, "_load_model", lambda _: SUBJECTS["tiny"].model())
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(trie, "PROMPT", [1, 5, 7])
    monkeypatch.setattr(stops, "_folder", lambda name: name)
    tokenizers = {"smollm2": wordpiece.tokenizer()}
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizers.get(str(name), CharTokenizer())
    )
    level = transformers.logging.get_verbosity()
    yield model
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize(
    ("module", "arguments", "text", "count"),
    COMMANDS,
    ids=[f"{module.__name__[6:]} {arguments.split()[-1]}" for module, arguments, *_ in COMMANDS],
)
def test_a_benchmark_runs_and_keeps_its_limits(
    monkeypatch, capsys, tiny, module: Any, arguments: str, text: str, count: int
) -> None:
    if "TINY" in arguments:
        monkeypatch.undo()
        arguments = arguments.replace("TINY", str(tiny("llama").folder))
    given = [word.replace("=", " ") for word in arguments.split()]
    assert (module.main(given) or 0) == (not text)
    assert not text or sum(text in line for line in capsys.readouterr().out.splitlines()) == count


def test_wrong_outputs_fail(monkeypatch, capsys) -> None:
    original = trie._search
    monkeypatch.setattr(trie, "_search", lambda model, _, size, new: original(model, None, size, new))
    assert trie.main([*TRIE.split(), "--most", "1000"]) == 1
    sequences = torch.tensor([[3, 4], [3, 5], [6, 4]]).numpy()
    found = torch.tensor([[3, 4, 2], [3, 4, 2], [6, 4, 2], [6, 5, 2], [3, 5, 7], [9, 9, 2]])
    assert trie._count_legal(found, sequences) == 2
    steps = {"dense": [4.0, 6.0, 9.0], "static": [5.0, 5.0, 5.0], "compiled": [2.0, 3.0, 3.0]}
    tokens = {"dense": [[1]], "static": [[1]], "compiled": [[2]]}
    figures = compiled.Figures(steps=steps, tokens=tokens, products=1.0, compiling=9.0, graphs=1)
    assert (figures.same, figures.speedup("compiled", "dense")) == (False, 2.0)
    with pytest.raises(SystemExit):
        scaling.main(["--rows", "4"])
    with pytest.raises(SystemExit, match="lower --prompt or --fed"):
        quantized.main(["--prompt", "60"])


@pytest.mark.parametrize("step", ["1", "7"])
def test_the_perplexity_of_the_dense_cache_is_that_of_one_forward(small: Any, capsys, step: str) -> None:
    assert quantized.main([*QUANTIZED.split(), "--way", "quanto 4", "--step", step]) == 0
    [dense] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dense")]
    ids = torch.tensor(CharTokenizer()(quantized.TEXT)["input_ids"][:44])
    with torch.no_grad():
        logits = small(input_ids=ids[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[23:43], ids[24:44])
    assert float(dense.split()[3]) == pytest.approx(float(loss.exp()), rel=1e-3)


@pytest.mark.parametrize(
    ("module", "arguments"), [(compiled, "--model no-such"), (stops, "--model smollm2"), (trie, TRIE)]
)
def test_a_missing_model_says_how_to_build_it(monkeypatch, tmp_path, module: Any, arguments: str) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("DESCANT_MODELS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="build it with"):
        module.main(arguments.split())


def test_a_unit_is_computed_once_and_a_stale_claim_is_taken_over(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.get("a/b", lambda: [1]) == store.get("a/b", lambda: [2]) == [1]
    assert not store.free("a/b")
    (tmp_path / "c.claim").write_text(str(2**22 + 1), encoding="utf-8")  # no process has this id
    assert store.free("c")
    assert store.get("c", lambda: 3) == 3
    assert not list(tmp_path.rglob("*.claim"))


def test_edits_change_the_given_share_of_words() -> None:
    text, rng = " ".join(f"w{at}" for at in range(50)), random.Random(0)
    assert len(edit_text(text, "deleted", 0.3, [], rng).split()) == 35
    assert edit_text(text, "replaced", 0.1, ["x"], rng).split().count("x") == 5
    mixed = edit_text(text, "reordered", 0.5, [], rng).split()
    assert sorted(mixed) == sorted(text.split())
    assert 20 <= sum(one != other for one, other in zip(mixed, text.split(), strict=True)) <= 25
