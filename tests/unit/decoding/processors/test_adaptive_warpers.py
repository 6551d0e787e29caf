"""Mirostat and adaptive-p against loops in float64, over many steps, forks included."""

from __future__ import annotations

import math
import random

import pytest
import torch

from descant.core.context import Context
from descant.decoding.processors.truncation import AdaptivePLogitsWarper, MirostatLogitsWarper
from tests.unit.decoding.processors import reference
from tests.unit.decoding.processors.reference import chance_scores, context, drafted, softmax, spoil

IDS = torch.zeros(1, 1, dtype=torch.long)


# -------------------------------------------------------------------------- the slow versions
class Mirostat:
    """One row's mirostat."""

    def __init__(self, mirostat_tau, mirostat_eta, min_tokens_to_keep=1):
        self.tau, self.eta, self.least = mirostat_tau, mirostat_eta, min_tokens_to_keep
        self.mu = 2 * mirostat_tau

    def process(self, line):
        kept, margin = reference.mirostat(line, self.mu, self.least)
        return [score if stays else -math.inf for score, stays in zip(line, kept, strict=True)], margin

    def advance(self, line, token):
        chance = softmax(line)[token]
        if chance > 0:
            self.mu -= self.eta * (-math.log2(chance) - self.tau)

    @property
    def state(self):
        return {"mirostat_mu": self.mu}


class AdaptiveP:
    """One row's adaptive-p."""

    def __init__(self, adaptive_p_target, adaptive_p_decay):
        self.target, self.decay = adaptive_p_target, adaptive_p_decay
        self.total, self.weight = adaptive_p_target / (1 - adaptive_p_decay), 1 / (1 - adaptive_p_decay)

    def process(self, line):
        target = min(1.0, max(0.0, 2 * self.target - self.total / self.weight))
        answer = []
        for score, chance in zip(line, softmax(line), strict=True):
            distance = abs(chance - target) / 0.3
            near = 5.0 - 10.0 * distance**2 / (1 + distance)
            answer.append(near if score > -math.inf else score)
        return answer, math.inf

    def advance(self, line, token):
        chance = softmax(line)[token]
        if chance > 0:
            self.total, self.weight = chance + self.decay * self.total, 1 + self.decay * self.weight

    @property
    def state(self):
        return {"adaptive_p_sum": self.total, "adaptive_p_weight": self.weight}


def mirostat_params(rng):
    return {
        "mirostat_tau": rng.uniform(0.1, 5),
        "mirostat_eta": rng.choice([0.1, 0.0, rng.random()]),
        "min_tokens_to_keep": rng.choice([1, 1, 3]),
    }


def adaptive_params(rng):
    return {
        "adaptive_p_target": rng.choice([0.0, 1.0, rng.random()]),
        "adaptive_p_decay": rng.choice([0.9, 0.0, rng.uniform(0, 0.99)]),
    }


KINDS = {
    "mirostat": (MirostatLogitsWarper, Mirostat, mirostat_params),
    "adaptive_p": (AdaptivePLogitsWarper, AdaptiveP, adaptive_params),
}


def chance_line(rng, vocabulary):
    """Scores whose probabilities float32 still tells from 0, so that both agree on what was possible."""
    line = chance_scores(rng, vocabulary)
    best = max(line)
    return [score if score > best - 60 else -math.inf for score in line] if best > -math.inf else line


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_followed_through_steps_and_forks(name):
    """Twelve steps of many rows: any token may be chosen, also one ruled out; then rows fork, move and go."""
    rng, steps, close = random.Random(name), 0, 0
    kind, slow, chance_params = KINDS[name]
    for _ in range(60):
        vocabulary, count = rng.choice([1, 2, 5, 20, 64]), rng.randint(1, 8)
        params = [chance_params(rng) for _ in range(count)]
        rows = [slow(**own) for own in params]
        states = {key: torch.full((count,), start) for key, start in kind.state.items()}
        for _ in range(12):
            lines = [chance_line(rng, vocabulary) for _ in rows]
            here = context(rng, [[0]] * len(rows), [0] * len(rows), params).with_states(states)
            before, nan = spoil(rng, torch.tensor(lines))
            after = kind.make_unbound().process(here, before)
            tokens = [rng.randrange(vocabulary) for _ in rows]
            states = kind.make_unbound().advance(here, before, after, torch.tensor(tokens))
            for at, row in enumerate(rows):
                if at != nan:
                    wanted, margin = row.process(lines[at])
                    steps, close = steps + 1, close + (margin < 1e-4)
                    if margin >= 1e-4:
                        torch.testing.assert_close(after[at], torch.tensor(wanted), rtol=1e-4, atol=1e-4)
                    row.advance(lines[at], tokens[at])
                for key, value in row.state.items():
                    torch.testing.assert_close(states[key][at].item(), value, rtol=1e-4, atol=1e-4)
            parents = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 8))]
            states = {key: value[parents] for key, value in states.items()}
            params = [params[at] for at in parents]
            rows = [_copy(rows[at]) for at in parents]
    assert steps > 2000
    assert close < 0.05 * steps


def _copy(row):
    new = object.__new__(type(row))
    vars(new).update(vars(row))
    return new


@pytest.mark.parametrize("name", KINDS)
def test_lines_of_drafts_begin_with_the_state_of_their_row(name):
    rng = random.Random(f"{name} drafts")
    kind, slow, chance_params = KINDS[name]
    params = [chance_params(rng) for _ in range(6)]
    lines = [chance_line(rng, 9) for _ in range(18)]
    here = drafted(rng, [[1]] * 6, [1] * 6, params, [[2, 3]] * 6)
    found = kind.make_unbound().process(here, torch.tensor(lines))
    for at, line in enumerate(lines):
        wanted, margin = slow(**params[at // 3]).process(line)
        assert margin > 1e-5
        torch.testing.assert_close(found[at], torch.tensor(wanted), rtol=1e-4, atol=1e-4)


def test_by_hand_every_call_starts_afresh():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()  # surprises of 1, 1.7, 2.7, 4.3 bits
    mirostat = MirostatLogitsWarper(1.0)
    for _ in range(2):
        assert mirostat(IDS, scores).isfinite().tolist() == [[True, True, False, False]]
    assert MirostatLogitsWarper(0.1)(IDS, scores).isfinite().tolist() == [[True, False, False, False]]
    kept = MirostatLogitsWarper(0.1, min_tokens_to_keep=3)(IDS, scores).isfinite()
    assert kept.tolist() == [[True, True, True, False]]
    found = AdaptivePLogitsWarper(0.3)(IDS, scores)
    assert found[0].argmax() == 1
    assert found[0, 1] == pytest.approx(5.0)


def test_an_impossible_token_leaves_the_state_unchanged():
    before = torch.tensor([[0.0, -math.inf]])
    chosen = torch.tensor([1])
    here = Context.standalone(IDS, vars(MirostatLogitsWarper(2.0)))
    assert MirostatLogitsWarper.make_unbound().advance(here, before, before, chosen)[
        "mirostat_mu"
    ].tolist() == [4.0]
    here = Context.standalone(IDS, vars(AdaptivePLogitsWarper(0.5, 0.5)))
    state = AdaptivePLogitsWarper.make_unbound().advance(here, before, before, chosen)
    assert [value.tolist() for value in state.values()] == [[1.0], [2.0]]
