"""Accepted and rejected values of every generation parameter."""

import numpy as np
import torch

from descant.config.generation_config import FIELDS, GROUPS, GenerationConfig
from descant.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint

BOOLS = ([True, False, np.bool_(True), torch.tensor(False)], [0, 1, "true", 1.0, [True]])
COUNTS = (
    [1, 7, np.int64(3), torch.tensor(5)],
    [0, -1, 1.0, True, "1", float("nan"), 2**63, [1], torch.ones(2)],
)
SIZES = ([0, *COUNTS[0]], COUNTS[1][1:])
SHARES = ([0.5, 1, np.float32(0.25), torch.tensor(0.5)], [-0.1, 1.1, float("nan"), "0.5", True, [0.5]])
SCALES = ([1.5, 1, 1e-30], [0.0, -1.0, 1e-40, 1e31, float("inf"), float("nan"), "1", False])
IDS = ([0, 5, np.int32(5)], [-2, 1.5, True, "</s>", [], [[1]], [-1]])
ID_LISTS = ([0, [1, 2], (3,), torch.tensor([4, 5]), np.array([6]), range(2), {7}], IDS[1])
TOKEN_LISTS = ([[], [1, 2], torch.tensor([3])], [-1, [-1], "ab", [[1]], [None], [True]])
DICTS = ([{"nbits": 4, "deep": {"list": [1]}}], [1, "x", [1], {1: 2}, {"a": {1, 2}}])

COUNTED = {("int", group) for group in GROUPS if group not in ("tokens", "speech")}

# For each field what it takes and what it refuses.
CASES = {
    **dict.fromkeys((n for n, f in FIELDS.items() if f.type == "bool"), BOOLS),
    **dict.fromkeys((n for n, f in FIELDS.items() if (f.type, f.group) in COUNTED), COUNTS),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "forced_bos_token_id"), IDS),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "top_k", "seed"), SIZES),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_window", "dry_range"), SIZES),
    **dict.fromkeys(("thinking_budget", "logprobs", "max_initial_timestamp_index"), SIZES),
    "no_timestamps_token_id": IDS,
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id", "decoder_start_token_id"), ID_LISTS),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "stop_token_ids"), TOKEN_LISTS),
    "thinking_message": (["Enough.", " é\n"], ["", 3, ["a"], b"a", True, "é" * 10_000]),
    "thinking_start": TOKEN_LISTS,
    "thinking_end": (TOKEN_LISTS[0][1:], [[], *TOKEN_LISTS[1]]),
    **dict.fromkeys(("top_p", "min_p", "penalty_alpha", "xtc_probability"), ([0, *SHARES[0]], SHARES[1])),
    **dict.fromkeys(("xtc_threshold", "mirostat_eta", "adaptive_p_target"), ([0, *SHARES[0]], SHARES[1])),
    "adaptive_p_decay": ([0, 0.5, 0.99], [1, *SHARES[1]]),
    "assistant_confidence_threshold": SHARES,
    **dict.fromkeys(("typical_p", "top_h"), (SHARES[0], [0, *SHARES[1]])),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), ([0, 3e-4], [1, *SHARES[1]])),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), SCALES),
    "dynamic_temperature_exponent": SCALES,
    **dict.fromkeys(("mirostat_tau", "top_n_sigma"), ([0.5, 3], [0, -1.0, float("nan"), "1", True])),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ([1.0, -2, 0], [2.1, float("inf"), "1"])),
    "dry_base": ([1, 1.75], [0.5, 101, float("nan"), "1", True]),
    "dry_sequence_breakers": ([[], [1, "\n"], ["a"]], ["ab", [-1], [""], [[1]], 5]),
    "logit_bias": ([{5: -1.0}, {"5": 2, 6: 0.5}], [{}, {-1: 1.0}, {"a": 1.0}, {5: "x"}, {5: 1, "5": 2}, 3]),
    "stop_regex": (["a+", r"\d{3}"], ["", "(", 5, ["a"]]),
    "grammar": (
        [
            {"choice": ["a", "b"]},
            {"regex": "a+", "drafts": False},
            {"json": True, "backend": "xgrammar"},
            {"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}},
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        ],
        [
            {},
            "a",
            {"choice": []},
            {"choice": 5},
            {"regex": ""},
            {"json": False},
            {"regex": "a", "json": True},
            {"regex": "a", "backend": "other"},
            {"regex": "a", "drafts": 1},
            {"regex": "a", "tool_choice": "auto"},
            {"json_schema": "{"},
            {"tools": [{}]},
            {"tools": [{"function": {"name": "f"}}], "tool_choice": "g"},
        ],
    ),
    "processor_order": ([["top_p", "temperature"], ("custom",)], [[], "top_p", ["a", "a"], [1], [""]]),
    "prefix_allowed_tokens_fn": ([max, min], [3, "max", [max]]),
    "temperature": ([0, 0.0, *SCALES[0]], SCALES[1][1:]),
    "max_time": ([0, 0.5, 3], [-1.0, float("inf"), "1", True]),
    "length_penalty": ([-1, 0, 2.5], [51, -51, float("nan"), "1", True, int]),
    **dict.fromkeys(
        ("diversity_penalty", "dry_multiplier", "dynamic_temperature_range"),
        ([0, 1.5], [-0.1, float("nan"), "1"]),
    ),
    "guidance_scale": ([1.0, -2, 7.5], [float("inf"), "7", True]),
    "early_stopping": ([True, False, "never"], ["always", 1, 0, [True]]),
    "num_assistant_tokens_schedule": (
        ["constant", "heuristic", "heuristic_transient", "adaptive"], ["linear", 1, ""],
    ),
    "cache_implementation": (
        ["dynamic", "static", "quantized", "sink", "paged", "snapkv", "h2o"], ["sliding", "", 1, True],
    ),
    "stop_strings": (["\n", ["a", "b"]], ["", [], [""], [1], 5, {"a": 1}]),
    "banned_phrases": (["\n", ["a", "b"]], ["", [], [""], [1], 5, {"a": 1}]),
    "dola_layers": (["low", "high", [0, 2]], ["mid", [], [-1], 3, [True]]),
    "bad_words_ids": ([[[1]], ((1, 2), (3,))], [[], [[]], [1], [[-1]], "ab", [["a"]]]),
    "force_words_ids": ([[[1, 2]], [[[1], [2, 3]], [4]]], [[], [[]], [[[]]], [1], [[["a"]]]]),
    "forced_decoder_ids": ([[], [[1, 9]], [[1, None], [2, 7]]], [[1], [[1]], [[None, 1]], [[1, -1]], "a"]),
    "exponential_decay_length_penalty": (
        [(10, 1.1), [0, 2]], [(10,), (1.5, 2.0), (-1, 1.0), (1, 0.0), 3, "ab"],
    ),
    "sequence_bias": (
        [{(1, 2): -1.0, (3,): 2}, [[[1, 2], -1.0]], {"(1, 2)": 0.5, "(3,)": 1}],
        [{}, [], {(): 1.0}, {(1,): float("nan")}, {1: 2.0}, {("a",): 1.0}, [[1]], [[[1], 1], [[1], 2]], 3],
    ),
    **dict.fromkeys(("cache_config", "generation_kwargs"), DICTS),
    "watermarking_config": ([{"bias": 1.5}, {"keys": [7], "ngram_len": 2}, {"key": 3}], DICTS[1][:-1]),
    "compile_config": ([{}, {"backend": "eager", "options": {"list": [1]}}], DICTS[1][:-1]),
    "constraint_gap": SIZES,
    "constraints": (
        [[PhrasalConstraint([5])], (PhrasalConstraint([5, 6]), DisjunctiveConstraint([[5], [6, 7]]))],
        [[], 3, "ab", [[[]]], [[5, 6]], {}],
    ),
}  # fmt: skip

EVERY_VALUE = [(name, value) for name, (good, _) in CASES.items() for value in good]
EVERY_MISTAKE = [(name, value) for name, (_, bad) in CASES.items() for value in bad]


def made(name, value):
    """A config with one field as a file would give it, so that unbuilt methods do not matter."""
    return GenerationConfig.from_dict({name: value})
