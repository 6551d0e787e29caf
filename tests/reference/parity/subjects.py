"""What parity runs on, and with which prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.reference.parity.compare import Batch, batch
from tests.support import pretrained
from tests.support.ci_slices import first
from tests.support.tiny_models import ARCHITECTURES, Architecture, Tiny, prompts

TINY = tuple(ARCHITECTURES)
STORIES = "stories15m"
NAMES = (*TINY, STORIES)
ENCODER_DECODER = tuple(n for n in TINY if ARCHITECTURES[n].encoder_decoder)

# Prompt seeds, the most varied ends first. In each batch rows end at two steps or more, greedy choices are
# apart by 5e-4 and beams of 2, 3, 4 and 8 by 5e-5, so that no answer hangs on how a machine rounds.
SEEDS: dict[str, tuple[int, ...]] = {
    "llama": (102, 103, 114, 100, 106, 108, 109, 110, 111, 113, 105, 107, 112, 115),
    "gpt2": (103, 108, 113, 114, 100, 101, 102, 109, 111, 112, 105, 106, 107, 110),
    "gpt-neox": (102, 106, 117, 100, 101, 109, 111, 112, 115, 103, 104, 105, 108, 110),
    "mistral": (101, 102, 106, 105, 107, 109, 110, 103, 108, 111, 112, 113, 114, 100),
    "qwen2": (107, 108, 114, 115, 100, 103, 105, 110, 116, 101, 102, 109, 111, 117),
    "gemma": (106, 111, 112, 113, 102, 104, 107, 108, 109, 110, 115, 100, 105, 114),
    "opt": (101, 107, 118, 120, 102, 103, 108, 122, 100, 104, 106, 116, 121, 123),
    "t5": (104, 105, 106, 107, 103, 100, 101, 102, 108, 109, 110, 112, 113, 115),
    "bart": (100, 110, 114, 120, 102, 105, 106, 108, 109, 111, 115, 117, 118, 119),
}

BEGINNINGS = (
    "Once upon a time there was a little dog",
    "Lily",
    "One day, Tom and his mum went to the park. They saw a",
    "The big red ball",
    "The sun was hot and",
    "Ben had a secret box under his",
)


def subject(name: str, tiny: Callable[..., Tiny]) -> Any:
    """The tiny architecture of that name, or stories15m."""
    return pretrained.load(name) if name == STORIES else tiny(name)


def ragged(model: Any, seed: int = 0) -> Batch:
    """Rows of different length, one of them a single token."""
    if isinstance(model, Tiny):
        chosen = SEEDS[model.name][seed]
        lengths = ((5, 9, 1, 6), (7, 1, 12, 4), (3, 11, 2, 8))[chosen % 3]
        return batch(model, prompts(model.arch, lengths, seed=chosen))
    texts = [BEGINNINGS[(seed + i) % len(BEGINNINGS)] for i in range(3)]  # of 10, 3 and 17 tokens
    return batch(model, [model.tokens(text) for text in texts])


def level(model: Any, seed: int = 0) -> Batch:
    """Rows of one length."""
    if isinstance(model, Tiny):
        return batch(model, prompts(model.arch, (6, 6, 6, 6), seed=202 + seed))
    return batch(model, [model.tokens(text)[:4] for text in BEGINNINGS[2:6]])


seeds = first  # of prompts: the first ones always, the rest are slow cases


def five(model: Any, seed: int) -> Batch:
    """Five rows of different length, one of them a single token."""
    lengths = ((5, 9, 1, 12, 3), (7, 1, 11, 4, 8), (2, 10, 6, 1, 13))[seed % 3]
    return batch(model, prompts(model.arch, lengths, seed=seed))


# How deep DoLa's subjects are and how their weights are drawn: layers that write little and logits that are
# not sharp, so that what each layer says differs and none is certain (certainties tie). Those with a spread
# have tied embeddings.
DEEP: dict[str, tuple[int, dict[str, float]]] = {
    "llama": (6, {"gain": 1.0}),
    "gpt2": (42, {"gain": 1.5, "branch": 0.6, "spread": 1.5}),
    "gpt-neox": (8, {"gain": 1.0, "branch": 0.9}),
    "mistral": (5, {"gain": 1.0}),
    "qwen2": (44, {"gain": 1.0, "branch": 0.4}),
    "gemma": (6, {"gain": 2.0, "branch": 1.0, "spread": 0.8, "eos_scale": 1.5}),
    "opt": (6, {"gain": 2.0, "branch": 2.0, "spread": 1.2, "eos_scale": 1.5}),
}


def deepened(name: str) -> Architecture:
    """The tiny architecture of that name with more layers."""
    arch, (depth, drawn) = ARCHITECTURES[name], DEEP[name]
    config = {**arch.config, "n_layer" if name == "gpt2" else "num_hidden_layers": depth}
    if name == "qwen2":
        config |= {"max_window_layers": depth, "layer_types": ["full_attention"] * depth}
    return replace(arch, name=f"{name}-{depth}", config=config, **drawn)
