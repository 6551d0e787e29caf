"""Caches in generate: by name, by config and as objects."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.checks.cache_classes import room
from tests.reference.spec_sentences.library import heard, refused
from tests.reference.spec_sentences.sentence import CACHES, CONFIG, GENERATE, UTILITIES, page

says, field, call, api = page(UTILITIES), page(CONFIG), page(GENERATE), page(CACHES)

CUDA = "4.52.4 needs a CUDA device."


def plain(lib, name="llama", count=6):
    """Tokens with the default cache."""
    return lib.model(name).generate(lib.ids(name), max_new_tokens=count, eos_token_id=None)


def cached(lib, name="llama", count=6, **more):
    with heard():
        return lib.model(name).generate(lib.ids(name), max_new_tokens=count, eos_token_id=None, **more)


def quantized(lib, settings):
    """Tokens with a quantized cache of these settings."""
    found = lib.model("wide").generate(
        lib.ids("wide"),
        cache_implementation="quantized",
        cache_config=settings,
        max_new_tokens=4,
        eos_token_id=None,
    )
    assert found.shape[1] == 10
    return found


@says("ci_static", 2682, "`cache_implementation='static'` gives the tokens of the default.")
def _(lib):
    found = cached(lib, cache_implementation="static")
    assert torch.equal(found, plain(lib))
    return found


NAMES = {
    "sliding_window": ("mistral", ""),
    "hybrid": ("gemma2", ""),
    "offloaded": ("llama", CUDA),
    "offloaded_static": ("llama", CUDA),
}
for _name, (_model, _theirs) in NAMES.items():

    @field(
        f"ci_{_name}",
        181,
        f"`cache_implementation={_name!r}` gives the tokens of the default.",
        theirs=_theirs,
    )
    def _(lib, name=_name, model=_model):
        # A prompt below the windows: those of 4.52.4 read no longer one.
        given = {"max_new_tokens": 6, "eos_token_id": None}
        with heard():
            found = lib.model(model).generate(lib.ids(model, 4), cache_implementation=name, **given)
        assert torch.equal(found, lib.model(model).generate(lib.ids(model, 4), **given))


@field("ci_bad", 181, "An unknown cache implementation is an error.")
def _(lib):
    with refused(ValueError):
        cached(lib, cache_implementation="no such cache")


@field("quanto_ci", 189, "`cache_implementation='quantized'` takes a config object.")
def _(lib):
    return quantized(lib, lib.QuantizedCacheConfig(nbits=4, q_group_size=32, compute_dtype=torch.float32))


@field("quanto_ci_dict", 194, "`cache_config` may be a dict.")
def _(lib):
    return quantized(lib, {"nbits": 4, "q_group_size": 32, "compute_dtype": torch.float32})


@call("pkv", 2314, "A DynamicCache given as `past_key_values` is filled.")
def _(lib):
    cache = lib.DynamicCache()
    found = cached(lib, past_key_values=cache)
    assert torch.equal(found, plain(lib))
    return int(cache.get_seq_length())


@call("pkv_again", 2314, "A second call goes on from a filled cache with the whole text.")
def _(lib):
    cache = lib.DynamicCache()
    first = cached(lib, past_key_values=cache)
    more = torch.cat((first, torch.tensor([[7, 8]])), 1)
    given = {"attention_mask": torch.ones_like(more), "max_new_tokens": 4, "eos_token_id": None}
    found = lib.model().generate(more, past_key_values=cache, **given)
    assert torch.equal(found, lib.model().generate(more, **given))
    return found


@call("pkv_static", 2314, "A StaticCache may be given as `past_key_values`.")
def _(lib):
    found = cached(lib, past_key_values=room(lib, "StaticCache", length=24), disable_compile=True)
    assert torch.equal(found, plain(lib))


@call("pkv_sliding", 2314, "A SlidingWindowCache may be given as `past_key_values`.")
def _(lib):
    model = lib.model("mistral")
    ids = lib.ids("mistral", 4)
    given = {"max_new_tokens": 5, "eos_token_id": None}
    with heard():
        found = model.generate(
            ids, past_key_values=room(lib, "SlidingWindowCache", "mistral", length=24), **given
        )
    assert torch.equal(found, model.generate(ids, **given))


@call("pkv_hybrid", 2314, "A HybridCache may be given as `past_key_values`.")
def _(lib):
    found = cached(lib, "gemma2", past_key_values=room(lib, "HybridCache", "gemma2", length=24))
    assert torch.equal(found, plain(lib, "gemma2"))


@call("pkv_encdec", 2314, "An EncoderDecoderCache may be given as `past_key_values`.")
def _(lib):
    cache = lib.EncoderDecoderCache(lib.DynamicCache(), lib.DynamicCache())
    assert torch.equal(cached(lib, "bart", past_key_values=cache), plain(lib, "bart"))


@call("pkv_encdec_filled", 2314, "An EncoderDecoderCache that is given is filled.")
def _(lib):
    cache = lib.EncoderDecoderCache(lib.DynamicCache(), lib.DynamicCache())
    cached(lib, "bart", past_key_values=cache)
    assert int(cache.get_seq_length()) == 6
    assert all(cache.is_updated.values())
    parts = cache.self_attention_cache, cache.cross_attention_cache
    return [[list(part.key_cache), list(part.value_cache)] for part in parts]


@field("legacy", 198, "`return_legacy_cache=True` returns the cache as tuples.")
def _(lib):
    with heard():
        out = lib.model().generate(
            lib.ids(),
            return_legacy_cache=True,
            return_dict_in_generate=True,
            use_cache=True,
            max_new_tokens=3,
            eos_token_id=None,
        )
    assert isinstance(out.past_key_values, tuple)
    return [[list(one.shape) for one in layer] for layer in out.past_key_values]


@call("cache_beams", 2314, "The cache of a search with beams is returned.")
def _(lib):
    out = lib.model().generate(
        lib.ids(),
        num_beams=3,
        use_cache=True,
        return_dict_in_generate=True,
        max_new_tokens=3,
        eos_token_id=None,
    )
    assert out.past_key_values is not None


@field("mamba_gen", 181, "A Mamba model generates with its recurrent state.")
def _(lib):
    found = lib.model("mamba").generate(lib.ids("mamba"), max_new_tokens=5, eos_token_id=None)
    assert torch.equal(
        found,
        lib.model("mamba").generate(lib.ids("mamba"), max_new_tokens=5, eos_token_id=None, use_cache=False),
    )
    return found
