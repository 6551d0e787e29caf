"""Models with their own generate(): the same output from our loop, and no change of the model."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import descant
from descant.models.compat import custom_generate
from tools.sweep.catalogue import entries
from tools.sweep.media import subject
from tools.sweep.subject import Subject

SHORT = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Tiny configurations make transformers warn about what does not matter here."""


@cache
def known() -> dict[str, Any]:
    """The catalogue by class name."""
    return {entry.name: entry for entry in entries()}


def tiny(name: str) -> Subject:
    """A small model of that class and its prompts."""
    return subject(known()[name])


def fresh(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs that may be written into."""
    return {name: value.clone() for name, value in inputs.items()}


def agree(model: Any, inputs: dict[str, Tensor], **asked: Any) -> Any:
    """Both generate() give the same; the output."""
    expected = model.generate(**fresh(inputs), **asked)
    got = descant.generate(model, **fresh(inputs), **asked)
    for one, other in zip(parts(expected), parts(got), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other) if one.dtype == torch.long else torch.allclose(one, other, atol=1e-4)
    return got


def parts(answer: Any) -> list[Tensor]:
    """The tensors that an answer holds."""
    if isinstance(answer, Tensor):
        return [answer]
    values = answer.values() if hasattr(answer, "values") else answer
    return [one for one in values if isinstance(one, Tensor)]


INNER = ["BlipForConditionalGeneration", "Blip2ForConditionalGeneration", "Kosmos2ForConditionalGeneration"]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", INNER)
def test_a_model_around_another_returns_what_its_own_generate_does(name: str, beams: int) -> None:
    case = tiny(name)
    for prompt in case.prompts:
        agree(case.model, prompt, **SHORT, num_beams=beams)


def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    case = tiny("Blip2ForConditionalGeneration")
    assert case.batch is not None
    joint = descant.generate(case.model, **fresh(case.batch), **SHORT)
    for row, prompt in zip(joint, case.prompts, strict=True):
        alone = descant.generate(case.model, **fresh(prompt), **SHORT)[0]
        assert row[-6:].tolist() == alone[-6:].tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_that_prepares_for_its_parents_returns_what_its_own_generate_does(beams: int) -> None:
    case = tiny("Pop2PianoForConditionalGeneration")
    for prompt in case.prompts:
        settings = copy.deepcopy(case.model.generation_config)
        agree(case.model, prompt, **SHORT, num_beams=beams, composer="composer3")
        case.model.generation_config = settings  # its own generate() writes into it


def test_stages_that_generate_one_after_another() -> None:
    case = tiny("BarkModel")
    assert case.model.generation_config.semantic_config["eos_token_id"] == 40
    for prompt in case.prompts[:2]:
        agree(case.model, prompt, semantic_max_new_tokens=10, do_sample=False, num_beams=2)
    agree(case.model, case.prompts[0], semantic_max_new_tokens=10, do_sample=False, min_eos_p=0.2)


def test_padding_between_stages_is_understood_as_the_model_means_it() -> None:
    case = tiny("BarkModel")
    batch = {"input_ids": torch.cat([prompt["input_ids"] for prompt in case.prompts[:2]])}
    case.model.semantic.generation_config.pad_token_id = 0
    case.model.coarse_acoustics.generation_config.pad_token_id = 0
    case.model.generation_config.semantic_config["pad_token_id"] = 0
    agree(case.model, batch, semantic_max_new_tokens=12, do_sample=False)


def test_arguments_of_the_model_alone_reach_it() -> None:
    case = tiny("SeamlessM4TForTextToSpeech")
    asked = {key: value for key, value in case.options.items() if key != "output_logits"}
    answer = agree(case.model, case.prompts[0], **asked, text_max_new_tokens=6, do_sample=False)
    assert answer.sequences.shape[1] == 2 + 6  # its start, the language, and as much as was asked for
    with pytest.raises(ValueError, match="not supported"):
        descant.generate(case.model, **fresh(case.prompts[0]), tgt_lang="nobody")


def test_what_the_model_decides_is_no_mistake_of_the_users() -> None:
    """Its text decoder is given the end token by the model; a config of ours and one of theirs go through."""
    case = tiny("BlipForConditionalGeneration")
    expected = case.model.generate(**fresh(case.prompts[0]), **SHORT, num_beams=2)
    ours = descant.GenerationConfig(max_new_tokens=6, num_beams=2)
    theirs = transformers.GenerationConfig(max_new_tokens=6, num_beams=2)
    for config in (ours, theirs):
        got = descant.generate(case.model, **fresh(case.prompts[0]), generation_config=config)
        assert torch.equal(got, expected)
    with pytest.raises(descant.ConfigError, match="has no use"):
        descant.generate(case.model, **fresh(case.prompts[0]), max_new_tokens=2, temperature=0.5)


def test_a_seed_a_prompt_and_log_probabilities_go_through() -> None:
    case = tiny("Blip2ForConditionalGeneration")
    asked = {"max_new_tokens": 4, "do_sample": True, "logprobs": 1, "return_dict_in_generate": True}
    assert case.batch is not None
    joint = descant.generate(case.model, **fresh(case.batch), seed=[5, 6, 7], **asked)
    alone = descant.generate(case.model, **fresh(case.prompts[1]), seed=6, **asked)
    assert joint.sequences[1, -4:].tolist() == alone.sequences[0, -4:].tolist()
    assert len(joint.logprobs) == 3


def test_a_processor_that_the_model_does_not_hand_on_still_counts() -> None:
    case = tiny("JanusForConditionalGeneration")

    def only(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([9]), 0.0)

    got = descant.generate(case.model, **fresh(case.prompts[0]), **SHORT, logits_processor=[only])
    assert got[0, -6:].tolist() == [9] * 6


def test_nothing_is_left_behind() -> None:
    """Neither on the model nor on its parts, its configs, nor in what the user gave, even after an error."""
    for name in ("BlipForConditionalGeneration", "Pop2PianoForConditionalGeneration"):
        case = tiny(name)
        before = {path: dict(vars(part)) for path, part in case.model.named_modules()}
        settings = case.model.generation_config.to_dict()
        given = fresh(case.prompts[0])
        if "input_ids" in given:
            given["input_ids"][:, 0] += 1  # its own generate() writes another token there
        kept = fresh(given)
        descant.generate(case.model, **given, **SHORT)
        with pytest.raises(descant.ConfigError):
            descant.generate(case.model, **given, max_new_tokens=0)
        for path, part in case.model.named_modules():
            assert vars(part).keys() == before[path].keys()
            assert all(vars(part)[key] is value for key, value in before[path].items())
        assert case.model.generation_config.to_dict() == settings
        assert all(torch.equal(given[key], value) for key, value in kept.items())


def test_an_attached_model_is_decoded_by_ours() -> None:
    class Twice(transformers.GPT2LMHeadModel):
        def generate(self, input_ids: Tensor, again: bool = True, **kwargs: Any) -> Any:
            generate = self.generate if again else super().generate
            return generate(input_ids, **{"again": False} if again else {}, **kwargs)

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=32, eos_token_id=None, bos_token_id=None
    )
    model, ids = Twice(config).eval(), torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, **SHORT)
    descant.attach(model)
    assert torch.equal(model.generate(ids, **SHORT, seed=1), expected)  # no model of theirs has a seed
    descant.detach(model)
    assert torch.equal(descant.generate(model, ids, **SHORT), expected)


def test_a_part_that_would_be_refused_refuses_the_whole() -> None:
    kind = transformers.ClvpModelForConditionalGeneration
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    part = transformers.ClvpForCausalLM.__new__(transformers.ClvpForCausalLM)
    torch.nn.Module.__init__(part)
    model.speech_decoder_model = part
    with pytest.raises(descant.UnsupportedModel, match="calls its `speech_decoder_model`"):
        descant.generate(model)


def test_pictures_and_voices_are_refused_before_anything_runs() -> None:
    janus = tiny("JanusForConditionalGeneration")
    with pytest.raises(descant.UnsupportedModel, match="images"):
        descant.generate(janus.model, **fresh(janus.prompts[0]), generation_mode="image")
    omni = tiny("Qwen2_5OmniForConditionalGeneration")
    with pytest.raises(descant.UnsupportedModel, match="talker"):
        descant.generate(omni.model, **fresh(omni.prompts[0]))


def test_a_model_that_goes_around_its_parents_is_refused() -> None:
    class Around(transformers.GPT2LMHeadModel):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return transformers.GenerationMixin.generate(self, *args, **kwargs)

    class Never(transformers.GPT2LMHeadModel):
        def generate(self, input_ids: Tensor) -> Tensor:
            return input_ids if len(input_ids) else super().generate(input_ids)

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=32)
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(descant.UnsupportedModel, match="bypasses"):
        descant.generate(Around(config).eval(), input_ids=ids, max_new_tokens=2)
    with pytest.raises(descant.UnsupportedModel, match="decoded in its own"):
        descant.generate(Never(config).eval(), ids)


def test_configs_for_each_prompt_reach_a_part_but_not_a_model_that_reads_one() -> None:
    blip, piano = tiny("Blip2ForConditionalGeneration"), tiny("Pop2PianoForConditionalGeneration")
    configs = [descant.GenerationConfig(max_new_tokens=count) for count in (2, 3, 4)]
    assert blip.batch is not None
    got = descant.generate(blip.model, **fresh(blip.batch), generation_config=configs)
    assert got.shape[1] - blip.batch["input_ids"].shape[1] == 4
    with pytest.raises(descant.InputError, match="one config for all prompts"):
        descant.generate(piano.model, **fresh(piano.prompts[0]), generation_config=configs)


def test_a_plain_model_is_left_to_the_usual_way() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=32)
    assert custom_generate.as_custom_generate(transformers.GPT2LMHeadModel(config)) is None
    assert custom_generate.as_custom_generate(object()) is None


def test_a_session_of_such_a_model_is_refused_with_the_way_to_go():
    model = tiny("Blip2ForConditionalGeneration").model
    with pytest.raises(descant.UnsupportedModel, match=r"use descant\.generate"):
        descant.Session(model)
