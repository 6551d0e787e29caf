"""The rows of a battery's jobs, and what must hold of its files."""

from __future__ import annotations

import json
from pathlib import Path

from descant import GenerationConfig
from descant.jobs import Job
from descant.jobs.shards import SHARD_DIGESTS
from tools.battery.subject import model_folder

__all__ = ["are_expected", "battery_job", "files_of", "rows_once"]

SHARD_ROWS = 10
BAD_EVERY = 17  # rows that cannot be parsed


def battery_job(folder: Path, rows: int) -> Job:
    """A job whose prompts have different lengths, with some rows that cannot be parsed."""
    lines = [
        "{torn"
        if row % BAD_EVERY == BAD_EVERY - 1
        else json.dumps({"text": "a ship " * (row * 7 % 11 + 1), "temperature": 0.5 + row % 3})
        for row in range(rows)
    ]
    source = folder / "rows.jsonl"
    source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return Job(
        model=str(model_folder()),
        source=str(source),
        sink=str(folder / "sink"),
        template="Tell of {text}:",
        generation_config=GenerationConfig(do_sample=True, max_new_tokens=12),
        override_columns="temperature",
        shard_rows=SHARD_ROWS,
        report=False,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name, without those that are being written."""
    if not folder.exists():
        return {}
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }


def are_expected(files: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """Whether the files of a run that was killed are those of one that was not, as far as they are there."""
    noted = files.get(SHARD_DIGESTS, b"")  # zeros for shards that are not there
    are_digests = all(one in (0, other) for one, other in zip(noted, expected[SHARD_DIGESTS], strict=False))
    others = {name: data for name, data in files.items() if name != SHARD_DIGESTS}
    return are_digests and others.items() <= expected.items()


def rows_once(files: dict[str, bytes], rows: int) -> bool:
    """Whether each row is in the results or in the errors, and in one of them once."""
    found = [
        json.loads(line)["row"]
        for name, data in files.items()
        if ".jsonl" in name
        for line in data.splitlines()
    ]
    return sorted(found) == list(range(rows))
