"""Random calls of generate(), over every documented field, with good, odd and bad values and inputs.

A case is made from its number alone, so one that fails can be made again: `case(seed, number)`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from descant import GenerationConfig
from descant.config.generation_config import FIELDS
from descant.config.watermarking_config import (
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint
from descant.decoding.processors.allowed_sequences import AllowedSequences
from tests.support.config_cases import CASES
from tests.support.tiny_models import ARCHITECTURES, pad, prompts

NAN, INF = float("nan"), float("inf")
VOCAB = 97  # of the tiny Llama; those of the others are a little larger

# The text of the tokens of the fuzz: a character each, and one of three; the others are empty.
TEXTS = (*(chr(33 + at) for at in range(94)), " ", "\n", "the")
assert len(TEXTS) == VOCAB


@functools.cache
def tokenizer() -> Any:
    """A byte-level tokenizer of those texts."""
    import transformers
    from tokenizers import Tokenizer, decoders, models

    spelled = {" ": "\u0120", "\n": "\u010a"}
    vocabulary = {spelled.get(text, text): at for at, text in enumerate(TEXTS)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def anything(batch: int, ids: torch.Tensor) -> list[int]:
    """Allows every token."""
    return list(range(VOCAB))


def evens(batch: int, ids: torch.Tensor) -> list[int]:
    """Allows the even tokens, and after one of them the odd ones."""
    return list(range(1 if ids[-1:].tolist() and int(ids[-1]) % 2 == 0 else 0, VOCAB, 2))


def few(batch: int, ids: torch.Tensor) -> list[int]:
    """Allows a handful, by the row's length and the prompt's number."""
    first = 3 + (7 * len(ids) + batch) % 60
    return [first, first + 1, first + 5, first]


def as_tensor(batch: int, ids: torch.Tensor) -> torch.Tensor:
    """Allows a tensor of tokens."""
    return torch.arange(4, 40)


def nothing(batch: int, ids: torch.Tensor) -> list[int]:
    """Allows nothing once there are three tokens."""
    return [] if len(ids) >= 3 else [5, 6, 7, 8]


def strangers(batch: int, ids: torch.Tensor) -> list[int]:
    """Allows tokens that the model does not have."""
    return [5, 6, 7000]


def rubbish(batch: int, ids: torch.Tensor) -> Any:
    """Answers what is no list of tokens."""
    return "five"


TRIE = AllowedSequences([[n, n + 1, m] for n in range(3, 40, 3) for m in range(5, 90, 7)], 2)

ALLOWING = (anything, evens, few, as_tensor)  # those that answer as documented, and always something

# What makes sense on a tiny model, and what only just does. Where a value is huge no machine could do it: one
# that could be done, slowly, would only test patience.
GOOD: dict[str, list[Any]] = {
    "max_length": [1, 5, 12, 20, 30, 2**31, 2**63 - 1],
    "max_new_tokens": [1, 2, 5, 8, 12, 200, 2**31, 2**63 - 1],
    "min_length": [0, 1, 5, 9, 25, 2**63 - 1],
    "min_new_tokens": [0, 1, 3, 6, 10, 21, 2**63 - 1],
    "max_time": [1e-9, 0.5, 60, 1e30],
    "do_sample": [True, True, True, False],
    "num_beams": [1, 2, 3, 4, 8, 100, 2**40, 2**63 - 1],
    "seed": [0, 1, 7, 2**32, 2**63 - 1, [3], (4, 5), torch.tensor([6, 7, 8])],
    "penalty_alpha": [0, 1e-9, 0.2, 0.6, 0.9, 1],
    "dola_layers": ["low", "high", [0], [0, 1], [1, 1, 0], [2], [150]],
    "guidance_scale": [-50, -1, 0, 0.5, 1, 1.5, 3, 20, 1e30],
    "num_beam_groups": [1, 2, 2, 3, 4, 2**40],
    "diversity_penalty": [0, 0.1, 1, 5, 1e30],
    "constraints": [
        [PhrasalConstraint([5])], [PhrasalConstraint([5, 6, 7])], [DisjunctiveConstraint([[5], [6, 7]])],
        [PhrasalConstraint([5, 6]), PhrasalConstraint([6, 5])],
        [PhrasalConstraint([5]), PhrasalConstraint([5])],
        [PhrasalConstraint([9]), DisjunctiveConstraint([[5, 6], [7]])], [PhrasalConstraint([2])],
        [PhrasalConstraint([150])], [PhrasalConstraint(list(range(3, 40)))],
    ],
    "force_words_ids": [
        [[5]], [[5, 6], [7]], [[[5], [6, 7]]], [[[5, 6], [5, 7]], [8]], [[5], [5]], [[2]], [[5, 2]], [[150]],
        [[[5], [5, 6]]], [list(range(3, 40))],
    ],
    "ordered_constraints": [True, True, False],
    "constraint_gap": [0, 1, 2, 5, 2**63 - 1],
    "low_memory": [True, False],
    "token_healing": [True, False],
    "banned_phrases": ["a", ["b", "the"], ["A\n", "the end"], [*TEXTS[:90:2]], "x" * 50],
    "prompt_lookup_num_tokens": [1, 2, 5, 10, 2**63 - 1],
    "max_matching_ngram_size": [1, 2, 3, 9, 2**63 - 1],
    "suffix_lookup_num_tokens": [1, 2, 5, 10, 2**63 - 1],
    "suffix_lookup_shared": [True, False],
    "assistant_early_exit": [1, 1, 2, 3, 2**63 - 1],
    "num_assistant_tokens": [1, 2, 3, 8, 2**63 - 1],
    "num_assistant_tokens_schedule": ["constant", "heuristic", "heuristic_transient", "adaptive"],
    "assistant_confidence_threshold": [0, 0.1, 0.4, 1],
    "assistant_lookbehind": [1, 10],
    "target_lookbehind": [1, 10],
    "is_assistant": [True, False],
    "early_stopping": [True, False, "never"],
    "length_penalty": [-50, -1, 0, 0.3, 1, 2, 50.0],
    "temperature": [0, 1e-30, 0.1, 0.7, 1, 1.5, 30, 1e30],
    "top_k": [0, 1, 5, 50, 1000, 2**63 - 1],
    "top_p": [0, 1e-9, 0.5, 0.9, 1],
    "min_p": [0, 0.05, 0.5, 1],
    "repetition_penalty": [1e-30, 0.5, 1, 1.2, 5, 1e30],
    "suppress_tokens": [[], [2], [0, 1, 3], [5, 5], range(1, VOCAB), range(200), [150], torch.tensor([3])],
    "begin_suppress_tokens": [[], [2], [0, 1, 3], range(1, VOCAB), range(200), [2**63 - 1]],
    "renormalize_logits": [True, False],
    "remove_invalid_values": [True, False],
    "pad_token_id": [0, 2, 50, 96, 150, 2**62],
    "bos_token_id": [0, 1, 50, 150],
    "eos_token_id": [2, 5, [2, 3], [5, 7, 9], [4, 4], 150, range(VOCAB), list(range(120)), None, 2**63 - 1],
    "forced_bos_token_id": [4, 96, 150],
    "forced_eos_token_id": [2, 60, [2, 3], 150],
    "forced_decoder_ids": [[[1, 5]], [[2, 7], [1, 6]], [[40, 5]]],
    "generation_kwargs": [{}],
    "num_return_sequences": [1, 2, 3, 100, 2**40, 2**63 - 1],
    "return_dict_in_generate": [True, False],
    "output_scores": [True, False],
    "output_logits": [True, False],
    "output_attentions": [True, False],
    "output_hidden_states": [True, False],
    "decoder_start_token_id": [0, 5, [0], [0, 5], [0, 5, 6], 150, [0, 150]],
    "stop_strings": ["!", "a", ["the"], ["a", "b", "zz"], ["A\n", "the end"], ["\u00e9"], "x" * 50],
    "stop_token_ids": [[], [7], [10, 11, 12], [2], range(20, 60), [5, 5], [150], [2**63 - 1]],
    "stop_regex": ["a", "[a-z]{2}", r"\d", "the|end", r"(?s).{5}", "^$", "(?i)THE"],
    "prefix_allowed_tokens_fn": [anything, evens, few, as_tensor, nothing, strangers, rubbish, TRIE],
    "grammar": [
        {"choice": ["the", "a", "zz"]}, {"regex": "[a-z ]{1,6}"}, {"regex": "("}, {"json": True}, {},
        {"json": False}, {"json_schema": {"type": "integer"}, "drafts": False},
        {"choice": ["a"], "backend": "xgrammar"},
    ],
    "processor_order": [
        ["top_p", "temperature"], ["temperature", "top_k"], ["bad_words_ids", "forced_eos_token_id"],
        ["custom"], ["renormalize_logits", "custom", "repetition_penalty"], ["top_h", "xtc_probability"],
        ["thinking_budget", "suppress_tokens"], ["min_tokens"], ["top_kk", "top_p"],
    ],
    "thinking_budget": [0, 1, 2, 4, 100, 2**63 - 1],
    "thinking_message": ["the", " a b"],
    "thinking_start": [[], [7], [3, 4], [2], [150]],
    "thinking_end": [[30], [30, 31], [30, 30, 31], [2], [96, 2], [150], [5, 6, 7, 8, 9, 10, 11]],
    "top_h": [1e-9, 0.3, 0.7, 1],
    "top_n_sigma": [1e-9, 0.5, 1, 3, 1e30],
    "p_less": [True, False],
    "typical_p": [1e-9, 0.2, 0.9, 1],
    "epsilon_cutoff": [0, 3e-4, 0.05, 0.9],
    "eta_cutoff": [0, 3e-4, 0.05, 0.9],
    "xtc_probability": [0, 0.5, 1],
    "xtc_threshold": [0, 0.05, 0.1, 0.5, 1],
    "dynamic_temperature_range": [0, 0.3, 1, 5, 1e30],
    "dynamic_temperature_exponent": [1e-30, 0.5, 1, 3, 1e30],
    "mirostat_tau": [1e-9, 1, 3, 5, 1e30],
    "mirostat_eta": [0, 0.1, 1],
    "adaptive_p_target": [0, 0.3, 0.7, 1],
    "adaptive_p_decay": [0, 0.5, 0.9, 0.99],
    "no_repeat_ngram_size": [0, 1, 2, 3, 7, 2**63 - 1],
    "no_repeat_ngram_window": [0, 1, 4, 10, 2**63 - 1],
    "presence_penalty": [0, 0.5, -1, 2, 1e30, -1e30, 1e300],
    "frequency_penalty": [0, 0.5, -1, 2, 1e30, -1e30, 1e300],
    "dry_multiplier": [0, 0.8, 5, 1e30, 1e300],
    "dry_base": [1, 1.75, 4, 100],
    "dry_allowed_length": [1, 2, 3, 50, 2**63 - 1],
    "dry_range": [0, 1, 5, 1000, 2**63 - 1],
    "dry_sequence_breakers": [[], [5], [5, 6, 7], ["\n", "a"], [5, "the"], [150], [2**63 - 1]],
    "logit_bias": [{5: 2.5}, {5: -100, 6: 3}, {"7": 1e30}, {5: -1e300, 9: 1e300}, {150: 1.0}, {2: 5}],
    "bad_words_ids": [
        [[5]], [[5], [6, 7]], [[2]], [[2], [8, 2]], [[1, 2, 3, 4, 5, 6, 7, 8]], [[n] for n in range(120)],
        [[n] for n in range(VOCAB)], [[n, m] for n in range(10) for m in range(10)], [[150]], [[5], [5]],
    ],
    "sequence_bias": [
        {(5,): 2.0}, {(5, 6): -3.0, (7,): 1}, [[[5, 6, 7], 4.0]], {(2,): 9}, {(5,): 1e30},
        {(5,): 1e300, (6,): -1e300}, {(150,): 1.0}, {(5,): 1.0, (5, 5): -1.0},
        {(n, m): 0.5 for n in range(10) for m in range(10)},
    ],
    "exponential_decay_length_penalty": [
        (0, 1.1), (3, 2), (100, 1.5), (1, 0.5), (0, 1e30), (2**63 - 1, 1.1), (2, 1),
    ],
    "logprobs": [0, 1, 3, VOCAB, 1000, 2**63 - 1],
    "logprobs_support": [True, False],
    "encoder_no_repeat_ngram_size": [0, 1, 2, 3, 2**63 - 1],
    "encoder_repetition_penalty": [1e-30, 0.5, 1, 1.5, 1e30],
    "return_timestamps": [True, False],
    "no_timestamps_token_id": [60, 80, 95, 0, 150],
    "max_initial_timestamp_index": [0, 3, 50, 2**63 - 1],
    "use_cache": [True, True, False],
    "cache_implementation": [
        "dynamic", "paged", "static", "offloaded", "offloaded_static", "hybrid", "sink", "snapkv", "h2o",
        "quantized", "sliding_window", "mamba",
    ],
    "cache_config": [
        {}, {"budget": 4, "window": 2}, {"budget": 6, "recent": 2},
        {"window_length": 6, "num_sink_tokens": 2},
        {"nbits": 2, "residual_length": 4}, {"max_cache_len": 40}, {"offload_device": "cpu"},
    ],
    "return_legacy_cache": [True, False],
    "prefill_chunk_size": [1, 2, 3, 100],
    "compile_config": [{"backend": "eager"}, {"fullgraph": False}],
    "disable_compile": [True, False],
    "watermarking_config": [
        {"hashing_key": 77}, {"hashing_key": 5, "bias": -3.0, "greenlist_ratio": 0.9},
        WatermarkingConfig(hashing_key=2**63 - 1, seeding_scheme="selfhash", context_width=3),
        {"hashing_key": 9, "seeding_scheme": "selfhash"}, {"hashing_key": 9, "greenlist_ratio": 1e-9},
        SynthIDTextWatermarkingConfig(5, [3, 1, 4, 15, 92]), {"keys": [7], "ngram_len": 2},
        {"keys": [7, 70000], "ngram_len": 3, "sampling_table_size": 1000, "context_history_size": 2},
        {"keys": [2**63 - 1], "ngram_len": 9, "skip_first_ngram_calls": True, "debug_mode": True},
        GumbelWatermarkingConfig(11), {"key": 3, "context_width": 1}, {"key": 3, "nonce": 8},
    ],
}  # fmt: skip


class Odd:
    """An object that is nothing."""

    def __repr__(self) -> str:
        return "Odd()"


class Rude:
    """An object that cannot even be shown, compared or counted."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.0, 0.5, -0.5, NAN, INF, -INF, 1e-40, 1e40, 2**40, 2**63 - 1, 2**63,
    -(2**63), 10**30, "", "x", "1", "True", b"x", 1j, [], [[]], [1], [-1], [1.5], [1, 2], [[1, 2]], [None],
    ["a"], [True], [NAN], {}, {"a": 1}, {1: 2}, (), (1, 2), set(), {1, 2}, range(0), range(3),
    torch.tensor(1), torch.tensor([1, 2]), torch.tensor([[1]]), torch.tensor(0.5), torch.tensor(NAN),
    torch.empty(0), torch.tensor(True), np.int64(3),
    np.float32(0.5), np.array([1, 2]), np.array([]), np.nan, np.bool_(True), "é" * 300, list(range(5000)),
    Odd(), Rude(), int, len,
]  # fmt: skip

# No functions: errors of a caller's function are not ours.
MUTE = [one for one in ODD if not callable(one)]

SAMPLING = tuple(name for name, one in FIELDS.items() if one.group == "sampling")
CONSTRAINED = ("constraints", "force_words_ids", "ordered_constraints", "constraint_gap")
BEAMS = ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", *CONSTRAINED)
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "logprobs")
TEXTUAL = (
    "stop_strings", "stop_regex", "dry_sequence_breakers", "token_healing", "banned_phrases", "grammar",
)  # fmt: skip
# What each of these needs beside it to be of any use.
NEEDS = {
    "cache_config": "cache_implementation",
    "return_legacy_cache": "return_dict_in_generate",
    "max_matching_ngram_size": "prompt_lookup_num_tokens",
    "suffix_lookup_shared": "suffix_lookup_num_tokens",
    "num_assistant_tokens": "assistant_early_exit",
    "assistant_confidence_threshold": "assistant_early_exit",
    "num_assistant_tokens_schedule": "prompt_lookup_num_tokens",
    "xtc_threshold": "xtc_probability",
    "dynamic_temperature_exponent": "dynamic_temperature_range",
    "mirostat_eta": "mirostat_tau",
    "adaptive_p_decay": "adaptive_p_target",
    "no_repeat_ngram_window": "no_repeat_ngram_size",
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers"), "dry_multiplier"
    ),
    "penalty_alpha": "top_k",
    "low_memory": "penalty_alpha",
    "num_beam_groups": "diversity_penalty",
    "diversity_penalty": "num_beam_groups",
    "ordered_constraints": "force_words_ids",
    "constraint_gap": "force_words_ids",
    "thinking_message": "thinking_budget",
    "thinking_start": "thinking_budget",
    "thinking_end": "thinking_budget",
    "thinking_budget": "thinking_end",
    "return_timestamps": "no_timestamps_token_id",
    "no_timestamps_token_id": "return_timestamps",
    "max_initial_timestamp_index": "return_timestamps",
}


@dataclass
class Case:
    """One call: which tiny model, the fields (some in the `generation_config` argument), and the inputs."""

    number: int
    model: str
    call: dict[str, Any] = field(default_factory=dict)
    argument: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)  # the prompts, where the inputs are as they should be
    odd: str = ""  # what is odd about the inputs

    @property
    def fields(self) -> dict[str, Any]:
        """Every field, the call's own before the argument's."""
        return {**self.argument, **self.call}

    @property
    def encoder_decoder(self) -> bool:
        return ARCHITECTURES[self.model].encoder_decoder


def value(rng: random.Random, name: str) -> Any:
    """A value for a field: good more often than not."""
    luck = rng.random()
    if name == "prefix_allowed_tokens_fn" and luck >= 0.84:
        return rng.choice([*CASES[name][1], *MUTE])
    if luck < 0.84 and name in GOOD:
        return rng.choice(GOOD[name])
    good, bad = CASES[name]
    if luck < 0.92:
        return rng.choice(
            [one for one in good if name not in ("num_beams", "num_return_sequences") or int(one) < 9]
        )
    if luck < 0.96:
        return rng.choice(bad)
    return rng.choice(ODD)


def fields(rng: random.Random) -> dict[str, Any]:
    """One to six fields, most of the time with what gives them a use."""
    names = [rng.choice(tuple(FIELDS)) for _ in range(rng.randint(1, 6))]
    given = {name: value(rng, name) for name in names}
    if rng.random() < 0.85:
        for _ in range(2):  # what is needed may need something
            for name in [one for one in NEEDS if one in given and NEEDS[one] not in given]:
                given[NEEDS[name]] = rng.choice(GOOD[NEEDS[name]])
        drawn = given.keys() & set(SAMPLING) - ({"top_k"} if "penalty_alpha" in given else set())
        if drawn and "do_sample" not in given:
            given["do_sample"] = True
        if given.keys() & set(BEAMS) and "num_beams" not in given:
            given["num_beams"] = rng.choice((2, 4, 6) if "num_beam_groups" in given else (2, 3))
        if given.keys() & set(OUTPUTS):
            given["return_dict_in_generate"] = True
        if "num_return_sequences" in given and not given.keys() & {"do_sample", "num_beams"}:
            given["do_sample"] = True
    return given


def case(seed: int, number: int) -> Case:
    """The case of that number."""
    rng = random.Random(f"{seed}-{number}")
    model = rng.choice(("llama", "llama", "llama", "gpt2", "t5"))
    made = Case(number, model)
    given = fields(rng)
    if rng.random() < 0.3:
        made.argument = {name: given[name] for name in given if rng.random() < 0.6}
    made.call = {name: one for name, one in given.items() if name not in made.argument}
    arch = ARCHITECTURES[model]
    lengths = [rng.randint(1, 7) for _ in range(rng.randint(1, 3))]
    made.rows = prompts(arch, lengths, rng.randrange(2**31))
    ids, mask = pad(made.rows, arch.pad, "right" if arch.encoder_decoder else "left")
    made.inputs = {"input_ids": ids, "attention_mask": mask}
    if rng.random() < 0.2:
        made.odd, made.inputs = _odd_inputs(rng, ids, mask)
        if "stopping_criteria" in made.inputs:  # then nothing else ends what has no limit
            made.call["max_new_tokens"] = 6
    if set(TEXTUAL) & made.fields.keys() and rng.random() < 0.85:
        made.inputs.setdefault("tokenizer", tokenizer())
    return made


def cases(seed: int, count: int, first: int = 0) -> Iterator[Case]:
    """Cases `first` to `first + count`."""
    return (case(seed, number) for number in range(first, first + count))


def _odd_inputs(rng: random.Random, ids: torch.Tensor, mask: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """Inputs that are odd: many wrong, some right in an unusual way."""
    far, low = ids.clone(), ids.clone()
    far[0, -1], low[0, -1] = 10_000, -1
    zero, holes = mask.clone(), mask.clone()
    zero[0] = 0
    holes[:, ::2] = 0
    two = torch.cat((ids, ids), 1)
    kinds: Mapping[str, dict[str, Any]] = {
        "ids as int32": {"input_ids": ids.int(), "attention_mask": mask},
        "ids as float": {"input_ids": ids.float(), "attention_mask": mask},
        "ids as bool": {"input_ids": ids.bool(), "attention_mask": mask},
        "ids of one dimension": {"input_ids": ids[0]},
        "ids of three dimensions": {"input_ids": ids[None]},
        "ids of none": {"input_ids": torch.tensor(5)},
        "no rows": {"input_ids": ids[:0], "attention_mask": mask[:0]},
        "no columns": {"input_ids": ids[:, :0], "attention_mask": mask[:, :0]},
        "an id too large": {"input_ids": far, "attention_mask": mask},
        "an id below 0": {"input_ids": low, "attention_mask": mask},
        "a list": {"input_ids": ids.tolist(), "attention_mask": mask},
        "an array": {"input_ids": ids.numpy(), "attention_mask": mask},
        "text": {"input_ids": "Once upon a time"},
        "nothing": {},
        "ids alone": {"input_ids": ids},
        "a mask alone": {"attention_mask": mask},
        "a mask of bools": {"input_ids": ids, "attention_mask": mask.bool()},
        "a mask of floats": {"input_ids": ids, "attention_mask": mask.float()},
        "a mask of twos": {"input_ids": ids, "attention_mask": mask * 2},
        "a mask below 0": {"input_ids": ids, "attention_mask": mask - 1},
        "a mask of NaN": {"input_ids": ids, "attention_mask": mask * NAN},
        "a mask of nothing": {"input_ids": ids, "attention_mask": zero},
        "a mask with holes": {"input_ids": two, "attention_mask": torch.cat((mask, mask), 1)},
        "a mask of every other": {"input_ids": two, "attention_mask": torch.cat((holes, mask), 1)},
        "a mask too wide": {"input_ids": ids, "attention_mask": torch.cat((mask, mask), 1)},
        "a mask too high": {"input_ids": ids, "attention_mask": torch.cat((mask, mask))},
        "a mask of one dimension": {"input_ids": ids, "attention_mask": mask[0]},
        "a mask of four dimensions": {"input_ids": ids, "attention_mask": mask[:, None, None]},
        "a list for a mask": {"input_ids": ids, "attention_mask": mask.tolist()},
        "text for a mask": {"input_ids": ids, "attention_mask": "yes"},
        "both names": {"inputs": ids, "input_ids": ids},
        "the other name": {"inputs": ids, "attention_mask": mask},
        "odd inputs": {"inputs": rng.choice(ODD)},
        "odd embeddings": {"inputs_embeds": rng.choice(ODD)},
        "embeddings of one dimension": {"inputs_embeds": torch.randn(4)},
        "embeddings of another size": {"inputs_embeds": torch.randn(2, 3, 5)},
        "embeddings of integers": {"inputs_embeds": torch.ones(1, 3, 32, dtype=torch.long)},
        "embeddings": {"inputs_embeds": torch.ones(1, 3, 32)},
        "embeddings and ids": {"inputs_embeds": torch.ones(len(ids), ids.shape[1], 32), "input_ids": ids},
        "embeddings and other ids": {"inputs_embeds": torch.ones(len(ids), 9, 32), "input_ids": ids},
        "an unknown name": {"input_ids": ids, "attention_mask": mask, "top_kk": 3},
        "an odd config": {"input_ids": ids, "generation_config": rng.choice(ODD[1:])},
        "odd processors": {"input_ids": ids, "logits_processor": rng.choice(MUTE)},
        "a list of odd processors": {"input_ids": ids, "logits_processor": [rng.choice(MUTE)]},
        "odd criteria": {"input_ids": ids, "stopping_criteria": rng.choice(MUTE)},
        "a list of odd criteria": {"input_ids": ids, "stopping_criteria": [rng.choice(MUTE)]},
        "an odd streamer": {"input_ids": ids, "streamer": rng.choice(ODD)},
        "odd decoder ids": {"input_ids": ids, "decoder_input_ids": rng.choice(ODD)},
        "decoder ids too large": {"input_ids": ids, "decoder_input_ids": far},
        "an odd decoder mask": {"input_ids": ids, "decoder_attention_mask": rng.choice(ODD)},
        "odd encoder outputs": {"encoder_outputs": rng.choice(ODD)},
        "an odd past": {"input_ids": ids, "past_key_values": rng.choice(ODD)},
        "an odd assistant": {"input_ids": ids, "assistant_model": rng.choice(ODD)},
        "an odd tokenizer": {"input_ids": ids, "tokenizer": rng.choice(ODD)},
        "a negative prompt": {"input_ids": ids, "attention_mask": mask, "negative_prompt_ids": two},
        "an odd negative prompt": {"input_ids": ids, "negative_prompt_ids": rng.choice(ODD)},
        "an odd negative mask": {"input_ids": ids, "negative_prompt_attention_mask": rng.choice(ODD)},
    }  # fmt: skip
    name = rng.choice(list(kinds))
    return name, kinds[name]


# Inputs without a meaning: accepting them would be a guess.
HOPELESS = frozenset({
    "ids as float", "ids as bool", "ids of one dimension", "ids of three dimensions", "ids of none",
    "no rows", "no columns", "an id too large", "an id below 0", "text", "a mask below 0", "a mask of twos",
    "a mask of NaN", "a mask of nothing", "a mask too wide", "a mask too high", "a mask of one dimension",
    "a mask of four dimensions", "text for a mask", "both names", "embeddings of one dimension",
    "embeddings of another size", "embeddings of integers", "embeddings and other ids", "an unknown name",
    "decoder ids too large",
})  # fmt: skip


def as_config(given: Mapping[str, Any]) -> GenerationConfig:
    """The `generation_config` argument of a case."""
    return GenerationConfig(**given)
