"""Random configs of greedy search and sampling, over every field that such a config may have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["FIELD_VALUES", "sampling_config"]

Draw = Callable[[random.Random, int], Any]


def _tokens(low: int, high: int) -> Draw:
    return lambda rng, vocab: rng.sample(range(vocab), rng.randint(low, min(high, vocab // 3)))


def _number(low: float, high: float) -> Draw:
    return lambda rng, _: round(rng.uniform(low, high), 4)


def _integer(low: int, high: int) -> Draw:
    return lambda rng, _: rng.randint(low, high)


_WATERMARKS: tuple[dict[str, Any], ...] = (
    {"greenlist_ratio": 0.3, "bias": 2.5, "hashing_key": 918273645, "context_width": 1},
    {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 564738291, "seeding_scheme": "selfhash"},
    {"ngram_len": 3, "keys": [90210, 31337, 27182, 14142], "context_history_size": 64},
    {"key": 271828182845, "context_width": 2},  # for sampling only
)


def _words(rng: random.Random, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, 2))] for _ in range(rng.randint(1, 4))]


def _sequence_bias(rng: random.Random, vocab: int) -> list[list[Any]]:
    words = {tuple(word) for word in _words(rng, vocab)}
    return [[list(word), round(rng.uniform(-4, 4), 3)] for word in sorted(words)]


# Of each field how a value of it is drawn.
FIELD_VALUES: dict[str, Draw] = {
    "min_new_tokens": _integer(1, 4),
    "min_length": _integer(1, 12),
    "repetition_penalty": _number(0.8, 1.6),
    "presence_penalty": _number(-1, 1),
    "frequency_penalty": _number(-1, 1),
    "no_repeat_ngram_size": _integer(1, 3),
    "no_repeat_ngram_window": _integer(2, 6),
    "dry_multiplier": _number(0.2, 1.5),
    "dry_base": _number(1.1, 2),
    "dry_allowed_length": _integer(1, 3),
    "dry_range": _integer(2, 8),
    "dry_sequence_breakers": _tokens(1, 2),
    "logit_bias": lambda rng, vocab: {str(rng.randrange(vocab)): round(rng.uniform(-5, 5), 2)},
    "bad_words_ids": _words,
    "sequence_bias": _sequence_bias,
    "exponential_decay_length_penalty": lambda rng, _: [rng.randint(0, 4), round(rng.uniform(1, 1.3), 3)],
    "suppress_tokens": _tokens(1, 4),
    "begin_suppress_tokens": _tokens(1, 4),
    "renormalize_logits": lambda *_: True,
    "remove_invalid_values": lambda *_: True,
    "forced_bos_token_id": lambda rng, vocab: rng.randrange(vocab),
    "forced_eos_token_id": lambda rng, vocab: rng.randrange(vocab),
    "forced_decoder_ids": lambda rng, vocab: [[rng.randint(1, 3), rng.randrange(vocab)]],
    "encoder_no_repeat_ngram_size": _integer(1, 3),
    "encoder_repetition_penalty": _number(0.8, 1.5),
    "thinking_budget": _integer(1, 4),
    "watermarking_config": lambda rng, _: rng.choice(_WATERMARKS[:3]),
    "stop_token_ids": _tokens(1, 2),
    "temperature": _number(0.3, 1.8),
    "top_k": _integer(2, 20),
    "top_p": _number(0.4, 0.99),
    "min_p": _number(0.01, 0.3),
    "top_h": _number(0.2, 0.9),
    "top_n_sigma": _number(0.5, 3),
    "p_less": lambda *_: True,
    "typical_p": _number(0.3, 0.99),
    "epsilon_cutoff": _number(0.0001, 0.01),
    "eta_cutoff": _number(0.0001, 0.01),
    "xtc_probability": _number(0.1, 1),
    "xtc_threshold": _number(0.02, 0.3),
    "dynamic_temperature_range": _number(0.1, 0.5),
    "dynamic_temperature_exponent": _number(0.5, 2),
    "mirostat_tau": _number(1, 5),
    "mirostat_eta": _number(0.05, 0.5),
    "adaptive_p_target": _number(0.1, 0.9),
    "adaptive_p_decay": _number(0.1, 0.95),
}
# Fields that only sampling uses.
_SAMPLING_FIELDS = tuple(FIELD_VALUES)[tuple(FIELD_VALUES).index("temperature") :]
# What a field needs beside it.
_NEEDS = {
    "no_repeat_ngram_window": "no_repeat_ngram_size",
    "dry_base": "dry_multiplier",
    "dry_allowed_length": "dry_multiplier",
    "dry_range": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
    "xtc_threshold": "xtc_probability",
    "dynamic_temperature_exponent": "dynamic_temperature_range",
    "mirostat_eta": "mirostat_tau",
    "adaptive_p_decay": "adaptive_p_target",
}
# Of each set of fields at most one.
_EXCLUSIVE = (
    {"min_new_tokens", "min_length"},
    {"mirostat_tau", "adaptive_p_target"},
    {"forced_bos_token_id", "forced_decoder_ids"},
)


def sampling_config(rng: random.Random, vocab: int, eos: int, max_new_tokens: int = 12) -> dict[str, Any]:
    """The fields of a config in JSON types: three to eight of those above, and what they need."""
    is_sampling = rng.random() < 0.7
    names = [name for name in FIELD_VALUES if is_sampling or name not in _SAMPLING_FIELDS]
    chosen: list[str] = []
    for name in rng.sample(names, rng.randint(3, 8)):
        for one in (_NEEDS.get(name), name):
            rivals = {other for group in _EXCLUSIVE if one in group for other in group if other != one}
            if one is not None and one not in chosen and rivals.isdisjoint(chosen):
                chosen.append(one)
    chosen = [name for name in chosen if _NEEDS.get(name, name) in chosen]
    config = {name: FIELD_VALUES[name](rng, vocab) for name in chosen}
    config |= {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "do_sample": is_sampling}
    if is_sampling and "watermarking_config" in config:
        config["watermarking_config"] = rng.choice(_WATERMARKS)
    if "thinking_budget" in config:
        config["thinking_end"] = [rng.randrange(vocab) for _ in range(2)]
    config["seed"] = rng.randrange(2**31)
    return config
