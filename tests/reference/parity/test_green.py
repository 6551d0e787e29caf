"""The green list as transformers 4.52.4 has it: lists, scores, marked tokens, z-scores; and where it errs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from descant.config.watermarking_config import WatermarkingConfig
from descant.decoding.watermark.green_list import (
    GreenList,
    GreenListScheme,
    WatermarkDetector,
    WatermarkLogitsProcessor,
)
from descant.decoding.watermark.statistics import binomial_tail
from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import ragged
from tests.reference.process.client import ReferenceClient, ReferenceFailure

SCHEMES = ("lefthash", "selfhash")
KEYS = (1, 7_919, 2**31 + 11, 2**40 + 1, 2**63 - 1)
TEXT = {"vocab_size": 211, "bos_token_id": 1}


@dataclass(frozen=True)
class Case:
    """One call of the processor, as the reference's pipe can carry it."""

    arguments: dict[str, Any]
    input_ids: torch.Tensor  # [N, L]
    scores: torch.Tensor  # [N, V]


def process(reference: ReferenceClient, cases: list[Case]) -> list[torch.Tensor]:
    asked = [(dict(one.arguments), one.input_ids, one.scores) for one in cases]
    return reference.ask("process", name="WatermarkLogitsProcessor", cases=asked)


def ours(given: Case) -> torch.Tensor:
    return WatermarkLogitsProcessor(**given.arguments)(given.input_ids, given.scores)


@pytest.mark.parametrize("size", [41, 257, 32_000, 49_152, 151_936])
def test_the_same_lists(size, reference):
    rng = random.Random(size)
    cases = []
    for key, ratio in product(KEYS, (0.25, 0.5)):
        ids = torch.tensor([[0], [size - 1], *([rng.randrange(size)] for _ in range(4))])
        arguments = {"vocab_size": size, "device": "cpu", "hashing_key": key, "greenlist_ratio": ratio}
        cases.append(Case(arguments, ids, torch.zeros(len(ids), size)))
    for given, theirs in zip(cases, process(reference, cases), strict=True):
        settings = WatermarkingConfig(
            given.arguments["greenlist_ratio"], hashing_key=given.arguments["hashing_key"]
        )
        mine = GreenList(settings, size).green_mask(given.input_ids[:, 0].tolist())
        assert torch.equal(mine, theirs > 0), given.arguments


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_scores(scheme, reference):
    rng, chance = random.Random(scheme), torch.Generator().manual_seed(4)
    cases = []
    for _ in range(50):
        size, lines, length = rng.choice((40, 97, 400, 5000)), rng.randint(1, 4), rng.randint(1, 7)
        scores = torch.randn(lines, size, generator=chance) * 3
        if rng.random() < 0.3:
            scores = scores.masked_fill(torch.rand(lines, size, generator=chance) < 0.6, -torch.inf)
        arguments = {
            "vocab_size": size - rng.choice((0, 0, size // 3)),
            "device": "cpu",
            "greenlist_ratio": rng.choice((0.25, 0.5, 0.7)),
            "bias": rng.choice((0.5, 2.0, 3.3, -1.0)),
            "hashing_key": rng.choice((*KEYS, rng.randrange(1, 2**63))),
            "seeding_scheme": scheme,
            "context_width": rng.choice((1, 1, 2, 4)),
        }
        ids = torch.randint(0, arguments["vocab_size"], (lines, length), generator=chance)
        cases.append(Case(arguments, ids, scores))
    still = 0
    for given, theirs in zip(cases, process(reference, cases), strict=True):
        assert torch.equal(ours(given), theirs), given
        still += torch.equal(theirs, given.scores)
    assert still < 20  # ids shorter than a context


MARKS = {
    "lefthash": {"bias": 3.0, "hashing_key": 2**40 + 15},
    "lefthash of a wide context": {"bias": 3.0, "hashing_key": 77, "context_width": 4},
    "selfhash": {"bias": 4.0, "hashing_key": 8_191, "seeding_scheme": "selfhash", "context_width": 3},
}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.2},
}


@pytest.mark.parametrize("name", ["llama", "t5", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mark", MARKS)
def test_the_same_marked_tokens(mark, way, name, tiny, reference):
    model, drawn = tiny(name), way == "sampling"
    arguments = {"max_new_tokens": 12, **WAYS[way], "watermarking_config": MARKS[mark]}
    call = Call(model, arguments, seed=3 if drawn else None)
    prompts = ragged(model)
    # The reference reads the padding of a batch as tokens.
    answers = (compare.alone if drawn else compare.by_row)(reference, call, prompts)
    plain = Call(model, {"max_new_tokens": 12, **WAYS[way]}, seed=call.seed)
    said = plain.ours(prompts)
    assert [a.tokens for a in answers] != [
        compare.split(plain, said["sequences"], prompts, row)[0] for row in range(len(prompts.rows))
    ]


def texts(rng: random.Random, lines: int, length: int) -> torch.Tensor:
    """Texts of few kinds of tokens, so that they repeat themselves, without one that begins a text."""
    kinds = rng.sample(range(2, TEXT["vocab_size"]), rng.choice((3, 12, 60)))
    return torch.tensor([[rng.choice(kinds) for _ in range(length)] for _ in range(lines)])


def both(
    reference: ReferenceClient, settings: dict, ids: torch.Tensor, model: dict = TEXT, **options
) -> tuple:
    theirs = reference.ask(
        "green_detector", config=model, settings=settings, calls=[{"input_ids": ids}], **options
    )[0]
    config = SimpleNamespace(is_encoder_decoder=False, **model)
    mine = WatermarkDetector(config, "cpu", settings, **options)(ids, return_dict=True)
    return vars(mine), theirs


def detected(scheme: str, width: int = 1, ratio: float = 0.25, key: int = 104_729) -> dict:
    """All settings, in the format of the reference's detector."""
    given = WatermarkingConfig(ratio, 2.0, key, scheme, width)
    return given.to_dict()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_counts_and_z_scores(scheme, begun, reference):
    rng = random.Random(6)
    for width, ratio in ((1, 0.25), (2, 0.5), (4, 0.3)):
        ids = texts(rng, 4, rng.randint(20, 60))
        ids[:, 0] = TEXT["bos_token_id"] if begun else 9
        mine, theirs = both(reference, detected(scheme, width, ratio, rng.choice(KEYS)), ids)
        for name in ("num_tokens_scored", "num_green_tokens", "green_fraction", "z_score", "prediction"):
            assert mine[name].tolist() == theirs[name], name
        assert mine["p_value"].dtype == mine["z_score"].dtype == np.float64


def test_marked_text_is_found_by_both(tiny, reference):
    model = tiny("llama")
    size = model.model.config.vocab_size
    settings = detected("lefthash", key=2**40 + 15) | {"bias": 6.0}
    prompts = ragged(model)
    arguments = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": True, "top_k": 0}
    call = Call(model, {**arguments, "watermarking_config": settings}, seed=1, full=False)
    ids = call.ours(prompts)["sequences"][:, call.width(prompts) :]
    mine, theirs = both(reference, settings, ids, {"vocab_size": size, "bos_token_id": None})
    assert mine["z_score"].tolist() == theirs["z_score"]
    assert mine["prediction"].all()
    other, _ = both(
        reference, settings | {"hashing_key": 12}, ids, {"vocab_size": size, "bos_token_id": None}
    )
    assert not other["prediction"].any()


# ------------------------------------------------------------------- where transformers 4.52.4 is wrong
def test_repeated_ngrams_are_ignored(reference):
    """They count tensors, no two of which are the same, so that every n-gram seems new."""
    rng = random.Random(7)
    ids = torch.tensor([[rng.randrange(2, 5) for _ in range(60)] for _ in range(3)])
    for scheme, width in product(SCHEMES, (1, 3)):
        settings = detected(scheme, width)
        mine, theirs = both(reference, settings, ids, ignore_repeated_ngrams=True)
        _, counted = both(reference, settings, ids)
        assert theirs["num_tokens_scored"] == counted["num_tokens_scored"]
        size = width + (scheme == "lefthash")
        for line, row in enumerate(ids.tolist()):
            ngrams = Counter(tuple(row[at : at + size]) for at in range(len(row) - size + 1))
            assert mine["num_tokens_scored"][line] == len(ngrams) < theirs["num_tokens_scored"][line]


def test_the_p_value_is_exact(reference):
    """They leave a square root out of an approximation: 5 times too sure at z = 5."""
    greens = GreenList(WatermarkingConfig(hashing_key=104_729), TEXT["vocab_size"])
    row, rng = [5], random.Random(8)
    while len(row) < 300:
        green = greens.green_mask(row[-1:])[0]
        row.append(rng.choice(green.nonzero()[:, 0].tolist() if rng.random() < 0.18 else range(2, 200)))
    mine, theirs = both(reference, detected("lefthash"), torch.tensor([row]))
    count, hits = int(mine["num_tokens_scored"][0]), int(mine["num_green_tokens"][0])
    assert mine["z_score"][0] == theirs["z_score"][0] > 4
    assert mine["p_value"][0] == pytest.approx(
        binomial_tail(count, hits, greens.num_green / greens.vocab_size)
    )
    assert theirs["p_value"][0] < 0.6 * mine["p_value"][0]


def test_the_token_that_begins_a_text_is_left_out_row_by_row(reference):
    """They use only the first row: the beginning of another row changes the score of a text."""
    ids = texts(random.Random(9), 2, 30)
    ids[0, 0] = TEXT["bos_token_id"]
    settings = detected("lefthash")
    alone = [both(reference, settings, ids[line : line + 1])[1]["num_green_tokens"][0] for line in range(2)]
    counts = [28, 29]
    for order in ([0, 1], [1, 0]):
        mine, theirs = both(reference, settings, ids[order])
        assert theirs["num_tokens_scored"] == [counts[order[0]]] * 2
        assert mine["num_tokens_scored"].tolist() == [counts[line] for line in order]
        assert mine["num_green_tokens"].tolist() == [alone[line] for line in order]


def test_after_token_zero_no_key_is_used(reference):
    """Their list after token 0 is the same for every key, so that chance there is no evidence."""
    arguments = {"vocab_size": 97, "device": "cpu"}
    cases = [
        Case({**arguments, "hashing_key": key}, torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 97))
        for key in KEYS
    ]
    theirs = process(reference, cases)
    assert all(torch.equal(one, theirs[0]) for one in theirs)
    scheme = GreenListScheme(WatermarkingConfig(hashing_key=KEYS[1]), 97)
    assert scheme.score_tokens(np.array([5, 0, 6, 7])).mask.tolist() == [False, True, False, True]


def test_selfhash_on_few_tokens(reference):
    """They ask about 40 tokens of a vocabulary that has less."""
    arguments = {"vocab_size": 39, "device": "cpu", "seeding_scheme": "selfhash", "hashing_key": 3}
    given = Case(arguments, torch.tensor([[4, 5]]), torch.arange(39.0)[None])
    with pytest.raises(ReferenceFailure, match="IndexError"):
        process(reference, [given])
    assert 0 < (ours(given) != given.scores).sum() < 39


def test_a_mark_does_not_read_padding(tiny, reference):
    """Their selfhash hashes the padding before a short prompt, so that batch mates change a row's mark."""
    model = tiny("llama")
    prompts = ragged(model)
    settings = {**MARKS["selfhash"], "context_width": 6}
    call = Call(model, {"max_new_tokens": 10, "watermarking_config": settings})
    together = call.theirs(reference, prompts)
    differs = 0
    for row in range(len(prompts.rows)):
        single = prompts.only(row)
        alone = compare.read(call, call.theirs(reference, single), single, 0)
        differs += compare.read(call, together, prompts, row).tokens != alone.tokens
    assert differs
    compare.by_row(reference, call, prompts)
