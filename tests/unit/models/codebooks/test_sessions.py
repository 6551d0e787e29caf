"""Sequences of frames in a session: alone, in a batch, admitted at any time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import descant
from tests.support.codebooks import CLASSES, GUIDED, admit, codebook_subject, copied, drain, same_sound


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=4, deadline=None)
@given(
    order=st.permutations([0, 1, 2]),
    gaps=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    do_sample=st.booleans(),
    lengths=st.tuples(*[st.integers(8, 11)] * 3),
)
def test_a_sequence_does_not_depend_on_the_others(name, order, gaps, do_sample, lengths) -> None:
    """Admitted together, late, in any order, with guidance beside others without it."""
    subject = codebook_subject(name)
    options = [
        {
            "max_new_tokens": length,
            **({"do_sample": True, "seed": 5 + index} if do_sample else {}),
            **({"guidance_scale": 2.0} if name in GUIDED and index == 1 else {}),
        }
        for index, length in enumerate(lengths)
    ]
    session, done, numbers, requests = descant.Session(subject.model), {}, {}, {}
    for index, gap in zip(order, (*gaps, None), strict=True):
        one = descant.sound_request(subject.model, **copied(subject.prompts[index]), **options[index])
        requests[index], numbers[index] = one, admit(session, one)
        drain(session, done, gap)
    for index, prompt in enumerate(subject.prompts):
        alone = descant.generate(subject.model, **copied(prompt), **options[index])
        got = requests[index].result([done[number] for number in numbers[index]])
        assert same_sound(alone, got)


@pytest.mark.parametrize("name", ["musicgen", "dia", "csm", "higgs"])  # of the others there are no batches
def test_a_batch_is_its_prompts_alone(name: str) -> None:
    subject = codebook_subject(name)
    options = {"max_new_tokens": 9, "do_sample": True}
    seeds = [3, 4, 5]
    batch = descant.generate(subject.model, **copied(subject.batch), **options, seed=seeds)
    for index, prompt in enumerate(subject.prompts):
        alone = descant.generate(subject.model, **copied(prompt), **options, seed=seeds[index])
        assert same_sound(alone, batch[index : index + 1])


def test_codebooks_do_not_share_their_noise() -> None:
    """With one seed, rows with equal logits choose different codes."""
    subject = codebook_subject("musicgen decoder")
    decoder = subject.model
    with torch.no_grad():
        saved = [head.weight.clone() for head in decoder.lm_heads]
        for head in decoder.lm_heads:
            head.weight.zero_()
        ids = torch.full((decoder.num_codebooks, 1), decoder.config.pad_token_id)
        options = {"max_new_tokens": 12, "do_sample": True, "seed": 1}
        codes = descant.generate(decoder, ids, **options)[0]
        for head, weight in zip(decoder.lm_heads, saved, strict=True):
            head.weight.copy_(weight)
    assert len({tuple(row) for row in codes.tolist()}) == decoder.num_codebooks


def test_a_session_refuses_a_part_of_a_sequence() -> None:
    subject = codebook_subject("dia")
    one = descant.sound_request(subject.model, **copied(subject.prompts[0]), max_new_tokens=5)
    session = descant.Session(subject.model)
    with pytest.raises(descant.InputError, match="all 3 codebooks of its sequence"):
        session.admit(one.requests[0])
    admit(session, one)
    with pytest.raises(descant.InputError, match="not running"):
        admit(session, one)
    with pytest.raises(descant.InputError, match=r"descant\.sound_request"):
        session.admit(descant.Request([1], descant.GenerationConfig(max_new_tokens=2)))


def test_a_request_holds_one_prompt_of_a_model_of_sound(tiny) -> None:
    subject = codebook_subject("dia")
    with pytest.raises(descant.InputError, match="must hold one prompt, got '3 prompts'"):
        descant.sound_request(subject.model, **copied(subject.batch), max_new_tokens=5)
    with pytest.raises(descant.InputError, match="`model` must predict sound"):
        descant.sound_request(tiny("llama").model, input_ids=torch.tensor([[1, 2]]))
    one = descant.sound_request(subject.model, **copied(subject.prompts[0]), max_new_tokens=5)
    assert isinstance(one, descant.SoundRequest)
    with pytest.raises(descant.InputError, match="one for each of the 3 requests"):
        one.result([])


def test_a_scheduler_is_refused_by_name() -> None:
    with pytest.raises(
        descant.InputError, match="`scheduler` must be None for a model with several codebooks"
    ):
        descant.Session(codebook_subject("dia").model, scheduler=descant.SchedulerConfig())


def test_a_forward_that_fails_raises_its_own_error_and_can_be_repeated(monkeypatch) -> None:
    """No codebook can be fed alone to find out which one is to blame."""
    subject = codebook_subject("musicgen")
    one = descant.sound_request(subject.model, **copied(subject.prompts[0]), max_new_tokens=9)
    session, done = descant.Session(subject.model), {}
    numbers = admit(session, one)
    drain(session, done, 3)
    layers = subject.model.decoder.model.decoder.layers
    with monkeypatch.context() as patch:
        patch.setattr(layers[0], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.step()
    drain(session, done)
    alone = descant.generate(subject.model, **copied(subject.prompts[0]), max_new_tokens=9)
    assert same_sound(alone, one.result([done[number] for number in numbers]))


@pytest.mark.parametrize("name", ["musicgen", "musicgen decoder"])
def test_other_calls_are_refused(name: str) -> None:
    model = codebook_subject(name).model
    with pytest.raises(descant.InputError, match=r"descant\.sound_request"):
        list(descant.stream(model, torch.tensor([[1, 2]])))
    with pytest.raises(descant.DescantError):
        descant.prefill(model, torch.tensor([[1, 2]]))
    with pytest.raises(descant.DescantError):
        descant.estimate(model, prompt_length=4, max_new_tokens=3)


def test_a_sequence_that_has_not_been_fed_outlives_one_that_is_cancelled() -> None:
    """The rows of the first leave the cache before those of the second have a row of the network."""
    subject = codebook_subject("musicgen")
    options = {"max_new_tokens": 9}
    requests = [
        descant.sound_request(subject.model, **copied(prompt), **options) for prompt in subject.prompts[:2]
    ]
    session, done = descant.Session(subject.model), {}
    first = admit(session, requests[0])
    drain(session, done, 2)
    second = admit(session, requests[1])
    for number in first:
        session.cancel(number)
    drain(session, done)
    alone = descant.generate(subject.model, **copied(subject.prompts[1]), **options)
    assert same_sound(alone, requests[1].result([done[number] for number in second]))
