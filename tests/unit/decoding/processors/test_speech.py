"""Speech: timestamps of rows of different length, Bark's turns, and wrong arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from descant import GenerationConfig
from descant.core.context import PromptInfo
from descant.decoding.processors.speech import (
    AlternatingCodebooksLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

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


def test_codebooks_take_turns():
    processor = AlternatingCodebooksLogitsProcessor(2, 3, 2)
    for length, expected in ((1, [5, 6, 7]), (2, [3, 4]), (3, [5, 6, 7]), (4, [3, 4])):
        answer = processor(torch.zeros(1, length, dtype=torch.long), torch.zeros(1, 8))
        assert answer[0].isfinite().nonzero()[:, 0].tolist() == expected
