"""Where the processors of transformers 4.52.4 are wrong by hand: theirs, then ours."""

from __future__ import annotations

import math

import pytest
import torch

import descant
from tests.reference.process.client import ReferenceFailure

NEVER = -math.inf
EVEN = torch.zeros(1, 8)
FIELDS = {"no_timestamps_token_id": 3, "eos_token_id": 0, "bos_token_id": 2}


def decay(factor, length):
    return {
        "exponential_decay_length_penalty": (0, factor), "eos_token_id": 1, "input_ids_seq_length": length,
    }  # fmt: skip


# The processor, its arguments, ids, scores, theirs (a text: it fails so), ours.
CASES = {
    # A row that is exactly the sequence but for its last token is passed over.
    "a sequence bias comes a token too late": (
        "SequenceBiasLogitsProcessor", {"sequence_bias": {(4, 5, 6): 2.0}}, [[4, 5]], EVEN,
        [[0.0] * 8], [[0.0] * 6 + [2.0, 0.0]],
    ),
    "a bad word gets through at the start": (
        "NoBadWordsLogitsProcessor", {"bad_words_ids": [[4, 5, 6]]}, [[4, 5]], EVEN,
        [[0.0] * 8], [[0.0] * 6 + [NEVER, 0.0]],
    ),
    "a list of biases cannot name token 0": (
        "SequenceBiasLogitsProcessor", {"sequence_bias": [[[0], 1.5]]}, [[1]], torch.zeros(1, 3),
        "positive integers", [[1.5, 0.0, 0.0]],
    ),
    # Of two prompts with two beams each, only the first two lines change, the second by another prompt.
    "the encoder penalty misses most beams": (
        "EncoderRepetitionPenaltyLogitsProcessor",
        {"penalty": 0.5, "encoder_input_ids": torch.tensor([[1], [2]])}, [[0]] * 4, torch.ones(4, 4),
        [[1, 0.5, 1, 1], [1, 1, 0.5, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
        [[1, 0.5, 1, 1], [1, 0.5, 1, 1], [1, 1, 0.5, 1], [1, 1, 0.5, 1]],
    ),
    "an end that is ruled out becomes no number": (
        "ExponentialDecayLengthPenalty", decay(1.5, 1), [[2, 2, 2]], torch.tensor([[0.5, NEVER, 1.0]]),
        [[0.5, math.nan, 1.0]], [[0.5, NEVER, 1.0]],
    ),
    "a line with nothing left fails the batch": (
        "EtaLogitsWarper", {"epsilon": 0.5}, [[0], [0]], torch.tensor([[0.0, -9.0], [NEVER, NEVER]]),
        "nan", [[0.0, NEVER], [NEVER, NEVER]],
    ),
    "what both halves rule out becomes no number": (
        "ClassifierFreeGuidanceLogitsProcessor", {"guidance_scale": 3.0}, [[0]],
        torch.tensor([[1.0, NEVER], [0.5, NEVER]]), [[2.0, math.nan]], [[2.0, NEVER]],
    ),
}  # fmt: skip


def theirs(reference, name, arguments, ids, scores):
    return reference.ask("process", name=name, cases=[(arguments, torch.tensor(ids), scores)])[0]


def ours(name, arguments, ids, scores):
    return getattr(descant, name)(**arguments)(torch.tensor(ids), scores)


@pytest.mark.parametrize("case", CASES)
def test_theirs_and_ours(reference, case):
    *call, wrong, right = CASES[case]
    if isinstance(wrong, str):
        with pytest.raises(ReferenceFailure, match=wrong):
            theirs(reference, *call)
    else:
        found = theirs(reference, *call)
        assert torch.equal(found.nan_to_num(7.0), torch.tensor(wrong).nan_to_num(7.0).to(found))
    assert ours(*call).tolist() == right


def test_an_end_grows_beyond_all_numbers(reference):
    """After some hundred tokens Python's own power fails, or the score becomes infinite."""
    name, scores = "ExponentialDecayLengthPenalty", torch.tensor([[0.5, -2.0, 1.0]])
    assert theirs(reference, name, decay(10.0, 0), [[2] * 60], scores)[0, 1].isinf()
    with pytest.raises(ReferenceFailure) as error:
        theirs(reference, name, decay(10.0, 0), [[2] * 400], scores)
    assert error.value.type == "OverflowError"
    for length in (60, 400):
        right = ours(name, decay(10.0, 0), [[2] * length], scores)
        assert right.softmax(-1).tolist() == [[0.0, 1.0, 0.0]]


def test_an_end_token_0_counts_as_none(reference):
    """Whisper's text lies below the end token; with 0 for it none does, but theirs takes the beginning's."""
    arguments = {"generate_config": FIELDS, "begin_index": 1, "_detect_timestamp_from_logprob": False}
    given = "WhisperTimeStampLogitsProcessor", arguments, [[1, 1, 5]], torch.zeros(1, 7)
    assert theirs(reference, *given)[0, :2].tolist() == [NEVER, NEVER]
    arguments["generate_config"] = type("Config", (), FIELDS)
    assert ours(*given)[0, :2].tolist() == [0.0, 0.0]
