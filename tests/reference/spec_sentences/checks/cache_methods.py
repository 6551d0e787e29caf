"""Methods of the caches and of their configs."""

from __future__ import annotations

import json

import torch

from tests.reference.spec_sentences.checks.cache_classes import fed, room
from tests.reference.spec_sentences.library import folder, heard, refused
from tests.reference.spec_sentences.sentence import CACHES, UTILITIES, page

says, api = page(UTILITIES), page(CACHES)


def kv(rows=2, length=3, seed=0):
    """Keys or values [R, H, S, D]."""
    return torch.randn(rows, 2, length, 4, generator=torch.Generator().manual_seed(seed))


def filled(lib, rows=2, length=3):
    """A DynamicCache of two layers."""
    cache = lib.DynamicCache()
    for layer in range(2):
        cache.update(kv(rows, length, layer), kv(rows, length, layer + 5), layer)
    return cache


@says("dyn_update", 2049, "`update` returns all keys and values of the layer.")
def _(lib):
    cache = filled(lib)
    found = cache.update(kv(length=1, seed=9), kv(length=1, seed=10), 0)
    assert torch.equal(found[0], torch.cat((kv(), kv(length=1, seed=9)), 2))
    return list(found)


@says("dyn_reorder", 2051, "`reorder_cache` moves rows as beams move.")
def _(lib):
    cache = filled(lib)
    cache.reorder_cache(torch.tensor([1, 1]))
    return list(cache.key_cache)


@says("dyn_to_legacy", 2052, "`to_legacy_cache` gives tuples of keys and values.")
def _(lib):
    found = filled(lib).to_legacy_cache()
    assert isinstance(found, tuple)
    return [list(layer) for layer in found]


@says("dyn_from_legacy", 2053, "`from_legacy_cache` reads them again.")
def _(lib):
    cache = lib.DynamicCache.from_legacy_cache(filled(lib).to_legacy_cache())
    assert int(cache.get_seq_length()) == 3
    return list(cache.value_cache)


@says("dyn_length", 2050, "`get_seq_length` counts the positions of a layer.")
def _(lib):
    return [
        int(lib.DynamicCache().get_seq_length()),
        int(filled(lib).get_seq_length()),
        int(filled(lib).get_seq_length(1)),
    ]


@api("dyn_crop", 586, "`crop` cuts to a length; a negative one removes so many.")
def _(lib):
    found = []
    for length in (2, -1):
        cache = filled(lib)
        cache.crop(length)
        found.append(int(cache.get_seq_length()))
    return found


@api("dyn_split", 602, "`batch_split` divides the rows.")
def _(lib):
    found = filled(lib, rows=4).batch_split(4, 2)
    return [list(one.key_cache[0].shape) for one in found]


@api("dyn_join", 615, "`from_batch_splits` joins them.")
def _(lib):
    cache = filled(lib, rows=4)
    found = lib.DynamicCache.from_batch_splits(cache.batch_split(4, 2))
    assert torch.equal(found.key_cache[0], cache.key_cache[0])


@api("dyn_repeat", 628, "`batch_repeat_interleave` repeats rows beside each other.")
def _(lib):
    cache = filled(lib)
    cache.batch_repeat_interleave(2)
    return list(cache.key_cache)


@api("dyn_select", 634, "`batch_select_indices` keeps some rows.")
def _(lib):
    cache = filled(lib)
    cache.batch_select_indices(torch.tensor([1]))
    return list(cache.key_cache)


@api("dyn_len", 496, "The length of a cache is its number of layers.")
def _(lib):
    return len(filled(lib))


@api("dyn_iter", 488, "Iteration gives keys and values of each layer.")
def _(lib):
    return [list(pair) for pair in filled(lib)]


@api("dyn_item", 478, "An index gives keys and values of a layer; a layer that is not there is a KeyError.")
def _(lib):
    with refused(KeyError):
        filled(lib)[2]
    return list(filled(lib)[1])


@api("dyn_seen", 189, "`seen_tokens` counts the positions.")
def _(lib):
    cache = lib.DynamicCache()
    fed(lib, cache)
    return int(cache.seen_tokens)


@api("dyn_max", 561, "DynamicCache has no maximum.")
def _(lib):
    return lib.DynamicCache().get_max_cache_shape()


@api("dyn_usable", 167, "Of a cache without a maximum all positions are usable.")
def _(lib):
    return filled(lib).get_usable_length(5)


@api("static_usable", 170, "Of a full cache only what leaves room for the new tokens is usable.")
def _(lib):
    cache = room(lib, "StaticCache", length=10)
    fed(lib, cache)
    return [int(cache.get_usable_length(new)) for new in (1, 4)]


@api("dyn_distributed", 461, "A DynamicCache is made from the layers of another.")
def _(lib):
    return list(lib.DynamicCache([(kv(), kv(seed=1))]).value_cache)


# -------------------------------------------------------------------- configs
@api("cc_impl", 206, "CacheConfig has the name of a cache.")
def _(lib):
    return lib.CacheConfig(cache_implementation="static").cache_implementation


@says("cc_update", 1999, "`update` of a cache config sets known values and returns the others.")
def _(lib):
    made = lib.QuantizedCacheConfig()
    unused = made.update(nbits=2, other=1)
    return made.nbits, unused


@api("cc_dict", 248, "A cache config is written as a dict.")
def _(lib):
    found = lib.QuantizedCacheConfig(nbits=2).to_dict()
    return found["nbits"], found["q_group_size"]


@api(
    "cc_from_dict",
    209,
    "A cache config is read from its own dict.",
)
def _(lib):
    made = lib.QuantizedCacheConfig.from_dict(lib.QuantizedCacheConfig(nbits=2).to_dict())
    assert made.nbits == 2


@api("cc_from_dict_override", 212, "Keywords override the dict.")
def _(lib):
    return lib.QuantizedCacheConfig.from_dict({"nbits": 4}, nbits=2).nbits


@api(
    "cc_json",
    265,
    "A cache config is written as JSON.",
    theirs="Its JSON text fails on the dtype.",
)
def _(lib):
    assert json.loads(lib.QuantizedCacheConfig(nbits=2).to_json_string())["nbits"] == 2


@api("cc_json_static", 230, "A static cache config is written to a JSON file.")
def _(lib):
    with folder() as path:
        lib.StaticCacheConfig(batch_size=1, max_cache_len=8).to_json_file(path / "c.json")
        return json.loads((path / "c.json").read_text())["max_cache_len"]


QUANTIZED = {
    "backend": (2005, "quanto"),
    "nbits": (2007, 4),
    "axis_key": (2009, 0),
    "axis_value": (2011, 0),
    "q_group_size": (2013, 64),
    "residual_length": (2016, 128),
    "compute_dtype": (2019, torch.float16),
    "device": (2021, "cpu"),
}
for _name, (_line, _value) in QUANTIZED.items():

    @says(f"qc_default_{_name}", _line, f"The default of `{_name}` of QuantizedCacheConfig is {_value!r}.")
    def _(lib, name=_name, value=_value):
        assert getattr(lib.QuantizedCacheConfig(), name) == value


for _name, _wrong in (
    ("nbits", {"nbits": 5}),
    ("q_group_size", {"q_group_size": -1}),
    ("residual_length", {"residual_length": -1}),
):

    @says(f"qc_validate_{_name}", 2024, f"`validate` refuses a wrong `{_name}`.")
    def _(lib, wrong=_wrong):
        with refused(ValueError):
            lib.QuantizedCacheConfig(**wrong).validate()


@says("qc_validate", 2024, "`validate` accepts the defaults.")
def _(lib):
    assert lib.QuantizedCacheConfig().validate() is None


for _name, _wrong in (
    ("batch_size", {"batch_size": 0, "max_cache_len": 4}),
    ("max_cache_len", {"batch_size": 1, "max_cache_len": 0}),
):

    @api(f"sc_config_{_name}", 409, f"`validate` of a static cache config refuses a wrong `{_name}`.")
    def _(lib, wrong=_wrong):
        with refused(ValueError):
            lib.StaticCacheConfig(**wrong).validate()


# -------------------------------------------------------------------- quantized
def quantized(lib, kind="QuantoQuantizedCache", **more):
    """A quantized cache for heads of 32."""
    given = {"nbits": 4, "q_group_size": 32, "residual_length": 4, "compute_dtype": torch.float32, **more}
    return getattr(lib, kind)(cache_config=lib.QuantizedCacheConfig(**given))


@says("quanto", 2090, "QuantoQuantizedCache goes through a forward.")
def _(lib):
    cache = quantized(lib)
    found = fed(lib, cache, "wide")
    assert type(cache).__name__ == "QuantoQuantizedCache"
    return found


@says("quanto_residual", 2060, "Beyond `residual_length` keys are quantized; all positions are counted.")
def _(lib):
    cache = quantized(lib)
    fed(lib, cache, "wide", (6, *(1,) * 8))
    return int(cache.get_seq_length())


@says("quanto_int2", 2071, "Quanto has 2 bits.")
def _(lib):
    return fed(lib, quantized(lib, nbits=2), "wide")


@says("quanto_bits", 2071, "Quanto has no other bits than 2 and 4.")
def _(lib):
    with refused(ValueError):
        quantized(lib, nbits=8)


@says("quanto_axis", 2010, "Quanto's axes are 0 and -1.")
def _(lib):
    with refused(ValueError):
        quantized(lib, axis_key=1)


@says("hqq_axis", 2010, "HQQ's axes are 0 and 1.")
def _(lib):
    with heard(), refused(ValueError):
        quantized(lib, "HQQQuantizedCache", backend="HQQ", axis_key=-1, axis_value=-1)
