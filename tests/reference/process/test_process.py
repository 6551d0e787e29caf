"""The reference process: values through its pipe, its errors, its memory."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

from tests.reference.process import wire
from tests.reference.process.client import ROOT, ReferenceClient, ReferenceFailure


def through(message):
    stream = io.BytesIO()
    wire.send(stream, message)
    stream.seek(0)
    return wire.receive(stream)


def test_messages_come_through_as_they_are():
    message = {
        "plain": [1, -2.5, True, None, "text", {"nested": []}],
        "tuples": ((1, (2,)), ()),
        "keys": {(3, 4): 0.5, 7: "seven", "$tensor": 1},
        "infinite": float("inf"),
    }
    assert through(message) == message
    big = torch.arange(12).reshape(3, 4)
    got = through({"views": (big[:, 1], big.t(), big), "empty": torch.zeros(0, 3), "bool": big > 3})
    assert isinstance(got["views"], tuple)
    assert torch.equal(got["views"][0], big[:, 1])
    assert torch.equal(got["views"][1], big.t())
    assert got["empty"].shape == (0, 3)
    assert got["bool"].dtype == torch.bool


def test_it_is_the_pinned_version_on_one_thread(reference):
    said = reference.ask("ping")
    assert said["transformers"] == "4.52.4"
    assert said["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert said["threads"] == 1


def test_its_errors_come_back_with_their_type(reference, tiny):
    model = tiny("llama")
    with pytest.raises(ReferenceFailure, match="num_return_sequences") as caught:
        reference.generate(
            model.folder, {"input_ids": torch.tensor([[5]])}, {"num_beams": 1, "num_return_sequences": 2}
        )
    assert caught.value.type == "ValueError"
    assert reference.ask("ping"), "it lives on"


def test_it_runs_the_same_weights(reference, tiny):
    for name in ("llama", "gpt2", "gpt-neox", "mistral", "qwen2", "gemma", "opt", "t5", "bart"):
        model = tiny(name)
        ids = torch.arange(20, 40)[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if model.encoder_decoder:
            inputs["decoder_input_ids"] = torch.arange(40, 52)[None]
        with torch.no_grad():
            ours = model.model(**inputs).logits
        theirs = reference.ask("forward", model=str(model.folder), inputs=inputs)["logits"]
        assert torch.allclose(ours, theirs, rtol=0, atol=5e-5), name


@pytest.mark.slow
def test_it_stays_small(tiny):
    fresh = ReferenceClient()  # the shared one keeps the largest model of any test
    try:
        for name in ("llama", "gpt2", "gpt-neox", "mistral", "qwen2", "gemma", "opt", "t5", "bart"):
            fresh.generate(tiny(name).folder, {"input_ids": torch.tensor([[5, 6]])}, {"max_new_tokens": 2})
        assert fresh.ask("ping")["peak_mb"] < 1500
    finally:
        fresh.close()


def test_a_missing_venv_says_how_to_build_it(tmp_path):
    with pytest.raises(RuntimeError, match=r"python tools/reference_env\.py"):
        ReferenceClient(tmp_path / "python").ask("ping")


def test_a_dead_worker_shows_its_last_words(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such venv >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="no such venv"):
        ReferenceClient(python).ask("ping")


def test_a_complete_venv_is_left_alone(reference):
    """`tools/reference_env.py` run again on the venv in use changes nothing."""
    folder = reference.python.parent.parent
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "reference_env.py", folder],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith("is complete")
