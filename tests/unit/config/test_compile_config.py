"""How the step is compiled: settings as documented, each of which counts or is refused."""

from __future__ import annotations

import pickle

import pytest

from descant.config.compile_config import CompileConfig
from descant.errors import ConfigError


def test_the_defaults_are_as_documented():
    assert CompileConfig().to_dict() == {
        "fullgraph": True,
        "dynamic": None,
        "backend": "inductor",
        "mode": "reduce-overhead",
        "options": None,
    }


def test_it_survives_a_dict_a_pickle_and_a_set():
    config = CompileConfig(dynamic=True, options={"epilogue_fusion": False, "shapes": [1, 2]})
    assert CompileConfig.of(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert {config, CompileConfig.of(config.to_dict())} == {config}
    assert config.to_dict()["options"] == {"epilogue_fusion": False, "shapes": [1, 2]}


@pytest.mark.parametrize(
    "given",
    [
        {"fullgraph": 1},
        {"fullgraph": None},
        {"dynamic": "yes"},
        {"backend": ""},
        {"backend": None},
        {"mode": 3},
        {"options": ["epilogue_fusion"]},
        {"options": {1: 2}},
        {"options": {"passes": {1, 2}}},
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(given):
    with pytest.raises(ConfigError, match="`compile_config` must have"):
        CompileConfig(**given)


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match=r"must have only backend, dynamic.*got \['full_graph'\]"):
        CompileConfig.of({"full_graph": True})


# ---------------------------------------------------------------------- arguments of torch.compile
def test_shapes_are_static_by_default():
    assert CompileConfig().arguments["dynamic"] is False
    assert CompileConfig(dynamic=True).arguments["dynamic"] is True


def test_options_change_what_the_mode_has_set():
    plain = CompileConfig(options={"epilogue_fusion": False}).arguments
    assert plain["options"] == {"triton.cudagraphs": True, "epilogue_fusion": False}
    assert "mode" not in plain  # torch takes one of the two
    off = CompileConfig(options={"triton.cudagraphs": False}).arguments
    assert off["options"] == {"triton.cudagraphs": False}
    none = CompileConfig(mode=None, options={"epilogue_fusion": False}).arguments
    assert none["options"] == {"epilogue_fusion": False}


def test_only_inductor_gets_a_mode():
    assert CompileConfig().arguments["mode"] == "reduce-overhead"
    assert "mode" not in CompileConfig(backend="aot_eager").arguments
    assert CompileConfig(backend="other", mode="fast").arguments["mode"] == "fast"
    with pytest.raises(ConfigError, match="must have one of default"):
        CompileConfig(mode="fast").arguments  # noqa: B018
