"""Processors through generate: penalties, bans, biases, forced tokens."""

from __future__ import annotations

import itertools

import torch

from tests.reference.spec_sentences.library import refused
from tests.reference.spec_sentences.sentence import CONFIG, GENERATE, UTILITIES, page

says, field, call = page(UTILITIES), page(CONFIG), page(GENERATE)


def said(lib, name="llama", length=6, **more):
    """A call without an end, and the plain one."""
    given = {"max_new_tokens": 6, "eos_token_id": None, **more}
    return lib.model(name).generate(lib.ids(name, length), **given)


def scored(lib, name="llama", **more):
    """The scores of a call."""
    given = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True, **more}
    return lib.model(name).generate(lib.ids(name), **given).scores


@says("enc_ngram", 177, "`encoder_no_repeat_ngram_size` prevents the n-grams of the prompt.")
def _(lib):
    found = said(lib, encoder_no_repeat_ngram_size=1, length=9)
    assert not set(found[0, 9:].tolist()) & set(found[0, :9].tolist())
    return found


@says("enc_penalty", 216, "An encoder repetition penalty above 1 raises the odds of prompt tokens.")
def _(lib):
    prompt = lib.ids()[0].tolist()
    plain, found = (
        scored(lib, **more)[0][0].log_softmax(-1).exp()[prompt].sum()
        for more in ({}, {"encoder_repetition_penalty": 1.5})
    )
    assert float(found) > float(plain)
    return said(lib, encoder_repetition_penalty=1.5)


@says("enc_penalty_low", 224, "Between 0 and 1 it penalizes prompt tokens.")
def _(lib):
    prompt = lib.ids()[0].tolist()
    plain, found = (
        scored(lib, **more)[0][0].log_softmax(-1).exp()[prompt].sum()
        for more in ({}, {"encoder_repetition_penalty": 0.5})
    )
    assert float(found) < float(plain)


@says("enc_penalty_t5", 219, "The encoder's tokens count on encoder-decoder models.")
def _(lib):
    return said(lib, "t5", encoder_repetition_penalty=1.5), said(lib, "t5", encoder_no_repeat_ngram_size=2)


@says("decay", 344, "The end token's score grows exponentially after the start index.")
def _(lib):
    found = scored(lib, exponential_decay_length_penalty=(1, 2.0), max_new_tokens=4, min_new_tokens=None)
    return list(found)


@says("decay_gen", 388, "`exponential_decay_length_penalty=(15, 1.6)` in a sampled call.")
def _(lib):
    torch.manual_seed(1)
    return lib.model().generate(
        lib.ids(), do_sample=True, temperature=0.9, max_length=30, exponential_decay_length_penalty=(15, 1.6)
    )


@says("forced_bos", 434, "`forced_bos_token_id` as the end token ends an encoder-decoder call at once.")
def _(lib):
    found = lib.model("t5").generate(lib.ids("t5"), max_new_tokens=5, forced_bos_token_id=1)
    assert found.tolist() == [[0, 1]]


@says("forced_bos_bart", 412, "`forced_bos_token_id` is the first generated token.")
def _(lib):
    found = lib.model("bart").generate(lib.ids("bart"), max_new_tokens=4, forced_bos_token_id=9)
    assert int(found[0, 1]) == 9
    return found


@says("forced_eos", 469, "`forced_eos_token_id` is the last token when the maximum length is reached.")
def _(lib):
    found = said(lib, forced_eos_token_id=8)
    assert int(found[0, -1]) == 8
    return found


@says("forced_eos_list", 449, "`forced_eos_token_id` may be a list.")
def _(lib):
    found = said(lib, forced_eos_token_id=[8, 9])
    assert int(found[0, -1]) in (8, 9)
    return found


@field(
    "forced_dec",
    283,
    "`forced_decoder_ids` forces tokens at their positions.",
    theirs="It refuses the field for models other than Whisper.",
)
def _(lib):
    found = lib.model("bart").generate(
        lib.ids("bart"), max_new_tokens=4, forced_decoder_ids=[[1, 9], [2, 10]]
    )
    assert found[0, 1:3].tolist() == [9, 10]
    return found


@field("infnan_gen", 270, "`remove_invalid_values` keeps a call from failing.")
def _(lib):
    return said(lib, remove_invalid_values=True)


@says("custom_processor", 111, "A processor of one's own in a list changes the scores.")
def _(lib):
    class Only(lib.LogitsProcessor):
        def __call__(self, input_ids, scores):
            kept = torch.full_like(scores, -torch.inf)
            kept[:, 7] = 0
            return kept

    found = said(lib, logits_processor=lib.LogitsProcessorList([Only()]))
    assert found[0, 6:].tolist() == [7] * 6


@says("custom_order", 111, "Processors of one's own come after those of the config.")
def _(lib):
    seen = []

    def watch(input_ids, scores):
        seen.append(bool(torch.isinf(scores[0, 5])))
        return scores

    said(lib, suppress_tokens=[5], logits_processor=[watch])
    assert all(seen)


@says("custom_function", 111, "A plain list of functions is taken too.")
def _(lib):
    def only(input_ids, scores):
        return torch.where(torch.arange(scores.shape[1]) == 9, scores, -torch.inf)

    return said(lib, logits_processor=[only])


@says("min_length", 599, "`min_length` counts the prompt of a decoder-only model.")
def _(lib):
    plain = said(lib)
    end = int(plain[0, 7])
    found = lib.model().generate(lib.ids(), min_length=10, max_length=14, eos_token_id=end)
    assert found.shape[1] >= 10
    return found


@says("min_new", 638, "`min_new_tokens` does not count the prompt.")
def _(lib):
    end = int(said(lib)[0, 6])
    found = lib.model().generate(lib.ids(), min_new_tokens=4, max_new_tokens=8, eos_token_id=end)
    assert found.shape[1] >= 10
    return found


@says("badwords", 721, "`bad_words_ids` are never generated.")
def _(lib):
    banned = [[token] for token in said(lib)[0, 6:].tolist()]
    found = said(lib, bad_words_ids=banned)
    assert not {one for word in banned for one in word} & set(found[0, 6:].tolist())
    return found


@says("badwords_run", 734, "A bad word of several tokens is prevented where it would be completed.")
def _(lib):
    plain = said(lib)[0].tolist()
    found = said(lib, bad_words_ids=[plain[6:8]])
    row = found[0].tolist()
    assert all(row[at : at + 2] != plain[6:8] for at in range(6, 11))
    return found


@says("norepeat", 780, "`no_repeat_ngram_size` counts the prompt of a decoder-only model.")
def _(lib):
    found = said(lib, no_repeat_ngram_size=1)
    row = found[0].tolist()
    assert len(set(row)) == len(row) or len(set(row[6:])) == 6
    return found


@says("norepeat2", 794, "With size 2 no pair of tokens occurs twice.")
def _(lib):
    row = said(lib, no_repeat_ngram_size=2, max_new_tokens=20)[0].tolist()
    pairs = list(itertools.pairwise(row))
    assert len(set(pairs)) == len(pairs)


@says("prefix", 857, "`prefix_allowed_tokens_fn` allows only some tokens.")
def _(lib):
    found = said(lib, prefix_allowed_tokens_fn=lambda batch, ids: [11, 12, 13])
    assert set(found[0, 6:].tolist()) <= {11, 12, 13}
    return found


@says("prefix_beams", 823, "The prefix function works with beams, and knows the batch.")
def _(lib):
    return lib.model().generate(
        lib.ids(rows=2),
        num_beams=3,
        max_new_tokens=4,
        eos_token_id=None,
        prefix_allowed_tokens_fn=lambda batch, ids: [11, 12, 13] if batch else [21, 22, 23],
    )


@says("prefix_example", 847, "The example: an entity is completed once it has begun.")
def _(lib):
    entity = [31, 32, 33]

    def allowed(batch, ids):
        if int(ids[-1]) == entity[0]:
            return [entity[1]]
        if int(ids[-2]) == entity[0] and int(ids[-1]) == entity[1]:
            return [entity[2]]
        return list(range(97))

    ids = torch.cat((lib.ids(), torch.tensor([[31]])), 1)
    found = lib.model().generate(ids, max_new_tokens=5, prefix_allowed_tokens_fn=allowed)
    assert found[0, 7:9].tolist() == [32, 33]
    return found


@says("rep_gen", 894, "`repetition_penalty` in a call.")
def _(lib):
    return said(lib, repetition_penalty=1.6, max_new_tokens=12)


@says("rep_prompt", 866, "The repetition penalty counts the prompt of a decoder-only model.")
def _(lib):
    prompt = lib.ids()[0].tolist()
    plain, found = (
        scored(lib, max_new_tokens=1, **more)[0][0][prompt] for more in ({}, {"repetition_penalty": 2.0})
    )
    want = torch.where(plain > 0, plain / 2, plain * 2)
    assert torch.allclose(found, want, atol=1e-4)


@says("seqbias", 918, "`sequence_bias` is a list of sequences and their biases.")
def _(lib):
    return said(lib, sequence_bias=[[[10, 45], -2.0], [[64], 7.5]])


@says(
    "seqbias_literal",
    946,
    "The example gives `sequence_bias` as a flat pair of tokens and bias.",
    ours="A list of pairs is needed, as the arguments document it.",
    theirs="A list of pairs is needed, as the arguments document it.",
)
def _(lib):
    said(lib, sequence_bias=[[64], -10.0])


@says("seqbias_positive", 919, "A positive bias raises the odds of a sequence.")
def _(lib):
    found = said(lib, sequence_bias=[[[64], 50.0]])
    assert set(found[0, 6:].tolist()) == {64}


@says("begin_suppress", 965, "`begin_suppress_tokens` are not generated first, but may be later.")
def _(lib):
    first = int(said(lib)[0, 6])
    found = scored(lib, begin_suppress_tokens=[first])
    assert bool(torch.isinf(found[0][0, first]))
    assert bool(torch.isfinite(found[1][0, first]))
    return list(found)


@says("begin_suppress_none", 991, "None disables `begin_suppress_tokens`.")
def _(lib):
    assert all(bool(torch.isfinite(step).all()) for step in scored(lib, begin_suppress_tokens=None))


@says("suppress", 1000, "`suppress_tokens` have a score of -inf at every step.")
def _(lib):
    found = scored(lib, suppress_tokens=[4, 5])
    assert all(bool(torch.isinf(step[:, [4, 5]]).all()) for step in found)
    return list(found)


@says("suppress_none", 1020, "None disables `suppress_tokens`.")
def _(lib):
    assert all(bool(torch.isfinite(step).all()) for step in scored(lib, suppress_tokens=None))


@call("all_at_once", 2270, "Processors and warpers run in their documented order.")
def _(lib):
    torch.manual_seed(5)
    return lib.model().generate(
        lib.ids(rows=2),
        do_sample=True,
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.95,
        epsilon_cutoff=1e-4,
        eta_cutoff=1e-4,
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        bad_words_ids=[[9]],
        suppress_tokens=[8],
        sequence_bias=[[[7], 0.5]],
        min_new_tokens=3,
        renormalize_logits=True,
        max_new_tokens=8,
    )


@call(
    "duplicate_processor",
    2271,
    "A processor that the config already makes must not be given again.",
    ours="Both run: that of the caller after that of the config.",
    theirs="It warns, and takes the caller's in place of the config's.",
)
def _(lib):
    with refused(ValueError):
        said(
            lib,
            repetition_penalty=1.2,
            logits_processor=lib.LogitsProcessorList([lib.RepetitionPenaltyLogitsProcessor(1.2)]),
        )
