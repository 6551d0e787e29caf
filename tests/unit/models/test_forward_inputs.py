"""How models are fed: media once, all again where a model asks for it, and nothing left on the model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

import descant
from tools.sweep.catalogue import entries
from tools.sweep.subject import Subject
from tools.sweep.trial import subject_of


@cache
def known() -> dict[str, Any]:
    """The catalogue by class name."""
    return {entry.name: entry for entry in entries()}


def tiny(name: str) -> Subject:
    """A small model of that class and its prompts."""
    return subject_of(known()[name])


class Calls:
    """What a module is called with, call by call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seen: list[dict[str, Any]] = []
        self._hook = module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.seen.append({name: value for name, value in given.items() if value is not None})

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "name",
    ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Qwen2VLForConditionalGeneration",
     "MllamaForConditionalGeneration", "GitForCausalLM", "Qwen2AudioForConditionalGeneration"],
)  # fmt: skip
def test_media_are_fed_with_the_prompt_and_never_again(name: str, beams: int):
    subject = tiny(name)
    prompt = subject.prompts[0]
    media = next(key for key in ("pixel_values", "input_features") if key in prompt)
    with Calls(subject.model) as calls:
        descant.generate(subject.model, **prompt, max_new_tokens=4, num_beams=beams)
    assert [media in one for one in calls.seen] == [True, False, False, False]
    assert len(calls.seen[0][media]) == len(prompt[media]), "beams do not see a picture of their own each"


@pytest.mark.parametrize("name", ["Speech2TextForConditionalGeneration", "VisionEncoderDecoderModel"])
def test_an_encoder_of_media_reads_once(name: str):
    subject = tiny(name)
    with Calls(subject.model.get_encoder()) as calls:
        descant.generate(subject.model, **subject.prompts[0], max_new_tokens=4, num_beams=3)
    assert len(calls.seen) == 1


def test_a_session_lets_go_of_media_that_were_fed():
    subject = tiny("LlavaForConditionalGeneration")
    prompt = dict(subject.prompts[0])
    ids = prompt.pop("input_ids")[0]
    prompt.pop("attention_mask", None)
    session = descant.Session(subject.model)
    [number] = session.admit(descant.Request(ids, descant.GenerationConfig(max_new_tokens=4), prompt))
    extra = session.model._request_inputs[number]
    assert extra.media.keys() == prompt.keys()
    session.step()
    session.step()  # the first forward may be repeated after an interrupt, so media stay until the second
    assert not extra.media


def _stretched() -> Any:
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0]}
    config = Phi3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, original_max_position_embeddings=12, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.4,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors,
                         "original_max_position_embeddings": 12},
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def test_a_model_that_reads_long_texts_in_another_way_reads_all_again():
    model = _stretched()
    ids = torch.randint(3, 96, (1, 8), generator=torch.Generator().manual_seed(1))
    ask: dict[str, Any] = {"max_new_tokens": 10, "output_logits": True, "return_dict_in_generate": True}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ask)
    with Calls(model) as calls:
        ours = descant.generate(model, ids, **ask)
    fed = [one["input_ids"].shape[1] for one in calls.seen]
    assert sorted(fed)[-2:] == [8, 13], "the prompt, and everything where the frequencies change"
    assert torch.equal(theirs.sequences, ours.sequences)
    for left, right in zip(theirs.logits, ours.logits, strict=True):
        assert torch.allclose(left, right, atol=1e-4)


def test_rows_on_both_sides_of_the_change_are_as_alone():
    model = _stretched()
    source = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, 96, (1, long), generator=source) for long in (4, 9, 14)]
    alone = [descant.generate(model, row, max_new_tokens=8)[0, row.shape[1] :].tolist() for row in rows]
    wide = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (wide - row.shape[1], 0)) for row in rows])
    both = descant.generate(model, ids, attention_mask=(ids != 0).long(), max_new_tokens=8)
    assert both[:, wide:].tolist() == alone


def _notes(model: Any) -> dict[str, Any]:
    """What modules hold beside their weights."""
    kept = {}
    for path, module in model.named_modules():
        for name in ("rope_deltas", "recurrent_states", "conv1d_state"):
            if name in vars(module):
                kept[f"{path}.{name}"] = getattr(module, name)
    return kept


@pytest.mark.parametrize("name", ["Qwen2VLForConditionalGeneration", "RecurrentGemmaForCausalLM"])
def test_what_a_model_notes_on_itself_is_as_it_was(name: str):
    subject = tiny(name)
    marker = torch.full((1, 1), 7.0)
    for path in _notes(subject.model):
        module, note = path.rsplit(".", 1)
        setattr(subject.model.get_submodule(module), note, marker)
    notes = _notes(subject.model)
    assert notes
    descant.generate(subject.model, **subject.prompts[0], max_new_tokens=3, num_beams=2)
    assert all(value is marker for value in _notes(subject.model).values())


def test_a_forward_that_fails_leaves_no_state_on_the_model():
    subject = tiny("RecurrentGemmaForCausalLM")
    before = _notes(subject.model)

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    hook = subject.model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        descant.generate(subject.model, **subject.prompts[0], max_new_tokens=3)
    hook.remove()
    assert {name: id(value) for name, value in _notes(subject.model).items()} == {
        name: id(value) for name, value in before.items()
    }


def test_token_types_go_on_as_the_last_of_the_prompt():
    subject = tiny("GPT2LMHeadModel")
    ids = subject.prompts[0]["input_ids"]
    types = torch.full_like(ids, 5)
    types[:, 0] = 3
    ask: dict[str, Any] = {"token_type_ids": types, "max_new_tokens": 5}
    theirs = subject.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ask)
    assert torch.equal(theirs, descant.generate(subject.model, ids, **ask))
    with Calls(subject.model) as calls:
        descant.generate(subject.model, ids, **ask)
    assert [one["token_type_ids"].flatten().tolist() for one in calls.seen[1:]] == [[5]] * 4
