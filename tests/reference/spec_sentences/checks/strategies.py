"""Greedy search, sampling, contrastive search and DoLa."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import heard, refused
from tests.reference.spec_sentences.sentence import CONFIG, NEWER, NOTES, STRATEGIES, UTILITIES, page

older, newer, notes = page(STRATEGIES), page(NEWER), page(NOTES)
utilities, field = page(UTILITIES), page(CONFIG)


@older("contrastive", 267, "`penalty_alpha` and `top_k` give contrastive search.")
def _(lib):
    ids = lib.ids()
    found = lib.model().generate(ids, penalty_alpha=0.6, top_k=4, max_new_tokens=8)
    assert not torch.equal(found, lib.model().generate(ids, max_new_tokens=8))
    return found


@newer(
    "contrastive_alpha", 225, "`penalty_alpha` is the weight of the penalty: without it, tokens are greedy."
)
def _(lib):
    ids = lib.ids(seed=4)
    found = lib.model().generate(ids, penalty_alpha=0.9, top_k=3, max_new_tokens=8)
    plain = lib.model().generate(ids, max_new_tokens=8)
    assert not torch.equal(found, plain)
    return found, plain


@newer("contrastive_k", 225, "`top_k` is the number of likely tokens that are compared.")
def _(lib):
    ids = lib.ids()
    one = lib.model().generate(ids, penalty_alpha=0.6, top_k=2, max_new_tokens=6)
    more = lib.model().generate(ids, penalty_alpha=0.6, top_k=9, max_new_tokens=6)
    return one, more


@newer("contrastive_less_repetition", 223, "Contrastive search penalizes tokens that are like earlier ones.")
def _(lib):
    ids = lib.ids(length=4, seed=11)
    found = lib.model().generate(ids, penalty_alpha=0.8, top_k=6, max_new_tokens=16, eos_token_id=None)[0, 4:]
    plain = lib.model().generate(ids, max_new_tokens=16, eos_token_id=None)[0, 4:]
    assert len(set(found.tolist())) >= len(set(plain.tolist()))


@field("contrastive_low", 298, "Contrastive search gives the same tokens with `low_memory`.")
def _(lib):
    given = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 6}
    found = lib.model().generate(lib.ids(), low_memory=True, **given)
    assert torch.equal(found, lib.model().generate(lib.ids(), **given))


@older("sampling", 293, "`do_sample=True` with one beam samples; the seed makes it reproducible.")
def _(lib):
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append(lib.model().generate(lib.ids(), do_sample=True, num_beams=1, max_new_tokens=8))
    assert torch.equal(*found)
    return found[0]


@older("sampling_varies", 289, "Sampling chooses at random: another seed gives other tokens.")
def _(lib):
    found = set()
    for seed in range(5):
        torch.manual_seed(seed)
        found.add(str(lib.model().generate(lib.ids(), do_sample=True, max_new_tokens=6).tolist()))
    assert len(found) > 1


@newer("sampling_nonzero", 49, "Any token of nonzero probability can be sampled.")
def _(lib):
    torch.manual_seed(1)
    found = lib.model().generate(
        lib.ids(), do_sample=True, top_k=0, temperature=5.0, num_return_sequences=60, max_new_tokens=1
    )
    assert len(set(found[:, -1].tolist())) > 25
    return found


@newer("sampling_enabled", 51, "Sampling is enabled by `do_sample=True` and `num_beams=1`.")
def _(lib):
    torch.manual_seed(9)
    return lib.model("gpt-neox").generate(lib.ids("gpt-neox"), do_sample=True, num_beams=1, max_new_tokens=6)


@older(
    "logits_manipulation", 238, "`top_p`, `min_p` and `repetition_penalty` act on the logits of any strategy."
)
def _(lib):
    torch.manual_seed(2)
    given = {"top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3}
    return lib.model().generate(lib.ids(), do_sample=True, max_new_tokens=8, **given)


@older("no_training", 35, "A decoding strategy changes no parameter of the model.")
def _(lib):
    model = lib.model()
    before = [one.clone() for one in model.parameters()]
    model.generate(lib.ids(), num_beams=3, max_new_tokens=3)
    model.generate(lib.ids(), do_sample=True, max_new_tokens=3)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


# -------------------------------------------------------------------- DoLa
def dola(lib, layers, **more):
    """New tokens of a call with DoLa."""
    return lib.model("qwen2").generate(lib.ids("qwen2"), dola_layers=layers, max_new_tokens=6, **more)


@older("dola_low", 560, "`dola_layers='low'` contrasts the lower layers.")
def _(lib):
    return dola(lib, "low")


@older("dola_high", 560, "`dola_layers='high'` contrasts the higher layers.")
def _(lib):
    return dola(lib, "high")


@older("dola_ranges", 601, "Up to 40 layers, 'low' is range(0, N//2, 2) and 'high' is range(N//2, N, 2).")
def _(lib):
    # Three layers: [0] and [1].
    assert torch.equal(dola(lib, "low"), dola(lib, [0]))
    assert torch.equal(dola(lib, "high"), dola(lib, [1]))


@newer("dola_table", 256, "The table of layers: a model of two layers has [0] as low and [1] as high.")
def _(lib):
    found = {}
    for name, layers in (("low", [0]), ("high", [1])):
        given = lib.model().generate(lib.ids(), dola_layers=name, max_new_tokens=6)
        assert torch.equal(given, lib.model().generate(lib.ids(), dola_layers=layers, max_new_tokens=6))
        found[name] = given
    return found


@newer("dola_tied", 249, "With tied embeddings layer 0 is skipped.")
def _(lib):
    ids = lib.ids("gpt2")
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6}
    low = lib.model("gpt2").generate(ids, dola_layers="low", **given)
    assert torch.equal(low, lib.model("gpt2").generate(ids, dola_layers=[1], **given))
    return low


@older("dola_list", 561, "`dola_layers` may be a list of layer numbers, 0 being the embeddings.")
def _(lib):
    return dola(lib, [0, 2]), dola(lib, [1])


@newer("dola_penalty", 258, "DoLa is combined with `repetition_penalty=1.2`.")
def _(lib):
    return dola(lib, [0, 2], repetition_penalty=1.2)


@older("dola_upto", 561, "Layer numbers go up to the number of layers.")
def _(lib):
    found = dola(lib, [1, 3])
    assert torch.equal(found, dola(lib, [1]))
    return found


@older("dola_bad", 560, "Another string is an error.")
def _(lib):
    with refused(ValueError):
        dola(lib, "middle")


@older("dola_contrast", 555, "DoLa contrasts the last layer's prediction with an earlier one's.")
def _(lib):
    ids = lib.ids("qwen2")
    model = lib.model("qwen2")
    out = model(ids, output_hidden_states=True, use_cache=False)
    last = out.logits[:, -1].log_softmax(-1)
    early = model.lm_head(out.hidden_states[1][:, -1]).log_softmax(-1)
    plausible = last >= last.max() + torch.tensor(0.1).log()
    want = (last - early).masked_fill(~plausible, -torch.inf).argmax(-1)
    assert int(dola(lib, [1])[0, 6]) == int(want)


@older("dola_sample", 558, "DoLa is a setting of generate beside others: sampling from the contrast.")
def _(lib):
    torch.manual_seed(3)
    with heard():
        return dola(lib, "low", do_sample=True)
