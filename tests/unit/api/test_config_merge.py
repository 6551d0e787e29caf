"""Configs of calls that repeat are remembered, and are the same as if they were merged again."""

from __future__ import annotations

import pytest
import transformers

import descant
from descant.api import call as config_merge
from descant.api.call import merge_config
from descant.config.generation_config import GenerationConfig


def merged_anew(call, model):
    """The config without any memory of earlier calls."""
    return GenerationConfig.merge(
        call, None, None if model is None else GenerationConfig.from_transformers(model)
    )


@pytest.mark.parametrize(
    "call",
    [
        {"max_new_tokens": 3},
        {"temperature": 1, "do_sample": True},
        {"temperature": 1.0, "do_sample": True},
        {"eos_token_id": [1, 2], "max_new_tokens": None},
        {"stop_strings": ["a", "b"]},
        {"suppress_tokens": (3, 4)},
    ],
)
def test_a_repeated_call_has_the_same_config(call):
    model = transformers.GenerationConfig(pad_token_id=0, eos_token_id=[5, 6])
    expected = merged_anew(call, model)
    for _ in range(2):
        merged = merge_config(call, None, model, True)
        assert merged == expected
        assert [merged.source(name) for name in merged.given] == [
            expected.source(name) for name in merged.given
        ]


def test_values_that_are_equal_and_of_different_types_stay_apart():
    assert merge_config({"eos_token_id": 1}, None, None, True).eos_token_id == 1
    with pytest.raises(descant.ConfigError, match="eos_token_id"):
        merge_config({"eos_token_id": True}, None, None, True)
    with pytest.raises(descant.ConfigError, match="eos_token_id"):
        merge_config({"eos_token_id": [True]}, None, None, True)


def test_changes_of_the_models_config_count_at_once():
    model = transformers.GenerationConfig(pad_token_id=0, eos_token_id=[5, 6])
    assert merge_config({}, None, model, True).eos_token_id == (5, 6)
    model.eos_token_id.append(7)  # in place
    assert merge_config({}, None, model, True).eos_token_id == (5, 6, 7)
    model.eos_token_id = 8
    assert merge_config({}, None, model, True).eos_token_id == 8


def test_a_changed_result_is_not_remembered():
    first = merge_config({"max_new_tokens": 9}, None, None, True)
    first.update(max_new_tokens=4)
    assert merge_config({"max_new_tokens": 9}, None, None, True).max_new_tokens == 9


def test_only_plain_data_is_remembered(monkeypatch):
    remembered = []
    original = config_merge._merge_plain
    monkeypatch.setattr(
        config_merge, "_merge_plain", lambda *entries: remembered.append(entries) or original(*entries)
    )
    merge_config({"max_new_tokens": 2}, None, None, True)
    assert len(remembered) == 1
    merge_config({"bad_words_ids": [[1, 2]]}, None, None, True)  # nested lists may change
    merge_config({"max_new_tokens": 2}, GenerationConfig(seed=1), None, True)
    assert len(remembered) == 1
