"""Samplers through generate: the same samples after the same seed."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import heard
from tests.reference.spec_sentences.sentence import CONFIG, UTILITIES, page

says, field = page(UTILITIES), page(CONFIG)


SAMPLERS = {
    "temperature": (203, 0.7),
    "top_k": (205, 4),
    "top_p": (207, 0.6),
    "min_p": (210, 0.1),
    "typical_p": (214, 0.5),
    "epsilon_cutoff": (220, 0.05),
    "eta_cutoff": (225, 0.1),
}
for _name, (_line, _value) in SAMPLERS.items():

    @field(f"sample_{_name}", _line, f"`{_name}={_value}` shapes what is sampled.")
    def _(lib, name=_name, value=_value):
        torch.manual_seed(11)
        return lib.model().generate(
            lib.ids(rows=3), do_sample=True, max_new_tokens=6, **{"top_k": 0, name: value}
        )

    @field(f"nosample_{_name}", _line, f"`{_name}` has no effect without sampling.")
    def _(lib, name=_name, value=_value):
        with heard():
            found = lib.model().generate(lib.ids(), max_new_tokens=4, **{name: value})
        assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=4))


@says("temperature_cold", 1138, "A temperature near 0 approximates greedy search.")
def _(lib):
    found = lib.model().generate(
        lib.ids(), do_sample=True, temperature=1e-4, num_return_sequences=2, max_new_tokens=6
    )
    plain = lib.model().generate(lib.ids(), max_new_tokens=6)
    assert torch.equal(found, plain.repeat(2, 1))


@says("temperature_default", 1131, "A temperature of 1 is the default.")
def _(lib):
    found = []
    for more in ({}, {"temperature": 1.0}):
        torch.manual_seed(6)
        found.append(lib.model().generate(lib.ids(), do_sample=True, max_new_tokens=6, **more))
    assert torch.equal(*found)
    return found[0]


@says("topk_two", 1178, "With `top_k=2` every token is one of the two likeliest.")
def _(lib):
    torch.manual_seed(2)
    found = lib.model().generate(lib.ids(), do_sample=True, top_k=2, max_new_tokens=6, eos_token_id=None)
    best = lib.model()(found, use_cache=False).logits[:, 5:-1].topk(2).indices
    assert bool((best == found[:, 6:, None]).any(-1).all())
    return found


@says("topp_small", 1218, "A tiny `top_p` leaves the likeliest token.")
def _(lib):
    found = lib.model().generate(lib.ids(), do_sample=True, top_p=1e-6, max_new_tokens=6)
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=6))


@says("typical_gen", 1264, "With `typical_p=0.1` the likeliest token can be blocked out.")
def _(lib):
    torch.manual_seed(18)
    out = lib.model().generate(
        lib.ids(),
        do_sample=True,
        typical_p=0.1,
        top_k=0,
        max_new_tokens=5,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=None,
    )
    return out.sequences, list(out.scores)


@says("epsilon_gen", 284, "`epsilon_cutoff` restricts samples to probable tokens.")
def _(lib):
    torch.manual_seed(1)
    found = lib.model().generate(
        lib.ids(), do_sample=True, top_k=0, epsilon_cutoff=0.2, max_new_tokens=6, eos_token_id=None
    )
    shares = lib.model()(found, use_cache=False).logits[:, 5:-1].softmax(-1)
    chosen = shares.gather(2, found[:, 6:, None])[..., 0]
    assert bool(((chosen >= 0.2) | (chosen == shares.amax(-1))).all())
    return found
