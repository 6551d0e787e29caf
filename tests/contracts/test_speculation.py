"""With and without drafts a call gives the same, greedy or seeded, with any processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import descant
from descant import GenerationConfig
from tests.contracts.configs import TEXTS, TRIE, evens, few, tokenizer
from tests.contracts.speculation import (
    ALWAYS,
    DRAFTERS,
    FEW,
    GREEDILY,
    drafted,
    few_words,
    inputs,
    same_call,
    seen,
    words,
)
from tests.contracts.subjects import MODELS
from tests.reference.parity.own import verdict
from tests.support.tiny_models import ARCHITECTURES

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"do_sample": True, "seed": 4},
    "seeded, cut": {"do_sample": True, "seed": [5, 6, 7, 8], "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "seeded, fanned": {"do_sample": True, "seed": 13, "num_return_sequences": 3},
}
SLOW = pytest.mark.slow


def _cases() -> list[Any]:
    """Models, drafters and methods; in CI every drafter on two models, and on the others a few."""
    whole = []
    for name in ARCHITECTURES:
        for drafter in DRAFTERS:
            if ARCHITECTURES[name].encoder_decoder and drafter == "early exit":
                continue
            for method in METHODS:
                shown = name in ("llama", "t5") or (name in MODELS and drafter in FEW)
                shown &= method in ("greedy", "seeded, fanned") if name == "llama" else method == "greedy"
                shown |= name in MODELS and drafter == "lookup" and method == "seeded, fanned"
                whole.append(pytest.param(name, drafter, method, marks=() if shown else SLOW))
    return whole


@pytest.mark.parametrize(("name", "drafter", "method"), _cases())
def test_drafts_change_nothing(name, drafter, method, tiny):
    """In a model's own words, and where it has so few that drafts are often right."""
    model, records = tiny(name), []
    for options in ({}, few_words(model)):
        given = {**METHODS[method], **options}
        records.append(same_call(model.model, inputs(model), given, drafted(model.model, drafter))[1])
    tries = seen(*records)
    if drafter == "its own draft model":
        assert tries.right == tries.tried > 0, f"{tries.right} of {tries.tried}"
    else:
        tries.check()


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("drafter", FEW)
def test_any_number_of_drafts(drafter, count, tiny):
    model = tiny("llama")
    fields = drafted(model.model, drafter)
    field = next(name for name in fields if name.endswith("num_tokens") or name == "num_assistant_tokens")
    _, guessed = same_call(model.model, inputs(model), few_words(model), {**fields, field: count})
    assert max(len(one.drafted) for one in guessed.speculation) <= count
    assert seen(guessed).tried > 0


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient", "adaptive"])
@pytest.mark.parametrize("drafter", FEW)
def test_any_schedule(drafter, schedule, tiny):
    model = tiny("llama")
    fields = {**drafted(model.model, drafter), "num_assistant_tokens_schedule": schedule}
    for method in ("greedy", "seeded"):
        same_call(model.model, inputs(model), {**few_words(model), **METHODS[method]}, fields)


@pytest.mark.parametrize(
    "lengths", [(1,), (40,), (1, 40, 3), (6, 6, 6), (9, 1, 1, 17, 2, 30, 5, 12)], ids=str
)
@pytest.mark.parametrize("drafter", FEW)
def test_any_batch(drafter, lengths, tiny):
    model = tiny("mistral")
    given = {**few_words(model), "max_new_tokens": 12}
    _, guessed = same_call(model.model, inputs(model, lengths), given, drafted(model.model, drafter))
    assert seen(guessed).tried > 0


def test_a_draft_model_of_another_kind(tiny):
    """Rotary positions for learned ones, a window for none, an encoder-decoder for another."""
    from tests.unit.decoding.guidance.pairs import made

    for name, other in (("llama", "gpt2"), ("gpt2", "mistral"), ("opt", "llama"), ("t5", "bart")):
        target, guesser, subject = made(name), made(other, 1), tiny(name)
        given = {key: value.clamp(max=96) for key, value in inputs(subject).items()}
        options = {"suppress_tokens": list(range(6, 97)), "min_new_tokens": 12}
        drafts = {"assistant_model": guesser, "num_assistant_tokens": 3, **GREEDILY}
        for method in ("greedy", "seeded"):
            _, guessed = same_call(target, given, {**options, **METHODS[method]}, drafts)
            seen(guessed).check()


# ------------------------------------------------------------------------ what shapes the scores
def _later_than(count: int) -> Any:
    """A user's processor whose answer hangs on every token it is shown, and on how many there are."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = torch.arange(1, input_ids.shape[1] + 1)
        salt = (input_ids * place).sum(1, keepdim=True) % 7
        lifted = (torch.arange(scores.shape[1]) + salt) % 5 == 0
        return torch.where(lifted & torch.tensor(input_ids.shape[1] > count), scores + 1.5, scores)

    return process


SHAPES: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "no n-gram twice": {"no_repeat_ngram_size": 3},
    "no n-gram twice in a window": {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 6},
    "dry": {"dry_multiplier": 1.5, "dry_allowed_length": 2},
    "an end forced": {"forced_eos_token_id": 2, "max_new_tokens": 11},
    "at least": {"min_new_tokens": 17},
    "an end ever likelier": {"exponential_decay_length_penalty": (4, 1.4)},
    "renormalised": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "a prefix function": {"prefix_allowed_tokens_fn": evens},
    "a narrow prefix function": {"prefix_allowed_tokens_fn": few},
    "a trie": {"prefix_allowed_tokens_fn": TRIE},
    "a thought of few tokens": {"thinking_budget": 4, "thinking_end": [30, 31, 30]},
    "a user's processor": {"logits_processor": [_later_than(9)]},
    "an order of its own": {
        "processor_order": ["temperature", "top_k", "repetition_penalty"], "repetition_penalty": 1.3,
        "top_k": 9, "temperature": 0.7, "do_sample": True, "seed": 1,
    },
    "cut": {"do_sample": True, "seed": 2, "temperature": 1.4, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "typical": {"do_sample": True, "seed": 3, "typical_p": 0.7, "eta_cutoff": 0.01},
    "sigma": {"do_sample": True, "seed": 3, "top_n_sigma": 1.5, "top_h": 0.7},
    "mirostat": {"do_sample": True, "seed": 3, "mirostat_tau": 2.0, "mirostat_eta": 0.4},
    "adaptive p": {"do_sample": True, "seed": 3, "adaptive_p_target": 0.4, "adaptive_p_decay": 0.6},
    "xtc": {"do_sample": True, "seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "dynamic temperature": {"do_sample": True, "seed": 3, "dynamic_temperature_range": 0.8},
}  # fmt: skip
OWN = ("a prefix function", "a narrow prefix function", "a trie", "a thought of few tokens", "an end forced")
IN_SHORT = ("lookup", "draft model")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "drafter", [*IN_SHORT, *(pytest.param(one, marks=SLOW) for one in ("suffix", "early exit"))]
)
def test_whatever_shapes_the_scores(drafter, shape, tiny):
    """Each draft is verified with the processors' scores at its position."""
    model = tiny("llama")
    options = SHAPES[shape] if shape in OWN else {**few_words(model), **SHAPES[shape]}
    plain, guessed = same_call(model.model, inputs(model), options, drafted(model.model, drafter))
    assert seen(guessed).tried > 0
    if shape == "an end forced":
        assert all(model.eos in row[-11:] for row in plain.sequences.tolist())


@pytest.mark.parametrize("drafter", IN_SHORT)
def test_words_that_are_bad_or_favoured(drafter, tiny):
    model = tiny("llama")
    one, two, three, four, five = words(model)
    base = few_words(model)
    for shape in (
        {"bad_words_ids": [[one], [two, three], [four, five, four]]},
        {"sequence_bias": {(one,): 1.5, (two, three): -4.0, (five, four, three): 6.0}},
        {"logit_bias": {one: 2.0, two: -3.0}},
        {"begin_suppress_tokens": [one, three]},
    ):
        _, guessed = same_call(model.model, inputs(model), {**base, **shape}, drafted(model.model, drafter))
        seen(guessed).check()


@pytest.mark.parametrize("drafter", IN_SHORT)
def test_what_shapes_the_scores_of_an_encoder_decoder(drafter, tiny):
    model = tiny("t5")
    for shape in (
        {"encoder_repetition_penalty": 1.4, "repetition_penalty": 1.2},
        {"encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 3},
        {"forced_bos_token_id": words(model)[0], "forced_eos_token_id": model.eos, "max_new_tokens": 12},
    ):
        _, guessed = same_call(
            model.model, inputs(model), {**few_words(model), **shape}, drafted(model.model, drafter)
        )
        assert seen(guessed).tried > 0


@pytest.mark.ci_cases("draft model", "lookup")
@pytest.mark.parametrize("drafter", FEW)
def test_guidance_and_layers(drafter, deep_llama, tiny):
    """Model wrappers apply to drafts as well."""
    model, fanned = tiny("llama"), {"do_sample": True, "seed": 13, "num_return_sequences": 3}
    negative = {"negative_prompt_ids": torch.tensor([[7, 8, 9]] * 4)}
    records = []
    for layers in ("low", [0, 2]):
        for method in ({}, {**fanned, "temperature": 3.0}):
            given = {"dola_layers": layers, **method, "min_new_tokens": 12, "max_new_tokens": 12}
            records.append(same_call(deep_llama, inputs(model), given, drafted(deep_llama, drafter))[1])
    if drafter != "early exit":  # which is refused: the memory holds two texts a row
        for scale, more in ((1.7, {}), (2.5, negative)):
            for method in ({}, fanned):
                given = {**few_words(model), "guidance_scale": scale, **method, "max_new_tokens": 12}
                asked = {**inputs(model), **more}
                records.append(same_call(model.model, asked, given, drafted(model.model, drafter))[1])
    assert all(seen(one).tried > 0 for one in records)
    seen(*records).check()


@pytest.fixture(scope="module")
def deep_llama() -> Any:
    """Five layers, so that DoLa has some to choose from."""
    from tests.unit.decoding.speculative.rig import network

    return network("llama", 2, layers=5)


def test_a_batch_of_calls_that_differ(tiny):
    """One config a row, some with drafts and some without, one drafter or several."""
    model = tiny("llama")
    base = {**few_words(model), "max_new_tokens": 15}
    kinds = [
        {},
        {"do_sample": True, "seed": 3},
        {"repetition_penalty": 1.2},
        {"stop_token_ids": words(model)[:1]},
    ]
    lookup = {"prompt_lookup_num_tokens": 4, **ALWAYS}
    suffix = {"suffix_lookup_num_tokens": 3, **ALWAYS}
    plain = descant.generate(
        model.model, **inputs(model), generation_config=[GenerationConfig(**base, **one) for one in kinds]
    )
    for drafts in ([lookup] * 4, [lookup, suffix, {}, lookup], [{}, {}, lookup, suffix]):
        configs = [GenerationConfig(**base, **one, **more) for one, more in zip(kinds, drafts, strict=True)]
        guessed = descant.generate(model.model, **inputs(model), generation_config=configs)
        assert guessed.tolist() == plain.tolist()


# ------------------------------------------------------------------------ what ends a row
def _ends(model: Any) -> dict[str, dict[str, Any]]:
    said = "".join(TEXTS[token] for token in words(model))
    return {
        "a string": {"stop_strings": [said[0] + said[1], said[2] * 2], "tokenizer": tokenizer()},
        "a pattern": {"stop_regex": f"[{said[0]}{said[3]}]{{2}}", "tokenizer": tokenizer()},
        "tokens": {"stop_token_ids": words(model)[2:3]},
        "several ends": {"eos_token_id": [model.eos, words(model)[1]]},
        "no end": {"eos_token_id": None},
        "a criterion": {"stopping_criteria": [verdict("rows", 5, 3)]},
        "a criterion for all": {"stopping_criteria": [verdict("bool", 21)]},
        "a length": {"max_length": 23, "max_new_tokens": None},
        "one token": {"max_new_tokens": 1},
        "much time": {"max_time": 1000.0},
    }  # fmt: skip


@pytest.mark.ci_cases("draft model", "lookup")
@pytest.mark.parametrize("drafter", FEW)
def test_whatever_ends_a_row(drafter, tiny):
    """A run of drafts ends where the row does, at the very token."""
    model = tiny("llama")
    records = []
    for end, options in _ends(model).items():
        for method in ("greedy", "seeded, fanned"):
            given = {**few_words(model), **METHODS[method], **options}
            if end != "no end":
                del given["min_new_tokens"]
            _, guessed = same_call(model.model, inputs(model), given, drafted(model.model, drafter))
            records.append(guessed)
            assert end == "one token" or seen(guessed).tried > 0, end
    seen(*records).check()


# ------------------------------------------------------------------------ no drafter
def test_models_that_read_one_by_one_are_refused():
    from tests.unit.decoding.guidance.pairs import made

    recurrent = made("mamba", 4)
    given = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]), "max_new_tokens": 4}
    for fields in (
        {"prompt_lookup_num_tokens": 3},
        {"suffix_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
    ):
        with pytest.raises(descant.ConfigError, match=rf"`{next(iter(fields))}`.* one by one"):
            descant.generate(recurrent, **given, **fields)
    with pytest.raises(descant.DescantError, match=r"`assistant_model` needs a model that reads several"):
        descant.generate(recurrent, **given, assistant_model=made("llama"))


def test_a_recurrent_draft_model():
    """It takes back what it has read, and reads one by one; it never changes a token."""
    from tests.unit.decoding.guidance.pairs import made

    given = {"input_ids": torch.tensor([[5, 6, 7, 5, 6], [0, 0, 9, 8, 9]])}
    given["attention_mask"] = (given["input_ids"] > 0).long()
    options = {"suppress_tokens": list(range(8, 97)), "min_new_tokens": 12}
    drafts = {"assistant_model": made("mamba", 4), "num_assistant_tokens": 3, **GREEDILY}
    for method in METHODS.values():
        seeds = {"seed": 5} if "seed" in method else {}
        _, guessed = same_call(made("llama"), given, {**options, **method, **seeds}, drafts)
        seen(guessed).check()
