"""Dynamic temperature against its definition in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from descant.decoding.processors.truncation import DynamicTemperatureLogitsWarper
from descant.errors import InputError
from tests.unit.decoding.processors.reference import chance_scores, context, drafted, entropy, softmax, spoil

IDS = torch.zeros(1, 1, dtype=torch.long)


def slow(line, temperature, dynamic_temperature_range, dynamic_temperature_exponent):
    """The scaled line and the temperature it took."""
    possible = sum(score > -math.inf for score in line)
    if possible < 2:
        return list(line), temperature
    low = max(0.0, temperature - dynamic_temperature_range)
    high = temperature + dynamic_temperature_range
    share = min(1.0, entropy(softmax(line)) / math.log(possible))
    heat = low + (high - low) * share**dynamic_temperature_exponent
    if heat < 1e-6:
        return [score if score == max(line) else -math.inf for score in line], heat
    return [score / heat for score in line], heat


def chance_params(rng):
    temperature = rng.choice([1.0, rng.uniform(0.2, 2)])
    return {
        "temperature": temperature,
        "dynamic_temperature_range": rng.choice([0.0, temperature / 2, temperature, rng.uniform(0, 3)]),
        "dynamic_temperature_exponent": rng.choice([1.0, 0.0, 0.5, rng.uniform(0, 3)]),
    }


def same(found, line, params):
    """Whether the float32 answer is near; not asked where the temperature itself is close to nothing."""
    wanted, heat = slow(line, **params)
    if heat > 1e-2:
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-3, atol=1e-4)
    return heat > 1e-2


def test_every_line_has_its_own_temperature():
    rng, tried, checked = random.Random(4), 0, 0
    for _ in range(300):
        vocabulary, count = rng.choice([1, 2, 3, 9, 64]), rng.randint(2, 12)
        lines = [chance_scores(rng, vocabulary) for _ in range(count)]
        params = [chance_params(rng) for _ in lines]
        given, nan = spoil(rng, torch.tensor(lines))
        here = context(rng, [[0] * rng.randint(1, 3) for _ in lines], [0] * count, params)
        found = DynamicTemperatureLogitsWarper.make_unbound().process(here, given)
        for at, line in enumerate(lines):
            if at != nan:
                tried, checked = tried + 1, checked + same(found[at], line, params[at])
    assert checked > 0.95 * tried > 1500


def test_lines_of_drafts():
    rng = random.Random(5)
    params = [chance_params(rng) for _ in range(20)]
    lines = [chance_scores(rng, 7) for _ in range(60)]
    here = drafted(rng, [[1, 2]] * 20, [1] * 20, params, [[3, 4]] * 20)
    found = DynamicTemperatureLogitsWarper.make_unbound().process(here, torch.tensor(lines))
    assert sum(same(found[at], line, params[at // 3]) for at, line in enumerate(lines)) > 50


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.0] * 4),
        ([3.0, 3.0, -math.inf], [1.5, 1.5, -math.inf]),  # level: the highest temperature, 2
        ([3.0, -math.inf, -math.inf], [3.0, -math.inf, -math.inf]),  # one candidate: as it was
        ([300.0, 0.0, -5.0], [300.0, -math.inf, -math.inf]),  # certain: temperature 0
        ([300.0, 300.0, -500.0], [300.0 / (2 * math.log(2) / math.log(3))] * 2 + [-396.24063]),
        ([-math.inf] * 3, [-math.inf] * 3),
    ],
)
def test_the_ends_of_the_range(scores, wanted):
    found = DynamicTemperatureLogitsWarper(1.0, 1.0)(IDS, torch.tensor([scores]))
    torch.testing.assert_close(found, torch.tensor([wanted]))


def test_neither_certainty_nor_any_scale_makes_a_score_that_is_no_number():
    """The temperature goes to 0 with the entropy: through every size, for any scale of the scores."""
    for gap in [0.0, *(10.0**at for at in range(-6, 6))]:
        for scale in (1e-20, 1.0, 1e20):
            scores = torch.tensor([[gap, 0.0, -gap]]) * scale
            found = DynamicTemperatureLogitsWarper(0.5, 1.0)(IDS, scores)
            chances = found.softmax(-1)
            assert chances.isfinite().all(), (gap, scale)
            assert found[0, 0] >= found[0, 1] >= found[0, 2]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: DynamicTemperatureLogitsWarper(0.0, 1.0), "temperature"),
        (lambda: DynamicTemperatureLogitsWarper(1.0, -1.0), "dynamic_temperature_range"),
        (lambda: DynamicTemperatureLogitsWarper(1.0, 1.0, -1.0), "dynamic_temperature_exponent"),
    ],
)
def test_odd_arguments_are_refused_by_name(make, name):
    with pytest.raises(InputError, match=name):
        make()
