"""What a job adds to each row, part by part: microseconds of CPU time."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from descant.api.chat_prompt import encode_prompt
from descant.api.text_output import completion_text
from descant.engine.planning.planner import as_model
from descant.jobs import Job
from descant.jobs.description import open_source
from descant.jobs.job_model import JobModel, RowRequests, _fill
from descant.jobs.shards import JobManifest, JsonLinesShards, ShardFolder
from descant.jobs.workers.job_worker import AttemptLog

__all__ = ["print_parts"]

_REPEATS = 5


def print_parts(job: Job, model: Any, tokenizer: Any) -> None:
    """Print the median time of each part over the rows of a job."""
    own = JobModel(job, model, tokenizer)
    requests = RowRequests(job, tokenizer, own.generation_config, as_model(model).traits, own.device)
    source = open_source(job)
    rows = list(source)
    built = [requests.build(row) for row in rows]
    texts = [_fill(job.template or "", row) for row in rows]
    new = job.generation_config.max_new_tokens or 1
    # The length is what counts, and prompts are tokens of real text.
    tokens = (torch.cat([torch.as_tensor(one.prompt) for one in built]).tolist() * new)[: len(rows) + new]
    generated = [tokens[start : start + new] for start in range(len(rows))]
    records = [
        {"row": row.index, "completions": [{"text": text * 3, "tokens": new, "finish_reason": "length"}]}
        for row, text in zip(rows, texts, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        manifest = JobManifest("0", "", "", len(rows), len(rows))
        log = AttemptLog(Path(folder), 0, "run")
        log.open()

        def note_attempts() -> None:
            for row in rows:
                log.begin(row.index)
                log.end(row.index)

        def write() -> None:
            sink = ShardFolder(folder, manifest)
            sink.write(0, records, [])
            sink.results_file(0).unlink()

        parts: dict[str, Callable[[], object]] = {
            "source: scan": lambda: source.scan(job.shard_rows),
            "source: read": lambda: list(source),
            "template": lambda: [_fill(job.template or "", row) for row in rows],
            "tokenizer": lambda: [encode_prompt(tokenizer, text) for text in texts],
            "request, template and tokenizer included": lambda: [requests.build(row) for row in rows],
            "completion text": lambda: [
                completion_text(tokenizer, request, ids)
                for request, ids in zip(built, generated, strict=True)
            ],
            "JSON": lambda: JsonLinesShards().encode(records),
            "attempt log": note_attempts,
            "shard write, JSON included": write,
        }
        print(f"parts of a job, us of CPU time a row (median of {_REPEATS}, over {len(rows)} rows)")
        for name, part in parts.items():
            print(f"{name:42}{1e6 * _seconds(part) / len(rows):8.1f}", flush=True)
        log.close(is_complete=True)


def _seconds(part: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        began = time.process_time()
        part()
        times.append(time.process_time() - began)
    return statistics.median(times)
