"""generate() as a model's method: documented lengths in padded batches, documented arguments, inheritance."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers

import descant
from descant import ConfigError, InputError, NotInThisVersion
from tests.unit.core.test_call_batch import padded

MASKED = {"eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture
def attached(tiny):
    one = tiny("llama")
    descant.attach(one.model)
    yield one
    descant.detach(one.model)


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 12},
        {"max_length": 12, "forced_eos_token_id": 7},
        {"min_length": 9, "max_new_tokens": 5},
        {"min_length": 11, "max_length": 13, "num_beams": 2},
        {"max_length": 11, "num_beams": 3, "forced_eos_token_id": 7},
    ],
    ids=str,
)
def test_lengths_count_the_padding_as_transformers_counts(options, attached):
    inputs = padded(attached, (8, 3, 5))
    ours = attached.model.generate(**inputs, **MASKED, **options)
    descant.detach(attached.model)
    theirs = attached.model.generate(**inputs, **MASKED, **options)
    descant.attach(attached.model)
    assert ours.tolist() == theirs.tolist()
    if options == {"max_length": 12}:
        by_criterion = attached.model.generate(
            **inputs, **MASKED, stopping_criteria=[transformers.MaxLengthCriteria(12)]
        )
        assert by_criterion.tolist() == theirs.tolist()


def test_the_function_counts_each_rows_own_tokens(tiny):
    one = tiny("llama")
    inputs = padded(one, (8, 3))
    both = descant.generate(one.model, **inputs, max_length=12, eos_token_id=None, pad_token_id=0)
    alone = descant.generate(one.model, inputs["input_ids"][1:, 5:], max_length=12, eos_token_id=None)
    assert both[1, 5:].tolist() == alone[0].tolist()
    assert both.shape == (2, 17)
    with pytest.raises(ConfigError, match="must be > the 8 tokens"):
        descant.attach(one.model).generate(**inputs, max_length=8)
    descant.detach(one.model)


def test_a_class_inherits_the_methods(tiny):
    one = tiny("llama")

    class Writer(descant.GenerationMixin, transformers.LlamaForCausalLM):
        """A Llama whose generate() is Descant's."""

    writer = Writer.from_pretrained(one.folder).eval()
    inputs = padded(one, (4, 2))
    arguments = {"max_length": 9, "return_dict_in_generate": True, "output_scores": True, "logprobs": 0}
    out = writer.generate(**inputs, **arguments)
    assert out.logprobs is not None, "ours"
    theirs = one.model.generate(**inputs, max_length=9)
    assert out.sequences.tolist() == theirs.tolist()
    mine = writer.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    wanted = descant.compute_transition_scores(one.model, out.sequences, out.scores, normalize_logits=True)
    assert torch.equal(mine, wanted)


def test_attach_and_detach_leave_nothing(tiny):
    model = tiny("llama").model
    before = dict(vars(model))
    descant.attach(model)
    assert model.generate.__func__ is descant.GenerationMixin.generate
    assert model.compute_transition_scores.__func__ is descant.GenerationMixin.compute_transition_scores
    descant.detach(model)
    assert dict(vars(model)) == before
    with pytest.raises(InputError, match="attached"):
        descant.detach(model)


def test_arguments_have_the_documented_order(tiny):
    names = list(inspect.signature(descant.generate).parameters)
    assert names == [
        "model", "inputs", "generation_config", "logits_processor", "stopping_criteria",
        "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "streamer", "negative_prompt_ids",
        "negative_prompt_attention_mask", "use_model_defaults", "custom_generate", "kwargs",
    ]  # fmt: skip
    one, ids = tiny("llama"), torch.tensor([[5, 6, 7]])
    config = descant.GenerationConfig(max_new_tokens=3, eos_token_id=None)
    only = descant.generate(one.model, ids, config, None, None, lambda row, seen: [9])
    assert only[0, 3:].tolist() == [9, 9, 9]
    assert descant.generate(one.model, ids, config, None, None, None, None, one.model).shape == (1, 6)
    doubled = descant.generate(one.model, ids, config, custom_generate=lambda model, inputs, **_: inputs * 2)
    assert doubled.tolist() == (2 * ids).tolist()


def test_use_model_defaults(tiny):
    model, ids = tiny("llama").model, torch.tensor([[5, 6, 7]])
    kept = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=2, pad_token_id=0, eos_token_id=2, repetition_penalty=9.0
    )
    try:
        own = descant.GenerationConfig(min_new_tokens=1)
        assert descant.generate(model, ids, own).shape == (1, 5)
        assert descant.generate(model, ids, own, use_model_defaults=True).shape == (1, 5)
        free = descant.generate(model, ids, own, use_model_defaults=False)
        wanted = descant.generate(
            model, ids, max_new_tokens=20, min_new_tokens=1, repetition_penalty=1.0, eos_token_id=2
        )
        assert free.tolist() == wanted.tolist()
        kept_length = descant.generate(model, ids, min_new_tokens=2, use_model_defaults=False)
        assert kept_length.shape == (1, 5), "no config given: the model's own applies"
        events = list(descant.stream(model, ids, generation_config=own, use_model_defaults=False))
        assert [token for event in events for token in event.token_ids] == free[0, 3:].tolist()
    finally:
        model.generation_config = kept


def test_use_model_defaults_is_refused_where_it_is_not_read(tiny):
    with pytest.raises(InputError, match="use_model_defaults"):
        descant.generate(
            tiny("llama").model,
            torch.tensor([[5]]),
            custom_generate=lambda model, **_: 0,
            use_model_defaults=False,
        )


def test_forced_decoder_ids(tiny):
    llama, bart = tiny("llama"), tiny("bart")
    ids = padded(llama, (4, 2))
    forced = [[1, 9], [3, 11], [4, None]]
    out = descant.generate(llama.model, **ids, forced_decoder_ids=forced, max_new_tokens=5, eos_token_id=None)
    assert out[:, 4].tolist() == [9, 9]
    assert out[:, 6].tolist() == [11, 11]
    source = torch.tensor([[5, 6, 7]])
    spoken = descant.generate(
        bart.model, source, forced_decoder_ids=[[1, 9], [2, 12]], max_new_tokens=4, num_beams=2
    )
    assert spoken[0, 1:3].tolist() == [9, 12]
    for wrong in ([[0, 9]], [[1, 999]]):
        with pytest.raises(ConfigError, match="forced_decoder_ids"):
            descant.generate(llama.model, **ids, forced_decoder_ids=wrong)


def test_generation_kwargs_are_arguments_of_the_call(tiny):
    model, ids = tiny("llama").model, torch.tensor([[5, 6, 7]])
    config = descant.GenerationConfig(
        max_new_tokens=2, generation_kwargs={"max_new_tokens": 4, "min_new_tokens": 4}
    )
    assert descant.generate(model, ids, config).shape == (1, 7)
    assert descant.generate(model, ids, config, max_new_tokens=5).shape == (1, 8)
    with pytest.raises(InputError, match="`alien` is neither"):
        descant.generate(model, ids, generation_kwargs={"alien": 1})
    with pytest.raises(ConfigError, match="generation_kwargs"):
        descant.Session(model).admit(
            descant.Request([5], descant.GenerationConfig(generation_kwargs={"alien": 1}))
        )


def test_a_whisper_refuses_what_it_does_not_read():
    from tests.unit.api.whisper.subjects import whisper

    with pytest.raises(NotInThisVersion, match="use_model_defaults"):
        descant.generate(whisper(), use_model_defaults=False)
