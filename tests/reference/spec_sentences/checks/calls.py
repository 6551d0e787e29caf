"""A plain call: its lengths, its sequences, its pipeline, its end."""

from __future__ import annotations

import torch
import transformers

from tests.reference.spec_sentences.library import ended, heard, refused
from tests.reference.spec_sentences.sentence import (
    AUTOREGRESSIVE,
    GENERATE,
    NEWER,
    NOTES,
    STRATEGIES,
    UTILITIES,
    page,
)

older, newer, basics = page(STRATEGIES), page(NEWER), page(AUTOREGRESSIVE)
notes, utilities, call = page(NOTES), page(UTILITIES), page(GENERATE)


@newer("default_20", 29, "Greedy search generates at most 20 new tokens unless told otherwise.")
def _(lib):
    found = lib.model().generate(lib.ids(length=6), eos_token_id=None)
    assert found.shape == (1, 26)
    return found


@older(
    "default_20_total",
    69,
    "The default limit of 20 tokens includes the prompt.",
    ours="The newer page and 4.52.4 say 20 new tokens, and so does Descant.",
    theirs="4.52.4 counts 20 new tokens when no length is given.",
)
def _(lib):
    assert lib.model().generate(lib.ids(length=6), eos_token_id=None).shape[1] == 20


@older("greedy_is_argmax", 70, "The default strategy takes the likeliest token at every step.")
def _(lib):
    ids = lib.ids()
    found = lib.model().generate(ids, max_new_tokens=6, eos_token_id=None)
    assert torch.equal(found, lib.greedy(ids, 6))
    return found


@notes("notes_greedy", 17, "Greedy search selects the token of highest conditional probability.")
def _(lib):
    ids = lib.ids("gpt2", seed=8)
    found = lib.model("gpt2").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, eos_token_id=None
    )
    assert torch.equal(found, lib.greedy(ids, 5, "gpt2"))


@older("mnt", 85, "`max_new_tokens` does not count the prompt.")
def _(lib):
    widths = [
        lib.model().generate(lib.ids(length=n), max_new_tokens=4, eos_token_id=None).shape[1] for n in (3, 9)
    ]
    assert widths == [7, 13]


@utilities("maxlen_prompt", 1556, "`max_length` counts the prompt of a decoder-only model.")
def _(lib):
    return lib.model().generate(lib.ids(length=6), max_length=10, eos_token_id=None).shape[1]


@call("maxlen_padded", 2314, "`max_length` counts the padded width of a batch.")
def _(lib):
    found = lib.model().generate(**lib.batch((3, 8)), max_length=12, eos_token_id=None)
    assert found.shape == (2, 12)
    return found


@utilities("maxlen_encdec", 1556, "`max_length` counts the decoder's tokens of an encoder-decoder model.")
def _(lib):
    return lib.model("t5").generate(lib.ids("t5", 9), max_length=7, eos_token_id=None).shape[1]


@older("both_lengths", 85, "`max_new_tokens` wins where `max_length` is given too.")
def _(lib):
    with heard():
        return (
            lib.model()
            .generate(lib.ids(length=6), max_length=8, max_new_tokens=5, eos_token_id=None)
            .shape[1]
        )


@older("nrs_sample", 95, "Sampling returns several sequences for each input.")
def _(lib):
    found = lib.model().generate(lib.ids(rows=2), do_sample=True, num_return_sequences=3, max_new_tokens=3)
    assert found.shape[0] == 6
    return found


@older("nrs_beams", 95, "Beam search returns several sequences for each input.")
def _(lib):
    found = lib.model().generate(lib.ids(rows=2), num_beams=3, num_return_sequences=2, max_new_tokens=3)
    assert found.shape[0] == 4
    return ended(found)


@older("nrs_greedy", 97, "Greedy search returns one sequence: asking for more is an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), num_return_sequences=2, max_new_tokens=2)


@older("nrs_contrastive", 97, "Contrastive search returns one sequence: asking for more is an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), penalty_alpha=0.6, top_k=4, num_return_sequences=2, max_new_tokens=2)


@call("nrs_gt_beams", 2248, "More sequences than beams are an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), num_beams=2, num_return_sequences=3, max_new_tokens=2)


@older("as_method", 47, "`generate` is a method of the model and takes the tokenizer's output.")
def _(lib):
    inputs = lib.tokenizer(["one, two"], return_tensors="pt", return_token_type_ids=False)
    return lib.model().generate(**inputs, max_new_tokens=3)


@older("pipe", 46, "A text-generation pipeline calls the model's generate.")
def _(lib):
    pipe = transformers.pipeline("text-generation", model=lib.model(), tokenizer=lib.tokenizer)
    with heard():
        found = pipe("one, two", max_new_tokens=4, do_sample=False)
    assert found[0]["generated_text"].startswith("one, two")
    return found[0]["generated_text"]


@older(
    "pipe_assistant",
    440,
    "A pipeline takes an assistant model.",
)
def _(lib):
    pipe = transformers.pipeline(
        "text-generation", model=lib.model(), tokenizer=lib.tokenizer, assistant_model=lib.model("mistral")
    )
    with heard():
        found = pipe("one, two", max_new_tokens=4, do_sample=False)
    assert found[0]["generated_text"].startswith("one, two")


@notes("pipe_notes", 89, "A pipeline takes a criterion with a length and an iterator, and a streamer.")
def _(lib):
    class Stop(lib.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return len(input_ids[0]) > 12

        def __len__(self):
            return 1

        def __iter__(self):
            yield self

    streamer = lib.TextStreamer(lib.tokenizer, skip_prompt=True)
    streamer.on_finalized_text = lambda text, stream_end=False: None
    pipe = transformers.pipeline(
        "text-generation",
        model=lib.model(),
        tokenizer=lib.tokenizer,
        do_sample=False,
        num_return_sequences=1,
        eos_token_id=lib.tokenizer.eos_token_id,
        stopping_criteria=Stop(),
        streamer=streamer,
    )
    with heard():
        found = pipe("one, two", max_new_tokens=9)
    return found[0]["generated_text"]


@basics("mask_inferred", 97, "A mask that is not given is inferred from the padding.")
def _(lib):
    batch = lib.batch((4, 7))
    with heard():
        found = lib.model().generate(batch["input_ids"], max_new_tokens=4)
    assert torch.equal(found, lib.model().generate(**batch, max_new_tokens=4))
    return found


@basics("prompt_returned", 99, "A decoder-only model returns the prompt and its continuation.")
def _(lib):
    ids = lib.ids()
    found = lib.model().generate(ids, max_new_tokens=3)
    assert torch.equal(found[:, :6], ids)


@basics("eos_stop", 69, "A row ends at the end token, else at the maximum length; ended rows are padded.")
def _(lib):
    ids = lib.ids(rows=4)
    first = lib.model().generate(ids, max_new_tokens=8, eos_token_id=None)
    end = int(first[1, 8])
    found = lib.model().generate(ids, max_new_tokens=8, eos_token_id=end)
    for row in found[:, 6:].tolist():
        if end in row:
            assert set(row[row.index(end) + 1 :]) <= {0}
    return found


@basics("mask_given", 97, "The tokenizer's mask is taken by generate.")
def _(lib):
    inputs = lib.tokenizer(["one", "to stop"], return_tensors="pt", padding=True, return_token_type_ids=False)
    assert "attention_mask" in inputs
    return lib.model().generate(**inputs, max_new_tokens=3)


@call(
    "positional", 2228, "The second to fifth positional arguments are config, processors, criteria, prefix."
)
def _(lib):
    config = lib.GenerationConfig(max_new_tokens=3)
    return lib.model().generate(lib.ids(), config, None, None, lambda batch, ids: [5, 6, 7])


@call("positional_assistant", 2233, "Further positional arguments are `synced_gpus` and `assistant_model`.")
def _(lib):
    config = lib.GenerationConfig(max_new_tokens=3)
    with heard():
        return lib.model().generate(lib.ids(), config, None, None, None, False, lib.model("mistral"))


@utilities("inputs_name", 1369, "The prompt may be given by the name `inputs`.")
def _(lib):
    return lib.model().generate(inputs=lib.ids(), max_new_tokens=3)


@call("no_input", 2258, "Without any input, generation begins with the start token in a batch of one.")
def _(lib):
    found = lib.model().generate(max_new_tokens=3)
    assert int(found[0, 0]) == 1
    return found


@call("synced", 2287, "`synced_gpus` may be False or None on one device.")
def _(lib):
    ids = lib.ids()
    assert torch.equal(
        lib.model().generate(ids, max_new_tokens=3, synced_gpus=False),
        lib.model().generate(ids, max_new_tokens=3, synced_gpus=None),
    )


@call(
    "right_pad",
    2248,
    "Right-padded prompts of a decoder-only model give a warning.",
    ours="Padding is removed on either side, so that a prompt gives the tokens it gives alone.",
)
def _(lib):
    ids = torch.cat((lib.ids(rows=2), torch.zeros(2, 2, dtype=torch.long)), 1)
    mask = (ids != 0).long()
    with heard() as said:
        lib.model().generate(ids, attention_mask=mask, max_new_tokens=2)
    assert any("padding" in line for line in said)


@call("use_defaults", 2304, "`use_model_defaults=False` takes global defaults for what the config lacks.")
def _(lib):
    model = lib.model("bart")
    config = lib.GenerationConfig(
        max_new_tokens=4, decoder_start_token_id=2, pad_token_id=1, eos_token_id=2, bos_token_id=0
    )
    return [
        model.generate(lib.ids("bart"), generation_config=config, use_model_defaults=flag)
        for flag in (True, False, None)
    ]
