"""The table: rows are taken, joined and appended to, and every column follows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from descant.core import rows as rows_module
from descant.core.context import RowParams, columns_from_rows
from descant.core.rows import Column, Rows, concat_padded, index_rows, stable_row_order


@dataclass(frozen=True)
class Names:
    """Python state of every row, as a grammar matcher's would be."""

    held: tuple[str, ...]
    is_per_request: bool = False

    def take(self, parents):
        return Names(tuple(self.held[at] for at in parents.tolist()), self.is_per_request)

    def cat(self, other):
        return Names(self.held + other.held, self.is_per_request)


def make_rows(lengths, columns=None, requests=None, width=0):
    length = torch.tensor(lengths)
    tokens = torch.zeros(len(lengths), max(*lengths, width, 1), dtype=torch.long)
    for row, count in enumerate(lengths):
        tokens[row, :count] = torch.arange(1, count + 1) + 10 * row
    zeros = torch.zeros_like(length)
    request = torch.arange(len(lengths)) if requests is None else torch.tensor(requests)
    return Rows(
        tokens, length, zeros.clone(), zeros.clone(), length.clone(), request, zeros.clone(), columns or {}
    )


def token_lists(rows):
    return [line[:count].tolist() for line, count in zip(rows.tokens, rows.length.tolist(), strict=True)]


def test_take_reorders_forks_and_drops_every_column():
    names = Names(("a", "b", "c"))
    assert isinstance(names, Column)
    rows = make_rows([2, 3, 1], {"names": names, "score": torch.tensor([[1.0], [2.0], [3.0]])})
    rows = rows.take(torch.tensor([2, 0, 2]))
    assert token_lists(rows) == [[21], [1, 2], [21]]
    assert rows.columns["names"].held == ("c", "a", "c")
    assert rows.column("score").flatten().tolist() == [3.0, 1.0, 3.0]
    for name in Rows.HOST_FIELDS:
        assert len(getattr(rows, name)) == 3
    assert rows.request.tolist() == [2, 0, 2]


def test_taking_nothing_leaves_an_empty_table():
    rows = make_rows([2, 1], {"names": Names(("a", "b"))}).take(torch.tensor([], dtype=torch.long))
    assert len(rows) == 0
    assert rows.columns["names"].held == ()
    assert len(rows.append(rows.tokens.new_zeros(0, 2), rows.length)) == 0


def test_taken_rows_do_not_share_their_tokens():
    rows = make_rows([2])
    forked = rows.take(torch.tensor([0, 0])).append(torch.tensor([[7], [8]]), torch.tensor([3, 3]))
    assert token_lists(forked) == [[1, 2, 7], [1, 2, 8]]
    assert token_lists(rows) == [[1, 2]]


def test_the_version_lasts_while_requests_keep_their_rows():
    rows = make_rows([2, 2, 2], requests=[0, 0, 1])
    assert rows.take(torch.tensor([1, 0, 2])).version == rows.version
    assert rows.take(torch.tensor([0, 0, 2])).version == rows.version
    assert rows.take(torch.tensor([2, 0, 1])).version != rows.version
    assert rows.take(torch.tensor([0, 1])).version != rows.version
    assert rows.cat(make_rows([1])).version not in (rows.version, make_rows([1]).version)


def test_a_constant_column_does_not_move_inside_its_request():
    constant, own = Names(("a", "a", "b"), is_per_request=True), Names(("x", "y", "z"))
    rows = make_rows([1, 1, 1], {"constant": constant, "own": own}, requests=[0, 0, 1])
    inside = rows.take(torch.tensor([1, 0, 2]))
    assert inside.columns["constant"] is constant
    assert inside.columns["own"].held == ("y", "x", "z")
    assert rows.take(torch.tensor([2, 0, 1])).columns["constant"].held == ("b", "a", "a")


def test_cat_pads_the_narrower_table():
    first = make_rows([2], {"ids": torch.tensor([[5, 6]])})
    second = make_rows([4, 1], {"ids": torch.tensor([[7], [8]])})
    for rows in (first.cat(second), second.cat(first)):
        assert sorted(token_lists(rows)) == [[1, 2], [1, 2, 3, 4], [11]]
        assert rows.column("ids").shape == (3, 2)
    assert first.cat(second).column("ids").tolist() == [[5, 6], [7, -1], [8, -1]]


@pytest.mark.parametrize(
    ("mine", "theirs", "error"),
    [
        ({"a": torch.zeros(1, 1)}, {}, KeyError),
        ({"a": torch.zeros(1, 1)}, {"a": Names(("x",))}, TypeError),
    ],
)
def test_tables_that_do_not_match_are_not_joined(mine, theirs, error):
    with pytest.raises(error, match="a"):
        make_rows([1], mine).cat(make_rows([1], theirs))


@pytest.mark.parametrize("lengths", [[2, 2], [3, 1]])
def test_append_puts_tokens_behind_each_rows_own(lengths):
    rows = make_rows(lengths)
    before = token_lists(rows)
    more = rows.append(torch.tensor([[7, 8], [9, 10]]), rows.length + torch.tensor([2, 1]))
    assert token_lists(more) == [before[0] + [7, 8], before[1] + [9]]
    # What was tried and not kept is written over by what comes next.
    last = more.append(torch.tensor([[50], [60]]), more.length + 1)
    assert token_lists(last) == [before[0] + [7, 8, 50], before[1] + [9, 60]]


def test_the_store_grows_and_keeps_what_it_holds():
    rows = make_rows([3, 2])
    for token in range(100):
        rows = rows.append(torch.full((2, 1), token), rows.length + 1)
    assert token_lists(rows) == [[1, 2, 3, *range(100)], [11, 12, *range(100)]]


def test_positions_count_what_has_no_token():
    rows = make_rows([2, 3])
    rows.offset, rows.cached_length = torch.tensor([4, 0]), torch.tensor([5, 3])
    assert rows.position.tolist() == [6, 3]
    assert rows.pending.tolist() == [1, 0]


def test_join_and_pick():
    assert concat_padded(torch.tensor([1]), torch.tensor([2, 3])).tolist() == [1, 2, 3]
    assert concat_padded(torch.tensor([[1, 2]]), torch.tensor([[3]]), 9).tolist() == [[1, 2], [3, 9]]
    assert index_rows(torch.tensor([[1], [2]]), torch.tensor([1, 1])).tolist() == [[2], [2]]


def test_a_column_of_python_state_is_no_tensor():
    with pytest.raises(TypeError, match="`names` must be a tensor, got Names"):
        make_rows([1], {"names": Names(("a",))}).column("names")


@given(st.integers(1, 8), st.lists(st.integers(0, 7), max_size=8))
def test_a_few_rows_are_ordered_as_many_are(count, parents):
    parents = torch.tensor([parent % count for parent in parents], dtype=torch.long)
    few = stable_row_order(parents, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_FEW_ROWS", 0)
        many = stable_row_order(parents, count)
    assert (few is None) == (many is None)
    if few is not None:
        assert few.tolist() == many.tolist()


def test_parameters_taken_again_and_again_are_those_of_the_first_table():
    params = RowParams(
        columns_from_rows([{"a": row, "b": [row], "c": str(row), "d": 0.5} for row in range(5)])
    )
    taken = params.take(torch.tensor([4, 2, 2, 0])).take(torch.tensor([3, 1, 0]))
    assert len(taken) == 3
    assert taken["a"].tolist() == [0, 2, 4]
    assert taken["b"].tolist() == [[0], [2], [4]]
    assert list(taken.values["c"]) == ["0", "2", "4"]
    joined = taken.cat(params.take(torch.tensor([1])))
    assert joined["a"].tolist() == [0, 2, 4, 1]
    assert list(joined.values) == ["a", "b", "c", "d"]
