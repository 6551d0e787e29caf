"""vLLM in a process of its own, so that its memory, threads and settings stay there."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch

from descant.cli.doctor.report import one_line
from descant.cli.doctor.subject import Subject

__all__ = ["VllmCase", "run_vllm"]

_TIMEOUT: Final = 900.0  # seconds, most of which compilation may take
_RESULT: Final = "descant-doctor-times "

# Text, because Descant never imports vLLM for this. The engine runs in the process of the script, whose CPU
# time is counted; a device is waited for by `generate`, which returns tokens on the host.
_SCRIPT: Final = """
import json, sys, time

given = json.load(sys.stdin)
options = {}
if given["device"] == "cuda":
    import torch

    free, total = torch.cuda.mem_get_info()
    options["gpu_memory_utilization"] = 0.8 * free / total
from vllm import LLM, SamplingParams

longest = max(len(prompt) for case in given["cases"] for prompt in case["prompts"])
model = LLM(
    model=given["model"],
    dtype=given["dtype"],
    skip_tokenizer_init=True,
    max_model_len=longest + max(case["new_tokens"] for case in given["cases"]),
    enable_prefix_caching=False,
    disable_log_stats=True,
    **options,
)
clock = time.perf_counter if given["device"] == "cuda" else time.process_time
times = {}
for case in given["cases"]:
    prompts = [{"prompt_token_ids": prompt} for prompt in case["prompts"]]
    params = SamplingParams(temperature=0, max_tokens=case["new_tokens"], ignore_eos=True, detokenize=False)
    model.generate(prompts, params, use_tqdm=False)
    times[case["name"]] = []
    for _ in range(case["repeats"]):
        start = clock()
        found = model.generate(prompts, params, use_tqdm=False)
        times[case["name"]].append(clock() - start)
        lengths = {len(one.outputs[0].token_ids) for one in found}
        assert lengths == {case["new_tokens"]}, lengths
print(given["mark"] + json.dumps(times), flush=True)
"""

# The backend for CPUs would take most of the memory, and pin threads to cores that others may use.
_ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class VllmCase:
    """Prompts that are decoded greedily, several times."""

    name: str
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    repeats: int


def run_vllm(subject: Subject, cases: Sequence[VllmCase]) -> dict[str, list[float]] | str:
    """The seconds of each repeat by case, or the reason why there are none."""
    if find_spec("vllm") is None:
        return "not installed"
    if subject.folder is None:
        return "the tiny model has heads that are too small for it: use --model"
    if subject.model.device.type not in ("cpu", "cuda"):
        return f"not run on {subject.model.device.type}"
    given = {
        "model": subject.folder,
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "device": subject.model.device.type,
        "mark": _RESULT,
        "cases": [dataclasses.asdict(case) for case in cases],
    }
    # The user's own settings come first, except where the engine runs.
    environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": str(torch.get_num_threads()), **os.environ}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            env=environment,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {_TIMEOUT:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not lines:
        *_, last = ["no output", *done.stderr.strip().splitlines()]
        return one_line(f"ended with status {done.returncode}: {last}", 200)
    times: dict[str, list[float]] = json.loads(lines[-1].removeprefix(_RESULT))
    return times
