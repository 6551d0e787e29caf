"""GenerationConfig: what it prints, what is saved and read, and its methods."""

from __future__ import annotations

import inspect
import json

from tests.reference.spec_sentences.library import folder, refused
from tests.reference.spec_sentences.sentence import CONFIG, GENERATE, STRATEGIES, page

says = page(STRATEGIES)
field = page(CONFIG)
call = page(GENERATE)

STRICT = "An unknown name is an error, so that a misspelt parameter is found."


@says("cfg_repr", 66, "A printed config shows only values that differ from the defaults.")
def _(lib):
    text = str(lib.GenerationConfig(bos_token_id=7, num_beams=1, top_k=50))
    assert "bos_token_id" in text
    assert "num_beams" not in text
    assert "temperature" not in text


@says("cfg_repr_form", 59, "The printed form is the class name and the values as indented JSON.")
def _(lib):
    text = repr(lib.GenerationConfig(bos_token_id=7, eos_token_id=7))
    head, body = text.split(" ", 1)
    assert head == "GenerationConfig"
    found = json.loads(body)
    assert '\n  "bos_token_id": 7' in text
    return {name: found[name] for name in ("bos_token_id", "eos_token_id")}


@says("cfg_maxlen", 69, "The default length limit is 20 tokens.")
def _(lib):
    return lib.GenerationConfig().max_length


@says("cfg_greedy_defaults", 245, "By default there is one beam and no sampling.")
def _(lib):
    config = lib.GenerationConfig()
    return config.num_beams, config.do_sample


@says("cfg_model", 51, "A loaded model shows its config as `model.generation_config`.")
def _(lib):
    config = lib.model().generation_config
    return config.bos_token_id, config.eos_token_id, config.pad_token_id


@says("cfg_save", 104, "Saved without a file name, a config is generation_config.json.")
def _(lib):
    with folder() as path:
        lib.GenerationConfig(max_new_tokens=50, do_sample=True, top_k=7).save_pretrained(path)
        assert (path / "generation_config.json").exists()
        config = lib.GenerationConfig.from_pretrained(path)
    return config.max_new_tokens, config.do_sample, config.top_k


@says("cfg_push", 105, "Saving takes `push_to_hub`.")
def _(lib):
    assert "push_to_hub" in inspect.signature(lib.GenerationConfig.save_pretrained).parameters


@field("cfg_push_method", 104, "A config has a method `push_to_hub`, which takes the repository.")
def _(lib):
    assert "repo_id" in inspect.signature(lib.GenerationConfig.push_to_hub).parameters


@says("cfg_several", 117, "Several configs are kept in one folder under names of their own.")
def _(lib):
    with folder() as path:
        lib.GenerationConfig(num_beams=4).save_pretrained(path, "beams.json")
        lib.GenerationConfig(do_sample=True).save_pretrained(path, "sampling.json")
        beams = lib.GenerationConfig.from_pretrained(path, "beams.json")
        sampling = lib.GenerationConfig.from_pretrained(path, "sampling.json")
    return beams.num_beams, beams.do_sample, sampling.num_beams, sampling.do_sample


@says("cfg_literal_pad_token", 128, "The example's config with `pad_token=` can be made and saved.")
def _(lib):
    config = lib.GenerationConfig(
        num_beams=4, early_stopping=True, decoder_start_token_id=0, eos_token_id=1, pad_token=0
    )
    with folder() as path:
        config.save_pretrained(path, "translation.json")
        read = lib.GenerationConfig.from_pretrained(path, "translation.json")
    return read.num_beams, read.early_stopping, read.decoder_start_token_id, read.eos_token_id


@says("cfg_roundtrip_generate", 140, "A config that was read from a file parameterizes generate.")
def _(lib):
    with folder() as path:
        lib.GenerationConfig(num_beams=4, early_stopping=True, max_new_tokens=6).save_pretrained(
            path, "t.json"
        )
        config = lib.GenerationConfig.from_pretrained(path, "t.json")
    return lib.model("t5").generate(lib.ids("t5"), generation_config=config)


@says("kw_over_config", 76, "A keyword of generate overrides the value of the config.")
def _(lib):
    config = lib.GenerationConfig(max_new_tokens=9)
    return lib.model().generate(lib.ids(), generation_config=config, max_new_tokens=2)


@says("kw_over_model", 76, "A keyword of generate overrides the model's own config.")
def _(lib):
    found = lib.model().generate(lib.ids(), max_new_tokens=3, eos_token_id=None)
    assert found.shape == (1, 9)
    return found


@says("model_config_used", 46, "Without a config, the model's own is used.")
def _(lib):
    found = lib.model("t5").generate(lib.ids("t5"), max_new_tokens=2)
    assert int(found[0, 0]) == lib.model("t5").generation_config.decoder_start_token_id
    return found


@call("arg_over_model", 2263, "The config argument is the base of the call in place of the model's own.")
def _(lib):
    config = lib.GenerationConfig(max_new_tokens=4, eos_token_id=5, pad_token_id=0)
    return lib.model().generate(lib.ids(), generation_config=config)


@call("arg_fills", 2266, "Values that the given config lacks come from the model's config.")
def _(lib):
    return lib.model("t5").generate(lib.ids("t5"), generation_config=lib.GenerationConfig(max_new_tokens=3))


@field("gc_from_dict", 1108, "A config is made from a dict of its values.")
def _(lib):
    config = lib.GenerationConfig.from_dict({"num_beams": 3, "max_new_tokens": 5})
    return config.num_beams, config.max_new_tokens


@field("gc_from_dict_kwargs", 1108, "Keywords of `from_dict` override the dict.")
def _(lib):
    return lib.GenerationConfig.from_dict({"num_beams": 3}, num_beams=2).num_beams


@field(
    "gc_from_dict_unused",
    1114,
    "`from_dict` returns the keywords that it did not use where they are asked for.",
    theirs="4.52.4 keeps unknown keywords as attributes, so that none is unused.",
)
def _(lib):
    config, unused = lib.GenerationConfig.from_dict({"num_beams": 3}, return_unused_kwargs=True, other=1)
    assert config.num_beams == 3
    assert unused == {"other": 1}


@field("gc_json", 1199, "A config is written as JSON text.")
def _(lib):
    return json.loads(lib.GenerationConfig(num_beams=3).to_json_string())["num_beams"]


@field("gc_to_dict", 1176, "A config is written as a dict.")
def _(lib):
    return lib.GenerationConfig(num_beams=3, top_p=0.5).to_dict()["num_beams"]


@field("gc_diff", 1153, "The dict of differences has only values other than the defaults.")
def _(lib):
    found = lib.GenerationConfig(num_beams=3, temperature=1.0).to_diff_dict()
    assert found["num_beams"] == 3
    assert "temperature" not in found


@field("gc_json_file", 1243, "A config is written to a JSON file of any name.")
def _(lib):
    with folder() as path:
        lib.GenerationConfig(num_beams=3).to_json_file(path / "mine.json")
        return json.loads((path / "mine.json").read_text())["num_beams"]


@field("gc_update", 1301, "`update` sets known values and returns the others.")
def _(lib):
    config = lib.GenerationConfig()
    unused = config.update(num_beams=3, other=1)
    return config.num_beams, unused


@field("gc_validate", 599, "`validate` accepts a sound config and refuses a wrong value.")
def _(lib):
    assert lib.GenerationConfig(num_beams=3).validate() is None
    with refused(ValueError):
        config = lib.GenerationConfig(num_beams=3)
        config.update(max_new_tokens=-1)
        config.validate()


MODES = {
    "greedy_search": {},
    "sample": {"do_sample": True},
    "beam_search": {"num_beams": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 4},
    "group_beam_search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained_beam_search": {"num_beams": 2, "force_words_ids": [[5]]},
    "dola_generation": {"dola_layers": "low"},
    "assisted_generation": {"prompt_lookup_num_tokens": 3},
}
for _mode, _given in MODES.items():

    @field(f"gc_mode_{_mode}", 534, f"`get_generation_mode` names {_mode.replace('_', ' ')}.")
    def _(lib, mode=_mode, given=_given):
        found = lib.GenerationConfig(**given).get_generation_mode()
        assert found == mode
        return str(getattr(found, "value", found))


@field("gc_mode_assistant", 534, "With a draft model the mode is assisted generation.")
def _(lib):
    assert lib.GenerationConfig().get_generation_mode(assistant_model=object()) == "assisted_generation"


@field("gc_from_model", 1258, "A config is made from the values in an older model config.")
def _(lib):
    config = lib.GenerationConfig.from_model_config(lib.model().config)
    return config.bos_token_id, config.eos_token_id, config.pad_token_id


@field("gc_set", 401, "Attributes of a config can be set.")
def _(lib):
    config = lib.GenerationConfig(max_new_tokens=5)
    before = lib.model().generate(lib.ids(), generation_config=config)
    config.num_beams = 3
    config.max_new_tokens = 4
    return before, lib.model().generate(lib.ids(), generation_config=config)


@field("gc_watermark", 1374, "The watermark of a config is an object of its class, also after a file.")
def _(lib):
    made = lib.GenerationConfig(watermarking_config=lib.WatermarkingConfig(bias=1.5))
    with folder() as path:
        made.save_pretrained(path)
        read = lib.GenerationConfig.from_pretrained(path)
    for config in (made, read):
        assert isinstance(config.watermarking_config, lib.WatermarkingConfig)
    return made.watermarking_config.bias, read.watermarking_config.bias


@field("gc_cache_config", 424, "The settings of a quantized cache are an object of their class.")
def _(lib):
    given = {"cache_implementation": "quantized", "cache_config": {"nbits": 2}}
    config = lib.GenerationConfig(**given)
    assert isinstance(config.cache_config, lib.QuantizedCacheConfig)
    return config.cache_config.nbits, config.cache_config.q_group_size


@field("gc_compile_config", 1381, "The settings of compilation are an object of their class.")
def _(lib):
    config = lib.GenerationConfig(compile_config=lib.CompileConfig(mode="default", dynamic=True))
    assert isinstance(config.compile_config, lib.CompileConfig)
    return config.compile_config.mode, config.compile_config.dynamic


@field("gc_file_entries", 505, "Entries of a file that are no parameters are attributes of the config.")
def _(lib):
    config = lib.GenerationConfig.from_dict({"num_beams": 3, "lang_to_id": {"<|en|>": 7}})
    assert not hasattr(config, "no_such_entry")
    return config.lang_to_id["<|en|>"]


@field("gc_extra", 505, "Unknown keywords are kept as attributes of the config.", ours=STRICT)
def _(lib):
    assert lib.GenerationConfig(something=1).something == 1


@field("gc_equal", 523, "Configs with equal values are equal.")
def _(lib):
    assert lib.GenerationConfig(num_beams=2) == lib.GenerationConfig(num_beams=2)
    assert lib.GenerationConfig(num_beams=2) != lib.GenerationConfig(num_beams=3)


@field("gc_file_none", 844, "A file name of None stands for generation_config.json.")
def _(lib):
    with folder() as path:
        lib.GenerationConfig(num_beams=3).save_pretrained(path, None)
        return lib.GenerationConfig.from_pretrained(path, config_file_name=None).num_beams


@field("gc_cache_dir", 918, "Reading takes a folder for downloads and a revision.")
def _(lib):
    with folder() as path:
        lib.GenerationConfig(num_beams=3).save_pretrained(path)
        return lib.GenerationConfig.from_pretrained(path, cache_dir=path, revision="main").num_beams


@call("gen_unknown", 2314, "An unknown keyword of generate is an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), max_new_tokens=2, no_such_thing=1)


@call("gc_transformers_object", 2263, "The model's own config object can be given as the argument.")
def _(lib):
    model = lib.model()
    return model.generate(lib.ids(), generation_config=model.generation_config, max_new_tokens=3)
