"""One generation parameter at a time: accepted values, rejected values, and the error texts."""

import copy
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from descant.config.cache_config import QuantizedCacheConfig, StaticCacheConfig
from descant.config.compile_config import CompileConfig
from descant.config.fields import FrozenMap
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.watermarking_config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.errors import ConfigError, format_value
from tests.support.config_cases import CASES, EVERY_MISTAKE, EVERY_VALUE, made

SETTINGS = BaseWatermarkingConfig | CompileConfig


def test_the_cases_cover_every_field():
    assert set(CASES) == set(FIELDS)
    assert all(good and bad for good, bad in CASES.values())


@pytest.mark.parametrize(("name", "value"), EVERY_VALUE, ids=format_value)
def test_a_good_value_is_kept_in_one_plain_hashable_form(name, value):
    config = made(name, value)
    kept = getattr(config, name)
    assert config.given == {name}
    assert isinstance(kept, bool | int | float | str | tuple | FrozenMap | SETTINGS) or callable(kept)
    hash(config)
    assert made(name, kept) == config
    if FIELDS[name].type == "float":
        assert type(kept) is float
        assert kept == pytest.approx(float(value))


@pytest.mark.parametrize(("name", "value"), EVERY_MISTAKE, ids=format_value)
def test_a_bad_value_is_refused_by_name(name, value):
    for make in (made, lambda name, value: GenerationConfig(**{name: value})):
        with pytest.raises(ConfigError) as error:
            make(name, value)
        assert error.value.field == name
        assert str(error.value).startswith(f"`{name}` must be ")
        shown = type(value) if FIELDS[name].kind.is_secret else value
        assert f"got {format_value(shown)}" in str(error.value)


@pytest.mark.parametrize("name", ["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"])
def test_minus_one_is_no_token_in_a_file_and_an_error_in_code(name):
    assert made(name, -1) == GenerationConfig()
    with pytest.raises(ConfigError, match=f"`{name}` must be a token id .*got -1"):
        GenerationConfig(**{name: -1})


def test_sequences_read_as_tuples_and_dicts_as_read_only_mappings():
    ids = [1, 2]
    config = made("eos_token_id", ids)
    ids.append(3)
    assert config.eos_token_id == (1, 2)
    assert made("sequence_bias", [[[1, 2], -1]]).sequence_bias == {(1, 2): -1.0}
    with pytest.raises(TypeError):
        made("cache_config", {"a": 1}).cache_config["a"] = 2


def test_settings_may_be_objects():
    @dataclass
    class Plain:
        bias: float = 2.5
        _private: int = 1

    spoken = SimpleNamespace(to_dict=lambda: {"bias": 2.5})
    assert made("watermarking_config", Plain()) == made("watermarking_config", spoken)
    assert made("watermarking_config", Plain()).watermarking_config == WatermarkingConfig(bias=2.5)


@pytest.mark.parametrize(
    ("field", "given", "name", "value"),
    [
        ("watermarking_config", WatermarkingConfig(bias=1.5), "bias", 3.0),
        ("watermarking_config", SynthIDTextWatermarkingConfig(5, [3, 1]), "keys", (4,)),
        ("watermarking_config", GumbelWatermarkingConfig(3), "nonce", 2),
        ("compile_config", CompileConfig(dynamic=True), "fullgraph", False),
        ("cache_config", QuantizedCacheConfig(nbits=2, compute_dtype="bfloat16"), "nbits", 4),
        ("cache_config", StaticCacheConfig(1, 20), "batch_size", 2),
    ],
)
def test_settings_read_as_their_class_and_a_change_of_them_is_the_configs_own(field, given, name, value):
    config = GenerationConfig(**{field: given})
    twin = GenerationConfig.from_dict(json.loads(config.to_json_string()))
    merged = GenerationConfig.merge({"cache_implementation": "static"}, config)
    assert getattr(config, field) == getattr(twin, field) == getattr(merged, field) == given
    assert type(getattr(config, field)) is type(getattr(twin, field)) is type(given)
    setattr(getattr(config, field), name, value)
    assert getattr(getattr(config, field), name) == value
    assert getattr(merged, field) == given
    assert config != twin
    assert config == config.replace(**{field: getattr(config, field)})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (WatermarkingConfig(), "context_width"),
        (CompileConfig(), "backend"),
        (GumbelWatermarkingConfig(3), "key"),
    ],
)
def test_an_attribute_of_settings_is_checked_when_it_is_set(settings, name):
    before = copy.copy(settings)
    for wrong in (name, "no_such_setting"):
        with pytest.raises(ConfigError):
            setattr(settings, wrong, -1)
    assert settings == before


def test_an_unknown_name_is_an_error_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"`tempurature` is not a generation parameter, got 1: .*`temperature`"
    ) as error:
        GenerationConfig(tempurature=1)
    assert error.value.field == "tempurature"
    for attempt in (
        lambda: GenerationConfig().replace(beams=2),
        lambda: GenerationConfig.merge({"beams": 2}),
        lambda: GenerationConfig.from_dict({}, beams=2),
        lambda: GenerationConfig().source("beams"),
    ):
        with pytest.raises(ConfigError, match="`beams`"):
            attempt()


def test_none_in_code_switches_a_field_off():
    config = GenerationConfig(
        top_k=None, temperature=None, eos_token_id=None, max_length=None, num_beams=None
    )
    assert (config.top_k, config.temperature, config.eos_token_id, config.num_beams) == (0, 1.0, None, 1)
    assert config.given == {"top_k", "temperature", "eos_token_id", "num_beams"}
    model = GenerationConfig(top_k=10, eos_token_id=5, max_length=30, do_sample=True)
    merged = GenerationConfig.merge({"top_k": None, "eos_token_id": None, "max_length": None}, None, model)
    assert (merged.top_k, merged.eos_token_id, merged.max_length) == (0, None, 30)
    assert merged.source("eos_token_id") == "call"
