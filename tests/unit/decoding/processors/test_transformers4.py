"""Every documented processor by hand, on random calls, against transformers 4.52.4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import descant as processors
from tests.reference.process.client import ReferenceClient
from tests.unit.decoding.processors.cases import DOCUMENTED, Case, case
from tests.unit.decoding.processors.prefixes import allowed_after

CASES = 600
TOLERANCE = 1e-6
# Of tokens with equal scores these keep some, and the reference, whose sort is not stable, any.
KEEPS_SOME = {"TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"}


def ours(name: str, given: Case) -> Tensor:
    return _make_processor(name, dict(given.arguments))(given.input_ids, given.scores)


def _make_processor(name: str, arguments: dict[str, Any]) -> Any:
    if name == "LogitsProcessorList":
        return processors.LogitsProcessorList(_make_processor(*one) for one in arguments["members"])
    if "generate_config" in arguments:
        fields = {"forced_decoder_ids": None, "bos_token_id": None, **arguments["generate_config"]}
        arguments["generate_config"] = type("Config", (), fields)
    if "prefix_allowed_tokens_fn" in arguments:
        arguments["prefix_allowed_tokens_fn"] = allowed_after(*arguments["prefix_allowed_tokens_fn"])
    return getattr(processors, name)(**arguments)


def in_order(answer: Tensor, scores: Tensor) -> Tensor:
    """The answers by the scores they come from, and among equal scores by size."""
    by_answer = answer.argsort(dim=1, stable=True)
    return answer.gather(1, by_answer.gather(1, scores.gather(1, by_answer).argsort(dim=1, stable=True)))


def differ(name: str, given: Case, mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return True
    if name in KEEPS_SOME:
        mine, theirs = in_order(mine, given.scores), in_order(theirs, given.scores)
    return not torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_same_scores(name: str, reference: ReferenceClient) -> None:
    cases = [case(name, seed) for seed in range(CASES)]
    asked = [(dict(one.arguments), one.input_ids, one.scores) for one in cases]
    answers = reference.ask("process", name=name, cases=asked)
    wrong, still = [], 0
    for seed, (given, theirs) in enumerate(zip(cases, answers, strict=True)):
        before = given.input_ids.clone(), given.scores.clone()
        mine = ours(name, given)
        assert torch.equal(before[0], given.input_ids)
        assert torch.equal(before[1].nan_to_num(7.0), given.scores.nan_to_num(7.0)), "changed in place"
        if differ(name, given, mine, theirs):
            wrong.append(seed)
        still += theirs.shape == given.scores.shape and torch.equal(theirs, given.scores)
    assert not wrong, (
        f"{len(wrong)} cases, such as {wrong[0]}: {_describe(name, wrong[0], answers[wrong[0]])}"
    )
    assert still < 0.7 * CASES, "most cases leave the scores as they are and show nothing"


def _describe(name: str, seed: int, theirs: Tensor) -> str:
    given = case(name, seed)
    return f"{given}\nours:   {ours(name, given)}\ntheirs: {theirs}"


@pytest.mark.parametrize("size", [4_099, 20_000])
@pytest.mark.parametrize("name", ["TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"])
def test_the_same_scores_of_many_tokens(name: str, size: int, reference: ReferenceClient) -> None:
    """Vocabularies for which the filters have shorter ways."""
    chance = torch.Generator().manual_seed(size)
    given = []
    for seed in range(12):
        scores = torch.randn(3, size, generator=chance) * 4
        if seed % 2:  # as after a top-k, one line with fewer left
            scores = scores.masked_fill(scores < scores.topk(40 + seed).values[:, -1:], -torch.inf)
            scores[1, scores[1].topk(size // 2).indices[3:]] = -torch.inf
        options = {
            "TopKLogitsWarper": {"top_k": 1 + 5 * seed},
            "TopPLogitsWarper": {"top_p": 0.08 * (seed + 1)},
            "MinPLogitsWarper": {"min_p": 0.05 * seed},
        }[name]
        arguments = {**options, "min_tokens_to_keep": 1 + seed % 3}
        given.append(Case(arguments, torch.zeros(3, 1, dtype=torch.long), scores))
    asked = [(dict(one.arguments), one.input_ids, one.scores) for one in given]
    for one, theirs in zip(given, reference.ask("process", name=name, cases=asked), strict=True):
        assert torch.equal(ours(name, one), theirs), one.arguments
