"""The cost of a step for an accelerator, counted on a pretended one.

    python -m bench.device                     every method, processor and cache
    python -m bench.device --case greedy --case min_p
    python -m bench.device --json FILE         also write the figures

For each case: launches of kernels outside the network, reads for which the host waits, and copies of host
memory to the device, in a steady step, in the step that reads the prompts, and in the steps in which a
request joins and one ends. Launches inside the network are those of the model's own forward, its cache
included. Seconds are unknown here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

import descant
from bench.fake_devices import FIRST, placed, pretended
from descant.cli.doctor.device_costs import METHODS, DeviceCase, DeviceCost, StepCost, count_operations
from descant.decoding.pipeline import PROCESSOR_SPECS
from descant.testing import toy

_VOCAB_SIZE: Final = 61
_SAMPLING: Final = {"do_sample": True, "seed": 1}


def _watermark(scheme: str) -> Any:
    """The settings of a watermark with a key of its own."""
    if scheme == "green list":
        return descant.WatermarkingConfig(hashing_key=7_919)
    keys = [654, 400, 836, 123, 340, 443, 597, 160]
    if scheme == "synthid":
        return descant.SynthIDTextWatermarkingConfig(keys=keys, ngram_len=3)
    return descant.GumbelWatermarkingConfig(key=7_919)


# The config that enables each processor of the pipeline, by its name and scheme; draws have a seed.
PROCESSORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "logit_bias": {"logit_bias": {5: 1.0}},
    "sequence_bias": {"sequence_bias": {(5, 6): 1.0}},
    "diversity_penalty": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "dry_multiplier": {"dry_multiplier": 0.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 3},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 3},
    "bad_words_ids": {"bad_words_ids": [[5], [6, 7]]},
    "min_length": {"min_length": 12},
    "min_new_tokens": {"min_new_tokens": 12},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda *_: list(range(3, 40))},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.01)},
    "suppress_tokens": {"suppress_tokens": [5]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [5]},
    "forced_decoder_ids": {"forced_decoder_ids": [[2, 7]]},
    "thinking_budget": {"thinking_budget": 100, "thinking_start": [5], "thinking_end": [6]},
    "temperature": {**_SAMPLING, "temperature": 0.8},
    "dynamic_temperature_range": {**_SAMPLING, "dynamic_temperature_range": 0.5},
    "top_n_sigma": {**_SAMPLING, "top_n_sigma": 1.0},
    "top_h": {**_SAMPLING, "top_h": 0.4},
    "top_k": {**_SAMPLING, "top_k": 5},
    "top_p": {**_SAMPLING, "top_p": 0.9},
    "min_p": {**_SAMPLING, "min_p": 0.05},
    "typical_p": {**_SAMPLING, "typical_p": 0.9},
    "epsilon_cutoff": {**_SAMPLING, "epsilon_cutoff": 1e-3},
    "eta_cutoff": {**_SAMPLING, "eta_cutoff": 1e-3},
    "p_less": {**_SAMPLING, "p_less": True},
    "xtc_probability": {**_SAMPLING, "xtc_probability": 0.5},
    "mirostat_tau": {**_SAMPLING, "mirostat_tau": 3.0},
    "adaptive_p_target": {**_SAMPLING, "adaptive_p_target": 0.5},
    "watermarking_config (green list)": {**_SAMPLING, "watermarking_config": _watermark("green list")},
    "watermarking_config (synthid)": {**_SAMPLING, "watermarking_config": _watermark("synthid")},
    "watermarking_config (gumbel)": {**_SAMPLING, "watermarking_config": _watermark("gumbel")},
    "renormalize_logits": {**_SAMPLING, "renormalize_logits": True},
}
# Processors that need a tokenizer or another kind of model.
UNCOUNTED: Final = ("banned_phrases", "token_healing", "return_timestamps", "grammar")

# Caches that the tiny model can have on a device that only computes; the others read host memory by design or
# need kernels of the device.
COUNTED_CACHES: Final = ("dynamic", "paged", "static", "sink", "snapkv", "h2o")


def cases() -> dict[str, DeviceCase]:
    """All cases by name."""
    counted = dict(METHODS)
    for name, config in PROCESSORS.items():
        counted[name] = DeviceCase(config, prompts=1 if "num_beams" in config else 16)
    for name in COUNTED_CACHES:
        counted[f"{name} cache"] = DeviceCase({"cache_implementation": name})
    return counted


def count(case: DeviceCase) -> DeviceCost:
    """The cost of a case on a tiny Llama of two layers."""
    torch.manual_seed(0)
    with pretended():
        return count_operations(placed(toy(_VOCAB_SIZE), lambda _: FIRST), case)


def missing_processors() -> list[str]:
    """The processors of the pipeline that no case counts and no list excuses."""
    counted = {name.partition(" ")[0] for name in PROCESSORS}
    return sorted({spec.name for spec in PROCESSOR_SPECS} - counted - {*UNCOUNTED})


_WIDTH: Final = 22
_HEAD: Final = ("case", "steady", "network", "prefill", "joining", "ending")


def main(argv: Sequence[str] | None = None) -> int:
    """Count the chosen cases and print a line for each; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = cases()
    parser.add_argument(
        "--case", action="append", choices=known, metavar="NAME", help="only this one; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("launches outside the network / reads (of them before the next forward) / copies to the device")
    print("{:34}{:>22}{:>9}{:>22}{:>22}{:>22}".format(*_HEAD))
    figures = {}
    for name in options.case or known:
        cost = count(known[name])
        figures[name] = asdict(cost)
        print(f"{name:34}{_cell(cost.steady)}{cost.network:9.0f}{_cell(cost.prefill)}", end="")
        print(f"{_cell(cost.joining)}{_cell(cost.ending)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _cell(cost: StepCost) -> str:
    return f"{cost.launches:g} / {cost.reads:g} ({cost.early_reads:g}) / {cost.copies:g}".rjust(_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
