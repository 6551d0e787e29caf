"""Greedy search equals the reference's, on every architecture and with every option that acts on it."""

from __future__ import annotations

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import ENCODER_DECODER, NAMES, TINY, level, ragged, seeds, subject

NEW = 16


@pytest.mark.parametrize("seed", seeds(2, 14))
@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows(name, seed, tiny, reference):
    model = subject(name, tiny)
    compare.batched(reference, Call(model, {"max_new_tokens": NEW}), ragged(model, seed))


@pytest.mark.parametrize("name", NAMES)
def test_level_rows(name, tiny, reference):
    model = subject(name, tiny)
    compare.batched(reference, Call(model, {"max_new_tokens": NEW}), level(model))


@pytest.mark.parametrize("name", NAMES)
def test_one_row_at_a_time(name, tiny, reference):
    model = subject(name, tiny)
    compare.by_row(reference, Call(model, {"max_new_tokens": NEW}), ragged(model))


def test_some_rows_end_early_and_some_do_not(tiny, reference):
    """Precondition of these tests: ends at different steps in one batch, on every architecture."""
    for name in TINY:
        model = tiny(name)
        lengths = set()
        for seed in range(2):
            answers = compare.batched(reference, Call(model, {"max_new_tokens": NEW}), ragged(model, seed))
            lengths |= {len(a.tokens[0]) for a in answers}
        assert len(lengths) >= 3, f"{name}: {lengths}"
        assert NEW in lengths, f"{name}: {lengths}"


@pytest.mark.parametrize("name", NAMES)
def test_default_length(name, tiny, reference):
    model = subject(name, tiny)
    answers = compare.by_row(reference, Call(model, {}), ragged(model))
    assert max(len(a.tokens[0]) for a in answers) <= 20


# Lengths and penalties count the padding of a batch on the reference's side, so these compare row by row.
BY_ROW = {
    "max_length": {},  # filled in below: the longest prompt and a little more
    "min_length": {"min_length": 14, "max_new_tokens": NEW},
    "min_new_tokens": {"min_new_tokens": 9, "max_new_tokens": NEW},
    "repetition_penalty": {"repetition_penalty": 1.3, "max_new_tokens": NEW},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.3, "max_new_tokens": NEW},
}


@pytest.mark.parametrize("option", BY_ROW)
@pytest.mark.parametrize("name", NAMES)
def test_option_by_row(name, option, tiny, reference):
    model = subject(name, tiny)
    prompts = ragged(model)
    length = {"max_length": max(map(len, prompts.rows)) + 3} if option == "max_length" else {}
    compare.by_row(reference, Call(model, {**BY_ROW[option], **length}), prompts)


@pytest.mark.parametrize("name", NAMES)
def test_several_end_tokens(name, tiny, reference):
    model = subject(name, tiny)
    plain = compare.batched(reference, Call(model, {"max_new_tokens": NEW}), ragged(model))
    # A token from the middle of each answer becomes an end token, so the option must act.
    extra = {a.tokens[0][len(a.tokens[0]) // 2] for a in plain if len(a.tokens[0]) > 2}
    ids = sorted({model.eos} | extra) if isinstance(model.eos, int) else sorted({*model.eos, *extra})
    answers = compare.batched(
        reference, Call(model, {"max_new_tokens": NEW, "eos_token_id": ids}), ragged(model)
    )
    assert [a.tokens for a in answers] != [a.tokens for a in plain]


@pytest.mark.parametrize("name", NAMES)
def test_suppress_tokens(name, tiny, reference):
    model = subject(name, tiny)
    plain = compare.batched(reference, Call(model, {"max_new_tokens": NEW}), ragged(model))
    banned = sorted({t for a in plain for t in a.tokens[0][:2]})
    call = Call(model, {"max_new_tokens": NEW, "suppress_tokens": banned})
    for answer in compare.batched(reference, call, ragged(model)):
        assert not set(banned) & set(answer.tokens[0])


@pytest.mark.parametrize("name", NAMES)
def test_forced_eos(name, tiny, reference):
    model = subject(name, tiny)
    end = model.eos if isinstance(model.eos, int) else model.eos[0]
    call = Call(model, {"max_new_tokens": 5, "forced_eos_token_id": end})
    for answer in compare.batched(reference, call, ragged(model)):
        assert answer.tokens[0][-1] == end


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_forced_bos(name, tiny, reference):
    model = tiny(name)
    call = Call(model, {"max_new_tokens": NEW, "forced_bos_token_id": 33})
    for answer in compare.batched(reference, call, ragged(model)):
        assert answer.tokens[0][0] == 33
