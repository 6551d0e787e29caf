"""What a config selects, in words, and what may have ruled out all tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from descant import GenerationConfig
from descant.engine.explain import explain_config, no_candidates_error
from descant.testing import toy


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "greedy search"),
        ({"do_sample": True}, "sampling"),
        ({"banned_phrases": ["no"]}, "greedy search with backtracking"),
        ({"penalty_alpha": 0.6, "top_k": 2}, "contrastive search, 2 candidates"),
        ({"num_beams": 2}, "beam search, 2 beams"),
        ({"num_beams": 2, "do_sample": True}, "beam sampling, 2 beams"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            "beam search, 4 beams in 2 groups",
        ),
        ({"num_beams": 2, "force_words_ids": [[5]]}, "constrained beam search, 2 beams"),
    ],
)
def test_the_strategy_is_named(fields, name):
    first, *_ = explain_config(GenerationConfig(**fields)).splitlines()
    assert first == f"strategy    {name}"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"do_sample": True}, "TopKLogitsWarper(top_k=50)"),
        (
            {"do_sample": True, "top_k": 0, "xtc_probability": 0.5},
            "XTCLogitsWarper(xtc_probability=0.5, xtc_threshold=0.1)",
        ),
        ({"suppress_tokens": list(range(99))}, "SuppressTokensLogitsProcessor(suppress_tokens=(0, 1, "),
        ({}, "none"),
    ],
)
def test_processors_are_named_with_their_values(fields, told):
    line = explain_config(GenerationConfig(**fields)).splitlines()[1]
    assert line.startswith(f"processors  {told}")
    assert len(line) < 200


def test_wrappers_of_the_model_are_named():
    lines = explain_config(GenerationConfig(guidance_scale=1.5)).splitlines()
    (line,) = (line for line in lines if line.startswith("model "))
    assert line.startswith("model       with ")
    assert not any(line.startswith("model ") for line in explain_config(GenerationConfig()).splitlines())


def fast_path_lines(config: GenerationConfig, model: object) -> list[str]:
    """The lines of the block `fast paths`."""
    lines = explain_config(config, model).splitlines()
    return lines[lines.index("fast paths") + 1 : lines.index("values")]


def test_fast_paths_of_a_model_are_named_with_the_switch_of_those_that_are_off():
    model = toy()
    lines = fast_path_lines(GenerationConfig(), model)
    assert lines[0].split()[:3] == ["packed", "forwards", "on"]
    compiled = [line.split()[:3] for line in lines if "compiled" in line]
    assert compiled == [["compiled", "layers", "off"], ["compiled", "step", "off"]]
    assert all("(" in line for line in lines if " off " in line)
    model.packed_forwards = False
    first, *_ = fast_path_lines(GenerationConfig(), model)
    assert first.endswith("off  `model.packed_forwards` is False (model.packed_forwards)")
    assert "fast paths" not in explain_config(GenerationConfig())


def test_fast_paths_are_those_of_the_cache_that_a_config_selects():
    config = GenerationConfig(cache_implementation="static", compile_config={})
    on = [line.split()[0] for line in fast_path_lines(config, toy()) if " on " in line]
    assert on == ["compiled"]


@pytest.mark.parametrize(
    ("recipe", "own", "sequences", "names"),
    [
        (None, False, 1, "the model"),
        ("mine", False, 1, "`recipe`"),
        (None, True, 1, "`logits_processor`"),
        (None, False, 2, "`num_return_sequences`"),
        ("mine", True, 2, "`recipe` and `logits_processor` and `num_return_sequences`"),
    ],
)
@pytest.mark.parametrize("nonfinite", [False, True])
def test_an_error_names_what_may_have_ruled_out_all_tokens(recipe, own, sequences, names, nonfinite):
    config = GenerationConfig(do_sample=True, num_return_sequences=sequences)
    plan = SimpleNamespace(config=config, processors=(), recipe=recipe)
    error = no_candidates_error(3, plan, own, nonfinite=nonfinite)
    source, do = (
        ("the model", "check its logits") if nonfinite or names == "the model" else (names, "loosen it")
    )
    assert str(error) == (
        f"{source} must leave enough to choose from, got only scores of -inf or NaN: {do} (request 3)"
    )
