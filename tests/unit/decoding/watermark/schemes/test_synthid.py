"""The tournament's coins against a version in Python's own integers."""

from __future__ import annotations

import random

import pytest
import torch

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
from descant.decoding.watermark.synthid import (
    Tournament,
    before_eos_mask,
    get_tournament,
    repetition_mask,
    sampling_table,
)

WORD = 2**64
SIZES = (2**16, 2, 999, 1000, 2**23)


def settings(**given):
    keys = (91, -7, 2**40 + 5, 65_536, 2**62)
    return SynthIDTextWatermarkingConfig(**{"ngram_len": 4, "keys": keys, "sampling_table_seed": 5, **given})


# -------------------------------------------------------------------------- the slow version
def slow_hash(numbers, start=1):
    """The hash modulo 2^64 of numbers, as an integer with a sign."""
    value = start
    for one in numbers:
        value = ((value + one) * 6364136223846793005 + 1) % WORD
    return value - WORD if value >= WORD // 2 else value


def slow_coins(known, ngram):
    """The coins of the last token of an n-gram."""
    table = sampling_table(known.sampling_table_size, known.sampling_table_seed)
    return [int(table[slow_hash([*ngram, key]) % len(table)]) for key in known.keys]


def slow_present(known, new):
    """The hash of the context after these new tokens, and whether it may be marked."""
    width = known.ngram_len - 1
    padded = [0] * width + new
    contexts = [padded[at : at + width] for at in range(len(new) + 1)]
    first = width if known.skip_first_ngram_calls else 0
    history = contexts[:-1][first:][-known.context_history_size :]
    return slow_hash(contexts[-1]), len(new) >= first and contexts[-1] not in history


@pytest.mark.parametrize("size", SIZES)
def test_coins(size):
    known, rng = settings(sampling_table_size=size), random.Random(size)
    game = Tournament(known)
    ids = [rng.randrange(300_000) for _ in range(40)]
    tokens = torch.tensor(ids)
    contexts, after = game.context_hashes(tokens[:-1]), tokens[3:]
    assert contexts.tolist() == [slow_hash(ids[at : at + 3]) for at in range(37)]
    wanted = [slow_coins(known, ids[at : at + 4]) for at in range(37)]
    assert game.g_values(contexts, after).tolist() == wanted
    rounds = list(game.iter_g_values(contexts[:, None], after[:, None]))
    assert torch.cat(rounds, 1).tolist() == wanted
    assert size == 2 or 0.2 < torch.tensor(wanted).double().mean() < 0.8


@pytest.mark.parametrize("vocabulary", [10, 5000])
@pytest.mark.parametrize("size", [2, 64, 2**12])
def test_a_window_holds_the_coins_of_the_vocabulary(size, vocabulary):
    """Also where it is wider than the table, and one more than the last one asked for."""
    game, tokens = Tournament(settings(sampling_table_size=size)), torch.arange(vocabulary)
    for context in (0, 1, -1, size - 1, -(2**63), 2**63 - 1, 123_456_789_123):
        window = game.vocab_g_values(context, vocabulary)
        assert torch.equal(window.T.long(), game.g_values(torch.tensor(context), tokens).long())
        assert torch.equal(
            torch.stack(list(game.iter_g_values(torch.tensor([[context]]), tokens))), window[:, None]
        )


@pytest.mark.parametrize("size", [999, 2**23])
def test_a_table_without_a_board_has_no_window(size):
    assert Tournament(settings(sampling_table_size=size)).vocab_g_values(0, 10) is None


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("history", [1, 2, 7, 1024])
def test_present_contexts_of_ragged_lines(history, skip):
    known = settings(context_history_size=history, skip_first_ngram_calls=skip, ngram_len=3)
    game, rng, seen = Tournament(known), random.Random(history), set()
    for _ in range(60):
        lines = [[rng.randrange(2) for _ in range(rng.randint(1, 14))] for _ in range(5)]
        prompts = [rng.randint(0, len(line)) for line in lines]
        store = torch.tensor([[*line, *[rng.randrange(3) for _ in range(14 - len(line))]] for line in lines])
        longest = max(map(len, lines))
        length = torch.tensor([[len(line)] for line in lines])
        new = length - torch.tensor(prompts)[:, None]
        contexts, fresh = game.current_contexts(store[:, :longest], length, new, int(new.max()))
        wanted = [slow_present(known, line[prompt:]) for line, prompt in zip(lines, prompts, strict=True)]
        assert list(zip(contexts[:, 0].tolist(), fresh[:, 0].tolist(), strict=True)) == wanted
        seen |= {marks for _, marks in wanted}
    assert seen == {False, True}


@pytest.mark.parametrize("history", [1, 3, 100])
def test_repeats_are_forgotten(history):
    rng = random.Random(history)
    lines = [[rng.choice([-5, 0, 3, 2**62]) for _ in range(30)] for _ in range(6)]
    wanted = [[one in line[max(0, at - history) : at] for at, one in enumerate(line)] for line in lines]
    assert repetition_mask(torch.tensor(lines), history).tolist() == wanted
    assert repetition_mask(torch.tensor([[4]]), history).tolist() == [[False]]


def test_before_end():
    ids = torch.tensor([[4, 2, 4, 2], [4, 4, 4, 4], [2, 4, 4, 4]])
    assert before_eos_mask(ids, 2).tolist() == [[True, False, False, False], [True] * 4, [False] * 4]


def test_what_is_asked_alike_is_answered_alike_whatever_the_key():
    """Tokens of different n-grams share their coins under every key if they are asked alike."""
    rng, tokens = random.Random(4), torch.arange(200_000)
    context = torch.tensor(987_654_321_012_345)
    game = Tournament(settings())
    asked = game.g_value_inputs(context, tokens)
    assert torch.equal(asked[:1000], asked[65_536:66_536])
    assert len(set(asked[:65_536].tolist())) == 65_536
    for _ in range(5):
        keys = tuple(rng.randrange(2**62) for _ in range(16))
        coins = Tournament(settings(keys=keys)).g_values(context, tokens)
        assert torch.equal(coins[:1000], coins[65_536:66_536])
        assert (coins[:1000] != coins[1000:2000]).any(1).float().mean() > 0.99
    odd = Tournament(settings(sampling_table_size=999))
    assert len(set(odd.g_value_inputs(context, tokens).tolist())) == 200_000


def test_rounds_that_repeat_another_are_known():
    assert Tournament(settings(keys=(1, 2, 65_537, 1, 3))).distinct_rounds == [0, 1, 4]
    assert Tournament(settings(keys=(1, 2, 65_537, 1, 3), sampling_table_size=999)).distinct_rounds == [
        0,
        1,
        2,
        4,
    ]
    assert Tournament(settings(keys=(-1, 65_535))).distinct_rounds == [0]
    coins = Tournament(settings(keys=(1, 2, 65_537, 1))).g_values(torch.arange(900), torch.arange(900))
    assert torch.equal(coins[:, 0], coins[:, 2])
    assert not torch.equal(coins[:, 0], coins[:, 1])


def test_the_fraction_of_ones_is_that_of_the_table():
    known = settings(sampling_table_size=101)
    table = sampling_table(101, 5)
    assert Tournament(known).ones_fraction == pytest.approx(int(table.sum()) / 101, abs=1e-15)
    assert abs(Tournament(settings()).ones_fraction - 0.5) < 0.01


def test_tables_leave_torch_s_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    sampling_table.cache_clear()
    first = sampling_table(500, 9)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, sampling_table(500, 10))


def test_one_tournament_for_equal_settings():
    assert get_tournament(settings()) is get_tournament(settings())
    assert get_tournament(settings()) is not get_tournament(settings(ngram_len=5))
