"""Where the processors of transformers 4.52.4 are wrong by hand: each test shows theirs, then ours."""

from __future__ import annotations

import math

import pytest
import torch

import descant as processors
from tests.reference.process.client import ReferenceFailure

NEVER = -math.inf


def theirs(reference, name, arguments, ids, scores):
    return reference.ask("process", name=name, cases=[(arguments, torch.tensor(ids), scores)])[0]


def ours(name, arguments, ids, scores):
    return getattr(processors, name)(**arguments)(torch.tensor(ids), scores)


def test_a_sequence_bias_comes_a_token_too_late(reference):
    """A row that is exactly the sequence but for its last token is passed over."""
    given = {"sequence_bias": {(4, 5, 6): 2.0}}, [[4, 5]], torch.zeros(1, 8)
    assert theirs(reference, "SequenceBiasLogitsProcessor", *given)[0, 6] == 0.0
    assert ours("SequenceBiasLogitsProcessor", *given)[0].tolist() == [0.0] * 6 + [2.0, 0.0]


def test_a_bad_word_gets_through_at_the_start(reference):
    given = {"bad_words_ids": [[4, 5, 6]]}, [[4, 5]], torch.zeros(1, 8)
    assert theirs(reference, "NoBadWordsLogitsProcessor", *given)[0, 6] == 0.0
    assert ours("NoBadWordsLogitsProcessor", *given)[0].tolist() == [0.0] * 6 + [NEVER, 0.0]


def test_a_list_of_biases_cannot_name_token_0(reference):
    given = {"sequence_bias": [[[0], 1.5]]}, [[1]], torch.zeros(1, 3)
    with pytest.raises(ReferenceFailure, match="positive integers"):
        theirs(reference, "SequenceBiasLogitsProcessor", *given)
    assert ours("SequenceBiasLogitsProcessor", *given)[0].tolist() == [1.5, 0.0, 0.0]


def test_the_encoder_penalty_misses_most_beams(reference):
    """Of two prompts with two beams each, only the first two lines change, the second by another prompt."""
    sources = torch.tensor([[1], [2]])
    given = {"penalty": 0.5, "encoder_input_ids": sources}, [[0]] * 4, torch.ones(4, 4)
    wrong = theirs(reference, "EncoderRepetitionPenaltyLogitsProcessor", *given)
    assert wrong.tolist() == [[1, 0.5, 1, 1], [1, 1, 0.5, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    right = ours("EncoderRepetitionPenaltyLogitsProcessor", *given)
    assert right.tolist() == [[1, 0.5, 1, 1], [1, 0.5, 1, 1], [1, 1, 0.5, 1], [1, 1, 0.5, 1]]


def test_an_end_that_is_ruled_out_becomes_no_number(reference):
    arguments = {
        "exponential_decay_length_penalty": (0, 1.5),
        "eos_token_id": 1,
        "input_ids_seq_length": 1,
    }
    given = arguments, [[2, 2, 2]], torch.tensor([[0.5, NEVER, 1.0]])
    assert theirs(reference, "ExponentialDecayLengthPenalty", *given)[0, 1].isnan()
    assert torch.equal(ours("ExponentialDecayLengthPenalty", *given), given[2])


def test_an_end_grows_beyond_all_numbers(reference):
    """After some hundred tokens Python's own power fails, or the score becomes infinite."""
    arguments = {
        "exponential_decay_length_penalty": (0, 10.0),
        "eos_token_id": 1,
        "input_ids_seq_length": 0,
    }
    for length, raises in ((60, False), (400, True)):
        given = arguments, [[2] * length], torch.tensor([[0.5, -2.0, 1.0]])
        if raises:
            with pytest.raises(ReferenceFailure) as error:
                theirs(reference, "ExponentialDecayLengthPenalty", *given)
            assert error.value.type == "OverflowError"
        else:
            assert theirs(reference, "ExponentialDecayLengthPenalty", *given)[0, 1].isinf()
        right = ours("ExponentialDecayLengthPenalty", *given)
        assert right.softmax(-1).tolist() == [[0.0, 1.0, 0.0]]


def test_a_line_with_nothing_left_fails_the_batch(reference):
    scores = torch.tensor([[0.0, -9.0], [NEVER, NEVER]])
    given = {"epsilon": 0.5}, [[0], [0]], scores
    with pytest.raises(ReferenceFailure, match="nan"):
        theirs(reference, "EtaLogitsWarper", *given)
    assert ours("EtaLogitsWarper", *given).tolist() == [[0.0, NEVER], [NEVER, NEVER]]


def test_what_both_halves_rule_out_becomes_no_number(reference):
    scores = torch.tensor([[1.0, NEVER], [0.5, NEVER]])
    given = {"guidance_scale": 3.0}, [[0]], scores
    assert theirs(reference, "ClassifierFreeGuidanceLogitsProcessor", *given)[0, 1].isnan()
    assert ours("ClassifierFreeGuidanceLogitsProcessor", *given).tolist() == [[2.0, NEVER]]


def test_an_end_token_0_counts_as_none(reference):
    """Whisper's text lies below the end token; with 0 for it none does, but theirs takes the beginning's."""
    fields = {"no_timestamps_token_id": 3, "eos_token_id": 0, "bos_token_id": 2}
    arguments = {"generate_config": fields, "begin_index": 1, "_detect_timestamp_from_logprob": False}
    given = arguments, [[1, 1, 5]], torch.zeros(1, 7)
    assert theirs(reference, "WhisperTimeStampLogitsProcessor", *given)[0, :2].tolist() == [NEVER, NEVER]
    arguments["generate_config"] = type("Config", (), fields)
    assert ours("WhisperTimeStampLogitsProcessor", *given)[0, :2].tolist() == [0.0, 0.0]
