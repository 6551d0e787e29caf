"""Whisper tiny.en transcribes a minute of recorded speech as transformers' own generate does."""

from __future__ import annotations

import functools
import wave

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

import descant
from tests.support import pretrained
from tests.unit.api.whisper.subjects import both, compared, equal

RATE = 16_000
LONG = {"return_timestamps": True, "return_segments": True}
# Each minute of speech takes transformers and us several seconds of CPU time: CI runs one of each pair.
SLOW = pytest.mark.slow


@functools.cache
def recording(name):
    """A recording as samples between -1 and 1."""
    with wave.open(str(pretrained.folder("whisper-tiny.en").parent / "speech" / f"{name}.wav")) as sound:
        assert sound.getframerate() == RATE
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
    return samples.astype(np.float32) / 32768


@functools.cache
def whisper(attention="sdpa"):
    folder = pretrained.folder("whisper-tiny.en")
    return WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation=attention).eval()


def features(*audios, long=True):
    extractor = WhisperFeatureExtractor.from_pretrained(pretrained.folder("whisper-tiny.en"))
    size = {"truncation": False, "padding": "longest"} if long else {}
    made = extractor(
        list(audios), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **size
    )
    return dict(made)


def both_recordings():
    return np.concatenate((recording("sonnet"), recording("jfk")))


@pytest.mark.parametrize("past", [False, pytest.param(True, marks=SLOW)])
def test_a_minute_of_speech(past):
    sound = both_recordings()
    assert len(sound) / RATE > 60
    out = compared(whisper(), **features(sound), **LONG, condition_on_prev_tokens=past)
    (segments,) = out["segments"]
    assert len(segments) > 7
    assert float(segments[-1]["end"]) > 60
    tokenizer = WhisperTokenizer.from_pretrained(pretrained.folder("whisper-tiny.en"))
    said = tokenizer.decode(out["sequences"][0], skip_special_tokens=True).lower()
    assert "from fairest creatures we desire increase" in said
    assert "what you can do for your country" in said


@pytest.mark.parametrize("past", [pytest.param(False, marks=SLOW), True])
def test_two_recordings_of_different_length_with_beams(past):
    sounds = recording("sonnet")[: 36 * RATE], recording("jfk")  # two windows, and less than one
    out = compared(whisper(), **features(*sounds), **LONG, num_beams=2, condition_on_prev_tokens=past)
    assert [len(line) > 3 for line in out["segments"]] == [True, False]


def test_a_short_recording():
    compared(whisper(), **features(recording("jfk"), long=False))


def test_a_doubtful_window_is_heard_again():
    sound = features(recording("jfk"), long=False)
    call = {**LONG, "temperature": (0.0, 0.8), "logprob_threshold": -0.1, "no_speech_threshold": 0.6}
    out = compared(whisper(), 1, **sound, **call)
    greedy = descant.generate(whisper(), **sound, **LONG)
    assert out["sequences"].tolist() != greedy["sequences"].tolist()


def test_when_each_token_was_spoken():
    sound = features(recording("jfk"), long=False)
    theirs, ours = both(whisper("eager"), **sound, **LONG, return_token_timestamps=True)
    equal(theirs, ours)
    for wanted, got in zip(theirs["segments"][0], ours["segments"][0], strict=True):
        assert torch.allclose(wanted["token_timestamps"], got["token_timestamps"], atol=1e-4)
    assert 9 < float(ours["token_timestamps"].max()) < 11.1
