"""Codebooks are those of transformers' own generate(), code for code."""

from __future__ import annotations

import copy

import pytest
import torch

import descant
from tests.support.codebooks import CLASSES, GUIDED, codebook_subject, copied, same_sound

METHODS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0},
    "top-k sampling": {"do_sample": True, "top_k": 5, "temperature": 1.2},
    "guidance": {"guidance_scale": 3.0},
    "guided sampling": {"do_sample": True, "guidance_scale": 2.0, "top_k": 5},
}


def _reference(name: str, model, inputs, **options):
    if name == "musicgen decoder":
        # transformers 5.22 feeds only the last frame of a prompt if this class has a cache.
        options["use_cache"] = False
    return model.generate(**copied(inputs), **options)


PAIRS = [
    (name, method)
    for name in CLASSES
    for method, options in METHODS.items()
    if name in GUIDED or "guidance_scale" not in options
]


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_codes_are_those_of_transformers(name: str, method: str) -> None:
    options = {"max_new_tokens": 10, "num_return_sequences": 1, **METHODS[method]}
    subject = codebook_subject(name)
    batch = [] if subject.batch is None else [subject.batch]
    for inputs in [*subject.prompts, *batch]:
        torch.manual_seed(0)
        expected = _reference(name, subject.model, inputs, **options)
        torch.manual_seed(0)
        got = descant.generate(subject.model, **copied(inputs), **options)
        assert same_sound(expected, got)


def test_the_decoder_of_musicgen_reads_its_whole_prompt() -> None:
    """Bug of transformers 5.22: with a cache this class feeds the last frame of a prompt alone."""
    subject = codebook_subject("musicgen decoder")
    prompt = next(one for one in subject.prompts if one["input_ids"].shape[-1] > 1)
    options = {"max_new_tokens": 8, "num_return_sequences": 1}
    cached = subject.model.generate(**copied(prompt), **options)
    whole = subject.model.generate(**copied(prompt), **options, use_cache=False)
    assert not torch.equal(cached, whole)
    assert torch.equal(descant.generate(subject.model, **copied(prompt), **options), whole)


@pytest.mark.parametrize("name", ["musicgen", "melody", "dia"])
def test_scores_and_processors_are_those_of_transformers(name: str) -> None:
    subject = codebook_subject(name)
    options = {
        "max_new_tokens": 9,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = subject.model.generate(**copied(subject.prompts[0]), **options)
    got = descant.generate(subject.model, **copied(subject.prompts[0]), **options)
    assert same_sound(expected.sequences, got.sequences)
    rows = _rows_that_run(expected, subject)
    for step, (one, other) in enumerate(zip(expected.scores, got.scores, strict=True)):
        kept = [row for row, last in enumerate(rows) if step <= last]
        assert torch.allclose(one[kept], other[kept], atol=1e-4)
    for step, (one, other) in enumerate(zip(expected.logits, got.logits, strict=True)):
        kept = [row for row, last in enumerate(rows) if step <= last]
        assert torch.allclose(one[kept], other[kept], atol=1e-4)


def _rows_that_run(output, subject) -> list[int]:
    """The last step of each row; a row that has ended has no scores of its own."""
    end = subject.model.generation_config.eos_token_id
    chosen = torch.stack([step.argmax(-1) for step in output.scores])  # [T, R]
    last = []
    for row in chosen.T:
        ends = [] if end is None else (row == end).nonzero().flatten().tolist()
        last.append(ends[0] if ends else len(row))
    return last


def test_channels_of_dia_end_one_by_one() -> None:
    subject = codebook_subject("dia")
    end, pad = (
        subject.model.config.decoder_config.eos_token_id,
        subject.model.config.decoder_config.pad_token_id,
    )
    expected = subject.model.generate(**copied(subject.batch), max_new_tokens=14)
    got = descant.generate(subject.model, **copied(subject.batch), max_new_tokens=14)
    assert torch.equal(expected, got)
    steps = {int((channel == end).nonzero()[0]) for channel in got[0].T}
    assert len(steps) > 1  # else the test shows nothing
    assert bool((got == pad).any())


def test_a_call_leaves_the_model_as_it_was() -> None:
    for name in CLASSES:
        model = codebook_subject(name).model
        parts = [part for part in model.modules() if hasattr(part, "generation_config")]
        before = [(set(vars(part)), copy.deepcopy(part.generation_config.to_dict())) for part in parts]
        descant.generate(model, **copied(codebook_subject(name).prompts[0]), max_new_tokens=3)
        after = [(set(vars(part)), part.generation_config.to_dict()) for part in parts]
        assert before == after


@pytest.mark.parametrize("name", ["musicgen", "dia"])
def test_an_attached_model_decodes_with_descant(name: str) -> None:
    subject = codebook_subject(name)
    expected = subject.model.generate(**copied(subject.prompts[0]), max_new_tokens=8)
    descant.attach(subject.model)
    try:
        got = subject.model.generate(**copied(subject.prompts[0]), max_new_tokens=8, trace=None)
    finally:
        descant.detach(subject.model)
    assert same_sound(expected, got)


def test_a_streamer_gets_the_codes_of_each_step() -> None:
    subject = codebook_subject("musicgen")

    class Streamer:
        def __init__(self) -> None:
            self.steps: list[torch.Tensor] = []
            self.has_ended = False

        def put(self, value: torch.Tensor) -> None:
            self.steps.append(value)

        def end(self) -> None:
            self.has_ended = True

    streamer = Streamer()
    descant.generate(subject.model, **copied(subject.prompts[0]), max_new_tokens=6, streamer=streamer)
    rows = subject.model.decoder.num_codebooks
    assert [tuple(step.shape) for step in streamer.steps] == [(rows, 1), *[(rows,)] * 6]
    assert streamer.has_ended
