"""Descriptions of jobs: what a TOML file may hold, and every refusal with its advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from descant import ConfigError, GenerationConfig, InputError
from descant.jobs import Job
from descant.jobs.description import JobDescription, encode_job, job_values

WHOLE = """
model = "toy"
source = ["a.jsonl", "b.csv"]
sink = "out"
template = "Translate: {text}"
override_columns = "temperature"
seed = 7

[generation_config]
do_sample = true
max_new_tokens = 5
"""
REQUIRED = {"model": "toy", "source": "a.jsonl", "sink": "out"}


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_and_code_give_equal_jobs(tmp_path: Path) -> None:
    job = Job.from_toml(write(tmp_path, WHOLE))
    assert job == Job(
        model="toy",
        source=("a.jsonl", "b.csv"),
        sink="out",
        template="Translate: {text}",
        override_columns=("temperature",),
        seed=7,
        generation_config=GenerationConfig(do_sample=True, max_new_tokens=5),
    )
    assert job.source_files == ("a.jsonl", "b.csv")
    with pytest.raises(AttributeError):
        job.seed = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('templat = "x"', "`templat` is not a key of a job, got 'x': did you mean `template`?"),
        ("qqq = 1", "`qqq` is not a key of a job, got 1: use model, source, sink"),
        ("generation_config = 3", "`generation_config` must be a table, got 3"),
        ("generation_config.top_q = 3", "`top_q` is not a generation parameter, got 3: did you mean `top_"),
        ("generation_config.self = 3", "`self` is not a generation parameter, got 3"),
        ("seed = ", "`job` must be a TOML file"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, f'model = "m"\nsource = "a.jsonl"\nsink = "s"\n{line}\n')
    with pytest.raises((InputError, ConfigError)) as caught:
        Job.from_toml(path)
    assert str(caught.value).startswith(message)


def test_a_file_without_a_required_key_or_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`sink` must be given in a job"):
        Job.from_toml(write(tmp_path, 'model = "m"\nsource = "a.jsonl"\n'))
    with pytest.raises(InputError, match="`job` must be a file that can be opened"):
        Job.from_toml(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "a.txt"}, "`source` must be files that end in .jsonl, .csv, .parquet"),
        ({"source": ()}, "`source` must name at least one file"),
        ({"source": 3}, "`source` must be text or a list of texts, got 3"),
        ({"model": ""}, "`model` must be text"),
        ({"sink": None}, "`sink` must be text"),
        ({"chat": 1}, "`chat` must be true or false, got 1"),
        ({"seed": True}, "`seed` must be an integer, got True"),
        ({"window": 0}, "`window` must be an integer >= 1, got 0"),
        ({"max_in_flight": 1.5}, "`max_in_flight` must be an integer >= 1, got 1.5"),
        ({"dtype": "int8"}, "`dtype` must be one of auto, float32"),
        ({"sink_format": "csv"}, "`sink_format` must be one of jsonl, parquet, got 'csv'"),
        ({"generation_config": {}}, "`generation_config` must be a GenerationConfig"),
        ({"generation_config": GenerationConfig(seed=1)}, "`seed` must be unset in the `generation_config`"),
        ({"generation_config": GenerationConfig(max_time=1.0)}, "`max_time` must be unset in a job"),
        ({"generation_config": GenerationConfig(logprobs=0)}, "`logprobs` is not supported in jobs"),
        ({"override_columns": "temperatur"}, "`override_columns` must name generation parameters, got 'temp"),
        ({"override_columns": "max_time"}, "`max_time` must be unset in a job"),
        ({"keep_columns": "row"}, "`keep_columns` must have other names than the output's own"),
        ({"template": "no column"}, "`template` must name a column"),
        ({"template": "{text"}, "`template` must have paired braces"),
        ({"template": "{text.upper}"}, "`template` must have the name of a column"),
        ({"template": "{text!r}"}, "`template` must have the name of a column"),
        ({"template": "{}"}, "`template` must have the name of a column"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ConfigError)) as caught:
        Job(**{**REQUIRED, **changes})
    assert str(caught.value).startswith(message)


def test_several_sequences_and_paths_are_accepted(tmp_path: Path) -> None:
    config = GenerationConfig(num_return_sequences=2, do_sample=True)
    job = Job(model=tmp_path, source=tmp_path / "a.csv", sink=tmp_path, generation_config=config)  # type: ignore[arg-type]
    assert (job.model, job.source, job.sink) == (str(tmp_path), (str(tmp_path / "a.csv"),), str(tmp_path))


def test_what_vllm_cannot_run_is_refused_at_once(make_job) -> None:
    with pytest.raises(ConfigError, match="`num_beams` must have its default on vLLM"):
        make_job(engine="vllm", generation_config=GenerationConfig(num_beams=2))
    config = GenerationConfig(do_sample=True, num_return_sequences=2)
    select = {"method": "best_of_n", "scorer": "mean_logprob"}
    with pytest.raises(InputError, match="`scorer` must be another with vLLM"):
        make_job(engine="vllm", generation_config=config, select=select)
    with pytest.raises(InputError, match="`engine_options` must be empty without vLLM"):
        make_job(engine_options={"max_num_seqs": 4})
    with pytest.raises(InputError, match="`engine` must be one of descant, vllm, auto"):
        make_job(engine="llama.cpp")
    with pytest.raises(InputError, match="`model` must be left out with vLLM"):
        make_job(engine="vllm").run(object(), object())


def test_a_job_survives_the_way_to_a_worker(make_job) -> None:
    job = make_job(engine="vllm", engine_options={"max_num_seqs": 4}, workers=3, cpus_per_worker=2)
    again = JobDescription(**job_values(json.loads(json.dumps(encode_job(job)))))
    assert encode_job(again) == encode_job(job)
    assert (again.workers, again.generation_config.given) == (3, job.generation_config.given)
