"""`python -m bench.vllm_plugin`: the cost of a chain of six in vLLM, by its sampler and by the plug-in.

Both run in one process, in turn, with the same prompts; the times are CPU time per step. Run it with the
interpreter of tools/vllm_env.py.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before vLLM is imported, which reads them then.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # so that its CPU time is that of this process
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)

import vllm
from vllm.v1.sample.sampler import Sampler

import descant as processors
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.strategies.sampling import Sampling
from descant.engine.step.strategy_group import StrategyGroup
from descant.engine.vllm import batch_sampler
from descant.engine.vllm.logits_processor import DescantLogitsProcessor

__all__ = ["Timers", "main", "measure"]

ROOT = Path(__file__).resolve().parents[1]
CHAIN = {
    "repetition_penalty": 1.1, "presence_penalty": 0.2, "temperature": 0.8, "top_k": 50, "top_p": 0.95,
    "min_p": 0.05,
}  # fmt: skip
PROMPT = 32  # tokens
SIDES = ("greedy", "vLLM", "plug-in")


class Timers:
    """CPU seconds inside functions, by name, until the end of a `with` block.

    Those of a function include those of the functions that it calls.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Timers:
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self._originals:
            setattr(owner, name, function)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Measure an attribute of a class or module from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds[label] += time.process_time() - began

        self._originals.append((owner, name, function))
        setattr(owner, name, timed)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each batch size; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_plugin", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--new", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    options = parser.parse_args(argv)
    engine: Any = vllm.LLM(
        model=str(options.model),
        dtype=options.dtype,
        max_model_len=PROMPT + options.new,
        max_num_seqs=max(options.rows),
        enable_prefix_caching=False,  # repeats would be measured without their prompts
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )
    measure(engine, options.rows, options.new, options.repeats)
    return 0


def measure(engine: Any, sizes: Sequence[int], new: int, repeats: int) -> None:
    """Print the times of both sides for each batch size, then those of their parts."""
    for rows in sizes:
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        _seconds(engine, "plug-in", rows, new)  # compiles and allocates
        for repeat in range(repeats):
            for side in SIDES[:: 1 if repeat % 2 else -1]:
                times[side].append(_seconds(engine, side, rows, new))
        _print_times(rows, new, {side: statistics.median(values) for side, values in times.items()})
    with Timers() as timers:
        _measure_parts(timers)
        for rows in sizes:
            _print_parts(engine, timers, rows, new)


def _params(side: str, row: int, new: int) -> Any:
    common = {"max_tokens": new, "ignore_eos": True, "detokenize": False}
    if side == "greedy":
        return vllm.SamplingParams(temperature=0.0, **common)
    if side == "vLLM":
        return vllm.SamplingParams(**CHAIN, seed=row, **common)
    fields = {**CHAIN, "do_sample": True, "seed": row}
    return vllm.SamplingParams(temperature=0.0, extra_args={"descant": fields}, **common)


def _seconds(engine: Any, side: str, rows: int, new: int) -> float:
    """The CPU time of a run."""
    rng = random.Random(0)
    size = engine.llm_engine.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": [rng.randrange(size) for _ in range(PROMPT)]} for _ in range(rows)]
    params = [_params(side, row, new) for row in range(rows)]
    began = time.process_time()
    engine.generate(prompts, params, use_tqdm=False)
    return time.process_time() - began


def _print_times(rows: int, new: int, seconds: dict[str, float]) -> None:
    plain, theirs, ours = (1e3 * seconds[side] / new for side in SIDES)
    print(f"\n{rows} rows, ms of CPU time a step, the prompt's share included")
    print(f"{'greedy, without a chain':34}{plain:9.2f}")
    print(f"{'chain by vLLM':34}{theirs:9.2f}")
    print(f"{'chain by the plug-in':34}{ours:9.2f}")
    print(f"{'plug-in / vLLM, whole step':34}{ours / theirs:9.2f}")
    print(f"{'plug-in / vLLM, beyond greedy':34}{(ours - plain) / (theirs - plain):9.2f}", flush=True)


def _measure_parts(timers: Timers) -> None:
    """Measure the parts of a step from now on."""
    timers.wrap(Sampler, "forward", "vLLM's sampler, the plug-in included")
    timers.wrap(DescantLogitsProcessor, "update_state", "plug-in: changes of the batch")
    timers.wrap(DescantLogitsProcessor, "apply", "plug-in: apply")
    timers.wrap(batch_sampler.BatchSampler, "_arrange", "  rows")
    timers.wrap(batch_sampler, "run_step", "  step")
    timers.wrap(StrategyGroup, "process", "    processors")
    timers.wrap(Sampling, "select", "    selection")
    timers.wrap(SamplingNoise, "draw", "      noise")
    for name in processors.__all__:
        kind = getattr(processors, name)
        if isinstance(kind, type) and "process" in vars(kind):
            timers.wrap(kind, "process", f"      {name}")


def _print_parts(engine: Any, timers: Timers, rows: int, new: int) -> None:
    for side in SIDES[1:]:
        timers.seconds.clear()
        whole = _seconds(engine, side, rows, new)
        print(f"\n{rows} rows, {side}, ms of CPU time a step: {1e3 * whole / new:.2f}")
        for label, seconds in sorted(timers.seconds.items(), key=lambda item: _order(item[0])):
            print(f"{label:48}{1e3 * seconds / new:9.2f}", flush=True)


def _order(label: str) -> tuple[int, str]:
    """Callers before what they call."""
    return len(label) - len(label.lstrip(" ")), label


if __name__ == "__main__":
    sys.exit(main())
