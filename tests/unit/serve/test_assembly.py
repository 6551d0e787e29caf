"""The engine of a server, from the options of the command and of Ray Serve."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from descant import ConfigError
from descant.cli.application import build_app
from descant.serve import application as assembly
from descant.serve.application import EngineOptions, load_application, start_engine
from descant.serve.settings import ServerSettings
from tests.support import pretrained, tiny_models


class NoVLLM(Exception):
    """Raised in place of starting vLLM."""


@pytest.fixture
def vllm_arguments(monkeypatch):
    """The arguments with which vLLM would have been started."""
    found = {}

    def start(model, **arguments):
        found.update(arguments, model=model)
        raise NoVLLM

    monkeypatch.setattr(assembly, "VLLM", start)
    return found


def test_the_kv_pool_has_the_bytes_that_are_given(tmp_path):
    model = tiny_models.load("llama", tiny_models.build("llama", tmp_path)).model
    token_bytes = 2 * 2 * 8 * 2 * 4  # layers, heads, numbers, keys and values, bytes
    with start_engine(model, EngineOptions(kv_bytes=10 * 16 * token_bytes)) as engine:
        assert engine.scheduler_config.num_blocks == 10


def test_the_options_of_vllm_reach_it(vllm_arguments):
    """Those of the command and those of an application under Ray Serve."""
    folder = str(pretrained.folder("smol-draft"))
    command = ["serve", folder, "--engine", "vllm", "--tensor-parallel-size", "2", "--max-model-len", "64"]
    command += ["--enforce-eager", "--engine-option", 'quantization="fp8"', "--max-running-rows", "4"]
    result = CliRunner().invoke(build_app(), [*command, "--debug"])
    assert "NoVLLM" in result.output
    expected = {"tensor_parallel_size": 2, "max_model_len": 64, "enforce_eager": True, "quantization": "fp8"}
    assert vllm_arguments.items() >= {"model": folder, "max_num_seqs": 4, **expected}.items()
    vllm_arguments.clear()
    options = EngineOptions(engine="vllm", engine_options=expected, dtype="float32")
    with pytest.raises(NoVLLM):
        load_application(folder, ServerSettings(model_name="m"), options)
    assert vllm_arguments.items() >= {"dtype": "float32", **expected}.items()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("engine", {"engine": "other"}),
        ("engine_options", {"engine_options": {"max_model_len": 64}}),
        ("fast", {"engine": "vllm", "fast": True}),
        ("device", {"engine": "vllm", "device": "cuda"}),
        ("kv_bytes", {"kv_bytes": 0}),
    ],
)
def test_options_that_the_engine_does_not_have(name, given):
    with pytest.raises(ConfigError, match=f"`{name}` must"):
        EngineOptions(**given)
