"""Greedy search, sampling, beams and beam sampling equal the reference's, on every architecture.

Under sampling the noise is that of the whole batch, so batches are compared. Beams of a batch are those of
the reference's run of each row alone; beam sampling runs rows alone on both sides. What else acts on these
methods is in `test_processors.py` and `test_stops.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import NAMES, STORIES, TINY, level, ragged, seeds, subject

EARLY = (False, True, "never")
HOW = {
    "greedy": compare.batched,
    "sampling": compare.batched,
    "beams": compare.by_row,
    "beam sampling": compare.alone,
}
DRAWN: dict[str, Any] = {"do_sample": True, "max_new_tokens": 16}
BEAMS = [
    {"num_beams": beams, "early_stopping": early, "length_penalty": penalty, "max_new_tokens": 14}
    for beams, early, penalty in product((2, 4, 8), EARLY, (-1.0, 0.0, 1.0, 2.0))
]
SHOWN = (BEAMS[5], BEAMS[12], BEAMS[23], BEAMS[26])  # in CI: with every value of each
BEAM_SAMPLING: list[dict[str, Any]] = [
    {"num_beams": 4},
    {"num_beams": 2, "top_k": 20},
    {"num_beams": 3, "temperature": 0.7, "top_k": 0},
    {"num_beams": 3, "temperature": 1.5, "top_p": 0.95},
    {"num_beams": 4, "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "num_return_sequences": 4},
]
SETTINGS: list[Any] = [
    ("greedy", {"max_new_tokens": 16}),
    ("sampling", DRAWN),
    ("sampling", {**DRAWN, "top_k": 5}),
    ("sampling", {**DRAWN, "temperature": 0.7, "top_p": 0.9}),
    ("sampling", {**DRAWN, "min_p": 0.1}),
    ("sampling", {**DRAWN, "top_k": 0}),
    ("sampling", {**DRAWN, "temperature": 1.8, "top_k": 0, "top_p": 0.95, "min_p": 0.01}),
    *(
        pytest.param("beams", one, marks=() if one in SHOWN else pytest.mark.slow, id=f"beams-{at}")
        for at, one in enumerate(BEAMS)
    ),
    *(("beam sampling", {**DRAWN, "max_new_tokens": 12, **one}) for one in BEAM_SAMPLING),
]


def check(reference, model, method, arguments, prompts, seed=None):
    """Compare in the way of the method; its answers."""
    drawn = seed if "do_sample" in arguments else None
    full = model.name != STORIES or HOW[method] is compare.batched
    return HOW[method](reference, Call(model, arguments, seed=drawn, full=full), prompts)


@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize(("method", "arguments"), SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows(name, method, arguments, seed, tiny, reference):
    model = subject(name, tiny)
    check(reference, model, method, arguments, ragged(model, seed), seed)


@pytest.mark.parametrize(("method", "arguments"), [SETTINGS[0], SETTINGS[1], ("beams", BEAMS[14])])
@pytest.mark.parametrize("name", NAMES)
def test_level_rows(name, method, arguments, tiny, reference):
    model = subject(name, tiny)
    check(reference, model, method, arguments, level(model), 3)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("sampling", DRAWN), *(("beams", {**BEAMS[14], "early_stopping": early}) for early in EARLY)],
)
@pytest.mark.parametrize("name", NAMES)
def test_several_sequences(name, method, arguments, tiny, reference):
    model = subject(name, tiny)
    answers = check(reference, model, method, {**arguments, "num_return_sequences": 3}, ragged(model), 5)
    differ = [len({tuple(tokens) for tokens in answer.tokens}) == 3 for answer in answers]
    assert any(differ) if method == "sampling" else all(differ)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("more", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_lengths(name, more, beams, tiny, reference):
    """The default, and `max_length`, which counts the padding of a batch on the reference's side."""
    model = subject(name, tiny)
    prompts = ragged(model)
    limit = {} if more is None else {"max_length": max(map(len, prompts.rows)) + more}
    compare.by_row(reference, Call(model, {"num_beams": beams, **limit}), prompts)


@pytest.mark.parametrize("name", TINY)
def test_rows_that_end_early_leave_the_noise_of_the_others_alone(name, tiny, reference):
    model = tiny(name)
    seen = set()
    for seed in range(4):
        arguments = {**DRAWN, "temperature": 1.5}
        answers = check(reference, model, "sampling", arguments, ragged(model), seed)
        seen |= {len(answer.tokens[0]) for answer in answers}
    assert len(seen) >= 3, f"rows end at {seen}: too uniform to show it"


@pytest.mark.parametrize("name", NAMES)
def test_drawn_beams_of_a_batch_that_ends_together(name, tiny, reference):
    """With every row as long as the others, the reference's batch is neutral and the noise is the batch's."""
    model = subject(name, tiny)
    arguments = {"do_sample": True, "num_beams": 3, "min_new_tokens": 12, "max_new_tokens": 12}
    answers = compare.batched(reference, Call(model, arguments, seed=2), ragged(model))
    assert {len(answer.tokens[0]) for answer in answers} == {12}
