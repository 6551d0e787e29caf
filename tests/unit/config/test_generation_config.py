"""GenerationConfig as a whole: its table, its value, its files, and the laws of both."""

import copy
import json
import pickle
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import descant
from descant.config.generation_config import (
    FIELDS,
    GROUPS,
    GenerationConfig,
)
from descant.errors import ConfigError, DescantError, HubError, InputError
from tests.reference.spec_sentences.checks.config_defaults import DEFAULTS
from tests.support.config_cases import EVERY_VALUE, made

# The parameters that transformers 4.52.4 documents, with its defaults, and where ours differ.
DOCUMENTED = {
    **{name: default for name, (_, default) in DEFAULTS.items()},
    "return_legacy_cache": None, "prefill_chunk_size": None, "low_memory": None, "output_logits": None,
    "compile_config": None, "generation_kwargs": {},
    # Documented: "constant". How many tokens are drafted never changes what comes out, only how soon.
    "num_assistant_tokens_schedule": "adaptive",
}  # fmt: skip
OURS = {
    "seed": None, "top_h": None, "top_n_sigma": None, "p_less": False, "xtc_probability": 0.0,
    "xtc_threshold": 0.1, "dynamic_temperature_range": 0.0, "dynamic_temperature_exponent": 1.0,
    "mirostat_tau": None, "mirostat_eta": 0.1, "adaptive_p_target": None, "adaptive_p_decay": 0.9,
    "no_repeat_ngram_window": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_range": 0, "dry_sequence_breakers": None,
    "logit_bias": None, "thinking_budget": None, "thinking_message": None, "thinking_start": None,
    "thinking_end": None,
    "processor_order": None, "prefix_allowed_tokens_fn": None, "stop_token_ids": None, "stop_regex": None,
    "logprobs": None, "logprobs_support": False, "return_timestamps": False, "no_timestamps_token_id": None,
    "max_initial_timestamp_index": None, "ordered_constraints": False, "constraint_gap": 0,
    "banned_phrases": None, "suffix_lookup_num_tokens": None, "suffix_lookup_shared": False, "grammar": None,
}  # fmt: skip

# -- the table


def test_every_documented_parameter_is_declared_with_its_default():
    assert set(FIELDS) == set(DOCUMENTED) | set(OURS)
    config = GenerationConfig()
    for name, default in {**DOCUMENTED, **OURS}.items():
        assert getattr(config, name) == default == FIELDS[name].default, name
        assert type(getattr(config, name)) is type(default) or default == {}, name
        assert config.source(name) == "default"
    assert config.given == frozenset()


def test_the_table_is_fit_for_a_document():
    for name, field in FIELDS.items():
        assert field.name == name
        assert field.group in GROUPS
        assert field.type
        assert field.doc.endswith(".")
        assert "\n" not in field.doc
    assert {field.group for field in FIELDS.values()} == set(GROUPS)
    assert len({field.doc for field in FIELDS.values()}) == len(FIELDS)


# -- the config as a value


def test_it_is_keyword_only_and_replaceable():
    config = GenerationConfig(num_beams=4)
    with pytest.raises(TypeError):
        GenerationConfig(4)
    other = config.replace(num_beams=2, max_new_tokens=5)
    assert (config.num_beams, other.num_beams, other.max_new_tokens) == (4, 2, 5)
    assert other.given == {"num_beams", "max_new_tokens"}
    assert other.replace(max_length=9).replace(max_length=None) == other
    with pytest.raises(ConfigError, match="num_beams"):
        config.replace(num_beams=0)


def test_equality_and_hash_are_by_given_value():
    same = {GenerationConfig(top_p=0.5, eos_token_id=[1]), GenerationConfig(eos_token_id=(1,), top_p=0.5)}
    assert len(same) == 1
    assert GenerationConfig(top_p=0.5) != GenerationConfig(top_p=0.6)
    assert GenerationConfig() != GenerationConfig(max_length=20)  # 20 new tokens, or 20 in all
    assert GenerationConfig() != GenerationConfig.from_dict({"lang_to_id": {}})
    assert GenerationConfig() != {}


def test_copies_and_pickles_are_equal():
    config = GenerationConfig.merge(
        {"num_beams": 2}, None, GenerationConfig.from_dict({"x": [1], "penalty_alpha": 0.6})
    )
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
        assert (twin.source("num_beams"), twin.extra, twin.unused) == (
            "call",
            {"x": (1,)},
            {"penalty_alpha": 0.6},
        )


def test_repr_shows_what_differs_from_the_default_in_the_documented_form():
    assert repr(GenerationConfig()) == "GenerationConfig {}\n"
    config = GenerationConfig(bos_token_id=50256, eos_token_id=50256, max_length=20)
    assert repr(config) == 'GenerationConfig {\n  "bos_token_id": 50256,\n  "eos_token_id": 50256\n}\n'
    objects = GenerationConfig(prefix_allowed_tokens_fn=len, sequence_bias={(1, 2): 0.5}, top_p=0.5)
    shown = json.loads(repr(objects).removeprefix("GenerationConfig "))
    assert shown == {
        "prefix_allowed_tokens_fn": repr(len), "sequence_bias": {"(1, 2)": 0.5}, "top_p": 0.5
    }  # fmt: skip


def test_an_attribute_is_checked_when_it_is_set():
    config = GenerationConfig.merge(
        {"num_beams": 4}, None, GenerationConfig.from_dict({"lang_to_id": {"a": 1}})
    )
    running = GenerationConfig.merge({}, config)
    config.num_beams, config.top_k = 2, None
    assert (config.num_beams, config.top_k, running.num_beams) == (2, 0, 4)
    assert config.source("num_beams") == "argument"
    assert config == config.replace(num_beams=2)
    assert config.lang_to_id == {"a": 1}, "an entry of a file"
    config.lang_to_id = {"a": 2}
    assert json.loads(config.to_json_string())["lang_to_id"] == {"a": 2}
    for name, value in (("num_beams", 0), ("num_return_sequences", 3), ("num_beam", 2), ("_values", {})):
        before = copy.copy(config)
        with pytest.raises(ConfigError, match=name):
            setattr(config, name, value)
        assert config == before
    with pytest.raises(AttributeError, match="set it to None"):
        del config.num_beams
    assert not hasattr(config, "num_beam")


def test_update_changes_in_place_and_returns_what_is_no_field():
    config = GenerationConfig(num_beams=4, top_p=0.5)
    twin, deep = copy.copy(config), copy.deepcopy(config)
    assert config.update(num_beams=2, top_p=None, alien=3) == {"alien": 3}
    assert (config.num_beams, config.top_p) == (2, 1.0)
    assert (twin.num_beams, deep.num_beams) == (4, 4)
    with pytest.raises(ConfigError, match="num_return_sequences"):
        config.update(length_penalty=2.0, num_return_sequences=3)
    assert config.length_penalty == 1.0, "all or nothing"


def test_validate_checks_alone_or_as_a_call_would():
    cold = GenerationConfig(temperature=0.5)
    cold.validate()
    with pytest.raises(ConfigError, match="temperature"):
        cold.validate(strict=True)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "greedy_search"), ({"do_sample": True}, "sample"), ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"penalty_alpha": 0.6, "top_k": 1}, "greedy_search"),
        ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0}, "group_beam_search"),
        ({"num_beams": 2, "force_words_ids": [[5]]}, "constrained_beam_search"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"), ({"dola_layers": "low"}, "dola_generation"),
    ],
)  # fmt: skip
def test_the_mode_is_that_of_transformers(fields, mode):
    theirs = pytest.importorskip("transformers.generation").GenerationMode
    ours = GenerationConfig(**fields).get_generation_mode()
    assert (ours, ours.name, str(ours)) == (descant.GenerationMode(mode), mode.upper(), mode)
    if mode.upper() in theirs.__members__:
        assert ours == theirs(mode)
    helped = GenerationConfig(**fields).get_generation_mode(assistant_model=object())
    assert (helped == "assisted_generation") == (mode in ("greedy_search", "sample", "assisted_generation"))


def test_the_documented_pad_token_is_the_pad_token_id():
    """As in the documentation's example of a saved config."""
    config = GenerationConfig(
        num_beams=4, early_stopping=True, decoder_start_token_id=0, eos_token_id=1, pad_token=0
    )
    assert (config.pad_token_id, config.given & {"pad_token", "pad_token_id"}) == (0, {"pad_token_id"})
    assert GenerationConfig(pad_token=None).pad_token_id is None
    with pytest.raises(ConfigError, match="must be a token id"):
        GenerationConfig(pad_token="<pad>")
    with pytest.raises(ConfigError, match="the same parameter"):
        GenerationConfig(pad_token=0, pad_token_id=1)


def test_documented_arguments_of_files(tmp_path):
    config = GenerationConfig(num_beams=4)
    config.save_pretrained(tmp_path, config_file_name=None)
    read = GenerationConfig.from_pretrained(tmp_path, None, tmp_path / "cache", revision="main")
    assert read == config
    again, unused = GenerationConfig.from_pretrained(
        tmp_path, num_beams=2, alien=1, return_unused_kwargs=True
    )
    assert (again.num_beams, unused) == (2, {"alien": 1})
    made, rest = GenerationConfig.from_dict({"top_k": 3}, top_p=0.5, alien=1, return_unused_kwargs=True)
    assert (made, rest) == (GenerationConfig(top_k=3, top_p=0.5), {"alien": 1})
    with pytest.raises(ConfigError, match="alien"):
        GenerationConfig.from_dict({}, alien=1)


def test_arguments_inside_generation_kwargs_are_fields_and_inputs():
    config = GenerationConfig(
        num_beams=2, generation_kwargs={"num_beams": 3, "eos_token_id": [1, 2], "alien": 5}
    )
    merged = GenerationConfig.merge({"eos_token_id": 7}, config)
    assert (merged.num_beams, merged.eos_token_id, merged.generation_kwargs) == (3, 7, {"alien": 5})
    with pytest.raises(ConfigError, match="generation_kwargs"):
        GenerationConfig.merge({}, GenerationConfig(generation_kwargs={"generation_kwargs": {}}))
    with pytest.raises(ConfigError, match="must be an int"):
        GenerationConfig.merge({}, GenerationConfig(generation_kwargs={"num_beams": 0}))


def test_explain_calls_the_explainer_of_the_class(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(GenerationConfig.explainer, "load", None)
        with pytest.raises(DescantError, match=r"`GenerationConfig\.explainer\.load` must be set"):
            GenerationConfig().explain()
    monkeypatch.setattr(GenerationConfig, "explainer", lambda config, model: f"{config.num_beams} {model}")
    assert GenerationConfig(num_beams=3).explain("m") == "3 m"


# -- files

# As transformers 4.52.4 and 5.22.2 write them.
CHAT = """{
  "_from_model_config": true,
  "bos_token_id": 128000,
  "do_sample": true,
  "eos_token_id": [
    128001,
    128009
  ],
  "temperature": 0.6,
  "top_p": 0.9,
  "transformers_version": "%s"
}
"""
SPEECH = """{
  "alignment_heads": [[1, 0], [2, 0]],
  "begin_suppress_tokens": [220, 50256],
  "forced_decoder_ids": [[1, null], [2, 50359]],
  "is_multilingual": true,
  "lang_to_id": {"<|en|>": 50259},
  "prev_sot_token_id": null,
  "suppress_tokens": [1, 2],
  "transformers_version": "%s"
}
"""
ODD = """{
  "cache_implementation": "static",
  "exponential_decay_length_penalty": [10, 1.1],
  "pad_token_id": -1,
  "sequence_bias": {"(1, 2)": -1.0, "(3,)": 2.5},
  "transformers_version": "%s",
  "watermarking_config": {"bias": 2.0, "context_width": 1, "seeding_scheme": "selfhash"}
}
"""


@pytest.mark.parametrize("version", ["4.52.4", "5.22.2"])
def test_files_of_transformers_are_read(tmp_path, version):
    (tmp_path / "generation_config.json").write_text(CHAT % version)
    (tmp_path / "speech.json").write_text(SPEECH % version)
    (tmp_path / "odd.json").write_text(ODD % version)
    chat = GenerationConfig.from_pretrained(tmp_path, temperature=0.5)
    assert chat.to_diff_dict() == {
        "do_sample": True, "temperature": 0.5, "top_p": 0.9, "bos_token_id": 128000,
        "eos_token_id": [128001, 128009],
    }  # fmt: skip
    assert chat.extra == {}
    speech = GenerationConfig.from_pretrained(tmp_path, "speech.json")
    assert speech.forced_decoder_ids == ((1, None), (2, 50359))
    assert set(speech.extra) == {"alignment_heads", "is_multilingual", "lang_to_id"}
    assert json.loads(speech.to_json_string())["lang_to_id"] == {"<|en|>": 50259}
    odd = GenerationConfig.from_pretrained(tmp_path, config_file_name="odd.json")
    assert odd.sequence_bias == {(1, 2): -1.0, (3,): 2.5}
    assert odd.pad_token_id is None
    assert odd.watermarking_config.seeding_scheme == "selfhash"
    for config in (chat, speech, odd):
        config.save_pretrained(tmp_path / "new")
        first = (tmp_path / "new" / "generation_config.json").read_bytes()
        GenerationConfig.from_pretrained(tmp_path / "new").save_pretrained(tmp_path / "new")
        assert (tmp_path / "new" / "generation_config.json").read_bytes() == first


def test_a_default_is_given_in_a_file_of_5_and_not_in_one_of_4():
    written = {"do_sample": False, "max_length": 20, "num_beams": 3}
    assert GenerationConfig.from_dict({**written, "transformers_version": "4.52.4"}).given == {"num_beams"}
    assert GenerationConfig.from_dict({**written, "transformers_version": "5.22.2"}).given == set(written)
    assert GenerationConfig.from_dict(written).given == set(written)


def test_a_file_is_sorted_indented_and_ends_with_a_newline(tmp_path):
    config = GenerationConfig(top_p=0.5, max_length=20, eos_token_id=[2, 1], pad_token_id=None)
    config.save_pretrained(tmp_path / "a" / "b", config_file_name="mine.json")
    text = (tmp_path / "a" / "b" / "mine.json").read_text()
    assert text == '{\n  "eos_token_id": [\n    2,\n    1\n  ],\n  "max_length": 20,\n  "top_p": 0.5\n}\n'
    assert text == config.to_json_string()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["mine.json"]


def test_a_file_does_not_depend_on_the_order_of_writing_or_on_the_type_of_keys():
    alien = made("alien", {"a": {9: 1, 10: 2}})
    assert alien == made("alien", {"a": {"10": 2, "9": 1}})
    assert GenerationConfig.from_dict(json.loads(alien.to_json_string())) == alien
    one, other = made("sequence_bias", {(3,): 1, (1, 2): 2}), made("sequence_bias", {(1, 2): 2, (3,): 1})
    assert one == other
    assert one.to_json_string() == other.to_json_string()


def test_dicts_have_all_fields_or_only_the_differences():
    config = GenerationConfig.from_dict({"top_k": 50, "top_p": 0.5, "alien": {"a": [1]}})
    assert config.to_dict() == {**dict.fromkeys(FIELDS), "top_k": 50, "top_p": 0.5, "alien": {"a": [1]}}
    assert config.to_diff_dict() == {"top_p": 0.5}
    assert GenerationConfig.from_dict(config.to_dict()) == config


def test_generation_fields_of_a_model_config_are_read(tmp_path):
    legacy = {"vocab_size": 9, "top_p": 1.0, "max_length": 20, "num_beams": 4, "eos_token_id": 2,
              "pad_token_id": -1, "use_cache": False,
              "decoder": {"bos_token_id": 7, "eos_token_id": 8}}  # fmt: skip
    config = GenerationConfig.from_model_config(SimpleNamespace(to_dict=lambda: legacy), num_beams=2)
    assert config == GenerationConfig(num_beams=2, eos_token_id=2, bos_token_id=7)
    (tmp_path / "config.json").write_text(json.dumps(legacy))
    assert GenerationConfig.from_pretrained(tmp_path, num_beams=2) == config
    with pytest.raises(InputError, match=r"other\.json"):
        GenerationConfig.from_pretrained(tmp_path, "other.json")


def test_objects_of_transformers_are_taken_by_shape():
    five = SimpleNamespace(
        to_dict=lambda: {"do_sample": False, "top_k": None, "use_mtp": None, "transformers_version": "5.22.2"}
    )
    assert GenerationConfig.from_transformers(five) == GenerationConfig(do_sample=False)
    plain = SimpleNamespace(num_beams=2, _hash=1, lang_to_id={"<|en|>": 50259})
    assert GenerationConfig.from_transformers(plain).extra == {"lang_to_id": {"<|en|>": 50259}}
    for stranger in (3, "gpt2", None, int, print, {1: 2}, [("num_beams", 2)]):
        with pytest.raises(InputError):
            GenerationConfig.from_transformers(stranger)


def test_the_installed_transformers_agrees(tmp_path):
    theirs = pytest.importorskip("transformers").GenerationConfig
    asked = {"do_sample": True, "top_k": 7, "eos_token_id": [3, 4], "max_new_tokens": 9}
    theirs(**asked).save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path) == GenerationConfig(**asked)
    assert GenerationConfig.from_transformers(theirs(**asked)) == GenerationConfig(**asked)
    assert GenerationConfig.from_transformers(theirs()) == GenerationConfig()
    GenerationConfig(**asked).save_pretrained(tmp_path)
    assert {name: getattr(theirs.from_pretrained(tmp_path), name) for name in asked} == asked


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"3", b"\xff\xfe{}", b"[" * 100_000, b'{"a": ' * 50_000]
)
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        GenerationConfig.from_pretrained(tmp_path)


def test_bad_paths_and_unwritable_values_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = GenerationConfig()
    for attempt, field in (
        (lambda: GenerationConfig.from_pretrained(tmp_path / "gone"), "path"),
        (lambda: GenerationConfig.from_pretrained(tmp_path), "config_file_name"),
        (lambda: GenerationConfig.from_pretrained(tmp_path, "../x.json"), "config_file_name"),
        (lambda: config.save_pretrained(tmp_path, ""), "config_file_name"),
        (lambda: config.save_pretrained(tmp_path / "file"), "save_directory"),
    ):
        with pytest.raises(InputError) as error:
            attempt()
        assert error.value.field == field
    with pytest.raises(InputError, match="`repo_id` must be None without `push_to_hub`"):
        config.save_pretrained(tmp_path, repo_id="ann/configs")
    with pytest.raises(HubError, match="offline"):
        config.save_pretrained(tmp_path / "file.d", push_to_hub=True, token="hf_never_used")
    assert GenerationConfig.from_pretrained(tmp_path / "file.d") == config
    shutil.rmtree(tmp_path / "file.d")
    with pytest.raises(ConfigError, match="`constraints` must be representable as JSON"):
        made("constraints", [object()]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="`alien` must be plain data"):
        made("alien", {"a": {1, 2}})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- laws

STRANGE = [
    np.int64(3), np.float64(0.5), torch.tensor(2), torch.tensor([1, 2]), torch.tensor([]), object(), int, 1j,
]  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 60) | st.floats() | st.floats(0, 1)
    | st.text(max_size=3) | st.sampled_from(STRANGE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip
names = st.sampled_from([*FIELDS, "tempurature", "beams"])
good = st.sampled_from([(n, v) for n, v in EVERY_VALUE])
sound = st.lists(good, max_size=6).map(dict)
kwargs = st.dictionaries(names, anything, max_size=4) | sound
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
UNWRITABLE = ("constraints", "prefix_allowed_tokens_fn")
contents = st.builds(
    lambda known, alien: {**alien, **dict(known)},
    st.lists(st.sampled_from([pair for pair in EVERY_VALUE if pair[0] not in UNWRITABLE]), max_size=12),
    st.dictionaries(st.text(max_size=6), plain, max_size=3).map(
        lambda d: {k: v for k, v in d.items() if k not in FIELDS}
    ),
)


def attempt(make):
    """What came of it: a config, or the error if it is the kind of error that is allowed."""
    try:
        return make(), None
    except ConfigError as error:
        return None, error


@settings(max_examples=200, deadline=None)
@given(kwargs)
def test_any_arguments_give_a_config_or_an_error_that_names_the_field(arguments):
    config, error = attempt(lambda: GenerationConfig(**arguments))
    if error is None:
        assert config.given <= set(arguments)
        assert hash(config) == hash(GenerationConfig(**arguments))
    else:
        named = (error.field,) if isinstance(error.field, str) else error.field
        assert set(named) <= set(arguments)
        assert all(f"`{name}`" in str(error) for name in named)
        assert len(str(error)) < 400


@settings(max_examples=200, deadline=None)
@given(sound, sound, contents)
def test_any_merge_gives_the_nearest_value_or_an_error_that_names_a_given_field(call, argument, model):
    first, refused = attempt(lambda: [GenerationConfig(**call), GenerationConfig(**argument)])
    if refused:
        return
    levels = {"call": first[0], "argument": first[1], "model": GenerationConfig.from_dict(model)}
    merged, error = attempt(lambda: GenerationConfig.merge(call, levels["argument"], levels["model"]))
    if error is not None:
        named = (error.field,) if isinstance(error.field, str) else error.field
        given = [name for name in named if any(name in level.given for level in levels.values())]
        assert given
        assert any(f"`{name}`" in str(error) for name in given)
        return
    for name in FIELDS:
        source = next((level for level, config in levels.items() if name in config.given), "default")
        if name in merged.unused:
            assert merged.unused[name] == getattr(levels[source], name)
            source = "default"
        wanted = FIELDS[name].default if source == "default" else getattr(levels[source], name)
        assert (merged.source(name), getattr(merged, name)) == (source, wanted)
    assert GenerationConfig.merge({}, merged) == merged


def test_the_order_of_a_schema_is_written_and_shown():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    config = GenerationConfig(grammar={"json_schema": schema}, max_new_tokens=3, logit_bias={7: 1.0, 5: 2.0})
    for text in (config.to_json_string(), repr(config)):
        assert text.index('"b": {}') < text.index('"a": {}')
        assert text.index('"5"') < text.index('"7"')
        assert text.index('"grammar"') < text.index('"max_new_tokens"')
