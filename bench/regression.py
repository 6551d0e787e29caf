"""`python -m bench.regression BASE`: this checkout against another one, in turns, in one run.

BASE is the root of another checkout of the project. Each side is a process with the `descant` of its
checkout; the cases and models are those of this checkout. A repeat runs both sides in alternating order. The
figure is the median over the repeats of this side's CPU time by the other's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.case import CASES, Case
from bench.models import SUBJECTS

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_PROCESSORS = {
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "min_p": 0.05,
    "do_sample": True,
    "seed": 1,
}

# The methods whose own work may grow, beside the cases of `python -m bench`.
_METHODS = (
    Case("processors-8", (24,) * 8, _PROCESSORS),
    Case("beam-4-short", (16,) * 4, {"num_beams": 4}),
    Case("diverse-beam", (16,) * 2, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
    Case("contrastive", (16,) * 2, {"penalty_alpha": 0.6, "top_k": 4}),
    Case("lookup-4", (32,) * 4, {"prompt_lookup_num_tokens": 4}),
)
_CASES: Mapping[str, Case] = {**CASES, **{case.name: case for case in _METHODS}}


class _Side:
    """A process that runs cases with the `descant` of one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{_ROOT}"}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.regression", "--worker"]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.checkout = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a side ended early; its error is above")
        return json.loads(line)

    def run(self, model: str, case: str, new: int) -> dict[str, Any]:
        """The CPU seconds and the tokens of one run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([model, case, new]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _work() -> None:
    """Run what stdin names, one line each, and answer on stdout."""
    import descant

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(json.dumps(str(Path(descant.__file__).parents[2])), flush=True)
    models: dict[str, Any] = {}
    for line in sys.stdin:
        name, case_name, new = json.loads(line)
        if name not in models:
            models[name] = SUBJECTS[name].model()
        model, case = models[name], _CASES[case_name]
        prompts = case.prompts(model.config.vocab_size)
        gc.collect()
        torch.manual_seed(0)
        start = time.process_time()
        tokens = descant.generate(
            model, input_ids=prompts.ids, attention_mask=prompts.mask, max_new_tokens=new, **case.arguments
        )
        seconds = time.process_time() - start
        print(json.dumps({"seconds": seconds, "tokens": tokens.tolist()}), flush=True)


def _compare(sides: Sequence[_Side], model: str, case: str, new: int, repeats: int) -> str:
    """One line of the table: this side by the other."""
    first = [side.run(model, case, new) for side in sides]  # warms up too
    times: list[list[float]] = [[], []]
    for repeat in range(repeats):
        for index in (0, 1) if repeat % 2 else (1, 0):
            times[index].append(sides[index].run(model, case, new)["seconds"])
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    best = min(times[0]) / min(times[1])
    same = "same" if first[0]["tokens"] == first[1]["tokens"] else "OTHER TOKENS"
    step = statistics.median(times[0]) / new * 1e3
    return f"{model:9}{case:14}{middle:8.3f}{low:8.3f} -{high:6.3f}{best:8.3f}{step:10.2f}  {same}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the two checkouts case by case; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.regression", description=__doc__)
    parser.add_argument("base", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--model", action="append", choices=SUBJECTS, help="only this model; may be repeated")
    parser.add_argument("--case", action="append", choices=_CASES, help="only this case; may be repeated")
    parser.add_argument("--repeats", type=int, default=21, help="runs of each side")
    parser.add_argument("--new", type=int, default=32, help="tokens to decode")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        _work()
        return 0
    if options.base is None or not (options.base / "src" / "descant").is_dir():
        parser.error(f"BASE must be the root of a checkout, got {options.base}")
    if options.repeats < 2:
        parser.error(f"--repeats must be >= 2, got {options.repeats}")
    sides = [_Side(_ROOT), _Side(options.base.resolve())]
    print(f"{sides[0].checkout} by {sides[1].checkout}")
    print(f"{'model':9}{'case':14}{'median':>8}{'quartiles':>16}{'best':>8}{'ms a step':>10}")
    for model in options.model or SUBJECTS:
        for case in options.case or _CASES:
            print(_compare(sides, model, case, options.new, options.repeats), flush=True)
    for side in sides:
        side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
