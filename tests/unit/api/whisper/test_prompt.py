"""The decoder prompt: language, task, timestamps, and previous text."""

from __future__ import annotations

import pytest
import torch

import descant
from descant.errors import ConfigError, InputError
from tests.unit.api.whisper.subjects import (
    END,
    LANGUAGES,
    PREVIOUS,
    START,
    TASKS,
    TIMELESS,
    VOCABULARY,
    both,
    changed,
    compared,
    recordings,
    whisper,
)

SHORT = recordings(32, 32)


def prompts_of(model, **call):
    """The decoder prompt of a single call, by both."""
    theirs, ours = both(model, force_unique_generate_call=True, max_new_tokens=1, **call)
    assert torch.equal(theirs, ours)
    return ours[:, :-1].tolist()


@pytest.mark.parametrize("name", ["german", "de", "<|de|>", "German", "DE"])
def test_a_language_by_its_name_its_code_or_its_token(name):
    wanted = [START, LANGUAGES["<|de|>"], TASKS["transcribe"], TIMELESS]
    assert prompts_of(whisper(), **SHORT, language=name) == [wanted, wanted]


def test_a_language_for_each_recording():
    lines = prompts_of(whisper(), **SHORT, language=["fr", "cantonese"], task="translate")
    assert [line[1] for line in lines] == [LANGUAGES["<|fr|>"], LANGUAGES["<|yue|>"]]
    assert {line[2] for line in lines} == {TASKS["translate"]}


def test_a_language_that_is_not_given_is_heard():
    found = {
        token for seed in range(6) for (_, token, _) in prompts_of(whisper(), **recordings(32, 32, seed=seed))
    }
    assert found <= set(LANGUAGES.values())
    assert len(found) > 1, "recordings in several languages are wanted here"


def test_the_language_of_a_long_recording_is_that_of_its_first_window():
    sound = recordings(90, 20)
    detected = prompts_of(whisper(), **sound, return_timestamps=True)
    first = prompts_of(whisper(), input_features=sound["input_features"][:, :, :32])
    assert [line[1] for line in detected] == [line[1] for line in first]


def test_timestamps_leave_their_token_out():
    assert [line[-1] for line in prompts_of(whisper(), **SHORT, language="en", return_timestamps=True)] == [
        TASKS["transcribe"]
    ] * 2


def test_language_and_task_may_stand_in_the_generation_config():
    model = changed(whisper(), language="fr", task="translate")
    wanted = [START, LANGUAGES["<|fr|>"], TASKS["translate"], TIMELESS]
    assert prompts_of(model, **SHORT) == [wanted, wanted]
    assert prompts_of(model, **SHORT, language="en")[0][1] == LANGUAGES["<|en|>"]


@pytest.mark.parametrize("stamps", [True, False])
@pytest.mark.parametrize(
    "pairs", [[[1, None], [2, TASKS["transcribe"]]], [[1, LANGUAGES["<|en|>"]]], [[1, TIMELESS]]]
)
def test_what_old_checkpoints_force_is_read(pairs, stamps):
    model = changed(whisper(), forced_decoder_ids=pairs)
    lines = prompts_of(model, **SHORT, return_timestamps=stamps)
    assert (TIMELESS in lines[0]) is not stamps
    assert prompts_of(model, **SHORT, language="de")[0][1] == LANGUAGES["<|de|>"]


def test_forced_tokens_must_be_without_gaps():
    model = changed(whisper(), forced_decoder_ids=[[2, 3]])
    with pytest.raises(ConfigError, match="`forced_decoder_ids` must name every position from 1 on"):
        descant.generate(model, **SHORT)


def test_a_model_of_one_language():
    names = ("lang_to_id", "task_to_id")
    model = changed(whisper(), is_multilingual=False, **dict.fromkeys(names))
    assert prompts_of(model, **SHORT) == [[START, TIMELESS]] * 2
    assert prompts_of(model, **SHORT, return_timestamps=True) == [[START]] * 2
    with pytest.raises(ConfigError, match="`language` must be None for a model of one language, got 'en'"):
        descant.generate(model, **SHORT, language="en")
    with pytest.raises(ConfigError, match="`task` needs `task_to_id`"):
        descant.generate(model, **SHORT, task="translate", is_multilingual=True)


def test_a_prompt_stands_before_the_beginning():
    prompt = torch.tensor([PREVIOUS, 8, 9])
    assert prompts_of(whisper(), **SHORT, language="en", prompt_ids=prompt)[0][:4] == [PREVIOUS, 8, 9, START]


@pytest.mark.parametrize("how", ["first-segment", "all-segments"])
def test_a_prompt_and_previous_text(how):
    sound = recordings(100, 30, 70)
    out = compared(
        whisper(), **sound, language="en", return_timestamps=True, return_segments=True,
        condition_on_prev_tokens=True, prompt_ids=torch.tensor([PREVIOUS, 8, 9]),
        prompt_condition_type=how, max_new_tokens=24,
    )  # fmt: skip
    later = out["segments"][0][-1]["result"][: out["segments"][0][-1]["idxs"][0]].tolist()
    assert later[0] == PREVIOUS
    assert (8 in later[1:3]) or how == "first-segment"


def test_without_a_token_of_its_own_the_past_is_marked_by_the_last_but_one_that_is_suppressed():
    model = changed(whisper(), prev_sot_token_id=None)
    options = {"return_timestamps": True, "condition_on_prev_tokens": True, "language": "en"}
    out = compared(model, **recordings(120), return_segments=True, **options)
    assert out["segments"][0][-1]["result"][0] == PREVIOUS


def test_a_prompt_given_whole_begins_the_first_window_only():
    prompt = torch.tensor([[START, LANGUAGES["<|en|>"], TASKS["transcribe"], 9]])
    sound = recordings(100)
    out = compared(
        whisper(), **sound, decoder_input_ids=prompt, return_timestamps=True, return_segments=True,
        language="de",
    )  # fmt: skip
    first, last = out["segments"][0][0]["result"], out["segments"][0][-1]["result"]
    assert first[:4].tolist() == prompt[0].tolist()
    assert last[1] == LANGUAGES["<|de|>"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"language": "xx"}, "`language` must be a language of the model, got 'xx': choose from de, en"),
        ({"language": "spanish"}, "`language` must be a language of the model"),
        ({"language": ["en"]}, "`language` must be one string, or a list of 2 with one for each audio"),
        ({"language": ["en", None]}, "`language` must be a name like 'english' or a code like 'en'"),
        ({"task": "sing"}, "`task` must be one of 'transcribe', 'translate', got 'sing'"),
        ({"is_multilingual": "yes"}, "`is_multilingual` must be True or False, got 'yes'"),
        ({"prompt_ids": torch.zeros(1, 2)}, "`prompt_ids` must be one sequence of token ids"),
        ({"prompt_ids": [VOCABULARY]}, f"`prompt_ids` must hold ids from 0 to {VOCABULARY - 1}"),
        ({"prompt_ids": [1] * 70}, "`prompt_ids` must make a prompt shorter than the model's 64 positions"),
        ({"prompt_condition_type": "none"}, "`prompt_condition_type` must be one of"),
        ({"prompt_condition_type": "all-segments"}, "needs `condition_on_prev_tokens`"),
        ({"decoder_input_ids": torch.tensor([[END]])}, "`decoder_input_ids` must be \\[2, length\\]"),
    ],
)
def test_an_invalid_prompt_is_refused(call, message):
    with pytest.raises((ConfigError, InputError), match=message):
        descant.generate(whisper(), **SHORT, **call)
