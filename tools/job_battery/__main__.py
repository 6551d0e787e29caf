"""Kill a job again and again, and compare its shards with those of a run that was not disturbed.

    python -m tools.job_battery --kills 100 --rows 2000               # runs in one process each
    python -m tools.job_battery --workers 2 --kills 30 --rows 600     # workers in processes of their own
    python -m tools.job_battery --ray --kills 30 --rows 600     # workers on a Ray cluster

A third of the kills hits a process between writing a file and its name, or just after. The exit code is 1 if
any byte differs, or if a row is missing or there twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from descant.models.loading.loading import load
from tools.job_battery.forked_runs import ForkedRuns
from tools.job_battery.ray_environment import ray_environment
from tools.job_battery.rows import battery_job, rows_once
from tools.job_battery.worker_runs import WorkerRuns

__all__ = ["main"]


def main() -> int:
    """Run the battery of the command line and print one line of figures."""
    parser = argparse.ArgumentParser("python -m tools.job_battery")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=0, help="processes (default: none)")
    parser.add_argument("--ray", action="store_true", help="actors on a Ray cluster that is started here")
    parser.add_argument("--max-pause", type=float, default=20.0, help="seconds between kills of workers")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: random)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="job-battery-") as name:
        figures, expected = _run(options, Path(name))
    figures["rows_once"] = rows_once(expected, options.rows)
    figures["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps({"rows": options.rows, **figures}), flush=True)
    return 1 if figures["torn"] or not figures["rows_once"] else 0


def _run(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    job = battery_job(folder, options.rows)
    loaded, rng = load(job.model, job.dtype), random.Random(options.seed)
    forked = ForkedRuns(job, loaded, rng)
    with_workers = options.workers or options.ray
    forked.run(folder, 0 if with_workers else options.kills)
    if not with_workers:
        shards = [min(forked.shards_at_kills), max(forked.shards_at_kills)]
        figures = {"kills": forked.kills, "completions": forked.completions, "torn": forked.torn}
        return {**figures, "shards_at_kills": shards}, forked.expected
    job = dataclasses.replace(job, workers=options.workers or 1)
    runs = WorkerRuns(job, forked.expected, rng, folder / "fault", max_pause=options.max_pause)
    if options.ray:
        from tools.job_battery.ray_node import RayNode  # only here is Ray needed

        with RayNode(job.workers + 1, ray_environment(runs.environment())) as node:
            runs.ray = node.address
            runs.run(folder, options.kills)
    else:
        runs.run(folder, options.kills)
    return {"kills": runs.kills, "completions": runs.completions, "torn": runs.torn}, forked.expected


if __name__ == "__main__":
    sys.exit(main())
