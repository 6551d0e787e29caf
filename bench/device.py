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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

import descant
from bench.fake_devices import FIRST, placed, pretended
from descant.decoding.pipeline import PROCESSOR_SPECS
from descant.testing import toy

_STEADY_STEPS: Final = 6
_WARM_STEPS: Final = 3
_SAMPLING: Final = {"do_sample": True, "seed": 1}


@dataclass(frozen=True)
class Case:
    """A method with the number of its prompts."""

    config: Mapping[str, Any]
    prompts: int = 16
    vocab_size: int = 61

    def with_prompts(self, prompts: int) -> Case:
        """The case with another number of prompts."""
        return replace(self, prompts=prompts)


METHODS: Final[Mapping[str, Case]] = {
    "greedy": Case({}),
    "sampling": Case({**_SAMPLING, "temperature": 0.8, "top_k": 20, "top_p": 0.9}),
    "min-p": Case({**_SAMPLING, "min_p": 0.05, "temperature": 0.8}),
    "penalties": Case({**_SAMPLING, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "top_p": 0.9}),
    "4 beams": Case({"num_beams": 4}, prompts=1),
    "4 x 4 beams": Case({"num_beams": 4}, prompts=4),
    "diverse beams": Case({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, prompts=1),
    "constrained beams": Case({"num_beams": 4, "force_words_ids": [[50, 51]]}, prompts=1),
    "prompt lookup": Case({"prompt_lookup_num_tokens": 4}, prompts=1),
    "suffix lookup": Case({"suffix_lookup_num_tokens": 4}, prompts=1),
    "early exit": Case({"assistant_early_exit": 1}, prompts=1),
    "contrastive": Case({"penalty_alpha": 0.6, "top_k": 4}, prompts=1),
    "DoLa": Case({"dola_layers": "low"}, prompts=1),
    "guidance": Case({"guidance_scale": 1.5}, prompts=1),
    "log probabilities": Case({"logprobs": 2}),
}  # fmt: skip


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


def cases() -> dict[str, Case]:
    """All cases by name."""
    counted = dict(METHODS)
    for name, config in PROCESSORS.items():
        counted[name] = Case(config, prompts=1 if "num_beams" in config else 16)
    for name in COUNTED_CACHES:
        counted[f"{name} cache"] = Case({"cache_implementation": name})
    return counted


@dataclass
class StepCost:
    """The operations of a step outside the network: kernels, reads, copies."""

    launches: float = 0
    reads: float = 0
    copies: float = 0

    @classmethod
    def mean(cls, steps: Sequence[Counter[str]]) -> StepCost:
        """The mean of some steps."""
        total: Counter[str] = sum(steps, Counter())
        kinds = ("launch", "read", "copy")
        return cls(*(round(total[kind] / len(steps), 2) for kind in kinds))


@dataclass
class DeviceCost:
    """The costs of a case by phase."""

    steady: StepCost = field(default_factory=StepCost)
    network: float = 0  # launches of the network in a steady step
    prefill: StepCost = field(default_factory=StepCost)
    joining: StepCost = field(default_factory=StepCost)  # the step in which a request joins
    ending: StepCost = field(default_factory=StepCost)  # the step in which one ends


class DeviceCounter:
    """Counts what a model's calls and steps cost a pretended device: use `report` for `pretended`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._depth = 0  # of calls of the network

    def report(self, kind: str) -> None:
        """Count an operation, by whether the network runs it."""
        self.counts[f"network {kind}" if self._depth else kind] += 1

    def watch(self, model: Any) -> None:
        """Count the operations inside the calls of a model as the network's."""
        model.register_forward_pre_hook(lambda *_: self._enter(1))
        model.register_forward_hook(lambda *_: self._enter(-1), always_call=True)

    def _enter(self, change: int) -> None:
        self._depth += change

    def of(self, call: Callable[[], Any]) -> Counter[str]:
        """The operations of a call."""
        self.counts = Counter()
        call()
        return self.counts


def count(case: Case) -> DeviceCost:
    """The cost of a case on a tiny Llama of two layers."""
    counter = DeviceCounter()
    torch.manual_seed(0)
    with pretended(counter.report):
        model = placed(toy(case.vocab_size), lambda _: FIRST)
        counter.watch(model)
        session = descant.Session(model)
        cost = DeviceCost()

        def request(length: int, **fields: Any) -> descant.Request:
            # Without an end token, so that no row ends before its length.
            config = {"max_new_tokens": 300, "eos_token_id": _end_tokens(case), **case.config, **fields}
            prompt = [3 + (7 * length + 3 * place) % 50 for place in range(length)]
            return descant.Request(prompt, descant.GenerationConfig(**config))

        last = _WARM_STEPS + _STEADY_STEPS + 4
        prompts = [request(6 + place % 5) for place in range(case.prompts)]
        if "num_beams" not in case.config:  # the first request ends while the others run
            prompts[0] = request(6, max_new_tokens=last)

        def begin() -> None:
            session.admit(*prompts)
            session.step()

        cost.prefill = StepCost.mean([counter.of(begin)])
        for _ in range(_WARM_STEPS):
            session.step()
        steady = [counter.of(session.step) for _ in range(_STEADY_STEPS)]
        cost.steady = StepCost.mean(steady)
        cost.network = sum(step["network launch"] for step in steady) / len(steady)
        late = request(7)
        cost.joining = StepCost.mean([counter.of(lambda: (session.admit(late), session.step()))])
        if "num_beams" not in case.config:
            while len(session) > len(prompts):
                ending = counter.of(session.step)
            cost.ending = StepCost.mean([ending])
    return cost


def _end_tokens(case: Case) -> int | None:
    """The end token of a case; None where nothing depends on one."""
    needs = {"min_length", "min_new_tokens", "exponential_decay_length_penalty"}
    return case.vocab_size - 1 if needs & case.config.keys() else None


def missing_processors() -> list[str]:
    """The processors of the pipeline that no case counts and no list excuses."""
    counted = {name.partition(" ")[0] for name in PROCESSORS}
    return sorted({spec.name for spec in PROCESSOR_SPECS} - counted - {*UNCOUNTED})


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
    print("launches outside the network / reads / copies to the device")
    print("{:34}{:>18}{:>9}{:>18}{:>18}{:>18}".format(*_HEAD))
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
    return f"{cost.launches:g} / {cost.reads:g} / {cost.copies:g}".rjust(18)


if __name__ == "__main__":
    sys.exit(main())
