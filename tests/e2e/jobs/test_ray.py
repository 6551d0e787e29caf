"""Jobs on Ray: two nodes, one of which is lost, and a resume have the bytes of a run in one process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from descant.jobs.description import encode_job
from descant.models.loading.loading import load
from tests.support.client_programs import ROOT, ClientEnvironment
from tools.job_battery.rows import battery_job, files_of

PROGRAM = Path(__file__).parent / "ray_program.py"


def test_a_job_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    job = dataclasses.replace(battery_job(tmp_path, 160), max_in_flight=8, window=10)
    dataclasses.replace(job, sink=str(tmp_path / "whole")).run(*load(job.model, job.dtype))
    paths = f"{ROOT / 'src'}:{ROOT}"
    printed = ClientEnvironment(tmp_path).run(
        "python",
        PROGRAM,
        json.dumps(encode_job(job)),
        tmp_path / "ray",
        env={"PYTHONPATH": paths},
        timeout=900,
    )
    # Ray prints lines of its own before and after.
    [answer] = [line for line in printed.splitlines() if line.startswith("{")]
    found = json.loads(answer)
    assert len(found["lost_at"]) == 1
    assert found["lost_at"][0] < 160
    assert (found["rows"], found["resumed"]) == (160, 10)
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "whole")
    assert found["refused"].startswith("`workers` must fit on the cluster, whose nodes have [1] CPUs")
