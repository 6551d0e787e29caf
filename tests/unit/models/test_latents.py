"""Models that predict a latent in a step: the latents of their own generate(), from our loop."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import descant
from descant.engine.latent_requests import latent_requests
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Failed, Finished, Session
from descant.models.audio.latents import (
    LATENT_INPUT,
    EndOfSpeech,
    LatentModel,
    audio_latents,
    is_latent_model,
)
from tools.sweep.media import subject
from tools.sweep.subject import Entry, Subject

KINDS = {
    "pocket_tts": "PocketTTSForConditionalGeneration",
    "gradium_phonon_tts": "GradiumPhononTTSForConditionalGeneration",
}
NEVER = 1e9  # a threshold that no logit exceeds
GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_threshold": NEVER, "frames_after_eos": 1}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.7}


@cache
def built(kind: str) -> Subject:
    """In float64: each frame of a random model multiplies the rounding of the frames before."""
    made = subject(Entry("text-to-audio", kind, KINDS[kind]))
    made.model.double()
    return made


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, recwarn: pytest.WarningsRecorder) -> Subject:
    """A small model and its prompts; it warns of what does not matter here."""
    return built(request.param)


def agree(model: Any, inputs: dict[str, Any], **asked: Any) -> Any:
    """Both generate() give the same latents from the same state of torch's generator; ours."""
    torch.manual_seed(5)
    expected = model.generate(**inputs, **asked)
    torch.manual_seed(5)
    got = descant.generate(model, **inputs, **asked)
    check_equal(expected, got)
    return got


def check_equal(expected: Any, got: Any) -> None:
    """The outputs are equal, latents within rounding."""
    assert type(got) is type(expected)
    if isinstance(expected, list):
        assert [one.shape for one in got] == [one.shape for one in expected]
        for one, other in zip(expected, got, strict=True):
            assert torch.allclose(one, other, atol=1e-6, rtol=1e-6)
        return
    assert torch.equal(got.sequences, expected.sequences)
    assert torch.equal(got.audio_latents_mask, expected.audio_latents_mask)
    assert got.audio_latents.dtype == expected.audio_latents.dtype
    assert torch.allclose(got.audio_latents, expected.audio_latents, atol=1e-6, rtol=1e-6)


def config(**given: Any) -> descant.GenerationConfig:
    return descant.GenerationConfig(max_new_tokens=8, **given)


def settings(**given: Any) -> dict[str, Any]:
    return {"eos_threshold": NEVER, "frames_after_eos": 1, **given}


def run(session: Session) -> dict[int, Finished]:
    """The events of all requests of a session, which must not fail."""
    events = [event for event in session.drain() if isinstance(event, Finished | Failed)]
    assert not [event for event in events if isinstance(event, Failed)]
    return {event.request: event for event in events if isinstance(event, Finished)}


def latents_of(model: Any, request: Any) -> Tensor:
    return audio_latents(model, request.inputs[LATENT_INPUT])


# ------------------------------------------------------------------------ generate()
def test_greedy_latents_are_those_of_the_models_own_generate(case: Subject) -> None:
    for prompt in case.prompts:
        (latents,) = agree(case.model, prompt, **GREEDY)
        assert latents.shape == (8, case.model.config.latent_dim)
    assert case.batch is not None
    agree(case.model, case.batch, **GREEDY)


def test_sampled_latents_have_the_noise_of_torchs_generator(case: Subject) -> None:
    assert case.batch is not None
    drawn = agree(case.model, case.batch, **SAMPLED)
    greedy = descant.generate(case.model, **case.batch, **GREEDY)
    assert not torch.allclose(drawn[0], greedy[0], atol=0.1)
    agree(case.model, case.prompts[0], **SAMPLED)
    assert len(agree(case.model, case.batch, **SAMPLED, num_return_sequences=2)) == 6


def test_noise_does_not_depend_on_when_other_rows_end(case: Subject) -> None:
    """Ended rows leave the table here and run on in transformers, which draws for all of them."""
    assert case.batch is not None
    ends = {"eos_threshold": -NEVER, "min_frames_before_eos": 1, "frames_after_eos": torch.tensor([0, 6, 3])}
    got = agree(case.model, case.batch, **{**SAMPLED, **ends})
    assert [len(one) for one in got] == [2, 8, 5]


@pytest.mark.parametrize("after", [2, [0, 1, 4]])
@pytest.mark.parametrize("first", [0, 3])
def test_speech_ends_where_it_ends_in_transformers(case: Subject, after: Any, first: int) -> None:
    assert case.batch is not None
    probe = case.model.generate(
        **case.batch, **GREEDY, output_scores=True, return_dict_in_generate=True
    ).scores
    threshold = float(torch.stack(probe)[first:].max(0).values.min()) - 1e-3  # each row exceeds it
    counts: list[set[int]] = []
    for shift in (0.0, -0.5, -1.0, -1.5):
        asked = {
            **GREEDY,
            "max_new_tokens": 12,
            "eos_threshold": threshold + shift,
            "min_frames_before_eos": first,
            "frames_after_eos": torch.tensor(after),
        }
        got = agree(case.model, case.batch, **asked, return_dict_in_generate=True, output_scores=True)
        counts.append(set(got.audio_latents_mask.sum(1).tolist()))
        expected = case.model.generate(
            **case.batch, **asked, return_dict_in_generate=True, output_logits=True
        ).logits
        for frame, (one, other) in enumerate(zip(expected, got.scores, strict=True)):
            is_running = got.audio_latents_mask[:, frame].bool()
            assert torch.allclose(one[is_running], other[is_running], atol=1e-6, rtol=1e-6)
            assert not other[~is_running].any()
    assert max(map(len, counts)) > 1  # rows of one batch end at different frames
    assert len(set().union(*counts)) > 1


@pytest.mark.parametrize(
    ("logits", "rule", "ends"),
    [
        ([9.0], EndOfSpeech(0, 0), True),
        ([9.0, 9.0], EndOfSpeech(0, 0), False),  # it has ended before
        ([9.0, -1.0, -1.0], EndOfSpeech(0, 2), True),
        ([9.0, 9.0], EndOfSpeech(0, 1, min_frames=1), False),
        ([9.0, 9.0, -1.0], EndOfSpeech(0, 1, min_frames=1), True),
        ([0.0], EndOfSpeech(0, 0), False),  # equal is not above
        ([9.0], EndOfSpeech(0, -1), False),  # as in transformers, it never ends
    ],
)
def test_the_frame_that_ends_speech(logits: list[float], rule: EndOfSpeech, ends: bool) -> None:
    assert rule.is_last(logits) is ends


def test_a_call_without_a_length_has_the_length_of_the_models_own(case: Subject) -> None:
    asked = {name: value for name, value in GREEDY.items() if name != "max_new_tokens"}
    prompt = {name: value[:, -3:] for name, value in case.prompts[0].items()}
    got = descant.generate(case.model, **prompt, **asked)
    expected = case.model.generate(**prompt, **asked)
    assert len(got[0]) == len(expected[0]) > 30
    agree(case.model, case.prompts[0], **{**asked, "max_length": 13})


def test_outputs_are_lists_or_objects(case: Subject) -> None:
    assert case.batch is not None
    agree(case.model, case.batch, **GREEDY)
    got = agree(case.model, case.batch, **GREEDY, return_dict_in_generate=True)
    assert got.scores is None
    assert got.logits is None
    got = agree(case.model, case.batch, **GREEDY, return_dict_in_generate=True, output_logits=True)
    assert len(got.logits) == 8
    assert got.scores is None


def with_voices(case: Subject) -> dict[str, Any]:
    """The padded batch with voices of 2 and 4 frames in the second and third row, and none in the first."""
    assert case.batch is not None
    own = case.model.config
    torch.manual_seed(1)
    ids, mask = case.batch["input_ids"].clone(), case.batch["attention_mask"]
    ids[1, 1:3] = own.audio_prompt_token_id
    ids[2, 4:8] = own.audio_prompt_token_id
    size = getattr(own, "audio_prompt_dim", own.latent_dim)
    frames = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "audio_prompt_latents": torch.randn(2, 4, size),
        "audio_prompt_latents_mask": frames,
    }


def test_a_voice_is_read_with_the_prompt(case: Subject) -> None:
    batch = with_voices(case)
    got = agree(case.model, batch, **GREEDY)
    silent = descant.generate(
        case.model, **{**batch, "audio_prompt_latents": 0 * batch["audio_prompt_latents"]}, **GREEDY
    )
    assert torch.allclose(got[0], silent[0], atol=1e-6)  # has no voice
    assert not torch.allclose(got[2], silent[2], atol=0.1)
    alone = {name: batch[name][2:] for name in ("input_ids", "attention_mask")}
    agree(case.model, {**alone, "audio_prompt_latents": batch["audio_prompt_latents"][1:]}, **GREEDY)
    short = {**batch, "audio_prompt_latents_mask": torch.ones(2, 4, dtype=torch.long)}
    with pytest.raises(descant.InputError, match="a frame for each of the 6 voice positions"):
        descant.generate(case.model, **short, **GREEDY)


def cached_voice(case: Subject, rows: int) -> Any:
    """A cache that holds a voice of four frames."""
    own = case.model.config
    torch.manual_seed(2)
    voice = torch.randn(1, 4, getattr(own, "audio_prompt_dim", own.latent_dim)).expand(rows, -1, -1)
    past = transformers.DynamicCache(config=own)
    ids = torch.full((rows, 4), own.audio_prompt_token_id)
    with torch.no_grad():
        case.model(input_ids=ids, audio_prompt_latents=voice, past_key_values=past, use_cache=True)
    return past


def test_a_cached_voice_comes_before_the_text(case: Subject) -> None:
    assert case.batch is not None
    expected = case.model.generate(**case.batch, **GREEDY, past_key_values=cached_voice(case, 3))
    past = cached_voice(case, 3)
    check_equal(expected, descant.generate(case.model, **case.batch, **GREEDY, past_key_values=past))
    assert past.get_seq_length() == 4  # unlike in transformers, it can serve again
    one = cached_voice(case, 1)
    check_equal(expected, descant.generate(case.model, **case.batch, **GREEDY, past_key_values=one))
    without = descant.generate(case.model, **case.batch, **GREEDY)
    assert not torch.allclose(without[0], expected[0], atol=0.1)
    with pytest.raises(descant.InputError, match="one row, or one for each of 3 prompts"):
        descant.generate(case.model, **case.batch, **GREEDY, past_key_values=cached_voice(case, 2))
    with pytest.raises(descant.InputError, match="use_cache=False"):
        descant.generate(case.model, **case.batch, **GREEDY, past_key_values=one, use_cache=False)


def test_without_a_cache_whole_rows_are_fed(case: Subject) -> None:
    agree(case.model, with_voices(case), **GREEDY, use_cache=False)


def test_flow_steps_and_a_head_that_maps_noise_at_once(case: Subject) -> None:
    agree(case.model, case.prompts[0], **SAMPLED, num_flow_steps=3)
    model = copy.deepcopy(case.model)
    model.config.flow_head_config.flow_type = "drifting"
    drifting = agree(model, case.prompts[0], **SAMPLED)
    assert not torch.allclose(drifting[0], agree(case.model, case.prompts[0], **SAMPLED)[0], atol=0.1)


def test_settings_may_be_in_a_config(case: Subject) -> None:
    prompt = case.prompts[0]
    theirs = transformers.GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.5)
    theirs.eos_threshold, theirs.num_flow_steps = -NEVER, 2
    agree(case.model, prompt, generation_config=theirs, frames_after_eos=0, min_frames_before_eos=2)
    ours = descant.GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.5, seed=3)
    got = descant.generate(case.model, **prompt, generation_config=ours, **settings())
    again = descant.generate(
        case.model, **prompt, max_new_tokens=5, do_sample=True, temperature=0.5, seed=3, **settings()
    )
    assert torch.equal(got[0], again[0])


def test_a_method_of_the_model_gives_the_same(case: Subject) -> None:
    model = copy.copy(case.model)
    expected = case.model.generate(**case.prompts[0], **GREEDY)
    descant.attach(model)
    check_equal(expected, model.generate(**case.prompts[0], **GREEDY))


def test_the_users_model_is_unchanged(case: Subject) -> None:
    model = case.model
    before = dict(vars(model)), copy.deepcopy(model.generation_config), copy.deepcopy(model.config)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    descant.generate(model, **with_voices(case), **SAMPLED)
    assert type(model) is getattr(transformers, type(model).__name__)
    assert vars(model).keys() == before[0].keys()
    assert model.generation_config.to_dict() == before[1].to_dict()
    assert vars(model.generation_config).keys() == vars(before[1]).keys()
    assert model.config.to_dict() == before[2].to_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


# ------------------------------------------------------------------------ seeds
def test_seeded_rows_are_what_they_are_alone(case: Subject) -> None:
    assert case.batch is not None
    joint = descant.generate(case.model, **case.batch, **SAMPLED, seed=[7, 8, 7])
    for index, (prompt, seed) in enumerate(zip(case.prompts, (7, 8, 7), strict=True)):
        torch.manual_seed(index)  # of no effect
        (alone,) = descant.generate(case.model, **prompt, **SAMPLED, seed=seed)
        assert torch.allclose(alone, joint[index], atol=1e-6, rtol=1e-6)
    several = descant.generate(case.model, **case.batch, **SAMPLED, seed=[7, 8, 7], num_return_sequences=2)
    for row, one in enumerate(joint):
        assert torch.allclose(several[2 * row], one, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(several[2 * row + 1], one, atol=0.1)
    (other,) = descant.generate(case.model, **case.prompts[0], **SAMPLED, seed=9)
    assert not torch.allclose(other, joint[0], atol=0.1)


# ------------------------------------------------------------------------ sessions
def test_a_request_that_joins_later_has_the_same_latents(case: Subject) -> None:
    sampled = config(do_sample=True, seed=4)
    alone = []
    for prompt in case.prompts:
        session = Session(LatentModel(case.model))
        requests = latent_requests(case.model, sampled, **prompt, **settings())
        session.admit(*requests)
        run(session)
        alone += [latents_of(case.model, request) for request in requests]
    session = Session(LatentModel(case.model))
    joined = []
    for prompt, steps in zip(case.prompts, (3, 2, 0), strict=True):
        joined += latent_requests(case.model, sampled, **prompt, **settings())
        session.admit(joined[-1])
        for _ in range(steps):
            session.step()
    assert [len(one.inputs[LATENT_INPUT].latents) for one in joined] == [5, 2, 0]
    run(session)
    for one, request in zip(alone, joined, strict=True):
        assert len(one) == 8
        assert torch.allclose(one, latents_of(case.model, request), atol=1e-6, rtol=1e-6)


def test_requests_without_a_seed_draw_one_by_torchs_generator(case: Subject) -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        requests = latent_requests(case.model, config(do_sample=True), **case.prompts[0], **settings())
        session = Session(LatentModel(case.model))
        session.admit(*requests)
        torch.manual_seed(0)  # of no effect: the seed is drawn already
        run(session)
        drawn.append(latents_of(case.model, requests[0]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], drawn[2], atol=0.1)


def test_requests_of_different_settings_share_a_session(case: Subject) -> None:
    """Among them one with a voice, one with a cached voice, and one with more flow steps."""
    voiced, text = with_voices(case), case.prompts[0]
    parts = [
        (dict(text), {"num_flow_steps": 3}),
        ({name: value[2:] for name, value in voiced.items() if not name.startswith("audio")}, {}),
        (dict(text), {"eos_threshold": -NEVER, "frames_after_eos": 0, "min_frames_before_eos": 3}),
        (dict(text), {}),
    ]
    parts[1][0]["audio_prompt_latents"] = voiced["audio_prompt_latents"][1:]
    session, requests, expected = Session(LatentModel(case.model)), [], []
    for index, (inputs, more) in enumerate(parts):
        past = [{"past_key_values": cached_voice(case, 1)} if index == 3 else {} for _ in range(2)]
        requests += latent_requests(case.model, config(), **inputs, **settings(**more), **past[0])
        expected += case.model.generate(**inputs, **{**GREEDY, **more}, **past[1])
    session.admit(*requests)
    run(session)
    assert [len(one) for one in expected] == [8, 8, 4, 8]
    check_equal(expected, [latents_of(case.model, request) for request in requests])


def test_a_scheduler_may_preempt(case: Subject) -> None:
    voiced = with_voices(case)
    limits = SchedulerConfig(max_step_tokens=32, num_blocks=6, block_size=4)
    session = Session(LatentModel(case.model), scheduler=limits)
    requests = latent_requests(case.model, config(), **voiced, **settings())
    session.admit(*requests)
    run(session)
    assert session.report().preemptions > 0
    expected = case.model.generate(**voiced, **GREEDY)
    check_equal(expected, [latents_of(case.model, request) for request in requests])


@pytest.mark.parametrize("call", [1, 4])
def test_a_forward_that_is_repeated_after_a_fault_changes_nothing(
    case: Subject, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.batch is not None
    torch.manual_seed(5)
    expected = case.model.generate(**case.batch, **SAMPLED)
    calls = []
    forward = LatentModel._call_model

    def faulty(self: LatentModel, *args: Any) -> Any:
        output = forward(self, *args)  # it has written its latents
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("once")
        return output

    monkeypatch.setattr(LatentModel, "_call_model", faulty)
    torch.manual_seed(5)
    check_equal(expected, descant.generate(case.model, **case.batch, **SAMPLED))
    assert len(calls) > 8


def test_a_sequence_belongs_to_one_running_request(case: Subject) -> None:
    (request,) = latent_requests(case.model, config(), **case.prompts[0], **settings())
    session = Session(LatentModel(case.model))
    session.admit(request)
    with pytest.raises(descant.InputError, match="another running request"):
        session.admit(request)
    with pytest.raises(descant.InputError, match=r"must be the latent sequence.*descant\.sound_request"):
        session.admit(descant.Request([1, 1], config()))
    run(session)
    session.admit(request)
    run(session)
    assert len(request.inputs[LATENT_INPUT].latents) == 8


# ------------------------------------------------------------------------ what has no meaning
REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "eos_token_id": 3,
    "top_k": 5,
    "repetition_penalty": 1.2,
    "stop_strings": "a",
    "max_time": 3.0,
    "prompt_lookup_num_tokens": 2,
    "grammar": {"regex": "a"},
    "output_attentions": True,
    "cache_implementation": "static",
    "logprobs": 1,
    "logits_processor": [lambda ids, scores: scores],
    "stopping_criteria": [lambda ids, scores: True],
    "streamer": object(),
    "trace": True,
    "progress": True,
    "scheduler": SchedulerConfig(),
    "use_model_defaults": False,
    "tokenizer": object(),
    "assistant_model": object(),
    "inputs_embeds": torch.zeros(1, 2, 32),
    "audio_latents": torch.zeros(1, 2, 32),
    "position_ids": torch.zeros(1, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_for_tokens_is_refused_by_name(case: Subject, name: str) -> None:
    asked = {**SAMPLED, "return_dict_in_generate": True, name: REFUSED[name]}
    with pytest.raises(
        (descant.ConfigError, descant.InputError),
        match=f"`{name}` is not supported for {type(case.model).__name__}",
    ):
        descant.generate(case.model, **case.prompts[0], **asked)


def test_prompts_must_be_those_of_the_processor(case: Subject) -> None:
    own, ids = case.model.config, case.prompts[0]["input_ids"].clone()
    with pytest.raises(descant.InputError, match="input_ids"):
        descant.generate(case.model, **GREEDY)
    with pytest.raises(ValueError, match="audio_bos_token_id"):  # the model's own error
        descant.generate(case.model, ids[:, :-1], **GREEDY)
    ids[0, 1] = own.audio_latent_token_id
    with pytest.raises(descant.InputError, match="audio_latent_token_id"):
        descant.generate(case.model, ids, **GREEDY)
    with pytest.raises(descant.InputError, match="seed"):
        descant.generate(case.model, **case.prompts[0], **SAMPLED, seed=[1, 2])
    with pytest.raises(descant.ConfigError, match="use_cache"):
        latent_requests(case.model, config(use_cache=False), **case.prompts[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frames_after_eos", torch.tensor([1, 2])),
        ("frames_after_eos", torch.tensor([1.5])),
        ("num_flow_steps", 0),
        ("min_frames_before_eos", -1),
        ("eos_threshold", "low"),
        ("eos_threshold", float("nan")),
    ],
)
def test_settings_are_checked(case: Subject, name: str, value: Any) -> None:
    with pytest.raises(descant.InputError, match=f"`{name}` must be"):
        descant.generate(case.model, **case.prompts[0], **{**GREEDY, name: value})


def test_a_class_with_another_loop_is_not_taken_for_one_of_these(case: Subject) -> None:
    class Other(type(case.model)):  # type: ignore[misc]
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    model = copy.copy(case.model)
    model.__class__ = Other
    assert is_latent_model(case.model)
    assert not is_latent_model(model)
    assert not is_latent_model(object())
    with pytest.raises(descant.UnsupportedModel, match="_sample"):
        descant.generate(model, **case.prompts[0], **GREEDY)
