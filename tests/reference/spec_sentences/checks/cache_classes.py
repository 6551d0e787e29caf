"""The cache classes in a forward loop of the user's own."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import heard, refused
from tests.reference.spec_sentences.sentence import CACHES, UTILITIES, page

says, api = page(UTILITIES), page(CACHES)

EAGER = {"attn_implementation": "eager"}
BATCH_SIZE = "4.52.4 calls the argument `max_batch_size`."
CUDA = "4.52.4 needs a CUDA device."


def fed(lib, cache, name="llama", widths=(6, 1, 1, 1), rows=1, past="past_key_values", **options):
    """The logits of forwards over a cache [R, L, V]."""
    model = lib.model(name, **options)
    ids, found, at = lib.ids(name, sum(widths), rows), [], 0
    for width in widths:
        given = {"input_ids": ids[:, at : at + width], past: cache, "use_cache": True}
        if lib.needs_cache_position:
            given["cache_position"] = torch.arange(at, at + width)
        out = model(**given)
        assert out[past] is cache
        found.append(out.logits)
        at += width
    return torch.cat(found, 1)


def whole(lib, name="llama", length=9, rows=1, **options):
    """The logits of one forward without a cache."""
    return lib.model(name, **options)(lib.ids(name, length, rows), use_cache=False).logits


def close(ours, theirs):
    assert (ours - theirs).abs().max() < 1e-3


def room(lib, kind, name="llama", rows=1, length=16, named="max_batch_size", **more):
    """A cache of fixed size for a model."""
    model = lib.model(name)
    given = {named: rows, "max_cache_len": length, "device": model.device, "dtype": model.dtype}
    return getattr(lib, kind)(config=model.config, **given, **more)


@says("ca_base", 1992, "Cache is an abstract base: `update` is not implemented.")
def _(lib):
    key = torch.zeros(1, 1, 1, 1)
    with refused(Exception):
        lib.Cache().update(key, key, 0)


for _kind in (
    "DynamicCache",
    "QuantizedCache",
    "QuantoQuantizedCache",
    "HQQQuantizedCache",
    "SinkCache",
    "OffloadedCache",
    "StaticCache",
    "OffloadedStaticCache",
    "HybridCache",
    "SlidingWindowCache",
    "EncoderDecoderCache",
):

    @says(f"ca_sub_{_kind}", 1992, f"{_kind} is a subclass of Cache.")
    def _(lib, kind=_kind):
        assert issubclass(getattr(lib, kind), lib.Cache)


# -------------------------------------------------------------------- dynamic
@says("dyn", 2043, "DynamicCache goes through a forward and comes back in its output.")
def _(lib):
    cache = lib.DynamicCache()
    fed(lib, cache, widths=(6,))
    return [type(cache).__name__, int(cache.get_seq_length())]


@says("dyn_shape", 2029, "DynamicCache has keys of batch, heads, length and head size for each layer.")
def _(lib):
    cache = lib.DynamicCache()
    fed(lib, cache, rows=2)
    return [list(one.shape) for one in (*cache.key_cache, *cache.value_cache)]


@says("dyn_grow", 2027, "DynamicCache grows with the tokens.")
def _(lib):
    cache = lib.DynamicCache()
    close(fed(lib, cache), whole(lib))
    return int(cache.get_seq_length())


@says("dyn_values", 2029, "DynamicCache holds the model's keys and values.")
def _(lib):
    cache = lib.DynamicCache()
    fed(lib, cache)
    return list(cache.key_cache), list(cache.value_cache)


# -------------------------------------------------------------------- sink
@says("sink", 2149, "SinkCache goes through a forward as the example has it.")
def _(lib):
    with heard():
        cache = lib.SinkCache(window_length=256, num_sink_tokens=4)
        close(fed(lib, cache, widths=(9,)), whole(lib))
    return type(cache).__name__


@says("sink_forward", 2126, "SinkCache goes on beyond its window in the user's own loop.")
def _(lib):
    with heard():
        cache = lib.SinkCache(window_length=8, num_sink_tokens=2)
        found = fed(lib, cache, widths=(8, *(1,) * 12))
    assert bool(torch.isfinite(found).all())
    assert (found - whole(lib, length=20)).abs().max() > 1e-2


@says("sink_gen", 2125, "SinkCache generates beyond its window.")
def _(lib):
    with heard():
        cache = lib.SinkCache(window_length=8, num_sink_tokens=2)
        found = lib.model().generate(lib.ids(), past_key_values=cache, max_new_tokens=20, eos_token_id=None)
    assert found.shape[1] == 26


@says("sink_length", 2156, "The length of a SinkCache is that of the cached states.")
def _(lib):
    found = []
    with heard():
        for count in (3, 5, 24):
            cache = lib.SinkCache(window_length=12, num_sink_tokens=2)
            fed(lib, cache, widths=(6, *(1,) * count))
            found.append(int(cache.get_seq_length()))
        cache = lib.SinkCache(window_length=12, num_sink_tokens=2)
        lib.model().generate(lib.ids(), past_key_values=cache, max_new_tokens=30, eos_token_id=None)
    return found, int(cache.get_seq_length()), int(cache.get_seq_length(1))


@says("quantized_attrs", 2101, "A quantized cache has its settings as attributes.")
def _(lib):
    settings = {"nbits": 4, "axis_key": 0, "axis_value": 0, "q_group_size": 16, "residual_length": 8}
    cache = lib.QuantoQuantizedCache(lib.QuantizedCacheConfig(**settings, compute_dtype=torch.float32))
    assert cache.compute_dtype == torch.float32
    return {name: getattr(cache, name) for name in settings}, str(cache.device)


@says("sink_attrs", 2133, "SinkCache knows its window and its sinks.")
def _(lib):
    with heard():
        cache = lib.SinkCache(window_length=8, num_sink_tokens=2)
    return cache.window_length, cache.num_sink_tokens, cache.get_max_cache_shape()


@says("sink_reorder", 2157, "SinkCache can be reordered.")
def _(lib):
    with heard():
        cache = lib.SinkCache(window_length=30, num_sink_tokens=2)
        fed(lib, cache, rows=2)
    before = cache.key_cache[0].clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.allclose(cache.key_cache[0], before[[1, 0]])


# -------------------------------------------------------------------- offloaded
@says("offloaded", 2160, "OffloadedCache replaces DynamicCache.", theirs=CUDA)
def _(lib):
    close(fed(lib, lib.OffloadedCache()), whole(lib))


@says("offloaded_methods", 2171, "OffloadedCache prefetches and evicts layers.", theirs=CUDA)
def _(lib):
    cache = lib.OffloadedCache()
    fed(lib, cache)
    cache.prefetch_layer(1)
    cache.evict_previous_layer(1)


# -------------------------------------------------------------------- static
@says("static", 2206, "StaticCache is made with `batch_size`.", theirs=BATCH_SIZE)
def _(lib):
    close(fed(lib, room(lib, "StaticCache", named="batch_size")), whole(lib))


@says("static2", 2175, "StaticCache goes through forwards.")
def _(lib):
    cache = room(lib, "StaticCache")
    close(fed(lib, cache), whole(lib))
    return type(cache).__name__


@says("static_len", 2213, "StaticCache counts the positions it has read.")
def _(lib):
    cache = room(lib, "StaticCache")
    fed(lib, cache)
    return int(cache.get_seq_length())


@says("static_reset", 2214, "A reset StaticCache is empty and can be used again.")
def _(lib):
    cache = room(lib, "StaticCache")
    fed(lib, cache)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    close(fed(lib, cache), whole(lib))


@says("static_reset_zero", 2214, "A reset StaticCache has zeros.")
def _(lib):
    cache = room(lib, "StaticCache")
    fed(lib, cache)
    cache.reset()
    assert not bool(cache.key_cache[0].any())


@api("static_shape", 1322, "StaticCache has keys of its full length.")
def _(lib):
    cache = room(lib, "StaticCache", rows=2)
    fed(lib, cache, rows=2)
    return [list(one.shape) for one in cache.key_cache]


@api("static_now", 1324, "The blocks of StaticCache are there right after it is made.")
def _(lib):
    cache = room(lib, "StaticCache", rows=2)
    assert not bool(cache.value_cache[0].any())
    return [list(one.shape) for one in cache.key_cache]


@says("static_dtype", 2187, "The default dtype of StaticCache is float32.")
def _(lib):
    cache = lib.StaticCache(config=lib.model().config, max_batch_size=1, max_cache_len=8)
    assert cache.key_cache[0].dtype == torch.float32


@says("static_device", 2185, "The default device of StaticCache is the CPU.")
def _(lib):
    cache = lib.StaticCache(config=lib.model().config, max_batch_size=1, max_cache_len=8)
    assert cache.key_cache[0].device.type == "cpu"


@says("static_max", 2183, "StaticCache knows its maximum length; without one it is the model's.")
def _(lib):
    config = lib.model().config
    return [
        lib.StaticCache(config=config, max_batch_size=1, **given).get_max_cache_shape()
        for given in ({"max_cache_len": 8}, {})
    ]


@says("offstatic", 2270, "OffloadedStaticCache goes through forwards.", theirs=CUDA)
def _(lib):
    close(fed(lib, room(lib, "OffloadedStaticCache")), whole(lib))


@says("offstatic_attrs", 2240, "OffloadedStaticCache has its documented attributes.", theirs=CUDA)
def _(lib):
    cache = room(lib, "OffloadedStaticCache")
    assert cache.max_batch_size == 1
    assert cache.max_cache_len == 16
    assert cache.dtype == torch.float32
    assert cache.device.type == cache.offload_device.type == "cpu"
    assert len(cache.key_cache) == len(cache.value_cache) == 2


@says("offstatic_reset", 2277, "OffloadedStaticCache can be reset.", theirs=CUDA)
def _(lib):
    cache = room(lib, "OffloadedStaticCache")
    fed(lib, cache)
    cache.reset()
    assert int(cache.get_seq_length()) == 0


# -------------------------------------------------------------------- hybrid and sliding windows
@says("hybrid", 2313, "HybridCache is made with `batch_size`.", theirs=BATCH_SIZE)
def _(lib):
    cache = room(lib, "HybridCache", "gemma2", named="batch_size")
    close(fed(lib, cache, "gemma2", **EAGER), whole(lib, "gemma2", **EAGER))


@says("hybrid2", 2280, "HybridCache goes beyond the window of a Gemma 2.")
def _(lib):
    cache = room(lib, "HybridCache", "gemma2")
    close(fed(lib, cache, "gemma2", (5, 1, 1, 1, 1), **EAGER), whole(lib, "gemma2", **EAGER))


@says("hybrid_reset", 2322, "HybridCache can be reset and used again.")
def _(lib):
    cache = room(lib, "HybridCache", "gemma2")
    fed(lib, cache, "gemma2", (5, 1), **EAGER)
    cache.reset()
    close(fed(lib, cache, "gemma2", (5, 1, 1, 1, 1), **EAGER), whole(lib, "gemma2", **EAGER))


@says("sliding", 2366, "SlidingWindowCache is made with `batch_size`.", theirs=BATCH_SIZE)
def _(lib):
    cache = room(lib, "SlidingWindowCache", "mistral", named="batch_size")
    close(fed(lib, cache, "mistral", (5, 1, 1, 1, 1)), whole(lib, "mistral"))


@says("sliding2", 2328, "SlidingWindowCache replaces the oldest positions beyond the window.")
def _(lib):
    cache = room(lib, "SlidingWindowCache", "mistral")
    close(fed(lib, cache, "mistral", (5, 1, 1, 1, 1)), whole(lib, "mistral"))
