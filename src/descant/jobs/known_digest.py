"""The digest of a job whose model has not changed, known without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import descant
from descant.core.atomic_file import write_text
from descant.jobs.description import JobDescription
from descant.jobs.job_messages import encode_job

__all__ = ["KnownDigest"]

NAME: Final = ".job.json"
# These change no result, or are in the manifest by themselves.
_NOT_COMPARED: Final = (
    *("source", "sink", "shard_rows", "sink_format", "window", "max_in_flight", "workers", "cpus_per_worker"),
    *("dedup", "report"),
)


class KnownDigest:
    """A note in the sink: the digest of the job, and the state of the files that it was computed from.

    A file is unchanged by its size, its number, and both times of its last change, of which a user can set
    back only one. Anything else, a model on the Hub, or a watermark, whose key must not be guessed from a
    note, makes the digest unknown: then the model is loaded.
    """

    def __init__(self, job: JobDescription) -> None:
        self._path = Path(job.sink) / NAME
        self._state: str | None = None
        if os.path.exists(job.model) and job.generation_config.watermarking_config is None:
            values = {name: value for name, value in encode_job(job).items() if name not in _NOT_COMPARED}
            scorer = None if job.select is None else job.select.digest_parts()
            parts = [descant.__version__, values, scorer, sorted(_file_states(job.model))]
            text = json.dumps(parts, sort_keys=True, default=repr)
            self._state = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self) -> str | None:
        """The digest; None: it is unknown."""
        try:
            found = json.loads(self._path.read_bytes())
            digest = found["job"] if found["state"] == self._state else None
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        return digest if isinstance(digest, str) else None

    def write(self, digest: str) -> None:
        """Note the digest."""
        if self._state is not None and self.read() != digest:
            write_text(self._path, json.dumps({"state": self._state, "job": digest}) + "\n")


def _file_states(model: str) -> Iterator[list[str | int]]:
    """The names and states of the files of a model: a folder, or one file."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(model) for name in names]
    for path in files or [model]:
        found = os.stat(path)
        yield [path, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
