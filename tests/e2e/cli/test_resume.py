"""A run over many lines that was interrupted goes on where its output ends, and only there."""

from __future__ import annotations

import json
import os

import pytest

from descant import GenerationConfig
from descant.core.atomic_file import lock_file

ROWS = [
    {"prompt": "Once upon a time", "id": number, "seed": number, "do_sample": True} for number in range(6)
]
OPTIONS = ("--max-new-tokens", 3, "--batch-size", 2)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def run(descant, stories, source, tmp_path):
    """Run the command; its exit code, its messages and the output file."""

    def run(*options, model=stories, **extra):
        target = tmp_path / "out.jsonl"
        result = descant(
            "generate", model, "--input", source, "--output", target, *OPTIONS, *options, **extra
        )
        return result.exit_code, result.stderr, target.read_bytes()

    return run


@pytest.fixture
def whole(run):
    code, errors, whole = run()
    assert (code, errors) == (0, "")
    return whole


@pytest.mark.parametrize("rows", [0, 1, 4, 6])
@pytest.mark.parametrize("torn", [b"", b'{"prompt": "Once', b"{"])
def test_what_is_there_is_kept(run, whole, tmp_path, rows, torn):
    kept = b"".join(whole.splitlines(keepends=True)[:rows])
    (tmp_path / "out.jsonl").write_bytes(kept + torn)
    code, errors, found = run()
    assert (code, found) == (0, whole)
    assert errors == (f"{rows} lines are there already\n" if rows else "")


def test_rows_are_not_made_again(run, whole, tmp_path):
    first, *rest = whole.splitlines(keepends=True)
    edited = first.replace(b"Once upon", b"Not upon", 1)
    (tmp_path / "out.jsonl").write_bytes(edited + b"".join(rest[:2]))
    assert run()[2] == edited + b"".join(rest)


def refused(run, before, *options, **extra):
    code, errors, found = run(*options, **extra)
    assert code == 2
    assert "--overwrite" in errors
    assert found == before
    return errors


def test_another_run_is_refused(run, whole, source, talker, tmp_path):
    assert "of the same lines, model and options" in refused(run, whole, "--repetition-penalty", 1.5)
    assert "a row of another run" in refused(run, whole, "--chat", model=talker)
    GenerationConfig(repetition_penalty=1.2).save_pretrained(tmp_path / "config")
    refused(run, whole, "--config", tmp_path / "config")
    source.write_text(source.read_text().replace('"id": 2', '"id": 22'))
    assert "in line 3" in refused(run, whole)
    source.write_text("")
    assert "more rows than lines" in refused(run, whole)
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert run("--overwrite", "--repetition-penalty", 1.5)[:2] == (0, "")


def test_another_file_is_refused(run, whole, tmp_path):
    for other in (b"some text\n", b'{"prompt": "a", "completions": []}\n', whole + b"\n"):
        (tmp_path / "out.jsonl").write_bytes(other)
        assert "wrote (line" in refused(run, other)
    assert run("--overwrite") == (0, "", whole)


def test_lines_that_failed_count_as_done(run, source):
    source.write_text('{"prompt": 5}\n' + source.read_text())
    code, errors, found = run()
    assert (code, errors) == (1, 'error: 1 of 7 lines failed, each says why in its "error"\n')
    code, errors, again = run()
    assert (code, again) == (1, found)
    assert "1 of 7 lines failed" in errors


def test_two_runs_do_not_share_a_file(run, whole, tmp_path):
    with open(tmp_path / "out.jsonl", "rb") as other:
        assert lock_file(other.fileno()) is True
        code, errors, found = run("--overwrite")
    assert (code, found) == (2, whole)
    assert "must not be in use by another run" in errors


def test_a_pipe_is_no_file(descant, stories, source):
    result = descant("generate", stories, "--input", source, "--output", os.devnull, *OPTIONS)
    assert (result.exit_code, result.stderr) == (0, "")
    assert '"run"' not in descant("generate", stories, "--input", source, *OPTIONS).stdout
    result = descant("generate", stories, "--input", source, "--overwrite", *OPTIONS)
    assert "--overwrite has no use without a file as --output" in result.stderr


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("num_beam", "num_beams"),
        ("top-k", "top_k"), ("topP", "top_p"), ("stop", "stop_strings"), ("message", "messages"),
    ],
)  # fmt: skip
def test_a_misspelt_name_is_refused(descant, stories, name, meant):
    rows = [{"prompt": "a"}, {"prompt": "a", name: 5}]
    text = "\n" + "".join(json.dumps(row) + "\n" for row in rows)
    result = descant("generate", stories, "--input", "-", "--max-new-tokens", 1, input=text)
    good, bad = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == 1
    assert "completions" in good
    assert bad["error"].startswith(f"line 3: `{name}` must be a generation parameter")
    assert bad["error"].endswith(f"did you mean `{meant}`?")


def test_a_key_in_a_line_is_not_written_back(run, source, tmp_path):
    key = 918273645546372819
    source.write_text(json.dumps({"prompt": "a", "watermarking_config": {"hashing_key": key, "bias": 1.0}}))
    code, errors, found = run()
    assert (code, errors) == (0, "")
    assert json.loads(found)["watermarking_config"] == {"hashing_key": "(hidden)", "bias": 1.0}
    assert run()[2] == found
    source.write_text(
        json.dumps({"prompt": "a", "watermarking_config": {"hashing_key": key + 2, "bias": 1.0}})
    )
    refused(run, found)
