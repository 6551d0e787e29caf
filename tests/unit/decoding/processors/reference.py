"""Simple float64 versions of the processors, and their test cases."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context, RowParams, columns_from_rows
from descant.core.rows import Rows

INF = math.inf


# ------------------------------------------------------------------------------------- cases
def chance_scores(rng: random.Random, vocabulary: int) -> list[float]:
    """One line of float32 scores: with ties, with gaps, with one token left or none, or of any other sort."""
    kind = rng.random()
    if kind < 0.5:
        spread = rng.choice([0.3, 1.0, 3.0, 8.0])
        line = [rng.gauss(0, spread) for _ in range(vocabulary)]
    elif kind < 0.7:
        line = [float(rng.randint(-3, 3)) for _ in range(vocabulary)]
    else:
        line = [math.log(2.0 ** -rng.randint(0, 7)) for _ in range(vocabulary)]
    if rng.random() < 0.3:
        share = rng.random()
        line = [-INF if rng.random() < share else score for score in line]
    special = rng.random()
    if special < 0.03:
        line = [-INF] * vocabulary
    elif special < 0.06:
        alone = rng.randrange(vocabulary)
        line = [score if at == alone and score > -INF else -INF for at, score in enumerate(line)]
    elif special < 0.09:
        line = [1.5] * vocabulary
    return torch.tensor(line).tolist()


def context(
    rng: random.Random,
    tokens: Sequence[Sequence[int]],
    prompts: Sequence[int],
    params: Sequence[Mapping[str, Any]],
    **states: Sequence[float],
) -> Context:
    """The lines after `tokens`, of which `prompts` many are prompt, in a store padded with rubbish."""
    return Context(
        store(rng, tokens),
        torch.tensor([len(row) for row in tokens]),
        torch.tensor(prompts),
        columns_from_rows(params),
        states={name: torch.tensor(values, dtype=torch.float32) for name, values in states.items()},
    )


def drafted(
    rng: random.Random,
    tokens: Sequence[Sequence[int]],
    prompts: Sequence[int],
    params: Sequence[Mapping[str, Any]],
    drafts: Sequence[Sequence[int]],
) -> Context:
    """The lines of rows with drafts, as the loop makes them: one more a row than it has drafts."""
    zeros = torch.zeros(len(tokens), dtype=torch.long)
    rows = Rows(
        store(rng, tokens, room=len(drafts[0])),
        torch.tensor([len(row) for row in tokens]),
        zeros,
        zeros,
        torch.tensor(prompts),
        torch.arange(len(tokens)),
        zeros,
        {"params": RowParams(columns_from_rows(params))},
    )
    return Context.from_rows(rows, torch.tensor(drafts), {})


def store(rng: random.Random, tokens: Sequence[Sequence[int]], room: int = 0) -> Tensor:
    """Rows of tokens padded at the right with tokens that mean nothing [N, C]."""
    wide = max(len(row) for row in tokens) + room + rng.randint(0, 3)
    rubbish = [token for row in tokens for token in row] or [0]
    return torch.tensor(
        [[*row, *(rng.choice(rubbish) for _ in range(wide - len(row)))] for row in tokens], dtype=torch.long
    ).view(len(tokens), wide)


def spoil(rng: random.Random, scores: Tensor) -> tuple[Tensor, int]:
    """The scores with one line that has only NaN, and which it is."""
    at = rng.randrange(len(scores))
    return scores.index_fill(0, torch.tensor([at]), torch.nan), at


# ----------------------------------------------------------------------------------- numbers
def softmax(line: Sequence[float]) -> list[float]:
    """Probabilities in float64; zeros for a line without a possible token."""
    best = max(line)
    if best == -INF:
        return [0.0] * len(line)
    weights = [math.exp(score - best) for score in line]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def entropy(chances: Sequence[float]) -> float:
    """In nats."""
    return math.fsum(-chance * math.log(chance) for chance in chances if chance > 0)


# ----------------------------------------------------------------------------------- support
# Each takes a line and gives which tokens stay, and how narrowly: the least relative distance between
# two numbers whose order decided, where these are not exact in float32.
Support = tuple[list[bool], float]


def spared(line: Sequence[float], kept: Sequence[bool], least: int) -> list[bool]:
    """What is kept, and the `least` best with their ties."""
    worst = sorted(line, reverse=True)[min(least, len(line)) - 1]
    return [stays or score >= worst for stays, score in zip(kept, line, strict=True)]


def top_k(line: Sequence[float], k: int, least: int = 1) -> Support:
    return spared(line, [False] * len(line), max(k, least)), INF


def top_p(line: Sequence[float], p: float, least: int = 1) -> Support:
    chances = softmax(line)
    order = sorted(range(len(line)), key=lambda at: (line[at], at))
    kept, below, margin = [True] * len(line), 0.0, INF
    for place, at in enumerate(order):
        below += chances[at]
        if len(line) - place > least:
            kept[at] = below > 1 - p
            if line[at] > -INF:
                margin = min(margin, abs(below - (1 - p)))
    return kept, margin


def min_p(line: Sequence[float], p: float, least: int = 1) -> Support:
    """Of tokens that tie for the last place that is safe, the first are."""
    chances = softmax(line)
    kept, margin = _at_least(line, chances, p * max(chances), 1)
    for at in sorted(range(len(line)), key=lambda at: (-line[at], at))[:least]:
        kept[at] = True
    return kept, margin


def typical(line: Sequence[float], mass: float, least: int = 1) -> Support:
    chances = softmax(line)
    if not any(chances):
        return [True] * len(line), INF
    expected = entropy(chances)
    odd = [abs(-math.log(chance) - expected) if chance > 0 else INF for chance in chances]
    order = sorted(range(len(line)), key=lambda at: (odd[at], at))
    so_far, count, margin = 0.0, 0, INF
    for at in order:
        so_far += chances[at]
        margin = min(margin, abs(so_far - mass)) if chances[at] > 0 else margin
        count += so_far < mass
    last = odd[order[min(count, len(line) - 1)]]
    # Equal scores are equally odd, in float32 as here; the order of others may hang by a hair.
    for one, two in pairwise(order):
        if line[one] != line[two] and odd[two] < INF:
            margin = min(margin, odd[two] - odd[one])
    safe = set(order[:least])
    return [odd[at] <= last or at in safe for at in range(len(line))], margin


def epsilon(line: Sequence[float], limit: float, least: int = 1) -> Support:
    return _at_least(line, softmax(line), limit, least)


def eta(line: Sequence[float], limit: float, least: int = 1) -> Support:
    chances = softmax(line)
    return _at_least(line, chances, min(limit, math.sqrt(limit) * math.exp(-entropy(chances))), least)


def top_n_sigma(line: Sequence[float], n: float, least: int = 1) -> Support:
    finite = [score for score in line if math.isfinite(score)]
    if not finite:
        return [True] * len(line), INF
    limit = max(finite) - n * float(np.std(np.array(finite, dtype=np.float64)))
    margin = min(abs(score - limit) for score in finite)
    if min(finite) == max(finite):  # the deviation is 0, in float32 too
        margin = INF
    return spared(line, [score >= limit for score in line], least), margin


def top_h(line: Sequence[float], share: float, least: int = 1) -> Support:
    if share == 1:
        return [True] * len(line), INF
    chances = softmax(line)
    terms = [-chance * math.log(chance) if chance > 0 else 0.0 for chance in chances]
    limit, so_far, margin = share * math.fsum(terms), 0.0, INF
    kept = [False] * len(line)
    for place, at in enumerate(sorted(range(len(line)), key=lambda at: (-line[at], at))):
        so_far += terms[at]
        kept[at] = place < least or so_far <= limit
        if place >= least and line[at] > -INF:
            margin = min(margin, abs(so_far - limit))
    return kept, margin


def p_less(line: Sequence[float], least: int = 1) -> Support:
    chances = softmax(line)
    if len({score for score in line if score > -INF}) == 1:  # all alike: as likely as a coincidence
        return [True] * len(line), INF
    return _at_least(line, chances, math.fsum(chance**2 for chance in chances), least)


def xtc(line: Sequence[float], threshold: float, least: int = 1) -> Support:
    """When it happens."""
    chances = softmax(line)
    top = [chance >= threshold and score > -INF for chance, score in zip(chances, line, strict=True)]
    margin = min((abs(chance - threshold) for chance in chances if chance > 0 < threshold), default=INF)
    lowest = min((score for score, is_top in zip(line, top, strict=True) if is_top), default=-INF)
    kept = [not is_top or score == lowest for score, is_top in zip(line, top, strict=True)]
    if sum(stays and score > -INF for stays, score in zip(kept, line, strict=True)) < least:
        kept = [True] * len(line)
    return kept, margin


def mirostat(line: Sequence[float], mu: float, least: int = 1) -> Support:
    chances = softmax(line)
    if not any(chances):
        return [True] * len(line), INF
    surprise = [-math.log2(chance) if chance > 0 else INF for chance in chances]
    margin = min(abs(one - mu) for one in surprise)
    return spared(line, [one <= mu for one in surprise], least), margin


def _at_least(line: Sequence[float], chances: Sequence[float], limit: float, least: int) -> Support:
    if limit == 0.0:
        return [True] * len(line), INF
    margin = min((abs(chance - limit) / limit for chance in chances if chance > 0), default=INF)
    return spared(line, [chance >= limit for chance in chances], least), margin


def law(line: Sequence[float], kept: Sequence[bool]) -> list[float]:
    """The probabilities of what is kept."""
    return softmax([score if stays else -INF for score, stays in zip(line, kept, strict=True)])
