"""A model on the Hub: its weights come from safetensors, and nothing else of it is even fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from descant.errors import DescantError
from descant.models.loading import loading
from tests.security.subjects import SUBJECTS
from tests.security.test_payloads import NAME, PAYLOADS, index
from tests.unit.config.hub.server import Hub


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    SUBJECTS["model"].make(folder)
    return folder


def test_a_model_on_the_hub_is_loaded(hub: Hub, model: Path, tmp_path: Path) -> None:
    beside = {"pytorch_model.bin": PAYLOADS["torch"](tmp_path / NAME), "evil.py": b"raise SystemExit"}
    hub.repo("somebody/model", {**files(model), **beside})
    made, tokenizer = loading.load("somebody/model")
    assert made.config.vocab_size == 97
    assert tokenizer.eos_token_id is not None
    assert not any(".bin" in one or ".py" in one for one in hub.since())
    hub.offline()
    loading.load("somebody/model")


@pytest.mark.parametrize("payload", ["pickle 2", "torch", "torch, before zip", "zip in safetensors"])
def test_pickled_weights_on_the_hub_are_not_fetched(
    payload: str, hub: Hub, model: Path, tmp_path: Path
) -> None:
    """Nor is the Hub queried for a pull request with converted weights."""
    (model / "model.safetensors").unlink()
    data = PAYLOADS[payload](tmp_path / NAME)
    name = payload.replace(" ", "-").replace(",", "")  # a commit that was found is remembered by the name
    hub.repo(f"somebody/{name}", {**files(model), "pytorch_model.bin": data})
    with pytest.raises(DescantError, match="safetensors"):
        loading.load(f"somebody/{name}")
    index(model, "model.safetensors.index.json", ["lm_head.weight"], "pytorch_model.bin")
    hub.repo(f"somebody/{name}-named", {**files(model), "pytorch_model.bin": data})
    with pytest.raises(DescantError, match="safetensors"):
        loading.load(f"somebody/{name}-named")
    asked = hub.since()
    assert not any("pytorch_model.bin" in one or "discussions" in one or "refs" in one for one in asked)
    assert not (tmp_path / NAME).exists()
