"""Beam sampling draws the same beams as the reference under the same torch seed."""

from __future__ import annotations

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import NAMES, STORIES, ragged, seeds, subject

NEW = 12
SETTINGS = {
    "defaults": {"num_beams": 4},
    "top_k": {"num_beams": 2, "top_k": 20},
    "temperature": {"num_beams": 3, "temperature": 0.7, "top_k": 0},
    "top_p": {"num_beams": 3, "temperature": 1.5, "top_p": 0.95},
    "early": {"num_beams": 4, "early_stopping": True, "num_return_sequences": 2},
    "never": {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "num_return_sequences": 4},
}


@pytest.mark.parametrize("seed", seeds(1, 8))
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_alone(name, setting, seed, tiny, reference):
    model = subject(name, tiny)
    arguments = {"do_sample": True, "max_new_tokens": NEW, **SETTINGS[setting]}
    compare.alone(reference, Call(model, arguments, seed=seed, full=name != STORIES), ragged(model, seed))


@pytest.mark.parametrize("name", NAMES)
def test_batch_that_ends_together(name, tiny, reference):
    """With every row as long as the others, the reference's batch is neutral and the noise is the batch's."""
    model = subject(name, tiny)
    arguments = {"do_sample": True, "num_beams": 3, "min_new_tokens": NEW, "max_new_tokens": NEW}
    answers = compare.batched(reference, Call(model, arguments, seed=2), ragged(model))
    assert {len(a.tokens[0]) for a in answers} == {NEW}
