"""The long-form loop equals transformers' own on a tiny model, and keeps the laws that theirs does not."""

from __future__ import annotations

import pytest
import torch

import descant
from descant.errors import ConfigError, InputError
from tests.unit.api.whisper.subjects import (
    BINS,
    END,
    WINDOW,
    both,
    changed,
    compared,
    equal,
    recordings,
    whisper,
)

LONG = {"return_timestamps": True, "return_segments": True}


@pytest.mark.ci_cases("3-False", "1-True")
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_ragged_recordings(past, beams):
    sound = recordings(120, 33, 10, 75, seed=beams)
    out = compared(whisper(), **sound, **LONG, condition_on_prev_tokens=past, num_beams=beams, language="en")
    assert max(map(len, out["segments"])) > 3
    assert any(len(line[0]["tokens"]) != line[0]["idxs"][1] for line in out["segments"])


@pytest.mark.parametrize("call", [{}, {"return_timestamps": True}, {"num_beams": 2}, LONG])
def test_what_fits_in_a_window(call):
    compared(whisper(), **recordings(WINDOW, WINDOW), **call)


def test_less_than_a_window_is_filled_up_with_silence():
    compared(whisper(), **recordings(20, 20), language="en", return_timestamps=True)
    sound = recordings(20)["input_features"]
    filled = torch.nn.functional.pad(sound, (0, WINDOW - 20))
    ours = [descant.generate(whisper(), input_features=one, language="en") for one in (sound, filled)]
    assert ours[0].tolist()[0][:20] == ours[1].tolist()[0][:20]


def test_a_short_recording_is_transcribed_to_the_end_of_its_window_for_any_mask():
    sound = recordings(WINDOW, WINDOW)
    sound["attention_mask"][:, 6:] = 0
    seen = []
    call = {"language": "en", "monitor_progress": lambda frames: seen.append(frames.tolist())}
    compared(whisper(), **sound, **LONG, **call)
    assert seen[0] == seen[len(seen) // 2] == [[0, WINDOW]] * 2


def test_tokens_alone_are_those_of_all_segments():
    sound = recordings(140, 50)
    segments = descant.generate(whisper(), **sound, **LONG, language="en")["segments"]
    alone = compared(whisper(), **sound, return_timestamps=True, language="en")
    for line, parts in zip(alone.tolist(), segments, strict=True):
        tokens = [token for part in parts for token in part["tokens"].tolist()]
        assert line == tokens + [END] * (len(line) - len(tokens))


@pytest.mark.parametrize("past", [False, True])
def test_a_batch_equals_its_recordings_one_by_one(past):
    frames = (100, 33, 10, 60)
    sound = recordings(*frames)
    call = {**LONG, "condition_on_prev_tokens": past, "language": "en"}
    together = descant.generate(whisper(), **sound, **call)
    for line, count in enumerate(frames):
        alone = {name: value[line : line + 1] for name, value in sound.items()}
        if count > WINDOW:
            alone = {name: value[..., :count] for name, value in alone.items()}
        single = descant.generate(whisper(), **alone, **call)
        for one, other in zip(single["segments"][0], together["segments"][line], strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            assert (one["start"], one["end"]) == (other["start"], other["end"])


def test_the_mask_also_gives_the_length_of_one_recording():
    sound = recordings(80)
    padded = {
        "input_features": torch.nn.functional.pad(sound["input_features"], (0, 60)),
        "attention_mask": torch.nn.functional.pad(sound["attention_mask"], (0, 60)),
    }
    whole, cut = (descant.generate(whisper(), **one, **LONG, language="en") for one in (sound, padded))
    equal(whole, cut)


def test_a_record_comes_with_each_segment():
    sound = recordings(100, 40)
    theirs, ours = both(
        whisper(), **sound, return_timestamps=True, return_dict_in_generate=True, output_scores=True,
        num_beams=2, language="en",
    )  # fmt: skip
    equal(theirs, ours)
    for wanted, got in zip(theirs["segments"][0], ours["segments"][0], strict=True):
        assert torch.equal(wanted["result"]["sequences"], got["result"]["sequences"])
        assert torch.allclose(wanted["result"]["sequences_scores"], got["result"]["sequences_scores"])
        for one, other in zip(wanted["result"]["scores"], got["result"]["scores"], strict=False):
            assert torch.allclose(one, other, atol=1e-4)


def test_a_single_call_gives_its_record():
    theirs, ours = both(
        whisper(), **recordings(WINDOW, WINDOW), return_dict_in_generate=True, output_scores=True,
        output_logits=True, language="en",
    )  # fmt: skip
    assert torch.equal(theirs.sequences, ours.sequences)
    assert len(theirs.scores) == len(ours.scores)
    assert all(
        torch.allclose(one, other, atol=1e-4) for one, other in zip(theirs.logits, ours.logits, strict=True)
    )


def test_a_unique_call_keeps_prompt_and_end():
    compared(whisper(), **recordings(100, 100), return_timestamps=True, force_unique_generate_call=True)


def test_progress_is_reported():
    calls = ([], [])
    for seen, way in zip(calls, (type(whisper()).generate, descant.generate), strict=True):
        way(
            whisper(), **recordings(100, 40), return_timestamps=True, language="en",
            monitor_progress=lambda frames, seen=seen: seen.append(frames.tolist()),
        )  # fmt: skip
    assert calls[0] == calls[1]
    assert calls[1][0] == [[0, 100], [0, 40]]


def test_encoder_outputs_are_one_window():
    model, sound = whisper(), recordings(WINDOW, WINDOW)["input_features"]
    ready = model.get_encoder()(sound)
    call = {"language": "en", "force_unique_generate_call": True}
    assert torch.equal(
        descant.generate(model, encoder_outputs=ready, **call),
        descant.generate(model, input_features=sound, **call),
    )
    assert descant.generate(model, encoder_outputs=ready, return_timestamps=True).shape[1] <= 28


def test_attached_it_takes_features_first():
    model, sound = changed(whisper()), recordings(100)["input_features"]
    wanted = type(model).generate(model, sound, return_timestamps=True, language="en")
    descant.attach(model)
    try:
        assert torch.equal(model.generate(sound, return_timestamps=True, language="en"), wanted)
    finally:
        descant.detach(model)


def test_the_users_processors_count_in_every_window():
    call = {**recordings(140), **LONG, "language": "en"}
    plain = descant.generate(whisper(), **call)["sequences"]
    text = plain[plain < END]
    common = int(text.mode().values)
    assert (text == common).sum() > 3

    def without(ids, scores):
        return scores.index_fill(1, torch.tensor([common]), -torch.inf)

    out = compared(whisper(), **call, num_beams=2, logits_processor=[without])
    assert common not in out["sequences"]


def test_the_model_is_left_as_it_was():
    model = changed(whisper())
    before = model.generation_config.to_dict()
    features = recordings(100)["input_features"]
    copy = features.clone()
    state = torch.get_rng_state()
    descant.generate(model, features, **LONG, condition_on_prev_tokens=True, num_beams=2)
    assert model.generation_config.to_dict() == before
    assert torch.equal(features, copy)
    assert torch.equal(torch.get_rng_state(), state)


class Watcher:
    def __init__(self):
        self.seen = []

    def put(self, tokens):
        self.seen.append(tokens.reshape(-1).tolist())

    def end(self):
        self.seen.append(None)


def test_a_single_window_can_be_watched():
    watcher = Watcher()
    out = descant.generate(
        whisper(), **recordings(WINDOW), max_new_tokens=4, streamer=watcher, task="translate"
    )
    assert watcher.seen[-1] is None
    shown = [token for some in watcher.seen[1:-1] for token in some]
    assert [token for token in shown if token != END] == out[0].tolist()
    assert len(watcher.seen[0]) == 4, "language detection is not shown"
    with pytest.raises(InputError, match="`streamer` must be None with timestamps or several temperatures"):
        descant.generate(whisper(), **recordings(WINDOW), return_timestamps=True, streamer=watcher)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "`input_features` must be given, or else `encoder_outputs`"),
        ({"input_features": torch.zeros(1, BINS)}, "`input_features` must be a tensor of floats"),
        ({"input_features": torch.zeros(1, 5, 32)}, f"`input_features` must be \\[batch, {BINS}, frames\\]"),
        ({"input_features": torch.zeros(2, BINS, 40)}, "`attention_mask` must be given"),
        ({**recordings(32), "attention_mask": torch.ones(1, 3)}, "`attention_mask` must be of shape"),
        (recordings(40), "`return_timestamps` must be True for audio longer than a window"),
        ({**recordings(32), "num_segment_frames": 3000}, "`num_segment_frames` must be 32"),
        ({**recordings(32), "time_precision": 0}, "`time_precision` must be > 0, got 0"),
        ({**recordings(32), "prompt": "x"}, "`prompt` is neither a generation parameter nor an input"),
        ({**recordings(32), "max_new_tokens": 70}, "`max_new_tokens` must leave room"),
        ({**recordings(32), "num_beams": 2, "num_return_sequences": 2}, "`num_return_sequences` must be 1"),
        ({**recordings(32), "monitor_progress": 1}, "`monitor_progress` must be callable"),
    ],
)  # fmt: skip
def test_what_cannot_be_heard_is_refused(call, message):
    with pytest.raises((ConfigError, InputError), match=message):
        descant.generate(whisper(), **call)


def test_timestamps_need_their_tokens():
    model = changed(whisper(), no_timestamps_token_id=None)
    with pytest.raises(ConfigError, match="`return_timestamps` needs `no_timestamps_token_id`"):
        descant.generate(model, **recordings(40), return_timestamps=True)
    compared(model, **recordings(WINDOW), language="en")
