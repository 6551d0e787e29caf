"""The cache of objects: rows, forks, joins and leaves against a list of each row's own state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from descant.kv_cache.stores.recurrent_state import (
    RecurrentStateCache,
    copy_state,
    state_signature,
    take_state_rows,
)


@dataclass
class Layer:
    """State as a model might keep it: tensors, nothing yet, a flag, and a table that is no row's own."""

    conv: Tensor
    empty: Tensor | None = None
    ready: dict[int, bool] = field(default_factory=lambda: {0: True})
    kernel: Tensor = field(default_factory=lambda: torch.arange(7.0))


def _state(values: list[float], length: int | None = None) -> dict[str, Any]:
    rows = torch.tensor(values)
    seen = 3 if length is None else length
    return {
        "layers": [Layer(rows[:, None, None].expand(-1, 2, 4).clone()), Layer(rows[:, None, None] + 1)],
        "pair": (rows[:, None].expand(-1, seen).clone(), 5),
        "mems": [rows[None, :, None].expand(seen, -1, 2).clone()],
    }


def _values(state: dict[str, Any]) -> list[float]:
    """The value of each row, the same wherever it is kept."""
    found = state["layers"][0].conv[:, 0, 0].tolist()
    assert state["layers"][1].conv[:, 0, 0].sub(1).tolist() == found
    assert state["pair"][0][:, 0].tolist() == found
    assert state["mems"][0][0, :, 0].tolist() == found
    return found


def test_taken_rows_are_a_copy_of_lines_of_every_tensor_and_of_the_rest():
    whole = _state([1.0, 2.0, 3.0])
    part = take_state_rows(whole, [2, 0, 2, 2], 3)
    assert _values(part) == [3.0, 1.0, 3.0, 3.0]
    assert part["pair"][1] == 5
    assert part["layers"][0].kernel.tolist() == list(range(7))
    assert part["layers"][0].empty is None
    part["layers"][0].conv.fill_(9)
    part["layers"][0].ready[0] = False
    part["layers"][0].kernel.fill_(9)
    assert _values(whole) == [1.0, 2.0, 3.0]
    assert whole["layers"][0].ready == {0: True}
    assert whole["layers"][0].kernel.tolist() == list(range(7))


@pytest.mark.parametrize("other", [_state([7.0], length=4), {**_state([7.0]), "pair": (torch.ones(1, 3), 6)}])
def test_objects_that_differ_otherwise_cannot(other: dict[str, Any]):
    assert state_signature(_state([1.0, 2.0]), 2) != state_signature(other, 1)


def test_configs_are_not_walked_into():
    class Config:
        def __init__(self) -> None:
            self.table = torch.ones(2)

        def to_dict(self) -> dict[str, Any]:
            return {}

    config = Config()
    assert take_state_rows({"config": config, "x": torch.ones(2)}, [0], 2)["config"] is config


def test_rows_of_two_groups_do_not_share_a_state():
    cache = RecurrentStateCache()
    cache.extend(2)
    cache.write_state(torch.tensor([0]), _state([1.0], length=2))
    cache.write_state(torch.tensor([1]), _state([2.0], length=5))
    assert sorted(part.tolist() for part in cache.row_batches()) == [[0], [1]]
    with pytest.raises(KeyError):
        cache.read_state(torch.tensor([0, 1]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_history_leaves_each_row_its_own_state(data: st.DataObject):
    """Rows come, are fed in parts, fork, move and leave; a list of (value, length) says what each holds."""
    cache, truth, fresh = RecurrentStateCache(), list[tuple[float, int]](), 0.0
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(0, 3))
        if count:
            cache.extend(count)
            first = len(truth)
            for row in range(first, first + count):
                fresh += 1
                length = data.draw(st.integers(1, 2))
                truth.append((fresh, length))
                cache.write_state(torch.tensor([row]), _state([fresh], length))
        parts = [part.tolist() for part in cache.row_batches()]
        assert sorted(row for part in parts for row in part) == list(range(len(truth)))
        for part in parts:
            assert len({truth[row][1] for row in part}) == 1
            state = cache.read_state(torch.tensor(part))
            assert _values(state) == [truth[row][0] for row in part]
            longer = truth[part[0]][1] + 1
            cache.write_state(torch.tensor(part), _state([truth[row][0] + 0.5 for row in part], longer))
            for row in part:
                truth[row] = (truth[row][0] + 0.5, longer)
        if truth:
            size = data.draw(st.integers(0, 4))
            parents = data.draw(st.lists(st.integers(0, len(truth) - 1), min_size=size, max_size=size))
            truth = [truth[parent] for parent in parents]
            cache.commit(torch.tensor(parents, dtype=torch.long), torch.tensor([one[1] for one in truth]))
            assert len(cache) == len(truth)
    kept = {row for part in cache.row_batches() for row in part.tolist()}
    assert kept == set(range(len(truth)))


def _committed(values: list[float], length: int) -> RecurrentStateCache:
    cache = RecurrentStateCache()
    cache.extend(len(values))
    cache.write_state(torch.arange(len(values)), _state(values), torch.full((len(values),), length))
    cache.commit(None, torch.full((len(values),), length))
    return cache


@pytest.mark.parametrize(
    ("lengths", "expected"), [(None, [1, 2, 3]), ([5, 4, 5], [8, 2, 9]), ([4, 4, 4], [1, 2, 3])]
)
def test_what_was_written_counts_once_a_commit_accepts_its_length(lengths, expected):
    cache = _committed([1.0, 2.0, 3.0], 4)
    cache.write_state(torch.tensor([0, 2]), _state([8.0, 9.0]), torch.tensor([5, 5]))
    if lengths is None:  # and was interrupted
        assert [part.tolist() for part in cache.row_batches(torch.tensor([4, 4, 4]))] == [[0, 1, 2]]
    else:
        cache.commit(None, torch.tensor(lengths))
        cache.row_batches()
    assert _values(cache.read_state(torch.arange(3))) == expected


def _advance(cache: RecurrentStateCache, value: float, length: int) -> None:
    """Feed the row of a cache up to a length, as a step does."""
    cache.row_batches(cache.lengths)
    cache.write_state(torch.tensor([0]), _state([value]), torch.tensor([length]))
    cache.commit(None, torch.tensor([length]))


def test_a_row_is_cut_to_the_longest_state_that_has_read_no_more():
    """Between two commits all states are kept; after them the last, and older ones from the first need on."""
    cache = _committed([4.0], 4)
    for length in (5, 7, 9):  # forwards without a commit, as of a draft model
        cache.row_batches(torch.tensor([length - 1]))
        cache.write_state(torch.tensor([0]), _state([float(length)]), torch.tensor([length]))
    for length, read in ((9, 9), (8, 7), (6, 5), (4, 4), (3, 0)):
        assert cache.state_lengths(torch.tensor([length])).tolist() == [read]
    cache.commit(None, torch.tensor([8]))
    assert cache.lengths.tolist() == [8]
    assert cache.state_lengths(torch.tensor([8])).tolist() == [7]
    assert _values(cache.read_state(torch.tensor([0]))) == [7.0]
    _advance(cache, 12.0, 12)
    assert cache.state_lengths(torch.tensor([11])).tolist() == [0]  # plain steps keep no older state
    cache.commit(None, torch.tensor([10]))  # it is read from its start, and from then on
    for length in range(11, 80):
        _advance(cache, float(length), length)
        lengths = {int(cache.state_lengths(torch.tensor([limit]))[0]) for limit in range(length + 1)}
        assert len(lengths) <= 4  # none, the last and two older ones
        if length > 64:
            assert any(length - 48 <= read <= length - 16 for read in lengths)
    copied = cache.select(torch.tensor([0]))
    assert _values(copied.read_state(torch.tensor([0]))) == [79.0]


def test_a_prompt_that_was_interrupted_leaves_no_state():
    cache = RecurrentStateCache()
    cache.extend(2)
    cache.write_state(torch.tensor([0, 1]), _state([1.0, 2.0]), torch.tensor([3, 3]))
    assert cache.row_batches(torch.tensor([0, 0])) == []
    cache.write_state(torch.tensor([0, 1]), _state([1.0, 2.0]), torch.tensor([3, 3]))
    cache.commit(torch.tensor([1]), torch.tensor([0]))
    assert cache.row_batches(torch.tensor([0])) == []


def test_a_forward_may_go_on_from_what_is_not_committed():
    cache = _committed([1.0], 2)
    for step in range(3):
        lengths = torch.tensor([2 + step])
        cache.row_batches(lengths)
        found = _values(cache.read_state(torch.tensor([0])))
        assert found == [1.0 + step]
        cache.write_state(torch.tensor([0]), _state([found[0] + 1]), lengths + 1)
    cache.commit(torch.tensor([0, 0]), torch.tensor([5, 5]))
    assert _values(cache.read_state(torch.arange(2))) == [4.0, 4.0]


def test_a_copy_can_be_written_to():
    whole = _state([1.0, 2.0])
    other = copy_state(whole)
    other["layers"][0].conv.fill_(9)
    other["layers"][0].ready[0] = False
    other["layers"].append("more")
    assert _values(whole) == [1.0, 2.0]
    assert whole["layers"][0].ready == {0: True}
    assert len(whole["layers"]) == 2
    shared = copy_state(whole, lambda owner, name: isinstance(owner, Layer) and name == "kernel")
    assert shared["layers"][0].kernel is whole["layers"][0].kernel
    assert shared["layers"][0].conv is not whole["layers"][0].conv
