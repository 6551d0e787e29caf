"""`python -m bench.memory`: the peak memory of `descant.generate` and of transformers' own `generate`.

Each side of each case runs in a process of its own, so that what an allocator keeps of one side cannot serve
the other. A run of two tokens comes first; the figure is how far the resident memory rises above the level
after it. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.case import Case
from bench.implementations import IMPLEMENTATIONS, OURS, THEIRS
from bench.models import SUBJECTS
from bench.peak import Peak

__all__ = ["MEMORY_CASES", "MemoryCase", "main", "measure", "thin_model"]

_ROOT = Path(__file__).resolve().parents[1]
_COLUMNS = (("model", 8), ("case", 16), ("Descant MB", 11), ("transformers MB", 16), ("ratio", 6))


@dataclass(frozen=True)
class MemoryCase:
    """Prompts and the length up to which they are continued."""

    name: str
    lengths: tuple[int, ...]  # of the prompts
    total: int  # positions of the longest row at the end
    arguments: Mapping[str, Any]

    @property
    def new(self) -> int:
        """The number of new tokens of each row."""
        return self.total - max(self.lengths)

    @property
    def case(self) -> Case:
        """The prompts and the method, for both implementations."""
        return Case(self.name, self.lengths, self.arguments)


_RAGGED = tuple(range(17, 33))
_SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}

MEMORY_CASES: Mapping[str, MemoryCase] = {
    case.name: case
    for case in (
        MemoryCase("equal-16-64", (32,) * 16, 64, {}),
        MemoryCase("ragged-16-64", _RAGGED, 64, {}),
        MemoryCase("sample-16-64", (32,) * 16, 64, _SAMPLING),
        MemoryCase("equal-1-128", (32,), 128, {}),
        MemoryCase("equal-16-1024", (32,) * 16, 1024, {}),
        MemoryCase("ragged-16-1024", _RAGGED, 1024, {}),
    )
}


def thin_model() -> Any:
    """Six layers with the keys and values of SmolLM2-135M, and little else: the cache is the memory."""
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    end = config.vocab_size - 1
    with torch.no_grad():
        model.get_output_embeddings().weight[end] = 0
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=end)
    return model


_MODELS: Mapping[str, Callable[[], Any]] = {"thin": thin_model, "smollm2": SUBJECTS["smollm2"].model}


def measure(model: Any, case: MemoryCase, implementation: str) -> int | None:
    """The bytes by which the resident memory of this process rises in one run."""
    run, prompts = IMPLEMENTATIONS[implementation], case.case.prompts(model.config.vocab_size)
    run(model, case.case, prompts, 2)
    gc.collect()
    torch.manual_seed(0)
    with Peak() as peak:
        run(model, case.case, prompts, case.new)
    return peak.bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases, print a line for each; the exit status of the process."""
    options = _options(argv)
    if options.worker is not None:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        print(json.dumps(measure(_MODELS[options.model](), MEMORY_CASES[options.case[0]], options.worker)))
        return 0
    head = _row([name for name, _ in _COLUMNS])
    print(f"{head}\n{'-' * len(head)}", flush=True)
    for name in options.case or MEMORY_CASES:
        ours, theirs = (
            statistics.median(_run_process(options.model, name, side) for _ in range(options.repeats))
            for side in (OURS, THEIRS)
        )
        cells = [options.model, name, f"{ours / 1e6:.1f}", f"{theirs / 1e6:.1f}", f"{ours / theirs:.2f}"]
        print(_row(cells), flush=True)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    thin = "thin: the cache of SmolLM2 in 6 layers"
    parser.add_argument("--model", choices=_MODELS, default="thin", help=thin)
    parser.add_argument("--case", action="append", choices=MEMORY_CASES, help="only this; may be repeated")
    parser.add_argument("--repeats", type=int, default=1, help="processes of each side; the median counts")
    parser.add_argument("--worker", choices=(OURS, THEIRS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _run_process(model: str, case: str, side: str) -> int:
    """The peak of one side in bytes, measured in a new process."""
    command = [sys.executable, "-m", "bench.memory", "--model", model, "--case", case, "--worker", side]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    peak = json.loads(done.stdout.splitlines()[-1])
    if peak is None:
        raise RuntimeError("this kernel has no resettable high-water mark: peaks need Linux")
    return int(peak)


def _row(cells: Sequence[str]) -> str:
    parts = [
        cell.ljust(width) if at < 2 else cell.rjust(width)
        for at, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    ]
    return " ".join(parts).rstrip()


if __name__ == "__main__":
    sys.exit(main())
