"""Records, hidden states, attentions and transition scores equal the reference's."""

from __future__ import annotations

import pytest
import torch

import descant
from tests.reference.parity.compare import close
from tests.reference.parity.subjects import ENCODER_DECODER, TINY, level, ragged

DECODER_ONLY = tuple(name for name in TINY if name not in ENCODER_DECODER)
EAGER = {"attn_implementation": "eager"}
STATES = {
    False: ("hidden_states", "attentions"),
    True: (
        "decoder_hidden_states",
        "decoder_attentions",
        "cross_attentions",
        "encoder_hidden_states",
        "encoder_attentions",
    ),
}
NEW = 6


def both(model, reference, inputs, arguments, want):
    """Our output and theirs, on models that compute attention eagerly."""
    ours = descant.generate(
        model.model,
        **inputs,
        **arguments,
        return_dict_in_generate=True,
        output_scores=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    return ours, reference.generate(model.folder, inputs, arguments, want, load=EAGER)


def flat(value):
    """Every tensor of a tuple of tuples, in order, with its place."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    return [(f"[{i}]{place}", t) for i, inner in enumerate(value) for place, t in flat(inner)]


def same(ours, theirs, name):
    """Assert that two nested tuples have one shape and the same numbers."""
    mine, wanted = flat(ours), flat(theirs)
    assert [place for place, _ in mine] == [place for place, _ in wanted], name
    for (place, a), (_, b) in zip(mine, wanted, strict=True):
        close(a, b, f"{name}{place}")


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", TINY)
def test_states(name, beams, tiny, reference):
    """Of level rows, and of the beams of one row."""
    model = tiny(name, **EAGER)
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW, "num_beams": beams}
    inputs = (level(model) if beams == 1 else ragged(model).only(0)).inputs
    want = ["sequences", *STATES[model.encoder_decoder]]
    ours, theirs = both(model, reference, inputs, arguments, want)
    assert torch.equal(ours.sequences, theirs["sequences"])
    for field in STATES[model.encoder_decoder]:
        same(ours[field], theirs[field], field)


@pytest.mark.parametrize("name", DECODER_ONLY)
def test_states_of_ragged_rows(name, tiny, reference):
    """Where a prompt is padding the states mean nothing; at every real token they equal the reference's."""
    model = tiny(name, **EAGER)
    inputs = ragged(model).inputs
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    ours, theirs = both(model, reference, inputs, arguments, ["sequences", "hidden_states", "attentions"])
    assert torch.equal(ours.sequences, theirs["sequences"])
    prompt = inputs["attention_mask"].bool()
    for step in range(NEW):
        keys = torch.cat([prompt, torch.ones(len(prompt), step, dtype=torch.bool)], dim=1)
        queries = prompt if step == 0 else keys[:, -1:]
        for layer, hidden in enumerate(theirs["hidden_states"][step]):
            mine = ours.hidden_states[step][layer]
            assert mine.shape == hidden.shape
            close(mine[queries], hidden[queries], f"hidden_states[{step}][{layer}]")
        for layer, weights in enumerate(theirs["attentions"][step]):
            mine = ours.attentions[step][layer]
            assert mine.shape == weights.shape
            real = (queries[:, None, :, None] & keys[:, None, None, :]).expand_as(weights)
            close(mine[real], weights[real], f"attentions[{step}][{layer}]")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", TINY)
def test_transition_scores(name, beams, normalize, tiny, reference):
    """Ours of their output equals theirs of their output, padding and all."""
    model = tiny(name)
    want = ["sequences", "scores"] + (["beam_indices"] if beams > 1 else [])
    said = reference.generate(
        model.folder, ragged(model).inputs, {"num_beams": beams, "max_new_tokens": 12}, want
    )
    arguments = {**said, "scores": tuple(said["scores"]), "normalize_logits": normalize}
    theirs = reference.ask("transition_scores", model=str(model.folder), arguments=arguments)
    close(descant.compute_transition_scores(model.model, **arguments), theirs, "transition scores")


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beam_scores_are_sums_of_transitions(name, beams, tiny):
    """The documented identity: a sequence's score is the sum of its transitions over its penalised length."""
    model = tiny(name)
    out = descant.generate(
        model.model,
        **ragged(model).inputs,
        num_beams=4,
        num_return_sequences=beams,
        length_penalty=0.7,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
    )
    moves = descant.compute_transition_scores(model.model, out.sequences, out.scores, out.beam_indices)
    lengths = (out.beam_indices >= 0).sum(1)
    close(moves.sum(1) / lengths**0.7, out.sequences_scores, "sequences_scores")
