"""`python -m bench.jobs checkpoint`: the memory of a resume, by Ray Data's CheckpointConfig and by a job.

Ray Data keeps the id of each row that is done. Before it starts, a task sorts all of them, and each of up to
ten actors that filter the source has them all. A job looks at the shards that are there; with ids it keeps
digests of 8 bytes, to find equal ones. Each figure is the peak memory of a process of a resume, above that of
a resume of a few rows. The sum over all processes of Ray has more noise than that: as many of them run as it
finds useful.
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

from bench.process_time import process_family
from descant.jobs.shards import JobManifest, ShardFolder
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
    few = _peaks(_FEW)
    width = max(map(len, few)) + 3
    print("bytes a row that is done" + "".join(f"{name:>{width}}" for name in few))
    for rows in args.rows:
        found = _peaks(rows)
        sizes = [(found.get(name, 0) - least) / (rows - _FEW) for name, least in few.items()]
        print(f"{rows:24,}" + "".join(f"{size:{width}.1f}" for size in sizes), flush=True)


def _peaks(rows: int) -> dict[str, int]:
    """The peak memory of each part of a resume."""
    found: dict[str, int] = {}
    for side, prepare in (("ray", _prepare_ray), ("job", _prepare_job), ("job with ids", _prepare_job)):
        with tempfile.TemporaryDirectory() as folder:
            prepare(rows, Path(folder))
            command = [sys.executable, "-m", "bench.job_checkpoint", side, str(rows), folder]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=_environment()).stdout
        found |= json.loads(output.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    return ray_environment({"PYTHONPATH": os.pathsep.join(one or os.getcwd() for one in sys.path)})


class _PeakMemory:
    """The peaks of the memory of this process and its descendants, by a thread that looks often."""

    def __init__(self) -> None:
        self.shared = 0  # by all together
        self.own = 0  # by this process
        self.by_title: dict[str, int] = {}  # by other processes, of which Ray changes the title
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
            shared = 0
            for pid in process_family(os.getpid()):
                own, part = _memory_of(pid)
                shared += part
                if pid == os.getpid():
                    self.own = max(self.own, own)
                else:
                    title = _title_of(pid)
                    self.by_title[title] = max(self.by_title.get(title, 0), own)
            self.shared = max(self.shared, shared)
            if self._ended.wait(_PAUSE):
                return


def _memory_of(pid: int) -> tuple[int, int]:
    """The bytes of a process of its own, and its share of those in common with others, without files."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0  # it has ended
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes["Pss_Anon:"], sizes["Pss_Shmem:"]


def _title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").decode(errors="replace")
    except OSError:
        return ""


def _ids(rows: int) -> list[str]:
    return [f"row-{row:012}" for row in range(rows)]


def _prepare_ray(rows: int, folder: Path) -> None:
    """A dataset of a few rows, and a checkpoint of many others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "checkpoint").mkdir()
    pq.write_table(pa.table({"id": _ids(rows)}), folder / "checkpoint" / "done.parquet")
    pq.write_table(pa.table({"id": [f"new-{row}" for row in range(_NEW_ROWS)]}), folder / "source.parquet")


def _resume_ray(_: int, folder: Path) -> dict[str, int]:
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
    parts = {"Ray: filter actor": "CheckpointFilter", "Ray: sorting task": "convert_and_sort"}
    sizes = {
        name: max((size for title, size in peak.by_title.items() if text in title), default=0)
        for name, text in parts.items()
    }
    return {**sizes, "Ray: object store": peak.shared, "Ray: driver": peak.own}


def _sink(rows: int, folder: Path) -> ShardFolder:
    return ShardFolder(str(folder), JobManifest("0", "", "", rows + _NEW_ROWS, _SHARD_ROWS))


def _prepare_job(rows: int, folder: Path) -> None:
    """A source, and all shards but one."""
    ids = _ids(rows + _NEW_ROWS)
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": one}) + "\n" for one in ids)
    sink = _sink(rows, folder)
    sink.path.mkdir()
    for shard in range(rows // _SHARD_ROWS):
        records = [{"row": row, "id": ids[row]} for row in sink.manifest.rows_of(shard)]
        sink.write(shard, records, [])


def _resume_job(rows: int, folder: Path, id_column: str | None) -> dict[str, int]:
    peak = _PeakMemory()
    with peak.watch():
        summary = JobSource([str(folder / "rows.jsonl")], id_column).scan(_SHARD_ROWS)
        missing = _sink(rows, folder).check_shards().missing
    if (summary.rows, len(missing)) != (rows + _NEW_ROWS, _NEW_ROWS // _SHARD_ROWS):
        raise RuntimeError(f"one shard must be missing, got {missing}")
    return {"job" if id_column is None else "job with ids": peak.own}


def _main() -> None:
    side, rows, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    resumes: dict[str, Callable[..., dict[str, int]]] = {
        "ray": _resume_ray,
        "job": lambda *work: _resume_job(*work, id_column=None),
        "job with ids": lambda *work: _resume_job(*work, id_column="id"),
    }
    print(json.dumps(resumes[side](rows, folder)))


if __name__ == "__main__":
    _main()
