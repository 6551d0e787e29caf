"""The times of tokens: warping against a search of all paths, and transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import descant
from descant.api.whisper.windows import dynamic_time_warping
from descant.errors import ConfigError
from tests.unit.api.whisper.subjects import both, changed, equal, recordings, whisper


def cheapest(cost):
    """The first column of each row on the cheapest path, by trying every path."""
    rows, columns = cost.shape
    best = (np.inf, None)

    def walk(row, column, paid, begins):
        nonlocal best
        paid += cost[row, column]
        if (row, column) == (rows - 1, columns - 1):
            best = min(best, (paid, begins), key=lambda found: found[0])
            return
        if row + 1 < rows and column + 1 < columns:
            walk(row + 1, column + 1, paid, [*begins, column + 1])
        if row + 1 < rows:
            walk(row + 1, column, paid, [*begins, column])
        if column + 1 < columns:
            walk(row, column + 1, paid, begins)

    walk(0, 0, 0.0, [0])
    return best[1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (4, 1), (3, 3), (3, 7), (5, 4)])
def test_the_path_is_the_cheapest(shape):
    for seed in range(5):
        cost = np.random.default_rng(seed).standard_normal(shape)
        assert dynamic_time_warping(cost).tolist() == cheapest(cost)


@pytest.mark.ci_cases("3-1", "1-0")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beams", [1, 3])
def test_token_times_equal_those_of_transformers(seed, beams):
    call = {"return_token_timestamps": True, "language": "en", "num_beams": beams}
    model, sound = whisper("eager"), recordings(80, seed=seed)
    theirs, ours = both(model, **sound, **call, return_timestamps=True, return_segments=True)
    equal(theirs, ours)
    for wanted, got in zip(theirs["segments"][0], ours["segments"][0], strict=True):
        assert torch.allclose(wanted["token_timestamps"], got["token_timestamps"], atol=1e-5)
    joined = torch.cat([one["token_timestamps"] for one in ours["segments"][0]])
    assert torch.equal(ours["token_timestamps"][0], joined)


@pytest.mark.parametrize("masked", [False, True])
def test_without_timestamps_of_segments(masked):
    sound = recordings(32)
    sound["attention_mask"][:, 20:] = 0
    sound = sound if masked else {"input_features": sound["input_features"]}
    timeless = {"language": "en", "max_new_tokens": 9, "suppress_tokens": list(range(100, 129))}
    theirs, ours = both(whisper("eager"), **sound, return_token_timestamps=True, **timeless)
    assert list(ours) == ["sequences", "token_timestamps"]
    assert torch.equal(theirs["sequences"], ours["sequences"])
    assert torch.allclose(theirs["token_timestamps"], ours["token_timestamps"], atol=1e-5)
    assert float(ours["token_timestamps"].max()) <= (0.2 if masked else 0.32)


def test_another_row_does_not_change_the_times():
    call = {
        "return_token_timestamps": True,
        "language": "en",
        "return_timestamps": True,
        "return_segments": True,
    }
    sound = recordings(120, 50)
    together = descant.generate(whisper("eager"), **sound, **call)
    alone = {name: value[1:, ..., :50] for name, value in sound.items()}
    single = descant.generate(whisper("eager"), **alone, **call)
    for one, other in zip(single["segments"][0], together["segments"][1], strict=True):
        assert torch.allclose(one["token_timestamps"], other["token_timestamps"], atol=1e-5)


def test_heads_that_follow_the_speaker_are_needed():
    model = changed(whisper("eager"), alignment_heads=None)
    with pytest.raises(ConfigError, match="`return_token_timestamps` needs `alignment_heads`"):
        descant.generate(model, **recordings(32), return_token_timestamps=True)
