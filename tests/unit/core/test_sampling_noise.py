"""Chance: keyed streams are the rows' own, exponential and independent; torch's stream is torch's."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from descant.core.context import RowParams, uniform
from descant.core.rows import Rows
from descant.core.sampling_noise import SamplingNoise, keyed_exponential, keyed_normal

CPU = torch.device("cpu")


def keyed(seed=0, slot=0, position=0, size=1):
    """One line for each combination given, broadcast."""
    parts = torch.broadcast_tensors(*(torch.as_tensor(part).reshape(-1) for part in (seed, slot, position)))
    return keyed_exponential(*parts, size, CPU)


def test_a_row_draws_the_same_in_any_batch():
    seed, slot, position = torch.arange(50) * 7, torch.arange(50) % 4, torch.arange(50) * 3 % 11
    whole = keyed(seed, slot, position, 200)
    order = torch.randperm(50)
    assert torch.equal(whole[order], keyed(seed[order], slot[order], position[order], 200))
    for row in (0, 17, 49):
        assert torch.equal(whole[row : row + 1], keyed(seed[row], slot[row], position[row], 200))


def test_a_longer_line_begins_as_a_shorter_one():
    assert torch.equal(keyed(3, 1, 9, 1000)[:, :10], keyed(3, 1, 9, 10))


@pytest.mark.parametrize("axis", ["seed", "slot", "position", "size"])
def test_the_variables_are_exponential_along_every_axis(axis):
    count = 200_000
    line = keyed(5, 1, 2, count)[0] if axis == "size" else keyed(**{axis: torch.arange(count)})[:, 0]
    assert bool((line > 0).all())
    assert stats.kstest(line.numpy(), "expon").pvalue > 1e-4
    # The tails decide races: as many large and small ones as there should be.
    for low, high in ((0, 1e-4), (7, 100)):
        share = stats.expon.cdf(high) - stats.expon.cdf(low)
        found = int(((line >= low) & (line < high)).sum())
        assert stats.binomtest(found, count, share).pvalue > 1e-4


@pytest.mark.parametrize("axis", ["seed", "slot", "position", "size"])
def test_normal_variables_are_normal_along_every_axis_and_the_rows_own(axis):
    count = 100_000
    keys = {name: torch.zeros(1, dtype=torch.long) for name in ("seed", "slot", "position")}
    if axis == "size":
        line = keyed_normal(*keys.values(), count)[0]
    else:
        keys[axis] = torch.arange(count)
        line = keyed_normal(*torch.broadcast_tensors(*keys.values()), 1)[:, 0]
    assert stats.kstest(line.numpy(), "norm").pvalue > 1e-4
    few = {name: value.expand(count)[7:9] if len(value) == 1 else value[7:9] for name, value in keys.items()}
    again = keyed_normal(*few.values(), 9 if axis == "size" else 1)
    assert torch.equal(again[0, 7:] if axis == "size" else again[:, 0], line[7:9])


@pytest.mark.parametrize(
    ("axis", "step"),
    [(axis, step) for axis in ("seed", "slot", "position", "size") for step in (1, 2, 1024)]
    + [("seed", 2**31)],
)
def test_neighbours_on_every_axis_are_independent(axis, step):
    count = 60_000
    start = torch.arange(count)
    if axis == "size":
        line = keyed(7, 0, 3, count + step)[0]
        first, second = line[:count], line[step : step + count]
    else:
        first, second = keyed(**{axis: start})[:, 0], keyed(**{axis: start + step})[:, 0]
    cut = torch.tensor(stats.expon.ppf(torch.linspace(0, 1, 9)[1:-1].numpy()))
    table = torch.zeros(8, 8)
    places = torch.bucketize(first.double(), cut) * 8 + torch.bucketize(second.double(), cut)
    table += torch.bincount(places, minlength=64).view(8, 8)
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-4


def test_seeds_beyond_32_bits_are_seeds_of_their_own():
    seeds = torch.tensor([1, 1 + 2**32, 1 + 2**62, 2**63 - 1, 2**32 - 1, 0])
    lines = keyed(seeds, size=64)
    assert len({tuple(line.tolist()) for line in lines}) == len(seeds)


def test_keys_are_not_interchangeable():
    """Seed 1 at position 2 is not seed 2 at position 1, and so on."""
    lines = [keyed(a, b, c, 64)[0] for a in range(6) for b in range(6) for c in range(6)]
    whole = torch.stack(lines)
    assert len({tuple(line.tolist()) for line in lines}) == len(lines)
    close = torch.corrcoef(whole) - torch.eye(len(lines))
    assert float(close.abs().max()) < 0.7


def rows(seeds, lines=None, slots=None, lengths=None):
    count = len(seeds)
    length = torch.tensor(lengths or [3] * count)
    zeros = torch.zeros(count, dtype=torch.long)
    values = {"seed": torch.tensor(seeds), "noise_row": torch.tensor(lines or list(range(count)))}
    slot = torch.tensor(slots) if slots else zeros
    tokens = torch.zeros(count, 4, dtype=torch.long)
    return Rows(
        tokens, length, zeros, zeros, length, torch.arange(count), slot, {"params": RowParams(values)}
    )


def test_some_variables_are_those_of_a_whole_draw():
    table = rows([3, 2**40, 7], slots=[0, 2, 1], lengths=[3, 9, 4])
    chance = SamplingNoise()
    whole = chance.draw(table, 1000)
    row, index = torch.randint(3, (400,)), torch.randint(1000, (400,))
    assert torch.equal(chance.draw_at(table, row, index), whole[row, index])
    assert chance.draw_at(rows([3, -1]), row[:1] % 2, index[:1]) is None


def test_without_seeds_the_race_is_torchs_own_multinomial():
    chance = SamplingNoise()
    chance.num_rows = 5
    law = torch.rand(5, 300).softmax(-1)
    for count in (1, 4):
        torch.manual_seed(count)
        expected = torch.multinomial(law, count)
        torch.manual_seed(count)
        noise = chance.draw(rows([-1] * 5), 300)
        assert torch.equal((law / noise).topk(count).indices, expected)


def test_a_row_keeps_its_line_of_torchs_stream_when_others_leave():
    chance = SamplingNoise()
    chance.num_rows = 6
    torch.manual_seed(0)
    whole = chance.draw(rows([-1] * 6), 20)
    torch.manual_seed(0)
    some = chance.draw(rows([-1] * 3, lines=[4, 0, 2], slots=[1, 1, 0]), 20)
    assert torch.equal(some, whole[[5, 1, 2]])


def test_seeded_rows_beside_unseeded_ones_draw_from_their_own():
    chance = SamplingNoise()
    chance.num_rows = 3
    torch.manual_seed(0)
    mixed = chance.draw(rows([8, -1, 9], lengths=[3, 4, 5]), 20)
    torch.manual_seed(0)
    stream = torch.empty(3, 20).exponential_()
    assert torch.equal(mixed[1], stream[1])
    assert torch.equal(mixed[[0, 2]], keyed([8, 9], 0, [3, 5], 20))


def test_seeded_rows_leave_torchs_stream_alone():
    state = torch.get_rng_state()
    SamplingNoise().draw(rows([1, 2]), 20)
    assert torch.equal(state, torch.get_rng_state())


def test_the_race_draws_by_the_law():
    law = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025, 0.0])
    noise = keyed(seed=torch.arange(40_000), size=6)
    found = torch.bincount((law / noise).argmax(-1), minlength=6)
    assert int(found[5]) == 0
    assert stats.chisquare(found[:5].numpy(), (law[:5] * 40_000).numpy()).pvalue > 1e-4


def mix(x):
    """The finaliser of MurmurHash3 on a Python int."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize(
    "key", [(0, 0, 0, 0), (5, 1, 7, 1), (2**40 + 3, 2, 900, 2), (2**32 - 1, 0, 2**20, 9)]
)
def test_a_uniform_number_of_a_key_never_changes(key):
    seed, slot, position, salt = key
    bits = mix(seed % 2**32 ^ mix(((seed >> 32) + 0x9E3779B9) % 2**32))
    bits = mix(bits ^ mix((slot + 0x7F4A7C15) % 2**32))
    bits = mix(bits ^ mix((position + 0x94D049BB) % 2**32))
    bits = mix(mix((bits + salt * 0x9E3779B1) % 2**32) ^ 0x6A09E667)
    (found,) = uniform(*(torch.tensor([part]) for part in key[:3]), salt).tolist()
    assert found == (bits + 0.5) / 2**32
