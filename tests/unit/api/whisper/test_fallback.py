"""Rejected windows are decoded again at the next temperature, and silence is skipped."""

from __future__ import annotations

import zlib

import pytest
import torch

import descant
from descant.api.whisper.fallback import compression_ratio, derive_seed
from descant.errors import ConfigError
from tests.unit.api.whisper.subjects import PREVIOUS, TIMELESS, changed, compared, recordings, whisper

LONG = {"return_timestamps": True, "return_segments": True, "language": "en"}


def temperatures(monkeypatch):
    """Every call of the loop that a transcription makes: its temperature, its windows and its beams."""
    from descant.api.whisper.fallback import WindowDecoder

    seen = []
    decode = WindowDecoder.decode

    def watched(self, configs, states, prompts):
        config = configs[0]
        seen.append((config.temperature if config.do_sample else 0.0, len(configs), config.num_beams))
        return decode(self, configs, states, prompts)

    monkeypatch.setattr(WindowDecoder, "decode", watched)
    return seen


@pytest.mark.ci_cases("limits0", "limits2")
@pytest.mark.parametrize(
    "limits",
    [
        {"logprob_threshold": -0.9},
        {"compression_ratio_threshold": 0.9},
        {"logprob_threshold": -0.9, "compression_ratio_threshold": 1.1},
        {"logprob_threshold": -0.9, "condition_on_prev_tokens": True},
    ],
)
def test_seeded_fallback_draws_as_transformers_does(limits, monkeypatch):
    seen = temperatures(monkeypatch)
    call = {**LONG, "temperature": (0.0, 0.3, 0.6, 0.9)}
    compared(whisper(), 1, **recordings(80, seed=1), **call, **limits)
    tried = [temperature for temperature, _, _ in seen]
    assert any(tried)
    assert tried.count(0.0) > tried.count(0.9), "some windows are believed at once or on the way"


def test_one_temperature_is_plain_sampling():
    compared(whisper(), 0, **recordings(70, 40), **LONG, temperature=0.8)
    compared(whisper(), 1, **recordings(70, 40), **LONG, temperature=0.8, top_k=5)


def test_silence_is_what_transformers_calls_silence(monkeypatch):
    seen = temperatures(monkeypatch)
    call = {**LONG, "temperature": (0.0, 0.6), "logprob_threshold": -0.5}
    spoken = compared(whisper(), 2, **recordings(140, seed=1), **call)
    assert any(temperature for temperature, _, _ in seen)
    fewer = compared(whisper(), 2, **recordings(140, seed=1), **call, no_speech_threshold=0.0005)
    assert 0 < len(fewer["segments"][0]) < len(spoken["segments"][0])


def test_every_window_is_heard_with_beams_first(monkeypatch):
    seen = temperatures(monkeypatch)
    call = {**LONG, "num_beams": 2, "temperature": (0.0, 0.5)}
    descant.generate(whisper(), **recordings(110), **call, logprob_threshold=100.0)
    assert len(seen) > 4
    assert {(temperature, beams) for temperature, _, beams in seen} == {(0.0, 2), (0.5, 1)}


def test_only_the_doubted_are_heard_again(monkeypatch):
    seen = temperatures(monkeypatch)
    sound = recordings(33, 40, 36, 34)
    descant.generate(
        whisper(), **sound, **LONG, temperature=(0.0, 0.7), logprob_threshold=-0.72,
        force_unique_generate_call=True,
    )  # fmt: skip
    assert seen[0][:2] == (0.0, 4)
    assert seen[1][0] == 0.7
    assert 0 < seen[1][1] < 4


def test_without_a_threshold_nothing_is_retried(monkeypatch):
    seen = temperatures(monkeypatch)
    descant.generate(whisper(), **recordings(110), **LONG, temperature=(0.0, 0.5, 1.0))
    assert {temperature for temperature, _, _ in seen} == {0.0}


def test_the_last_temperature_is_always_accepted(monkeypatch):
    seen = temperatures(monkeypatch)
    out = descant.generate(
        whisper(), **recordings(40), **LONG, temperature=(0.0, 0.4, 0.8), logprob_threshold=100.0
    )
    assert [temperature for temperature, _, _ in seen][:3] == [0.0, 0.4, 0.8]
    assert out["segments"][0]


def test_silence_is_passed_over():
    call = {**LONG, "temperature": (0.0, 0.4), "logprob_threshold": 100.0}
    silent = descant.generate(whisper(), **recordings(110, 40), **call, no_speech_threshold=0.0)
    assert silent["segments"] == [[], []]
    assert silent["sequences"].shape == (2, 0)
    output = descant.generate(whisper(), **recordings(110, 40), **call, no_speech_threshold=1.0)
    assert all(output["segments"])


def test_another_row_changes_neither_fallback_nor_silence():
    sound = recordings(80, 40, seed=3)
    call = {**LONG, "temperature": (0.0, 0.4, 0.8), "logprob_threshold": -0.9, "no_speech_threshold": 0.001}
    together = descant.generate(whisper(), **sound, **call, seed=[5, 6])
    for line, frames in enumerate((80, 40)):
        alone = {name: value[line : line + 1, ..., :frames] for name, value in sound.items()}
        single = descant.generate(whisper(), **alone, **call, seed=[5 + line])
        assert [one["tokens"].tolist() for one in single["segments"][0]] == [
            one["tokens"].tolist() for one in together["segments"][line]
        ]


def test_text_of_a_high_temperature_is_not_previous_text():
    sound = recordings(110)
    call = {**LONG, "condition_on_prev_tokens": True, "logprob_threshold": 100.0, "seed": 1}
    for temperature, follows in ((0.4, True), (0.6, False)):
        out = descant.generate(whisper(), **sound, **call, temperature=(0.0, temperature))
        assert (int(out["segments"][0][-1]["result"][0]) == PREVIOUS) is follows


def test_copies_are_drawn_apart():
    out = descant.generate(
        whisper(), **recordings(60), **LONG, temperature=0.9, num_return_sequences=3, seed=4
    )
    lines = {tuple(line) for line in out["sequences"].tolist()}
    assert len(lines) == 3
    again = descant.generate(
        whisper(), **recordings(60), **LONG, temperature=0.9, num_return_sequences=3, seed=4
    )
    assert torch.equal(out["sequences"], again["sequences"])


def test_every_window_and_attempt_has_its_own_seed(monkeypatch):
    from descant.api.whisper.fallback import WindowDecoder

    seeds = []
    decode = WindowDecoder.decode

    def watched(self, configs, states, prompts):
        seeds.extend(config.seed for config in configs)
        return decode(self, configs, states, prompts)

    monkeypatch.setattr(WindowDecoder, "decode", watched)
    call = {**LONG, "temperature": (0.3, 0.6), "logprob_threshold": 100.0, "seed": 9}
    descant.generate(whisper(), **recordings(90), **call)
    assert len(seeds) == len(set(seeds)) > 4
    assert seeds[0] == 9
    assert derive_seed(9, 0, 0) == 9
    assert len({derive_seed(9, turn, attempt) for turn in range(20) for attempt in range(6)}) == 120


def test_a_transcript_that_repeats_itself_shrinks():
    assert compression_ratio([7] * 100, 51864) > 5
    assert compression_ratio(list(range(100)), 51864) < 2
    plain = b"".join(token.to_bytes(2, "little") for token in (1, 2, 3))
    assert compression_ratio([1, 2, 3], 51864) == len(plain) / len(zlib.compress(plain))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"temperature": ()}, "`temperature` must be a number or a non-empty list"),
        ({"temperature": (0.0, -1.0)}, "`temperature` must be"),
        ({"temperature": 0.5, "do_sample": False}, "`temperature` must be 0 while `do_sample` is False"),
        ({"temperature": 0.0, "do_sample": True}, "`temperature` must be > 0 while `do_sample` is True"),
        ({"top_k": 5}, "`top_k` has no use while `do_sample` is False"),
        ({"no_speech_threshold": 0.5}, "`no_speech_threshold` needs `logprob_threshold`"),
        ({"no_speech_threshold": -0.5, "logprob_threshold": -1}, "`no_speech_threshold` must be >= 0"),
        ({"logprob_threshold": "low"}, "`logprob_threshold` must be a number, got 'low'"),
        ({"temperature": (0.0, 0.5), "return_dict_in_generate": True}, "`temperature` must be one number"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        descant.generate(whisper(), **recordings(32), **call)


def test_silence_needs_its_token():
    model = changed(whisper(), no_timestamps_token_id=None)
    assert model.generation_config.eos_token_id != TIMELESS
    with pytest.raises(ConfigError, match="`no_speech_threshold` needs `no_timestamps_token_id`"):
        descant.generate(model, **recordings(32), no_speech_threshold=0.5, logprob_threshold=-1.0)
