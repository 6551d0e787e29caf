"""`descant doctor`: what it reports, what it leaves out, and its exit code."""

from __future__ import annotations

import functools
import getpass
import json
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from descant.cli.doctor import checks as laws
from descant.cli.doctor import checks as parity
from descant.cli.doctor import command, device_costs, speed
from descant.cli.doctor import report as machine
from descant.cli.doctor import speed as vllm_process
from descant.cli.doctor.checks import CheckedModel, logit_rounding
from descant.cli.doctor.report import CheckRow, DoctorReport, Fact
from descant.testing import toy


def only(*names: str) -> list[str]:
    """The options that leave these sections."""
    return ["--skip", ",".join(name for name in command.SECTIONS if name not in names), "--device", "cpu"]


@pytest.fixture
def subject() -> CheckedModel:
    return CheckedModel("tiny", toy(), lambda name: toy().to(getattr(torch, name)))


def mute(_: str) -> None:
    """Progress that nobody reads."""


# ------------------------------------------------------------------------ the report
def test_a_quick_report(descant, tmp_path):
    files = {name: tmp_path / f"report.{name}" for name in ("md", "json")}
    options = ["--quick", *only("machine", "fast-paths", "laws", "parity")]
    result = descant("doctor", *options, "--output", files["md"], "--json", files["json"])
    assert result.exit_code == 0, result.stdout
    assert "laws, tiny: seeded sampling" in result.stderr
    found = json.loads(files["json"].read_text())
    assert {name: type(value).__name__ for name, value in found.items()} == {
        "format": "int", "descant": "str", "failed": "int", "clock": "str", "models": "dict",
        "machine": "dict", "fast_paths": "list", "laws": "list", "parity": "list", "half": "list",
        "bench": "list", "device": "list",
    }  # fmt: skip
    assert (found["format"], found["failed"], found["half"], found["bench"]) == (1, 0, [], [])
    assert [row["check"] for row in found["laws"]] == list(laws.LAWS)
    statuses = {row["check"]: (row["status"], row["detail"]) for row in found["laws"]}
    assert statuses.pop("prepacked weights") == ("skipped", "the weights are too small to gain from it")
    assert statuses.pop("compiled step") == ("skipped", "the step is compiled by default on CUDA only")
    left_out = "left out by --quick: layers take seconds to compile"
    assert statuses.pop("compiled layers") == ("skipped", left_out)
    assert set(statuses.values()) == {("passed", "")}
    assert {row["check"]: row["status"] for row in found["parity"]} == dict.fromkeys(
        [case.name for case in parity.PARITY_CASES], "passed"
    )
    assert next(row["path"] for row in found["fast_paths"] if row["state"] == "on") == "packed forwards"
    assert f"torch {torch.__version__}" in found["machine"]["packages"]
    assert found["machine"]["instruction set"] == torch.backends.cpu.get_cpu_capability()
    assert found["models"]["tiny"].startswith("LlamaForCausalLM, 0.0 M parameters, model_type llama")
    for text in (result.stdout, files["md"].read_text()):
        for part in (
            "seeded sampling",
            "beams 4",
            "packed forwards",
            "checks: 18 passed, 0 failed, 3 skipped",
        ):
            assert part in text
        assert platform.node() not in text


def test_a_model_of_the_user_has_no_name_in_it(descant, stories, tmp_path):
    file = tmp_path / "report.json"
    result = descant("doctor", "--model", stories, *only("machine", "fast-paths"), "--json", file)
    assert result.exit_code == 0
    found = json.loads(file.read_text())
    assert re.match(r"LlamaForCausalLM, [\d.]+ M parameters", found["models"]["model"])
    assert {row["model"] for row in found["fast_paths"]} == {"tiny", "model"}
    for text in (file.read_text(), result.stdout):
        assert "stories" not in text
        assert str(Path(stories).parent) not in text


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("cannot open /home/ann/models/x.bin: no", "cannot open <path>: no"),
        (r"C:\Users\ann\x.bin is locked", "<path> is locked"),
        ("see ~/models, please", "see <path>, please"),
        ("the folder is secret/model here", "the folder is <path> here"),
        ("1.5 tokens/s and 3 / 4", "1.5 tokens/s and 3 / 4"),
        (f"in {Path.home()}", "in <path>"),
    ],
)
def test_paths_are_left_out(text, scrubbed):
    report = DoctorReport(laws=[CheckRow("m", "c", "failed", text)], private=["secret/model"])
    assert f"failed  {scrubbed}\n" in report.text()
    assert f"| failed | {scrubbed} |\n" in report.markdown()
    assert json.loads(report.json())["laws"][0]["detail"] == scrubbed


def test_a_table_of_markdown_has_no_broken_cells():
    report = DoctorReport(machine=[Fact("name", "one | two\nthree")])
    assert "| name | one \\| two three |" in report.markdown()
    assert "  name  one | two three\n" in report.text()


def test_facts_name_no_user_and_no_machine():
    text = " ".join(f"{fact.name} {fact.value}" for fact in machine.machine_facts())
    assert all(word not in text for word in (platform.node(), str(Path.home()), str(Path.cwd())))
    assert len(getpass.getuser()) < 4 or not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
    assert sys.version.split()[0] in text


# ------------------------------------------------------------------------ the cost of a step
def test_the_cost_of_a_step_is_counted_and_timed(descant, monkeypatch, tmp_path):
    """A CPU has no reads and copies; a method that fails leaves the others their rows."""
    broken = device_costs.DeviceCase({"num_beams": 4, "penalty_alpha": 0.6})
    cases = {"greedy": device_costs.METHODS["greedy"].with_prompts(2), "broken": broken}
    monkeypatch.setattr(device_costs, "METHODS", cases)
    file = tmp_path / "report.json"
    result = descant("doctor", *only("device"), "--json", file)
    assert result.exit_code == 0
    greedy, failed = json.loads(file.read_text())["device"]
    assert greedy["launches"] > 0 < greedy["network"]
    assert greedy["ms_per_step"] > 0
    assert greedy["reads"] is greedy["copies"] is greedy["waits"] is greedy["kernels"] is None
    assert failed["ms_per_step"] is None
    assert "penalty_alpha" in failed["detail"]
    assert "device, a steady step" in result.stdout


# ------------------------------------------------------------------------ failures
def test_a_law_that_fails_has_its_message_and_exit_code_1(descant, monkeypatch, tmp_path):
    def broken(*_: Any) -> None:
        raise AssertionError("request 2 in a batch of 4, rotated: other tokens\n  alone [1]\n  there [2]")

    def unexpected(*_: Any) -> None:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(laws, "LAWS", {"a law": broken, "another": unexpected, "third": lambda *_: None})
    file = tmp_path / "report.md"
    result = descant("doctor", *only("laws"), "--output", file)
    assert result.exit_code == 1
    message = "request 2 in a batch of 4, rotated: other tokens alone [1] there [2]"
    assert f"| tiny | a law | failed | {message} |" in file.read_text()
    assert "| tiny | another | failed | RuntimeError: no kernel for this device |" in file.read_text()
    assert "checks: 1 passed, 2 failed, 0 skipped" in result.stdout


def test_a_real_law_fails_where_rows_depend_on_each_other(monkeypatch, subject):
    """Logits that depend on the number of rows are a defect that the laws must find."""
    forward = subject.model.forward

    @functools.wraps(forward)  # its signature says how the model is fed
    def shifted(*given: Any, **named: Any) -> Any:
        output = forward(*given, **named)
        output.logits = output.logits.roll(output.logits.shape[0] - 1, -1)
        return output

    monkeypatch.setattr(subject.model, "forward", shifted)
    monkeypatch.setattr(laws, "LAWS", {"batch": laws._batch})
    [row] = laws.run_laws(subject, laws.LawSize.quick(), mute)
    assert row.status == "failed"
    assert "request" in row.detail


def test_other_tokens_than_those_of_transformers_fail_with_their_place(monkeypatch, subject):
    monkeypatch.setattr(parity, "PARITY_CASES", parity.PARITY_CASES[:1])
    generate = parity.generate

    def other(*given: Any, **named: Any) -> Any:
        ids = generate(*given, **named)
        ids[0, -1] = (ids[0, -1] + 1) % 61
        return ids

    monkeypatch.setattr(parity, "generate", other)
    [row] = parity.run_parity(subject, 4, mute)
    assert row.status == "failed"
    assert row.detail.startswith("row 0 differs from new token 3 on: ")
    half = replace(subject, model=subject.model.bfloat16())
    [row] = parity.run_parity(half, 4, mute)
    assert (row.status, row.detail) == ("passed", "0.750 of the tokens are equal, in half precision")


def test_what_transformers_does_not_offer_is_skipped(monkeypatch, subject):
    case = parity.ParityCase("old", (5,), {"num_beams": 2})
    monkeypatch.setattr(parity, "PARITY_CASES", (case,))

    def gone(**_: Any) -> None:
        raise ValueError("beams are gone")

    monkeypatch.setattr(subject.model, "generate", gone)
    [row] = parity.run_parity(subject, 4, mute)
    assert row.status == "skipped"
    assert row.detail.endswith("raises ValueError: beams are gone")


def test_checks_that_do_not_apply_are_skipped_with_the_reason(monkeypatch, subject, tiny):
    monkeypatch.setattr(laws, "LAWS", {"batch": laws._batch})
    monkeypatch.setattr(parity, "PARITY_CASES", parity.PARITY_CASES[:1])
    half = replace(subject, model=subject.model.bfloat16())
    encoder = replace(subject, model=tiny("bart").model)
    rows = [*laws.run_laws(half, laws.LawSize.quick(), mute), *laws.run_laws(encoder, laws.LawSize(), mute)]
    rows += parity.run_parity(encoder, 4, mute)
    assert [row.status for row in rows] == ["skipped"] * 3
    assert "float32" in rows[0].detail
    assert all("without an encoder" in row.detail for row in rows[1:])
    [row] = speed.run_speed(encoder, speed.SpeedSize.quick(), False, mute)
    assert (row.ms_per_token, "without an encoder" in row.detail) == (None, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--skip", "bench,lows"), "--skip must be one of machine, fast-paths, laws"),
        (("--device", "abacus"), "--device must be an available device"),
        (("--model", "./nowhere"), "--model must be a folder that exists"),
    ],
)
def test_mistakes_of_the_caller_exit_2(descant, options, message):
    result = descant("doctor", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_report_that_cannot_be_written_is_still_printed(descant, tmp_path):
    result = descant("doctor", *only("machine"), "--json", tmp_path / "no" / "report.json")
    assert (result.exit_code, "instruction set" in result.stdout) == (2, True)
    assert "--json must be a file that can be written" in result.stderr


# ------------------------------------------------------------------------ shares and times
def test_half_precision_is_a_share(monkeypatch, subject):
    monkeypatch.setattr(parity, "HALF_CASES", parity.HALF_CASES[:1])
    rows = list(parity.run_half(subject, 4, mute))
    assert [(row.dtype, row.check) for row in rows] == [
        ("bfloat16", "greedy, 1 prompt"),
        ("float16", "greedy, 1 prompt"),
    ]
    assert all(row.share is not None and 0.5 <= row.share <= 1 for row in rows)

    def fail(_: str) -> Any:
        raise RuntimeError("out of memory")

    rows = list(parity.run_half(replace(subject, load=fail), 4, mute))
    assert [(row.share, row.detail) for row in rows] == [(None, "RuntimeError: out of memory")] * 2


def test_times_of_both_in_every_case(monkeypatch, subject):
    monkeypatch.setattr(vllm_process, "find_spec", lambda _: None)
    rows = list(speed.run_speed(subject, speed.SpeedSize(3, 2, 60.0), True, mute))
    assert [(row.case, row.implementation) for row in rows[:-1]] == [
        (case.name, name) for case in speed.SPEED_CASES for name in ("descant", "transformers")
    ]
    assert all(row.ms_per_token and row.speedup and row.repeats == 2 for row in rows[:-1])
    assert {row.speedup for row in rows if row.implementation == "transformers"} == {1.0}
    assert {row.tokens for row in rows[:-1]} == {"same"}
    assert (rows[-1].implementation, rows[-1].ms_per_token, rows[-1].detail) == (
        "vllm",
        None,
        "not installed",
    )


FAKE_VLLM = """
import os, types
assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
class SamplingParams:
    def __init__(self, **given):
        assert given["temperature"] == 0 and given["ignore_eos"]
        self.size = given["max_tokens"]
class LLM:
    def __init__(self, model, dtype, max_model_len, **_):
        assert (model, dtype, max_model_len) == ("owner/model", "float32", 35), (model, dtype, max_model_len)
    def generate(self, prompts, params, use_tqdm):
        one = types.SimpleNamespace(token_ids=[5] * (params.size - MISSING))
        return [types.SimpleNamespace(outputs=[one]) for _ in prompts]
"""


@pytest.mark.parametrize("missing", [0, 1])
def test_vllm_runs_in_a_process_of_its_own(monkeypatch, subject, tmp_path, missing):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("MISSING", str(missing)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(vllm_process, "find_spec", lambda _: True)
    monkeypatch.setattr(speed, "SPEED_CASES", speed.SPEED_CASES[:1])
    own = replace(subject, folder="owner/model")
    *_, row = speed.run_speed(own, speed.SpeedSize(3, 2), True, mute)
    assert row.implementation == "vllm"
    if missing:
        assert (row.ms_per_token, row.detail) == (None, "ended with status 1: AssertionError: {2}")
    else:
        assert (row.case, row.repeats, row.detail) == ("greedy 1", 2, "")
        assert row.ms_per_token is not None
    [row] = speed._vllm_rows(subject, speed.SpeedSize(3, 2), {})
    assert row.detail.startswith("the tiny model has heads that are too small")


# ------------------------------------------------------------------------ prompts and rounding
def test_the_tolerance_is_what_rounding_changes_in_plain_forwards(subject, tiny):
    assert 0 < logit_rounding(subject.model) < 1e-4
    assert logit_rounding(tiny("bart").model) == 0
    assert subject.tolerance == 1e-4
    assert replace(subject, rounding=0.01).tolerance == pytest.approx(0.04)
