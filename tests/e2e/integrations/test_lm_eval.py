"""lm-eval with the backend `descant` beside its own: the same numbers, with fewer tokens fed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import descant
from descant.cli.evaluate import EvaluateCommand
from tests.support import pretrained
from tests.support.client_programs import ROOT, ClientEnvironment

PROGRAM = Path(__file__).parent / "lm_eval" / "compare.py"
CHOICES = ("stories", "letters", "answers", "words")
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lm_eval")


@pytest.fixture(scope="module")
def found(place):
    """What every backend returned, by run and task; the tasks are in the folder `place` then."""
    folder = pretrained.folder("stories15m").absolute()
    printed = ClientEnvironment(place).run("python", PROGRAM, folder, place, env=ENVIRONMENT, timeout=600)
    return json.loads(printed.splitlines()[-1])


def numbers(responses):
    """All numbers of nested responses, and all that says whether they are greedy."""
    values, flags = [], []
    waiting = list(responses)
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, list):
            waiting = [*one, *waiting]
        elif str(one) in ("True", "False"):
            flags.append(str(one))
        else:
            values.append(float(one))
    return values, flags


def check(ours, theirs):
    values, flags = numbers(ours["responses"])
    expected, expected_flags = numbers(theirs["responses"])
    assert values == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert flags == expected_flags
    assert len(values) == len(expected) > 2


def test_choices_have_the_numbers_of_batch_one_with_half_the_tokens(found):
    for name in ("descant", "seven"):
        for task in CHOICES:
            check(found[name][task], found["hf"][task])
            assert found[name][task]["scores"] == found["hf"][task]["scores"]
    fed, theirs = (sum(found[name][task]["tokens"] for task in CHOICES) for name in ("descant", "hf"))
    assert fed <= 0.5 * theirs
    assert found["descant"]["stories"]["forwards"] < 0.25 * found["hf"]["stories"]["forwards"]


def test_documents_are_scored_in_the_same_windows(found):
    for name, other in (("descant", "hf"), ("seven", "hf"), ("short", "hf short")):
        check(found[name]["long"], found[other]["long"])
    assert found["short"]["long"]["responses"] != found["descant"]["long"]["responses"]


def test_a_text_that_is_too_long_loses_its_start(found):
    check(found["short"]["stories"], found["hf short"]["stories"])
    assert found["short"]["told"]["responses"] == found["hf short"]["told"]["responses"]


def test_a_method_generates(found, place):
    told = {name: one["told"]["responses"] for name, one in found.items()}
    assert told["descant"] == told["seven"] == told["hf"]
    starts = [json.loads(line)["start"] for line in (place / "stories.jsonl").read_text().splitlines()]
    given = pretrained.load("stories15m")
    expected = []
    for start in starts:
        texts = descant.generate(
            given.model, [start], tokenizer=given.tokenizer, num_beams=3, length_penalty=0.6,
            max_new_tokens=12, stop_strings=[".", "\n"],
        ).texts  # fmt: skip
        expected.append([[texts[0].lstrip().split(".")[0].split("\n")[0]]])
    assert told["beams"] == expected != told["hf"]


def test_the_command_runs_the_harness(found, place):
    """By name, with fields of GenerationConfig; without the registry's help of a test."""
    clients, folder = ClientEnvironment(place), pretrained.folder("stories15m").absolute()
    model_args = f"pretrained={folder},dtype=float32,length_penalty=0.6,num_beams"
    tasks = (
        "--include_path",
        place,
        "--tasks",
        "told",
        "--output_path",
        place / "out",
        "--log_samples",
        "--device",
        "cpu",
    )
    program = ("python", "-m", "descant.cli", "eval", *tasks, "--model_args")
    clients.run(*program, f"{model_args}=3", env=ENVIRONMENT)
    [samples] = (place / "out").rglob("samples_told_*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda one: one["doc_id"])
    assert [line["resps"] for line in lines] == found["beams"]["told"]["responses"]
    with pytest.raises(AssertionError, match=r"num_beams.*must be"):
        clients.run(*program, f"{model_args}=0", env=ENVIRONMENT)


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    before = list(sys.argv)
    with pytest.raises(descant.MissingExtra, match=r"pip install descant\[eval\]"):
        EvaluateCommand(arguments=["--tasks", "told"]).run()
    assert sys.argv == before
