"""Every documented cache that transformers 4.52.4 runs without a GPU: the same logits, forward by forward."""

from __future__ import annotations

import pytest
import torch

from descant.config.cache_config import QuantizedCacheConfig
from descant.models.compat.hf_caches.convert import EncoderDecoderCache
from descant.models.compat.hf_caches.dynamic import (
    DynamicCache,
    HQQQuantizedCache,
    QuantoQuantizedCache,
    SinkCache,
)
from descant.models.compat.hf_caches.recurrent import MambaCache
from descant.models.compat.hf_caches.sized import (
    HybridCache,
    SlidingWindowCache,
    StaticCache,
)
from tests.support.extras import need_hqq
from tests.support.manual_forwards import feeds, level, loader, padded, stepped, whole
from tests.support.tiny_models import pad, prompts

# Logits of about 3, through two layers in fp32.
NEAR = 1e-4
EAGER = {"attn_implementation": "eager"}
ROOM = {"config": True, "max_batch_size": 3, "max_cache_len": 24, "dtype": "float32"}


@pytest.fixture(scope="module")
def get(tiny, tmp_path_factory):
    return loader(tmp_path_factory.mktemp("more"), tiny)


def options(name):
    return EAGER if name == "gemma2" else {}


def placed(fed):
    """A further input of the reference: where each forward writes."""
    found, at = [], 0
    for feed in fed:
        width = feed["input_ids"].shape[1]
        found.append({**feed, "cache_position": torch.arange(at, at + width)})
        at += width
    return found


def reference_logits(reference, subject, cache, fed, **more):
    """The reference's logits of forwards over one of its caches."""
    load = options(subject.name)
    return torch.cat(
        reference.ask("steps", model=str(subject.folder), cache=cache, feeds=fed, load=load, **more), 1
    )


def same(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < NEAR
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def make_cache(kind, model):
    return kind(model.config, 3, 24, model.device, model.dtype)


PLAIN = [
    ("DynamicCache", {}, lambda model: DynamicCache(), "llama", (7, *(1,) * 9)),
    ("DynamicCache", {}, lambda model: DynamicCache(), "gpt2", (5, 2, 1, 4, 1, 1)),
    ("DynamicCache", {}, lambda model: DynamicCache(), "opt", (5, 1, 1, 1)),
    ("DynamicCache", {}, lambda model: DynamicCache(), "mistral", (9, *(1,) * 6)),
    ("StaticCache", ROOM, lambda model: make_cache(StaticCache, model), "llama", (7, *(1,) * 9)),
    ("StaticCache", ROOM, lambda model: make_cache(StaticCache, model), "qwen2", (7, *(1,) * 9)),
    (
        "SlidingWindowCache",
        ROOM,
        lambda model: make_cache(SlidingWindowCache, model),
        "mistral",
        (5, *(1,) * 9),
    ),
    ("HybridCache", ROOM, lambda model: make_cache(HybridCache, model), "gemma2", (5, *(1,) * 9)),
    ("HybridCache", ROOM, lambda model: make_cache(HybridCache, model), "gemma2", (9, *(1,) * 6)),
]


# Of windows with padding see `test_its_windows_lose_which_columns_are_padding`.
PADDED = [case for case in PLAIN if case[0] != "SlidingWindowCache"]


@pytest.mark.parametrize(
    ("rows", "case"), [*(("level", one) for one in PLAIN), *(("padded", one) for one in PADDED)]
)
def test_rows(rows, case, get, reference):
    kind, given, make, name, widths = case
    subject, length = get(name, **options(name)), sum(widths)
    if rows == "level":
        ids, mask = level(subject, length), None
    else:
        ids, mask = padded(subject, (length, length - 2, length - 4))
    fed, real = feeds(ids, widths, mask), torch.ones_like(ids).bool() if mask is None else mask.bool()
    ours = stepped(subject.model, make(subject.model), fed)
    same(ours[real], reference_logits(reference, subject, (kind, given), placed(fed))[real])


@pytest.mark.parametrize("rows", ["level", "padded"])
@pytest.mark.parametrize("nbits", [2, 4])
def test_quanto(nbits, rows, get, reference):
    """Quantised in the same steps: the prompt at once, then whenever the rest has grown long."""
    subject = get("wide")
    widths = (8, *(1,) * 13)
    ids, mask = padded(subject, (21, 21, 21) if rows == "level" else (21, 19, 17))
    fed, real = feeds(ids, widths, mask), mask.bool()
    settings = {"nbits": nbits, "q_group_size": 32, "residual_length": 4}
    cache = QuantoQuantizedCache(QuantizedCacheConfig(**settings, compute_dtype=torch.float32))
    ours = stepped(subject.model, cache, fed)
    same(
        ours[real],
        reference_logits(
            reference, subject, ("QuantoQuantizedCache", {"cache_config": settings}), placed(fed)
        )[real],
    )
    assert (ours - whole(subject.model, ids, mask))[real].abs().max() > 0.1


def hqq(bits, residual):
    need_hqq()
    settings = {
        "nbits": bits,
        "axis_key": 1,
        "axis_value": 1,
        "q_group_size": 32,
        "residual_length": residual,
    }
    cache = HQQQuantizedCache(QuantizedCacheConfig(**settings, compute_dtype=torch.float32))
    return cache, ("HQQQuantizedCache", {"cache_config": {**settings, "compute_dtype": "float32"}})


@pytest.mark.hqq
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_hqq(nbits, get, reference):
    """One row: hqq looks for better steps until a whole batch gets no better, ours for each row."""
    subject = get("wide")
    for seed in (3, 4):
        ids = level(subject, 18, rows=1, seed=seed)
        fed = feeds(ids, (8, *(1,) * 10))
        cache, theirs = hqq(nbits, 4)
        ours = stepped(subject.model, cache, fed)
        same(ours, reference_logits(reference, subject, theirs, placed(fed)))
        assert (ours - whole(subject.model, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoder(name, get, reference):
    subject = get(name)
    ids, mask = pad(prompts(subject.arch, (9, 5, 7), seed=3), subject.pad, "right")
    said = level(subject, 10, seed=5)
    fed = [
        {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": one["input_ids"]}
        for one in feeds(said, (4, 1, 1, 2, 1, 1))
    ]
    ours = stepped(subject.model, EncoderDecoderCache(DynamicCache(), DynamicCache()), fed)
    same(ours, reference_logits(reference, subject, ("EncoderDecoderCache", {}), fed))


@pytest.mark.parametrize("prompt", [1, 3, 8])
def test_mamba(prompt, get, reference):
    subject = get("mamba")
    fed = feeds(level(subject, 12), (prompt, *(1,) * (12 - prompt)))
    cache = MambaCache(subject.model.config, 3, subject.model.dtype, subject.model.device)
    # A prompt is written to all columns of a convolution's state, a token to the last.
    told = [{**fed[0], "cache_position": torch.arange(4)}]
    told += [{**feed, "cache_position": torch.tensor([4 + at])} for at, feed in enumerate(fed[1:])]
    given = {"config": True, "max_batch_size": 3, "dtype": "float32"}
    theirs = reference_logits(reference, subject, ("MambaCache", given), told, past="cache_params")
    same(stepped(subject.model, cache, fed, "cache_params"), theirs)


# -------------------------------------------------------------------- sinks
def sinks(window, widths, ids, positions):
    """What the reference is fed, with the positions that are given it."""
    found, at = [], 0
    for width, first in zip(widths, positions, strict=True):
        places = torch.arange(first, first + width)
        feed = {"input_ids": ids[:, at : at + width], "cache_position": places}
        found.append({**feed, "position_ids": places[None].expand(len(ids), -1)})
        at += width
    return ("SinkCache", {"window_length": window, "num_sink_tokens": 3}), found


def test_sinks(get, reference):
    """A prompt as long as the window, then tokens at its last position: so its SinkCache is right."""
    subject = get("llama")
    ids, widths = level(subject, 30), (12, *(1,) * 18)
    theirs = reference_logits(reference, subject, *sinks(12, widths, ids, (0, *(11,) * 18)))
    ours = stepped(subject.model, SinkCache(12, 3, config=subject.model.config), feeds(ids, widths))
    same(ours, theirs)
    assert (ours - whole(subject.model, ids)).abs().max() > 0.1


def test_its_generate_takes_sinks_for_further_away_at_every_step(get, reference):
    """It counts positions on while its SinkCache turns keys back: distances grow by one a step."""
    subject = get("llama")
    ids, widths = level(subject, 30), (12, *(1,) * 18)
    theirs = reference_logits(reference, subject, *sinks(12, widths, ids, (0, *range(12, 30))))
    ours = stepped(subject.model, SinkCache(12, 3, config=subject.model.config), feeds(ids, widths))
    off = (ours - theirs).abs().amax((0, 2))  # [L]
    assert off[:12].max() < NEAR
    assert off[13:].min() > 0.1


# -------------------------------------------------------------------- where the reference is wrong, or cannot


def test_its_windows_lose_which_columns_are_padding(get, reference):
    """What has moved to the window's first slots is masked as the first columns of the batch are."""
    subject = get("mistral")
    ids, mask = padded(subject, (14, 12, 10))
    fed, real = feeds(ids, (5, *(1,) * 9), mask), mask.bool()
    want = whole(subject.model, ids, mask)
    theirs = reference_logits(reference, subject, ("SlidingWindowCache", ROOM), placed(fed))
    assert (theirs - want)[0].abs().max() < NEAR  # the row without padding
    assert (theirs - want)[1:][real[1:]].abs().max() > 0.1
    same(stepped(subject.model, make_cache(SlidingWindowCache, subject.model), fed)[real], want[real])


@pytest.mark.hqq
def test_rows_change_each_other_in_its_hqq(get, reference):
    """How long it looks for better steps is one choice for all that it quantises at once."""
    subject = get("wide")
    ids, widths = level(subject, 18), (8, *(1,) * 10)
    cache, theirs = hqq(4, 128)
    batch = reference_logits(reference, subject, theirs, placed(feeds(ids, widths)))
    ours = stepped(subject.model, cache, feeds(ids, widths))
    apart = []
    for row in range(3):
        fed = feeds(ids[row : row + 1], widths)
        alone = reference_logits(reference, subject, theirs, placed(fed))
        apart.append((batch[row] - alone[0]).abs().max())
        same(ours[row], alone[0])
    assert max(apart) > 1e-2
