"""Pretrained models give the same greedy tokens with drafts as without.

The wide sweep is `tests/reference/real/identity.py`: 500 prompts of 64 tokens on the small models and 60 on
SmolLM2.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.reference.real.identity import COUNTS, DRAFTERS, WHOLE, Tally, Trial, prompts

FEW = {"stories15m": (3, 12), "minimind2-small": (3, 8), "smollm2": (3, 6)}  # prompts and tokens in CI
# In CI each drafter on one small model, and on the largest a draft model of each tokenizer.
SHOWN = {
    "stories15m": DRAFTERS["stories15m"],
    "minimind2-small": ("stories15m",),
    "smollm2": ("smol-draft", "stories15m"),
}
PAIRS = [(name, drafter) for name in DRAFTERS for drafter in DRAFTERS[name]]
CASES = [
    pytest.param(name, drafter, marks=() if drafter in SHOWN[name] else pytest.mark.slow)
    for name, drafter in PAIRS
]


@cache
def trial(name: str, count: int, new: int) -> Trial:
    return Trial.of(name, count, new)


def check(tally: Tally, adaptive: bool) -> None:
    assert not tally.differ, f"{tally}\n" + "\n".join(tally.differ)
    assert adaptive or tally.tried > 0


def test_the_prompts_are_many():
    some = prompts(500)
    assert len(set(some)) == 500
    assert prompts(500) == some, "the same in every run"
    assert max(map(len, some)) > 10 * min(map(len, some))


@pytest.mark.parametrize(("name", "drafter"), CASES)
def test_the_same_tokens(name, drafter, record_property):
    """In batches of three, and on the small models alone as well."""
    one = trial(name, *FEW[name])
    tally = one.run(drafter, (3,), (3, 8))
    check(tally, "adaptive" in drafter)
    if name != "smollm2":
        check(one.run(drafter, (1,), COUNTS[::2]), "adaptive" in drafter)
    record_property("ties", tally.ties)


def test_another_answer_is_found():
    """Precondition of the test above: a changed token is found anywhere, unless it is a tie."""
    one = trial("stories15m", *FEW["stories15m"])
    tally = Tally()
    for at, plain in enumerate(one.plain):
        for place in (0, len(plain) // 2, len(plain) - 1):
            one._compare(tally, at, [*plain[:place], plain[place] + 1, *plain[place + 1 :]], "")
        one._compare(tally, at, plain[:-1], "")
        one._compare(tally, at, [*plain, 5], "")
    assert (len(tally.differ), tally.ties) == (5 * len(one.plain), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter"), PAIRS)
def test_the_same_tokens_on_all_prompts(name, drafter, record_property):
    tally = trial(name, WHOLE[name], 64).run(drafter)
    record_property("tally", str(tally))
    check(tally, adaptive=False)
