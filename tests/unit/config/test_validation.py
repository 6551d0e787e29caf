"""Which value wins, which has no use, which cannot be."""

import pytest

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import ConfigError, InputError


def test_precedence_and_provenance_field_by_field():
    model = GenerationConfig(do_sample=True, temperature=0.6, top_k=10, top_p=0.9)
    argument = GenerationConfig(top_k=20, top_p=0.8)
    merged = GenerationConfig.merge({"top_p": 0.7}, argument, model)
    assert (merged.temperature, merged.top_k, merged.top_p, merged.min_p) == (0.6, 20, 0.7, None)
    sources = [merged.source(name) for name in ("temperature", "top_k", "top_p", "min_p")]
    assert sources == ["model", "argument", "call", "default"]
    assert GenerationConfig.merge({}, GenerationConfig(do_sample=False), model).do_sample is False
    assert argument.source("top_k") == "argument"
    assert merged.replace(top_p=0.6).source("top_p") == "argument"
    assert merged.replace(top_p=0.6).source("temperature") == "model"
    assert (model.top_p, argument.top_p) == (0.9, 0.8)


def test_a_merged_config_merged_alone_keeps_its_sources():
    model = GenerationConfig(top_p=0.9, num_beams=2, eos_token_id=1)
    merged = GenerationConfig.merge({"max_new_tokens": 3}, GenerationConfig(eos_token_id=2), model)
    again = GenerationConfig.merge({}, merged)
    assert again == merged
    assert [again.source(name) for name in sorted(again.given)] == ["argument", "call", "model"]
    assert again.unused == merged.unused == {"top_p": 0.9}
    beside = GenerationConfig.merge({"num_beams": 1}, merged)
    assert (beside.source("max_new_tokens"), beside.unused) == ("argument", {})


def test_merge_takes_only_our_configs():
    with pytest.raises(InputError, match=r"`generation_config` must be .*from_transformers") as error:
        GenerationConfig.merge({}, {"num_beams": 2})
    assert error.value.field == "generation_config"


@pytest.mark.parametrize(
    ("call", "argument", "model", "new", "total"),
    [
        ({}, {}, {}, None, 20),
        ({"max_new_tokens": 5}, {}, {"max_length": 100}, 5, 20),
        ({"max_length": 50}, {}, {"max_new_tokens": 5}, None, 50),
        ({"max_length": 50}, {"max_new_tokens": 5}, {}, None, 50),
        ({}, {"max_length": 50, "max_new_tokens": 5}, {"max_length": 7}, 5, 20),
        ({}, {"max_new_tokens": 5}, {"max_length": 7}, 5, 20),
        ({}, {}, {"max_length": 7, "max_new_tokens": 3}, 3, 20),
        ({"max_new_tokens": None}, {}, {"max_length": 7, "max_new_tokens": 3}, None, 7),
    ],
)
@pytest.mark.parametrize("end", ["max", "min"])
def test_the_nearer_length_wins_and_new_tokens_at_the_same_level(call, argument, model, new, total, end):
    levels = [
        {name.replace("max", end): value for name, value in level.items()}
        for level in (call, argument, model)
    ]
    merged = GenerationConfig.merge(levels[0], GenerationConfig(**levels[1]), GenerationConfig(**levels[2]))
    default = FIELDS[f"{end}_length"].default
    assert getattr(merged, f"{end}_new_tokens") == new
    assert getattr(merged, f"{end}_length") == (default if total == 20 else total)
    assert not {f"{end}_new_tokens", f"{end}_length"} <= {
        n for n in merged.given if getattr(merged, n) is not None
    }


UNUSED = [
    ({"temperature": 0.7}, "do_sample"), ({"top_k": 10}, "do_sample"), ({"top_p": 0.9}, "do_sample"),
    ({"min_p": 0.1}, "do_sample"), ({"early_stopping": True}, "num_beams"),
    ({"length_penalty": 2.0}, "num_beams"), ({"output_scores": True}, "return_dict_in_generate"),
    ({"output_logits": True}, "return_dict_in_generate"),
    ({"output_attentions": True}, "return_dict_in_generate"),
    ({"output_hidden_states": True}, "return_dict_in_generate"),
]  # fmt: skip


@pytest.mark.parametrize(("knob", "chooser"), UNUSED)
def test_a_knob_without_use_is_an_error_from_the_caller_and_set_aside_from_the_model(knob, chooser):
    ((name, value),) = knob.items()
    for levels in ((knob, None), ({}, GenerationConfig(**knob))):
        with pytest.raises(
            ConfigError, match=f"`{name}` has no use while `{chooser}` is .*got {value}"
        ) as error:
            GenerationConfig.merge(*levels)
        assert error.value.field == name
    merged = GenerationConfig.merge({}, None, GenerationConfig(**knob))
    assert getattr(merged, name) == FIELDS[name].default
    assert merged.unused == knob
    assert merged.source(name) == "default"
    on = {"do_sample": True, "num_beams": 2, "return_dict_in_generate": True}
    used = GenerationConfig.merge({chooser: on[chooser]}, None, GenerationConfig(**knob))
    assert (getattr(used, name), used.source(name), used.unused) == (value, "model", {})


@pytest.mark.parametrize(
    "call",
    [{"do_sample": False, "temperature": None, "top_p": None, "top_k": None}, {"temperature": 0.0},
     {"top_k": 50}, {"top_k": 0}, {"min_p": 0.0}, {"length_penalty": 1.0, "early_stopping": False},
     {"output_logits": False}],
)  # fmt: skip
def test_a_value_that_changes_nothing_is_not_called_unused(call):
    GenerationConfig.merge(call)


def test_a_models_hint_is_known_for_one_and_a_models_method_is_none():
    hints = {"use_cache": False, "cache_implementation": "hybrid", "prefill_chunk_size": 8}
    merged = GenerationConfig.merge({}, None, GenerationConfig.from_dict(hints))
    assert {merged.source(name) for name in hints} == {"model"}  # by which the resolver lets them be
    model = GenerationConfig.from_dict({"forced_decoder_ids": [[1, 9]]})
    assert not GenerationConfig.merge({"forced_decoder_ids": None}, None, model).forced_decoder_ids
    greedy = GenerationConfig.merge({}, None, GenerationConfig.from_dict({"typical_p": 0.5}))
    assert greedy.unused == {"typical_p": 0.5}


@pytest.mark.parametrize(
    ("call", "model", "field"),
    [
        ({"min_length": 9, "max_length": 8}, {}, "min_length"),
        ({"max_length": 20}, {"min_length": 56}, "min_length"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, {}, "min_new_tokens"),
        ({"min_new_tokens": 21}, {}, "min_new_tokens"),
        ({"num_beams": 2, "num_return_sequences": 3}, {}, "num_return_sequences"),
        ({"num_beams": 2, "do_sample": True}, {"num_return_sequences": 3}, "num_return_sequences"),
        ({"num_return_sequences": 2}, {}, "num_return_sequences"),
        ({"num_beams": 1}, {"num_return_sequences": 2, "num_beams": 4}, "num_return_sequences"),
        ({"do_sample": True, "temperature": 0.0}, {}, "temperature"),
    ],
)
def test_what_cannot_be_together_is_refused(call, model, field):
    with pytest.raises(ConfigError) as error:
        GenerationConfig.merge(call, None, GenerationConfig.from_dict(model))
    assert field in error.value.field
    assert str(error.value).startswith(f"`{field}` must be ")
    assert (field in model) == ("from the model's generation config" in str(error.value))


def test_contradictions_are_seen_where_they_are_written():
    for both in ({"min_length": 9, "max_length": 8}, {"num_beams": 2, "num_return_sequences": 3}):
        with pytest.raises(ConfigError) as error:
            GenerationConfig(**both)
        assert set(error.value.field) == set(both)
    with pytest.raises(ConfigError, match="`num_beam_groups` must divide `num_beams`"):
        GenerationConfig.from_dict({"num_beam_groups": 3}).replace(num_beams=4)
    GenerationConfig(min_length=9, max_length=8, max_new_tokens=5)  # max_length does not count here
    GenerationConfig(min_length=9, min_new_tokens=2, max_length=8)  # nor min_length here
    GenerationConfig(num_return_sequences=3)  # the model may sample


@pytest.mark.parametrize(
    "call",
    [{"num_return_sequences": 3, "do_sample": True}, {"num_return_sequences": 3, "num_beams": 3},
     {"min_new_tokens": 20}, {"min_new_tokens": 30, "max_length": 100}, {"min_length": 30},
     {"early_stopping": "never", "num_beams": 2, "length_penalty": -1.0}],
)  # fmt: skip
def test_what_can_be_together_is_accepted(call):
    assert GenerationConfig.merge(call).given == set(call)
