"""Beam search, beam sampling, diverse beams and the beam scorers."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import ended, refused
from tests.reference.spec_sentences.sentence import (
    CONFIG,
    GENERATE,
    NEWER,
    NOTES,
    STRATEGIES,
    UTILITIES,
    page,
)

older, newer, notes = page(STRATEGIES), page(NEWER), page(NOTES)
utilities, field, call = page(UTILITIES), page(CONFIG), page(GENERATE)


@older("beams", 323, "More than one beam gives beam search.")
def _(lib):
    return ended(lib.model().generate(lib.ids(rows=2), num_beams=5, max_new_tokens=8))


@newer("beams1", 74, "One beam is greedy search.")
def _(lib):
    ids = lib.ids()
    assert torch.equal(
        lib.model().generate(ids, num_beams=1, max_new_tokens=6), lib.model().generate(ids, max_new_tokens=6)
    )


@notes("beam_best", 23, "Beam search returns the sequence of highest overall probability that it kept.")
def _(lib):
    out = lib.model().generate(
        lib.ids(),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=4,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = out.sequences_scores.tolist()
    assert found == sorted(found, reverse=True)
    logits = lib.model()(out.sequences, use_cache=False).logits[:, 5:-1].log_softmax(-1)
    sums = logits.gather(2, out.sequences[:, 6:, None])[..., 0].sum(1)
    assert torch.allclose(sums / 4, out.sequences_scores, atol=1e-3)
    return out.sequences


@older("beam_lookahead", 314, "Beam search finds sequences of higher probability than greedy search does.")
def _(lib):
    ids = lib.ids(rows=4, seed=9)
    given = {"max_new_tokens": 6, "eos_token_id": None}
    found = []
    for more in ({}, {"num_beams": 6}):
        said = lib.model().generate(ids, **given, **more)
        logits = lib.model()(said, use_cache=False).logits[:, 5:-1].log_softmax(-1)
        found.append(logits.gather(2, said[:, 6:, None])[..., 0].sum(1))
    assert bool((found[1] >= found[0] - 1e-4).all())
    assert bool((found[1] > found[0] + 1e-3).any())


@older("beam_sample", 79, "Beams with `do_sample=True` are beam sampling.")
def _(lib):
    torch.manual_seed(0)
    return lib.model().generate(lib.ids(), num_beams=4, do_sample=True, max_new_tokens=5)


@older("beam_sampling_t5", 345, "Beam sampling works on an encoder-decoder model.")
def _(lib):
    torch.manual_seed(0)
    return lib.model("t5").generate(lib.ids("t5", 8), num_beams=5, do_sample=True, max_new_tokens=6)


@older("diverse", 398, "Five beams in five groups with a penalty of 1.0 are diverse beam search.")
def _(lib):
    return lib.model("t5").generate(
        lib.ids("t5", 8), num_beams=5, num_beam_groups=5, diversity_penalty=1.0, max_new_tokens=6
    )


@newer("diverse2", 312, "Six beams in three groups with a penalty of 1.0 and `do_sample=False`.")
def _(lib):
    return lib.model().generate(
        lib.ids(), num_beams=6, num_beam_groups=3, diversity_penalty=1.0, do_sample=False, max_new_tokens=6
    )


@older("diverse_differ", 369, "The diversity penalty makes the groups differ.")
def _(lib):
    given = {"num_beams": 4, "num_beam_groups": 4, "num_return_sequences": 4, "max_new_tokens": 3}
    found = lib.model().generate(lib.ids(), diversity_penalty=50.0, eos_token_id=None, **given)
    assert len(set(found[:, 6].tolist())) == 4
    return found


@newer("groups_divide", 301, "The number of beams must be divisible by the number of groups.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(
            lib.ids(), num_beams=5, num_beam_groups=2, diversity_penalty=1.0, max_new_tokens=2
        )


@field("groups_penalty", 232, "Groups without a diversity penalty are an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), num_beams=4, num_beam_groups=2, max_new_tokens=2)


@field("groups_sample", 161, "Groups with sampling are an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(
            lib.ids(), num_beams=4, num_beam_groups=2, diversity_penalty=1.0, do_sample=True, max_new_tokens=2
        )


for _stop in (True, False, "never"):

    @field(f"es_gen_{_stop}", 143, f"`early_stopping={_stop!r}` is a stopping condition of beam search.")
    def _(lib, stop=_stop):
        out = lib.model().generate(
            lib.ids(rows=3),
            num_beams=4,
            num_return_sequences=4,
            early_stopping=stop,
            max_new_tokens=10,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return ended(out.sequences[0::4]), out.sequences_scores[0::4]


for _penalty in (-1.0, 0.0, 2.0):

    @field(f"lp_gen_{_penalty}", 241, f"`length_penalty={_penalty}` is the exponent of a sequence's length.")
    def _(lib, penalty=_penalty):
        out = lib.model().generate(
            lib.ids(rows=2),
            num_beams=3,
            length_penalty=penalty,
            max_new_tokens=9,
            early_stopping=True,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return ended(out.sequences), out.sequences_scores


@field("lp_direction", 243, "A positive length penalty promotes longer sequences than a negative one.")
def _(lib):
    sizes = []
    for penalty in (-5.0, 5.0):
        found = lib.model().generate(
            lib.ids(rows=6, seed=21), num_beams=4, length_penalty=penalty, max_new_tokens=12
        )
        sizes.append(sum(len(row) for row in ended(found)))
    assert sizes[0] <= sizes[1]
    return sizes


@call("batch_beams", 2248, "Beams of a left-padded batch with several returned sequences.")
def _(lib):
    return lib.model().generate(**lib.batch((4, 7, 2)), num_beams=3, num_return_sequences=2, max_new_tokens=6)


@call(
    "low_mem",
    2248,
    "`low_memory` with beams gives the same sequences.",
    theirs="It refuses `low_memory` with beams since its search was rewritten.",
)
def _(lib):
    given = {"num_beams": 3, "max_new_tokens": 4}
    found = lib.model().generate(lib.ids(), low_memory=True, **given)
    assert torch.equal(found, lib.model().generate(lib.ids(), **given))


# -------------------------------------------------------------------- scorers
@utilities("bs_abstract", 1773, "BeamScorer is abstract: it cannot be made without `process` and `finalize`.")
def _(lib):
    with refused(TypeError, NotImplementedError):
        lib.BeamScorer().process(None, None, None, None)


def searched(lib, scorer, beams, count=4, groups=1):
    """Sequences and scores of a loop around a scorer, over the tiny Llama."""
    model, ids = lib.model(), lib.ids(rows=2).repeat_interleave(beams, 0)
    sums = torch.full((2, beams), -1e9)
    sums[:, 0] = 0
    sums = sums.view(-1)
    for _ in range(count):
        shares = model(ids, use_cache=False).logits[:, -1].log_softmax(-1)
        total = (shares + sums[:, None]).view(2, -1)
        best, index = total.topk(2 * beams, 1)
        vocab = shares.shape[1]
        found = scorer.process(
            ids,
            best,
            index % vocab,
            index // vocab,
            pad_token_id=0,
            eos_token_id=2,
            decoder_prompt_len=6,
        )
        sums = found["next_beam_scores"]
        chosen, tokens = found["next_beam_indices"], found["next_beam_tokens"]
        ids = torch.cat((ids[chosen], tokens[:, None]), 1)
        if scorer.is_done:
            break
    end = scorer.finalize(
        ids,
        sums,
        tokens,
        chosen,
        max_length=ids.shape[1],
        pad_token_id=0,
        eos_token_id=2,
        decoder_prompt_len=6,
    )
    return end["sequences"], end["sequence_scores"]


def scorer(lib, beams=3, **more):
    """A scorer of two prompts."""
    return lib.BeamSearchScorer(batch_size=2, num_beams=beams, device=torch.device("cpu"), **more)


@utilities("bs_loop", 1780, "BeamSearchScorer gives sequences to a loop of one's own.")
def _(lib):
    return searched(lib, scorer(lib), 3)[0]


@utilities("bs_keep", 1807, "`num_beam_hyps_to_keep` is the number of sequences that `finalize` returns.")
def _(lib):
    found = searched(lib, scorer(lib, num_beam_hyps_to_keep=2), 3)[0]
    assert len(found) == 4
    return found


@utilities("bs_lp", 1799, "`length_penalty` of the scorer promotes longer or shorter sequences.")
def _(lib):
    return [searched(lib, scorer(lib, length_penalty=value), 3, 6)[0] for value in (-2.0, 2.0)]


@utilities("bs_early_true", 1803, "`do_early_stopping=True` ends when there are enough candidates.")
def _(lib):
    return searched(lib, scorer(lib, do_early_stopping=True), 3, 8)[0]


@utilities(
    "bs_early_never",
    1805,
    "`do_early_stopping='never'` goes on while a better candidate is possible.",
)
def _(lib):
    found, _ = searched(lib, scorer(lib, do_early_stopping="never", max_length=14, length_penalty=1.0), 3, 8)
    assert len(found) == 2


@utilities("bs_groups", 1810, "`num_beam_groups` divides the beams of the scorer.")
def _(lib):
    made = scorer(lib, beams=4, num_beam_groups=2)
    assert made.num_beam_groups == 2
    with refused(ValueError):
        scorer(lib, beams=4, num_beam_groups=3)


@utilities("bs_one_beam", 1791, "A scorer needs more than one beam.")
def _(lib):
    with refused(ValueError):
        scorer(lib, beams=1)


@utilities("bs_constrained", 1820, "ConstrainedBeamSearchScorer takes the scores of the whole vocabulary.")
def _(lib):
    beams, model = 3, lib.model()
    made = lib.ConstrainedBeamSearchScorer(
        batch_size=1, num_beams=beams, constraints=[lib.PhrasalConstraint([7, 8])], device=torch.device("cpu")
    )
    ids, sums = lib.ids().repeat_interleave(beams, 0), torch.tensor([0.0, -1e9, -1e9])
    for _ in range(5):
        shares = model(ids, use_cache=False).logits[:, -1].log_softmax(-1)
        whole = shares + sums[:, None]
        best, index = whole.view(1, -1).topk(2 * beams, 1)
        vocab = shares.shape[1]
        found = made.process(ids, best, index % vocab, index // vocab, whole, pad_token_id=0, eos_token_id=2)
        sums, tokens = found["next_beam_scores"], found["next_beam_tokens"]
        chosen = found["next_beam_indices"]
        ids = torch.cat((ids[chosen], tokens[:, None]), 1)
        if made.is_done:
            break
    end = made.finalize(ids, sums, tokens, chosen, max_length=ids.shape[1], pad_token_id=0, eos_token_id=2)
    text = end["sequences"][0].tolist()
    assert any(text[at : at + 2] == [7, 8] for at in range(len(text)))
