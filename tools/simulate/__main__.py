"""The scheduler under a virtual clock.

python -m tools.simulate schedules --count 100000 --jobs 2     check its promises under random schedules
python -m tools.simulate measure --model models/smollm2        fit the cost model to this machine
python -m tools.simulate sweep --out tools/simulate/sweeps.json   the figures of the guide
python -m tools.simulate load --requests 1000000 --rate 60     one workload
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from tools.simulate.cost_model import COSTS, fit_published, load_costs, save_costs
from tools.simulate.lengths import SERVICES, draw
from tools.simulate.load import Target, simulate
from tools.simulate.overhead import bytes_per_waiting, seconds_per_step
from tools.simulate.pool_engine import BrokenInvariant
from tools.simulate.schedules import Outcome, run_schedule
from tools.simulate.sweeps import run_sweeps

__all__ = ["main"]

REPORT_EVERY = 10_000  # schedules between two lines of progress


def try_schedules(seeds: range) -> tuple[int, Counter[str], list[str]]:
    """Steps and events of these schedules, and what they broke."""
    steps, counts, broken = 0, Counter[str](), []
    for done, seed in enumerate(seeds, 1):
        try:
            outcome: Outcome = run_schedule(seed)
        except BrokenInvariant as error:
            broken.append(str(error))
        else:
            steps += outcome.steps
            counts += outcome.counts
        if done % REPORT_EVERY == 0:
            print(f"{seeds.start} on: {done} schedules, {len(broken)} broken", file=sys.stderr, flush=True)
    return steps, counts, broken


def try_in_processes(seeds: range, jobs: int) -> tuple[int, Counter[str], list[str]]:
    """`try_schedules` in several processes, which answer in JSON: multiprocessing would unpickle."""
    command = [sys.executable, "-m", "tools.simulate", "schedules", "--jobs", "1", "--json"]
    bounds = [seeds.start + len(seeds) * job // jobs for job in range(jobs + 1)]
    parts = [("--first", str(low), "--count", str(high - low)) for low, high in pairwise(bounds)]
    started = [subprocess.Popen([*command, *part], stdout=subprocess.PIPE, text=True) for part in parts]
    steps, counts, broken = 0, Counter[str](), []
    for process in started:
        answer = json.loads(process.communicate()[0])
        steps += answer["steps"]
        counts += Counter(answer["counts"])
        broken += answer["broken"]
    return steps, counts, broken


def check_schedules(given: argparse.Namespace) -> int:
    """Run random schedules in several processes; 1: one broke a promise."""
    began = time.monotonic()
    seeds = range(given.first, given.first + given.count)
    steps, counts, broken = try_schedules(seeds) if given.jobs == 1 else try_in_processes(seeds, given.jobs)
    if given.json:
        print(json.dumps({"steps": steps, "counts": counts, "broken": broken}))
        return 0
    print(*broken, sep="\n", end="\n" if broken else "")
    listed = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    seconds = time.monotonic() - began
    print(f"{given.count} schedules, {steps} steps in {seconds:.0f} s: {listed}; {len(broken)} broken")
    return int(bool(broken))


def measure_costs(given: argparse.Namespace) -> int:
    """Measure a model, and write both cost models."""
    from tools.simulate.measure import measure  # imports torch, which the other commands do without

    costs = {"cpu": measure(given.model), "h100": fit_published()}
    save_costs(costs)
    print(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1))
    return 0


def run_load(given: argparse.Namespace) -> int:
    """Run one workload and print what came of it."""
    work = draw(
        given.requests, given.rate, service=given.service, burstiness=given.burstiness, seed=given.seed
    )
    limits = {
        "max_running_rows": given.rows,
        "max_step_tokens": given.step_tokens,
        "chunk_tokens": given.chunk,
        "preemption": given.preemption,
    }
    began = time.process_time()
    result = simulate(load_costs()[given.cost], work, Target(1.0, 0.05), **limits)
    seconds = time.process_time() - began
    shown = {**asdict(result), "goodput": result.goodput, "throughput": result.throughput}
    print(json.dumps({**shown, "cpu_seconds": round(seconds, 1)}, indent=1))
    return 0


def show_overhead(_: argparse.Namespace) -> int:
    """Print the cost of the scheduler itself."""
    print(f"{bytes_per_waiting():.0f} bytes a waiting request")
    for running in (64, 256, 1024, 4096):
        for waiting in (1000, 1_000_000):
            seconds = seconds_per_step(running, waiting)
            print(f"{running} running, {waiting} waiting: {1e6 * seconds:.0f} us a step", flush=True)
    return 0


def sweep(given: argparse.Namespace) -> int:
    """Run all sweeps of the guide and write their figures."""
    given.out.write_text(json.dumps(run_sweeps(load_costs()), indent=1) + "\n", encoding="utf-8")
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    schedules = commands.add_parser("schedules")
    schedules.add_argument("--count", type=int, default=100_000)
    schedules.add_argument("--first", type=int, default=0, help="the first seed")
    schedules.add_argument("--jobs", type=int, default=2)
    schedules.add_argument("--json", action="store_true", help="print the counts as JSON")
    schedules.set_defaults(run=check_schedules)
    costs = commands.add_parser("measure")
    costs.add_argument("--model", type=Path, default=COSTS.parents[2] / "models" / "smollm2")
    costs.set_defaults(run=measure_costs)
    load = commands.add_parser("load")
    load.add_argument("--cost", default="h100")
    load.add_argument("--requests", type=int, default=20_000)
    load.add_argument("--rate", type=float, default=30.0, help="requests a second")
    load.add_argument("--service", choices=SERVICES, default="conversation")
    load.add_argument("--burstiness", type=float, default=1.0)
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--rows", type=int, default=512)
    load.add_argument("--step-tokens", type=int, default=2048)
    load.add_argument("--chunk", type=int)
    load.add_argument("--preemption", default="growth")
    load.set_defaults(run=run_load)
    commands.add_parser("overhead").set_defaults(run=show_overhead)
    sweeps = commands.add_parser("sweep")
    sweeps.add_argument("--out", type=Path, default=COSTS.with_name("sweeps.json"))
    sweeps.set_defaults(run=sweep)
    given = parser.parse_args()
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main())
