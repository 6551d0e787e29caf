"""`descant explain`, and what is the same for every command: errors, colours, the version, `--config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import descant as package
from descant import GenerationConfig
from descant.engine.planning.planner import as_model
from descant.models.loading.loading import load_meta_model


def test_version(descant):
    result = descant("--version")
    assert (result.exit_code, result.stdout) == (0, f"descant {package.__version__}\n")


def test_help_and_no_arguments(descant):
    shown = descant("--help")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in ("generate", "chat", "explain", "tree", "show", "doctor"))
    nothing = descant()
    assert (nothing.exit_code, nothing.stderr) == (2, "")
    assert nothing.stdout.split() == shown.stdout.split()


def test_it_equals_the_config(descant, stories):
    result = descant("explain", stories, "--num-beams", 4, "--max-new-tokens", 7)
    model = load_meta_model(stories)
    theirs = GenerationConfig.from_transformers(model.generation_config)
    merged = GenerationConfig.merge({"num_beams": 4, "max_new_tokens": 7}, None, theirs)
    assert (result.exit_code, result.stdout) == (0, merged.explain(as_model(model)) + "\n")
    assert "beam search, 4 beams" in result.stdout
    assert "7 new tokens" in result.stdout


def test_every_value_has_its_source(descant, stories, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"num_beams": 3, "length_penalty": 2.0}))
    lines = descant("explain", stories, "--config", file, "--num-beams", 4).stdout.splitlines()
    sources = {line.split()[0]: line.rsplit("(", 1)[1] for line in lines if line.endswith(")")}
    assert sources["num_beams"] == "call)"
    assert sources["length_penalty"] == "argument)"
    assert sources["eos_token_id"] == "model)"


def test_weights_are_not_read(descant, stories, tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((Path(stories) / name).read_bytes())
    assert descant("explain", tmp_path).stdout == descant("explain", stories).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "./nowhere"), "MODEL must be a folder that exists, or a name on the Hub"),
        (("explain", "--config", "nowhere.json"), "`config_file_name` must name a file in '.'"),
        (("expln",), "No such command 'expln'. Did you mean 'explain'? (see descant --help)"),
        (("generate",), "Missing argument 'MODEL'"),
        (("generate", "m", "p", "q"), "unexpected extra argument"),
        (("generate", "./nowhere", "p"), "MODEL must be a folder that exists"),
        (("generate", "./nowhere", "p", "--dtype", "int8"), "--dtype must be one of auto, float32"),
        (("generate", "./nowhere", "p", "--device", "abacus"), "--device must be an available device"),
        (("generate", "m", "p", "--batch-size", "0"), "--batch-size"),
        (("chat", "m", "--logprobs", "1"), "--logprobs has no use in a conversation, got 1: leave it out"),
    ],
)  # fmt: skip
def test_mistakes_of_the_caller_are_one_line_and_exit_2(descant, arguments, message):
    result = descant(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_speech_model_is_no_text_generator(descant, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    result = descant("explain", tmp_path)
    assert result.exit_code == 2
    assert "cannot be loaded as a text generator: Unrecognized configuration class" in result.stderr


def test_errors_are_red_on_a_terminal_by_default(descant):
    line = ("explain", "--num-beams", 0)
    assert "\x1b" not in descant(*line).stderr
    assert "\x1b[31m" in descant(*line, env={"FORCE_COLOR": "1"}).stderr
    assert "\x1b[31m" not in descant(*line, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stderr


def test_debug_shows_the_traceback(descant):
    assert "Traceback" not in descant("explain", "--num-beams", 0).stderr
    result = descant("explain", "--num-beams", 0, "--debug")
    assert (result.exit_code, "Traceback" in result.stderr) == (2, True)
    assert result.stderr.splitlines()[-1].startswith("error: --num-beams")
