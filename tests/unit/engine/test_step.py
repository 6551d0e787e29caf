"""The loop itself: row order, drafts, columns and several strategies."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from descant import GenerationConfig
from descant.core.context import RowParams, columns_from_rows
from descant.core.records import Proposal, Selection
from descant.core.rows import Rows, stable_row_order
from descant.engine.planning.planner import as_model
from descant.engine.step.step import StepHooks, run_step
from descant.engine.step.strategy_group import StrategyGroup
from descant.kv_cache.stores.dense import DenseStore
from descant.testing import ReferenceCache, outcomes
from tests.contracts.subjects import requests
from tests.support.markov_model import Chain


# ------------------------------------------------------------------- settle
@st.composite
def families(draw):
    """How many rows there were, and the parents of the new ones."""
    rows = draw(st.integers(1, 12))
    return rows, draw(st.lists(st.integers(0, rows - 1), max_size=16))


@given(families())
def test_settling_only_permutes_and_keeps_first_children_in_place(family):
    rows, parents = family
    order = stable_row_order(torch.tensor(parents, dtype=torch.long), rows)
    if order is None:
        assert parents == list(range(rows))
        return
    order = order.tolist()
    assert sorted(order) == list(range(len(parents)))
    placed = [parents[at] for at in order]
    for parent in set(parents):
        if parent < len(parents):
            # A surviving row whose place still exists stays there, and it is its first child that does.
            assert placed[parent] == parent
            assert order[parent] == parents.index(parent)


@given(families())
def test_settling_moves_no_more_rows_than_it_must(family):
    rows, parents = family
    order = stable_row_order(torch.tensor(parents, dtype=torch.long), rows)
    placed = parents if order is None else [parents[at] for at in order.tolist()]
    moved = sum(place != parent for place, parent in enumerate(placed))
    assert moved == len(parents) - len({parent for parent in parents if parent < len(parents)})


def test_settled_rows_need_no_order():
    assert stable_row_order(torch.arange(5), 5) is None
    assert stable_row_order(torch.tensor([1, 0]), 2).tolist() == [1, 0]
    assert stable_row_order(torch.tensor([3, 0, 0]), 4).tolist() == [1, 0, 2]


# ------------------------------------------------------------------- a table by hand
def table_of(prompts, columns=None, **params):
    length = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(length.max()), dtype=torch.long)
    for line, prompt in enumerate(prompts):
        tokens[line, : len(prompt)] = torch.tensor(prompt)
    zeros, numbers = torch.zeros_like(length), torch.arange(len(prompts))
    values = columns_from_rows([{"pad_token_id": 0, **params} for _ in prompts])
    columns = {"params": RowParams(values), **(columns or {})}
    return Rows(tokens, length, zeros, zeros.clone(), length.clone(), numbers, zeros.clone(), columns)


def token_lists(rows):
    return [line[:count].tolist() for line, count in zip(rows.tokens, rows.length.tolist(), strict=True)]


class Guessing:
    """Greedy search with random drafts: some right, some wrong, a random number per row."""

    needs_log_probs = False
    has_groups = False
    columns = MappingProxyType({})

    def __init__(self, truth, vocabulary, seed):
        self.truth = truth  # request -> its greedy continuation
        self.vocabulary = vocabulary
        self.rng = np.random.default_rng(seed)
        self.kept = self.tried = 0

    def propose(self, rows, aid):
        n = torch.from_numpy(self.rng.integers(0, 5, len(rows)))
        drafts = torch.from_numpy(self.rng.integers(0, self.vocabulary, (len(rows), max(1, int(n.max())))))
        for row in range(len(rows)):
            done = int(rows.length[row] - rows.prompt_length[row])
            right = int(self.rng.integers(0, drafts.shape[1] + 1))
            for at, token in enumerate(self.truth[int(rows.request[row])][done : done + right]):
                drafts[row, at] = token
        return Proposal(None, drafts, n)

    def select(self, rows, proposal, output):
        best = output.logits.argmax(-1)  # [R, K + 1]
        places = torch.arange(proposal.width)
        hits = (best[:, :-1] == proposal.drafts) & (places < proposal.num_drafts[:, None])
        accepted = hits.long().cumprod(1).sum(1)
        self.kept += int(accepted.sum())
        self.tried += int(proposal.num_drafts.sum())
        return Selection(best.gather(1, accepted[:, None])[:, 0], accepted=accepted)


@pytest.mark.parametrize("make_cache", [DenseStore, ReferenceCache])
@pytest.mark.parametrize("name", ["llama", "mistral", "opt", "t5"])
def test_drafts_by_chance_leave_greedy_search_as_it_was(tiny, name, make_cache):
    one = tiny(name)
    asked = requests(one, [GenerationConfig(max_new_tokens=24, eos_token_id=None)] * 3, (5, 1, 8), seed=4)
    truth = [found.tokens[0] for found in outcomes(one.model, asked)]
    model, cache = as_model(one.model), make_cache()
    inputs = {"input_ids": [each.inputs["input_ids"] for each in asked]} if one.encoder_decoder else {}
    model.add_requests([0, 1, 2], inputs)
    rows = table_of([list(each.prompt) for each in asked])
    cache.extend(3)
    strategy = Guessing(truth, one.vocab, seed=5)
    lane = StrategyGroup(strategy, None, [])
    while int((rows.length - rows.prompt_length).min()) < 20:
        rows, _ = run_step(model, cache, rows, lambda _: [lane])
    for line, expected, each in zip(token_lists(rows), truth, asked, strict=True):
        new = line[len(each.prompt) :]
        assert new[:24] == expected[: len(new)]
    assert 0 < strategy.kept < strategy.tried


# ------------------------------------------------------------------- several strategies
class Steady:
    """Takes one fixed token for every row and writes down how often it did."""

    needs_log_probs = False
    has_groups = False

    def __init__(self, token, column=None, forks=1):
        self.token, self.name, self.forks = token, column, forks
        self.columns = {} if column is None else {column: torch.zeros(1)}
        self.seen = []

    def propose(self, rows, aid):
        return Proposal()

    def select(self, rows, proposal, output):
        self.seen.append((len(rows), output.logits.clone()))
        parents = torch.arange(len(rows)).repeat_interleave(self.forks)
        columns = {} if self.name is None else {self.name: rows.column(self.name)[parents] + 1}
        return Selection(
            torch.full((len(parents),), self.token),
            parents if self.forks > 1 else None,
            slot=torch.arange(len(parents)) if self.forks > 1 else None,
            columns=columns,
        )


def test_lanes_share_the_forward_and_keep_their_columns():
    model = Chain.chance(9, 0)
    rows = table_of([[1], [2, 3], [4], [5]], {"count": torch.zeros(4)})
    one, two = Steady(6, "count"), Steady(7)
    lanes = [StrategyGroup(one, torch.tensor([0, 2]), []), StrategyGroup(two, torch.tensor([1, 3]), [])]
    cache = ReferenceCache()
    cache.extend(4)
    rows, selections = run_step(model, cache, rows, lambda _: lanes)
    assert model.fed == [4]
    assert token_lists(rows) == [[1, 6], [2, 3, 7], [4, 6], [5, 7]]
    assert rows.column("count").tolist() == [1, 0, 1, 0]
    assert rows.cached_length.tolist() == [1, 2, 1, 1]
    assert len(selections) == 2
    assert torch.equal(one.seen[0][1][:, 0], model.after(torch.tensor([1, 1]), torch.tensor([1, 4])))
    assert torch.equal(two.seen[0][1][:, 0], model.after(torch.tensor([2, 1]), torch.tensor([3, 5])))


def test_a_lane_that_forks_leaves_the_other_in_place():
    model = Chain.chance(9, 0)
    rows = table_of([[1], [2, 3], [4]])
    lanes = [
        StrategyGroup(Steady(6, forks=3), torch.tensor([1]), []),
        StrategyGroup(Steady(7), torch.tensor([0, 2]), []),
    ]
    cache = ReferenceCache()
    cache.extend(3)
    rows, _ = run_step(model, cache, rows, lambda _: lanes)
    assert token_lists(rows)[:3] == [[1, 7], [2, 3, 6], [4, 7]]
    assert sorted(token_lists(rows)[3:]) == [[2, 3, 6], [2, 3, 6]]
    assert rows.request.tolist() == [0, 1, 2, 1, 1]
    assert len(cache) == 5


class Doubling:
    def process(self, context, scores):
        return scores * 2


class Counting:
    """Adds to every score how many tokens its line follows."""

    def process(self, context, scores):
        return scores + context.length


def test_processors_reach_the_rows_that_use_them_and_their_drafts():
    rows = table_of([[1], [2, 3], [4]])
    logits = torch.randn(3, 3, 5)
    proposal = Proposal(None, torch.tensor([[1, 2], [3, 4], [0, 1]]), torch.tensor([2, 1, 0]))
    strategy = SimpleNamespace(needs_log_probs=False, has_groups=False)
    lane = StrategyGroup(strategy, None, [(Counting(), None), (Doubling(), torch.tensor([0, 2]))])
    scores = lane.process(rows, proposal, logits)
    length = torch.tensor([[1, 2, 3], [2, 3, 4], [1, 2, 3]])[..., None]
    expected = logits + length
    expected[[0, 2]] *= 2
    assert torch.allclose(scores, expected)
    normalised = StrategyGroup(SimpleNamespace(needs_log_probs=True, has_groups=False), None, []).process(
        rows, proposal, logits
    )
    assert torch.allclose(normalised.exp().sum(-1), torch.ones(3, 3))


class Silent:
    """Chooses nothing at its first step, as a method with a first pass does."""

    needs_log_probs = False
    has_groups = False
    columns = MappingProxyType({})

    def propose(self, rows, aid):
        return Proposal()

    def select(self, rows, proposal, output):
        fresh = bool((rows.cached_length == 0).all())
        return Selection(torch.full((len(rows),), 3), emit_mode=not fresh)


def test_a_step_may_choose_nothing_yet():
    model, cache = Chain.chance(5, 0), ReferenceCache()
    rows = table_of([[1], [2, 4]])
    cache.extend(2)
    lane = StrategyGroup(Silent(), None, [])
    rows, _ = run_step(model, cache, rows, lambda _: [lane])
    assert token_lists(rows) == [[1], [2, 4]]
    assert rows.pending.tolist() == [0, 0]
    rows, _ = run_step(model, cache, rows, lambda _: [lane])
    assert token_lists(rows) == [[1, 3], [2, 4, 3]]


class Forking:
    """Proposes every row twice, with a draft each, and keeps the copy whose draft is even."""

    needs_log_probs = False
    has_groups = False
    columns = MappingProxyType({})

    def propose(self, rows, aid):
        parents = torch.arange(len(rows)).repeat_interleave(2)
        return Proposal(parents, torch.tensor([[1], [2]]).repeat(len(rows), 1), None)

    def select(self, rows, proposal, output):
        keep = (proposal.drafts[:, 0] % 2 == 0).nonzero().squeeze(1)
        return Selection(torch.full((len(keep),), 4), keep, torch.ones_like(keep))


def test_a_proposal_may_fork_rows_and_a_selection_drop_them():
    model, cache = Chain.chance(5, 0), ReferenceCache()
    rows = table_of([[1], [3, 3]])
    cache.extend(2)
    lane = StrategyGroup(Forking(), None, [])
    rows, _ = run_step(model, cache, rows, lambda _: [lane])
    assert model.fed == [4]
    assert dict(zip(rows.request.tolist(), token_lists(rows), strict=True)) == {0: [1, 2, 4], 1: [3, 3, 2, 4]}
    assert sorted(rows.cached_length.tolist()) == [2, 3]
    assert len(cache) == 2


def test_what_a_step_sees_can_be_observed():
    model, cache = Chain.chance(5, 0), ReferenceCache()
    rows = table_of([[1], [3, 3]])
    cache.extend(2)
    seen = []
    lane = StrategyGroup(Steady(2), None, [(Doubling(), None)])
    run_step(model, cache, rows, lambda _: [lane], StepHooks(seen.append))
    assert torch.equal(seen[0].logits[:, 0], model.after(torch.tensor([1, 2]), torch.tensor([1, 3])))
    assert torch.equal(seen[0].scores, seen[0].logits * 2)
