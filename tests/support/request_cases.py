"""Requests of all methods with seeds, as bodies for the server and as arguments of `generate`."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

__all__ = ["RequestCase", "request_cases"]

WORDS = ("the", "a", "sea", "ship", "king", "ran", "over", "blue", "old", "house", "and", "two", "light")
# What a body has beside prompt, length and seed; `generate` gets the same, with its own names.
METHODS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"do_sample": True},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "n": 3},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"num_beams": 3},
    {"num_beams": 4, "n": 2, "length_penalty": 0.7},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.6},
    {"num_beams": 2, "force_words_ids": [[331]]},
    {"num_beams": 2, "do_sample": True},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"temperature": 0, "dola_layers": "low"},
    {"temperature": 0, "guidance_scale": 1.4},
    {"temperature": 0, "prompt_lookup_num_tokens": 3},
    {"temperature": 0.8, "prompt_lookup_num_tokens": 3},
    {"dry_multiplier": 0.8, "xtc_probability": 0.3, "xtc_threshold": 0.1},
    {"mirostat_tau": 3.0},
    {"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 8675309}},
    {"temperature": 0.9, "grammar": {"choice": ["a red house", "a blue ship"]}},
    {"num_beams": 2, "grammar": {"regex": "[a-z]{3} [0-9]{2}"}},
)


class RequestCase(NamedTuple):
    """One request."""

    prompt: str
    method: dict[str, Any]
    max_tokens: int
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        """The body for `/v1/completions`."""
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "return_token_ids": True,
            **self.method,
        }

    def arguments(self) -> dict[str, Any]:
        """The arguments of `descant.generate` that mean the same."""
        values = dict(self.method)
        count = values.pop("n", 1)
        if values.get("temperature") == 0:
            del values["temperature"]
            values["do_sample"] = False
        elif "num_beams" not in values and "penalty_alpha" not in values:
            values.setdefault("do_sample", True)
        return {
            "max_new_tokens": self.max_tokens,
            "seed": self.seed,
            "num_return_sequences": count,
            **values,
        }


def request_cases(count: int, seed: int = 0) -> list[RequestCase]:
    """That many requests, all methods in turn."""
    rng = random.Random(seed)
    return [
        RequestCase(
            " ".join(rng.choices(WORDS, k=rng.randint(2, 24))),
            METHODS[index % len(METHODS)],
            rng.randint(2, 16),
            rng.randrange(2**31),
        )
        for index in range(count)
    ]
