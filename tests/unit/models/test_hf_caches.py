"""The documented caches, passed to a model's forward step after step."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers

import descant
from descant.config.cache_config import QuantizedCacheConfig
from descant.errors import ConfigError, InputError
from descant.kv_cache.stores.dense import DenseStore
from descant.models.compat.hf_caches.convert import EncoderDecoderCache, to_descant_cache
from descant.models.compat.hf_caches.dynamic import (
    DynamicCache,
    H2OCache,
    HQQQuantizedCache,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    QuantoQuantizedCache,
    SinkCache,
    SnapKVCache,
)
from descant.models.compat.hf_caches.recurrent import MambaCache, RecurrentCache
from descant.models.compat.hf_caches.sized import (
    HybridCache,
    OffloadedStaticCache,
    SlidingWindowCache,
    StaticCache,
)
from tests.support.extras import need_hqq
from tests.support.manual_forwards import feeds, level, loader, padded, stepped, whole
from tests.support.tiny_models import pad, prompts
from tools.sweep.catalogue import entries
from tools.sweep.trial import subject_of

# Rounding of fp32: the same products in another order.
NEAR = 5e-5
WIDTHS = (7, 1, 1, 3, 1, 1, 1, 2, 1)
LENGTH = sum(WIDTHS)


def sized(kind):
    """A cache that is made as its documentation makes it."""

    def make(model, rows):
        named = {"batch_size": rows} if kind is not OffloadedStaticCache else {"max_batch_size": rows}
        room = {"max_cache_len": 40, "device": model.device, "dtype": model.dtype}
        return kind(config=model.config, **named, **room)

    return make


# All caches without eviction of visible positions: name -> constructor and models.
EXACT = {
    "dynamic": (lambda model, rows: DynamicCache(), ("llama", "gpt2", "gpt-neox", "mistral", "gemma2")),
    "static": (sized(StaticCache), ("llama", "gpt2", "mistral")),
    "offloaded": (lambda model, rows: OffloadedCache(), ("llama", "opt")),
    # A device of another name, to which everything has to travel.
    "offloaded elsewhere": (lambda model, rows: OffloadedCache(offload_device="cpu:0"), ("llama", "mistral")),
    "offloaded static": (sized(OffloadedStaticCache), ("llama", "gpt2")),
    "paged": (lambda model, rows: PagedCache(block_size=4), ("llama", "mistral", "gemma2")),
    "sliding window": (sized(SlidingWindowCache), ("mistral",)),
    "hybrid": (sized(HybridCache), ("gemma2",)),
    "sink": (lambda model, rows: SinkCache(64, 4), ("llama",)),
    "snapkv": (lambda model, rows: SnapKVCache(64), ("llama",)),
    "h2o": (lambda model, rows: H2OCache(64), ("llama",)),
}
CASES = [(kind, name) for kind, (_, names) in EXACT.items() for name in names]
# Of a padded batch these would keep what padding looks at.
NEUTRAL = [case for case in CASES if case[0] not in ("snapkv", "h2o")]


@pytest.fixture(scope="module")
def get(tiny, tmp_path_factory):
    return loader(tmp_path_factory.mktemp("more"), tiny)


def attention(name):
    return {"attn_implementation": "eager"} if name == "gemma2" else {}


def close(ours, theirs, near=NEAR):
    assert (ours - theirs).abs().max() < near


# -------------------------------------------------------------------- forwards
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_steps_equal_one_forward(kind, name, get):
    model = get(name, **attention(name)).model
    cache = EXACT[kind][0](model, 3)
    assert isinstance(cache, transformers.cache_utils.Cache)
    assert isinstance(cache, descant.Cache)
    ids = level(get(name, **attention(name)), LENGTH)
    close(stepped(model, cache, feeds(ids, WIDTHS)), whole(model, ids))
    assert cache.get_seq_length() == LENGTH
    assert len(cache) == model.config.num_hidden_layers
    assert cache.lengths.tolist() == [LENGTH] * 3
    assert repr(cache) == f"{type(cache).__name__}()"
    assert cache.is_initialized


@pytest.mark.parametrize(("kind", "name"), NEUTRAL)
@pytest.mark.parametrize("is_declared", [False, True], ids=["padded", "declared"])
def test_padded_rows_equal_one_forward_and_declared_padding_is_not_kept(kind, name, is_declared, get):
    subject = get(name, **attention(name))
    lengths = (LENGTH, LENGTH - 4, LENGTH - (6 if is_declared else 9))
    ids, mask = padded(subject, lengths)
    cache = EXACT[kind][0](subject.model, 3)
    cache = cache.set_padding(mask[:, :7]) if is_declared else cache
    said = stepped(subject.model, cache, feeds(ids, WIDTHS, mask))
    close(said[mask.bool()], whole(subject.model, ids, mask)[mask.bool()])
    assert not is_declared or cache.lengths.tolist() == list(lengths)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["dynamic", "paged", "static"])
def test_eager_attention(kind, name, get):
    subject = get(name, attn_implementation="eager")
    ids, mask = padded(subject, (LENGTH, LENGTH - 4, LENGTH - 9))
    said = stepped(subject.model, EXACT[kind][0](subject.model, 3), feeds(ids, WIDTHS, mask))
    close(said[mask.bool()], whole(subject.model, ids, mask)[mask.bool()])


def test_a_forward_without_a_mask_counts_positions_by_the_cache(get):
    """As documented: ids and the cache, nothing else."""
    subject = get("qwen2")
    ids, cache = level(subject, 6), DynamicCache()
    out = subject.model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert out.past_key_values is cache
    assert not cache.key_cache[0].requires_grad
    with torch.no_grad():
        close(out.logits, whole(subject.model, ids))


def test_gradients_reach_what_was_fed(get):
    subject = get("llama")
    ids, found = level(subject, 8), []
    for cache in (DynamicCache(), transformers.DynamicCache()):
        subject.model.zero_grad()
        subject.model(input_ids=ids, past_key_values=cache, use_cache=True).logits.sum().backward()
        found.append([one.grad.clone() for one in subject.model.parameters()])
    subject.model.zero_grad()
    assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("kind", [DynamicCache, PagedCache])
def test_encoder_decoder(kind, name, get):
    subject = get(name)
    ids, mask = pad(prompts(subject.arch, (9, 5, 7), seed=3), subject.pad, "right")
    said = level(subject, 10, seed=5)
    beside = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        want = subject.model(**beside, decoder_input_ids=said, use_cache=False).logits
    cache = EncoderDecoderCache(kind(), kind())
    assert isinstance(cache, transformers.EncoderDecoderCache)
    fed = [{"decoder_input_ids": one["input_ids"]} for one in feeds(said, (4, 1, 1, 2, 1, 1))]
    close(stepped(subject.model, cache, fed, **beside), want)
    assert cache.get_seq_length() == 10
    assert cache.cross_attention_cache.get_seq_length() == 9
    assert [tuple(one.shape[:3]) for one in cache[0]] == [(3, 4, 10), (3, 4, 10), (3, 4, 9), (3, 4, 9)]

    tuples = cache.to_legacy_cache()
    assert all(len(layer) == 4 for layer in tuples)
    again = EncoderDecoderCache.from_legacy_cache(tuples)
    again.crop(-2)
    close(stepped(subject.model, again, fed[-2:], **beside), want[:, 8:])
    again.reorder_cache(torch.tensor([2, 0]))
    again.crop(8)
    two = {name: value[[2, 0]] for name, value in beside.items()}
    fed = [{"decoder_input_ids": one["decoder_input_ids"][[2, 0]]} for one in fed[-2:]]
    close(stepped(subject.model, again, fed, **two), want[[2, 0], 8:])
    for given in ({}, {"maximum_length": 2, "max_length": 2}):
        with pytest.raises(InputError, match="`maximum_length` must be given once"):
            again.crop(**given)
    again.reset()
    assert not any(again.is_updated.values())
    close(stepped(subject.model, again, [{"decoder_input_ids": said}], **beside), want)


@pytest.mark.parametrize("filled", [False, True])
def test_encoder_decoder_of_transformers_caches(filled, get):
    subject = get("bart")
    beside, said = {"input_ids": level(subject, 9)}, level(subject, 8, seed=4)
    with torch.no_grad():
        want = subject.model(**beside, decoder_input_ids=said, use_cache=False).logits
    fed = [{"decoder_input_ids": one["input_ids"]} for one in feeds(said, (5, 1, 1, 1))]
    parts = transformers.DynamicCache(), transformers.DynamicCache()
    if filled:
        stepped(subject.model, transformers.EncoderDecoderCache(*parts), fed[:1], **beside)
    cache = EncoderDecoderCache(*parts)
    assert all(cache.is_updated.values()) is True
    close(stepped(subject.model, cache, fed[1:] if filled else fed, **beside), want[:, 5 if filled else 0 :])
    assert isinstance(cache.self_attention_cache, DynamicCache)
    mixed = EncoderDecoderCache(DynamicCache(), transformers.DynamicCache())
    close(stepped(subject.model, mixed, fed, **beside), want)


def test_encoder_decoder_of_what_is_no_kv_cache_is_refused():
    both = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    for wrong in (3, [], both, EncoderDecoderCache(DynamicCache(), DynamicCache())):
        with pytest.raises(InputError, match="`cross_attention_cache` must be a cache of keys and values"):
            EncoderDecoderCache(DynamicCache(), wrong)


# -------------------------------------------------------------------- state
def mamba(subject, rows):
    return MambaCache(subject.model.config, rows, device=subject.model.device, dtype=subject.model.dtype)


@pytest.mark.parametrize("prompt", [1, 2, 7])
def test_mamba(prompt, get):
    subject = get("mamba")
    cache, ids = mamba(subject, 3), level(subject, 12)
    assert isinstance(cache, transformers.cache_utils.Cache)
    assert cache.conv_states.shape == (2, 3, 64, 4)
    assert cache.ssm_states.shape == (2, 3, 64, 4)
    assert (cache.intermediate_size, cache.ssm_state_size, cache.conv_kernel_size) == (64, 4, 4)
    fed = feeds(ids, (prompt, *(1,) * (12 - prompt)))
    close(stepped(subject.model, cache, fed, "cache_params"), whole(subject.model, ids))
    assert cache.lengths.tolist() == cache.commit_store().lengths.tolist() == [12, 12, 12]
    assert cache.nbytes == sum(one.nbytes for one in (cache.conv_states, cache.ssm_states))


def test_mamba_is_moved_copied_and_reset(get):
    subject = get("mamba")
    cache, ids = mamba(subject, 3), level(subject, 12)
    want = whole(subject.model, ids)
    stepped(subject.model, cache, feeds(ids, (9,)), "cache_params")
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([2, 0, 1]))
    fed = feeds(ids[[2, 0, 1]], (1, 1, 1), first=9)
    close(stepped(subject.model, other, fed, "cache_params"), want[[2, 0, 1], 9:])
    assert cache.lengths.tolist() == [9, 9, 9]
    fed = feeds(ids, (1, 1, 1), first=9)
    close(stepped(subject.model, cache, fed, "cache_params"), want[:, 9:])
    cache.set_store(other.commit_store())
    assert torch.equal(cache.ssm_states, other.ssm_states)
    cache.reset()
    assert not cache.conv_states.any()
    assert cache.lengths.tolist() == [0, 0, 0]
    close(stepped(subject.model, cache, feeds(ids, (9,)), "cache_params"), want[:, :9])


# -------------------------------------------------------------------- rows
@pytest.mark.parametrize("kind", list(EXACT))
def test_rows_are_cut_moved_split_and_forgotten(kind, get):
    make, names = EXACT[kind]
    subject = get(names[0], **attention(names[0]))
    ids = level(subject, 14)
    want = whole(subject.model, ids)

    def goes_on(cache, rows, at):
        said = stepped(subject.model, cache, feeds(ids[rows], (1,) * (14 - at), first=at))
        close(said, want[rows, at:])

    room = {"static", "offloaded static", "sliding window", "hybrid"} & {kind}
    cache = make(subject.model, 6 if room else 3)
    stepped(subject.model, cache, feeds(ids, (10, 1, 1)))
    cache.crop(10)
    assert cache.get_seq_length() == 10
    cache.crop(-1)
    assert cache.get_seq_length() == 9
    cache.crop(0)
    cache.crop(99)
    assert cache.get_seq_length() == 9

    cache.reorder_cache(torch.tensor([2, 0, 1]))
    parts = cache.batch_split(3, 2)
    assert [len(part.commit_store()) for part in parts] == [2, 1]
    goes_on(parts[0], [2, 0], 9)
    goes_on(parts[1], [1], 9)
    assert cache.lengths.tolist() == [9, 9, 9]

    together = type(cache).from_batch_splits(cache.batch_split(3, 1))
    goes_on(together, [2, 0, 1], 9)
    other = copy.deepcopy(cache)
    other.batch_repeat_interleave(2)
    goes_on(other, [2, 2, 0, 0, 1, 1], 9)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    goes_on(cache, [2, 1], 9)
    cache.reset()
    assert cache.get_seq_length() == 0
    close(stepped(subject.model, cache, feeds(ids, (9, 5))), want)
    with pytest.raises(InputError, match="row indices of a cache of 3 rows"):
        cache.reorder_cache(torch.tensor([3]))


def test_layers_are_sent_for_and_let_go(get):
    subject = get("llama")
    cache, ids = OffloadedCache(offload_device="cpu:0"), level(subject, 10)
    cache.prefetch_layer(0)
    stepped(subject.model, cache, feeds(ids, (8, 1)))
    resting = cache.nbytes
    cache.prefetch_layer(1)
    assert cache.nbytes > resting
    cache.evict_previous_layer(2)
    assert cache.nbytes == resting
    cache.prefetch_layer(0)
    close(stepped(subject.model, cache, feeds(ids, (1,), first=9)), whole(subject.model, ids)[:, 9:])
    cache.prefetch_layer(7)
    assert cache.nbytes == resting


def test_a_cache_reports_its_max_rewind(get):
    subject = get("mistral")
    cache = sized(SlidingWindowCache)(subject.model, 1)
    cache.max_cache_len = None
    stepped(subject.model, cache, feeds(level(subject, 90, rows=1), (90,)))
    cache.crop(-64)
    cache = sized(SlidingWindowCache)(subject.model, 1)
    stepped(subject.model, cache, feeds(level(subject, 90, rows=1), (90,)))
    with pytest.raises(InputError, match="remove at most 64 positions of a SlidingWindowCache"):
        cache.crop(-65)


@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded", "paged"])
def test_layers_can_be_read(kind, get):
    subject = get("llama")
    ids = level(subject, 9)
    cache, theirs = EXACT[kind][0](subject.model, 3), transformers.DynamicCache()
    for one in (cache, theirs):
        stepped(subject.model, one, feeds(ids, (6, 1, 1, 1)))
    for layer, (key, value) in enumerate(cache):
        assert torch.allclose(key, theirs.layers[layer].keys, atol=NEAR)
        assert torch.allclose(value, theirs.layers[layer].values, atol=NEAR)
        assert torch.equal(cache[layer][0], cache.layers[layer].keys)
        assert torch.equal(cache.key_cache[layer][:, :, :9], key)
        assert torch.equal(cache.value_cache[layer][:, :, :9], value)
    with pytest.raises(KeyError):
        cache[2]
    assert cache
    assert DynamicCache()


def test_tuples_and_back(get):
    subject = get("llama")
    ids = level(subject, 12)
    cache = DynamicCache()
    stepped(subject.model, cache, feeds(ids, (8,)))
    tuples = cache.to_legacy_cache()
    assert isinstance(tuples, tuple)
    assert [tuple(one.shape) for one in tuples[0]] == [(3, 2, 8, 8), (3, 2, 8, 8)]
    want, before = whole(subject.model, ids)[:, 8:], copy.deepcopy(tuples)
    for kind in (DynamicCache, PagedCache, OffloadedCache):
        again = kind.from_legacy_cache(tuples)
        assert again.get_seq_length() == 8
        close(stepped(subject.model, again, feeds(ids, (2, 1, 1), first=8)), want)
    cache.crop(4)
    stepped(subject.model, cache, feeds(ids.flip(1), (4,)))
    assert all(
        torch.equal(a, b) for x, y in zip(tuples, before, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert len(DynamicCache.from_legacy_cache(None)) == 0


def test_a_frozen_cache_is_not_written_to(get):
    subject = get("llama")
    ids, cache = level(subject, 9), DynamicCache()
    stepped(subject.model, cache, feeds(ids, (8,)))
    cache.read_only = True
    for change in (
        lambda: stepped(subject.model, cache, feeds(ids, (1,), first=8)),
        lambda: cache.crop(2),
        cache.reset,
        lambda: cache.reorder_cache(torch.tensor([0])),
    ):
        with pytest.raises(InputError, match="frozen"):
            change()
    close(stepped(subject.model, cache.copy(), feeds(ids, (1,), first=8)), whole(subject.model, ids)[:, 8:])
    assert cache.get_seq_length() == 8


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_store_that_others_filled(name, get):
    """As `generate` leaves it: rows of different length, no padding, layers that this cache never saw."""
    subject = get(name, **attention(name))
    kind = "dynamic" if name == "llama" else {"mistral": "sliding window", "gemma2": "hybrid"}[name]
    lengths = (14, 9, 11)
    ids, mask = padded(subject, lengths)
    source = EXACT[kind][0](subject.model, 3).set_padding(mask[:, :10])
    stepped(subject.model, source, feeds(ids, (10,), mask))
    cache = EXACT[kind][0](subject.model, 3)
    cache.set_store(source.commit_store().select(torch.arange(3)))
    assert cache.lengths.tolist() == [10, 5, 7]
    assert [one.shape[0] for one in cache.key_cache] == [3] * subject.model.config.num_hidden_layers
    assert torch.equal(cache.key_cache[-1], source.key_cache[-1])
    said = stepped(subject.model, cache, feeds(ids, (1, 2, 1), mask, first=10))
    close(said, whole(subject.model, ids, mask)[:, 10:])


# -------------------------------------------------------------------- limits
def test_what_does_not_fit_is_refused(get):
    subject = get("llama")
    model, ids = subject.model, level(subject, 12)
    static = StaticCache(model.config, 3, 10, model.device, model.dtype)
    assert static.get_max_cache_shape() == static.get_max_length() == 10
    assert static.is_compileable
    stepped(model, static, feeds(ids, (8, 2)))
    assert static.key_cache[0].shape == (3, 2, 10, 8)
    with pytest.raises(InputError, match="`max_cache_len` must be >= the 11 positions"):
        stepped(model, static, feeds(ids, (1,), first=10))
    with pytest.raises(InputError, match="`batch_size` must be >= the 3 rows"):
        stepped(model, StaticCache(model.config, 2, 20), feeds(ids, (8,)))
    with pytest.raises(InputError, match="`dtype`"):
        stepped(model, StaticCache(model.config, 3, 20, dtype=torch.float16), feeds(ids, (8,)))
    with pytest.raises(InputError, match="`device`"):
        stepped(model, StaticCache(model.config, 3, 20, device="meta"), feeds(ids, (8,)))
    with pytest.raises(InputError, match="`max_cache_len` must be >= 1"):
        StaticCache(model.config, 3, 0)
    assert StaticCache(model.config, 3).max_cache_len == 256
    with pytest.raises(InputError, match="StaticCache"):
        HybridCache(model.config, 3, 20)

    gemma = get("gemma2", attn_implementation="eager")
    hybrid = HybridCache(gemma.model.config, max_batch_size=3, max_cache_len=10)
    assert hybrid.is_sliding == [True, False, True, False]
    with pytest.raises(InputError, match="`max_cache_len` must be >= the 12 positions"):
        stepped(gemma.model, hybrid, feeds(level(gemma, 12), (12,)))
    sliding = SlidingWindowCache(get("mistral").model.config, 3, 10)
    assert sliding.get_max_cache_shape() == 5
    assert sliding.is_sliding == [True, True]
    assert DynamicCache().get_max_cache_shape() is None
    assert DynamicCache().get_max_length() == -1


def test_sized_caches_have_the_documented_defaults(get):
    for kind, name in ((StaticCache, "llama"), (SlidingWindowCache, "mistral"), (HybridCache, "gemma2")):
        cache = kind(get(name).model.config, 2, 10)
        assert (cache.dtype, cache.device) == (torch.float32, torch.device("cpu"))
    half = copy.deepcopy(get("llama").model).to(torch.bfloat16)
    ids, config = level(get("llama"), 4), half.config
    with pytest.raises(
        InputError, match=r"`dtype` must be torch\.bfloat16.*give StaticCache dtype=model\.dtype"
    ):
        stepped(half, StaticCache(config, 3, 10), feeds(ids, (4,)))
    for dtype in (torch.bfloat16, None):
        stepped(half, StaticCache(config, 3, 10, dtype=dtype), feeds(ids, (4,)))


def test_settings_may_name_the_cache_that_they_are_for(get):
    subject = get("llama")
    given = {"max_new_tokens": 4, "cache_implementation": "static"}
    ids = level(subject, 6)
    plain = descant.generate(subject.model, ids, max_new_tokens=4)
    for config in (descant.CacheConfig("static"), {"cache_implementation": "static", "max_cache_len": 12}):
        assert descant.generate(subject.model, ids, cache_config=config, **given).tolist() == plain.tolist()
    with pytest.raises(ConfigError, match=r"`cache_config` must be for the cache .* 'static', got 'dynamic'"):
        descant.generate(subject.model, ids, cache_config=descant.CacheConfig("dynamic"), **given)


def test_a_static_cache_whose_blocks_were_read_is_filled_by_generate(get):
    subject = get("llama")
    ids = level(subject, 6, rows=1)
    cache = StaticCache(subject.model.config, 1, 12)
    assert len(cache.key_cache) == 2
    found = descant.generate(subject.model, ids, max_new_tokens=4, past_key_values=cache, eos_token_id=None)
    assert (
        found.tolist() == descant.generate(subject.model, ids, max_new_tokens=4, eos_token_id=None).tolist()
    )
    assert cache.get_seq_length() == 9


def test_a_forward_of_other_rows_is_refused(get):
    subject = get("llama")
    cache, ids = DynamicCache(), level(subject, 9)
    stepped(subject.model, cache, feeds(ids, (8,)))
    with pytest.raises(InputError, match="must be of 3 rows and 1 tokens"):
        stepped(subject.model, cache, feeds(ids[:2], (1,), first=8))
    one = torch.zeros(3, 2, 4, 8)
    cache.reset()
    cache.update(one, one, 0)
    with pytest.raises(InputError, match="must be of 3 rows and 4 tokens"):
        cache.update(one[:, :, :2], one[:, :, :2], 1)
    cache.update(one, one, 0)
    with pytest.raises(InputError, match="cut short"):
        cache.update(one, one, 2)


# -------------------------------------------------------------------- lossy caches
def test_sinks(get):
    subject = get("llama")
    ids = level(subject, 30)
    model, config = subject.model, subject.model.config
    once = stepped(model, SinkCache(12, 3, config=config), feeds(ids, (12, *(1,) * 18)))
    close(once[:, :12], whole(model, ids)[:, :12])
    assert (once - whole(model, ids)).abs().max() > 1e-2
    for widths in ((12, 3, 1, 5, 2, 7), (5, 7, *(1,) * 18)):
        close(stepped(model, SinkCache(12, 3, config=config), feeds(ids, widths)), once)
    close(stepped(model, SinkCache(12, 3, model=model), feeds(ids, (12, *(1,) * 18))), once)
    cache = SinkCache(12, 3, config=config)
    stepped(model, cache, feeds(ids, (12, *(1,) * 17)))
    assert (cache.get_seq_length(), cache.seen_tokens) == (12, 29)
    assert cache.get_max_cache_shape() == 12
    cache.batch_select_indices(torch.tensor([2, 0]))
    close(stepped(model, cache, feeds(ids[[2, 0]], (1,), first=29)), once[[2, 0], 29:])


def test_sinks_are_the_first_tokens_of_padded_rows(get):
    subject = get("llama")
    config, lengths = subject.model.config, (30, 22)
    rows = prompts(subject.arch, lengths, seed=3)
    ids, mask = pad(rows, subject.pad, "left")
    widths = (12, *(1,) * 18)
    cache = SinkCache(12, 3, config=config).set_padding(mask[:, :12])
    said = stepped(subject.model, cache, feeds(ids, widths, mask))
    for line, row in enumerate(rows):
        widths = (12 - 30 + len(row), *(1,) * 18)
        alone = stepped(subject.model, SinkCache(12, 3, config=config), feeds(torch.tensor([row]), widths))
        close(said[line, 30 - len(row) :], alone[0])


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "qwen2"])
def test_sinks_learn_the_rotation_from_the_model_that_runs(name, get):
    """As documented: neither config nor model is given, and the forwards go on beyond the window."""
    subject = get(name)
    model, ids = subject.model, level(subject, 30)
    want = stepped(model, SinkCache(12, 3, model=model), feeds(ids, (12, *(1,) * 18)))
    cache = SinkCache(window_length=12, num_sink_tokens=3)
    close(stepped(model, cache, feeds(ids, (12, 1, 4, *(1,) * 12))), want[:, :29])
    close(stepped(model, copy.deepcopy(cache), feeds(ids, (1,), first=29)), want[:, 29:])
    cache.reorder_cache(torch.tensor([2, 0]))
    close(stepped(model, cache, feeds(ids[[2, 0]], (1,), first=29)), want[[2, 0], 29:])


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_sinks_that_were_copied_early_learn_the_rotation_too(again, get):
    """Also from a decoder whose `forward` is called directly, and after a forward that was cut short."""
    model, other = get("llama").model, get("qwen2").model
    ids = level(get("llama"), 20)
    want = stepped(model, SinkCache(12, 3, model=model), feeds(ids, (12, *(1,) * 8)))
    cache = SinkCache(window_length=12, num_sink_tokens=3)
    close(stepped(model, cache, feeds(ids, (12,))), want[:, :12])
    cache = again(cache)
    stopped = mock.patch.object(type(other.lm_head), "forward", side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt):
        stepped(other, SinkCache(12, 3), feeds(ids, (1,)))
    for at in range(12, 20):
        given = {"position_ids": torch.full((3, 1), at), "past_key_values": cache, "use_cache": True}
        hidden = model.model.forward(input_ids=ids[:, at : at + 1], **given).last_hidden_state
        close(model.lm_head(hidden), want[:, at : at + 1])


def test_sinks_without_a_rotation_are_refused_when_they_would_have_to_turn(get):
    subject = get("gpt2")
    cache, ids = SinkCache(window_length=12, num_sink_tokens=3), level(subject, 13)
    close(stepped(subject.model, cache, feeds(ids, (8, 4))), whole(subject.model, ids)[:, :12])
    with pytest.raises(InputError, match="give SinkCache the `config`"):
        stepped(subject.model, cache, feeds(ids, (1,), first=12))
    key = torch.zeros(1, 2, 12, 8)
    alone = SinkCache(12, 3)
    alone.update(key, key, 0)
    with pytest.raises(InputError, match="`rotation` must be given"):
        alone.update(key[:, :, :1], key[:, :, :1], 0)
    for given in ({"config": get("gpt2").model.config}, {"model": get("gpt2").model}):
        with pytest.raises(InputError, match="rotary positions"):
            SinkCache(12, 3, **given)


@pytest.mark.parametrize(("make", "held"), [(lambda: SnapKVCache(10, 4, 3), 22), (lambda: H2OCache(10), 10)])
def test_eviction_keeps_its_budget(make, held, get):
    subject = get("llama")
    cache, ids = make(), level(subject, 30)
    said = stepped(subject.model, cache, feeds(ids, (18, *(1,) * 12)))
    close(said[:, :18], whole(subject.model, ids)[:, :18])
    assert (said - whole(subject.model, ids)).abs().max() > 1e-2
    assert cache.get_seq_length() == 30
    assert cache.key_cache[0].shape == (3, 2, held, 8)
    with pytest.raises(InputError, match="generate"):
        make().set_padding(torch.ones(3, 4))
    with pytest.raises(InputError, match="attention"):
        type(cache).from_legacy_cache(())


OFF = {
    8: 0.03,
    4: 0.6,
    3: 1.0,
    2: 2.5,
    1: 4.0,
}  # by how many bits, at the most and on average, of logits of 3


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (QuantoQuantizedCache, {"nbits": 4}),
        (QuantoQuantizedCache, {"nbits": 2, "axis_key": -1}),
        (QuantizedCache, {"backend": "quanto", "nbits": 2}),
        *(
            pytest.param(kind, {"nbits": bits, **more}, marks=pytest.mark.hqq)
            for kind, more, widths in (
                (HQQQuantizedCache, {"axis_key": 1, "axis_value": 1}, (1, 2, 3, 4, 8)),
                (QuantizedCache, {"backend": "HQQ"}, (8,)),
            )
            for bits in widths
        ),
    ],
)
def test_quantized(kind, settings, get):
    if kind is HQQQuantizedCache or settings.get("backend") == "HQQ":
        need_hqq()
    subject = get("wide")
    ids = level(subject, 40)
    cache = kind(cache_config=QuantizedCacheConfig(**settings, q_group_size=32, residual_length=8))
    said = stepped(subject.model, cache, feeds(ids, (20, *(1,) * 20)))
    want = whole(subject.model, ids)
    close(said[:, :20], want[:, :20])
    assert 1e-4 < (said - want)[:, 20:].abs().mean() < OFF[settings["nbits"]]
    assert cache.get_seq_length() == 40
    # The latest are as they came.
    plain = DynamicCache()
    stepped(subject.model, plain, feeds(ids, (20, *(1,) * 20)))
    assert torch.allclose(cache.key_cache[0][:, :, 36:], plain.key_cache[0][:, :, 36:], atol=NEAR)
    assert not torch.allclose(cache.key_cache[0][:, :, :20], plain.key_cache[0][:, :, :20], atol=1e-4)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert torch.equal(cache.key_cache[0][0], cache.key_cache[0][1])


# -------------------------------------------------------------------- what others made
@pytest.mark.parametrize(
    ("kind", "settings", "field"),
    [
        (QuantoQuantizedCache, {"axis_key": 2}, "axis_key"),
        (QuantoQuantizedCache, {"axis_value": 3}, "axis_value"),
        (QuantizedCache, {"backend": "other"}, "backend"),
        (QuantoQuantizedCache, {"q_group_size": 0}, "q_group_size"),
    ],
)
def test_wrong_settings_of_a_quantized_cache_are_named(kind, settings, field):
    """`tests/reference/spec_sentences` has what the documentation says of cache configs."""
    with pytest.raises(ConfigError, match=field) as caught:
        kind(QuantizedCacheConfig(**settings))
    assert caught.value.field == field
    with pytest.raises(InputError, match="QuantizedCacheConfig"):
        kind(descant.StaticCacheConfig(1, 2))


def of_transformers(kind, config):
    return {
        "dynamic": transformers.DynamicCache,
        "by config": lambda: transformers.DynamicCache(config=config),
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=30),
        "tuples": transformers.DynamicCache,
    }[kind]()


TAKEN = {
    ("llama", "dynamic"): DynamicCache,
    ("llama", "by config"): DynamicCache,
    ("llama", "static"): StaticCache,
    ("llama", "tuples"): DynamicCache,
    ("mistral", "dynamic"): DynamicCache,
    ("mistral", "by config"): HybridCache,
    ("mistral", "static"): HybridCache,
    ("gemma2", "by config"): HybridCache,
    ("gemma2", "static"): HybridCache,
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "kind"), TAKEN)
def test_caches_of_transformers_are_taken(name, kind, masked, get):
    subject = get(name, **attention(name))
    given = of_transformers(kind, subject.model.config)
    ids, mask = padded(subject, (17, 17, 17) if not masked else (17, 12, 9))
    want = whole(subject.model, ids, mask)
    stepped(subject.model, given, feeds(ids, (11, 1), mask))
    before = [one.clone() for layer in given.layers for one in (layer.keys, layer.values)]
    past = tuple((layer.keys, layer.values) for layer in given.layers) if kind == "tuples" else given
    cache = to_descant_cache(past, mask[:, :12]) if masked else to_descant_cache(past)
    assert type(cache) is TAKEN[name, kind]
    assert cache.lengths.tolist() == ([12, 7, 4] if masked else [12, 12, 12])
    if isinstance(cache, HybridCache):
        with pytest.raises(InputError, match="remove at most 0 positions"):  # what they would need is gone
            cache.crop(-1)
    close(stepped(subject.model, cache, feeds(ids, (1, 2, 1, 1), mask, first=12)), want[:, 12:])
    after = [one for layer in given.layers for one in (layer.keys, layer.values)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_caches_of_ours_are_taken_as_they_are(get):
    subject = get("mistral")
    ids, mask = padded(subject, (17, 12, 9))
    want = whole(subject.model, ids, mask)
    for kind in ("dynamic", "static", "paged", "sliding window"):
        cache = EXACT[kind][0](subject.model, 3)
        stepped(subject.model, cache, feeds(ids, (11, 1), mask))
        assert to_descant_cache(cache) is cache
        other = to_descant_cache(cache, mask)
        assert type(other) is type(cache)
        assert (cache.lengths.tolist(), other.lengths.tolist()) == ([12, 12, 12], [12, 7, 4])
        close(stepped(subject.model, other, feeds(ids, (1, 2, 1, 1), mask, first=12)), want[:, 12:])
        assert to_descant_cache(other, mask) is other
    full = SinkCache(8, 2, config=get("llama").model.config)
    stepped(get("llama").model, full, feeds(ids, (11, 1), mask))
    with pytest.raises(InputError, match="`set_padding`"):
        to_descant_cache(full, mask)


def test_an_encoder_decoder_cache_is_taken(get):
    subject = get("bart")
    ids = level(subject, 9)
    said = level(subject, 8, seed=4)
    with torch.no_grad():
        want = subject.model(input_ids=ids, decoder_input_ids=said, use_cache=False).logits
    given = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    fed = [{"decoder_input_ids": one["input_ids"]} for one in feeds(said, (5, 1, 1, 1))]
    stepped(subject.model, given, fed[:1], input_ids=ids)
    layers = zip(given.self_attention_cache.layers, given.cross_attention_cache.layers, strict=True)
    tuples = tuple((own.keys, own.values, cross.keys, cross.values) for own, cross in layers)
    for past in (given, tuples):
        cache = to_descant_cache(past)
        assert isinstance(cache, EncoderDecoderCache)
        close(stepped(subject.model, cache, fed[1:], input_ids=ids), want[:, 5:])


def unpacked(packed, bits):
    """What optimum-quanto has packed, part after part."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]).to(torch.uint8)


@pytest.mark.parametrize("backend", ["quanto", pytest.param("hqq", marks=pytest.mark.hqq), "fp8"])
def test_a_quantized_cache_is_taken(backend, get, monkeypatch):
    if backend == "hqq":
        need_hqq()
    if backend == "quanto":
        # Without the extension that it would first compile in C++.
        cpp = import_module("optimum.quanto.library.extensions.cpp")
        monkeypatch.setattr(cpp.ext, "_lib", SimpleNamespace(unpack=unpacked))
    subject = get("wide")
    ids = level(subject, 24)
    group = {} if backend == "fp8" else {"nbits": 4, "q_group_size": 32, "residual_length": 6}
    group |= {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
    given = transformers.QuantizedCache(backend, subject.model.config, **group)
    stepped(subject.model, given, feeds(ids, (16, 1, 1)))
    cache = to_descant_cache(given)
    kinds = {"quanto": QuantoQuantizedCache, "hqq": HQQQuantizedCache, "fp8": DynamicCache}
    assert type(cache) is kinds[backend]
    theirs = stepped(subject.model, given, feeds(ids, (1, 1), first=18))
    # What was quantised is quantised again; quanto's groups come out as they were.
    close(
        stepped(subject.model, cache, feeds(ids, (1, 1), first=18)), theirs, 3.0 if backend == "hqq" else 1.5
    )
    if group:
        assert cache.commit_store().residual_length == 6


def test_a_state_of_transformers_is_taken_if_it_counts(get):
    config = transformers.AutoConfig.for_model(
        "qwen3_next",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids, given = torch.randint(0, 97, (3, 12)), transformers.DynamicCache(config=config)
    stepped(model, given, feeds(ids, (9,)))
    cache = to_descant_cache(given)
    assert type(cache) is RecurrentCache
    assert to_descant_cache(cache) is cache
    assert cache.lengths.tolist() == cache.commit_store().lengths.tolist() == [9, 9, 9]
    fed = feeds(ids, (1, 1, 1), first=9)
    want = stepped(model, given, fed)
    close(stepped(model, cache.copy(), fed), want)
    close(stepped(model, cache, fed), want)
    with pytest.raises(InputError, match="recurrent"):
        stepped(model, DynamicCache(), feeds(ids, (9,)))

    subject = get("mamba")
    given = transformers.DynamicCache(config=subject.model.config)
    stepped(subject.model, given, feeds(level(subject, 9), (9,)), "cache_params")
    with pytest.raises(InputError, match="how many tokens"):
        to_descant_cache(given)


@pytest.mark.parametrize(
    "past",
    [
        3,
        "cache",
        (1, 2),
        (),
        ((torch.zeros(1, 2, 3),) * 2,),
        ((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 4)),),
        ((torch.zeros(1, 2, 3, 4),) * 2, (torch.zeros(2, 2, 3, 4),) * 2),
        ((torch.zeros(1, 2, 3, 4),) * 3,),
    ],
)
def test_what_is_no_cache_is_refused(past):
    with pytest.raises(InputError, match="past_key_values") as caught:
        to_descant_cache(past)
    assert caught.value.field == "past_key_values"


def test_masks_that_do_not_fit_are_refused():
    pairs = ((torch.zeros(2, 2, 5, 4),) * 2,)
    with pytest.raises(InputError, match="5 positions read"):
        to_descant_cache(pairs, torch.ones(2, 4))
    with pytest.raises(InputError, match="at the left"):
        to_descant_cache(pairs, torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]))
    cache = DynamicCache(pairs)
    assert isinstance(cache.commit_store(), DenseStore)
    with pytest.raises(InputError, match="before the first forward"):
        cache.set_padding(torch.ones(2, 5))


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "hybrid"])
def test_a_model_whose_layers_read_the_keys_of_others_goes_on_from_a_filled_cache(name, kind):
    subject = subject_of(next(entry for entry in entries() if entry.name == name))
    ids, config = subject.prompts[1]["input_ids"], subject.model.config.get_text_config()
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=config),
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=40),
        "hybrid": lambda: HybridCache(config, max_batch_size=1, max_cache_len=40),
    }[kind]()
    with torch.no_grad():
        subject.model(ids[:, :-1], past_key_values=cache)
    # A model with a recurrent state would refuse this cache.
    expected = descant.generate(subject.model, ids, max_new_tokens=6, cache_implementation="paged")
    assert torch.equal(
        descant.generate(subject.model, ids, max_new_tokens=6, past_key_values=cache), expected
    )
