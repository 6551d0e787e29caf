"""Models with sound beside every token: the tokens of transformers, in any company."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import descant
from descant.models import aligned_sound
from descant.models.kv_shape import kv_shape_of
from descant.models.model_adapter import as_model
from tools.sweep.catalogue import entries
from tools.sweep.media import noise, subject
from tools.sweep.subject import Subject

KYUTAI = "KyutaiSpeechToTextForConditionalGeneration"
VOXTRAL = "VoxtralRealtimeForConditionalGeneration"
BOTH = pytest.mark.parametrize("name", [KYUTAI, VOXTRAL])
FRAMES = (14, 9, 11)  # frames or steps of the sounds of a ragged batch


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Tiny configurations make transformers warn about what does not matter here."""


@cache
def tiny(name: str) -> Subject:
    """A small model of that class and its prompts."""
    return subject(next(entry for entry in entries() if entry.name == name))


@cache
def ragged(name: str) -> list[dict[str, Any]]:
    """Prompts whose sounds are of different length."""
    model = tiny(name).model
    if name == KYUTAI:
        size = model.config.codec_config.frame_size
        return [
            {"input_values": noise(1, 1, size * count, seed=100 + index)}
            for index, count in enumerate(FRAMES)
        ]
    bins = model.config.audio_config.num_mel_bins
    return [
        {
            "input_ids": torch.tensor([[5 + index, 9, 30][: 2 + index % 2]]),
            # The last step is incomplete.
            "input_features": noise(1, bins, 8 * count - 3, seed=200 + index),
        }
        for index, count in enumerate(FRAMES)
    ]


def request(name: str, prompt: Mapping[str, Any], **fields: Any) -> descant.Request:
    """A prompt as a request of a session."""
    ids = prompt.get("input_ids", torch.tensor([[tiny(name).model.generation_config.bos_token_id]]))
    inputs = {key: value for key, value in prompt.items() if key not in ("input_ids", "attention_mask")}
    return descant.Request(ids[0], descant.GenerationConfig(**fields), inputs)


def new_tokens(name: str, prompt: Mapping[str, Any], **fields: Any) -> list[int]:
    """The new tokens of a prompt by transformers' own generate()."""
    count = prompt["input_ids"].shape[1] if "input_ids" in prompt else 1
    return tiny(name).model.generate(**prompt, **fields)[0, count:].tolist()


def run(session: descant.Session, *, after: int = 0, late: Any = None) -> dict[int, list[int]]:
    """The tokens of each request of a session; `late` is admitted after some steps."""
    tokens: dict[int, list[int]] = {}
    steps = 0
    while len(session) or late is not None:
        if late is not None and steps == after:
            session.admit(late)
            late = None
        for event in session.step():
            if isinstance(event, descant.Finished):
                tokens[event.request] = event.hypotheses[0].tokens.tolist()
        steps += 1
    return tokens


def agree(model: Any, inputs: Mapping[str, Any], **fields: Any) -> Tensor:
    """Both generate() return the same sequences; the sequences."""
    torch.manual_seed(3)
    expected = model.generate(**inputs, **fields)
    torch.manual_seed(3)
    got = descant.generate(model, **inputs, **fields)
    assert torch.equal(expected, got)
    return got


# ------------------------------------------------------------------------ the tokens of transformers
@BOTH
def test_the_tokens_and_logits_of_transformers(name: str) -> None:
    model = tiny(name).model
    asked = {"output_logits": True, "return_dict_in_generate": True}
    for prompt in (*tiny(name).prompts, *ragged(name)):
        expected, got = model.generate(**prompt, **asked), descant.generate(model, **prompt, **asked)
        assert torch.equal(expected.sequences, got.sequences)
        assert len(expected.logits) == len(got.logits)
        assert torch.allclose(torch.stack(expected.logits), torch.stack(got.logits), atol=1e-4)
        silent = {key: value * 0 if value.is_floating_point() else value for key, value in prompt.items()}
        assert not torch.equal(got.sequences, descant.generate(model, **silent))


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.5},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
        {"max_new_tokens": 4},
        {"max_new_tokens": 100},
        {"use_cache": False, "max_new_tokens": 5},
    ],
    ids=str,
)
def test_every_method_gives_the_tokens_of_transformers(name: str, fields: dict[str, Any]) -> None:
    for prompt in (*tiny(name).prompts[:2], ragged(name)[1]):
        agree(tiny(name).model, prompt, **fields)


@BOTH
def test_drafts_change_no_token(name: str) -> None:
    model, prompt = tiny(name).model, tiny(name).prompts[0]
    expected = model.generate(**prompt)
    for fields in (
        {"prompt_lookup_num_tokens": 3},
        {"suffix_lookup_num_tokens": 3},
        {"assistant_model": model},
        {"assistant_early_exit": 1},
    ):
        out = descant.generate(model, **prompt, **fields, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        if "assistant_model" in fields:  # it drafts what the model says: all of it is right
            assert out.speculation[0].acceptance_rate == 1
            assert sum(out.speculation[0].drafted)


@BOTH
@pytest.mark.parametrize("kind", ["paged", "static", "quantized"])
def test_every_cache_gives_the_tokens_of_transformers(name: str, kind: str) -> None:
    prompt = tiny(name).prompts[0]
    got = descant.generate(tiny(name).model, **prompt, cache_implementation=kind)
    assert torch.equal(got, tiny(name).model.generate(**prompt))


@BOTH
def test_other_ways_in(name: str) -> None:
    model, prompt = tiny(name).model, ragged(name)[0]
    expected = model.generate(**prompt)
    assert torch.equal(model.generate(**prompt, custom_generate=descant.generate), expected)
    beams = model.generate(**prompt, num_beams=3)
    assert torch.equal(model.generate(**prompt, num_beams=3, custom_generate=descant.generate), beams)
    descant.attach(model)
    try:
        assert torch.equal(model.generate(**prompt, seed=1), expected)
    finally:
        descant.detach(model)
    streamed = [token for event in descant.stream(model, **prompt) for token in event.token_ids]
    assert streamed == expected[0, -len(streamed) :].tolist()
    out = descant.generate(model, **prompt, trace=True)
    assert len(out.trace.steps) == len(streamed)


@BOTH
def test_eager_attention_returns_its_weights(name: str) -> None:
    model, prompt = tiny(name).model, ragged(name)[0]
    out = descant.generate(model, **prompt, output_attentions=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**prompt))
    window = model.config.get_text_config(decoder=True).sliding_window
    last = out.attentions[-1][0][0, 0, -1]
    assert len(last) > window
    assert int((last > 0).sum()) == window


# ------------------------------------------------------------------------ rows beside each other
def test_a_padded_batch_of_the_processor_is_read_as_transformers_reads_it() -> None:
    model = tiny(KYUTAI).model
    extract = transformers.KyutaiSpeechToTextFeatureExtractor(
        sampling_rate=24, audio_delay_seconds=0.5, audio_silence_prefix_seconds=1.0
    )
    sounds = [noise(70, seed=1).numpy(), noise(40, seed=2).numpy()]
    batch = extract(sounds, sampling_rate=24, return_tensors="pt")
    assert not bool(batch["padding_mask"].all())
    got = agree(model, batch)
    assert not torch.equal(got[0], got[1])


def test_a_padded_batch_of_texts_gives_what_each_gives_alone() -> None:
    model = tiny(VOXTRAL).model
    bins = model.config.audio_config.num_mel_bins
    sounds = noise(2, bins, 96, seed=7)
    ids, mask = torch.tensor([[0, 5, 9], [6, 9, 30]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    delay = torch.tensor(2)  # as the processor returns it
    asked = {"max_new_tokens": 6, "num_delay_tokens": delay}
    got = descant.generate(model, input_ids=ids, attention_mask=mask, input_features=sounds, **asked)
    for row, prompt in enumerate((ids[:1, 1:], ids[1:])):
        alone = model.generate(input_ids=prompt, input_features=sounds[row : row + 1], **asked)
        assert got[row, 3:].tolist() == alone[0, prompt.shape[1] :].tolist()


def test_rows_of_different_delay_run_beside_each_other() -> None:
    prompt, model = ragged(VOXTRAL)[0], tiny(VOXTRAL).model
    session = descant.Session(model)
    delays = (2, 6, 30)
    session.admit(*(request(VOXTRAL, {**prompt, "num_delay_tokens": delay}) for delay in delays))
    got = run(session)
    expected = [new_tokens(VOXTRAL, prompt, num_delay_tokens=delay) for delay in delays]
    assert list(got.values()) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(delays)
    assert not session.model._streams  # the sound leaves with its request


# ------------------------------------------------------------------------ what a position hears
@pytest.mark.parametrize("window", [None, 1, 3, 4, 50])
def test_codes_of_every_window_are_those_of_transformers(window: int | None) -> None:
    model = tiny(KYUTAI).model
    heard: list[Tensor] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: heard.append(kwargs["input_ids"][0, :, 1:]), with_kwargs=True
    )
    if window is not None:
        model.generation_config.audio_window_size = window
    try:
        for prompt in ragged(KYUTAI):
            heard.clear()
            expected = model.generate(**prompt)
            codes = as_model(model)._sound.encode({**prompt, "audio_window_size": window}).values
            assert torch.equal(torch.cat(heard), codes[: len(heard)])
            assert torch.equal(descant.generate(model, **prompt), expected)
    finally:
        hook.remove()
        if window is not None:
            del model.generation_config.audio_window_size


def test_the_window_of_a_given_config_and_of_a_request() -> None:
    model, prompt = tiny(KYUTAI).model, ragged(KYUTAI)[0]
    config = transformers.GenerationConfig(audio_window_size=1, pad_token_id=3, bos_token_id=160)
    expected = model.generate(**prompt, generation_config=config)
    assert not torch.equal(expected, model.generate(**prompt))
    assert torch.equal(descant.generate(model, **prompt, generation_config=config), expected)
    session = descant.Session(model)
    session.admit(request(KYUTAI, {**prompt, "audio_window_size": 1}), request(KYUTAI, prompt))
    got = run(session)
    assert got[0] == expected[0, 1:].tolist()
    assert got[1] == new_tokens(KYUTAI, prompt)


@pytest.mark.parametrize("positions", [1, 3, 256])
def test_embeddings_are_those_of_the_incremental_run(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_sound, "_ENCODED_POSITIONS", positions)
    model, prompt = tiny(VOXTRAL).model, ragged(VOXTRAL)[0]
    assert model.config.audio_config.sliding_window < FRAMES[0] * model.config.downsample_factor
    heard: list[Tensor] = []
    encode = type(model.model).get_audio_features

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = encode(model.model, *args, **kwargs)
        heard.append(output.pooler_output[0])
        return output

    with monkeypatch.context() as patch:
        patch.setattr(model.model, "get_audio_features", recorded, raising=False)
        model.generate(**prompt)
    steps = torch.cat(heard)
    assert len(steps) == FRAMES[0] - 1  # the last token is never fed
    stream = as_model(model)._sound.encode(prompt).values
    assert torch.allclose(stream[: len(steps)], steps, atol=1e-4)


@BOTH
def test_unconditional_rows_hear_nothing(name: str) -> None:
    model, prompt = tiny(name).model, ragged(name)[0]
    key = sound_name(name)

    def first_scores(shift: int, scale: float) -> Tensor:
        other = {**prompt, key: torch.roll(prompt[key], shift, -1)}
        if name == KYUTAI:  # its first token is chosen before any sound
            other["input_ids"] = torch.tensor([[160, 7]])
        asked = {"guidance_scale": scale, "output_scores": True, "return_dict_in_generate": True}
        return descant.generate(model, **other, **asked).scores[0].log_softmax(-1)

    # At a scale of almost 0 only the unconditional row counts.
    assert torch.allclose(first_scores(0, 1e-7), first_scores(5, 1e-7), atol=1e-3)
    assert not torch.allclose(first_scores(0, 1.5), first_scores(5, 1.5), atol=1e-3)
    sound = as_model(model)._stream_of(-1).values
    assert bool((sound == (model.config.audio_pad_token_id if name == KYUTAI else 0)).all())


# ------------------------------------------------------------------------ the end of the sound
@BOTH
def test_a_row_ends_with_its_sound(name: str) -> None:
    model, prompt = tiny(name).model, ragged(name)[1]
    for fields in ({}, {"max_new_tokens": 100}, {"max_length": 100}):
        session = descant.Session(model)
        session.admit(request(name, prompt, **fields))
        assert run(session)[0] == new_tokens(name, prompt)
    assert descant.generate(model, **prompt, max_length=6).shape[1] == 6
    model.generation_config.max_length = 7  # of the model: transformers does not read it either
    try:
        assert agree(model, prompt).shape[1] > 7
    finally:
        model.generation_config.max_length = None
    text = descant.GenerationConfig().explain(model)
    assert "the end of its sound" in text
    assert "20 new tokens" not in text


@BOTH
def test_a_minimum_beyond_the_sound_is_refused(name: str) -> None:
    with pytest.raises(descant.ConfigError, match="min_new_tokens"):
        descant.generate(tiny(name).model, **ragged(name)[1], min_new_tokens=90, max_new_tokens=100)


# ------------------------------------------------------------------------ what is refused
def sound_name(name: str) -> str:
    """The input that holds the sound."""
    return "input_values" if name == KYUTAI else "input_features"


def sounds(name: str) -> Iterator[Tensor]:
    """The sound of a prompt, piece by piece."""
    yield ragged(name)[0][sound_name(name)]


@BOTH
def test_a_request_without_its_whole_sound_is_refused(name: str) -> None:
    model, key = tiny(name).model, sound_name(name)
    prompt = dict(ragged(name)[0])
    session = descant.Session(model)
    for value in (sounds(name), None, prompt[key][0], prompt[key].long(), "sound"):
        with pytest.raises(descant.InputError, match=key):
            descant.generate(model, **{**prompt, key: value})
        with pytest.raises(descant.InputError, match=key):
            session.admit(request(name, {**prompt, key: value}))
        assert session.supports(request(name, {**prompt, key: value})) is not None
    with pytest.raises(descant.InputError, match="generator"):
        descant.generate(model, **{**prompt, key: sounds(name)})
    with pytest.raises(descant.InputError, match="prompt"):
        session.admit(request(name, {**prompt, "input_ids": torch.ones(1, 50, dtype=torch.long)}))
    with pytest.raises(descant.InputError, match="pixel_values"):
        session.admit(request(name, {**prompt, "pixel_values": torch.ones(1, 3)}))
    with pytest.raises(descant.InputError, match="inputs_embeds"):
        descant.generate(model, inputs_embeds=torch.zeros(1, 3, 32))
    assert not len(session)
    assert not session.model._streams


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (KYUTAI, "input_values", torch.zeros(1, 1, 3)),
        (KYUTAI, "audio_window_size", 0),
        (KYUTAI, "audio_window_size", 1.5),
        (VOXTRAL, "input_features", torch.zeros(1, 3, 80)),
        (VOXTRAL, "num_delay_tokens", -1),
        (VOXTRAL, "num_delay_tokens", torch.tensor([1, 2])),
    ],
)
def test_values_of_the_wrong_size_are_refused(name: str, field: str, value: Any) -> None:
    with pytest.raises(descant.InputError, match=field):
        descant.generate(tiny(name).model, **{**ragged(name)[0], field: value})


def test_a_prompt_may_hold_the_start_token_beyond_the_vocabulary_and_no_other() -> None:
    model, prompt = tiny(KYUTAI).model, ragged(KYUTAI)[0]
    start = model.config.bos_token_id
    assert start >= model.config.vocab_size
    session = descant.Session(model)
    with pytest.raises(descant.InputError, match="prompt"):
        session.admit(request(KYUTAI, {**prompt, "input_ids": torch.tensor([[start + 1]])}))
    ids = torch.tensor([[start, 7, 8]])
    session.admit(request(KYUTAI, {**prompt, "input_ids": ids}, max_new_tokens=6))
    assert run(session)[0] == model.generate(**prompt, input_ids=ids, max_new_tokens=6)[0, 3:].tolist()


@BOTH
def test_compiled_steps_and_packed_rows_are_refused_with_the_reason(name: str) -> None:
    model = tiny(name).model
    with pytest.raises(descant.UnsupportedModel, match="beside every token"):
        descant.generate(
            model, **ragged(name)[0], cache_implementation="static", compile_config=descant.CompileConfig()
        )
    assert as_model(model).unpacked_reason is not None
    assert kv_shape_of(model).layers.keys() == {0, 1}


def test_attention_without_a_mask_is_refused_where_the_window_needs_one() -> None:
    model = tiny(KYUTAI).model
    before = model.config._attn_implementation
    model.config._attn_implementation = "flash_attention_2"
    try:
        with pytest.raises(descant.UnsupportedModel, match="sdpa"):
            descant.Session(model)
    finally:
        model.config._attn_implementation = before


def test_a_class_with_a_generate_of_its_own_is_another_model() -> None:
    class Other(transformers.KyutaiSpeechToTextForConditionalGeneration):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    class Same(transformers.KyutaiSpeechToTextForConditionalGeneration):
        pass

    def empty(kind: Any) -> Any:
        model = kind.__new__(kind)
        torch.nn.Module.__init__(model)
        return model

    assert aligned_sound.is_aligned_sound(empty(Same))
    assert not aligned_sound.is_aligned_sound(empty(Other))
    with pytest.raises(descant.UnsupportedModel, match="_prepare_model_inputs"):
        descant.generate(empty(Other))


# ------------------------------------------------------------------------ the model stays as it is
def state_of(model: Any) -> dict[str, Any]:
    """What a call could change: attributes of modules, configs and weights."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        state[f"{path}:names"] = sorted(vars(module))
        state[f"{path}:methods"] = {key: id(value) for key, value in vars(module).items() if callable(value)}
        state[f"{path}:parts"] = {key: id(value) for key, value in module._modules.items()}
        for key in ("config", "generation_config"):
            if getattr(module, key, None) is not None:
                state[f"{path}:{key}"] = getattr(module, key).to_dict()
    state["weights"] = {key: value.double().sum().item() for key, value in model.state_dict().items()}
    return state


@BOTH
def test_the_model_is_not_changed(name: str) -> None:
    fresh = subject(next(entry for entry in entries() if entry.name == name))  # transformers changes its own
    model = fresh.model
    if name == VOXTRAL:  # its convolutions compute a size at their first call
        model.model.audio_tower.embedder(fresh.prompts[0]["input_features"])
    before = state_of(model)
    prompt = {key: value.clone() for key, value in fresh.prompts[0].items()}
    descant.generate(model, **prompt)
    descant.generate(model, **prompt, num_beams=3, max_new_tokens=4)
    descant.generate(model, **prompt, prompt_lookup_num_tokens=2)
    session = descant.Session(model)
    session.admit(request(name, ragged(name)[0]))
    run(session)
    assert state_of(model) == before
    assert all(torch.equal(prompt[key], value) for key, value in fresh.prompts[0].items())
    model.generate(**prompt)
    if name == KYUTAI:  # the comparison sees what transformers itself does
        assert state_of(model) != before
