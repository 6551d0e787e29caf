"""Caches that run out of memory at any allocation, and are asked again: as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from descant.core.interfaces import KVCache, KVSpan
from descant.kv_cache.row_views import PairedRowCache
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.kv_cache.stores.sink_window import WindowStore
from tests.contracts.stores import STORES, small, store
from tests.support.ci_slices import first

LAYERS, HEADS, SIZE = 2, 2, 4


class NoMemory(TorchDispatchMode):
    """Refuses the n-th allocation: an operator that neither writes in place nor returns a view."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if not schema.is_mutable and not any(one.alias_info for one in schema.returns):
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


def retried(action: Callable[[], Any], draw: random.Random) -> Any:
    """Do something that fails at a random allocation, then do it again."""
    try:
        with NoMemory(draw.randint(1, 40)):
            return action()
    except (RuntimeError, MemoryError) as error:
        if "allocate" not in str(error):
            raise
        return action()


class Writer:
    """Feeds a cache as a model does: every layer, then attention over what it shows."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def forward(self, starts: list[int], width: int, seed: int) -> None:
        """Write `width` positions of every row, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        rows, first = len(starts), torch.tensor(starts)
        uniform = len(set(starts)) == 1
        span = KVSpan(
            None if uniform else torch.arange(rows),
            starts[0] if uniform else first,
            width,
            max(starts) + width,
            None if uniform else torch.arange(rows),
            None if uniform else first,
            torch.full((rows,), width),
        )
        for layer in range(LAYERS):
            key, value, query = (torch.randn(rows, HEADS, width, SIZE, generator=generator) for _ in range(3))
            self.cache.visible_slots(layer, span)
            keys, values = self.cache.update(layer, key, value, span)
            torch.nn.functional.scaled_dot_product_attention(query, keys, values)


def contents(cache: KVCache) -> list[Tensor]:
    """All that the rows of a cache hold."""
    return [
        part
        for row in range(len(cache))
        for layer in cache.layers
        for part in cache.read(layer, torch.tensor([row]))
    ]


def steps(draw: random.Random, capacity: int | None) -> list[tuple[str, Any]]:
    """A history of rows that come, are fed, fork, move and leave."""
    lengths: list[int] = []
    found: list[tuple[str, Any]] = []
    for number in range(14):
        if len(lengths) < 2 or draw.random() < 0.2:
            count = draw.randint(1, 3)
            found.append(("extend", count))
            size = draw.randint(2, 5)
            # New rows are fed by themselves, from their first position.
            found.append(("prompt", (len(lengths), count, size, number)))
            lengths += [size] * count
            found.append(("commit", (None, list(lengths))))
        if capacity is not None and max(lengths) + 1 > capacity:
            keep = [row for row, length in enumerate(lengths) if length + 1 <= capacity - 1]
            lengths = [lengths[row] for row in keep]
            found.append(("commit", (keep, list(lengths))))
            continue
        found.append(("forward", (list(lengths), 1, 100 + number)))
        parents = [draw.randrange(len(lengths)) for _ in range(draw.randint(1, 4))]
        lengths = [lengths[row] + 1 for row in parents]
        found.append(("commit", (parents, list(lengths))))
    return found


def apply(cache: KVCache, step: tuple[str, Any]) -> None:
    name, given = step
    if name == "extend":
        cache.extend(given)
    elif name == "commit":
        parents, lengths = given
        index = None if parents is None else torch.tensor(parents, dtype=torch.long)
        cache.commit(index, torch.tensor(lengths, dtype=torch.long))
    elif name == "forward":
        if given[0]:
            Writer(cache).forward(*given)
    else:
        first, count, size, seed = given
        generator = torch.Generator().manual_seed(seed)
        rows = torch.arange(first, first + count)
        span = KVSpan(rows, 0, size, size, rows, None, torch.full((count,), size))
        for layer in range(LAYERS):
            key, value, query = (torch.randn(count, HEADS, size, SIZE, generator=generator) for _ in range(3))
            cache.visible_slots(layer, span)
            keys, values = cache.update(layer, key, value, span)
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)


@pytest.mark.parametrize("seed", first(2, 6))
@pytest.mark.parametrize("name", [name for name in STORES if name != "list"])
def test_a_store_that_ran_out_of_memory_goes_on(name: str, seed: int) -> None:
    made = store(name)
    with small(), torch.no_grad():
        plain, failing = made.make(), made.make()
        for number, step in enumerate(steps(random.Random(seed), plain.capacity)):
            apply(plain, step)
            if step[0] == "extend":
                apply(failing, step)
            else:
                retried(lambda step=step: apply(failing, step), random.Random(1000 * seed + number))
            if step[0] == "commit":
                assert failing.lengths.tolist() == plain.lengths.tolist()
                for one, other in zip(contents(plain), contents(failing), strict=True):
                    # What leaves a window may be dropped later, when there is memory again.
                    size = min(one.shape[2], other.shape[2]) - (one.shape != other.shape)
                    assert torch.equal(one[:, :, -size:], other[:, :, -size:]), f"after step {number}"


def test_a_state_that_ran_out_of_memory_is_as_before() -> None:
    cache = RecurrentStateCache()
    cache.extend(3)
    cache.write_state(torch.arange(3), [torch.arange(3.0)], torch.tensor([2, 2, 2]))
    cache.commit(None, torch.tensor([2, 2, 2]))
    cache.write_state(torch.arange(3), [torch.arange(3.0) + 10], torch.tensor([3, 3, 3]))
    with pytest.raises(RuntimeError, match="allocate"), NoMemory(1):
        cache.commit(torch.tensor([2, 0]), torch.tensor([3, 3]))
    cache.commit(torch.tensor([2, 0]), torch.tensor([3, 3]))
    assert cache.read_state(torch.arange(2))[0].tolist() == [12.0, 10.0]


def test_unconditional_rows_that_found_no_memory_are_not_counted() -> None:
    cache, rows = PairedRowCache(DenseStore()), torch.tensor([0, 2])
    cache.extend(3)
    refused = mock.patch.object(DenseStore, "extend", side_effect=MemoryError)
    with refused, pytest.raises(MemoryError):
        cache.add_uncond_rows(rows, torch.tensor([4, 5]), torch.tensor([6, 7]))
    for column in (cache.uncond_row, cache.uncond_offset, cache.uncond_base):
        assert column.unique().numel() == 1
    cache.add_uncond_rows(rows, torch.tensor([4, 5]), torch.tensor([6, 7]))
    assert cache.uncond_row.tolist() == [3, -1, 4]


class BrokenCopy(TorchDispatchMode):
    """Refuses the second copy to a block."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.index_copy_.default
        if self.number == 2:
            raise RuntimeError("device-side assert")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["window", "sink"])
def test_a_trim_that_fails_half_way_is_not_hidden(name: str) -> None:
    cache = store(name).make()
    cache.extend(1)

    def run() -> None:
        for start in range(20):
            Writer(cache).forward([start], 1, seed=start)
            with BrokenCopy():
                cache.commit(None, torch.tensor([start + 1]))

    with pytest.raises(RuntimeError, match="device-side"):
        run()


def test_a_window_frees_the_memory_of_a_long_second_prompt() -> None:
    cache = WindowStore([8] * LAYERS)
    cache.extend(1)
    writer = Writer(cache)
    sizes = []
    for start, width in ((0, 4), (4, 200), (204, 2000)):
        writer.forward([start], width, seed=start)
        cache.commit(None, torch.tensor([start + width]))
        sizes.append(cache.nbytes)
    assert sizes[2] == sizes[1] < 200 * 2 * LAYERS * HEADS * SIZE * 4


@pytest.mark.parametrize("name", ["dense", "window", "sink", "snapkv", "h2o"])
def test_stores_loaded_from_one_state_share_no_memory(name: str) -> None:
    first, *others = (store(name).make() for _ in range(3))
    first.extend(2)
    Writer(first).forward([0, 0], 3, seed=1)
    first.commit(None, torch.tensor([3, 3]))
    state, before = first.state(), first.state()
    for other in others:
        other.load(state)
    expected = [part.clone() for part in contents(first)]
    Writer(others[0]).forward([0, 0], 3, seed=2)  # in place of what was loaded
    others[0].commit(None, torch.tensor([3, 3]))
    others[0].commit(torch.tensor([1, 1]), torch.tensor([3, 3]))
    assert all(torch.equal(*pair) for pair in zip(expected, contents(others[1]), strict=True))
    assert state.keys() == before.keys()
    assert all(torch.equal(part, before[key]) for key, part in state.items())


def test_a_prompt_written_again_is_quantized_as_a_first_one() -> None:
    with small():
        fresh, again = (store("quantized").make() for _ in range(2))
        again.extend(1)
        Writer(again).forward([0], 3, seed=1)
        again.commit(None, torch.tensor([3]))
        fresh.extend(1)
        for cache in (fresh, again):
            Writer(cache).forward([0], 21, seed=2)
            cache.commit(None, torch.tensor([21]))
        assert contents(fresh)
        assert all(torch.equal(*pair) for pair in zip(contents(fresh), contents(again), strict=True))
