"""Messages between a job and its workers: a job as JSON, groups of shards, and what was done."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from descant.config.generation_config import GenerationConfig
from descant.jobs.description import JobDescription
from descant.jobs.row_position import RowPosition
from descant.jobs.shard_folder import JobManifest
from descant.jobs.shard_group import ShardGroup

__all__ = [
    "decode_group",
    "decode_job",
    "decode_manifest",
    "encode_group",
    "encode_job",
    "encode_manifest",
    "job_values",
]


def encode_job(job: JobDescription) -> dict[str, Any]:
    """A job in JSON types, with absolute paths: a worker may run in another folder."""
    values = {one.name: getattr(job, one.name) for one in dataclasses.fields(JobDescription)}
    values["source"] = [os.path.abspath(path) for path in job.source_files]
    values["sink"] = os.path.abspath(job.sink)
    if os.path.isdir(job.model):  # else it is a name on the Hub
        values["model"] = os.path.abspath(job.model)
    select = None if job.select is None else dataclasses.asdict(job.select.with_absolute_path())
    config = json.loads(job.generation_config.to_json_string())
    options = dict(job.engine_options)
    return {**values, "generation_config": config, "select": select, "engine_options": options}


def decode_job(values: Mapping[str, Any]) -> JobDescription:
    """The job of `encode_job`."""
    return JobDescription(**job_values(values))


def job_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job of `encode_job`."""
    return {**values, "generation_config": GenerationConfig.from_dict(values["generation_config"])}


def encode_group(group: ShardGroup) -> list[Any]:
    """A group in JSON types."""
    return [group.first, group.num_shards, list(group.position)]


def decode_group(values: list[Any]) -> ShardGroup:
    """The group of `encode_group`."""
    first, num_shards, position = values
    return ShardGroup(first, num_shards, RowPosition(*position))


def encode_manifest(manifest: JobManifest) -> dict[str, Any]:
    """A manifest in JSON types."""
    return dataclasses.asdict(manifest)


def decode_manifest(values: Mapping[str, Any]) -> JobManifest:
    """The manifest of `encode_manifest`."""
    return JobManifest(**values)
