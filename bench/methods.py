"""`python -m bench.methods`: the cost of methods against a baseline with equal forwards, on SmolLM2.

Contrastive search is compared with transformers 4.52.4 in its own Python (`--rival`), DoLa and guidance with
our own greedy search. All alternate in one run; median CPU time, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import descant
from bench.models import fast_copy

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The history of the printing press begins with"
NEGATIVE = "Here is a list of numbers: 1, 2, 3,"


class Transformers4Worker:
    """Another version of transformers, in its own process."""

    def __init__(self, python: str, folder: Path) -> None:
        # Not `-m`: the imports of the package are not installed there.
        command = [python, str(ROOT / "bench" / "transformers4_worker.py"), str(folder)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.version = self._read_reply()["transformers"]

    def run(self, ids: torch.Tensor, arguments: Mapping[str, Any]) -> float:
        """The CPU seconds of one call in that process."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ids": ids.tolist(), "arguments": dict(arguments)}) + "\n")
        self.process.stdin.flush()
        return float(self._read_reply()["seconds"])

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()

    def _read_reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def cpu_seconds(call: Callable[[], Any]) -> float:
    """The CPU seconds of a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def median_seconds(calls: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median seconds of each call, after one warm-up run."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(call())
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected comparisons and print their ratios."""
    parser = argparse.ArgumentParser(prog="python -m bench.methods", description=__doc__)
    default = os.environ.get("DESCANT_REFERENCE_PYTHON", str(ROOT / ".reference" / "bin" / "python"))
    parser.add_argument("--rival", default=default, help="the Python that has transformers 4.52.4")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2")
    parser.add_argument("--new", type=int, default=256, help="new tokens of contrastive search")
    parser.add_argument("--few", type=int, default=64, help="new tokens of the others")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="prepacked weights and compiled layers for ours")
    parser.add_argument("--only", choices=("contrastive", "dola", "guidance"), action="append")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model).eval()
    if options.fast:
        model = fast_copy(model)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(options.model)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    selected = options.only or ("contrastive", "dola", "guidance")

    def ours(inputs: torch.Tensor, new: int, **fields: Any) -> Callable[[], float]:
        mask = torch.ones_like(inputs)
        extra = {"max_new_tokens": new, "min_new_tokens": new, **fields}
        return lambda: cpu_seconds(
            lambda: descant.generate(model, input_ids=inputs, attention_mask=mask, **extra)
        )

    if "contrastive" in selected:
        rival = Transformers4Worker(options.rival, options.model)
        fields = {"penalty_alpha": 0.6, "top_k": 4}
        lengths = {"max_new_tokens": options.new, "min_new_tokens": options.new}
        calls = {
            "descant": ours(ids, options.new, **fields),
            rival.version: lambda: rival.run(ids, {**fields, **lengths}),
        }
        found = median_seconds(calls, options.repeats)
        rival.close()
        _print_ratio(f"contrastive search, k=4, {options.new} tokens", found, rival.version, "descant")
    if "dola" in selected:
        calls = {"greedy": ours(ids, options.few)}
        calls |= {f"DoLa {layers}": ours(ids, options.few, dola_layers=layers) for layers in ("low", "high")}
        found = median_seconds(calls, options.repeats)
        for name in ("DoLa low", "DoLa high"):
            _print_ratio(f"{name}, {options.few} tokens", found, name, "greedy")
    if "guidance" in selected:
        negative = torch.tensor([tokenizer.encode(NEGATIVE)])
        both = ids.repeat(2, 1)
        calls = {
            "batch of 2": ours(both, options.few),
            "guidance": ours(ids, options.few, guidance_scale=1.5),
            "guidance, negative prompt": ours(
                ids, options.few, guidance_scale=1.5, negative_prompt_ids=negative
            ),
        }
        found = median_seconds(calls, options.repeats)
        for name in ("guidance", "guidance, negative prompt"):
            _print_ratio(f"{name}, {options.few} tokens", found, name, "batch of 2")
    return 0


def _print_ratio(title: str, found: Mapping[str, float], above: str, below: str) -> None:
    seconds = ", ".join(f"{name} {found[name]:.2f} s" for name in (above, below))
    print(f"{title}: {above} / {below} = {found[above] / found[below]:.2f} ({seconds})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
