"""Other ways in than `descant.generate`: refused with the way to go, or the same as transformers."""

from __future__ import annotations

import pytest
import torch

import descant
from tests.unit.api.whisper.subjects import recordings, whisper


def test_a_stream_of_windows_is_refused():
    with pytest.raises(
        descant.UnsupportedModel, match="`stream` does not support WhisperForConditionalGeneration"
    ):
        descant.stream(whisper(), **recordings(40))


def test_as_custom_generate_with_a_mask_of_frames():
    model, inputs = whisper(), recordings(model_frames(), seed=3)
    theirs = model.generate(**inputs, max_new_tokens=6)
    ours = model.generate(**inputs, max_new_tokens=6, custom_generate=descant.generate)
    assert torch.equal(theirs, ours)


def model_frames() -> int:
    """The frames of one window."""
    return 2 * int(whisper().config.max_source_positions)
