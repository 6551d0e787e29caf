"""The parts of the sweep: catalogue, models, comparison and resource limits."""

from __future__ import annotations

import json
import os
import resource
import signal
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import descant
from tools.sweep import __main__ as command
from tools.sweep import report, text, trial
from tools.sweep.catalogue import MEDIA, TASKS, TEXT, entries
from tools.sweep.process import Limits, each
from tools.sweep.small import BOS, EOS, FIRST, PAD, VOCABULARY, small
from tools.sweep.subject import Entry
from tools.sweep.trial import Differs, ModelOutput, check_equal

LLAMA = Entry("causal-lm", "llama", "LlamaForCausalLM")


# What is listed


def test_every_class_is_listed_once():
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))
    assert {entry.task for entry in entries()} <= set(TASKS)
    assert set(TEXT) | set(MEDIA) == set(TASKS)


def test_nothing_of_the_causal_mapping_is_left_out():
    listed = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)}
    assert listed <= {entry.name for entry in entries()}


def test_a_class_of_two_mappings_has_the_richer_task():
    found = {entry.name: entry for entry in entries()}
    assert found["LlamaForCausalLM"] == LLAMA
    assert found["Gemma3ForConditionalGeneration"].task == "image-text-to-text"
    assert found["Qwen2AudioForConditionalGeneration"].task == "multimodal-lm"
    assert found["AudioFlamingo3ForConditionalGeneration"].task == "multimodal-lm"


# What is built


def test_small_configs_are_small():
    config = small(CONFIG_MAPPING["llama"])
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (VOCABULARY, 32, 2)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (PAD, BOS, EOS)


@pytest.fixture(scope="module")
def llama():
    return text.subject(LLAMA)


def test_an_early_token_and_the_order_of_tokens_matter(llama):
    ids = llama.prompts[2]["input_ids"]
    other, turned = ids.clone(), ids.clone()
    other[0, 1] = FIRST if int(ids[0, 1]) != FIRST else FIRST + 1
    turned[0, 1], turned[0, 2] = ids[0, 2], ids[0, 1]
    with torch.no_grad():
        last, *changed = (llama.model(each).logits[0, -1] for each in (ids, other, turned))
    assert all(float((logits - last).abs().max()) > 0.05 * float(last.std()) for logits in changed)


# What is noticed


def _output(*tokens: int, logits: list[list[float]] | None = None) -> ModelOutput:
    return ModelOutput(torch.tensor([tokens]), torch.tensor(logits)[:, None] if logits else None)


def test_equal_masks_and_rounding_are_no_difference_and_hide_none():
    check_equal("x", _output(1, 2, logits=[[0.0, 1.0]]), _output(1, 2, logits=[[0.0, 1.00001]]))
    masked = _output(1, logits=[[float("-inf"), 1.0]])
    check_equal("x", masked, masked)
    for other in ([float("-inf"), 2.0], [0.0, 1.0]):
        with pytest.raises(Differs, match="logits of step 0 by "):
            check_equal("x", masked, _output(1, logits=[other]))


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (_output(1, 2, 3), "shape of the sequences"),
        (_output(1, 3, logits=[[0.0, 1.0]]), r"token at \[0, 1\], 2 expected, got 3"),
        (_output(1, 2, logits=[[0.0, 1.001]]), "logits of step 0 by 1.00e-03"),
        (_output(1, 2, logits=[[float("-inf"), 1.0]]), "logits of step 0 by inf"),
    ],
)
def test_differences_are_named(got, says):
    with pytest.raises(Differs, match=f"x: {says}"):
        check_equal("x", _output(1, 2, logits=[[0.0, 1.0]]), got)


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (torch.ones(1, 3, 2), r"shape of the latents, \[1, 2, 2\] expected, got \[1, 3, 2\]"),
        (None, "shape of the latents"),
        (torch.ones(1, 2, 2) * 1.001, "latents by 1.00e-03"),
        (torch.full((1, 2, 2), float("nan")), "latents by nan"),
    ],
)
def test_other_latents_are_noticed(got, says):
    expected = ModelOutput(torch.tensor([[1, 2]]), None, torch.ones(1, 2, 2))
    check_equal("x", expected, expected._replace(latents=torch.ones(1, 2, 2) * 1.00001))
    with pytest.raises(Differs, match=f"x: {says}"):
        check_equal("x", expected, expected._replace(latents=got))


def test_what_transformers_cannot_build_is_not_tried():
    record = trial.trial(Entry("causal-lm", "llama", "NoSuchModel"))
    assert record["status"] == "not tried"
    assert record["reason"].startswith("AttributeError")


def test_a_refusal_gives_its_reason(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise descant.UnsupportedModel("not this one")

    monkeypatch.setattr(descant, "generate", refuse)
    record = trial.trial(LLAMA)
    assert (record["status"], record["reason"]) == ("refused", "not this one")


def test_another_error_is_a_failure_with_its_traceback(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(descant, "generate", fail)
    record = trial.trial(LLAMA)
    assert (record["status"], record["reason"]) == ("fails", "KeyError: 'gone'")
    assert record["traceback"][-1] == "KeyError: 'gone'"


def _spoiled(monkeypatch: pytest.MonkeyPatch, when: Any) -> dict[str, Any]:
    """The record of a Descant whose last token is wrong where `when` says so."""
    real = descant.generate

    def spoil(model: Any, **given: Any) -> Any:
        answer = real(model, **given)
        if when(given):
            tokens = answer if isinstance(answer, torch.Tensor) else answer.sequences
            tokens[0, -1] += 1
        return answer

    monkeypatch.setattr(descant, "generate", spoil)
    return trial.trial(LLAMA)


@pytest.mark.parametrize(
    ("when", "check"),
    [
        (lambda given: given["num_beams"] == 1, "greedy, prompt 0"),
        (lambda given: given["num_beams"] > 1, "beams, prompt 0"),
        (lambda given: given["num_beams"] == 1 and len(given["input_ids"]) > 1, "greedy batch, row 0"),
        (lambda given: given["num_beams"] > 1 and len(given["input_ids"]) > 1, "beams batch, row 0"),
    ],
)
def test_one_wrong_token_is_found_wherever_it_is(monkeypatch, when, check):
    record = _spoiled(monkeypatch, when)
    assert record["status"] == "differs"
    assert record["reason"].startswith(f"{check}: token at [0, ")


def test_a_search_that_its_cache_leads_astray_is_compared_without(monkeypatch):
    build = text.subject

    def astray(entry: Entry) -> Any:
        subject = build(entry)
        real = subject.model.generate

        def generate(**given: Any) -> Any:
            answer = real(**given)
            if given["num_beams"] > 1 and given.get("use_cache", True):
                answer[0, -1] += 1
            return answer

        subject.model.generate = generate
        return subject

    monkeypatch.setattr(text, "subject", astray)
    record = trial.trial(LLAMA)
    assert (record["status"], record["beam"]) == ("works", "compared without a cache")


# What a process may use


def _run(doing: Any, **limits: Any) -> dict[str, Any]:
    (record,) = each([LLAMA], doing, limits=Limits(**limits))
    return record


@pytest.mark.parametrize(("stage", "status"), [("reference", "not tried"), ("descant", "fails")])
def test_cpu_time_is_limited(stage, status):
    def spin(_: Entry, told: Any) -> dict[str, Any]:
        told(stage)
        while True:
            pass

    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    record = _run(spin, seconds=1, patience=60)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 3
    assert record["status"] == status
    assert record["reason"] == f"used up 1 seconds of CPU time ({stage})"


@pytest.mark.parametrize(("memory", "says"), [(1 << 30, "stopped"), (1 << 40, "not stopped")])
def test_memory_is_limited(memory, says):
    def grow(*_: Any) -> dict[str, Any]:
        try:
            bytearray(1 << 30)
        except MemoryError:
            return {"status": "stopped"}
        return {"status": "not stopped"}

    assert _run(grow, memory=memory)["status"] == says


def test_a_process_that_dies_is_reported():
    def crash(_: Entry, told: Any) -> dict[str, Any]:
        told("descant")
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    record = _run(crash)
    assert (record["status"], record["reason"]) == ("fails", "died of SIGTERM (descant)")
    assert _run(lambda *_: os._exit(3))["reason"] == "exited with 3 and no record (start)"


# What is reported


def _record(**changes: Any) -> dict[str, Any]:
    return trial.blank(LLAMA) | {"status": "works", "beam": "compared"} | changes


def test_the_page_counts_and_explains():
    some = [
        _record(),
        _record(name="B", status="refused", reason="a | b <c>"),
        _record(name="C", task="seq2seq-lm"),
    ]
    page = report.page(json.loads(report.document(some)))
    assert "| works | 1 | 1 | 2 |" in page
    assert "| refused | 1 | 0 | 1 |" in page
    assert "| `B` | `llama` | refused | a \\| b &lt;c> |" in page
    assert page.index("## Causal language models") < page.index("## Encoder-decoders")


def test_the_command_lists_and_chooses(capsys):
    assert command.main(["--list", "--only", "llama", "BartForCausalLM"]) == 0
    assert capsys.readouterr().out.split("\n") == [
        "causal-lm bart BartForCausalLM",
        "causal-lm llama LlamaForCausalLM",
        "",
    ]
    with pytest.raises(SystemExit, match="got 'lama'"):
        command.main(["--list", "--only", "lama"])


def test_the_command_writes_what_it_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "trial", lambda entry, _=None: _record(name=entry.name, status="differs"))
    out = tmp_path / "results.json"
    assert command.main(["--only", "LlamaForCausalLM", "--out", str(out)]) == 1
    assert json.loads(out.read_text(encoding="utf-8"))["results"][0]["status"] == "differs"
    assert capsys.readouterr().out.endswith("1 architectures: 1 differs; 0.0 CPU-minutes\n")
    assert command.main(["--list", "--again", str(out)]) == 0
    assert capsys.readouterr().out == "causal-lm llama LlamaForCausalLM\n"
