"""What generate can be fed, and settings of the call."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import heard, refused
from tests.reference.spec_sentences.sentence import AUTOREGRESSIVE, CONFIG, GENERATE, page

call, field, basics = page(GENERATE), page(CONFIG), page(AUTOREGRESSIVE)


@call("embeds", 2258, "With embeddings as the prompt only the new tokens come back.")
def _(lib):
    embeds = lib.model().get_input_embeddings()(lib.ids())
    found = lib.model().generate(inputs_embeds=embeds, max_new_tokens=4, eos_token_id=None)
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=4, eos_token_id=None)[:, 6:])
    return found


@call("embeds_ids", 2258, "Embeddings may be given beside the ids, which are returned.")
def _(lib):
    embeds = lib.model().get_input_embeddings()(lib.ids())
    return lib.model().generate(lib.ids(), inputs_embeds=embeds, max_new_tokens=3, eos_token_id=None)


@call("dec_ids", 2316, "`decoder_input_ids` are the decoder's prompt.")
def _(lib):
    found = lib.model("bart").generate(
        lib.ids("bart"), decoder_input_ids=torch.tensor([[2, 7, 8]]), max_new_tokens=3, eos_token_id=None
    )
    assert found[0, :3].tolist() == [2, 7, 8]
    return found


@call("enc_out", 2314, "Encoder outputs may be given in place of the encoder's input.")
def _(lib):
    model, ids = lib.model("t5"), lib.ids("t5")
    states = model.get_encoder()(input_ids=ids, return_dict=True)
    found = model.generate(encoder_outputs=states, max_new_tokens=4)
    assert torch.equal(found, model.generate(ids, max_new_tokens=4))
    return found


@call("encdec_inputs", 2261, "For an encoder-decoder model the prompt goes to the encoder.")
def _(lib):
    found = lib.model("t5").generate(inputs=lib.ids("t5"), max_new_tokens=4)
    assert int(found[0, 0]) == 0
    return found


@call("encdec_batch", 2314, "A padded batch of an encoder-decoder model with its mask.")
def _(lib):
    return lib.model("bart").generate(**lib.batch((3, 7), "bart"), max_new_tokens=5)


@basics("modalities", 110, "Models of other inputs share the interface: an encoder's states as input.")
def _(lib):
    model, ids = lib.model("bart"), lib.ids("bart")
    embeds = model.get_input_embeddings()(ids) * getattr(model.model.encoder, "embed_scale", 1.0)
    states = model.get_encoder()(inputs_embeds=embeds, return_dict=True)
    return model.generate(encoder_outputs=states, max_new_tokens=3)


@basics("gen_config_loaded", 71, "The config in the model's folder is loaded with the model.")
def _(lib):
    config = lib.model("bart").generation_config
    return config.decoder_start_token_id, config.eos_token_id


@field("gkwargs", 391, "`generation_kwargs` are further arguments of the call.")
def _(lib):
    config = lib.GenerationConfig(max_new_tokens=3, generation_kwargs={"eos_token_id": 5})
    assert dict(config.generation_kwargs) == {"eos_token_id": 5}


@field(
    "healing",
    291,
    "`token_healing` writes the end of the prompt again.",
    theirs="It needs a tokenizer in which a blank is a token of its own.",
)
def _(lib):
    inputs = lib.tokenizer(["one st"], return_tensors="pt", return_token_type_ids=False)
    found = lib.model().generate(**inputs, token_healing=True, tokenizer=lib.tokenizer, max_new_tokens=4)
    assert lib.tokenizer.decode(found[0]).startswith("one s")


@field("healing_no", 291, "`token_healing` needs the tokenizer.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), token_healing=True, max_new_tokens=3)


@field("low_mem_no", 298, "`low_memory` without beams or contrastive search is ignored.")
def _(lib):
    with heard():
        lib.model().generate(lib.ids(), low_memory=True, max_new_tokens=2)


@field("nocache", 178, "`use_cache=False` gives the same tokens.")
def _(lib):
    found = lib.model().generate(lib.ids(), use_cache=False, max_new_tokens=5)
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=5))


@field("compile_off", 387, "`disable_compile=True` gives the same tokens.")
def _(lib):
    found = lib.model().generate(
        lib.ids(), disable_compile=True, cache_implementation="static", max_new_tokens=4
    )
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=4))


@field("chunk", 194, "`prefill_chunk_size` feeds the prompt in pieces and gives the same tokens.")
def _(lib):
    found = lib.model().generate(lib.ids(length=9), prefill_chunk_size=4, max_new_tokens=4)
    assert torch.equal(found, lib.model().generate(lib.ids(length=9), max_new_tokens=4))
