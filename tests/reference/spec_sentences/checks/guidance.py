"""Classifier-free guidance."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import refused, scores
from tests.reference.spec_sentences.sentence import GENERATE, UTILITIES, page

says, call = page(UTILITIES), page(GENERATE)


@says("cfg_formula", 138, "The first half is conditional, the second unconditional: their weighted average.")
def _(lib):
    given = scores(4)
    found = lib.ClassifierFreeGuidanceLogitsProcessor(guidance_scale=3.0)(
        torch.zeros(2, 3, dtype=torch.long), given
    )
    assert torch.allclose(found, given[2:] + 3.0 * (given[:2] - given[2:]))
    return found


@says("cfg_scale", 154, "Guidance needs a scale above 1.")
def _(lib):
    for scale in (1.0, 0.5):
        with refused(ValueError):
            lib.ClassifierFreeGuidanceLogitsProcessor(guidance_scale=scale)


@says("guidance", 1311, "Without a negative prompt, the unconditional one is the last token of the prompt.")
def _(lib):
    ids = lib.ids()
    found = lib.model().generate(ids, guidance_scale=1.5, max_new_tokens=6)
    assert torch.equal(
        found,
        lib.model().generate(ids, guidance_scale=1.5, negative_prompt_ids=ids[:, -1:], max_new_tokens=6),
    )
    return found


@says("guidance_neg", 1317, "A negative prompt is given as `negative_prompt_ids`.")
def _(lib):
    return lib.model().generate(
        lib.ids(), guidance_scale=2, negative_prompt_ids=lib.ids(length=4, seed=9), max_new_tokens=6
    )


@says("guidance_zero", 1323, "With a scale of 0 the negative prompt acts as a positive one.")
def _(lib):
    negative = lib.ids(length=4, seed=9)
    found = lib.model().generate(
        lib.ids(), guidance_scale=0, negative_prompt_ids=negative, max_new_tokens=5, eos_token_id=None
    )
    plain = lib.model().generate(negative, max_new_tokens=5, eos_token_id=None)
    assert torch.equal(found[:, 6:], plain[:, 4:])


@says("guidance_one", 1287, "A scale of 1 is no guidance.")
def _(lib):
    ids = lib.ids()
    assert torch.equal(
        lib.model().generate(ids, guidance_scale=1.0, max_new_tokens=5),
        lib.model().generate(ids, max_new_tokens=5),
    )


@call("guidance_mask", 2302, "The negative prompt has a mask of its own.")
def _(lib):
    negative = lib.batch((4, 2), seed=8)
    return lib.model().generate(
        lib.ids(rows=2),
        guidance_scale=2.0,
        negative_prompt_ids=negative["input_ids"],
        negative_prompt_attention_mask=negative["attention_mask"],
        max_new_tokens=4,
    )


@says("unbatched", 1279, "The processor runs the model on the unconditional prompt itself.")
def _(lib):
    ids, negative = lib.ids(), lib.ids(length=4, seed=9)
    made = lib.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, lib.model(), unconditional_ids=negative)
    logits = lib.model()(ids, use_cache=False).logits[:, -1]
    return made(ids, logits.clone())


@says("unbatched_last", 1295, "Without ids the processor begins from the last token of the prompt.")
def _(lib):
    ids = lib.ids()
    logits = lib.model()(ids, use_cache=False).logits[:, -1]
    made = [
        lib.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, lib.model(), **given)
        for given in ({}, {"unconditional_ids": ids[:, -1:]})
    ]
    found = [one(ids, logits.clone()) for one in made]
    assert torch.allclose(*found, atol=1e-5)
    return found[0]


@says("unbatched_cache", 1299, "`use_cache=False` gives the same scores.")
def _(lib):
    ids, negative = lib.ids(), lib.ids(length=4, seed=9)
    found = []
    for flag in (True, False):
        made = lib.UnbatchedClassifierFreeGuidanceLogitsProcessor(
            1.5, lib.model(), unconditional_ids=negative, use_cache=flag
        )
        said = ids
        for _ in range(2):
            logits = made(said, lib.model()(said, use_cache=False).logits[:, -1])
            said = torch.cat((said, logits.argmax(-1, keepdim=True)), 1)
        found.append(logits)
    assert torch.allclose(*found, atol=1e-4)
    return found[0]


@says("unbatched_mask", 1297, "The unconditional prompt takes a mask.")
def _(lib):
    ids, negative = lib.ids(), lib.ids(length=4, seed=9)
    made = lib.UnbatchedClassifierFreeGuidanceLogitsProcessor(
        2.0, lib.model(), unconditional_ids=negative, unconditional_attention_mask=torch.ones_like(negative)
    )
    return made(ids, lib.model()(ids, use_cache=False).logits[:, -1])


@says("alternating", 117, "The two codebooks of Bark alternate.")
def _(lib):
    made = lib.AlternatingCodebooksLogitsProcessor(input_start_len=3, semantic_vocab_size=4, codebook_size=3)
    found = []
    for length in (3, 4, 5):
        out = made(torch.zeros(1, length, dtype=torch.long), scores(1, 10))
        found.append([at for at in range(10) if bool(torch.isfinite(out[0, at]))])
    return found
