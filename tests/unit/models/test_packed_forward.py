"""Packed forwards: rows of any lengths as one sequence, with the logits of padded ones."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import descant
from descant.core.interfaces import PromptChunk
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.kv_cache.attention.packed_span import PackedSpan
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from descant.models.fast.packed_forward import PackedForwards
from descant.models.transformers_model import TransformersModel
from descant.testing import check_drafts

CACHES = [DenseStore, PagedStore]
LENGTHS = [3, 40, 1, 9, 150, 9]


@pytest.fixture(autouse=True)
def _every_ragged_step_is_packed(monkeypatch):
    """A step of a tiny model reads too little to be packed."""
    monkeypatch.setattr("descant.models.forward.batches._MIN_PACKED_READ", 0)


def new_rows(lengths: list[int], seed: int = 0) -> Rows:
    """Rows of random tokens of which nothing is cached."""
    rng = random.Random(seed)
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.tensor([rng.randrange(3, 90) for _ in range(length)])
    size, none = torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.long)
    return Rows(tokens, size, none, none.clone(), size.clone(), torch.arange(len(lengths)), none.clone())


def run(model: Any, cache: Any, rows: Rows, steps: int) -> list[Tensor]:
    """The logits of a few steps, in which a row reads one to three tokens at a time."""
    rng = random.Random(1)
    cache.extend(len(rows) - len(cache))
    seen = []
    for _ in range(steps):
        seen.append(model.forward(rows, Proposal(), cache).logits)
        rows = rows.replace(cached_length=rows.position)
        cache.commit(None, rows.cached_length)
        count = torch.tensor([rng.randint(1, 3) for _ in range(len(rows))])
        rows = rows.append(torch.tensor([[7, 8, 9]]).repeat(len(rows), 1), rows.length + count)
    return seen


def counted(function: Any, calls: list[int]) -> Any:
    """A function that appends to `calls` each time."""

    def call(*given: Any) -> Any:
        calls.append(1)
        return function(*given)

    return call


def padded(model: Any) -> TransformersModel:
    """A model that never packs."""
    plain = TransformersModel(model)
    plain._packed.off_reason = "turned off"
    return plain


@pytest.mark.parametrize("make_cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_logits_are_those_of_padded_rows(tiny, name, make_cache):
    model = tiny(name).model
    packed, plain = TransformersModel(model), padded(model)
    rows = new_rows(LENGTHS[:4] if packed.traits.max_positions else LENGTHS)
    for ours, theirs in zip(
        run(packed, make_cache(), rows, 4), run(plain, make_cache(), rows, 4), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert packed.positions_fed < plain.positions_fed


@pytest.mark.parametrize("make_cache", CACHES)
@pytest.mark.parametrize("start", [0, 13], ids=["first chunk", "later chunk"])
def test_chunks_of_prompts_share_the_forward_of_other_rows(tiny, make_cache, start):
    """The rows have equal length, so that without a chunk they would not be packed."""
    model = tiny("llama").model
    logits, prompt = [], new_rows([60], seed=3)
    for is_beside in (True, False):
        one, cache, own, rows = TransformersModel(model), make_cache(), make_cache(), new_rows([8, 8])
        run(one, cache, rows, 1)
        rows = rows.replace(cached_length=rows.position).append(torch.full((2, 1), 7), rows.length + 1)
        own.extend(1)
        read = prompt
        for stop in (start, 40) if start else (40,):
            chunk = PromptChunk(read.replace(length=torch.tensor([stop])), own)
            before = one.forwards
            chunks = [chunk] if is_beside and stop == 40 else []
            if not chunks:
                one.forward(chunk.rows, Proposal(), own)
            if stop == 40:
                logits.append(one.forward(rows, Proposal(), cache, chunks=chunks).logits)
                assert one.forwards - before == (1 if is_beside else 2)
                assert chunk.is_fed == is_beside
            own.commit(None, torch.tensor([stop]))
            read = read.replace(cached_length=torch.tensor([stop]))
        logits.append(one.forward(read, Proposal(), own).logits)
    for ours, theirs in zip(logits[:2], logits[2:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_forward_that_raises_feeds_no_chunk(tiny, monkeypatch):
    model = TransformersModel(tiny("llama").model)
    cache, own, rows = DenseStore(), DenseStore(), new_rows([8, 8])
    cache.extend(2), own.extend(1)
    chunk = PromptChunk(new_rows([60], seed=3), own)
    with monkeypatch.context() as patch:
        patch.setattr(own, "write_packed", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward(rows, Proposal(), cache, chunks=[chunk])
        model.forward(rows, Proposal(), cache)
    assert not chunk.is_fed


@pytest.mark.parametrize("make_cache", CACHES)
@pytest.mark.parametrize("lengths", [[9, 9, 7, 30], [3, 200, 9, 190]], ids=["one group", "two groups"])
def test_decode_steps_are_packed_where_they_read_much(tiny, monkeypatch, lengths, make_cache):
    model = tiny("llama").model
    logits, num_packed = [], []
    for limit in (0, 2**60):
        monkeypatch.setattr("descant.models.forward.batches._MIN_PACKED_READ", limit)
        one, cache, rows = TransformersModel(model), make_cache(), new_rows(lengths)
        spans: list[int] = []
        monkeypatch.setattr(one, "_run_packed", counted(one._run_packed, spans))
        run(one, cache, rows, 1)
        rows = rows.replace(cached_length=rows.position).append(torch.full((4, 1), 7), rows.length + 1)
        logits += run(one, cache, rows, 1)
        num_packed.append(len(spans))
    assert num_packed == [2, 1]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make_cache", CACHES)
def test_it_feeds_no_padding(tiny, make_cache):
    model = TransformersModel(tiny("llama").model)
    run(model, make_cache(), new_rows(LENGTHS), 1)
    assert (model.forwards, model.positions_fed) == (1, sum(LENGTHS))


@pytest.mark.parametrize("make_cache", CACHES)
def test_ragged_drafts_are_as_one_by_one(tiny, make_cache):
    model = tiny("llama").model
    prompts = [new_rows([length], length).tokens[0].tolist() for length in (5, 60, 2)]
    check_drafts(model, [descant.Request(prompt) for prompt in prompts], make_cache)


def test_rows_that_share_a_prefix_read_it_once(tiny):
    model = tiny("llama").model
    logits = []
    for one in (TransformersModel(model), padded(model)):
        cache, rows = PagedStore(), new_rows([100])
        run(one, cache, rows, 1)
        cache.extend(1)
        parents = torch.tensor([0, 0, 0, 1])
        cache.commit(parents, torch.tensor([100, 100, 90, 0]))
        forked = new_rows([101, 101, 91, 20], 5)
        forked.tokens[:3, :90] = rows.tokens[0, :90]
        forked = forked.replace(cached_length=torch.tensor([100, 100, 90, 0]))
        logits += run(one, cache, forked, 1)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


class ChangedMask(torch.nn.Module):
    """An attention that adds a bias to the mask it is given."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **given: Any) -> Any:
        if given.get("attention_mask") is not None:
            given["attention_mask"] = given["attention_mask"].clone()
        return self.inner(*args, **given)


def test_a_model_with_a_mask_of_its_own_is_fed_padded_rows(tiny):
    model = tiny("llama").model
    layer = model.model.layers[0]
    original, layer.self_attn = layer.self_attn, ChangedMask(layer.self_attn)
    try:
        changed = TransformersModel(model)
        assert changed._packed.off_reason is None
        seen = run(changed, DenseStore(), new_rows(LENGTHS), 3)
        assert changed._packed.off_reason is not None
    finally:
        layer.self_attn = original
    for ours, theirs in zip(seen, run(padded(model), DenseStore(), new_rows(LENGTHS), 3), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_rows_longer_than_a_window_are_not_packed(tiny):
    model = TransformersModel(tiny("llama").model)
    model.traits = dataclasses.replace(model.traits, sliding_windows={"sliding_attention": 16})
    model._packed = PackedForwards(model.model, model.traits)
    rows, cache = new_rows([3, 9]), DenseStore()
    cache.extend(2)
    model.forward(rows, Proposal(), cache)
    assert model.positions_fed == 12
    rows, cache = new_rows([3, 17]), DenseStore()
    cache.extend(2)
    model.forward(rows, Proposal(), cache)
    assert model.positions_fed == 12 + 2 * 17


class OtherStore(DenseStore):
    """A cache that may write its slots in another way."""


def test_another_cache_is_not_packed(tiny):
    model, cache = TransformersModel(tiny("llama").model), OtherStore()
    cache.extend(2)
    model.forward(new_rows([3, 9]), Proposal(), cache)
    assert model.positions_fed == 18


def test_groups_hold_rows_of_similar_length():
    starts = np.array([0, 2000, 30, 0, 60, 1990, 40])
    widths = np.array([100, 1, 1, 8, 1, 1, 128])
    groups = PackedSpan(np.arange(7), starts, widths).groups
    assert sorted(sorted(group.index.tolist()) for group in groups) == [[0], [1, 5], [2, 4], [3], [6]]
    assert {int(token) for group in groups for token in group.token_index(torch.device("cpu"))} == set(
        range(240)
    )


@pytest.mark.parametrize("make_cache", CACHES)
def test_many_tokens_are_fed_in_parts_with_the_same_logits(tiny, make_cache, monkeypatch):
    model = tiny("llama").model
    packed, plain = TransformersModel(model), padded(model)
    expected = run(plain, make_cache(), new_rows(LENGTHS), 3)
    calls: list[int] = []
    monkeypatch.setattr(packed._packed, "_run_batch", counted_batches(packed._packed._run_batch, calls))
    monkeypatch.setattr("descant.models.forward.batches._MAX_PACKED_TOKENS", 50)
    got = run(packed, make_cache(), new_rows(LENGTHS), 3)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    # Rows of 1, 3, 9 and 9 tokens, of 40, of 150, then all rows in one forward of each later step.
    assert calls == [4, 1, 1, 6, 6]


def counted_batches(run_batch: Any, sizes: list[int]) -> Any:
    """A packed forward that appends the number of its rows to `sizes`."""

    def call(batch: Any, *given: Any) -> Any:
        sizes.append(len(batch.span.rows))
        return run_batch(batch, *given)

    return call


def test_parts_with_drafts_have_the_same_logits(tiny, monkeypatch):
    model = tiny("llama").model
    drafts = torch.randint(3, 90, (len(LENGTHS), 3), generator=torch.Generator().manual_seed(0))
    proposal = Proposal(drafts=drafts, num_drafts=torch.tensor([3, 0, 2, 1, 3, 0]))
    seen = []
    for one in (padded(model), TransformersModel(model)):
        cache = DenseStore()
        cache.extend(len(LENGTHS))
        seen.append(one.forward(new_rows(LENGTHS), proposal, cache).logits)
        monkeypatch.setattr("descant.models.forward.batches._MAX_PACKED_TOKENS", 50)
    for row, count in enumerate(proposal.num_drafts.tolist()):
        torch.testing.assert_close(seen[0][row, : count + 1], seen[1][row, : count + 1], atol=1e-4, rtol=1e-4)
