"""`python -m bench.engines`: sessions against vLLM and transformers, CPU time, one thread, the same tokens.

The sides are a plain session, one with prepacked weights and compiled layers (`fast`), vLLM compiled, and
transformers' `generate`, which pads ragged requests and decodes all as long as the longest. They take turns
in rotating order. A ratio is the median over the repeats of the time of a side by that of `fast` in the same
repeat. vLLM runs in a process of its own, in the interpreter that `tools/vllm_env.py` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.config
import transformers

import descant
from bench import operators
from bench.models import fast_copy

__all__ = ["CASES", "main"]

Requests = Sequence[tuple[list[int], int]]  # prompts, and the number of new tokens of each
Side = Callable[[Requests], "Run"]
_ROOT = Path(__file__).resolve().parents[1]


class Run(NamedTuple):
    """One run of a case: CPU seconds, and the new tokens of each request."""

    seconds: float
    tokens: list[list[int]]


def _equal(count: int, new: int) -> Requests:
    rng = random.Random(count)
    return [([rng.randrange(10, 1000) for _ in range(32)], new) for _ in range(count)]


def _ragged(count: int) -> Requests:
    rng = random.Random(count)
    sizes = [(rng.randint(16, 128), rng.randint(4, 64)) for _ in range(count)]
    return [([rng.randrange(10, 1000) for _ in range(length)], new) for length, new in sizes]


CASES: dict[str, Requests] = {
    "batch 1": _equal(1, 64),
    "batch 16": _equal(16, 32),
    "batch 64": _equal(64, 32),
    "ragged 48": _ragged(48),
    "ragged 96": _ragged(96),
}


def _config(new: int) -> descant.GenerationConfig:
    return descant.GenerationConfig(max_new_tokens=new, eos_token_id=None)


def session_side(model: Any) -> Side:
    """All requests in one session."""

    def run(requests: Requests) -> Run:
        began = time.process_time()
        session = descant.Session(model)
        numbers = session.admit(*(descant.Request(prompt, _config(new)) for prompt, new in requests))
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        for event in session.drain():
            if isinstance(event, descant.Tokens):
                for number, token in zip(event.request.tolist(), event.token.tolist(), strict=True):
                    tokens[number].append(token)
        return Run(time.process_time() - began, list(tokens.values()))

    return run


def transformers_side(model: Any) -> Side:
    """One batch, padded at the left, that decodes as long as its longest request."""

    def run(requests: Requests) -> Run:
        width = max(len(prompt) for prompt, _ in requests)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
        new = max(new for _, new in requests)
        settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        began = time.process_time()
        out = model.generate(input_ids=ids, attention_mask=mask, **settings)
        seconds = time.process_time() - began
        return Run(
            seconds, [row[width : width + own] for row, (_, own) in zip(out.tolist(), requests, strict=True)]
        )

    return run


class VLLMProcess:
    """vLLM in a process of its own."""

    def __init__(self, python: str, model: str, dtype: str) -> None:
        self._process = subprocess.Popen(
            [python, str(_ROOT / "bench" / "vllm_worker.py"), str(Path(model).absolute()), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )
        self.version: str = self._answer()["version"]

    def __call__(self, requests: Requests) -> Run:
        """Run requests."""
        return self._run({"requests": requests})

    def structured(self, requests: Requests, schema: dict[str, Any]) -> Run:
        """Run requests under a JSON schema."""
        return self._run({"requests": requests, "schema": schema})

    def traced(self, requests: Requests, trace: Path) -> Run:
        """Run requests under torch's profiler, which writes a trace."""
        return self._run({"requests": requests, "trace": str(trace)})

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _run(self, given: dict[str, Any]) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        return Run(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("the vLLM process ended: run bench/vllm_worker.py by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(sides: dict[str, Side], requests: Requests, repeats: int) -> dict[str, list[Run]]:
    """The runs of each side, in an order that rotates."""
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(repeats):
        for name in order:
            runs[name].append(sides[name](requests))
        order = [*order[1:], order[0]]
    return runs


def report(case: str, runs: dict[str, list[Run]]) -> list[str]:
    """The lines of a case: for each side its ratio to `fast`, and how many requests have the same tokens."""
    lines, reference = [], runs["fast"]
    for name, own in runs.items():
        ratio = statistics.median(one.seconds / two.seconds for one, two in zip(own, reference, strict=True))
        pairs = list(zip(own[0].tokens, reference[0].tokens, strict=True))
        same = sum(one == two for one, two in pairs)
        seconds = statistics.median(one.seconds for one in own)
        lines.append(f"| {case} | {name} | {ratio:.2f} | {seconds:.2f} | {same} of {len(pairs)} |")
    return lines


def profile(sides: dict[str, Side], case: str, num_operators: int) -> list[str]:
    """The lines of a case under torch's profiler: seconds by groups of operators, and the largest of them."""
    groups, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name, side in sides.items():
            trace = Path(folder) / "trace.json"
            if isinstance(side, VLLMProcess):
                run = side.traced(CASES[case], trace)
            else:
                with torch.profiler.profile() as own:
                    run = side(CASES[case])
                own.export_chrome_trace(str(trace))
            seconds = operators.operator_seconds(trace, run.seconds)
            groups[name] = operators.group_seconds(seconds, run.seconds)
            largest = sorted(seconds, key=lambda one: seconds[one], reverse=True)[:num_operators]
            lines += [f"{name}: {seconds[one]:7.3f} s  {one}" for one in largest]
    return [*operators.table(case, groups), *lines]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the selected cases."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="an interpreter with vLLM; without it vLLM is left out"
    )
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-session", action="store_true", help="leave the plain session out")
    parser.add_argument("--profile", action="store_true", help="print seconds by groups of operators instead")
    parser.add_argument("--operators", type=int, default=0, help="with --profile: the largest operators too")
    given = parser.parse_args(arguments)
    if given.profile:
        os.environ |= operators.KERNEL_PROFILE
        torch._inductor.config.cpp.enable_kernel_profile = True
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, given.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).eval()
    sides: dict[str, Side] = {"fast": session_side(fast_copy(model))}
    if not given.no_session:
        sides["session"] = session_side(model)
    vllm = None if given.vllm is None else VLLMProcess(given.vllm, given.model, given.dtype)
    if vllm is not None:
        sides[f"vLLM {vllm.version}"] = vllm
    if not given.no_transformers:
        sides[f"transformers {transformers.__version__}"] = transformers_side(model)
    print(f"{given.model}, {given.dtype}")
    if not given.profile:
        print(
            "| case | side | time by `fast` | CPU s | requests with the same tokens |\n|---|---|---|---|---|"
        )
    try:
        measure(sides, CASES["batch 1"], 1)  # what is compiled or compared once is not counted
        for case in given.case or CASES:
            lines = (
                profile(sides, case, given.operators)
                if given.profile
                else report(case, measure(sides, CASES[case], given.repeats))
            )
            print(*lines, sep="\n", flush=True)
    finally:
        if vllm is not None:
            vllm.close()


if __name__ == "__main__":
    main()
