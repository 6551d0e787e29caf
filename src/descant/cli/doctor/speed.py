"""Times of Descant and of transformers in one process, in turns, and of vLLM in a process of its own."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.generate import generate
from descant.cli.doctor.checks import CheckedModel, PaddedPrompts, ParityCase, pad_token, quiet, token_prompts
from descant.cli.doctor.report import SpeedRow, one_line

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
        lengths = {len(output.outputs[0].token_ids) for output in found}
        assert lengths == {case["new_tokens"]}, lengths
print(given["mark"] + json.dumps(times), flush=True)
"""

# The backend for CPUs would take most of the memory, and pin threads to cores that others may use.
_ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def run_vllm(checked: CheckedModel, cases: Sequence[Mapping[str, Any]]) -> dict[str, list[float]] | str:
    """The seconds of each repeat by case, or the reason why there are none.

    A case has a `name`, `prompts` that are decoded greedily, `new_tokens` and `repeats`.
    """
    if find_spec("vllm") is None:
        return "not installed"
    if checked.folder is None:
        return "the tiny model has heads that are too small for it: use --model"
    if checked.model.device.type not in ("cpu", "cuda"):
        return f"not run on {checked.model.device.type}"
    given = {
        "model": checked.folder,
        "dtype": str(checked.model.dtype).removeprefix("torch."),
        "device": checked.model.device.type,
        "mark": _RESULT,
        "cases": list(cases),
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


SPEED_CASES: Final = (
    ParityCase("greedy 1", (32,)),
    ParityCase("greedy 16", (32,) * 16),
    ParityCase("ragged 16", tuple(range(2, 33, 2))),
    ParityCase("beams 4", (64,), {"num_beams": 4}),
)
OURS, THEIRS, VLLM = "descant", "transformers", "vllm"


@dataclass(frozen=True)
class SpeedSize:
    """The length of the benchmark."""

    new_tokens: int = 32
    max_repeats: int = 7
    seconds: float = 10.0  # of a case: no repeat starts later

    @classmethod
    def quick(cls) -> SpeedSize:
        """A second or two for each case of a small model."""
        return cls(new_tokens=16, max_repeats=3, seconds=2.0)


@dataclass(frozen=True)
class _Timed:
    """The times of one implementation, and its tokens."""

    seconds: list[float]
    tokens: Tensor


def run_speed(
    checked: CheckedModel, size: SpeedSize, with_vllm: bool, progress: Callable[[str], None]
) -> Iterator[SpeedRow]:
    """The times of all implementations in every case."""
    if checked.model.config.is_encoder_decoder:
        detail = "the prompts of the doctor are for models without an encoder"
        yield SpeedRow(checked.name, "all", OURS, None, None, "", 0, detail)
        return
    times: dict[str, float] = {}
    for case in SPEED_CASES:
        progress(f"bench, {checked.name}: {case.name}")
        try:
            timed = _run_case(checked.model, case, size)
        except Exception as error:  # out of memory, a missing kernel
            detail = one_line(f"{type(error).__name__}: {error}", 200)
            yield SpeedRow(checked.name, case.name, f"{OURS}, {THEIRS}", None, None, "", 0, detail)
            continue
        times[case.name] = statistics.median(timed[THEIRS].seconds)
        yield from _rows(checked.name, case, size, timed)
    if with_vllm:
        progress(f"bench, {checked.name}: {VLLM}")
        yield from _vllm_rows(checked, size, times)


def _run_case(model: Any, case: ParityCase, size: SpeedSize) -> Mapping[str, _Timed]:
    """Both implementations in turns, in an order that changes; the first run of each is not counted."""
    pad = pad_token(model)
    prompts = PaddedPrompts.of(token_prompts(model, case.lengths), model, pad)
    arguments = {
        "input_ids": prompts.ids,
        "attention_mask": prompts.mask,
        "do_sample": False,
        "min_new_tokens": size.new_tokens,
        "max_new_tokens": size.new_tokens,
        "pad_token_id": pad,
        **case.arguments,
    }
    calls: dict[str, Callable[[], Any]] = {
        OURS: partial(generate, model, **arguments),
        THEIRS: partial(model.generate, **arguments),
    }
    with quiet():
        timed = {name: _Timed([], call()[:, prompts.ids.shape[1] :].cpu()) for name, call in calls.items()}
        gc.collect()
        start = time.perf_counter()
        for repeat in range(size.max_repeats):
            names = list(calls) if repeat % 2 == 0 else list(calls)[::-1]
            for name in names:
                timed[name].seconds.append(_seconds(calls[name], model.device))
            if time.perf_counter() - start > size.seconds:
                break
    return timed


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    synchronize = getattr(torch, device.type).synchronize
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def _rows(model: str, case: ParityCase, size: SpeedSize, timed: Mapping[str, _Timed]) -> Iterator[SpeedRow]:
    is_same = torch.equal(timed[OURS].tokens, timed[THEIRS].tokens)
    num_tokens = size.new_tokens * len(case.lengths)
    for name, runs in timed.items():
        pairs = zip(timed[THEIRS].seconds, runs.seconds, strict=True)
        yield SpeedRow(
            model,
            case.name,
            name,
            ms_per_token=1e3 * statistics.median(runs.seconds) / num_tokens,
            speedup=statistics.median(theirs / own for theirs, own in pairs),
            tokens="same" if is_same else "other",
            repeats=len(runs.seconds),
        )


def _vllm_rows(checked: CheckedModel, size: SpeedSize, times: Mapping[str, float]) -> Iterator[SpeedRow]:
    """The times of vLLM, or one row with the reason why there are none."""
    cases = [case for case in SPEED_CASES if not case.arguments]
    lengths = {"new_tokens": size.new_tokens, "repeats": size.max_repeats}
    prompts = {case.name: token_prompts(checked.model, case.lengths) for case in cases}
    given = [{"name": name, "prompts": some, **lengths} for name, some in prompts.items()]
    found = run_vllm(checked, given)
    if isinstance(found, str):
        yield SpeedRow(checked.name, "all", VLLM, None, None, "", 0, found)
        return
    for case in cases:
        seconds = found[case.name]
        middle = statistics.median(seconds)
        yield SpeedRow(
            checked.name,
            case.name,
            VLLM,
            ms_per_token=1e3 * middle / (size.new_tokens * len(case.lengths)),
            speedup=times[case.name] / middle if case.name in times else None,
            tokens="",
            repeats=len(seconds),
        )
