"""Where the methods of transformers 4.52.4 are wrong, or were: each test shows theirs, then ours.

What its constraints get wrong by themselves stands in `tests/unit/decoding/constraints/test_known_bugs.py`.
"""

from __future__ import annotations

import pytest
import torch

import descant
from tests.reference.parity import compare
from tests.reference.parity.compare import Call, batch, close
from tests.reference.process.client import ReferenceFailure
from tests.support.tiny_models import prompts


def ours(model, inputs, **arguments):
    return descant.generate(
        model.model, **inputs, **arguments, return_dict_in_generate=True, output_scores=True
    )


def new_tokens(call, sequences, rows, request=0):
    """The sequences of one request, up to and with their ends."""
    return compare.split(call, sequences, rows, request)[0]


# ------------------------------------------------------------------------------------ constraints
def constrained(word, beams, **more):
    return {"num_beams": beams, "num_return_sequences": beams, "force_words_ids": word, **more}


# Ended and unended sequences in one answer: architecture, prompt seed, beams, the forced token.
MIXED = [("llama", 909, 6, 94), ("llama", 918, 3, 40), ("bart", 910, 6, 102)]


@pytest.mark.parametrize(("name", "seed", "beams", "token"), MIXED)
def test_sequences_that_end_beside_some_that_do_not(name, seed, beams, token, tiny, reference):
    """With scores, the reference fails on beam indices that it has for only some of them."""
    model = tiny(name)
    rows = batch(model, prompts(model.arch, (6,), seed=seed))
    arguments = constrained([[token]], beams, max_new_tokens=8)
    with pytest.raises(ReferenceFailure, match="NoneType"):
        reference.generate(model.folder, rows.inputs, arguments, ["sequences", "sequences_scores"])

    out = ours(model, rows.inputs, **arguments)
    found = new_tokens(Call(model, arguments), out.sequences, rows)
    assert {tokens[-1] == model.eos for tokens in found} == {False, True}
    moves = descant.compute_transition_scores(model.model, out.sequences, out.scores, out.beam_indices)
    close(moves.sum(1) / torch.tensor([len(t) for t in found]), out.sequences_scores, "sequences_scores")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox"])
def test_the_prompt_counts_as_output(name, tiny, reference):
    """A prompt that holds the phrase meets the constraint there; here what is generated must hold it."""
    model = tiny(name)
    phrase = [40, 41]
    (row,) = prompts(model.arch, (4,), seed=1)
    rows = batch(model, [[*row[:2], *phrase, *row[2:]]])
    arguments = {"num_beams": 4, "max_new_tokens": 6, "min_new_tokens": 6, "suppress_tokens": [model.eos]}
    call = Call(model, arguments)
    theirs = reference.generate(model.folder, rows.inputs, {**arguments, "force_words_ids": [phrase]})
    free = reference.generate(model.folder, rows.inputs, arguments)
    assert new_tokens(call, theirs["sequences"], rows) == new_tokens(call, free["sequences"], rows)
    assert 40 not in new_tokens(call, theirs["sequences"], rows)[0]

    (tokens,) = new_tokens(
        call, ours(model, rows.inputs, force_words_ids=[phrase], **arguments).sequences, rows
    )
    assert phrase in [tokens[i : i + 2] for i in range(5)]


@pytest.mark.parametrize(("name", "seed"), [("llama", 901), ("gpt2", 901), ("gpt-neox", 907)])
def test_a_beam_that_meets_the_constraints_is_dropped(name, seed, tiny, reference):
    """The reference drops it for likelier ones, and forces the words again into its last tokens.

    Only tokens that advance a constraint join the likeliest ones there, and none advances such a beam. A
    branch of its scorer adds that beam's best token (`push_progress`); nothing enters it. Here one such beam
    is kept once the tokens left are too few to meet the constraints again.
    """
    model = tiny(name)
    (row,) = prompts(model.arch, (6,), seed=seed)
    rows = batch(model, [row])
    arguments = {
        "num_beams": 2,
        "force_words_ids": [[80], [31, 12]],
        "max_new_tokens": 9,
        "suppress_tokens": [model.eos],
    }
    call = Call(model, arguments)
    (theirs,) = new_tokens(call, reference.generate(model.folder, rows.inputs, arguments)["sequences"], rows)
    (found,) = new_tokens(call, ours(model, rows.inputs, **arguments).sequences, rows)
    assert theirs[:6] == found[:6]
    assert (theirs[-2:], found[5:7]) == ([31, 12], [31, 12])

    def score(tokens):
        moves = reference_logprobs(reference, model, row, tokens).gather(1, torch.tensor(tokens)[:, None])
        return moves.sum().item()

    assert score(found) > score(theirs) + 4


# ------------------------------------------------------------------------------------ diverse beams
# A group ends while a later one does not: architecture, prompt seed.
ENDED = [("gpt2", 802), ("gpt2", 810), ("llama", 803), ("llama", 810), ("qwen2", 804), ("t5", 811)]


@pytest.mark.parametrize(("name", "seed"), ENDED)
def test_a_group_that_has_ended_goes_on_with_padding(name, seed, tiny, reference):
    """And later groups are penalised for the pad token: where that ends a text, they are kept from ending."""
    model = tiny(name)
    rows = batch(model, prompts(model.arch, (6,), seed=seed))
    arguments = {
        "num_beams": 4,
        "num_beam_groups": 2,
        "diversity_penalty": 5.0,
        "num_return_sequences": 4,
        "max_new_tokens": 10,
        "suppress_tokens": [50],
    }
    said = {}
    for pad in (model.eos, 50):  # 50 is never generated, and so is harmless
        said[pad] = reference.generate(
            model.folder, rows.inputs, {**arguments, "pad_token_id": pad}, ["sequences", "sequences_scores"]
        )
    call = Call(model, arguments)
    expected = new_tokens(call, said[50]["sequences"], rows)
    assert not torch.allclose(said[50]["sequences_scores"], said[model.eos]["sequences_scores"], atol=1e-3)

    for pad in (model.eos, 50):
        out = ours(model, rows.inputs, **arguments, pad_token_id=pad)
        assert new_tokens(call, out.sequences, rows) == expected
        close(out.sequences_scores, said[50]["sequences_scores"], "sequences_scores")


# ------------------------------------------------------------------------------------ guidance


# ------------------------------------------------------------------------------------ scorers


# ------------------------------------------------------------------------------------ DoLa


# ------------------------------------------------------------------------------------ guidance
def reference_logprobs(reference, model, text, new):
    """The log-probabilities of `new` after `text`, in one forward without a cache [T, V]."""
    inputs = {"input_ids": torch.tensor([[*text, *new]])}
    logits = reference.ask("forward", model=str(model.folder), inputs=inputs)["logits"][0]
    return logits[len(text) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_guidance_does_not_follow_the_beams(name, seed, tiny, reference):
    """The reference's unguided cache stays in the beams' old order: a beam is guided by another's text.

    Beams then have scores that their own text does not give; ours have.
    """
    model = tiny(name)
    (row,) = prompts(model.arch, (6,), seed=seed)
    rows, scale, new = batch(model, [row]), 1.5, 6
    arguments = {
        "guidance_scale": scale,
        "max_new_tokens": new,
        "min_new_tokens": new,
        "suppress_tokens": [model.eos],
    }

    def guided(tokens):
        """What the guided scores at each of the tokens should be [T, V]."""
        plain, unguided = (
            reference_logprobs(reference, model, row, tokens),
            reference_logprobs(reference, model, row[-1:], tokens),
        )
        return unguided + scale * (plain - unguided)

    def of(scores, tokens):
        return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]

    want = ["sequences", "transition_scores"]
    for beams in (1, 3):
        theirs = reference.generate(model.folder, rows.inputs, {**arguments, "num_beams": beams}, want)
        tokens = theirs["sequences"][0, 6:].tolist()
        off = (of(guided(tokens), tokens) - theirs["transition_scores"][0]).abs().max()
        assert off < 1e-3 if beams == 1 else off > 0.1

    out = ours(model, rows.inputs, num_beams=3, **arguments)
    moves = descant.compute_transition_scores(model.model, out.sequences, out.scores, out.beam_indices)
    tokens = out.sequences[0, 6:].tolist()
    # Beams here add up log-probabilities: what is guided is normalised first.
    close(moves[0], of(guided(tokens).log_softmax(-1), tokens), "transition scores")
