"""Jobs on vLLM: the results of a job on Descant's own engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from descant import GenerationConfig
from descant.jobs import Job
from descant.jobs.job import JobRun
from descant.jobs.job_model import JobModel
from descant.jobs.workers.job_worker import LocalWorker
from tests.support import pretrained
from tests.vllm.engines import MODEL

SIZES = {"enforce_eager": True, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**28, "max_model_len": 256}


def run(job: Job) -> list[dict[str, Any]]:
    """The results of a job, in this process."""
    result = JobRun(job).run(lambda: LocalWorker(JobModel.load(job)))
    assert result.failed == 0
    return [
        json.loads(line)
        for path in sorted(Path(job.sink).glob("shard-?????.jsonl"))
        for line in path.read_text().splitlines()
    ]


@pytest.mark.parametrize("engine", ["vllm", "auto"])
def test_a_job_has_the_results_of_a_session(tmp_path: Path, engine: str) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"text": f"a ship {number}"} for number in range(6)]
    if engine == "auto":  # which runs beams in a session
        rows[2]["generation_config"] = {"num_beams": 3}  # type: ignore[assignment]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": str(pretrained.folder(MODEL)),
        "source": str(source),
        "template": "Tell of {text}:",
        "generation_config": GenerationConfig(
            do_sample=True, max_new_tokens=12, top_k=20, repetition_penalty=1.2
        ),
        "shard_rows": 4,
    }
    own = run(Job(sink=str(tmp_path / "own"), **values))
    other = run(Job(sink=str(tmp_path / "vllm"), engine=engine, engine_options=SIZES, **values))
    assert other == own
    assert len({one["completions"][0]["text"] for one in own}) > 3
