"""`python -m bench.jobs cost`: the CPU time of a job over that of its requests in an engine directly."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from bench.job_parts import print_parts
from bench.job_sides import (
    SideResult,
    cost_job,
    engine_side,
    local_side,
    process_side,
    ray_side,
    rows_of_words,
    write_rows,
)
from bench.process_time import process_seconds
from descant.jobs import Job
from descant.models.loading.loading import load

__all__ = ["add_cost_options", "measure_sides", "print_ratios", "run_cost"]

Side = Callable[[Job], SideResult]
_BARS = {"job": 1.03, "job, one process": 1.03, "job on Ray": 1.05}
_BASE = "engine"
_IDLE_SECONDS = 20.0


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """The options of `cost`."""
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", metavar="SIDE", help=f"beside the engine: {', '.join(_BARS)}")
    parser.add_argument("--ray", action="store_true", help="also on Ray: use an interpreter that has it")


def run_cost(args: argparse.Namespace) -> None:
    """Print the times of all sides, their ratios, and what a job adds to a row."""
    torch.set_num_threads(1)
    model, tokenizer = load(args.model, "float32")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        source = write_rows(Path(folder), rows_of_words(args.rows))
        job = cost_job(str(Path(args.model).resolve()), source, args.new_tokens, args.in_flight)
        sides: dict[str, Side] = {
            _BASE: lambda job: engine_side(job, model, tokenizer),
            "job": lambda job: local_side(job, model, tokenizer),
            "job, one process": process_side,
        }
        if args.ray:
            sides["job on Ray"] = stack.enter_context(_ray_cluster())
        if args.only is not None:
            sides = {name: side for name, side in sides.items() if name in (_BASE, *args.only)}
        print(f"{args.rows} rows, {args.new_tokens} new tokens, {args.in_flight} in flight, {args.model}")
        engine_side(
            dataclasses.replace(job, source=str(_few_rows(Path(folder)))), model, tokenizer
        )  # warm up
        print_ratios(measure_sides(job, sides, args.repeats), args.rows)
        print_parts(job, model, tokenizer)


def measure_sides(job: Job, sides: Mapping[str, Side], repeats: int) -> dict[str, list[SideResult]]:
    """The results of each side; they take turns in rotating order, and must give the same tokens."""
    names = list(sides)
    found: dict[str, list[SideResult]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            result = sides[name](job)
            found[name].append(result)
            print(
                f"  repeat {repeat}: {name:18} {result.seconds:8.2f} s, {result.outside:6.2f} s outside the "
                f"engine's thread; start {result.start:6.2f} s; {result.tokens} tokens",
                flush=True,
            )
    tokens = {result.tokens for results in found.values() for result in results}
    if len(tokens) > 1:
        sys.exit(f"the sides must generate the same tokens, got {sorted(tokens)}")
    return found


def print_ratios(found: Mapping[str, list[SideResult]], rows: int) -> None:
    """Each side over the engine: whole CPU time, and by the threads beside the engine's alone."""
    base = found[_BASE]
    for name, results in found.items():
        if name == _BASE:
            continue
        ratios = [own.seconds / other.seconds for own, other in zip(results, base, strict=True)]
        # What the engine's thread does is the same; its noise is larger than what a job adds.
        added = [own.outside - other.outside for own, other in zip(results, base, strict=True)]
        share = [1 + one / other.seconds for one, other in zip(added, base, strict=True)]
        start = statistics.median(one.start for one in results)
        print(f"{name} / engine: {_spread(ratios)}, bar {_BARS.get(name, 1.0)}; start {start:.1f} s apart")
        print(
            f"{'':4}by the threads beside the engine's: {_spread(share)}, "
            f"{1e6 * statistics.median(added) / rows:+.0f} us a row"
        )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _few_rows(folder: Path) -> Path:
    few = folder / "few"
    few.mkdir()
    return write_rows(few, rows_of_words(4))


@contextlib.contextmanager
def _ray_cluster() -> Iterator[Side]:
    """A cluster of one node, and the side that runs on it."""
    try:
        from tools.job_battery.ray_environment import ray_environment
        from tools.job_battery.ray_node import RayNode
    except ImportError:
        sys.exit("Ray is not installed: run it with an interpreter that has it (tools/clients_env.py)")
    root = Path(__file__).resolve().parents[1]
    environment = ray_environment({"PYTHONPATH": f"{root / 'src'}:{root}"})
    with RayNode(1, environment) as node:
        yield lambda job: ray_side(job, node.address, node.process.pid)
        before = process_seconds(node.process.pid)
        time.sleep(_IDLE_SECONDS)
        idle = (process_seconds(node.process.pid) - before) / _IDLE_SECONDS
        print(f"the cluster without a job: {idle:.3f} CPU seconds a second")


def run_parts(args: argparse.Namespace) -> None:
    """Print what a job adds to a row."""
    model, tokenizer = load(args.model, "float32")
    with tempfile.TemporaryDirectory() as folder:
        source = write_rows(Path(folder), rows_of_words(args.rows))
        print_parts(cost_job(args.model, source, args.new_tokens, 32), model, tokenizer)
