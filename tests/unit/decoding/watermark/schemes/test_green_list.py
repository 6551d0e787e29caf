"""Green lists: the same shuffle as torch's on the host, kept and shared without being changed."""

from __future__ import annotations

import random
import threading
from functools import lru_cache

import numpy as np
import pytest
import torch

from descant.config.watermarking_config import WatermarkingConfig
from descant.decoding.watermark import green_list as module
from descant.decoding.watermark.green_list import GreenList, get_green_list
from descant.errors import ConfigError

KEYS = (1, 15485863, 2**31, 2**32 + 1, 2**63 - 1)
WHOLE = 2**64


@lru_cache(maxsize=8)
def shuffled(seed: int, size: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


def greens(seed: int, vocabulary: int, ratio: float) -> set[int]:
    return set(shuffled(seed % (WHOLE - 1), vocabulary)[: int(vocabulary * ratio)])


def wrapped(number: int) -> int:
    """A whole number as 64 bits hold it."""
    return (number + WHOLE // 2) % WHOLE - WHOLE // 2


def self_seed(key: int, before: list[int], token: int) -> int:
    table = shuffled(key, module.HASH_TABLE_SIZE)
    own = table[token % module.HASH_TABLE_SIZE] + 1
    return min(wrapped(key * (table[one % module.HASH_TABLE_SIZE] + 1) * own) for one in [*before, token])


def chance_list(rng: random.Random, **more) -> tuple[GreenList, WatermarkingConfig]:
    vocabulary = rng.choice((2, 3, 8, 17, 64, 97, 257, 1000))
    ratio = rng.choice((0.25, 0.5, rng.uniform(1.0, vocabulary - 0.01) / vocabulary))
    key = rng.choice((*KEYS, rng.randrange(1, 2**63)))
    settings = WatermarkingConfig(max(ratio, 1.001 / vocabulary), hashing_key=key, **more)
    return GreenList(settings, vocabulary), settings


def test_lefthash_makes_the_list_that_torch_shuffles():
    rng = random.Random(1)
    for _ in range(150):
        some, settings = chance_list(rng)
        last = [rng.randrange(some.vocab_size) for _ in range(4)]
        for token, line in zip(last, some.green_mask(last), strict=True):
            expected = greens(settings.hashing_key * token, some.vocab_size, settings.greenlist_ratio)
            assert set(line.nonzero()[:, 0].tolist()) == expected
            assert len(expected) == some.num_green


@pytest.mark.parametrize("vocabulary", [32_000, 49_152, 152_064])
def test_lists_of_real_vocabularies(vocabulary):
    for ratio, key in ((0.25, 2**61 + 7), (0.5, 99_991)):
        some = GreenList(WatermarkingConfig(ratio, hashing_key=key), vocabulary)
        for token in (1, vocabulary - 1):
            line = some.green_mask([token])[0]
            assert set(line.nonzero()[:, 0].tolist()) == greens(key * token, vocabulary, ratio)


def test_the_list_is_what_it_always_was():
    """Pinned, should torch shuffle differently one day: marks must be found years later."""
    some = GreenList(WatermarkingConfig(0.25, hashing_key=987_654_321_987), 40)
    assert some.green_mask([7])[0].nonzero()[:, 0].tolist() == [7, 8, 9, 14, 16, 24, 26, 31, 32, 37]
    own = GreenList(WatermarkingConfig(0.25, 2.0, 987_654_321_987, "selfhash", 3), 40)
    assert own.seeds(np.array([[5, 6]]), np.array([[7]])).tolist() == [[96_920_642]]


def test_asking_one_by_one_is_asking_the_list():
    rng = random.Random(2)
    hits = 0
    for _ in range(60):
        for scheme in ("lefthash", "selfhash"):
            some, _ = chance_list(rng, seeding_scheme=scheme)
            seeds = np.array([rng.randrange(2**32) for _ in range(40)], dtype=np.uint32)
            tokens = np.array([rng.randrange(some.vocab_size) for _ in range(40)])
            expected = [
                token in shuffled(seed, some.vocab_size)[: some.num_green]
                for seed, token in zip(seeds.tolist(), tokens.tolist(), strict=True)
            ]
            assert some.is_green(seeds, tokens).tolist() == expected
            hits += sum(expected)
    assert 500 < hits < 4300


def test_what_is_no_token_of_the_vocabulary_is_not_green():
    for scheme in ("lefthash", "selfhash"):
        some = GreenList(WatermarkingConfig(0.9, seeding_scheme=scheme), 64)
        seeds = np.arange(200, dtype=np.uint32)
        for strange in (-1, -(2**40), 64, 65, 2**40):
            assert not some.is_green(seeds, np.full(200, strange)).any()
        assert some.is_green(seeds, np.arange(200) % 64).any()


def test_selfhash_takes_the_least_product_as_64_bits_hold_it():
    rng = random.Random(3)
    negative = 0
    for key in KEYS:
        for width in (1, 2, 4):
            some = GreenList(WatermarkingConfig(0.25, 2.0, key, "selfhash", width), 64)
            before = [[rng.randrange(2 * 10**6) for _ in range(5)] for _ in range(3)]
            tokens = [[rng.randrange(2 * 10**6) for _ in range(4)] for _ in range(3)]
            seeds = some.seeds(np.array(before), np.array(tokens))
            for line in range(3):
                for place, token in enumerate(tokens[line]):
                    whole = self_seed(key, before[line][len(before[line]) - width + 1 :], token)
                    assert seeds[line, place] == whole % (WHOLE - 1) % 2**32
                    negative += whole < 0
    assert negative > 20


def test_after_token_zero_the_list_is_the_same_for_every_key():
    first, second = (GreenList(WatermarkingConfig(hashing_key=key), 97) for key in (5, 2**60 + 3))
    assert torch.equal(first.green_mask([0]), second.green_mask([0]))
    assert not torch.equal(first.green_mask([1]), second.green_mask([1]))


def test_a_list_is_made_once(monkeypatch):
    made = []
    whole = GreenList._build_masks
    monkeypatch.setattr(
        GreenList, "_build_masks", lambda self, swaps: made.extend(swaps) or whole(self, swaps)
    )
    settings = WatermarkingConfig(hashing_key=314_159)
    get_green_list(settings, 311).green_mask([1, 2, 1, 2])
    assert len(made) == 2
    # Another call, another bias, and a detector's question.
    some = get_green_list(WatermarkingConfig(bias=0.5, hashing_key=314_159), 311)
    some.green_mask([2])
    some.is_green(some.seeds(np.array([[1]]), np.array([[9]]))[:, 0], np.array([9]))
    assert len(made) == 2
    get_green_list(WatermarkingConfig(hashing_key=314_160), 311).green_mask([1])
    assert len(made) == 3


def test_a_detector_makes_a_list_only_of_what_it_asks_often(monkeypatch):
    made = []
    whole = GreenList._build_masks
    monkeypatch.setattr(
        GreenList, "_build_masks", lambda self, swaps: made.extend(swaps) or whole(self, swaps)
    )
    some = GreenList(WatermarkingConfig(hashing_key=2_718_281), 313)
    expected = shuffled(99, 313)[: some.num_green]
    for token in range(313):
        assert some.is_green(np.array([99], dtype=np.uint32), np.array([token]))[0] == (token in expected)
        assert len(made) == (token >= module.MAX_SINGLE_QUERIES)


def test_what_is_forgotten_is_made_again_alike():
    settings = WatermarkingConfig(hashing_key=777)
    free = GreenList(settings, 97)
    for most in (0, 1, 3):
        some = GreenList(settings, 97, most)
        for _ in range(2):
            assert torch.equal(some.green_mask(range(10)), free.green_mask(range(10)))
        assert len(some._list_cache._entries) == most


def test_the_cache_keeps_to_its_budget_and_evicts_the_oldest():
    memory = module._LRUCache(10)
    for name, cost in (("a", 4), ("b", 4), ("a", 4)):
        memory.put(name, name.upper(), cost)
    assert memory.get("a") == "A"
    memory.put("c", "C", 6)
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == ("A", None, "C")
    memory.put("d", "D", 11)  # too large for it
    assert memory.get("d") is None
    memory.put("e", "E", 10)
    assert memory.get("e") == "E"


def test_threads_share_a_list():
    settings = WatermarkingConfig(hashing_key=4242)
    rng = random.Random(5)
    asked = [[rng.randrange(997) for _ in range(8)] for _ in range(48)]
    expected = [GreenList(settings, 997, 500).green_mask(last) for last in asked]
    some, answers = GreenList(settings, 997, 3), [None] * len(asked)

    def ask(first: int) -> None:
        for place in range(first, len(asked), 4):
            answers[place] = some.green_mask(asked[place])

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(answers, expected, strict=True))


@pytest.mark.parametrize(("ratio", "vocabulary"), [(0.25, 3), (0.001, 100), (0.5, 1), (0.5, 2**27 + 1)])
def test_a_ratio_that_makes_nothing_green_is_refused(ratio, vocabulary):
    with pytest.raises(ConfigError, match="greenlist_ratio"):
        GreenList(WatermarkingConfig(ratio), vocabulary)
