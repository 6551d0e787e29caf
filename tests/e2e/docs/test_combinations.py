"""The table of combinations equals the planner's verdicts."""

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import descant
from descant.config.validation import INCOMPATIBLE
from tools.docs import combinations


def test_the_page_is_current() -> None:
    page = combinations.PAGE.read_text(encoding="utf-8")
    assert page == combinations.render(), "run tools/docs/combinations.py"


FIELDS = {name for method in combinations.METHODS for name in method.fields}
REASONS = [reason for field, other, reason in INCOMPATIBLE if {field, other} <= FIELDS]


@pytest.mark.parametrize("reason", REASONS)
def test_every_clash_between_methods_stands_on_the_page(reason: str) -> None:
    assert reason in combinations.render()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained("models/smollm2")


@pytest.fixture(scope="module", params=["decoder-only", "encoder-decoder"])
def models(request: pytest.FixtureRequest, tokenizer: Any) -> tuple[Any, Any, bool]:
    """Two tiny models of a kind."""
    size, both = len(tokenizer), request.param == "encoder-decoder"
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        if both:
            config = T5Config(
                vocab_size=size,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
            made.append(T5ForConditionalGeneration(config).eval())
        else:
            own = LlamaConfig(
                vocab_size=size,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
            )
            made.append(LlamaForCausalLM(own).eval())
    return made[0], made[1], both


def test_the_table_equals_the_behaviour(models: tuple[Any, Any, bool], tokenizer: Any) -> None:
    first, second, both = models
    prompt = tokenizer("Once upon a time book", return_tensors="pt")
    joined = descant.ProxyTuning(first, second, first)
    wrong = []
    for one, other in itertools.combinations_with_replacement(combinations.METHODS, 2):
        reason = combinations.verdict(one, other, both)
        said = None
        try:
            descant.generate(
                joined if one.joint_model or other.joint_model else first,
                **prompt,
                **{**one.fields, **other.fields},
                eos_token_id=2,
                pad_token_id=2,
                max_new_tokens=4,
                tokenizer=tokenizer,
            )
        except descant.DescantError as error:
            said = str(error)
        if (reason is None) != (said is None) or (reason and said and reason not in said):
            wrong.append((one.name, other.name, reason, said))
    assert not wrong, "\n".join(map(str, wrong))


GUESSES = {"prompt lookup", "suffix lookup", "early exit"}


def test_a_draft_model_goes_with_what_prompt_lookup_goes_with(
    models: tuple[Any, Any, bool], tokenizer: Any
) -> None:
    first, second, both = models
    prompt = tokenizer("Once upon a time book", return_tensors="pt")
    joined = descant.ProxyTuning(first, second, first)
    [lookup] = [method for method in combinations.METHODS if method.name == "prompt lookup"]
    wrong = []
    for other in combinations.METHODS:
        if other.name in GUESSES or combinations.verdict(other, other, both) is not None:
            continue
        said = None
        try:
            descant.generate(
                joined if other.joint_model else first,
                **prompt,
                **other.fields,
                eos_token_id=2,
                pad_token_id=2,
                max_new_tokens=4,
                tokenizer=tokenizer,
                assistant_model=second,
            )
        except descant.DescantError as error:
            said = str(error)
        if (said is None) != (combinations.verdict(other, lookup, both) is None):
            wrong.append((other.name, said))
    assert not wrong, "\n".join(map(str, wrong))
