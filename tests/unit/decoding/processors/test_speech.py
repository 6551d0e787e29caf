"""Speech: timestamps of rows of different length, Bark's turns, and wrong arguments."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.speech import (
    AlternatingCodebooksLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from descant.errors import InputError
from tests.unit.decoding.processors.reference import context

NEVER = -math.inf
# Text 0..3, end 4, no timestamps 5, timestamps 6..11.
WHISPER = SimpleNamespace(no_timestamps_token_id=5, eos_token_id=4, max_initial_timestamp_index=2)


def left(row, begin=1, scores=None, config=WHISPER, detect=False):
    """The tokens that may follow a row."""
    processor = WhisperTimeStampLogitsProcessor(config, begin, detect)
    given = torch.zeros(1, 12) if scores is None else scores
    return processor(torch.tensor([row]), given)[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([9], [6, 7, 8]),  # at the start: a timestamp, and none too late
        ([9, 6], [0, 1, 2, 3, 4]),  # the first stands alone: text
        ([9, 6, 1], [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]),  # text or a later timestamp
        ([9, 6, 1, 8], [4, 8, 9, 10, 11]),  # a pair has begun: the same again, later, or the end
        ([9, 6, 1, 8, 8], [0, 1, 2, 3, 4]),  # and is complete
        ([9, 6, 1, 8, 8, 2], [0, 1, 2, 3, 4, 9, 10, 11]),
    ],
)
def test_timestamps_come_in_pairs_and_never_back(row, expected):
    assert left(row) == expected


def test_timestamps_likelier_together_than_any_text_are_next():
    scores = torch.tensor([[0.0] * 4 + [-9.0, -9.0] + [-0.5] * 6])
    assert left([9, 6, 1], scores=scores, detect=True) == [7, 8, 9, 10, 11]
    assert left([9, 6, 1], scores=scores) == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert left([9, 6, 1], scores=scores - torch.tensor([[0.0] * 6 + [9.0] * 6]), detect=True)[0] == 0


def test_rows_of_different_length_and_models_of_their_own():
    rng = random.Random(11)
    for seed in range(100):
        rows = [[rng.randrange(12) for _ in range(rng.randint(1, 8))] for _ in range(4)]
        params = [
            {
                "no_timestamps_token_id": rng.randint(4, 7),
                "max_initial_timestamp_index": rng.choice([-1, 0, 2]),
                "detect_timestamps": rng.randint(0, 1),
                "begin_index": rng.randint(1, len(row)),
                "eos_token_ids": [rng.randint(1, 4)],
            }
            for row in rows
        ]
        scores = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))
        answer = WhisperTimeStampLogitsProcessor.make_unbound().process(
            context(rng, rows, [1] * 4, params), scores
        )
        for line, own in enumerate(params):
            latest = own["max_initial_timestamp_index"]
            config = SimpleNamespace(
                no_timestamps_token_id=own["no_timestamps_token_id"],
                eos_token_id=own["eos_token_ids"][0],
                max_initial_timestamp_index=None if latest < 0 else latest,
            )
            alone = WhisperTimeStampLogitsProcessor(
                config, own["begin_index"], bool(own["detect_timestamps"])
            )
            assert torch.equal(answer[line], alone(torch.tensor([rows[line]]), scores[line, None])[0])


def test_the_start_follows_what_is_forced():
    config = SimpleNamespace(**vars(WHISPER), forced_decoder_ids=[[1, 9], [2, 9]])
    processor = WhisperTimeStampLogitsProcessor(config)
    assert processor.begin_index == 3
    assert WhisperTimeStampLogitsProcessor(WHISPER).begin_index == 1


def test_the_columns_of_a_config():
    config = GenerationConfig(return_timestamps=True, no_timestamps_token_id=5)
    columns = WhisperTimeStampLogitsProcessor.params_from_config(config, PromptInfo(1))
    assert columns == {
        "no_timestamps_token_id": 5, "max_initial_timestamp_index": -1, "detect_timestamps": 1,
    }  # fmt: skip


def test_what_the_config_lacks_is_named():
    with pytest.raises(InputError, match="`no_timestamps_token_id` must be an integer"):
        WhisperTimeStampLogitsProcessor(SimpleNamespace(eos_token_id=3))
    with pytest.raises(InputError, match="`generate_config` must have an `eos_token_id`"):
        WhisperTimeStampLogitsProcessor(SimpleNamespace(no_timestamps_token_id=3))


def test_codebooks_take_turns():
    processor = AlternatingCodebooksLogitsProcessor(2, 3, 2)
    for length, expected in ((1, [5, 6, 7]), (2, [3, 4]), (3, [5, 6, 7]), (4, [3, 4])):
        answer = processor(torch.zeros(1, length, dtype=torch.long), torch.zeros(1, 8))
        assert answer[0].isfinite().nonzero()[:, 0].tolist() == expected


def test_a_codebook_has_a_size():
    with pytest.raises(InputError, match="`codebook_size` must be an integer"):
        AlternatingCodebooksLogitsProcessor(0, 3, -1)
    with pytest.raises(InputError, match="`input_start_len` must be an integer"):
        AlternatingCodebooksLogitsProcessor(-1, 3, 2)
