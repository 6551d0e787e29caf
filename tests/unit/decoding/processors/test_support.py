"""Every truncation sampler keeps exactly the tokens that its definition in float64 keeps."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from descant.core.context import Context
from descant.decoding.processors.filters import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from descant.decoding.processors.truncation import (
    MirostatLogitsWarper,
    PLessLogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    XTCLogitsWarper,
)
from tests.unit.decoding.processors import reference
from tests.unit.decoding.processors.reference import chance_scores

CASES, LINES = 3_000, 100
SAMPLERS = {
    "top_k": (TopKLogitsWarper, lambda rng: rng.randint(1, 40), reference.top_k),
    "top_p": (TopPLogitsWarper, lambda rng: rng.uniform(0.02, 0.999), reference.top_p),
    "min_p": (MinPLogitsWarper, lambda rng: rng.uniform(0.001, 1), reference.min_p),
    "typical_p": (TypicalLogitsWarper, lambda rng: rng.uniform(0.02, 0.999), reference.typical),
    "epsilon": (EpsilonLogitsWarper, lambda rng: 10 ** rng.uniform(-4, -0.3), reference.epsilon),
    "eta": (EtaLogitsWarper, lambda rng: 10 ** rng.uniform(-4, -0.01), reference.eta),
    "top_n_sigma": (TopNSigmaLogitsWarper, lambda rng: rng.uniform(0.05, 4), reference.top_n_sigma),
    "top_h": (TopHLogitsWarper, lambda rng: rng.uniform(0.02, 0.999), reference.top_h),
    "p_less": (lambda value, **more: PLessLogitsWarper(**more), lambda rng: 0.0, lambda line, value, least: reference.p_less(line, least)),  # noqa: E501
    "xtc": (lambda value, **more: XTCLogitsWarper(1.0, value, **more), lambda rng: rng.choice([0.0, rng.uniform(0.005, 0.6)]), reference.xtc),  # noqa: E501
    "mirostat": (lambda value, **more: MirostatLogitsWarper(1.0, **more), lambda rng: rng.uniform(-1, 8), reference.mirostat),  # noqa: E501
}  # fmt: skip


def support(name, value, least, scores):
    """Which tokens stay possible [N, V]."""
    warper = SAMPLERS[name][0](value, min_tokens_to_keep=least)
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    here = Context.standalone(ids, vars(warper))
    if name == "mirostat":
        here = here.with_states({"mirostat_mu": torch.full((len(scores),), value)})
    found = warper.process(here, scores)
    kept = found > -torch.inf
    assert torch.equal(found[kept], scores[kept])
    return kept


def compare(name, rng, vocabulary, count):
    """So many lines against the definition: how many were too close to call, were cut, were impossible."""
    least = rng.choice([1, 1, 1, 2, 7])
    value = torch.tensor(SAMPLERS[name][1](rng)).item()  # a float32, as the device compares with
    lines = [chance_scores(rng, vocabulary) for _ in range(count)]
    close = cut = masked = 0
    for line, found in zip(lines, support(name, value, least, torch.tensor(lines)).tolist(), strict=True):
        wanted, margin = SAMPLERS[name][2](line, value, least)
        wanted = [stays and score > -math.inf for stays, score in zip(wanted, line, strict=True)]
        close += margin < 1e-5
        cut += sum(wanted) < sum(score > -math.inf for score in line)
        masked += not any(wanted)
        assert margin < 1e-5 or found == wanted, (line, value, least)
    return np.array([close, cut, masked])


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_support_is_that_of_the_definition(name):
    rng, seen = random.Random(f"support of {name}"), 0
    for _ in range(CASES // LINES):
        seen = seen + compare(name, rng, rng.choice([1, 2, 3, 5, rng.randint(1, 64), 64]), LINES)
    close, cut, masked = seen
    assert close < 0.05 * CASES
    assert cut > 0.1 * CASES
    assert masked > 0.01 * CASES


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_support_of_a_large_vocabulary(name):
    """Where a sampler may take shortcuts; so many tokens are close to the limit more often."""
    rng, seen = random.Random(f"large {name}"), 0
    for _ in range(12):
        seen = seen + compare(name, rng, rng.choice([300, 1000, 4200, 5000]), 8)
    close, cut, _ = seen
    assert close < 60
    assert cut > 10
