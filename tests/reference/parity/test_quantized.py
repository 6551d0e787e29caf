"""The quantised caches equal the reference's, on a real model, as far as it can go.

There groups must divide what is quantised, and all of it is quantised again whenever the residual is full,
which moves nothing but last digits: with quanto answers are the same. With hqq it is read in half precision
there; once what follows is quantised too, the little that this moves may move a code, a whole step.
"""

from __future__ import annotations

import pytest
import torch

import descant
from tests.reference.parity import compare
from tests.reference.parity.compare import Batch, Call
from tests.reference.process.client import ReferenceFailure
from tests.support import pretrained
from tests.support.extras import need_hqq

TEXT = "The town library has been in the old mill since 1974. It holds forty thousand books,"
ROUNDING = 5e-2  # of logits: keys and values in half precision


@pytest.fixture(scope="module")
def smollm():
    return pretrained.load("smollm2")


def prompt(model, length=None):
    """One row: the repeated text, of the given length."""
    ids = model.tokens(TEXT)
    return Batch([(ids * 8)[:length] if length else ids], model.pad)


def arguments(backend, new, **settings):
    # Scales in full precision, the only kind that quanto there supports.
    exact = {"compute_dtype": "float32"} if backend == "quanto" else {}
    return {
        "max_new_tokens": new,
        "cache_implementation": "quantized",
        "cache_config": {"backend": backend, **exact, **settings},
    }


def dense(model, sequences, width):
    """Logits of a model that sees everything as it is, after each position from the last of the prompt."""
    with torch.no_grad():
        return model.model(sequences[:, :-1]).logits[0, width - 1 :]


@pytest.mark.parametrize("settings", [{}, {"nbits": 2}], ids=str)
def test_quanto(smollm, reference, settings):
    compare.alone(
        reference, Call(smollm, arguments("quanto", 30 if not settings else 12, **settings)), prompt(smollm)
    )


def test_quanto_over_positions(smollm, reference):
    call = Call(smollm, arguments("quanto", 8, axis_key=-1, axis_value=-1))
    compare.alone(reference, call, prompt(smollm, 64))


def test_quanto_where_the_residual_is_full(smollm, reference):
    """What was quantised is the same when it is quantised again, but for rounding."""
    compare.alone(reference, Call(smollm, arguments("quanto", 12, residual_length=4)), prompt(smollm))


@pytest.mark.hqq
@pytest.mark.parametrize("bits", [4, 8])
def test_hqq(smollm, reference, bits):
    need_hqq()
    given = arguments("HQQ", 12, nbits=bits, axis_key=1, axis_value=1)
    ours, theirs = both_outputs(smollm, reference, given)
    assert torch.equal(ours.sequences, theirs["sequences"])
    for mine, wanted in zip(ours.logits, theirs["logits"], strict=True):
        assert (mine - wanted).abs().max() < ROUNDING


@pytest.mark.hqq
@pytest.mark.parametrize(
    ("settings", "share"),
    [
        # Every fourth token quantises what half precision has moved.
        pytest.param({"axis_key": 1, "axis_value": 1, "residual_length": 4}, 1.25, id="quantised again"),
        # There groups run through all heads and positions, here over positions of one channel.
        pytest.param({}, 0.8, id="first axis"),
    ],
)
def test_hqq_is_no_further_from_no_quantisation(smollm, reference, settings, share):
    need_hqq()
    ours, theirs = both_outputs(smollm, reference, arguments("HQQ", 12, **settings))
    far = []
    for sequences, logits in ((ours.sequences, ours.logits), (theirs["sequences"], theirs["logits"])):
        wanted = dense(smollm, sequences, sequences.shape[1] - len(logits)).log_softmax(-1)
        found = torch.cat(list(logits)).log_softmax(-1)
        far.append((wanted.exp() * (wanted - found)).sum(-1)[1:].mean())
    assert far[0] < share * far[1]


def both_outputs(model, reference, given, batch=None):
    """The outputs of both sides for one prompt."""
    inputs = (batch or prompt(model)).inputs
    ours = descant.generate(model.model, **inputs, **given, return_dict_in_generate=True, output_logits=True)
    return ours, reference.generate(model.folder, inputs, given, ["sequences", "logits"])


# -------------------------------------------------------------------- what the reference cannot do
def works_here_alone(model, reference, given, error, length):
    batch = prompt(model, length)
    with pytest.raises(ReferenceFailure, match=error):
        reference.generate(model.folder, batch.inputs, given)
    found = descant.generate(model.model, **batch.inputs, **given)
    assert found.shape == (1, length + given["max_new_tokens"])


def test_groups_need_not_divide_a_text(smollm, reference):
    given = arguments("quanto", 4, axis_key=-1)
    works_here_alone(smollm, reference, given, "must be a divisor", 22)


@pytest.mark.hqq
def test_hqq_needs_no_even_number_of_groups(smollm, reference):
    need_hqq()
    given = arguments("HQQ", 4, axis_key=1, axis_value=1)
    works_here_alone(smollm, reference, given, "must match", 21)


@pytest.mark.hqq
def test_hqq_has_three_bits(smollm, reference):
    need_hqq()
    given = arguments("HQQ", 4, nbits=3, axis_key=1, axis_value=1)
    works_here_alone(smollm, reference, given, "must match", 22)
