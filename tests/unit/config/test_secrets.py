"""A watermark key is in no text that is printed, and a file that holds one is only its owner's."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import transformers

import descant
from descant import (
    GenerationConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.config.watermarking_config import as_watermarking_config
from descant.decoding.watermark.keys import read_settings, write_settings
from descant.errors import DescantError, format_value
from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel, save_detector

KEY = 918273645546372819
SETTINGS: list[dict[str, Any]] = [
    {"hashing_key": KEY, "bias": 1.5},
    {"ngram_len": 5, "keys": [KEY, 7, KEY]},
    {"key": KEY, "nonce": 3},
]
OBJECTS = [
    WatermarkingConfig(hashing_key=KEY),
    SynthIDTextWatermarkingConfig(ngram_len=5, keys=(KEY, 7)),
    GumbelWatermarkingConfig(key=KEY),
]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("given", [*SETTINGS, *OBJECTS], ids=lambda one: type(one).__name__)
def test_what_a_config_shows(given: Any) -> None:
    config = GenerationConfig(watermarking_config=given, do_sample=True)
    merged = GenerationConfig.merge({}, config)
    shown = [config, str(config), config.to_diff_dict(), merged.explain(), json.dumps(config.to_diff_dict())]
    assert str(KEY) not in " ".join(map(repr, shown)) + repr(config.watermarking_config)
    assert config.to_diff_dict()["do_sample"] is True
    assert "(hidden)" in str(config.to_diff_dict()["watermarking_config"])
    # Saved and loaded it is as before.
    assert GenerationConfig.from_dict(json.loads(config.to_json_string())) == config
    assert GenerationConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("given", SETTINGS, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize(
    "flaw", [object(), float("nan"), [object()], {1: 2}], ids=["object", "nan", "list", "dict"]
)
def test_errors_of_settings(given: dict[str, Any], flaw: Any) -> None:
    for name in [*given, "bias", "unknown", 7]:
        broken = (
            {**given, name: flaw}
            if name not in ("key", "keys", "hashing_key")
            else {**given, name: [KEY, flaw]}
        )
        for call in (
            lambda broken=broken: GenerationConfig(watermarking_config=broken),
            lambda broken=broken: GenerationConfig.from_dict({"watermarking_config": broken}),
            lambda broken=broken: as_watermarking_config(broken),
        ):
            message = ""
            try:
                call()
            except (DescantError, TypeError) as error:
                message = str(error)
            assert str(KEY) not in message


@pytest.mark.parametrize(
    "value",
    [
        *SETTINGS,
        json.dumps(SETTINGS[0]),
        f"hashing_key={KEY}",
        f"keys=[{KEY}, {KEY}]",
        [SETTINGS[1]],
        {"generation": SETTINGS[2]},
        transformers.WatermarkingConfig(hashing_key=KEY),
        transformers.GenerationConfig(watermarking_config=transformers.WatermarkingConfig(hashing_key=KEY)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_value_in_an_error(value: Any) -> None:
    assert str(KEY) not in format_value(value, limit=100_000)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"hashing_key": {KEY}',
        f'{{"hashing_key": "{KEY}"}}',
        f'{{"hashing_key": {KEY}, "bias": "{KEY}x"}}'.replace(f'"{KEY}x"', '"high"'),
        f'{{"keys": [{KEY}, "{KEY}"], "ngram_len": 5}}',
        f'{{"key": {KEY}.5}}',
        f'[{{"hashing_key": {KEY}}}, {{"hashing_key": -{KEY}}}]',
        f"[{KEY}]",
        str(KEY),
        f"key: {KEY}",
    ],
)
def test_errors_of_a_key_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    environment = {"DESCANT_WATERMARK_KEY": text}
    for call in (
        lambda: read_settings(tmp_path / "key.json"),
        lambda: read_settings(None, environment),
        lambda: read_settings(text),
    ):
        with pytest.raises(DescantError) as error:
            call()
        assert str(KEY) not in str(error.value)


def test_every_file_with_a_key_is_its_owners(tmp_path: Path) -> None:
    for settings in OBJECTS:
        for old in (None, 0o644, 0o666):
            path = tmp_path / f"{settings.scheme}-{old}.json"
            if old is not None:
                path.write_text("{}")
                path.chmod(old)
            settings.to_json_file(path)
            assert mode(path) == 0o600
            assert type(settings).from_dict(json.loads(path.read_text())) == settings
    write_settings(tmp_path / "key.json", OBJECTS[0])
    assert mode(tmp_path / "key.json") == 0o600
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "generation_config.json").chmod(0o644)
    GenerationConfig(top_k=5).save_pretrained(tmp_path)
    assert mode(tmp_path / "generation_config.json") == 0o644
    config = GenerationConfig(watermarking_config=OBJECTS[1])
    config.save_pretrained(tmp_path)
    assert mode(tmp_path / "generation_config.json") == 0o600
    assert GenerationConfig.from_pretrained(tmp_path) == config


def test_a_detector_with_its_key(tmp_path: Path) -> None:
    model = BayesianDetectorModel(BayesianDetectorConfig(2))
    model.config.set_detector_information("toy", OBJECTS[1])
    assert str(KEY) not in repr(model.config) + str(model.config) + repr(model)
    save_detector(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert mode(tmp_path / "ours" / "config.json") == mode(tmp_path / "theirs" / "config.json") == 0o600
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    assert ours == theirs
    loaded = descant.models.bayesian_detector.load_detector(tmp_path / "ours")
    assert loaded.config.watermarking_config["keys"] == [KEY, 7]
    weights = model.state_dict()
    assert all(weights[name].equal(one) for name, one in loaded.state_dict().items())
