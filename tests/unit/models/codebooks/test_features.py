"""What single families have: sound as a prompt, ends, stereo, sampling that avoids repetition."""

from __future__ import annotations

import copy
import types
from collections import Counter

import pytest
import torch
from scipy import stats

import descant
from tests.support.codebooks import admit, codebook_subject, copied, drain, same_sound


# ------------------------------------------------------------------------ MusicGen
def test_musicgen_continues_sound(monkeypatch) -> None:
    subject = codebook_subject("musicgen")
    # As many codebooks of the codec as the decoder has.
    monkeypatch.setattr(subject.model.audio_encoder.config, "target_bandwidths", [2.4])
    sound = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(0))
    inputs = {**copied(subject.prompts[0]), "input_values": sound}
    for options in ({}, {"guidance_scale": 3.0}, {"do_sample": True}):
        torch.manual_seed(1)
        expected = subject.model.generate(**copied(inputs), max_new_tokens=9, **options)
        torch.manual_seed(1)
        got = descant.generate(subject.model, **copied(inputs), max_new_tokens=9, **options)
        assert same_sound(expected, got)
    alone = subject.model.generate(**copied(subject.prompts[0]), max_new_tokens=9)
    assert expected.shape[-1] > alone.shape[-1]


def test_musicgen_without_a_text() -> None:
    model = codebook_subject("musicgen").model
    inputs = model.get_unconditional_inputs(num_samples=2)
    torch.manual_seed(1)
    expected = model.generate(**inputs, do_sample=True, max_new_tokens=8)
    torch.manual_seed(1)
    assert same_sound(expected, descant.generate(model, **inputs, do_sample=True, max_new_tokens=8))


def test_musicgen_in_stereo() -> None:
    subject = codebook_subject("musicgen")
    model = subject.model
    assert model.decoder.num_codebooks % 2 == 0
    model.decoder.config.audio_channels = 2
    try:
        expected = model.generate(**copied(subject.prompts[0]), max_new_tokens=9)
        got = descant.generate(model, **copied(subject.prompts[0]), max_new_tokens=9)
    finally:
        model.decoder.config.audio_channels = 1
    assert expected.shape[1] == 2
    assert same_sound(expected, got)


# ------------------------------------------------------------------------ Higgs Audio
def _higgs_prompt_with_sound(model, frames: int = 3) -> dict[str, torch.Tensor]:
    config = model.config
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 10, (1, frames, config.num_codebooks), generator=generator)
    ids = [[5, 6, *[config.audio_token_id] * frames, 7, config.audio_bos_token_id]]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.ones(1, len(ids[0]), dtype=torch.long),
        "audio_input_ids": codes,
        "audio_input_ids_mask": torch.ones(1, frames, dtype=torch.bool),
    }


def test_higgs_reads_sound_in_its_prompt() -> None:
    model = codebook_subject("higgs").model
    inputs = _higgs_prompt_with_sound(model)
    expected = model.generate(**copied(inputs), max_new_tokens=8)
    got = descant.generate(model, **copied(inputs), max_new_tokens=8)
    assert torch.equal(expected, got)
    silent = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    silent["input_ids"] = torch.where(
        silent["input_ids"] == model.config.audio_token_id, 9, silent["input_ids"]
    )
    assert not torch.equal(got[:, 3:], descant.generate(model, **silent, max_new_tokens=8))


def test_higgs_ends_when_all_codebooks_have_ended() -> None:
    subject = codebook_subject("higgs")
    model = subject.model
    end = model.config.audio_stream_eos_id
    options = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "temperature": 3.0, "eos_token_id": 2}
    saved, model.config.eos_token_id = model.config.eos_token_id, 2
    try:
        torch.manual_seed(3)
        expected = model.generate(**copied(subject.batch), **options)
        torch.manual_seed(3)
        got = descant.generate(model, **copied(subject.batch), **options)
        names = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        torch.manual_seed(3)
        whole = model.generate(**copied(subject.batch), **options, **names)
        torch.manual_seed(3)
        ours = descant.generate(model, **copied(subject.batch), **options, **names)
    finally:
        model.config.eos_token_id = saved
    assert torch.equal(expected, got)
    last = [(row == end).all(-1).nonzero().flatten().tolist() for row in got]
    assert len({steps[0] for steps in last if steps}) > 1  # some end, and at different steps
    assert torch.equal(whole.sequences, ours.sequences)
    assert torch.equal(whole.audio_sequences, ours.audio_sequences)
    first = min(steps[0] for steps in last if steps)
    for one, other in zip(whole.scores[: first + 1], ours.scores[: first + 1], strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    for one, other in zip(whole.logits[: first + 1], ours.logits[: first + 1], strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_repetition_aware_sampling_has_the_law_of_transformers() -> None:
    model = codebook_subject("higgs").model
    inputs = _higgs_prompt_with_sound(model, frames=6)
    inputs["audio_input_ids"][:] = inputs["audio_input_ids"][:, :1]  # all frames are equal: much is repeated
    config = model.generation_config
    options = {"max_new_tokens": 10, "do_sample": True, "top_k": 3, "temperature": 0.3}
    config.ras_win_len, config.ras_win_max_num_repeat = 6, 1
    try:
        rows = 400
        many = {name: value.repeat(rows, *[1] * (value.ndim - 1)) for name, value in inputs.items()}
        torch.manual_seed(0)
        theirs = model.generate(**copied(many), **options)
        torch.manual_seed(1)
        ours = descant.generate(model, **copied(many), **options)
        with pytest.raises(descant.NotInThisVersion, match="ras_win_len"):
            descant.generate(model, **copied(inputs), max_new_tokens=3)
    finally:
        del config.ras_win_len, config.ras_win_max_num_repeat
    torch.manual_seed(1)
    plain = descant.generate(model, **copied(many), **options)
    for codebook in range(model.config.num_codebooks):
        assert _p_value(theirs[:, -1, codebook], ours[:, -1, codebook]) > 1e-4
    theirs, ours, plain = (_num_repeated(codes, 6) for codes in (theirs, ours, plain))
    assert _p_value(theirs, ours) > 1e-4
    assert _p_value(theirs, plain) < 1e-6  # without it, more is repeated


def _num_repeated(codes: torch.Tensor, window: int) -> torch.Tensor:
    """How many codes of each sequence [B, T, C] are among the last ones of their codebook."""
    steps = range(window, codes.shape[1])
    repeated = [(codes[:, step - window : step] == codes[:, step : step + 1]).any(1) for step in steps]
    return torch.stack(repeated).sum((0, 2))


def _p_value(first: torch.Tensor, second: torch.Tensor) -> float:
    """The probability of a difference like that of these samples, by chi-square on the frequent values."""
    counts = [Counter(sample.tolist()) for sample in (first, second)]
    total = counts[0] + counts[1]
    frequent = [value for value, count in total.items() if count >= 20]
    table = [[count[value] for value in frequent] for count in counts]
    for line, count in zip(table, counts, strict=True):
        line.append(sum(count.values()) - sum(line) + 1)
    return float(stats.chi2_contingency(table).pvalue) if frequent else 1.0


# ------------------------------------------------------------------------ CSM
@pytest.fixture(autouse=True)
def own_depth_config():
    """transformers' own generate() writes to the config of the depth decoder, and other tests read it."""
    depth = codebook_subject("csm").model.depth_decoder
    saved = copy.deepcopy(depth.generation_config)
    yield
    depth.generation_config = saved


@pytest.fixture
def ending_csm(monkeypatch):
    """A model whose heads prefer one code, which is the end; its codec returns the codes."""
    subject = codebook_subject("csm")
    model = subject.model
    codes = torch.arange(model.config.vocab_size)
    hooks = [
        head.register_forward_hook(lambda _, __, logits: logits + 13.0 * (codes == 7))
        for head in (model.lm_head, model.depth_decoder.codebooks_head)
    ]
    monkeypatch.setattr(model.config, "codebook_eos_token_id", 7)
    decoded = types.SimpleNamespace
    monkeypatch.setattr(
        model.codec_model, "decode", lambda codes: decoded(audio_values=codes.float().sum(1, keepdim=True))
    )
    yield subject
    for hook in hooks:
        hook.remove()


def test_csm_ends_at_a_frame_of_end_codes(ending_csm) -> None:
    model = ending_csm.model
    options = {"max_new_tokens": 12, "eos_token_id": 1, "do_sample": True, "temperature": 3.0}
    options |= {"depth_decoder_do_sample": True, "depth_decoder_temperature": 3.0}
    ends = set()
    for seed in range(6):
        torch.manual_seed(seed)
        expected = model.generate(**copied(ending_csm.batch), **options)
        torch.manual_seed(seed)
        got = descant.generate(model, **copied(ending_csm.batch), **options)
        assert torch.equal(expected, got)
        ends |= {int((row[:, :-1] == 7).all(-1).long().argmax()) for row in got}
    assert len(ends) > 2  # sequences end, at several steps
    torch.manual_seed(0)
    sound = model.generate(**copied(ending_csm.batch), **options, output_audio=True)
    torch.manual_seed(0)
    ours = descant.generate(model, **copied(ending_csm.batch), **options, output_audio=True)
    assert all(torch.equal(one, other) for one, other in zip(sound, ours, strict=True))


def test_a_frame_of_csm_that_is_decoded_again_replaces_itself() -> None:
    """As after a step that was interrupted behind its depth decoder."""
    subject = codebook_subject("csm")
    one = descant.sound_request(subject.model, **copied(subject.prompts[0]), max_new_tokens=6)
    session, done = descant.Session(subject.model), {}
    [number] = admit(session, one)
    drain(session, done, 3)
    [request] = one.requests
    codes = request.inputs["codebook"].frames.state.more_codes
    before = torch.stack(codes)
    assert before.shape == (3, subject.model.config.num_codebooks - 1)
    ids = torch.tensor([[0, *session.common_prefix(number).tolist()]])
    request.stopping_criteria[0](ids, None)
    assert torch.equal(torch.stack(codes), before)
    drain(session, done)
    alone = descant.generate(subject.model, **copied(subject.prompts[0]), max_new_tokens=6)
    assert torch.equal(one.result([done[number]]), alone)


def test_the_depth_decoder_of_csm_has_its_own_config() -> None:
    subject = codebook_subject("csm")
    options = {"max_new_tokens": 6, "depth_decoder_do_sample": True, "depth_decoder_temperature": 1.5}
    torch.manual_seed(0)
    expected = subject.model.generate(**copied(subject.batch), **options)
    torch.manual_seed(0)
    got = descant.generate(subject.model, **copied(subject.batch), **options)
    assert torch.equal(expected, got)
    greedy = descant.generate(subject.model, **copied(subject.batch), max_new_tokens=6)
    assert not torch.equal(got, greedy)


# ------------------------------------------------------------------------ what is refused
REFUSED = {
    "num_beams": ({"num_beams": 2}, "dia"),
    "num_return_sequences": ({"num_return_sequences": 2, "do_sample": True}, "dia"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "dia"),
    "dola_layers": ({"dola_layers": "high"}, "musicgen"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "musicgen"),
    "stop_strings": ({"stop_strings": "a"}, "musicgen"),
    "grammar": ({"grammar": {"regex": "a"}}, "musicgen"),
    "cache_implementation": ({"cache_implementation": "static"}, "musicgen"),
    "use_cache": ({"use_cache": False}, "musicgen"),
    "output_attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "dia"),
    "guidance_scale": ({"guidance_scale": 3.0}, "csm"),
    "repetition_penalty": ({"repetition_penalty": 1.2}, "higgs"),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, "csm"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_codebooks_do_not_support_is_refused_by_name(field: str) -> None:
    options, name = REFUSED[field]
    subject = codebook_subject(name)
    word = "assistant_model" if field == "prompt_lookup_num_tokens" else field
    with pytest.raises(descant.NotInThisVersion, match=f"`{word}`"):
        descant.generate(subject.model, **copied(subject.prompts[0]), max_new_tokens=4, **options)


def test_a_class_with_another_loop_is_not_taken_for_one_of_these() -> None:
    subject = codebook_subject("dia")

    class Other(type(subject.model)):
        def _sample(self, *args, **kwargs):
            return super()._sample(*args, **kwargs)

    class Same(type(subject.model)):
        pass

    model = copy.copy(subject.model)
    model.__class__ = Same
    expected = subject.model.generate(**copied(subject.prompts[0]), max_new_tokens=5)
    assert torch.equal(descant.generate(model, **copied(subject.prompts[0]), max_new_tokens=5), expected)
    model.__class__ = Other
    with pytest.raises(descant.UnsupportedModel, match="codebooks with a delay pattern"):
        descant.generate(model, **copied(subject.prompts[0]), max_new_tokens=5)
