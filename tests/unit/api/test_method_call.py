"""generate() as a method tolerates what transformers 4.52.4 tolerates; descant.generate stays strict."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers

import descant
from descant.config.validation import TOLERATED
from descant.testing import toy

IDS = torch.tensor([[5, 17, 29, 41]])
UNUSED: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_beam_groups": 2,
    "low_memory": True,
    "max_matching_ngram_size": 3,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return descant.attach(toy())


def test_every_tolerated_field_is_tried() -> None:
    assert UNUSED.keys() == TOLERATED


@pytest.mark.parametrize("name", UNUSED)
def test_a_value_without_effect_is_a_warning_in_the_method(model: Any, name: str) -> None:
    plain = model.generate(IDS, max_new_tokens=6)
    for _ in range(2):  # a remembered config warns again
        with pytest.warns(UserWarning, match=rf"^`{name}` has no use .*, and is ignored: ") as found:
            assert torch.equal(model.generate(IDS, max_new_tokens=6, **{name: UNUSED[name]}), plain)
        assert [record.filename for record in found] == [__file__]
    with pytest.raises(descant.ConfigError, match=rf"`{name}` has no use"):
        descant.generate(model, IDS, max_new_tokens=6, **{name: UNUSED[name]})


@pytest.mark.parametrize("name", UNUSED)
def test_transformers_4_ignores_the_same(reference: Any, tiny: Any, name: str) -> None:
    llama = tiny("llama")
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    arguments = {"max_new_tokens": 6, name: UNUSED[name]}
    theirs = reference.generate(llama.folder, inputs, arguments)["sequences"]
    model = descant.attach(llama.model)
    try:
        with pytest.warns(UserWarning, match=rf"^`{name}` has no use"):
            ours = model.generate(**inputs, **arguments)
    finally:
        descant.detach(model)
    assert ours.tolist() == theirs.tolist()


def test_a_value_in_a_given_config_is_a_warning(model: Any) -> None:
    config = transformers.GenerationConfig(temperature=0.7, max_new_tokens=6)
    with pytest.warns(UserWarning, match=r"`temperature` has no use while `do_sample` is False, got 0\.7"):
        model.generate(IDS, generation_config=config)


def test_values_of_the_model_itself_are_expected() -> None:
    model = descant.attach(toy())
    model.generation_config.temperature = 0.7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(IDS, max_new_tokens=2)


@pytest.mark.parametrize(
    "fields", [{"xtc_threshold": 0.2}, {"diversity_penalty": 0.5}, {"num_return_sequences": 2}], ids=str
)
def test_what_transformers_refuses_or_lacks_is_refused(model: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(descant.ConfigError):
        model.generate(IDS, max_new_tokens=2, **fields)


def test_inputs_of_a_training_step_are_ignored_in_the_method(model: Any) -> None:
    plain = model.generate(IDS, max_new_tokens=6)
    given = {"labels": IDS, "num_items_in_batch": 4}
    assert torch.equal(model.generate(IDS, max_new_tokens=6, **given), plain)
    with pytest.raises(descant.InputError, match="`labels`"):
        descant.generate(model, IDS, max_new_tokens=6, labels=IDS)


@pytest.mark.parametrize(
    "fields",
    [{"penalty_alpha": 0.6, "top_k": 4}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}],
    ids=str,
)
def test_errors_name_the_pipeline_that_set_do_sample(fields: dict[str, Any]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained("models/stories15m")
    model = descant.attach(toy(vocab_size=len(tokenizer)))
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    hint = r"\(the pipeline sets do_sample=True unless it is given: pass do_sample=False to the pipeline\)$"
    with pytest.raises(descant.ConfigError, match=hint):
        pipe("Once", max_new_tokens=4, **fields)
    assert pipe("Once", max_new_tokens=4, do_sample=False, **fields)
    with pytest.raises(descant.ConfigError) as error:
        model.generate(IDS, do_sample=True, **fields)
    assert "pipeline" not in str(error.value)
