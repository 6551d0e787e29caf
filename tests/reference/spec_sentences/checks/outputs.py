"""What generate returns."""

from __future__ import annotations

import torch
import transformers

from tests.reference.spec_sentences.library import heard
from tests.reference.spec_sentences.sentence import CONFIG, GENERATE, UTILITIES, page

says, call, field = page(UTILITIES), page(GENERATE), page(CONFIG)


def made(lib, name="llama", **more):
    """The record of a short call with scores."""
    given = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "max_new_tokens": 3,
        "eos_token_id": None,
    }
    return lib.model(name).generate(lib.ids(name, rows=2), **{**given, **more})


@says("out_modeloutput", 23, "The record is a ModelOutput.")
def _(lib):
    assert isinstance(made(lib), transformers.utils.ModelOutput)


@says("out_class", 39, "A decoder-only call returns GenerateDecoderOnlyOutput.")
def _(lib):
    out = made(lib)
    assert isinstance(out, lib.GenerateDecoderOnlyOutput)
    return type(out).__name__


@says("out_class_of_transformers", 39, "The record is one of transformers' own classes.")
def _(lib):
    kinds = transformers.generation.utils
    assert isinstance(made(lib), kinds.GenerateDecoderOnlyOutput)
    assert isinstance(made(lib, num_beams=2), kinds.GenerateBeamDecoderOnlyOutput)
    assert isinstance(made(lib, "bart"), kinds.GenerateEncoderDecoderOutput)
    assert isinstance(made(lib, "bart", num_beams=2), kinds.GenerateBeamEncoderDecoderOutput)


@says("out_none", 50, "What was not asked for is None.")
def _(lib):
    out = made(lib)
    assert out.scores is not None
    return out.hidden_states, out.attentions, out.logits


@says("out_slice", 58, "The first two elements are sequences and scores.")
def _(lib):
    out = made(lib)
    found = out[:2]
    assert found[0] is out.sequences
    assert found[1] is out.scores
    assert isinstance(found, tuple)


@says(
    "out_keys",
    64,
    "As a dictionary the record has two keys, sequences and scores.",
    ours="As in 4.52.4, a model's method adds the key past_key_values; `descant.generate` has these two.",
    theirs="4.52.4 adds the key past_key_values.",
)
def _(lib):
    assert list(made(lib).keys()) == ["sequences", "scores"]


@says("out_tuple", 54, "As a tuple the record has only what is not None.")
def _(lib):
    found = made(lib).to_tuple()
    assert all(one is not None for one in found)
    assert torch.is_tensor(found[0])


@says("out_access", 50, "Attribute, key and index give the same; membership and `get` work.")
def _(lib):
    out = made(lib)
    assert out["sequences"] is out[0] is out.sequences
    assert "scores" in out
    assert "attentions" not in out
    assert out.get("attentions") is None


@says("out_assign", 25, "Attribute and key stay one when the record is changed.")
def _(lib):
    out = made(lib)
    out["sequences"] = torch.zeros(1)
    assert out.sequences.shape == (1,)
    out.sequences = torch.zeros(2)
    assert out["sequences"].shape == (2,)


@says("out_positional", 71, "The output classes are made from positional arguments.")
def _(lib):
    sequences, steps = torch.zeros(1, 2), (torch.zeros(1, 3),)
    out = lib.GenerateDecoderOnlyOutput(sequences, steps)
    assert out.sequences is sequences
    assert out.scores is steps


@says("out_scores", 43, "There is one score tensor of batch and vocabulary for each step.")
def _(lib):
    out = made(lib)
    return [list(one.shape) for one in out.scores], list(out.scores)


@says("out_states", 44, "Hidden states are a tuple of steps of tuples of layers.")
def _(lib):
    out = made(lib, output_hidden_states=True)
    assert isinstance(out.hidden_states, tuple)
    return [[list(layer.shape) for layer in step] for step in out.hidden_states]


@says("out_states_values", 44, "Hidden states have the values of the model's layers.")
def _(lib):
    return [list(step) for step in made(lib, output_hidden_states=True).hidden_states]


@says("out_attentions", 45, "Attentions are a tuple of steps of tuples of layers.")
def _(lib):
    with heard():
        out = lib.model(attn_implementation="eager").generate(
            lib.ids(),
            return_dict_in_generate=True,
            output_attentions=True,
            max_new_tokens=3,
            eos_token_id=None,
        )
    return [[layer[..., :1].shape[2] for layer in step] for step in out.attentions]


@says("out_attentions_default", 48, "`output_attentions=True` works on a model loaded by default.")
def _(lib):
    with heard():
        out = lib.model().generate(
            lib.ids(),
            return_dict_in_generate=True,
            output_attentions=True,
            max_new_tokens=2,
            eos_token_id=None,
        )
    return [len(step) for step in out.attentions]


@says("out_encdec", 73, "An encoder-decoder call returns GenerateEncoderDecoderOutput.")
def _(lib):
    out = made(lib, "t5", output_hidden_states=True)
    assert isinstance(out, lib.GenerateEncoderDecoderOutput)
    return len(out.encoder_hidden_states), len(out.decoder_hidden_states)


@says("out_beam", 75, "A call with beams returns GenerateBeamDecoderOnlyOutput.")
def _(lib):
    out = made(lib, num_beams=3)
    assert isinstance(out, lib.GenerateBeamDecoderOnlyOutput)
    return out.sequences_scores, out.beam_indices


@says("out_beam_encdec", 77, "Beams of an encoder-decoder give GenerateBeamEncoderDecoderOutput.")
def _(lib):
    out = made(lib, "bart", num_beams=3)
    assert isinstance(out, lib.GenerateBeamEncoderDecoderOutput)
    return out.sequences_scores


FIELDS = {
    "GenerateDecoderOnlyOutput": (71, "sequences scores logits attentions hidden_states past_key_values"),
    "GenerateEncoderDecoderOutput": (
        73,
        "sequences scores logits encoder_attentions encoder_hidden_states decoder_attentions "
        "cross_attentions decoder_hidden_states past_key_values",
    ),
    "GenerateBeamDecoderOnlyOutput": (
        75,
        "sequences sequences_scores scores logits beam_indices attentions hidden_states past_key_values",
    ),
    "GenerateBeamEncoderDecoderOutput": (
        77,
        "sequences sequences_scores scores logits beam_indices encoder_attentions encoder_hidden_states "
        "decoder_attentions cross_attentions decoder_hidden_states past_key_values",
    ),
}
for _name, (_line, _fields) in FIELDS.items():

    @says(f"out_fields_{_name}", _line, f"{_name} has its documented fields, None where not given.")
    def _(lib, name=_name, fields=_fields):
        out = getattr(lib, name)(sequences=torch.zeros(1, 1))
        assert [getattr(out, one) for one in fields.split()[1:]] == [None] * (len(fields.split()) - 1)


@call("out_past", 2319, "The record always has the cache.")
def _(lib):
    cache = made(lib, "bart").past_key_values
    crossed = int(cache.cross_attention_cache.get_seq_length())
    return int(made(lib).past_key_values.get_seq_length()), int(cache.get_seq_length()), crossed


@call("out_past2", 2319, "With `use_cache=True` the record has the cache.")
def _(lib):
    return int(made(lib, use_cache=True).past_key_values.get_seq_length())


@call("transition", 1396, "Transition scores are the scores of the chosen tokens.")
def _(lib):
    out = made(lib)
    found = lib.model().compute_transition_scores(out.sequences, out.scores)
    want = torch.stack(
        [step.gather(1, out.sequences[:, 6 + at, None])[:, 0] for at, step in enumerate(out.scores)], 1
    )
    assert torch.allclose(found, want)
    return found


@call("transition_normalized", 1396, "Normalized transition scores are log-probabilities.")
def _(lib):
    out = made(lib)
    found = lib.model().compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert bool((found <= 0).all())
    return found


@call("transition_beams", 1430, "Of beams, their sum over the length is the score of the sequence.")
def _(lib):
    out = made(lib, num_beams=3)
    found = lib.model().compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    assert torch.allclose(found.sum(1) / 3, out.sequences_scores, atol=1e-3)
    return found


@field("raw_logits", 318, "`output_logits` gives the logits before processing.")
def _(lib):
    out = made(lib, output_logits=True, repetition_penalty=1.5)
    logits = lib.model()(out.sequences[:, :6], use_cache=False).logits[:, -1]
    assert torch.allclose(out.logits[0], logits, atol=1e-4)
    assert not torch.allclose(out.scores[0], logits, atol=1e-2)


@field("scores_no", 316, "`output_scores=True` without a record is ignored.")
def _(lib):
    with heard():
        lib.model().generate(lib.ids(), output_scores=True, max_new_tokens=2)


@call("tensor_by_default", 2319, "Without `return_dict_in_generate` the result is a tensor of ids.")
def _(lib):
    found = lib.model().generate(lib.ids(), max_new_tokens=2)
    assert found.dtype == torch.long
    assert torch.is_tensor(found)


@says("renorm_default", 577, "Scores are not normalized by default.")
def _(lib):
    total = made(lib).scores[-1].exp().sum(1)
    assert not torch.allclose(total, torch.ones(2), rtol=1e-3)


@says("renorm", 584, "With `renormalize_logits` the exponentials of scores sum to 1.")
def _(lib):
    out = made(lib, renormalize_logits=True)
    assert torch.allclose(out.scores[-1].exp().sum(1), torch.ones(2), rtol=1e-4)
    return list(out.scores)
