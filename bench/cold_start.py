"""`python -m bench.cold_start`: the CPU seconds of a fresh process until Descant is of use.

Each case is a process of its own. The cases run in turns in one run, so that the load of the machine is
the same for all, and the figure is the median over the rounds. The ratio is to `import torch,
transformers` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CASES", "REFERENCE", "main", "measure"]

_ROOT = Path(__file__).resolve().parents[1]
_FIRST_TOKEN = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = torch.tensor([[1, 2, 3, 4]])
"""
REFERENCE = "import torch, transformers"
CASES: Mapping[str, str] = {
    "an empty process": "pass",
    REFERENCE: REFERENCE,
    "import descant": "import descant",
    "descant --help": "import sys; sys.argv = ['descant', '--help']; from descant.cli import main; main()",
    "descant.generate, the first attribute": "import descant; descant.generate",
    "a first token by Descant": _FIRST_TOKEN
    + "import descant\ndescant.generate(model, prompt, max_new_tokens=1)",
    "a first token by transformers": _FIRST_TOKEN + "model.generate(prompt, max_new_tokens=1)",
}


def cpu_seconds(code: str, model: Path) -> float:
    """The CPU seconds of a process that runs a program."""
    paths = os.pathsep.join([str(_ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the program of a case failed:\n{code}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(cases: Mapping[str, str], rounds: int, model: Path) -> dict[str, float]:
    """The median CPU seconds of each case, in turns, without a first round, which writes byte code."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for code in cases.values():
        cpu_seconds(code, model)
    for _ in range(rounds):
        for name, code in cases.items():
            seconds[name].append(cpu_seconds(code, model))
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--model", type=Path, default=_ROOT / "models" / "stories15m", help="a folder; the smallest one"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    found = measure(CASES, options.rounds, options.model)
    for name, seconds in found.items():
        print(f"{seconds:8.2f} s {seconds / found[REFERENCE]:7.3f}  {name}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
