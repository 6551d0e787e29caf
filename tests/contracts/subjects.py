"""What the laws run on: tiny models, every method that exists, and requests for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from descant import GenerationConfig, Request
from tests.support.tiny_models import Tiny, prompts

# Rotary, learned positions (GPT-2, OPT), a sliding window, and both kinds of encoder-decoder.
MODELS = ("llama", "gpt2", "mistral", "opt", "t5", "bart")

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 11},
    "sampling-cut": {"do_sample": True, "seed": 12, "temperature": 2.0, "top_k": 20, "top_p": 0.9},
    "sampling-fanned": {"do_sample": True, "seed": 13, "temperature": 1.3, "num_return_sequences": 3},
    "beam-2": {"num_beams": 2},
    "beam-4": {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "num_return_sequences": 3},
    "beam-4-never": {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.5},
    "beam-sampling": {"num_beams": 3, "do_sample": True, "seed": 14, "temperature": 1.5},
    "ruled": {"repetition_penalty": 1.3, "min_new_tokens": 4, "suppress_tokens": [7, 8]},
    "ruled-beam-2": {"num_beams": 2, "repetition_penalty": 1.3, "min_length": 9, "renormalize_logits": True},
}  # fmt: skip


def requests(
    tiny: Tiny, configs: Sequence[GenerationConfig], lengths: Sequence[int], seed: int = 0
) -> list[Request]:
    """One request for each config, with prompts (or encoder inputs) of the given lengths in turn."""
    texts = prompts(tiny.arch, [lengths[at % len(lengths)] for at in range(len(configs))], seed)
    if tiny.encoder_decoder:
        return [
            Request([tiny.arch.start], config, {"input_ids": torch.tensor(text)})
            for config, text in zip(configs, texts, strict=True)
        ]
    return [Request(text, config) for config, text in zip(configs, texts, strict=True)]


def of_method(tiny: Tiny, method: str, count: int = 4, seed: int = 0) -> list[Request]:
    """Requests of one method that differ in prompt, length and seed."""
    given = METHODS[method]
    configs = []
    for at in range(count):
        own = {"seed": given["seed"] + 10 * at} if "seed" in given else {}
        configs.append(GenerationConfig(**{**given, **own, "max_new_tokens": 10 + 3 * at}))
    return requests(tiny, configs, (5, 9, 1, 6), seed)


def mixed(tiny: Tiny, seed: int = 0) -> list[Request]:
    """One request of every method."""
    configs = [
        GenerationConfig(**given, max_new_tokens=6 + 2 * at) for at, given in enumerate(METHODS.values())
    ]
    return requests(tiny, configs, (4, 9, 1, 7, 12), seed)
