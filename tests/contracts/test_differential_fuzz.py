"""The differential fuzz: requests in a crowd, alone, on another cache and by transformers give the same.

CI runs the first cases and those that have found defects; `-m slow` runs a thousand.
"""

from __future__ import annotations

import pytest

from tools.fuzz.dimensions import case_of
from tools.fuzz.oracles import judge

SLICE, WHOLE, PART = 12, 1012, 50
# Cases that have found a defect, by the defect.
FOUND = {
    "drafts on the quantized cache": 389,
    "guided drafts on the quantized cache": 1957,
    "windows of transformers 5.23": 12,
    "an adapter of a prompt in chunks": 295,
    "an adapter of rows that are read again": 232,
    "an adapter of a scored prompt": 361,
    "weights changed through data": 397,
    "weights changed by a fused optimizer": 401,
    "a hook": 2,
    "DoLa with a grammar beside guidance": 144,
    "invalid values removed before a grammar": 447,
    "shared prefixes in float64": 304,
    "forks that were not returned": 44,
    "a request refused only when it joined": 104,
    "guided candidates read again": 7990,
    "more blocks held than counted": 32497,
    "forced tokens beyond the room of a step": 120,
    "a recurrent state read again": 175,
}


def differences(seeds):
    return [str(one) for seed in seeds for one in judge(case_of(seed)).differences if not one.explained_by]


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND)
def test_cases_that_have_found_a_defect(seed):
    assert not differences([seed])


def test_first_cases():
    assert not differences(range(SLICE))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SLICE, WHOLE, PART))
def test_more_cases(first):
    assert not differences(range(first, first + PART))
