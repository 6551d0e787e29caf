"""`python -m bench.jobs checkpoint`: the memory of a resume, by Ray Data's CheckpointConfig and by a job.

Ray Data keeps the id of each row that is done, and reads all of them before it starts. A job looks at the
shards that are there. Each figure is the peak memory of all processes of one resume in a new process, above
that of a resume of a few rows. Memory that processes share counts once. The figures of Ray Data have the
noise of its processes, some tens of MB. With ids, a job keeps digests of 8 bytes, to find equal ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.process_time import process_family
from descant.jobs.shard_folder import JobManifest, ShardFolder
from descant.jobs.shard_formats import JsonLinesShards
from descant.jobs.source import JobSource
from tools.job_battery.ray_environment import ray_environment

__all__ = ["add_checkpoint_options", "run_checkpoint"]

_NEW_ROWS = 1000  # that are not done
_FEW = 1000
_SHARD_ROWS = 1000
_PAUSE = 0.3


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """The options of `checkpoint`."""
    parser.add_argument("--rows", type=int, nargs="*", default=[10**5, 10**6], help="that are done")


def run_checkpoint(args: argparse.Namespace) -> None:
    """Print a line for each number of rows."""
    sides = {"Ray Data": "ray", "job": "job", "job with ids": "job-ids"}
    few = {name: _peak_bytes(side, _FEW) for name, side in sides.items()}
    print("bytes a row that is done" + "".join(f"{name:>16}" for name in sides))
    for rows in args.rows:
        peaks = {name: _peak_bytes(side, rows) - few[name] for name, side in sides.items()}
        print(f"{rows:24,}" + "".join(f"{peak / (rows - _FEW):16.1f}" for peak in peaks.values()), flush=True)


def _peak_bytes(side: str, rows: int) -> int:
    """The peak memory of a resume in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        prepare = _prepare_ray if side == "ray" else _prepare_job
        prepare(rows, Path(folder))
        command = [sys.executable, "-m", "bench.job_checkpoint", side, str(rows), folder]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=_environment()).stdout
    return int(json.loads(output.splitlines()[-1])["bytes"])


def _environment() -> dict[str, str]:
    return ray_environment({"PYTHONPATH": os.pathsep.join(one or os.getcwd() for one in sys.path)})


class _PeakMemory:
    """The peak of the memory of this process and its descendants, by a thread that looks often."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()

    @contextmanager
    def watch(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while True:
            self.bytes = max(self.bytes, sum(map(_proportional_bytes, process_family(os.getpid()))))
            if self._ended.wait(_PAUSE):
                return


def _proportional_bytes(pid: int) -> int:
    """The memory of a process, its share of what it has in common with others included.

    Files that are mapped, such as libraries, do not count: their share depends on what else is running.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _ids(rows: int) -> list[str]:
    return [f"row-{row:012}" for row in range(rows)]


def _prepare_ray(rows: int, folder: Path) -> None:
    """A dataset of a few rows, and a checkpoint of many others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "checkpoint").mkdir()
    pq.write_table(pa.table({"id": _ids(rows)}), folder / "checkpoint" / "done.parquet")
    pq.write_table(pa.table({"id": [f"new-{row}" for row in range(_NEW_ROWS)]}), folder / "source.parquet")


def _resume_ray(_: int, folder: Path) -> int:
    import pyarrow.parquet as pq
    import ray
    import ray.data
    from ray.data.checkpoint import CheckpointConfig

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    path = str(folder / "checkpoint")
    context.checkpoint_config = CheckpointConfig("id", path, delete_checkpoint_on_success=False)
    peak = _PeakMemory()
    with peak.watch():
        data = ray.data.read_parquet(str(folder / "source.parquet")).map_batches(lambda batch: batch)
        data.write_parquet(str(folder / "sink"))
    found = sum(one.num_rows for one in map(pq.read_metadata, (folder / "sink").glob("*.parquet")))
    if found != _NEW_ROWS:
        raise RuntimeError(f"{_NEW_ROWS} rows must be written, got {found}")
    return peak.bytes


def _sink(rows: int, folder: Path) -> ShardFolder:
    return ShardFolder(str(folder), JobManifest("0", "", "", rows + _NEW_ROWS, _SHARD_ROWS))


def _prepare_job(rows: int, folder: Path) -> None:
    """A source, and all shards but one."""
    ids = _ids(rows + _NEW_ROWS)
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": one}) + "\n" for one in ids)
    sink = _sink(rows, folder)
    for shard in range(rows // _SHARD_ROWS):
        records = [{"row": row, "id": ids[row]} for row in sink.manifest.rows_of(shard)]
        sink.results_file(shard).write_bytes(JsonLinesShards().encode(records))


def _resume_job(rows: int, folder: Path, id_column: str | None) -> int:
    peak = _PeakMemory()
    with peak.watch():
        summary = JobSource([str(folder / "rows.jsonl")], id_column).scan(_SHARD_ROWS)
        missing = _sink(rows, folder).check_shards().missing
    if (summary.rows, len(missing)) != (rows + _NEW_ROWS, _NEW_ROWS // _SHARD_ROWS):
        raise RuntimeError(f"one shard must be missing, got {missing}")
    return peak.bytes


def _main() -> None:
    side, rows, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    resumes: dict[str, Callable[..., Any]] = {
        "ray": _resume_ray,
        "job": lambda *work: _resume_job(*work, id_column=None),
        "job-ids": lambda *work: _resume_job(*work, id_column="id"),
    }
    print(json.dumps({"bytes": resumes[side](rows, folder)}))


if __name__ == "__main__":
    _main()
