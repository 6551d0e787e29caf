"""Beam search against exhaustive search and a simple beam search, on a chain with known distribution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import descant
from descant import GenerationConfig, Request, RowError
from descant.testing import outcomes, toy
from tests.support.markov_model import Chain


def config(**given):
    return GenerationConfig(**{"max_new_tokens": 3, **given})


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_wide_enough_beams_search_exhaustively(seed, penalty):
    model = Chain.chance(4, seed)
    ends = [3]
    every = sorted(
        ((total / len(path) ** penalty, path) for path, total in model.paths(0, 3, ends)), reverse=True
    )
    asked = config(
        num_beams=60,
        num_return_sequences=8,
        length_penalty=penalty,
        eos_token_id=ends,
        early_stopping="never",
    )
    found = outcomes(model, [Request([0], asked)])[0]
    assert [tuple(path) for path in found.tokens] == [path for _, path in every[:8]]
    for one, (score, _) in zip(found.hypotheses, every, strict=False):
        assert one.score == pytest.approx(score, abs=1e-4)


@dataclass
class ByHand:
    """Textbook beam search: beams, a pool of finished hypotheses, and the stopping rule."""

    model: Chain
    width: int
    limit: int
    end: int
    penalty: float = 1.0
    early: bool | str = False
    pool: list[tuple[float, list[int]]] = field(default_factory=list)

    def search(self, start: int) -> list[list[int]]:
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for length in range(1, self.limit + 1):
            options = [
                (score + share, [*path, token])
                for score, path in beams
                for token, share in enumerate(self._shares(length, [start, *path][-1]))
            ]
            options.sort(key=lambda one: -one[0])
            options = options[: 2 * self.width]
            closed = self.early is True and len(self.pool) == self.width
            for score, path in options[: self.width]:
                if (path[-1] == self.end or length == self.limit) and not closed:
                    self.pool.append((score / length**self.penalty, path))
                    self.pool = sorted(self.pool, key=lambda one: -one[0])[: self.width]
            beams = [one for one in options if one[1][-1] != self.end][: self.width]
            if len(self.pool) == self.width and (
                self.early is True or not self._hopeful(beams[0][0], length)
            ):
                break
        return [path for _, path in self.pool]

    def _shares(self, length: int, last: int) -> list[float]:
        return self.model.after(length, last).log_softmax(-1).tolist()

    def _hopeful(self, best: float, length: int) -> bool:
        reach = self.limit if self.early == "never" and self.penalty > 0 else length
        return best / reach**self.penalty > self.pool[-1][0]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(2, 5),
    limit=st.integers(1, 7),
    penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    early=st.sampled_from([True, False, "never"]),
    starts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_beams_are_those_of_the_search_by_hand(seed, width, limit, penalty, early, starts):
    model = Chain.chance(9, seed, spread=1.5)
    asked = config(
        num_beams=width, num_return_sequences=width, max_new_tokens=limit, length_penalty=penalty,
        early_stopping=early, eos_token_id=8,
    )  # fmt: skip
    found = outcomes(model, [Request([start], asked) for start in starts])
    for start, one in zip(starts, found, strict=True):
        expected = ByHand(model, width, limit, 8, penalty, early).search(start)
        assert one.tokens == expected


def test_each_rule_of_stopping_is_its_own():
    """Ends are likely here, so that pools fill early and the rule decides; at some place all three differ."""
    results: dict[bool | str, list[list[list[int]]]] = {True: [], False: [], "never": []}
    for seed in range(12):
        model = Chain.chance(9, seed, spread=1.2)
        model.logits[:, :, 8] += 1.5
        for early, found in results.items():
            asked = config(
                num_beams=3, num_return_sequences=3, max_new_tokens=9, length_penalty=2.0,
                early_stopping=early, eos_token_id=8,
            )  # fmt: skip
            ours = [one.tokens for one in outcomes(model, [Request([start], asked) for start in range(8)])]
            assert ours == [ByHand(model, 3, 9, 8, 2.0, early).search(start) for start in range(8)]
            found += ours
    assert results[True] != results[False]
    assert results[False] != results["never"]


def test_beams_prefill_as_one_row_and_fork_after_it():
    model = Chain.chance(9, 0)
    outcomes(model, [Request([1, 2, 3], config(num_beams=4, max_new_tokens=4))])
    assert model.fed == [1, 4, 4, 4]


def test_a_request_ends_by_its_own_pool():
    """A request with a full pool does not end another one."""
    model = Chain.chance(9, 2)
    quick = Request(
        [0], config(num_beams=2, max_new_tokens=12, early_stopping=True, eos_token_id=list(range(1, 9)))
    )
    slow = Request([0], config(num_beams=2, max_new_tokens=12, early_stopping=True, eos_token_id=None))
    found = outcomes(model, [quick, slow])
    assert len(found[0].tokens[0]) < 3
    assert len(found[1].tokens[0]) == 12


def test_more_beams_than_tokens():
    model = Chain.chance(3, 0)
    found = outcomes(model, [Request([0], config(num_beams=20, num_return_sequences=20))])[0]
    every = sorted(model.paths(0, 3), key=lambda one: -one[1])
    assert [tuple(path) for path in found.tokens] == [path for path, _ in every[:20]]


def _banned(ids, scores):
    return scores.masked_fill(torch.arange(scores.shape[1]) != 1, -torch.inf)


@pytest.mark.parametrize("method", [{}, {"do_sample": True, "seed": 1}], ids=["search", "sampling"])
def test_what_is_impossible_is_never_returned(method):
    """One sequence is possible: it alone comes back, or, where more are requested, an error."""
    model = Chain.chance(5, 0)
    one = Request([0], config(num_beams=3, **method), logits_processor=[_banned])
    assert outcomes(model, [one])[0].tokens == [[1, 1, 1]]
    more = Request([0], config(num_beams=3, num_return_sequences=3, **method), logits_processor=[_banned])
    found = outcomes(model, [more])[0]
    assert isinstance(found.error, RowError) or found.tokens == [[1, 1, 1]]


@pytest.mark.parametrize("penalty", [-50.0, 50.0])
def test_extreme_penalties_leave_an_order(penalty):
    model = Chain.chance(9, 3)
    asked = config(
        num_beams=3, num_return_sequences=3, length_penalty=penalty, max_new_tokens=12, eos_token_id=8
    )
    found = outcomes(model, [Request([0], asked)] * 2)
    assert all(len(one.hypotheses) == 3 for one in found)
    assert found[0].tokens == found[1].tokens


def test_beam_sampling_draws_different_beams():
    model = Chain(torch.zeros(30, 30))
    tries = [Request([0], config(num_beams=3, do_sample=True, seed=at, top_k=0)) for at in range(20)]
    assert len({str(one.tokens) for one in outcomes(model, tries)}) > 15


def test_beam_sampling_without_heat_is_beam_search():
    model = Chain.chance(9, 4)
    cold = Request([0], config(num_beams=3, do_sample=True, seed=1, temperature=1e-4, num_return_sequences=1))
    plain = Request([0], config(num_beams=3))
    assert outcomes(model, [cold])[0].tokens[0][:1] == outcomes(model, [plain])[0].tokens[0][:1]


@pytest.mark.parametrize(
    "options", [{}, {"num_beam_groups": 3, "diversity_penalty": 0.5}, {"force_words_ids": [[51]]}]
)
def test_stops_of_several_kinds_end_beams_in_one_step(options: dict[str, Any]) -> None:
    """Stop tokens and criteria give the same reason in one step: neither hides the other."""
    stops = {9, 51}
    output = descant.generate(
        toy(),
        torch.tensor([[5, 9, 14]]),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=10,
        stop_token_ids=[9],
        stopping_criteria=[lambda ids, _: ids[:, -1] == 51],
        pad_token_id=0,
        **options,
    )
    assert any(stops & set(row.tolist()) for row in output[:, 3:])
    for row in output[:, 3:].tolist():
        ends = [index for index, token in enumerate(row) if token in stops]
        assert not ends or not any(row[ends[0] + 1 :])
