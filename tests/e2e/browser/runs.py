"""Traced runs of a real model, one for each kind of picture, made on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import descant
from descant import Trace
from tests.support.pretrained import Pretrained

ITEM = "The best way to learn a language is"
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return"

# Arguments of `generate` besides the prompts; "beside" is drawn next to "beams".
RUNS: Mapping[str, tuple[list[str], Mapping[str, Any]]] = {
    "greedy": (["The capital of France is"], {"max_new_tokens": 12}),
    "sampling": (
        ["Once upon a time there was a"],
        {
            "max_new_tokens": 12, "do_sample": True, "seed": 3, "temperature": 0.8, "top_k": 40, "top_p": 0.9,
            "repetition_penalty": 1.2,
        },
    ),
    "beams": ([ITEM], {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 2}),
    "diverse": (
        ["The weather today is"],
        {
            "max_new_tokens": 10, "num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0,
            "num_return_sequences": 3,
        },
    ),
    "constrained": (["The scientist looked at the"], {"max_new_tokens": 12, "num_beams": 4}),
    "speculation": ([CODE], {"max_new_tokens": 20, "prompt_lookup_num_tokens": 4}),
    "batch": (["The capital of France is", "Two plus two is", "Roses are"], {"max_new_tokens": 6}),
    "beside": ([ITEM], {"max_new_tokens": 12, "num_beams": 4, "length_penalty": -2.0}),
}  # fmt: skip
FORCED = " telescope"


class Runs:
    """Traces and their pages by the name of the run."""

    def __init__(self, loaded: Callable[[], Pretrained], folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.traces: dict[str, Trace] = {}

    def trace(self, name: str) -> Trace:
        """The trace of a run."""
        if name not in self.traces:
            self.traces[name] = self._made(name)
        return self.traces[name]

    def page(self, name: str) -> Path:
        """The file with a run's page; that of "beside" has both."""
        path = self.folder / f"{name}.html"
        if not path.exists():
            pair = (
                (self.trace("beams"), self.trace("beside")) if name == "beside" else (self.trace(name), None)
            )
            path.write_text(pair[0].html(beside=pair[1]), encoding="utf-8")
        return path

    def _made(self, name: str) -> Trace:
        prompts, fields = RUNS[name]
        one = self.loaded()
        ids = [one.tokens(text) for text in prompts]
        longest = max(map(len, ids))
        padded = [[one.pad] * (longest - len(row)) + row for row in ids]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
        given = dict(fields)
        if name == "constrained":
            given["force_words_ids"] = [one.tokens(FORCED)]
        inputs = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
        found: Trace = descant.generate(
            one.model, **inputs, **given, trace=True, tokenizer=one.tokenizer
        ).trace
        return found
