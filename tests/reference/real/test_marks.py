"""The detectors' error rates on real text: a slice of `python -m bench.detection`."""

from __future__ import annotations

import functools
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.detection.corpus import pieces
from bench.detection.edits import edited
from bench.detection.marks import MARKS, drawn, own
from bench.detection.results import rate
from bench.detection.store import Store
from bench.detection.texts import Batch, Library
from bench.detection.trial import Score, of_ids, of_text
from descant.decoding.watermark.schemes import GumbelWatermarkingConfig
from tests.support import pretrained

MODEL, SMALLEST = "stories15m", "minimind2-small"
MARKED, UNMARKED, KEYS = 16, 80, 12  # texts, texts, and keys for each of the latter
LENGTH = 100
WAYS = [
    ("lefthash", "lookup"),
    ("selfhash", "sampled beams"),
    ("lefthash", "beams"),
    ("synthid", "lookup"),
    ("gumbel", "lookup"),
]


@functools.cache
def library() -> Library:
    return Library(Store(Path("unused")), pretrained.folder(MODEL).parent)


@functools.cache
def human() -> list[list[int]]:
    """Text that people wrote, in the tokens of the smallest vocabulary, whose lists are made the quickest."""
    whole = pieces(library().reader(SMALLEST).tokenizer, UNMARKED, seed=7)
    return [ids[:LENGTH] for ids in whole]


@functools.cache
def written(mark: str, way: str = "sampled", count: int = MARKED) -> list[list[int]]:
    torch.set_num_threads(1)
    return library().made(Batch(MODEL, mark, way, 0, count, LENGTH))


@functools.cache
def strange(mark: str) -> list[Score]:
    """Unmarked texts under keys that have nothing to do with them."""
    vocabulary, tests = library().reader(SMALLEST).vocabulary, []
    for turn in range(KEYS):
        for place, ids in enumerate(human()):
            # A key of selfhash is dear to make, and hardly two texts ask it the same.
            settings = drawn(mark, "slice", turn, 0 if mark == "selfhash" else place)
            if isinstance(settings, GumbelWatermarkingConfig):
                settings = replace(settings, nonce=turn)
            tests += of_ids(settings, vocabulary, ids, [len(ids)])
    return tests


def known(mark: str, texts: list[list[int]], length: int, way: str = "sampled") -> list[Score]:
    """Marked texts under their own keys."""
    vocabulary = library().reader(MODEL).vocabulary
    return [
        of_ids(own(mark, MODEL, way, place), vocabulary, ids, [length])[0] for place, ids in enumerate(texts)
    ]


def found(tests: list[Score]) -> float:
    """The share that is called marked at 1 % false positives."""
    return sum(one.p <= 0.01 for one in tests) / len(tests)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("level", [0.01, 0.001])
def test_unmarked_text_is_called_marked_as_often_as_is_said(mark: str, level: float) -> None:
    tests = strange(mark)
    chance = random.Random(mark)
    # Spread over its atoms, which make the p-value proper too large, it is uniform.
    spread = [one.above + chance.random() * (one.p - one.above) for one in tests]
    assert abs(rate(sum(one <= level for one in spread), len(spread), level)["sigma"]) < 3
    assert rate(sum(one.p <= level for one in tests), len(tests), level)["sigma"] < 3
    assert statistics.median(one.scored for one in tests) > LENGTH / 2


@pytest.mark.parametrize("mark", MARKS)
def test_marked_text_is_found(mark: str) -> None:
    texts = written(mark)
    assert found(known(mark, texts, LENGTH)) >= 0.9
    assert found(known(mark, texts, 50)) >= 0.5
    wrong = own(mark, MODEL, "another", 0)
    vocabulary = library().reader(MODEL).vocabulary
    assert found([of_ids(wrong, vocabulary, ids, [LENGTH])[0] for ids in texts]) <= 0.1


@pytest.mark.parametrize("mark", MARKS)
def test_it_is_found_in_the_text_alone_and_after_edits(mark: str) -> None:
    reader, chance = library().reader(MODEL), random.Random(3)
    texts = [reader.text(ids) for ids in written(mark)]
    words = [word for text in texts for word in text.split()]
    edge = 0.5 if mark == "selfhash" else 0.7  # in 100 tokens selfhash has the least to lose
    for kind, share, least in (("deleted", 0.0, 0.9), ("deleted", 0.1, edge), ("replaced", 0.1, edge)):
        tests = [
            of_text(own(mark, MODEL, "sampled", place), reader, edited(text, kind, share, words, chance))
            for place, text in enumerate(texts)
        ]
        assert found(tests) >= least, (kind, share)


@pytest.mark.parametrize(("mark", "way"), WAYS)
def test_rows_that_fork_or_guess_are_marked_as_well(mark: str, way: str) -> None:
    count = 6
    alone = known(mark, written(mark), LENGTH)
    rows = known(mark, written(mark, way, count), LENGTH, way)
    assert found(rows) >= 0.8
    # As strong but for chance: of six texts the median is off by some.
    assert statistics.median(one.z for one in rows) > 0.6 * statistics.median(one.z for one in alone)
