"""The models: a real one, dominated by the forward, and a tiny one, dominated by the loop."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import descant

__all__ = ["SUBJECTS", "Subject", "fast_copy"]

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Subject:
    """A model, and the size of its measurement."""

    name: str
    load: Callable[[], Any]
    new: int  # tokens decoded
    repeats: int

    def model(self) -> Any:
        """The model, with an end token of minimal probability, so that all runs have the same steps."""
        model = self.load().eval()
        end = model.config.vocab_size - 1
        with torch.no_grad():
            model.get_output_embeddings().weight[end] = 0
        model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=end)
        return model


def _tiny() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,  # wide enough that the most likely token varies
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


def _pretrained(name: str) -> Any:
    folder = Path(os.environ.get("DESCANT_MODELS") or _ROOT / "models") / name
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {name}`")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("tiny", _tiny, new=64, repeats=41),
        Subject("smollm2", lambda: _pretrained("smollm2"), new=32, repeats=11),
    )
}


def fast_copy(model: Any) -> Any:
    """A copy of a model with compiled layers, and with prepacked weights where it can have them."""
    fast = copy.deepcopy(model)
    if fast.dtype is torch.float32:
        descant.prepack_weights(fast)
    descant.compile_layers(fast)
    return fast
