"""The quantized cache beyond the law of caches: chunks, sharing and memory."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from descant.core.interfaces import KVSpan
from descant.errors import ConfigError, InputError
from descant.kv_cache.row_views import PairedRowCache
from descant.kv_cache.stores import quantizers
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.quantized import QuantizedStore
from descant.kv_cache.stores.quantizers import HQQ, Quanto
from descant.testing import check_cache
from tests.support.extras import need_hqq

HEADS, SIZE = 2, 64


def random_block(rows, width, seed=0, dtype=torch.float32):
    return torch.randn(rows, HEADS, width, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def feed(cache, content, rows=None, start=None, layer=0):
    """Write after what rows hold; what they hold then."""
    held = cache.lengths if rows is None else cache.lengths[list(rows)]
    begin = held if start is None else torch.tensor(start)
    level = len(set(begin.tolist())) == 1
    span = KVSpan(
        None if rows is None else torch.tensor(rows),
        int(begin[0]) if level else begin,
        content.shape[2],
        int(begin.max()) + content.shape[2],
    )
    return cache.update(layer, content, -content, span)


def grown(cache, count, seed=1):
    """Feed all rows so many positions, one by one; what they hold then."""
    for step in range(count):
        keys, _ = feed(cache, random_block(len(cache), 1, seed * 1000 + step))
        cache.commit(None, cache.lengths + 1)
    return keys


def one(bits=4, residual=8, **settings):
    return QuantizedStore(Quanto(bits, **settings), residual)


def held(cache):
    """The chunks of each row, with how much of each counts."""
    return [[(piece.chunk, piece.used_length) for piece in pieces] for pieces in cache._chunk_refs]


# -------------------------------------------------------------------- the law, where nothing is lost
@pytest.mark.ci_cases("-1-1", "0-3")
@pytest.mark.parametrize("residual", [0, 1, 3])
@pytest.mark.parametrize("axis", [0, -1])
def test_groups_of_one_number_lose_nothing(residual, axis):
    quantizer = Quanto(4, axis_key=axis, axis_value=axis, q_group_size=1)
    check_cache(lambda: QuantizedStore(quantizer, residual), examples=50)


@pytest.mark.hqq
def test_groups_of_one_number_lose_nothing_with_hqq():
    need_hqq()
    check_cache(lambda: QuantizedStore(HQQ(3, 1, 0, q_group_size=1), 3), examples=60)


# -------------------------------------------------------------------- what becomes a chunk
def test_a_prompt_is_read_as_it_came_and_becomes_a_chunk_when_committed():
    cache = one()
    cache.extend(2)
    content = random_block(2, 5)
    keys, values = feed(cache, content)
    assert torch.equal(keys, content)
    assert torch.equal(values, -content)
    cache.commit(None, torch.tensor([5, 3]))
    assert [[used for _, used in row] for row in held(cache)] == [[5], [3]]
    keys, values = feed(cache, random_block(2, 1, 1))
    for row, length in enumerate((5, 3)):
        for found, given in ((keys, content), (values, -content)):
            far = (found[row, :, :length] - given[row, :, :length]).abs()
            assert 0 < far.max() < 0.3  # few bits, and not none


def test_the_latest_positions_stay_as_they_came_until_there_are_enough():
    cache = one(residual=4)
    cache.extend(1)
    feed(cache, random_block(1, 6))
    cache.commit(None, torch.tensor([6]))
    for step in range(1, 10):
        content = random_block(1, 1, step)
        keys, _ = feed(cache, content)
        assert torch.equal(keys[:, :, -1:], content)
        cache.commit(None, cache.lengths + 1)
        assert [used for _, used in held(cache)[0]] == [6] + [4] * (step // 4)
        assert cache._residual.lengths.tolist() == [step % 4]


def test_more_than_enough_at_once_leaves_the_rest_as_it_came():
    """However many drafts are taken at a time, chunks end where they end one by one."""
    cache = one(residual=4)
    cache.extend(1)
    feed(cache, random_block(1, 6))
    cache.commit(None, torch.tensor([6]))
    content = random_block(1, 11, 1)
    feed(cache, content)
    cache.commit(None, torch.tensor([16]))
    assert [used for _, used in held(cache)[0]] == [6, 8]
    keys, _ = feed(cache, random_block(1, 1, 2))
    assert torch.equal(keys[:, :, 14:16], content[:, :, 8:10])
    assert not torch.equal(keys[:, :, 6:14], content[:, :, :8])


def test_what_was_quantised_is_never_quantised_again(monkeypatch):
    made = []
    encode = quantizers.GroupCodec.encode
    monkeypatch.setattr(
        quantizers.GroupCodec,
        "encode",
        lambda self, given: made.append(given.shape[1]) or encode(self, given),
    )
    cache = one(residual=4)
    cache.extend(1)
    feed(cache, random_block(1, 10))
    cache.commit(torch.tensor([0, 0, 0]), torch.tensor([10, 10, 7]))
    cache.commit(torch.tensor([2, 0]), torch.tensor([5, 10]))
    assert sorted(made) == [7, 7, 10, 10]  # one of keys and one of values per length, shared or not
    grown(cache, 4)
    assert sorted(made) == [4] * 4 + [7, 7, 10, 10]


def test_a_rewritten_row_drops_its_chunks():
    """A model that reads everything again with each step."""
    cache = one()
    cache.extend(1)
    feed(cache, random_block(1, 5))
    cache.commit(None, torch.tensor([5]))
    content = random_block(1, 6, 1)
    keys, _ = feed(cache, content, start=[0])
    assert torch.equal(keys, content)
    cache.commit(None, torch.tensor([6]))
    keys, _ = feed(cache, random_block(1, 1, 2))
    assert (keys[:, :, :6] - content).abs().max() < 0.3
    assert [used for _, used in held(cache)[0]] == [6]


# -------------------------------------------------------------------- forks and cuts
def test_forks_share_chunks_and_take_no_more():
    cache = one()
    cache.extend(1)
    feed(cache, random_block(1, 100))
    cache.commit(None, torch.tensor([100]))
    before = cache.nbytes
    cache.commit(torch.tensor([0] * 8), torch.tensor([100] * 8))
    assert cache.nbytes == before
    assert len({chunk for row in held(cache) for chunk, _ in row}) == 1


def test_a_cut_keeps_the_chunk_and_a_row_goes_on_from_there():
    cache = one(residual=3)
    cache.extend(1)
    feed(cache, random_block(1, 10))
    cache.commit(None, torch.tensor([10]))
    ((whole, _),) = held(cache)[0]
    before, _ = cache.read(0, torch.tensor([0]))
    cache.commit(torch.tensor([0, 0]), torch.tensor([10, 4]))
    assert held(cache) == [[(whole, 10)], [(whole, 4)]]
    grown(cache, 7)
    assert [[used for _, used in row] for row in held(cache)] == [[10, 3, 3], [4, 3, 3]]
    after, _ = feed(cache, random_block(2, 1, 2))
    assert torch.equal(after[0, :, :10], before[0])
    assert torch.equal(after[1, :, :4], before[0, :, :4])
    cache.commit(torch.tensor([0, 1]), torch.tensor([6, 5]))
    assert held(cache)[0] == [(whole, 6)]
    assert [used for _, used in held(cache)[1]] == [4, 1]


def test_what_rows_share_is_decoded_once(monkeypatch):
    read = []
    decode = quantizers.GroupCodec.decode

    def counted(self, parts, into):
        read.append(sum(part.codes.shape[1] for part in parts))
        decode(self, parts, into)

    monkeypatch.setattr(quantizers.GroupCodec, "decode", counted)
    cache = one(residual=4)
    cache.extend(2)
    feed(cache, random_block(2, 50))
    cache.commit(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([50] * 5))
    feed(cache, random_block(5, 1, 1))
    assert read == [100, 100]
    cache.commit(None, cache.lengths)
    grown(cache, 4)  # each row has a chunk of its own then
    del read[:]
    keys, _ = feed(cache, random_block(5, 1, 2))
    assert read == [100 + 5 * 4] * 2
    assert torch.equal(keys[0, :, :50], keys[2, :, :50])
    assert not torch.equal(keys[0, :, 50:54], keys[2, :, 50:54])


# -------------------------------------------------------------------- rows beside each other
# -------------------------------------------------------------------- what it takes, and where it goes
def test_four_bits_take_less_than_a_third_of_a_dense_cache():
    sizes = {}
    for name, cache in {"dense": DenseStore(), 4: one(4, 128), 2: one(2, 128)}.items():
        cache.extend(1)
        feed(cache, random_block(1, 1024))
        cache.commit(None, torch.tensor([1024]))
        sizes[name] = cache.nbytes
        grown(cache, 40)
        sizes[name, "later"] = cache.nbytes
    assert sizes["dense"] > 6 * sizes[4]
    assert sizes["dense"] > 10 * sizes[2]
    assert sizes["dense", "later"] > 3 * sizes[4, "later"]


def test_a_wide_forward_leaves_no_wide_tail_behind():
    cache = one(residual=8)
    cache.extend(4)
    feed(cache, random_block(4, 5))
    cache.commit(None, torch.tensor([5] * 4))
    feed(cache, random_block(1, 1000, 1), rows=[2])
    cache.commit(None, torch.tensor([5, 5, 1005, 5]))
    assert cache._residual.num_slots < 200
    assert [used for _, used in held(cache)[2]] == [5, 1000]


def test_a_saved_cache_is_as_small_and_reads_the_same(tmp_path):
    cache = one(residual=8, axis_key=-1)
    cache.extend(2)
    for layer in (0, 1):
        feed(cache, random_block(2, 300, layer), layer=layer)
    cache.commit(None, torch.tensor([300, 300]))
    cache.commit(torch.tensor([0, 1, 1]), torch.tensor([300, 192, 300]))
    for layer in (0, 1):
        feed(cache, random_block(3, 11, 5 + layer), layer=layer)
    cache.commit(None, torch.tensor([311, 203, 308]))
    safetensors.torch.save_file(cache.state(), tmp_path / "cache.safetensors")
    assert (tmp_path / "cache.safetensors").stat().st_size < 2 * 3 * HEADS * 311 * SIZE * 4 / 2
    other = one(residual=8, axis_key=-1)
    other.load(safetensors.torch.load_file(tmp_path / "cache.safetensors"))
    assert other.lengths.tolist() == [311, 203, 308]
    assert held(other)[1][0][0] is held(other)[2][0][0]
    assert other.nbytes < 1.2 * cache.nbytes
    for layer in (0, 1):
        content = random_block(3, 1, 9)
        for mine, theirs in zip(
            feed(cache, content, layer=layer), feed(other, content, layer=layer), strict=True
        ):
            for row, length in enumerate((311, 203, 308)):
                assert torch.equal(mine[row, :, : length + 1], theirs[row, :, : length + 1])


def test_a_state_without_the_content_of_a_chunk_is_refused_by_name():
    cache = one(residual=8)
    cache.extend(1)
    for layer in (0, 1):
        feed(cache, random_block(1, 20, layer), layer=layer)
    cache.commit(None, torch.tensor([20]))
    state = cache.state()
    del state["chunk.0.1.values.scale"]
    with pytest.raises(InputError, match=r"`state` must have the tensor `chunk\.0\.1\.values\.scale`"):
        one(residual=8).load(state)


def test_rows_can_be_read_without_being_fed():
    cache = one(residual=8)
    cache.extend(3)
    feed(cache, random_block(3, 20))
    cache.commit(None, torch.tensor([20, 20, 11]))
    feed(cache, random_block(3, 3, 1))
    cache.commit(None, torch.tensor([23, 20, 12]))
    assert cache.layers == [0]
    rows = torch.tensor([2, 0])
    keys, values = cache.read(0, rows)
    assert keys.shape == values.shape == (2, HEADS, 23, SIZE)
    shown, _ = feed(cache, random_block(3, 1, 2))
    assert torch.equal(keys[0, :, :12], shown[2, :, :12])
    assert torch.equal(keys[1, :, :23], shown[0, :, :23])


def test_moving_a_cache_leaves_what_another_shares():
    cache = one()
    cache.extend(1)
    feed(cache, random_block(1, 20))
    cache.commit(None, torch.tensor([20]))
    other = cache.select(torch.tensor([0]))
    other.to("meta")
    assert held(other)[0][0][0].layers[0][0].codes.device.type == "meta"
    assert held(cache)[0][0][0].layers[0][0].codes.device.type == "cpu"
    assert other.nbytes == cache.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_come_back_in_the_dtype_they_came_in(dtype):
    cache = one(residual=2, compute_dtype=torch.float32)
    cache.extend(1)
    feed(cache, random_block(1, 9, dtype=dtype))
    cache.commit(None, torch.tensor([9]))
    keys, values = feed(cache, random_block(1, 1, 1, dtype=dtype))
    assert keys.dtype == values.dtype == dtype


def test_a_residual_below_zero_is_refused():
    with pytest.raises(ConfigError, match="`residual_length` must be >= 0, got -1"):
        one(residual=-1)


# -------------------------------------------------------------------- drafts
def limits(cache, rows, pending=1):
    return cache.max_drafts(torch.tensor(rows, dtype=torch.long), torch.full((len(rows),), pending)).tolist()


@pytest.mark.parametrize(("residual", "expected"), [(0, [0, 0, 0]), (1, [0, 0, 0]), (4, [3, 2, 1])])
def test_drafts_end_where_a_chunk_is_made(residual, expected):
    """One by one, a draft behind the end of the residual would read that quantized."""
    cache = one(residual=residual)
    cache.extend(1)
    assert limits(cache, [0], pending=5) == [0]  # the prompt becomes a chunk before the first draft
    feed(cache, random_block(1, 5))
    cache.commit(None, torch.tensor([5]))
    found = []
    for _ in expected:
        found += limits(cache, [0])
        grown(cache, 1)
    assert found == expected
    assert limits(cache, []) == []


def test_unconditional_rows_limit_drafts_too():
    inner = one(residual=4)
    inner.extend(1)
    cache = PairedRowCache(inner)
    cache.add_uncond_rows(torch.tensor([0]), torch.tensor([2]))
    feed(inner, random_block(2, 5))
    inner.commit(None, torch.tensor([5, 5]))
    feed(inner, random_block(1, 2), rows=[1])
    inner.commit(None, torch.tensor([5, 7]))
    assert limits(inner, [0, 1]) == [3, 1]
    assert limits(cache, [0]) == [1]
    assert limits(PairedRowCache(DenseStore()), []) == []
