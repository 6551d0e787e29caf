"""A job on two Ray nodes of this machine, one of which is lost; prints what was seen as JSON.

Arguments: the description of the job as JSON, its sink, and the second sink, which a resume fills.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray

from descant import InputError
from descant.jobs import Job, JobProgress
from descant.jobs.description import job_values
from tools.job_battery.ray_environment import ray_environment
from tools.job_battery.ray_node import RayNode


def lose_a_node(job: Job, head: RayNode) -> dict[str, Any]:
    """Run with an actor on each of two nodes, and end one node when some rows are done."""
    other = RayNode(1, ray_environment(), head.address)
    end = time.monotonic() + 240
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        if time.monotonic() > end or other.process.poll() is not None:
            raise RuntimeError(f"the second node has not started: {other.log.read_text()[-2000:]}")
        time.sleep(0.2)
    lost_at: list[int] = []

    def watch(progress: JobProgress) -> None:
        if progress.finished >= progress.rows // 4 and not lost_at:
            other.kill()
            lost_at.append(progress.finished)

    result = job.run(ray=head.address, on_progress=watch)
    end = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 1:  # Ray counts on a lost node for some seconds
        if time.monotonic() > end:
            raise RuntimeError("the second node is lost and Ray still counts on it")
        time.sleep(0.2)
    return {"lost_at": lost_at, "rows": result.rows, "failed": result.failed}


def main() -> None:
    """Run the program."""
    job = Job(**job_values(json.loads(sys.argv[1])))
    os.environ.update(ray_environment())
    with RayNode(1, ray_environment()) as head:
        ray.init(address=head.address, log_to_driver=False)
        found = lose_a_node(dataclasses.replace(job, sink=sys.argv[2], workers=2), head)
        again = dataclasses.replace(job, sink=sys.argv[2], workers=1)
        first = sorted(Path(sys.argv[2]).glob("shard-?????.jsonl"))[1]
        first.unlink()
        found["resumed"] = again.run(ray=head.address).computed_rows
        try:
            dataclasses.replace(job, workers=7).run(ray=head.address)
        except InputError as error:
            found["refused"] = str(error)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
