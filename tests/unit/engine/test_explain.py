"""What a config selects, in words, and what may have ruled out all tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from descant import GenerationConfig
from descant.engine.explain import explain_config, no_candidates_error


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


def test_wrappers_of_the_model_are_named():
    lines = explain_config(GenerationConfig(guidance_scale=1.5)).splitlines()
    (line,) = (line for line in lines if line.startswith("model "))
    assert line.startswith("model       with ")
    assert not any(line.startswith("model ") for line in explain_config(GenerationConfig()).splitlines())


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
