"""The processors called by hand: their values on fixed scores, and what they refuse."""

from __future__ import annotations

import math

import torch

from tests.reference.spec_sentences.library import refused, scores
from tests.reference.spec_sentences.sentence import LOGITS, UTILITIES, page

says, api = page(UTILITIES), page(LOGITS)

IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 2, 7, 2]])

# name -> line, arguments
DIRECT = {
    "EncoderNoRepeatNGramLogitsProcessor": (177, {"encoder_ngram_size": 2, "encoder_input_ids": IDS}),
    "EncoderRepetitionPenaltyLogitsProcessor": (215, {"penalty": 1.4, "encoder_input_ids": IDS}),
    "EpsilonLogitsWarper": (252, {"epsilon": 0.05}),
    "EtaLogitsWarper": (292, {"epsilon": 0.1}),
    "ExponentialDecayLengthPenalty": (
        344,
        {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": 2, "input_ids_seq_length": 2},
    ),
    "ForcedBOSTokenLogitsProcessor": (412, {"bos_token_id": 4}),
    "ForcedEOSTokenLogitsProcessor": (444, {"max_length": 6, "eos_token_id": 2}),
    "LogitNormalization": (561, {}),
    "MinLengthLogitsProcessor": (598, {"min_length": 9, "eos_token_id": 2}),
    "MinNewTokensLengthLogitsProcessor": (
        637,
        {"prompt_length_to_skip": 3, "min_new_tokens": 4, "eos_token_id": 2},
    ),
    "MinPLogitsWarper": (674, {"min_p": 0.1}),
    "NoBadWordsLogitsProcessor": (721, {"bad_words_ids": [[6], [1, 5, 8], [2, 9]], "eos_token_id": 2}),
    "NoRepeatNGramLogitsProcessor": (778, {"ngram_size": 2}),
    "RepetitionPenaltyLogitsProcessor": (865, {"penalty": 1.3}),
    "SequenceBiasLogitsProcessor": (902, {"sequence_bias": [[[6], -2.0], [[1, 5], 3.0], [[2, 9], 4.0]]}),
    "SuppressTokensAtBeginLogitsProcessor": (965, {"begin_suppress_tokens": [3, 4], "begin_index": 5}),
    "SuppressTokensLogitsProcessor": (1000, {"suppress_tokens": [3, 4]}),
    "TemperatureLogitsWarper": (1101, {"temperature": 0.7}),
    "TopKLogitsWarper": (1149, {"top_k": 3}),
    "TopPLogitsWarper": (1186, {"top_p": 0.7}),
    "TypicalLogitsWarper": (1226, {"mass": 0.6}),
    "InfNanRemoveLogitsProcessor": (552, {}),
}
for _name, (_line, _given) in DIRECT.items():

    @says(f"direct_{_name}", _line, f"{_name} processes scores, and does not change those it is given.")
    def _(lib, name=_name, given=_given):
        before = scores()
        kept = before.clone()
        found = getattr(lib, name)(**given)(IDS, before)
        assert torch.equal(before, kept)
        return found


# -------------------------------------------------------------------- filter_value and min_tokens_to_keep
WARPERS = {
    "EpsilonLogitsWarper": (259, {"epsilon": 0.4}),
    "EtaLogitsWarper": (305, {"epsilon": 0.4}),
    "MinPLogitsWarper": (688, {"min_p": 0.9}),
    "TopKLogitsWarper": (1155, {"top_k": 1}),
    "TopPLogitsWarper": (1193, {"top_p": 0.05}),
    "TypicalLogitsWarper": (1235, {"mass": 0.05}),
}
for _name, (_line, _given) in WARPERS.items():

    @says(f"filter_value_{_name}", _line, f"`filter_value` replaces what {_name} filters, by default -inf.")
    def _(lib, name=_name, given=_given):
        found = getattr(lib, name)(**given, filter_value=-77.0)(IDS, scores())
        assert bool((found == -77.0).any())
        assert bool(torch.isinf(getattr(lib, name)(**given)(IDS, scores())).any())
        return found

    @says(f"keep_{_name}", _line + 2, f"`min_tokens_to_keep` tokens are never filtered by {_name}.")
    def _(lib, name=_name, given=_given):
        found = getattr(lib, name)(**given, min_tokens_to_keep=4)(IDS, scores())
        assert bool((torch.isfinite(found).sum(1) >= 4).all())
        return found

    @says(
        f"keep_bad_{_name}",
        _line + 2,
        f"`min_tokens_to_keep=0` of {_name} is an error.",
        theirs="It takes the larger of this and `top_k`." if _name == "TopKLogitsWarper" else "",
    )
    def _(lib, name=_name, given=_given):
        with refused(ValueError):
            getattr(lib, name)(**given, min_tokens_to_keep=0)


# -------------------------------------------------------------------- what is refused
REFUSED = {
    "epsilon": ("EpsilonLogitsWarper", 257, [{"epsilon": 0.0}, {"epsilon": 1.0}]),
    "eta": ("EtaLogitsWarper", 303, [{"epsilon": 0.0}, {"epsilon": 1.0}]),
    "temperature": ("TemperatureLogitsWarper", 1114, [{"temperature": 0.0}, {"temperature": -1.0}]),
    "topk": ("TopKLogitsWarper", 1153, [{"top_k": 0}, {"top_k": -2}]),
    "topp": ("TopPLogitsWarper", 1190, [{"top_p": -0.1}, {"top_p": 1.1}]),
    "typical": ("TypicalLogitsWarper", 1234, [{"mass": 0.0}, {"mass": 1.0}]),
    "minp": ("MinPLogitsWarper", 684, [{"min_p": -0.1}, {"min_p": 1.5}]),
    "repetition": ("RepetitionPenaltyLogitsProcessor", 874, [{"penalty": 0.0}, {"penalty": -1.0}]),
    "ngram": ("NoRepeatNGramLogitsProcessor", 793, [{"ngram_size": 0}]),
    "badwords": ("NoBadWordsLogitsProcessor", 734, [{"bad_words_ids": []}, {"bad_words_ids": [[]]}]),
    "minlength": ("MinLengthLogitsProcessor", 602, [{"min_length": -1, "eos_token_id": 2}]),
    "seqbias": ("SequenceBiasLogitsProcessor", 917, [{"sequence_bias": []}, {"sequence_bias": [[[], 1.0]]}]),
}
THEIRS = {
    "badwords": "It accepts an empty word.",
    "seqbias": "It accepts a sequence without tokens.",
}
for _name, (_kind, _line, _wrong) in REFUSED.items():

    @says(
        f"refuse_{_name}",
        _line,
        f"{_kind} refuses values outside of its range.",
        theirs=THEIRS.get(_name, ""),
    )
    def _(lib, kind=_kind, wrong=_wrong):
        for given in wrong:
            with refused(ValueError):
                getattr(lib, kind)(**given)


# -------------------------------------------------------------------- rules
def probs(*values):
    """Scores whose softmax is given."""
    return torch.tensor([values]).log()


@says("epsilon_rule", 258, "Epsilon keeps tokens of at least that probability.")
def _(lib):
    found = lib.EpsilonLogitsWarper(0.15)(IDS[:1], probs(0.5, 0.2, 0.15, 0.1, 0.05))
    return torch.isfinite(found)


@says("epsilon_none", 253, "If no token reaches epsilon, the largest is kept.")
def _(lib):
    found = lib.EpsilonLogitsWarper(0.9)(IDS[:1], probs(0.4, 0.35, 0.25))
    return torch.isfinite(found)


def eta(values, cutoff):
    entropy = -sum(value * math.log(value) for value in values)
    return min(0.3, cutoff(entropy))


@says(
    "eta_doc",
    294,
    "The cutoff of eta is min(epsilon, sqrt(epsilon * e^-entropy)).",
    ours="The cutoff is min(epsilon, sqrt(epsilon) * e^-entropy), as in 4.52.4 and in the paper.",
    theirs="Its code computes min(epsilon, sqrt(epsilon) * e^-entropy), as in the paper.",
)
def _(lib):
    values = (0.4, 0.24, 0.16, 0.12, 0.08)
    cut = eta(values, lambda entropy: math.sqrt(0.3 * math.exp(-entropy)))
    found = lib.EtaLogitsWarper(0.3)(IDS[:1], probs(*values))
    assert torch.isfinite(found)[0].tolist() == [value >= cut for value in values]


@api("eta_code", 860, "The cutoff of eta is min(epsilon, sqrt(epsilon) * e^-entropy).")
def _(lib):
    values = (0.4, 0.24, 0.16, 0.12, 0.08)
    cut = eta(values, lambda entropy: math.sqrt(0.3) * math.exp(-entropy))
    found = lib.EtaLogitsWarper(0.3)(IDS[:1], probs(*values))
    assert torch.isfinite(found)[0].tolist() == [value >= cut for value in values]


@says("minp_rule", 674, "min-p keeps tokens of at least that share of the likeliest.")
def _(lib):
    return torch.isfinite(lib.MinPLogitsWarper(0.3)(IDS[:1], probs(0.5, 0.2, 0.16, 0.14)))


@says("topp_rule", 1191, "top-p keeps the smallest set of tokens that adds up to top_p or more.")
def _(lib):
    found = torch.isfinite(lib.TopPLogitsWarper(0.65)(IDS[:1], probs(0.5, 0.2, 0.16, 0.14)))
    assert found[0].tolist() == [True, True, False, False]


@says("topk_rule", 1149, "top-k keeps the k likeliest.")
def _(lib):
    assert int(torch.isfinite(lib.TopKLogitsWarper(3)(IDS[:1], scores(1))).sum()) == 3


@says("typical_default", 1233, "The typical mass is 0.9 by default.")
def _(lib):
    made = lib.TypicalLogitsWarper()
    assert torch.equal(made(IDS, scores()), lib.TypicalLogitsWarper(mass=0.9)(IDS, scores()))


@says("typical_top", 1227, "Typical decoding may discard the likeliest token.")
def _(lib):
    found = torch.isfinite(lib.TypicalLogitsWarper(0.2)(IDS[:1], probs(0.4, 0.22, 0.2, 0.18)))
    assert not bool(found[0, 0])
    return found


@says("temperature_rule", 1114, "The temperature divides the scores.")
def _(lib):
    assert torch.allclose(lib.TemperatureLogitsWarper(0.5)(IDS, scores()), scores() / 0.5)


@api(
    "temperature_int",
    267,
    "A temperature must be a float.",
    ours="An integer is a number too and is accepted.",
)
def _(lib):
    with refused(ValueError):
        lib.TemperatureLogitsWarper(2)


@says("rep_once", 865, "The repetition penalty is applied once for a token, however often it occurred.")
def _(lib):
    one, many = torch.tensor([[3, 1]]), torch.tensor([[3, 1, 3, 3, 1]])
    made = lib.RepetitionPenaltyLogitsProcessor(1.5)
    assert torch.equal(made(one, scores(1)), made(many, scores(1)))


@says("rep_reward", 876, "A repetition penalty below 1 rewards repetition.")
def _(lib):
    found = lib.RepetitionPenaltyLogitsProcessor(0.5)(torch.tensor([[3]]), scores(1))
    assert float(found[0, 3]) > float(scores(1)[0, 3])


@says("rep_one", 875, "A repetition penalty of 1 is none.")
def _(lib):
    assert torch.equal(lib.RepetitionPenaltyLogitsProcessor(1.0)(IDS, scores()), scores())


@says("seqbias_always", 920, "The bias of a single token is always applied.")
def _(lib):
    found = lib.SequenceBiasLogitsProcessor([[[6], -2.0]])(IDS, scores())
    assert torch.allclose(found[:, 6], scores()[:, 6] - 2.0)


@says("seqbias_when", 921, "The bias of a longer sequence is applied when it is about to be completed.")
def _(lib):
    found = lib.SequenceBiasLogitsProcessor([[[1, 5, 8], 3.0]])(IDS, scores())
    assert torch.allclose(found[0, 8], scores()[0, 8] + 3.0)
    assert torch.allclose(found[1], scores()[1])


@api("seqbias_dict", 1070, "`sequence_bias` may be a dict with tuples as keys.")
def _(lib):
    return lib.SequenceBiasLogitsProcessor({(6,): -2.0, (1, 5): 3.0})(IDS, scores())


@says("hamming", 490, "The diversity penalty is subtracted for tokens that other groups chose at this step.")
def _(lib):
    made = lib.HammingDiversityLogitsProcessor(diversity_penalty=2.0, num_beams=4, num_beam_groups=2)
    given, now = torch.zeros(2, 11), torch.tensor([3, 3, 0, 0])
    return made(torch.zeros(2, 4, dtype=torch.long), given, now, beam_group_idx=1)


@says("hamming_first", 490, "The first group has no penalty.")
def _(lib):
    made = lib.HammingDiversityLogitsProcessor(diversity_penalty=2.0, num_beams=4, num_beam_groups=2)
    found = made(
        torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 11), torch.tensor([3, 3, 0, 0]), beam_group_idx=0
    )
    assert not bool(found.any())


@says("infnan", 552, "NaN and infinite scores are removed.")
def _(lib):
    given = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]])
    found = lib.InfNanRemoveLogitsProcessor()(IDS[:1], given)
    assert bool(torch.isfinite(found).all())
    return found[:, [0, 3]]


@says("min_length_inf", 603, "Below the minimum length the end token's score is -inf.")
def _(lib):
    made = lib.MinLengthLogitsProcessor(6, eos_token_id=[2, 3])
    assert bool(torch.isinf(made(IDS, scores())[:, [2, 3]]).all())
    assert torch.equal(lib.MinLengthLogitsProcessor(5, eos_token_id=2)(IDS, scores()), scores())


@says("badwords_eos", 736, "A bad word that is the end token is left out.")
def _(lib):
    found = lib.NoBadWordsLogitsProcessor([[2], [6]], eos_token_id=2)(IDS, scores())
    assert bool(torch.isfinite(found[:, 2]).all())
    assert bool(torch.isinf(found[:, 6]).all())


# -------------------------------------------------------------------- base and list
@says("abstract", 591, "LogitsProcessor is abstract: its call is not implemented.")
def _(lib):
    class Mine(lib.LogitsProcessor):
        pass

    with refused(NotImplementedError):
        Mine()(IDS, scores())


@says("plist", 594, "LogitsProcessorList applies its members in order and is a list.")
def _(lib):
    made = lib.LogitsProcessorList([lib.TemperatureLogitsWarper(0.5), lib.TopKLogitsWarper(3)])
    assert isinstance(made, list)
    found = made(IDS, scores())
    assert torch.equal(found, lib.TopKLogitsWarper(3)(IDS, scores() / 0.5))


@says("plist_kwargs", 594, "The list passes further arguments to members that take them.")
def _(lib):
    made = lib.LogitsProcessorList(
        [
            lib.TemperatureLogitsWarper(0.5),
            lib.HammingDiversityLogitsProcessor(2.0, num_beams=4, num_beam_groups=2),
        ]
    )
    ids = torch.zeros(2, 4, dtype=torch.long)
    return made(ids, torch.zeros(2, 11), current_tokens=torch.tensor([3, 3, 0, 0]), beam_group_idx=1)


@says("plist_missing", 594, "A missing further argument is an error.")
def _(lib):
    made = lib.LogitsProcessorList([lib.HammingDiversityLogitsProcessor(2.0, num_beams=4, num_beam_groups=2)])
    with refused(ValueError):
        made(IDS, scores())


@says("prefix_rule", 823, "Only the tokens that the prefix function allows keep their scores.")
def _(lib):
    made = lib.PrefixConstrainedLogitsProcessor(lambda batch, ids: [3, int(ids[-1])], num_beams=1)
    found = made(IDS, scores())
    assert torch.isfinite(found).sum(1).tolist() == [2, 2]
    return found


@says("prefix_batch", 824, "The prefix function gets the number of the batch, the same for all beams.")
def _(lib):
    seen = []

    def allowed(batch, ids):
        seen.append(batch)
        return [1]

    lib.PrefixConstrainedLogitsProcessor(allowed, num_beams=2)(IDS.repeat(2, 1), scores(4))
    return sorted(seen)


@says("prefix_empty", 824, "An empty answer of the prefix function is an error.")
def _(lib):
    with refused(ValueError):
        lib.PrefixConstrainedLogitsProcessor(lambda batch, ids: [], num_beams=1)(IDS, scores())


def transformers_config(lib):
    """A config object with the fields of Whisper."""
    import transformers

    config = transformers.GenerationConfig(eos_token_id=2, bos_token_id=1)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 19, 3
    return config


@says("whisper_ts", 1333, "Timestamps come in pairs.")
def _(lib):
    made = lib.WhisperTimeStampLogitsProcessor(transformers_config(lib), begin_index=2)
    rows = [1, 5, 21, 6], [1, 5, 6, 21], [1, 5, 6, 21, 21]
    return [torch.isfinite(made(torch.tensor([row]), scores(1, 30))) for row in rows]


@says("whisper_ts_first", 1351, "The first timestamp has a maximum.")
def _(lib):
    made = lib.WhisperTimeStampLogitsProcessor(transformers_config(lib), begin_index=2)
    return torch.isfinite(made(torch.tensor([[1, 5]]), scores(1, 30)))


@says("whisper_ts_sum", 1335, "If timestamps together are likelier than any text token, text is excluded.")
def _(lib):
    made = lib.WhisperTimeStampLogitsProcessor(transformers_config(lib), begin_index=2)
    given = torch.zeros(1, 30)
    given[:, 5] = 0.1
    found = torch.isfinite(made(torch.tensor([[1, 5, 6, 7]]), given))
    assert not bool(found[:, :19].any())
    return found
