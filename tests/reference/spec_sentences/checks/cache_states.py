"""EncoderDecoderCache and MambaCache in a forward loop of the user's own."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.checks.cache_classes import BATCH_SIZE, close
from tests.reference.spec_sentences.sentence import CACHES, UTILITIES, page

says, api = page(UTILITIES), page(CACHES)


# -------------------------------------------------------------------- encoder and decoder
def encdec(lib, cache, widths=(3, 1, 1)):
    """The logits of decoder forwards over a cache."""
    model, ids, said = lib.model("bart"), lib.ids("bart"), lib.ids("bart", 5, seed=8)
    found, at = [], 0
    for width in widths:
        given = {"input_ids": ids, "decoder_input_ids": said[:, at : at + width]}
        found.append(model(**given, past_key_values=cache, use_cache=True).logits)
        at += width
    want = model(input_ids=ids, decoder_input_ids=said, use_cache=False).logits
    close(torch.cat(found, 1), want[:, :at])
    return cache


@says("encdec", 2391, "EncoderDecoderCache of two caches goes through forwards.")
def _(lib):
    cache = encdec(lib, lib.EncoderDecoderCache(lib.DynamicCache(), lib.DynamicCache()))
    return int(cache.get_seq_length()), int(cache.cross_attention_cache.get_seq_length())


@api("encdec_foreign", 1539, "EncoderDecoderCache takes transformers' own caches.")
def _(lib):
    import transformers

    encdec(lib, lib.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache()))


@says("encdec_legacy", 2400, "EncoderDecoderCache is written as tuples and read again.")
def _(lib):
    cache = encdec(lib, lib.EncoderDecoderCache(lib.DynamicCache(), lib.DynamicCache()))
    tuples = cache.to_legacy_cache()
    again = lib.EncoderDecoderCache.from_legacy_cache(tuples)
    assert int(again.get_seq_length()) == 5
    return [[list(one.shape) for one in layer] for layer in tuples]


@says("encdec_reorder", 2403, "EncoderDecoderCache can be reordered.")
def _(lib):
    cache = encdec(lib, lib.EncoderDecoderCache(lib.DynamicCache(), lib.DynamicCache()))
    cache.reorder_cache(torch.tensor([0, 0]))
    return [list(one.shape) for one in cache.to_legacy_cache()[0]]


@says(
    "encdec_reset",
    2402,
    "EncoderDecoderCache can be reset.",
    theirs="Its DynamicCache has no `reset`.",
)
def _(lib):
    cache = encdec(lib, lib.EncoderDecoderCache(lib.DynamicCache(), lib.DynamicCache()))
    cache.reset()
    encdec(lib, cache)


@api("encdec_crop", 1638, "EncoderDecoderCache is cut to `maximum_length`; a negative one removes so many.")
def _(lib):
    cache = encdec(lib, lib.EncoderDecoderCache(lib.DynamicCache(), lib.DynamicCache()))
    cache.crop(maximum_length=4)
    found = [int(cache.get_seq_length())]
    cache.crop(-1)
    return [*found, int(cache.get_seq_length())]


# -------------------------------------------------------------------- mamba
@says("mamba", 2421, "MambaCache has its documented attributes.")
def _(lib):
    cache = lib.MambaCache(config=lib.model("mamba").config, max_batch_size=2, dtype=torch.float32)
    return [
        cache.intermediate_size,
        cache.ssm_state_size,
        cache.conv_kernel_size,
        [list(one.shape) for one in cache.conv_states],
        [list(one.shape) for one in cache.ssm_states],
    ]


@says("mamba_literal", 2446, "MambaCache is made with `batch_size`.", theirs=BATCH_SIZE)
def _(lib):
    model = lib.model("mamba")
    cache = lib.MambaCache(config=model.config, batch_size=1, device=model.device, dtype=model.dtype)
    assert cache.dtype == torch.float32


@says("mamba_dtype", 2416, "The default dtype of MambaCache is float16.")
def _(lib):
    cache = lib.MambaCache(config=lib.model("mamba").config, max_batch_size=1)
    assert cache.conv_states[0].dtype == torch.float16


@says(
    "mamba_forward",
    2447,
    "A Mamba model takes its cache as `past_key_values`.",
    ours="The models of transformers call the argument `cache_params`.",
    theirs="Its model calls the argument `cache_params`.",
)
def _(lib):
    model = lib.model("mamba")
    cache = lib.MambaCache(config=model.config, max_batch_size=1, device=model.device, dtype=model.dtype)
    assert model(lib.ids("mamba"), past_key_values=cache, use_cache=True).past_key_values is cache


@says("mamba_reset", 2454, "MambaCache can be reset.")
def _(lib):
    cache = lib.MambaCache(config=lib.model("mamba").config, max_batch_size=1, dtype=torch.float32)
    cache.update_ssm_state(0, torch.ones(1, 64, 4))
    cache.reset()
    assert not bool(cache.ssm_states[0].any())


@says("mamba_update", 2452, "MambaCache takes states of a convolution and of a state space.")
def _(lib):
    cache = lib.MambaCache(config=lib.model("mamba").config, max_batch_size=1, dtype=torch.float32)
    cache.update_conv_state(0, torch.ones(1, 64, 4), torch.arange(4))
    cache.update_ssm_state(1, torch.full((1, 64, 4), 2.0))
    return cache.conv_states[0], cache.ssm_states[1]
