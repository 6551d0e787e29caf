"""Assisted decoding, prompt lookup and early exit."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import heard, refused, word_tokenizer
from tests.reference.spec_sentences.sentence import CONFIG, NEWER, NOTES, STRATEGIES, page

older, newer, notes, field = page(STRATEGIES), page(NEWER), page(NOTES), page(CONFIG)

BATCH = "Any batch is drafted and verified row by row."
COMBINED = "4.52.4 does not refuse it, but decodes without the draft model."


def drafted(lib, **more):
    """A call with a draft model of the same vocabulary."""
    with heard():
        return lib.model().generate(lib.ids(), assistant_model=lib.model("mistral"), max_new_tokens=8, **more)


@older("assisted", 419, "`assistant_model` enables assisted decoding; greedy tokens stay the same.")
def _(lib):
    found = drafted(lib)
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=8))
    return found


@notes("assisted_notes", 106, "Drafting does not change what the large model would say.")
def _(lib):
    ids = lib.ids(length=9, seed=13)
    with heard():
        found = lib.model().generate(ids, assistant_model=lib.model("mistral"), max_new_tokens=12)
    assert torch.equal(found, lib.model().generate(ids, max_new_tokens=12))
    return found


@older("assisted_sample", 476, "Assisted decoding samples with a temperature.")
def _(lib):
    torch.manual_seed(42)
    found = drafted(lib, do_sample=True, temperature=0.5)
    assert found.shape[1] <= 14
    assert torch.equal(found[:, :6], lib.ids())


@older("assisted_cold", 461, "The temperature controls the randomness of assisted sampling.")
def _(lib):
    found = drafted(lib, do_sample=True, temperature=1e-4)
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=8))
    return found


@older("assisted_beams", 416, "Assisted decoding with beams is an error.", theirs=COMBINED)
def _(lib):
    with refused(ValueError):
        drafted(lib, num_beams=2)


@older("assisted_batch", 416, "Assisted decoding takes no batches.", ours=BATCH)
def _(lib):
    with heard(), refused(ValueError):
        lib.model().generate(lib.ids(rows=2), assistant_model=lib.model("mistral"), max_new_tokens=4)


@older("assisted_contrastive", 416, "Assisted decoding with contrastive search is an error.", theirs=COMBINED)
def _(lib):
    with refused(ValueError):
        drafted(lib, penalty_alpha=0.6, top_k=4)


@newer("lookup", 159, "`prompt_lookup_num_tokens` drafts from the prompt; tokens stay the same.")
def _(lib):
    ids = torch.cat((lib.ids(length=5), lib.ids(length=5)), 1)
    found = lib.model().generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=8)
    assert torch.equal(found, lib.model().generate(ids, max_new_tokens=8))
    return found


@newer("lookup_and_assistant", 170, "A lookup may be given beside a draft model.")
def _(lib):
    found = drafted(lib, prompt_lookup_num_tokens=5)
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=8))


@older("lookup_older", 495, "The lookup takes n-grams in place of a model.")
def _(lib):
    found = lib.model("gpt-neox").generate(
        lib.ids("gpt-neox", 8), prompt_lookup_num_tokens=2, max_new_tokens=6
    )
    assert torch.equal(found, lib.model("gpt-neox").generate(lib.ids("gpt-neox", 8), max_new_tokens=6))


@field("matching", 368, "`max_matching_ngram_size` is the longest n-gram of the lookup.")
def _(lib):
    found = lib.model().generate(
        lib.ids(), prompt_lookup_num_tokens=3, max_matching_ngram_size=1, max_new_tokens=6
    )
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=6))


@older("early_exit", 504, "`assistant_early_exit` drafts with the first layers; tokens stay the same.")
def _(lib):
    with heard():
        found = lib.model("qwen2").generate(
            lib.ids("qwen2"), assistant_early_exit=1, do_sample=False, max_new_tokens=8
        )
    assert torch.equal(found, lib.model("qwen2").generate(lib.ids("qwen2"), max_new_tokens=8))
    return found


@newer("early_exit_newer", 177, "The result of self-speculation is that of the whole model.")
def _(lib):
    with heard():
        found = lib.model().generate(lib.ids(seed=7), assistant_early_exit=1, max_new_tokens=6)
    assert torch.equal(found, lib.model().generate(lib.ids(seed=7), max_new_tokens=6))


for _schedule in ("constant", "heuristic", "heuristic_transient"):

    @field(f"schedule_{_schedule}", 353, f"`num_assistant_tokens_schedule` may be {_schedule!r}.")
    def _(lib, schedule=_schedule):
        config = lib.GenerationConfig(num_assistant_tokens_schedule=schedule, max_new_tokens=8)
        with heard():
            found = lib.model().generate(
                lib.ids(), generation_config=config, assistant_model=lib.model("mistral")
            )
        assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=8))


for _name, _value in (("num_assistant_tokens", 4), ("assistant_confidence_threshold", 0.6)):

    @field(f"knob_{_name}", 348, f"`{_name}` changes the drafts and not the tokens.")
    def _(lib, name=_name, value=_value):
        config = lib.GenerationConfig(max_new_tokens=8, **{name: value})
        with heard():
            found = lib.model().generate(
                lib.ids(), generation_config=config, assistant_model=lib.model("mistral")
            )
        assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=8))


@older("assisted_default_length", 433, "Assisted decoding without a length generates 20 new tokens.")
def _(lib):
    with heard():
        found = lib.model().generate(lib.ids(), assistant_model=lib.model("mistral"), eos_token_id=None)
    assert found.shape[1] == 26
    return found


@older("uad", 486, "With two tokenizers, drafts are re-encoded and the tokens stay the same.")
def _(lib):
    other = word_tokenizer(["two", "one", "at", "st"])
    given = {"tokenizer": lib.tokenizer, "assistant_tokenizer": other, "max_new_tokens": 6}
    with heard():
        found = lib.model().generate(lib.ids(), assistant_model=lib.model("gpt-neox"), **given)
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=6))
