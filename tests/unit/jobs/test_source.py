"""Rows of JSON lines and CSV, their ids, prompts and parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from descant import GenerationConfig, InputError
from descant.jobs.job_model import JobModel, row_seed
from descant.jobs.source import JobSource
from descant.jobs.workers.job_worker import JobWorker


def test_files_follow_each_other_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n  \n{"x": 2}', encoding="utf-8")
    (tmp_path / "b.csv").write_bytes(b'\xef\xbb\xbfx,y\r\n1,"a\nb"\r\n\r\n2,c,d\r\n\xff,e\r\n3,f\r\n')
    source = JobSource([str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv")])
    rows = list(source)
    assert [row.index for row in rows] == [row.id for row in rows] == list(range(6))
    good = [dict(row.data) for row in rows if row.error is None]
    assert good == [{"x": 1}, {"x": 2}, {"x": "1", "y": "a\nb"}, {"x": "3", "y": "f"}]
    assert "2 fields" in str(rows[3].error)
    assert "UTF-8" in str(rows[4].error)
    assert source.scan(2).rows == 6


def test_a_broken_quotation_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x\n1\n"2"3\n4\n', encoding="utf-8")
    rows = list(JobSource([str(tmp_path / "a.csv")]))
    assert [row.error is None for row in rows] == [True, False, True]


@pytest.mark.parametrize("text", ["", "x,x\n1,2\n"])
def test_a_file_of_csv_needs_a_header(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match="must have a header of different names"):
        JobSource([str(tmp_path / "a.csv")]).scan(10)


def test_ids_are_unique_and_present(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"k": 1}\n{"k": "1"}\n{"k": null}\n{"k": true}\n{"k": ""}\nbad\n')
    rows = list(JobSource([str(path)], "k"))
    assert [row.id for row in rows] == [1, "1", None, None, None, None]
    assert [row.error is None for row in rows] == [True, True, False, False, False, False]
    path.write_text('{"k": 1}\n{"k": 2}\n{"k": 1}\n')
    with pytest.raises(InputError, match="rows 0 and 2 share one"):
        JobSource([str(path)], "k").scan(10)


# ------------------------------------------------------------------------ requests
def requests_of(job, loaded):
    """The requests of a job's rows, or why there are none."""
    with JobWorker(JobModel(job, *loaded)) as worker:
        made = worker._requests
        found = []
        for row in JobSource(job.source_files, job.id_column):
            try:
                found.append(made.build(row))
            except InputError as error:
                found.append(str(error))
    return found


def test_a_prompt_is_a_text_ids_or_a_template(make_job, loaded) -> None:
    tokenizer = loaded[1]
    ids = tokenizer("a ship")["input_ids"]
    rows = [
        {"prompt": "a ship"},
        {"ids": ids},
        {"prompt": 3},
        {"ids": [10**6]},
        {},
        {"prompt": "a", "ids": ids},
    ]
    first, second, *others = requests_of(make_job(rows, template=None), loaded)
    assert first.prompt.tolist() == second.prompt.tolist() == ids
    assert [one.split(",")[0][:30] for one in others] == [
        "`prompt` must be text", "`ids` must be a non-empty list", "`prompt` must be in one of the",
        "`prompt` must be in one of the",
    ]  # fmt: skip
    [filled] = requests_of(make_job([{"x y": 1.5, "b": "{b}"}], template="{{{x y}}} {b}"), loaded)
    assert tokenizer.decode(filled.prompt) == "{1.5} {b}"


def test_messages_need_a_chat_template(make_job, loaded, monkeypatch) -> None:
    model, tokenizer = loaded
    rows = [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": []}, {"messages": "hi"}]
    refused = requests_of(make_job(rows, template=None), loaded)
    assert "chat template" in refused[0]
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    first, second, third = requests_of(make_job(rows, template=None), (model, tokenizer))
    assert tokenizer.decode(first.prompt) == "[hi]"
    assert "non-empty list" in second
    assert "non-empty list" in third
    [chat] = requests_of(make_job([{"text": "ho"}], template="{text}!", chat=True), (model, tokenizer))
    assert tokenizer.decode(chat.prompt) == "[ho!]"


def test_a_row_overrides_parameters(make_job, loaded) -> None:
    rows = [
        {"prompt": "a", "temperature": 0.5, "top_k": 3},
        {"prompt": "a", "generation_config": {"temperature": 0.25, "seed": 9}},
        {"prompt": "a", "generation_config": 3},
        {"prompt": "a", "generation_config": {"compile_config": {"mode": "default"}}},
        {"prompt": "a", "temperature": None},
    ]
    job = make_job(rows, template=None, override_columns=["temperature"], seed=4)
    first, second, third, fourth, last = requests_of(job, loaded)
    assert (first.generation_config.temperature, first.generation_config.seed) == (0.5, row_seed(4, 0))
    assert first.generation_config.source("top_k") != "call"  # a column that the job does not name
    assert (second.generation_config.temperature, second.generation_config.seed) == (0.25, 9)
    assert third.startswith("`generation_config` must be an object")
    assert fourth.startswith("`compile_config` applies to all rows")
    assert last.generation_config.temperature == GenerationConfig().temperature


def test_fields_of_csv_are_json_where_data_are_expected(make_job, loaded, tmp_path) -> None:
    path = tmp_path / "rows.csv"
    config = json.dumps({"top_k": 5}).replace('"', '""')
    path.write_text(f'ids,temperature,generation_config\n"[5, 6]",0.5,"{config}"\n"[7]",,\n')
    job = make_job(source=str(path), template=None, override_columns=["temperature"])
    first, second = requests_of(job, loaded)
    assert first.prompt.tolist() == [5, 6]
    assert (first.generation_config.temperature, first.generation_config.top_k) == (0.5, 5)
    assert second.prompt.tolist() == [7]
    assert second.generation_config.source("temperature") == "default"
