"""Where the methods of transformers 4.52.4 are wrong, or were: each test shows theirs, then ours.

What its constraints get wrong by themselves stands in `tests/unit/decoding/constraints/test_known_bugs.py`.
"""

from __future__ import annotations

import pytest
import torch

import descant
from descant.decoding.strategies.beams.scorers import BeamSearchScorer
from tests.reference.parity import compare
from tests.reference.parity.compare import Batch, Call, batch, close
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


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_duplicate_hypotheses(name, tiny, reference):
    """transformers 17812, 19070: a forced token that was likely anyway was taken twice.

    Mended there since 4.21, and 4.52.4 does not show it: no duplicates on either side.
    """
    model = tiny(name)
    for seed, beams in ((950, 2), (951, 4), (952, 6)):
        rows = batch(model, prompts(model.arch, (5,), seed=seed))
        # A likely token: the second of the model's own answer.
        plain = descant.generate(model.model, **rows.inputs, min_new_tokens=3, max_new_tokens=3)
        likely = plain[0, -2].item()
        arguments = constrained([[likely]], beams, max_new_tokens=3, min_new_tokens=3)
        call = Call(model, arguments)
        for said in (
            reference.generate(model.folder, rows.inputs, arguments)["sequences"],
            ours(model, rows.inputs, **arguments).sequences,
        ):
            found = new_tokens(call, said, rows)
            assert len({tuple(tokens) for tokens in found}) == beams


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_constraints_of_batch_mates(name, tiny, reference):
    """transformers 15761: a row's forced tokens were looked up in its batch mates' scores.

    4.52.4 does not show it: rows in a batch are as alone on both sides.
    """
    model = tiny(name)
    rows = batch(model, prompts(model.arch, (6, 6, 6), seed=953))
    arguments = {**constrained([[41, 42]], 4, max_new_tokens=6, min_new_tokens=6), "num_return_sequences": 1}
    call = Call(model, arguments)
    theirs = reference.generate(model.folder, rows.inputs, arguments)["sequences"]
    mine = ours(model, rows.inputs, **arguments).sequences
    for i in range(3):
        one = rows.only(i)
        alone = reference.generate(model.folder, one.inputs, arguments)["sequences"]
        expected = new_tokens(call, alone, one)
        assert new_tokens(call, theirs, rows, i) == expected
        assert new_tokens(call, mine, rows, i) == expected
    found = [tuple(new_tokens(call, mine, rows, i)[0]) for i in range(3)]
    assert len(set(found)) > 1 or model.encoder_decoder, "all rows alike: nothing to see"


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


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_beam_indices_of_groups(name, tiny, reference):
    """The reference counts beams inside their group: what is made of them is another beam's."""
    model = tiny(name)
    rows = batch(model, prompts(model.arch, (8,), seed=1))
    arguments = {
        "num_beams": 6,
        "num_beam_groups": 3,
        "diversity_penalty": 1.0,
        "num_return_sequences": 6,
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "suppress_tokens": [model.eos],
    }
    want = ["sequences", "sequences_scores", "beam_indices", "transition_scores"]
    theirs = reference.generate(model.folder, rows.inputs, arguments, want)
    assert theirs["beam_indices"].max() == 1
    assert (theirs["transition_scores"].sum(1) / 6 - theirs["sequences_scores"]).abs().max() > 0.1

    out = ours(model, rows.inputs, **arguments)
    assert torch.equal(out.sequences, theirs["sequences"])
    moves = descant.compute_transition_scores(model.model, out.sequences, out.scores, out.beam_indices)
    close(moves.sum(1) / 6, theirs["sequences_scores"], "sequences_scores")


# ------------------------------------------------------------------------------------ guidance
def guided_logprobs(model, text, prompt_length, scale):
    """The guided scores [V] of the next token, from forwards without a cache."""
    sides = torch.tensor([text]), torch.tensor([text[prompt_length - 1 :]])
    with torch.no_grad():
        seen, unseen = (model(ids, use_cache=False).logits[0, -1].float().log_softmax(-1) for ids in sides)
    return unseen + scale * (seen - unseen)


@pytest.mark.parametrize(("name", "seed"), [("llama", 1), ("llama", 3), ("gpt2", 5)])
def test_guidance_under_beams_reads_the_beams_own_text(name, seed, tiny, reference):
    """The reference does not move its negative side with the beams: the scores are not those of the texts.

    Nor are they probabilities: it adds up the guided sums as they are. Ours are what the whole text gives.
    """
    model = tiny(name)
    rows = batch(model, prompts(model.arch, (6,), seed=seed))
    arguments = {"num_beams": 2, "guidance_scale": 1.5, "max_new_tokens": 8, "min_new_tokens": 8}
    arguments |= {"num_return_sequences": 2, "suppress_tokens": [model.eos]}
    theirs = reference.generate(model.folder, rows.inputs, arguments, ["sequences", "sequences_scores"])
    out = ours(model, rows.inputs, **arguments)

    def mean_score(sequence, is_normalized):
        total = 0.0
        for at in range(6, 14):
            scores = guided_logprobs(model.model, sequence[:at].tolist(), 6, 1.5)
            total += float((scores.log_softmax(-1) if is_normalized else scores)[sequence[at]])
        return total / 8

    again = [mean_score(one, is_normalized=True) for one in out.sequences]
    close(out.sequences_scores, torch.tensor(again), "sequences_scores")
    stale = torch.tensor([mean_score(one, is_normalized=False) for one in theirs["sequences"]])
    assert (theirs["sequences_scores"] - stale).abs().max() > 0.05


# ------------------------------------------------------------------------------------ scorers
def test_the_prompt_counts_as_length(reference):
    """transformers 27351: a scorer driven by hand, as documented, divides by the prompt's length too.

    `generate` tells it the length since then; without `decoder_prompt_len` the shorter text still wins.
    """
    eos, prompt = 3, 10
    ids = torch.arange(20, 20 + prompt)[None].repeat(2, 1)
    first = {
        "input_ids": ids,
        "next_scores": torch.tensor([[-1.0, -1.1, -5.0, -6.0]]),
        "next_tokens": torch.tensor([[eos, 5, 6, 7]]),
        "next_indices": torch.tensor([[0, 0, 0, 0]]),
    }
    second = {
        "input_ids": torch.cat([ids, torch.tensor([[5], [6]])], 1),
        "next_scores": torch.tensor([[-1.8, -4.0, -5.0, -6.0]]),
        "next_tokens": torch.tensor([[eos, 5, 6, 7]]),
        "next_indices": torch.tensor([[0, 0, 0, 0]]),
    }
    tokens = {"pad_token_id": 0, "eos_token_id": eos}
    last = {
        "input_ids": second["input_ids"],
        "final_beam_scores": torch.tensor([-4.0, -5.0]),
        "final_beam_tokens": torch.tensor([5, 6]),
        "final_beam_indices": torch.tensor([0, 0]),
        "max_length": 20,
        **tokens,
    }
    made = {"batch_size": 1, "num_beams": 2, "do_early_stopping": True}
    calls = [{**first, **tokens}, {**second, **tokens}]

    def theirs(**fields):
        said = reference.ask(
            "scorer",
            name="BeamSearchScorer",
            arguments=made,
            constraints=[],
            calls=[{**one, **fields} for one in calls],
            last={**last, **fields},
        )["end"]
        return said["sequences"][0, prompt:].tolist(), said["sequence_scores"].item()

    short, score = theirs()
    assert (short[0], score) == (eos, pytest.approx(-1.0 / (prompt + 1)))
    right = theirs(decoder_prompt_len=prompt)
    assert right == ([5, eos], pytest.approx(-0.9))

    scorer = BeamSearchScorer(device="cpu", **made)
    for one in calls:
        scorer.process(**one)
    said = scorer.finalize(**last)
    assert (said["sequences"][0, prompt:].tolist(), said["sequence_scores"].item()) == right


# ------------------------------------------------------------------------------------ DoLa
@pytest.mark.parametrize(
    ("name", "seed", "row"), [("llama", 803, 1), ("gpt-neox", 801, 1), ("mistral", 801, 0)]
)
def test_a_batch_mate_decides_the_layer(name, seed, row, deep, reference):
    """The reference takes the layer that differs most on average over its batch; ours each row's own."""
    model = deep(name)
    rows = batch(model, prompts(model.arch, (6, 6), seed=seed))
    call = Call(model, {"dola_layers": "high", "max_new_tokens": 8})
    together = compare.read(call, call.theirs(reference, rows), rows, row)
    alone = compare.read(call, call.theirs(reference, rows.only(row)), rows.only(row), 0)
    assert together.tokens != alone.tokens

    assert compare.by_row(reference, call, rows)[row].tokens == alone.tokens


def test_a_token_that_dola_has_ruled_out(deep, reference):
    """When the plausible tokens are all suppressed, its scores are all -inf and it selects token 0."""
    model = deep("llama")
    rows = batch(model, prompts(model.arch, (6,), seed=801))
    plain = reference.generate(
        model.folder, rows.inputs, {"dola_layers": "high", "max_new_tokens": 1}, ["scores"]
    )["scores"][0][0]
    plausible = plain.isfinite().nonzero().flatten().tolist()
    arguments = {"dola_layers": "high", "max_new_tokens": 1, "suppress_tokens": plausible}
    theirs = reference.generate(model.folder, rows.inputs, arguments, ["sequences", "scores"])
    assert theirs["sequences"][0, -1] == 0
    assert not theirs["scores"][0].isfinite().any()

    with pytest.raises(descant.RowError, match="suppress_tokens"):
        ours(model, rows.inputs, **arguments)


def test_dola_ignores_num_return_sequences(deep, reference):
    model = deep("llama")
    rows = batch(model, prompts(model.arch, (6, 6), seed=801))
    arguments = {"dola_layers": [0], "do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    assert len(reference.generate(model.folder, rows.inputs, arguments, seed=1)["sequences"]) == 2

    torch.manual_seed(1)
    assert len(ours(model, rows.inputs, **arguments).sequences) == 6


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


def test_padded_negative_prompts(tiny, reference):
    """The reference counts the padding of a negative prompt as positions; ours are as without it."""
    model = tiny("gpt2")
    rows = prompts(model.arch, (6, 6), seed=5)
    negatives = prompts(model.arch, (5, 2), seed=6)
    both = Batch(rows, model.pad, negatives=negatives)
    call = Call(model, {"guidance_scale": 2.0, "max_new_tokens": 6})
    together = compare.read(call, call.theirs(reference, both), both, 1)
    alone = compare.read(call, call.theirs(reference, both.only(1)), both.only(1), 0)
    assert together.tokens != alone.tokens

    assert compare.by_row(reference, call, both)[1].tokens == alone.tokens
