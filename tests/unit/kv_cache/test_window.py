"""The windowed cache beyond the law of caches: what it keeps, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from descant.core.interfaces import KVSpan
from descant.errors import InputError
from descant.kv_cache.stores.sink_window import WindowStore

HEADS, SIZE, SLOT = 2, 4, 2 * 2 * 4 * 4  # of keys and values, in bytes


def step(store, layers, width=1, rows=None):
    """Feed every row, or some; then commit."""
    fed = list(range(len(store))) if rows is None else rows
    starts = store.lengths[fed]
    level = len(set(starts.tolist())) == 1
    span = KVSpan(
        None if rows is None else torch.tensor(rows),
        int(starts[0]) if level else starts,
        width,
        int(starts.max()) + width,
    )
    for layer in range(layers):
        block = torch.randn(len(fed), HEADS, width, SIZE)
        shown, _ = store.update(layer, block, block, span)
    lengths = store.lengths.clone()
    lengths[fed] += width
    store.commit(None, lengths)
    return shown


def held_in(store, shown):
    """Whether what is shown is a view of what is held."""
    keys = store._stores[store._windows[0]]._keys[0]
    return shown.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


def test_memory_is_bounded_whatever_the_length():
    store = WindowStore([16, 16], slack=8, room=8)
    store.extend(3)
    step(store, 2, 5, [0])
    step(store, 2, 400, [1])
    sizes = set()
    for _ in range(300):
        shown = step(store, 2)
        assert shown.shape[2] <= 16
        sizes.add(store.nbytes)
    assert store.lengths.tolist() == [305, 700, 300]
    assert max(sizes) <= 3 * 2 * (16 - 1 + 8 + 8) * SLOT


def test_a_long_prompt_takes_no_room_in_other_rows():
    """What one row reads at once is never laid out for the others."""
    store = WindowStore([16], slack=8, room=8)
    store.extend(10)
    for row in range(9):
        step(store, 1, 20, [row])
    before = store.nbytes
    span = KVSpan(torch.tensor([9]), 0, 5000, 5000)
    block = torch.randn(1, HEADS, 5000, SIZE)
    shown, _ = store.update(0, block, block, span)
    assert shown is block
    assert store.nbytes <= before * 10 // 9 + 5000 * SLOT
    store.commit(None, torch.tensor([20] * 9 + [4321]))
    assert store.nbytes <= 2 * 10 * (16 - 1 + 8 + 8) * SLOT
    block = torch.randn(1, HEADS, 1, SIZE)
    kept, _ = store.update(0, block, block, KVSpan(torch.tensor([9]), 4321, 1, 4322))
    assert torch.equal(kept[:, :, :15], shown[:, :, 4321 - 15 : 4321])


def test_a_committed_prompt_is_trimmed_at_once():
    store = WindowStore([16, 16], slack=8, room=8)
    store.extend(2)
    lengths = torch.tensor([5000, 4000])  # the rest fills the shorter row up
    blocks = torch.randn(2, 2, HEADS, 5000, SIZE)
    span = KVSpan(None, 0, 5000, 5000, num_committed=lengths)
    for layer in range(2):
        store.update(layer, blocks[layer], blocks[layer], span)
    assert store.nbytes <= 2 * 2 * (5000 - (4000 - 16 - 8)) * SLOT
    store.commit(None, lengths)
    new = torch.randn(2, HEADS, 1, SIZE)
    for layer in range(2):
        kept, _ = store.update(layer, new, new, KVSpan(None, lengths, 1, 5001, host_starts=lengths))
        for row, stop in enumerate(lengths.tolist()):
            assert torch.equal(kept[row, :, :15], blocks[layer, row, :, stop - 15 : stop])


def test_a_prompt_whose_forward_failed_leaves_an_empty_row():
    store = WindowStore([4], slack=0, room=1)
    store.extend(1)
    block = torch.randn(1, HEADS, 50, SIZE)
    store.update(0, block, block, KVSpan(None, 0, 50, 50, num_committed=torch.tensor([50])))
    store.commit(None, torch.tensor([0]))
    step(store, 1, 2)
    assert torch.equal(step(store, 1)[:, :, :2], store.read(0, torch.tensor([0]))[0][:, :, :2])


@pytest.mark.parametrize("window", [8, 200])
def test_beams_never_move_their_prompt(window):
    """What is copied among rows that parted is what came after, as far as the window goes."""
    store = WindowStore([window], slack=8, room=64)
    store.extend(1)
    step(store, 1, 150)
    store.commit(torch.zeros(4, dtype=torch.long), torch.full((4,), 150))
    held = store._stores[window]
    before = held.copied_slots
    for number in range(30):
        step(store, 1)
        store.commit(torch.tensor([1, 0, 3, 3]), store.lengths.clone())
        assert held.copied_slots - before <= 3 * (number + 1)
        before = held.copied_slots


def test_a_wide_forward_of_rows_with_a_past_is_forgotten_when_committed():
    store = WindowStore([6], slack=2, room=2)
    store.extend(2)
    step(store, 1, 4)
    step(store, 1, 100)
    assert store.nbytes <= 2 * (6 - 1 + 2 + 2) * SLOT


def test_rows_of_a_window_grow_by_half():
    store = WindowStore([16])
    store.extend(4)
    step(store, 1)
    before = store.nbytes
    store.extend(1)
    step(store, 1, rows=[4])
    assert store.nbytes == 1.5 * before


def test_full_layers_keep_everything():
    store = WindowStore([None, 4], slack=0, room=1)
    store.extend(1)
    for _ in range(100):
        step(store, 2)
    block = torch.randn(1, HEADS, 1, SIZE)
    span = KVSpan(None, 100, 1, 101)
    assert store.visible_slots(0, span) is None
    assert store.update(0, block, block, span)[0].shape[2] == 101
    assert store.visible_slots(1, span).past_lengths.tolist() == [3]
    assert store.update(1, block, block, span)[0].shape[2] == 4


def test_level_rows_are_shown_without_a_copy():
    store = WindowStore([8], slack=4, room=16)
    store.extend(3)
    step(store, 1, 40)
    for _ in range(50):
        shown = step(store, 1)
        assert held_in(store, shown)


def test_rows_that_were_read_long_apart_become_level():
    """Trimmed together, rows of any lengths are shown without a copy from then on."""
    store = WindowStore([8], slack=4, room=16)
    store.extend(3)
    for row, length in enumerate((3, 30, 90)):
        step(store, 1, length, [row])
    viewed = [held_in(store, step(store, 1)) for _ in range(60)]
    assert not viewed[0]
    assert viewed[-1]


# -------------------------------------------------------------------- limits
def test_a_row_is_cut_no_further_than_it_can_go_on():
    store = WindowStore([4, None], slack=5, room=1)
    store.extend(2)
    step(store, 2, 30)
    store.commit(None, torch.tensor([25, 30]))
    assert store.max_rewind == 5
    with pytest.raises(InputError, match=r"must be >= .* for row 0"):
        store.commit(None, torch.tensor([10, 30]))
    assert store.lengths.tolist() == [25, 30]  # nothing has changed


def test_what_was_only_written_can_always_be_cut():
    store = WindowStore([4], slack=0, room=1)
    store.extend(1)
    block = torch.randn(1, HEADS, 50, SIZE)
    store.update(0, block, block, KVSpan(None, 0, 50, 50))
    store.commit(None, torch.tensor([7]))
    kept, _ = store.update(0, block[:, :, :1], block[:, :, :1], KVSpan(None, 7, 1, 8))
    assert torch.equal(kept, torch.cat((block[:, :, 4:7], block[:, :, :1]), 2))


@pytest.mark.parametrize(
    ("windows", "slack", "room", "field"),
    [([], 0, 1, "windows"), ([0], 0, 1, "windows"), ([3], -1, 1, "slack"), ([3], 0, 0, "room")],
    ids=str,
)
def test_settings_that_cannot_be(windows, slack, room, field):
    with pytest.raises(InputError) as error:
        WindowStore(windows, slack, room)
    assert error.value.field == field


def test_layers_and_windows_must_agree():
    store = WindowStore([3])
    with pytest.raises(InputError, match="layer 1"):
        store.visible_slots(1, KVSpan(None, 0, 1, 1))
    with pytest.raises(InputError, match="windows"):
        store.join(WindowStore([4]))
